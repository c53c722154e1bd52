"""``python -m pytest_vram``: the same as ``pytest-vram``."""

from pytest_vram.cli import main

if __name__ == "__main__":
    main(prog_name="pytest-vram")
