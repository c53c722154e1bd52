"""A training run, as it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pytest_vram.planning.activations import Attention, Recompute
from pytest_vram.planning.shapes import ModelShape, PlanError
from pytest_vram.planning.states import (
    OPTIMIZERS,
    PRECISIONS,
    Lora,
    Optimizer,
    Precision,
    Quantisation,
)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the work is spread. ``data`` ranks shard by ZeRO stage ``zero`` (3 is FSDP);
    ``tensor``, ``context``, ``pipeline`` and ``expert`` are the degrees of those parallelisms,
    ``sequence`` turns on Megatron's sequence parallelism among the tensor ranks."""

    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "context", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} parallel degree must be at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"ZeRO has stages 0 to 3, not {self.zero}")

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    def check(self, shape: ModelShape) -> None:
        """Refuse what cannot be cut."""
        for tower in shape.towers:
            if tower.heads % self.tensor:
                raise PlanError(
                    f"{tower.heads} heads do not divide over {self.tensor} tensor ranks"
                )
            if tower.ffn % self.tensor:
                raise PlanError(f"ffn {tower.ffn} does not divide over {self.tensor} tensor ranks")
            if tower.experts % self.expert:
                raise PlanError(
                    f"{tower.experts} experts do not divide over {self.expert} expert ranks"
                )
        if self.pipeline > shape.layers:
            raise PlanError(f"{self.pipeline} pipeline stages for {shape.layers} layers")


@dataclass(frozen=True, slots=True)
class Offload:
    """What lives in host memory, and how fast the bus to it is (bytes a second).

    ``step_on``: "gpu" brings states over for the step and back; "cpu" steps on the host, so only
    gradients go down and parameters come up (ZeRO-Offload, arXiv 2101.06840)."""

    what: frozenset[str] = frozenset()
    bandwidth: float = 20e9
    step_on: Literal["gpu", "cpu"] = "gpu"

    def __post_init__(self) -> None:
        known = {"optimizer", "parameters", "activations"}
        if unknown := sorted(self.what - known):
            raise PlanError(f"cannot offload {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if self.bandwidth <= 0:
            raise PlanError("the bus needs a positive bandwidth")


@dataclass(frozen=True, slots=True)
class Setup:
    """One training run, as asked. ``step`` is the optimizer's implementation: PyTorch takes
    foreach unless told otherwise. ``held``: the caller keeps the model's output until the step is
    over (``outputs = model(...); outputs.loss.backward()``). ``buckets``: DistributedDataParallel's
    gradient buckets are copies (its default, ``gradient_as_bucket_view=False``)."""

    shape: ModelShape
    batch: int = 1
    sequence: int = 1024
    accumulation: int = 1
    precision: Precision = PRECISIONS["fp32"]
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    step: Literal["foreach", "fused", "loop"] = "foreach"
    attention: Attention = "flash"
    dropout: float = 0.0
    recompute: Recompute = field(default_factory=Recompute)
    lora: Lora | None = None
    quantisation: Quantisation = ""
    parallel: Parallel = field(default_factory=Parallel)
    offload: Offload = field(default_factory=Offload)
    held: bool = True
    buckets: bool = True
    workspace: int = 8_519_680  #: cuBLAS, per thread that launches matrix products; two do
    threads: int = 108 * 2048  #: that the card holds at a time (A100)
    buffers: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "accumulation"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise PlanError(f"dropout is a share between 0 and 1, not {self.dropout}")
        if self.quantisation and self.lora is None:
            raise PlanError("quantised weights cannot be trained: add LoRA adapters")
        limit = self.shape.positions or self.shape.longest
        if limit and self.sequence > limit:
            raise PlanError(
                f"{self.shape.name} has {limit} positions, "
                f"not {self.sequence} (a longer sequence cannot be embedded)"
            )
        self.parallel.check(self.shape)

    @property
    def tokens(self) -> int:
        """Sequence positions per sample that the towers see."""
        return self.shape.tokens_per_sample or self.sequence


def attention_kernel(setup: Setup) -> Attention:
    """What runs when ``setup.attention`` is asked for.

    PyTorch's fused kernels take grouped key/value heads in 16 bits only: the memory-efficient one,
    the only one for fp32, does not (``sdp_utils.cpp``, ``check_grouped_query_attention``, PyTorch
    2.13). What is left is the math kernel, whose scores are S x S.
    """
    shape = setup.shape
    if setup.attention == "explicit" or shape.attention == "explicit":
        return "explicit"
    grouped = any(tower.kv_heads < tower.heads for tower in shape.towers)
    unfused = grouped and setup.precision.compute == 4 and not shape.repeats_kv
    return "math" if unfused or shape.attention == "math" else setup.attention
