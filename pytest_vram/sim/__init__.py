"""The simulated GPU: PyTorch's eager CUDA memory, to the byte, without a GPU."""

from __future__ import annotations

from pytest_vram.sim.profiles import Profile, find_profile

__all__ = ["Profile", "Simulation", "find_profile"]


def __getattr__(name: str) -> object:
    # Simulation brings torch; profiles do not, and the planner only needs those.
    if name == "Simulation":
        from pytest_vram.sim.simulation import Simulation

        return Simulation
    raise AttributeError(name)
