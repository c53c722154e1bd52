"""NaN and inf: in the loss, in the gradients before the step, in the parameters after it.

The watch itself allocates nothing on a GPU while memory is recorded. Finite checks use the fused
kernel of GradScaler (``_amp_foreach_non_finite_check_and_unscale_``) with a factor of exactly 1,
which leaves every bit as it is. It knows no bfloat16 (aten/src/ATen/native/cuda/AmpKernels.cu,
2.6 to 2.14), so those are copied, piece by piece, into an fp32 scratch buffer. Scalars and buffer
are made before the recorded window. Losses are copied to pinned host memory without waiting and
read once the optimizer's step has waited anyway.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pytest_vram.findings import Finding
from pytest_vram.numerics.events import Backward, Listener, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.names import dtype_name, listed, optimizer_parameters
from pytest_vram.numerics.remedies import BACKWARD

LOOK_AT_DATA = ": look at the data"
#: Elements of the scratch buffer for dtypes that the fused check does not know: 4 MiB.
_SCRATCH = 1 << 20
_CHECKED = (torch.float32, torch.float16, torch.float64)


class FiniteCheck:
    """Whether tensors are finite, in one fused check per device and dtype."""

    def __init__(self) -> None:
        self._own: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def prepare(self) -> None:
        """Make scalars and scratch now: in the recorded window they would be the test's."""
        if torch.version.cuda is not None and torch.cuda.is_available():
            # In the CPU stand-in torch.cuda only pretends, and there is nothing to prepare.
            with contextlib.suppress(RuntimeError, AssertionError):
                self._on(torch.device("cuda", torch.cuda.current_device()))

    def release(self) -> None:
        self._own.clear()

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._own:
            with torch._C.DisableTorchFunction():
                found = torch.zeros((), dtype=torch.float32, device=device)
                scratch = torch.empty(_SCRATCH, dtype=torch.float32, device=device)
                self._own[device] = found, torch.ones_like(found), scratch
        return self._own[device]

    def finite(self, tensors: Iterable[Tensor]) -> bool:
        on_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            plain = plain_data(tensor)
            if plain is not None:
                on_device.setdefault(plain.device, []).append(plain)
        return all(self._finite(device, members) for device, members in on_device.items())

    def _finite(self, device: torch.device, tensors: list[Tensor]) -> bool:
        if device.type == "meta":
            return True
        if device.type == "cuda":
            return self._finite_on_gpu(device, tensors)
        # Twenty times as fast as the largest element, which decides where squares overflow.
        return _finite_norms(tensors, 2) or _finite_norms(tensors, math.inf)

    def _finite_on_gpu(self, device: torch.device, tensors: list[Tensor]) -> bool:
        found, one, scratch = self._on(device)
        found.zero_()
        for dtype, members in _by_dtype(tensors).items():
            if dtype in _CHECKED:
                torch._amp_foreach_non_finite_check_and_unscale_(members, found, one)
                continue
            for piece in _pieces(members):
                copy = scratch[: piece.numel()]
                copy.copy_(piece)
                torch._amp_foreach_non_finite_check_and_unscale_([copy], found, one)
        return not found.item()

    def bad(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those that hold NaN or inf."""
        return [tensor for tensor in tensors if not self.finite([tensor])]


def _finite_norms(tensors: list[Tensor], order: float) -> bool:
    return all(math.isfinite(float(norm)) for norm in torch._foreach_norm(tensors, order))


def _by_dtype(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def _pieces(tensors: list[Tensor]) -> Iterable[Tensor]:
    """The elements of contiguous tensors, at most a scratch buffer's worth at a time."""
    for tensor in tensors:
        if tensor.is_contiguous():
            yield from torch.split(tensor.view(-1), _SCRATCH)


def plain_data(tensor: Tensor) -> Tensor | None:
    """The strided floating-point data of a tensor: without graph, hooks or version counter; of
    all samples at once where it is wrapped by torch.func's vmap, grad or jvp."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        if tensor.device.type != "cpu":  # the fused check writes, which a transform refuses
            return None
    if tensor.is_sparse:
        tensor = tensor._values()
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if not (tensor.dtype.is_floating_point or tensor.is_complex()) or not tensor.numel():
        return None
    if tensor.element_size() < 2:  # fp8 has no norm
        return None
    if tensor.device.type == "cuda" and (tensor.is_complex() or not _dense(tensor)):
        return None
    return tensor.detach() if tensor.device.type != "cuda" else tensor.data


def _dense(tensor: Tensor) -> bool:
    """No element is reached by two indices (an expanded tensor must not be written)."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size == 1 for size, stride in pairs)


def describe_bad(tensor: Tensor) -> str:
    """``2 NaN and 1 inf of 12 elements``; read on the CPU, so that no device memory is used."""
    data = plain_data(tensor)
    values = (tensor if data is None else data).detach().to("cpu").float()
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    parts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(parts) or '0 bad'} of {values.numel()} elements"


@dataclass(slots=True)
class LossValue:
    """A loss that backward started from. ``value`` is NaN until the copy has arrived."""

    dtype: str
    value: float = math.nan
    pending: Tensor | None = None
    step: int = 0
    line: str = ""
    updates: int = 0  #: optimizer updates applied before it

    def resolve(self) -> None:
        if self.pending is not None:
            self.value = float(self.pending)
            self.pending = None


def read_loss(tensor: Tensor) -> LossValue | None:
    """The value of a scalar. From a GPU it is copied to pinned memory, without waiting for it."""
    if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
        return None
    note = LossValue(dtype_name(tensor.dtype))
    if tensor.device.type == "cuda":
        note.pending = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        note.pending.copy_(tensor.detach().reshape(()), non_blocking=True)
    else:
        note.value = float(tensor.detach())
    return note


class FiniteWatch(Listener):
    """Notices the first NaN or inf of each kind; ``found`` maps kind to finding."""

    def __init__(self, loop: Loop, values: bool) -> None:
        self._loop, self._values = loop, values
        self.check = FiniteCheck()
        self.found: dict[str, Finding] = {}
        self.on_found: Callable[[], None] = lambda: None
        self.losses: list[LossValue] = []
        self._updates = 0
        self._leaves: list[Tensor] = []
        self._bad_input = ""

    # ---- forward

    def forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._values:
            return
        # A GPU has no room for the check's result that would not be the test's; there the replay
        # looks at inputs.
        tensors = [t for t in _tensors(inputs) if t.device.type == "cpu"]
        if tensors and not self._bad_input and not self.check.finite(tensors):
            bad = self.check.bad(tensors)[0]
            name = self._loop.names.module_name(module)
            self._bad_input = (
                f"the input of {name} already held {describe_bad(bad)} "
                f"({dtype_name(bad.dtype)}{list(bad.shape)}){LOOK_AT_DATA}"
            )
        if self._loop.backwards or "output" in self.found:
            return
        outputs = list(_tensors(output))
        if outputs and not self.check.finite(outputs):
            bad = self.check.bad(outputs)[0]
            self.found["output"] = Finding(
                "non-finite",
                "fail",
                f"the output of {self._loop.names.module_name(module)} is not finite: "
                f"{describe_bad(bad)} ({dtype_name(bad.dtype)}{list(bad.shape)})",
                (self._bad_input,) if self._bad_input else (),
                _loss_hint(self._bad_input),
                {"what": "output"},
            )

    # ---- loss

    def backward_begins(self, call: Backward) -> None:
        self.found.pop("output", None)  # the loss decides: -inf outputs may be masked
        if not self._values:
            return
        for captured, root in zip(call.captured, call.roots, strict=True):
            note = captured if captured is not None else read_loss(root)
            if note is not None:
                note.step, note.line = self._loop.backward_step(), call.line
                note.updates = self._updates
                self.losses.append(note)
                if note.pending is None:
                    self._judge_loss(note)
        if not self._loop.parameters():
            self._leaves = _leaves_of(call.roots)

    def _judge_loss(self, note: LossValue) -> None:
        if math.isfinite(note.value) or "loss" in self.found:
            return
        details = [self._bad_input] if self._bad_input else []
        hint, names = _loss_hint(self._bad_input), []
        if "parameters" not in self.found and not self._bad_input:
            bad = self.check.bad(self._loop.parameters())
            if bad:
                names = self._loop.names.names(bad)
                details.append(f"parameters were not finite before this step: {listed(names)}")
            if bad and not self._updates:
                hint = (
                    "no step has changed them yet: memory that was never initialised (torch.empty) "
                    "or a checkpoint that already holds NaN"
                )
        earlier = [n.value for n in self.losses if math.isfinite(n.value)]
        if earlier:
            details.append(f"losses before: {', '.join(f'{v:.4g}' for v in earlier[-4:])}")
        self.on_found()
        self.found["loss"] = Finding(
            "non-finite",
            "fail",
            f"loss is {note.value:g} at step {note.step} (backward at {note.line})",
            tuple(details),
            hint,
            {"what": "loss", "step": note.step, "line": note.line, "parameters": names},
        )

    def settle_losses(self) -> None:
        """Read the losses that were copied; the GPU must have passed them."""
        for note in self.losses:
            if note.pending is not None:
                note.resolve()
                self._judge_loss(note)

    # ---- gradients

    def gradients_returned(self, gradients: Any, loss: Any, line: str) -> None:
        """By torch.func.grad, which leaves no ``.grad`` behind."""
        if not self._values or {"gradients", "loss"} & self.found.keys():
            return
        if isinstance(loss, Tensor) and not self.check.finite([loss]):
            self.found.pop("output", None)  # it came of it
            self.on_found()
            self.found["loss"] = Finding(
                "non-finite",
                "fail",
                f"a loss that torch.func differentiated at {line} is not finite: "
                f"{describe_bad(loss)}",
                (self._bad_input,) if self._bad_input else (),
                _loss_hint(self._bad_input),
                {"what": "loss", "line": line},
            )
            return
        named = list(_named(gradients))
        if self.check.finite(tensor for _, tensor in named):
            return
        bad = [(name, tensor) for name, tensor in named if self.check.bad([tensor])]
        self.on_found()
        self.found["gradients"] = Finding(
            "non-finite",
            "fail",
            f"a gradient that torch.func returned at {line} is not finite: "
            f"{listed(name for name, _ in bad)} ({dtype_name(bad[0][1].dtype)}, "
            f"{describe_bad(bad[0][1])})",
            (),
            BACKWARD,
            {"what": "gradients", "parameters": [name for name, _ in bad]},
        )

    def backward_ends(self, call: Backward) -> None:
        leaves, self._leaves = self._leaves, []
        if self._values and not self._loop.optimizers:
            self._judge_gradients(leaves or self._loop.parameters(), call.line)

    def gradients_ready(self, update: Update) -> None:
        if self._values and update.scaler is None and not update.closure:
            self._judge_gradients(optimizer_parameters(update.optimizer), update.line)

    def _judge_gradients(self, parameters: Sequence[Tensor], line: str) -> None:
        if "gradients" in self.found:
            return
        with_gradient = [p for p in parameters if p.is_leaf and p.grad is not None]
        gradients = [p.grad for p in with_gradient if p.grad is not None]
        if self.check.finite(gradients):
            return
        bad = [p for p in with_gradient if p.grad is not None and self.check.bad([p.grad])]
        self.settle_losses()
        first = bad[0]
        assert first.grad is not None
        names = self._loop.names.names(bad)
        last = self.losses[-1].value if self.losses else math.nan
        step = self._loop.step if self._loop.optimizers else self._loop.backward_step()
        loss = f"loss is finite ({last:.4g}) but " if math.isfinite(last) else ""
        self.on_found()
        self.found["gradients"] = Finding(
            "non-finite",
            "fail",
            f"{loss}the gradient of {listed(names)} is not finite at step {step} "
            f"({len(bad)} of {len(with_gradient)} parameters; {dtype_name(first.dtype)}, "
            f"{describe_bad(first.grad)})",
            (f"seen at {line}",),
            BACKWARD,
            {"what": "gradients", "parameters": names},
        )

    # ---- parameters

    def update_ends(self, update: Update) -> None:
        if not self._values:
            return
        self.settle_losses()
        if not update.applied:
            self._judge_statistics(update)
            return
        self._updates += 1
        if update.closure and update.scaler is None:
            # Its gradients came to be inside the step (Lightning steps every optimizer so).
            self._judge_gradients(optimizer_parameters(update.optimizer), update.line)
        if "parameters" in self.found or not _worth_checking(self._updates):
            return
        self._judge_statistics(update)
        parameters = optimizer_parameters(update.optimizer)
        if self.check.finite(p.detach() for p in parameters):
            return
        bad = self.check.bad(parameters)
        names = self._loop.names.names(bad)
        why = self._tiny_eps(update.optimizer)
        self.on_found()
        self.found["parameters"] = Finding(
            "non-finite",
            "fail",
            f"{len(bad)} of {len(parameters)} parameters are not finite after the optimizer's step "
            f"{self._loop.step} ({update.line}): {listed(names)}",
            (f"{names[0]}: {dtype_name(bad[0].dtype)}, {describe_bad(bad[0])}", *why),
            "keep parameters or optimizer state in fp32"
            if why
            else "lower the learning rate, and clip gradients before the step",
            {"what": "parameters", "parameters": names},
        )

    def _judge_statistics(self, update: Update) -> None:
        """Running means and variances: one bad batch, even one whose step the scaler skipped, and
        the module gives NaN in eval mode for good."""
        if {"statistics", "loss"} & self.found.keys():
            return
        named = {
            f"{name} of {self._loop.names.module_name(module)}": buffer
            for root in self._loop.names.roots()
            for module in root.modules()
            if isinstance(module, _NormBase)
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype.is_floating_point
        }
        if self.check.finite(named.values()):
            return
        bad = [name for name, buffer in named.items() if self.check.bad([buffer])]
        self.on_found()
        self.found["statistics"] = Finding(
            "non-finite",
            "fail",
            f"running statistics are not finite at step {self._loop.step} ({update.line}): "
            f"{listed(bad)}; in eval mode these modules give NaN",
            (self._bad_input,) if self._bad_input else (),
            "a batch with NaN or inf got there, or a forward that overflowed (a step that the "
            "scaler skips updates them all the same): guard that forward, and reset the buffers "
            "(reset_running_stats)",
            {"what": "statistics", "buffers": bad},
        )

    @staticmethod
    def _tiny_eps(optimizer: Any) -> tuple[str, ...]:
        """Adam divides by sqrt(v) + eps in the state's dtype: 1e-8 is 0 in fp16."""
        for group in getattr(optimizer, "param_groups", ()):
            eps = group.get("eps")
            half = [p for p in group["params"] if p.dtype is torch.float16]
            if eps is not None and half and float(torch.tensor(eps, dtype=torch.float16)) == 0.0:
                return (
                    f"eps={eps:g} is 0 in float16, the dtype of the optimizer state: division by 0",
                )
        return ()


def _worth_checking(update: int) -> bool:
    """The first eight updates and then each power of two: a NaN does not go away again."""
    return update <= 8 or update & (update - 1) == 0


def _loss_hint(bad_input: str) -> str:
    if bad_input:
        return (
            "clean the batch (torch.nan_to_num, a filter in the dataset); the model is not at fault"
        )
    return (
        "lower the learning rate and clip gradients; in fp16 look for values beyond 65504 and for "
        "fully masked softmax rows"
    )


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point and plain_data(value) is not None:
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _named(value: Any, name: str = "") -> Iterable[tuple[str, Tensor]]:
    """Tensors of nested tuples, lists and dicts, with the keys that lead to them."""
    if isinstance(value, Tensor):
        yield name or "the gradient", value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _named(inner, f"{name}.{key}" if name else str(key))


def _leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """Tensors that a backward from ``roots`` would give a gradient to."""
    seen: set[Any] = set()
    leaves: list[Tensor] = []
    front = [root.grad_fn for root in roots if root.grad_fn is not None]
    while front and len(seen) < 10_000:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        front += [inner for inner, _ in node.next_functions if inner is not None]
    return leaves
