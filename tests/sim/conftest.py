"""What the tests of the simulated GPU share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pytest_vram.sim import Simulation, find_profile


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    gc.collect()
    with Simulation(find_profile("a100-80gb"), alloc_conf="") as simulation:
        yield simulation
