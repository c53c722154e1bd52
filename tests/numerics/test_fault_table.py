"""Fault x loop: each fault is named whether ``vram.train``, a hand-written loop or a Hugging Face
Trainer runs it."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watched_loops import Budget, health

WIDTH, BATCH, STEPS = 8, 4, 4
PURE = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    """Two linears with a norm between; ``forward`` returns what a Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.features(x)).float() - y).pow(2).mean() / 10

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(x, y)}


class CutGraph(Net):
    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.first(x)
        return self.norm(hidden)


class CutInside(Net):
    """Weights are cast once under no_grad and used from then on."""

    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.detach(), self.bias.detach())

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Cast(WIDTH, WIDTH)


class DroppedOutput(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        hidden = super().features(x)
        self.pooler(hidden)
        return hidden


class IdleBranch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)


class Overflow(Net):
    """The forward leaves fp16's range."""

    def features(self, x: Tensor) -> Tensor:
        return self.first(x * 3e4) * 1e4


class NanGradient(Net):
    """sqrt at 0: the loss is 0, its derivative infinite."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.features(x)).float().pow(2).sum(-1).sqrt().mean()


class LateOverflow(Net):
    """One batch in the middle has a loss whose scaled gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(x, y) * (1e36 if self.calls == 3 else 1.0)


class Frozen(Net):
    """Gradients flow, but the forward uses the weights of the first step."""

    def features(self, x: Tensor) -> Tensor:
        if not hasattr(self, "stale"):
            self.stale = [p.detach().clone() for p in self.parameters()]
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.features(x)
        fresh = [p - p.detach() for p in self.parameters()]
        w1, b1, w2, b2, w3, b3 = (s + f for s, f in zip(self.stale, fresh, strict=True))
        hidden = F.layer_norm(F.linear(x, w1, b1), (WIDTH,), w2, b2)
        return (F.linear(hidden, w3, b3).float() - y).pow(2).mean()


class Reentrant(Net):
    """Checkpointed behind an input that needs no gradient."""

    def features(self, x: Tensor) -> Tensor:
        return checkpoint(super().features, x, use_reentrant=True)


class EmptyRow(Net):
    """Attention whose mask leaves one row without a single position."""

    def features(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        scores = hidden @ hidden.mT
        mask = torch.ones_like(scores, dtype=torch.bool)
        mask[0] = False
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ hidden


class Banned(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        probability = torch.sigmoid(self.head(self.features(x)).float())
        return F.binary_cross_entropy(probability, (y > 0).float())


def half_head(model: Net) -> Net:
    model.head.half()
    return model


def all_bf16(model: Net) -> Net:
    return model.to(torch.bfloat16)


def all_fp16(model: Net) -> Net:
    return model.to(torch.float16)


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    says: str  #: a regular expression that one finding's text matches
    net: type[Net] = Net
    precision: str = "fp32"
    change: Callable[[Net], Net] = field(default=lambda model: model)
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda params: torch.optim.SGD(params, lr=0.01)
    )
    nan_sample: bool = False
    same_batch: bool = False
    trainable: str | None = None
    steps: int = STEPS


def adam(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=rate, weight_decay=0.0)


FAULTS = [
    Fault("nan in the data", "non-finite", r"loss is nan at step 2.*already held \d+ NaN", Net,
          nan_sample=True),
    Fault("overflow in the forward", "non-finite", r"(loss|not finite).*float16 ends at 65504",
          Overflow, "fp16"),
    Fault("finite loss, infinite gradient", "non-finite",
          r"loss is finite.*gradient of .*not finite.*backward of sqrt", NanGradient),
    Fault("collapsing scale", "scaler",
          r"4 of 4 steps were skipped.*even at scale 1.*backward of sqrt", NanGradient, "fp16"),
    Fault("a late overflow", "scaler", r"1 step skipped after the warm-up \(step 3 of 4, allowed 0",
          LateOverflow, "fp16"),
    Fault("graph cut by no_grad", "untrained", r"first\.weight and first\.bias", CutGraph),
    Fault("graph cut inside a module", "untrained",
          r"grad None after backward: first\.weight and first\.bias.*carries no graph", CutInside),
    Fault("output not used", "untrained", r"pooler\.weight and pooler\.bias.*does not depend",
          DroppedOutput),
    Fault("branch not used", "untrained", r"second\.weight and second\.bias.*did not run",
          IdleBranch),
    Fault("fp16 parameters under a scaler", "scaler",
          r"2 of 6 trainable parameters are float16 under a GradScaler: head\.weight and head",
          Net, "fp16", half_head),
    Fault("bf16 updates round to nothing", "untrained", r"norm\.weight.*bfloat16 updates round",
          Net, "fp32", all_bf16, adam(1e-4)),
    Fault("a fully masked row", "non-finite",
          r"_softmax .*row entirely -inf -> NaN; -inf was written by masked_fill.*zero the empty",
          EmptyRow),
    Fault("Adam's eps in fp16", "non-finite",
          r"parameters are not finite after the optimizer's step 1.*eps=1e-08 is 0 in float16",
          Net, "fp32", all_fp16, adam(1e-3)),
    Fault("stale weights", "untrained", r"bit-identical.*although parameters moved", Frozen,
          same_batch=True, optimizer=adam(0.05)),
    Fault("reentrant checkpoint", "untrained",
          r"use_reentrant=True\).*no input that requires grad.*first\.weight", Reentrant),
    Fault("more than trainable=", "untrained",
          r"outside trainable='head\.\*' received gradients: first\.weight", Net,
          trainable="head.*"),
    Fault("banned under autocast", "scaler", r"binary_cross_entropy inside autocast", Banned,
          "bf16"),
]  # fmt: skip


# ---- loops


def samples(fault: Fault) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    items = []
    for number in range(BATCH * fault.steps):
        if fault.same_batch:
            generator.manual_seed(number % BATCH)
        x = torch.randn(WIDTH, generator=generator)
        if fault.nan_sample and BATCH <= number < 2 * BATCH:
            x[0] = torch.nan
        if fault.change in (all_bf16, all_fp16):
            x = x.to(torch.bfloat16 if fault.change is all_bf16 else torch.float16)
        items.append({"x": x, "y": torch.randn(1, generator=generator)})
    return items


def batches(fault: Fault) -> list[dict[str, Tensor]]:
    items = samples(fault)
    return [
        {key: torch.stack([item[key] for item in items[at : at + BATCH]]).cuda() for key in "xy"}
        for at in range(0, len(items), BATCH)
    ]


def vram_train(fault: Fault) -> None:
    from pytest_vram.marker import Budget as MarkerBudget
    from pytest_vram.passes import Pass
    from pytest_vram.training import DTYPES, train

    model = fault.change(fault.net()).cuda()
    optimizer = fault.optimizer(model.parameters())
    budget = MarkerBudget(precision=fault.precision)
    data = batches(fault)
    if fault.precision.endswith("-pure"):
        data = [{**batch, "x": batch["x"].to(DTYPES[fault.precision])} for batch in data]
    current = Pass("numerics", torch.device("cuda", 0), budget, has_values=True)
    with current.undo:
        train(current, model, optimizer, lambda step: model(**data[step])["loss"],
              steps=fault.steps, clip_grad_norm=1.0)  # fmt: skip


def hand_written(fault: Fault) -> None:
    model = fault.change(fault.net()).cuda()
    optimizer = fault.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=fault.precision == "fp16")
    dtype = PURE[fault.precision]
    for batch in batches(fault):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def trainer(fault: Fault) -> None:
    transformers = pytest.importorskip("transformers")
    model = fault.change(fault.net())
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(), max_steps=fault.steps, per_device_train_batch_size=BATCH,
        fp16=fault.precision == "fp16", bf16=fault.precision == "bf16", save_strategy="no",
        report_to=[], disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
        dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    optimizer = fault.optimizer(model.parameters())
    made = InOrder(
        model=model, args=arguments, train_dataset=samples(fault), optimizers=(optimizer, None)
    )
    made.train()


def _in_order() -> type[Any]:
    transformers = pytest.importorskip("transformers")

    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        """The table's faults sit at fixed batches."""

        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def InOrder(**kwargs: Any) -> Any:  # noqa: N802
    return _in_order()(**kwargs)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate remembers the device of the first Trainer for the whole process."""
    yield
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


LOOPS = [vram_train, hand_written, trainer]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_named(fault: Fault, loop: Callable[[Fault], None]) -> None:
    result = health(lambda: loop(fault), Budget(trainable=fault.trainable))
    texts = [finding.text() for finding in result.of(fault.kind) if finding.severity == "fail"]
    assert any(re.search(fault.says, text, re.S) for text in texts), (result.text(), result.error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_same_net_without_a_fault_is_silent(
    precision: str, loop: Callable[[Fault], None]
) -> None:
    fault = Fault("none", "", "", precision=precision)
    result = health(lambda: loop(fault))
    assert result.error is None
    assert result.findings == ()
    assert len(result.watch.losses) == STEPS


@pytest.mark.parametrize("precision", ["fp16-pure", "bf16-pure"])
@pytest.mark.filterwarnings("ignore")
def test_master_weights_have_their_parameters_names(precision: str) -> None:
    fault = Fault("none", "", "", precision=precision, optimizer=adam(1e-4))
    wide = health(lambda: vram_train(fault), Budget(trainable="*"))
    assert wide.error is None
    assert wide.findings == ()
    narrow = health(lambda: vram_train(fault), Budget(trainable="head.*"))
    assert [f.kind for f in narrow.findings] == ["untrained"]
    assert "first.weight, first.bias, norm.weight and norm.bias" in narrow.text()
