"""The command line as a whole: help, exit codes, what is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from pytest_vram import __version__
from pytest_vram.cli import COMMANDS, main


def test_help_lists_every_command_and_every_exit_code():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"  {name} " in result.output
    for line in (
        "0  done; the answer is yes",
        "1  the answer is no",
        "2  bad usage or bad input",
        "3  could not be determined",
        "4  the simulated script failed by itself",
    ):
        assert line in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_in_80_columns(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: pytest-vram {name}") or "Usage:" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"pytest-vram, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(main, ["plna"])
    assert result.exit_code == 2
    assert "No such command 'plna'" in result.output


@pytest.mark.parametrize("command", [["plan", "gpt2", "-g", "t4", "--json"], ["gpus"], ["--help"]])
def test_planning_does_not_import_torch(command):
    code = (
        "import sys\n"
        "from pytest_vram.cli import main\n"
        f"main({command!r}, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m():
    done = subprocess.run(
        [sys.executable, "-m", "pytest_vram", "gpus", "t4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "15,828,320,256 (14.74 GiB)" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_PYTEST_VRAM_COMPLETE" in result.output
