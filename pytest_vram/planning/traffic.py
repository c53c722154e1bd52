"""What offloading costs: bytes over the bus to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_vram.planning.answers import Plan
from pytest_vram.planning.flows import Flow
from pytest_vram.planning.ranks import Rank


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes over the bus per optimizer step, and the seconds that takes if nothing overlaps."""

    down: int
    up: int
    seconds: float

    @property
    def total(self) -> int:
        return self.down + self.up


def offload_traffic(plan: Plan) -> Traffic:
    """What offloading costs a step.

    Step on the GPU: states and master weights come over and go back, 2 (s + m) N. With 8-bit
    m and v (2 bytes) and a master copy (4) that is 12 bytes per parameter: 84 GB for 7B, 4.2 s at
    20 GB/s. Step on the CPU: gradients go down, parameters come up. Offloaded parameters are read
    once each way through the layers (forward and backward); offloaded activations go both ways.
    """
    setup = plan.setup
    rank = Rank(setup, 0)
    over = setup.parallel.data if setup.parallel.zero >= 1 else 1
    trained = sum(weight.total * rank.share(weight) for weight in rank.trained) / over
    updated = setup.lora.size if setup.lora else setup.precision.updated
    states = setup.optimizer.per_parameter(updated)
    master = 0 if setup.lora else setup.precision.master
    down = up = 0.0
    if "optimizer" in setup.offload.what:
        if setup.offload.step_on == "cpu":
            down += trained * setup.precision.gradient
            up += trained * setup.precision.parameter
        else:
            down += trained * (states + master)
            up += trained * (states + master)
    if "parameters" in setup.offload.what:
        up += 2 * setup.accumulation * rank.size(rank.base, rank.base_element)
    if "activations" in setup.offload.what:
        bare = replace(setup, offload=replace(setup.offload, what=frozenset()))
        moved = setup.accumulation * Flow.of(Rank(bare, 0)).kept
        down, up = down + moved, up + moved
    return Traffic(int(down), int(up), (down + up) / setup.offload.bandwidth)
