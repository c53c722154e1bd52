"""What a simulated script saves: shapes without values, which nobody may mistake for a model."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

#: What programs call files of weights that they open themselves.
_SUFFIXES = {".pt", ".pth", ".ckpt", ".safetensors", ".tar"}


class Checkpoints:
    """While it is entered, ``torch.save`` and safetensors leave files alone that are there already
    (a simulated run must not overwrite a trained model), and what they write is removed on leaving:
    until then the script finds its own files as it expects them.

    So it is with files of weights that the script opens itself (``open("model.pt", "wb")`` would
    empty a trained one at once; what is written then goes to a temporary file), and with renames
    of what was saved."""

    def __init__(self) -> None:
        self._written: dict[Path, None] = {}
        self._spared: dict[Path, None] = {}
        self._new: set[Path] = set()  #: opened for writing, and not there before
        self._undo = contextlib.ExitStack()

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each thing that happened to a file."""
        notes = []
        if self._spared:
            notes.append(f"not overwritten, there are no values to save: {_names(self._spared)}")
        if self._written:
            notes.append(f"saved without values, and removed again: {_names(self._written)}")
        return tuple(notes)

    def __enter__(self) -> Checkpoints:
        self._replace(torch, "save")
        self._replace(torch.jit, "save")
        self._replace(torch.jit._script.RecursiveScriptModule, "save")
        if importlib.util.find_spec("safetensors") is not None:
            self._replace(importlib.import_module("safetensors.torch"), "serialize_file")
        self._swap(builtins, "open", opening := self._opening(builtins.open))
        self._swap(io, "open", opening)
        for name in ("rename", "replace"):
            self._swap(os, name, self._renaming(getattr(os, name)))
        return self

    def _swap(self, module: Any, name: str, new: Any) -> None:
        self._undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, new)

    def _replace(self, module: Any, name: str) -> None:
        """Wrap what writes its first argument to the file that its second one names."""
        self._swap(module, name, self._around(getattr(module, name)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()
        for path in self._written:
            path.unlink(missing_ok=True)

    def _around(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            path = _path(f)
            if path is None:
                opened = _path(getattr(f, "name", None))
                if opened in self._new:
                    self._written[opened] = None
                save(obj, f, *args, **kwargs)
            elif path in self._written or not path.exists():
                if path.parent.is_dir():  # else saving fails, and says why
                    self._written[path] = None
                save(obj, f, *args, **kwargs)
            else:
                self._spared[path] = None

        return saving

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = _path(file) if "b" in mode and ("w" in mode or "x" in mode) else None
            if path is None:
                return real(file, mode, *args, **kwargs)
            weights = path.suffix in _SUFFIXES and path.parent.is_dir()
            if weights and path.exists() and path not in self._written:
                self._spared[path] = None
                return tempfile.TemporaryFile(mode.replace("x", "w"))
            if weights:
                self._written[path] = None
            elif not path.exists():
                self._new.add(path)
            return real(file, mode, *args, **kwargs)

        return opening

    def _renaming(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def renaming(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            new = _path(target) if _path(source) in self._written else None
            if new is not None and new.exists() and new not in self._written:
                self._spared[new] = None
                return
            real(source, target, *args, **kwargs)
            if new is not None:
                self._written[new] = None

        return renaming


def _path(f: Any) -> Path | None:
    """The file that ``f`` names; ``None`` for a buffer."""
    return Path(f).absolute() if isinstance(f, (str, os.PathLike)) else None


def _names(paths: dict[Path, None], most: int = 3) -> str:
    shown = [_short(path) for path in list(paths)[:most]]
    rest = len(paths) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
