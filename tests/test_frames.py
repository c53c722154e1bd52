"""Whose code a file is, and how its lines are named."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import weakref
from pathlib import Path

import pytest
import torch

import pytest_vram
from pytest_vram.frames import describe_line, local_variables, nearest_frame, owner, user_line
from pytest_vram.places import shown_from

_SITE = Path("/home/me/pytest-models/.venv/lib/python3.11/site-packages")


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("/home/me/pytest-models/train/loss.py", "user"),
        (str(_SITE / "accelerate" / "optimizer.py"), "library"),
        ("/usr/lib/python3/dist-packages/transformers/trainer.py", "library"),
        (str(_SITE / "_pytest" / "python.py"), "machinery"),
        (str(_SITE / "pytest_asyncio" / "plugin.py"), "machinery"),
        (str(Path(torch.__file__).parent / "optim" / "adam.py"), "machinery"),
        (str(Path(pytest_vram.__file__).parent / "training.py"), "machinery"),
        (json.__file__, "machinery"),
        ("<string>", "machinery"),
    ],
)
def test_whose_a_file_is(path: str, whose: str) -> None:
    assert owner(path) == whose


def test_lines_are_shown_from_the_directory_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loss = str(tmp_path / "train" / "loss.py")
    assert describe_line(loss, 41, "compute_loss") == "train/loss.py:41 compute_loss"
    with shown_from(tmp_path / "train"):
        assert describe_line(loss, 41, "compute_loss") == "loss.py:41 compute_loss"
    with shown_from(tmp_path / "elsewhere"):
        assert describe_line(loss, 41, "compute_loss") == f"{loss}:41 compute_loss"


@pytest.mark.parametrize("site", ["site-packages", "dist-packages"])
def test_installed_files_are_shown_by_package(site: str) -> None:
    path = os.path.join(sysconfig.get_paths()["stdlib"], site, "peft", "lora.py")
    assert describe_line(path, 7, "forward") == "peft/lora.py:7 forward"


def _call_through(path: Path, call: object) -> object:
    """``call()``, from a function of a file at ``path``."""
    scope = {"call": call}
    exec(compile("def train():\n    return call()\n", str(path), "exec"), scope)
    return scope["train"]()  # type: ignore[operator]


def test_the_line_of_a_library_names_the_one_that_called_it() -> None:
    found = _call_through(_SITE / "accelerate" / "optimizer.py", user_line)
    assert isinstance(found, str)
    library, _, mine = found.partition(" (called from ")
    assert library == "accelerate/optimizer.py:2 train"
    assert re.fullmatch(r"\S*test_frames\.py:\d+ _call_through\)", mine)


def test_allocations_are_those_of_the_nearest_line_that_is_not_machinery() -> None:
    library = _SITE / "accelerate" / "optimizer.py"
    code, line = _call_through(library, nearest_frame)  # type: ignore[misc]
    assert (code.co_filename, line) == (str(library), 2)
    code, _ = _call_through(_SITE / "pluggy" / "_callers.py", nearest_frame)  # type: ignore[misc]
    assert code.co_name == "_call_through"


def test_reading_variables_of_a_frame_keeps_none_alive() -> None:
    class Tensor:
        pass

    frame = sys._getframe()
    tensor = Tensor()
    alive = weakref.ref(tensor)
    assert local_variables(frame)["tensor"] is tensor
    del tensor
    assert alive() is None
