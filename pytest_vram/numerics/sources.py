"""The statement that fills a list, a dict or a sum, found in the user's source."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from pytest_vram.frames import describe_line

_FILLS = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Scope:
    """A name as the user wrote it (``self.history``, ``logs['loss']``) and the code that knows it.
    ``code`` is None where no source is to be read."""

    name: str
    code: CodeType | None = None

    def filled_at(self) -> str:
        """``train.py:41 fit: self.history.append(loss)``; empty where no statement is found."""
        if self.code is None:
            return ""
        tree = _tree(self.code.co_filename)
        # Of an element what adds to the whole, of an attribute what its methods do.
        owner, _, attribute = self.name.partition(".")
        names = (
            self.name,
            self.name.rpartition("[")[0],
            owner and attribute and f"self.{attribute}",
        )
        found = _fills(tree, {*filter(None, names)}) if tree is not None else []
        here = [one for one in found if self._contains(one)]
        if not here:
            # An attribute may be filled by any function of the file, a variable only by its own.
            here = found if "." in self.name or self.code.co_freevars else []
        if not here:
            return ""
        first = here[0]
        text = linecache.getline(self.code.co_filename, first.line).strip()
        return f"{describe_line(self.code.co_filename, first.line, first.function)}: {text}"

    def _contains(self, fill: _Fill) -> bool:
        assert self.code is not None
        return self.code.co_firstlineno in fill.functions


@dataclass(frozen=True, slots=True)
class _Fill:
    line: int
    function: str
    functions: tuple[int, ...]  #: first lines of the functions around it


@lru_cache(maxsize=16)
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def _fills(tree: ast.AST, names: set[str]) -> list[_Fill]:
    found = []
    for node, around in _walk(tree, ()):
        if names & _written_by(node):
            function = getattr(around[-1], "name", "<lambda>") if around else "<module>"
            found.append(_Fill(_line(node), function, tuple(map(_first_line, around))))
    return found


_Nested = tuple[ast.AST, tuple[ast.AST, ...]]  # a node and the functions around it


def _walk(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[_Nested]:
    for child in ast.iter_child_nodes(node):
        yield child, around
        yield from _walk(child, (*around, child) if isinstance(child, _FUNCTIONS) else around)


def _written_by(node: ast.AST) -> set[str]:
    """What a statement adds to: ``a`` of ``a.append(x)``, ``a += x``, ``a[i] = x``, ``a = a + x``
    and ``a.setdefault(k, []).append(x)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr not in _FILLS:
            return set()
        inner = node.func.value
        return _written_by(inner) or {ast.unparse(inner)}
    if isinstance(node, ast.AugAssign):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.Assign):
        return _assigned(node)
    return set()


def _assigned(node: ast.Assign) -> set[str]:
    """Elements that are set, and names that come out of themselves (``_, h = rnn(x, h)``)."""
    targets: list[ast.expr] = []
    for target in node.targets:
        targets += target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    elements = {ast.unparse(one.value) for one in targets if isinstance(one, ast.Subscript)}
    reads = (ast.Name, ast.Attribute)
    read = {ast.unparse(one) for one in ast.walk(node.value) if isinstance(one, reads)}
    return elements | ({ast.unparse(target) for target in targets} & read)


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _first_line(function: ast.AST) -> int:
    """As in ``co_firstlineno``: that of the first decorator."""
    decorators = getattr(function, "decorator_list", [])
    return min([_line(function), *map(_line, decorators)])
