"""What people see of an error in a pass: their own frames, not the plugin's."""

from __future__ import annotations

import re
from types import TracebackType

from pytest_vram.places import is_library, is_package

#: What stands in PyTorch between a call and the mode that answers it.
_DISPATCH = re.compile(
    r"[/\\]torch[/\\]"
    r"(_dynamo|_subclasses|_ops\.py|_compile\.py|overrides\.py|utils[/\\](_stats|_device))"
)


def without_plugin(error: BaseException) -> BaseException:
    """``error``, with the frames of this package gone from its traceback, and those that PyTorch
    ran on its behalf: on a GPU they would not be there. Errors that only these frames saw are no
    longer named as its cause. Changes ``error`` itself."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _kept(current.__traceback__) or current.__traceback__
        cause = current.__cause__ or current.__context__
        if cause is not None and not _saw_a_user(cause.__traceback__):
            current.__cause__, current.__context__ = None, None
            cause = None
        current = cause
    return error


def file_of(error: BaseException) -> str:
    """The source file that raised ``error``, or called the C++ code that did."""
    traceback, path = error.__traceback__, ""
    while traceback is not None:
        path, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    return path


def _kept(traceback: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    behind_plugin = False
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if is_package(path):
            behind_plugin = True
            _drop_dispatch(entries)
        elif not behind_plugin or not is_library(path):
            behind_plugin = False
            entries.append(traceback)
        traceback = traceback.tb_next
    rebuilt: TracebackType | None = None
    for entry in reversed(entries):
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rebuilt


def _drop_dispatch(entries: list[TracebackType]) -> None:
    """What led from the caller's line into the plugin. A function that handed itself over to a mode
    (``handle_torch_function``) goes as well: it has not run, and what it would have said comes of
    its caller's line."""
    handed_over = False
    while entries:
        code = entries[-1].tb_frame.f_code
        if not handed_over and not _DISPATCH.search(code.co_filename):
            return
        handed_over = code.co_name == "handle_torch_function"
        entries.pop()


def _saw_a_user(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if not is_library(traceback.tb_frame.f_code.co_filename):
            return True
        traceback = traceback.tb_next
    return False
