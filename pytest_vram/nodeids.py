"""Test ids as pytest writes them."""

from __future__ import annotations

from collections.abc import Iterable


def split_id(nodeid: str) -> tuple[str, str]:
    """``tests/test_a.py::TestX::test_y[p]`` -> module file and raw test name."""
    module, _, test = nodeid.partition("::")
    return module, test or module.rpartition("/")[2]


def modules_of(nodeids: Iterable[str]) -> set[str]:
    return {split_id(nodeid)[0] for nodeid in nodeids}
