"""The fixed bills: bytes per parameter for weights, gradients, master copies and optimizer state.

All figures are bytes. A *precision* says in what form each of them is kept, an *optimizer* which
tensors it keeps per parameter; the two are independent, so every combination has a price.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pytest_vram.planning.shapes import PlanError, Weight

#: The caching allocator rounds every request up to this (c10/cuda/CUDACachingAllocator,
#: ``kMinBlockSize``).
BLOCK = 512


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of everything that has a precision.

    ``residual`` is the stream between layers: under autocast it stays fp32, because additions
    promote. ``cache`` is true where autocast keeps a low-precision copy of each fp32 matrix.
    ``linear_input`` is what a linear layer keeps of its input for the weight gradient.

    Sources: Micikevicius et al. 2017 (arXiv 1710.03740) for master weights; PyTorch's
    ``aten/src/ATen/autocast_mode.cpp`` for the cache; arXiv 2209.05433 for FP8.
    """

    name: str
    parameter: int
    gradient: int
    master: int
    compute: int
    residual: int
    cache: bool = False
    linear_input: int = 0  #: 0: as ``compute``
    weight_copies: int = 0  #: FP8: quantised weight and its transpose, bytes per matrix element
    says: str = ""

    @property
    def input(self) -> int:
        return self.linear_input or self.compute

    @property
    def updated(self) -> int:
        """Element size of what the optimizer updates, hence of its states: master or parameter."""
        return self.master or self.parameter


_LOW = {"bf16": "bfloat16", "fp16": "float16"}
PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("fp32", 4, 4, 0, 4, 4, says="everything in float32"),
    **{
        key: Precision(
            key, 4, 4, 0, 2, 4, cache=True, says=f"autocast to {long}: parameters stay float32"
        )
        for key, long in _LOW.items()
    },
    **{
        f"{key}-pure": Precision(
            f"{key}-pure", 2, 2, 4, 2, 2, says=f"{long} parameters, float32 master weights"
        )
        for key, long in _LOW.items()
    },
    **{
        f"{key}-plain": Precision(
            f"{key}-plain", 2, 2, 0, 2, 2, says=f"{long} parameters, no master weights"
        )
        for key, long in _LOW.items()
    },
    "fp8": Precision(
        "fp8",
        2,
        2,
        4,
        2,
        2,
        linear_input=2,  # an E4M3 copy and its transpose, one byte each
        weight_copies=2,
        says="bf16 parameters with float32 master weights; matrices and linear inputs also in FP8",
    ),
}


def find_precision(name: str) -> Precision:
    """The precision scheme called ``name``; the error suggests the nearest."""
    if name in PRECISIONS:
        return PRECISIONS[name]
    near = difflib.get_close_matches(name.lower(), PRECISIONS, n=2)
    raise PlanError(
        f"unknown precision {name!r}; "
        + (f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(PRECISIONS)}")
    )


@dataclass(frozen=True, slots=True)
class State:
    """One tensor that an optimizer keeps per parameter tensor.

    ``size`` is bytes per element; 0 means the element size of what is updated. ``block`` is the
    number of elements that share one float32 scale in a quantised state. ``matrix_only`` states
    exist for matrices alone.
    """

    name: str
    size: float = 0
    block: int = 0
    factored: bool = False
    matrix_only: bool = False
    copies: int = 1

    def per_element(self, updated: int) -> float:
        scale = 4 / self.block if self.block else 0
        return self.copies * ((self.size or updated) + scale)

    def bytes_of(self, weight: Weight, updated: int) -> int:
        """Bytes for one tensor of ``weight``'s shape, without block rounding."""
        size = self.size or updated
        if self.matrix_only and len(weight.shape) < 2:
            return 0
        if self.factored and len(weight.shape) >= 2:
            rows, columns = weight.shape[-2:]
            lead = weight.numel // (rows * columns)
            return int(lead * (rows + columns) * size)
        if self.block and weight.numel < 4096:  # bitsandbytes keeps small tensors in float32
            return self.copies * weight.numel * 4
        scales = 4 * -(-weight.numel // self.block) if self.block else 0
        return self.copies * (int(weight.numel * size) + scales)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``temporaries`` is what the default foreach implementation holds for a moment during
    ``step()``, in units of the updated parameters; fused implementations hold none."""

    name: str
    states: tuple[State, ...] = ()
    temporaries: float = 1.0
    fusible: bool = False
    paged: bool = False
    says: str = ""

    def per_parameter(self, updated: int) -> float:
        """State bytes per parameter of a large matrix."""
        return sum(state.per_element(updated) for state in self.states if not state.factored)

    def bytes_for(self, weights: Iterable[Weight], updated: int, *, rounded: bool = True) -> int:
        """State bytes for these parameter tensors, each tensor rounded up to the allocator's
        block unless ``rounded`` is false."""
        total = 0
        for weight in weights:
            for state in self.states:
                size = state.bytes_of(weight, updated)
                total += weight.count * (-(-size // BLOCK) * BLOCK if rounded else size)
        return total


def _full(*names: str) -> tuple[State, ...]:
    return tuple(State(name) for name in names)


def _quantised(*names: str, block: int = 256) -> tuple[State, ...]:
    return tuple(State(name, size=1, block=block) for name in names)


_ADAM = ("exp_avg", "exp_avg_sq")
#: Optimizers by name. States of ``torch.optim`` are read from PyTorch 2.13 ``torch/optim`` and
#: checked against it in the tests; foreach temporaries are measured the same way. Eight-bit states
#: are bitsandbytes' (0.45, ``optim/optimizer.py``): one byte and a float32 scale per 256 elements.
OPTIMIZERS: dict[str, Optimizer] = {
    item.name: item
    for item in (
        Optimizer("none", temporaries=0, says="no optimizer step at all"),
        Optimizer("sgd", temporaries=0, fusible=True),
        Optimizer("sgd-momentum", _full("momentum_buffer"), 0, fusible=True),
        Optimizer("adam", _full(*_ADAM), fusible=True),
        Optimizer("adamw", _full(*_ADAM), fusible=True),
        Optimizer("adam-amsgrad", _full(*_ADAM, "max_exp_avg_sq"), fusible=True),
        Optimizer("adamw-amsgrad", _full(*_ADAM, "max_exp_avg_sq"), fusible=True),
        Optimizer("adamax", _full("exp_avg", "exp_inf")),
        Optimizer("nadam", _full(*_ADAM)),
        Optimizer("radam", _full(*_ADAM)),
        Optimizer("adadelta", _full("square_avg", "acc_delta"), 2),
        Optimizer("adagrad", _full("sum"), 2, fusible=True),
        Optimizer("rmsprop", _full("square_avg")),
        Optimizer("rmsprop-momentum", _full("square_avg", "momentum_buffer")),
        Optimizer("rmsprop-centered", _full("square_avg", "grad_avg")),
        Optimizer("rprop", _full("prev", "step_size")),
        Optimizer("asgd", _full("ax")),
        Optimizer("sparseadam", _full(*_ADAM), 0, says="sparse gradients only"),
        Optimizer(
            "lbfgs",
            (State("history", copies=200), State("direction", copies=3)),
            says="history_size=100: two vectors a step of history, three working vectors",
        ),
        Optimizer("adafactor", (State("factors", factored=True),)),
        Optimizer(
            "muon",
            (State("momentum_buffer", matrix_only=True),),
            0,
            says="matrices only; give biases, norms and embeddings to AdamW",
        ),
        Optimizer("lion", _full("exp_avg"), 0),
        Optimizer("adam8bit", _quantised(*_ADAM), 0),
        Optimizer("adamw8bit", _quantised(*_ADAM), 0),
        Optimizer("lion8bit", _quantised("exp_avg"), 0),
        Optimizer("sgd8bit-momentum", _quantised("momentum_buffer"), 0),
        Optimizer("paged-adamw", _full(*_ADAM), 0, paged=True),
        Optimizer("paged-adamw8bit", _quantised(*_ADAM), 0, paged=True),
        Optimizer("paged-lion8bit", _quantised("exp_avg"), 0, paged=True),
        Optimizer(
            "adamw4bit",
            tuple(State(name, size=0.5, block=128) for name in _ADAM),
            0,
            says="torchao: half a byte and a float32 scale per 128 elements",
        ),
        Optimizer("adamw-fp8", _quantised(*_ADAM), 0, says="torchao: float8 states"),
    )
}
_ALIASES = {
    "adam-8bit": "adam8bit",
    "adamw-8bit": "adamw8bit",
    "8bit-adam": "adam8bit",
    "momentum": "sgd-momentum",
    "adamw-torch": "adamw",
    "adamw-torch-fused": "adamw",
    "paged-adamw-8bit": "paged-adamw8bit",
    "paged-adamw-32bit": "paged-adamw",
}


def find_optimizer(name: str) -> Optimizer:
    """The optimizer called ``name``, in any usual spelling; the error suggests the nearest."""
    key = name.lower().replace("_", "-").replace(" ", "-").removeprefix("torch.optim.")
    key = _ALIASES.get(key, key)
    if key in OPTIMIZERS:
        return OPTIMIZERS[key]
    near = difflib.get_close_matches(key, OPTIMIZERS, n=3)
    raise PlanError(
        f"unknown optimizer {name!r}; "
        + (f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(OPTIMIZERS)}")
    )


@dataclass(frozen=True, slots=True)
class PerParameter:
    """One row of the table "bytes per parameter"."""

    parameter: float
    gradient: float
    master: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.master + self.optimizer


def per_parameter(
    precision: Precision,
    optimizer: Optimizer,
    *,
    state_size: int = 0,
    offloaded: bool = False,
    frozen: bool = False,
) -> PerParameter:
    """Bytes per parameter, per bill.

    p + g + m + s, with p, g, m from the precision and s the sum over the optimizer's states.

    :param state_size: bytes per state element where it is not that of what is updated
        (fp32 states on 16-bit parameters: 4).
    :param offloaded: the states live in host memory, so they cost the GPU nothing.
    :param frozen: no gradient, no master copy, no state.

    Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3.1: 2 + 2 + 12 = 16 for
    mixed-precision Adam. Assumes matrices large enough for block scales to average out.
    """
    if frozen:
        return PerParameter(precision.parameter, 0, 0, 0)
    states = 0.0 if offloaded else optimizer.per_parameter(state_size or precision.updated)
    return PerParameter(precision.parameter, precision.gradient, precision.master, states)


Quantisation = Literal["", "nf4", "nf4-double", "int8"]


def quantised_size(kind: Quantisation, full: int) -> float:
    """Bytes per parameter of a frozen, quantised matrix.

    * ``nf4``: half a byte and a float32 scale per block of 64: 0.5 + 4/64 = 0.5625.
    * ``nf4-double``: the scales themselves in 8 bits, with a float32 scale per 256 of them:
      0.5 + 1/64 + 4/(64 x 256), about 0.516.
    * ``int8``: one byte (row-wise scales are negligible).

    Source: Dettmers et al. 2023 (QLoRA, arXiv 2305.14314), section 3. ``full`` is returned for "".
    """
    sizes: dict[str, float] = {
        "": float(full),
        "nf4": 0.5 + 4 / 64,
        "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256),
        "int8": 1.0,
    }
    if kind not in sizes:
        raise PlanError(f"unknown quantisation {kind!r}; known: nf4, nf4-double, int8")
    return sizes[kind]


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters: for each target matrix d_out x d_in, r (d_in + d_out) parameters.

    ``targets`` are endings of weight names ("q", "v", "qkv", "o", "gate", "up", "gate_up",
    "down"), or ``all-linear``. ``size`` is bytes per adapter element (peft keeps them in float32).

    Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1.
    """

    rank: int = 8
    targets: tuple[str, ...] = ("q", "v")
    size: int = 4

    def __post_init__(self) -> None:
        if self.rank <= 0:
            raise PlanError(f"LoRA rank must be positive, not {self.rank}")

    def picks(self, weight: Weight) -> bool:
        """Whether ``weight`` gets an adapter. A fused "qkv" matrix answers to q, k and v, a fused
        "gate_up" to gate and up."""
        part = weight.name.rsplit(".", 1)[-1]
        return weight.role in ("matrix", "expert") and self.hits(part)

    def hits(self, part: str) -> bool:
        """Whether the matrix ``part`` of a layer ("q", "up") is a target."""
        if "all-linear" in self.targets:
            return True
        fused = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(part, ())
        return any(target == part or target in fused for target in self.targets)

    def weights(self, weights: Iterable[Weight]) -> tuple[Weight, ...]:
        """The adapters' own parameter tensors."""
        made: list[Weight] = []
        for weight in filter(self.picks, weights):
            *lead, out, inner = weight.shape
            experts = 1
            for side in lead:
                experts *= side
            count = weight.count * experts
            # Gate and up in one tensor: peft gives them a rank each.
            both = lead and "up" in weight.name.rsplit(".", 1)[-1]
            rank = self.rank * (2 if both else 1)
            made.append(Weight(f"{weight.name}.lora_a", (rank, inner), "matrix", count))
            made.append(Weight(f"{weight.name}.lora_b", (out, rank), "matrix", count))
        if not made:
            raise PlanError(
                f"no matrix of this model is called {' or '.join(self.targets)}; "
                "name q, k, v, qkv, o, gate, up, down or all-linear"
            )
        return tuple(made)


#: Hugging Face's names for the matrices, so that a peft configuration can be given as it is.
LORA_NAMES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "out_proj": "o",
    "query_key_value": "qkv",
    "c_attn": "qkv",
    "qkv_proj": "qkv",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "fc1": "up",
    "fc2": "down",
    "query": "q",
    "value": "v",
    "key": "k",
}


def parse_targets(text: str) -> tuple[str, ...]:
    """``"q_proj,v_proj"`` or ``"q,v"`` -> ``("q", "v")``."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise PlanError("LoRA needs at least one target, such as q,v")
    return tuple(LORA_NAMES.get(name, name) for name in names)
