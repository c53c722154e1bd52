"""Faults that raise nothing and leave every number finite: each is a warning that names it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched_loops import health

Body = Callable[[], object]


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 4)), device="cuda")


def loop(
    model: nn.Module,
    loss: Callable[[], Tensor],
    count: int = 4,
    rate: float = 0.1,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def warning(body: Body) -> str:
    """The text of the only finding."""
    (found,) = health(body).findings
    assert found.severity == "warn"
    return found.text()


def is_silent(body: Body) -> None:
    result = health(body)
    assert result.error is None
    assert result.findings == (), result.text()


# ---- the end of float16's range


def wide(weight: float, dtype: torch.dtype = torch.float16, *after: nn.Module) -> Body:
    """64 ones times ``weight``: the first layer gives 64 times ``weight``."""

    def body() -> None:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), *after, nn.Linear(64, 1)).cuda()
        with torch.no_grad():
            model[0].weight.fill_(weight)
            model[-1].weight.mul_(1e-4)

        def loss() -> Tensor:
            with torch.autocast("cuda", dtype=dtype):
                return model(torch.ones(8, 64, device="cuda")).float().mean()

        loop(model, loss, rate=1e-9)

    return body


def test_a_near_miss_of_float16() -> None:
    text = warning(wide(800.0, torch.float16, nn.ReLU()))
    assert text.startswith(
        "near the end of float16's range: max |output| of module 0 (mm) is 51200 at step 1, 78 % "
        "of 65504; at 1.28 times that it is inf\n  also module 1 (relu): 51200\n"
    )


@pytest.mark.parametrize(
    "body",
    [wide(500.0), wide(800.0, torch.bfloat16)],
    ids=["more than a factor 2 is left", "bfloat16"],
)
def test_far_from_the_end(body: Body) -> None:
    is_silent(body)


def test_a_mask_value_is_no_near_miss() -> None:
    class Masked(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.masked_fill(torch.eye(8, device="cuda", dtype=torch.bool), -6e4)

    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 8), Masked(), nn.Softmax(-1), nn.Linear(8, 1)).cuda()

        def loss() -> Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return model(x()).float().pow(2).mean()

        loop(model, loss)

    is_silent(body)


class RMSNorm(nn.Module):
    def __init__(self, upcast: bool, how: str = "rsqrt") -> None:
        super().__init__()
        self.upcast, self.how = upcast, how

    def forward(self, h: Tensor) -> Tensor:
        wide = h.float() if self.upcast else h
        square = wide.pow(2).mean(-1, keepdim=True)
        result = wide * torch.rsqrt(square) if self.how == "rsqrt" else wide / square.sqrt()
        return result.to(h.dtype)


def normed(norm: nn.Module) -> Body:
    def body() -> None:
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 2)).cuda().half()
        with torch.no_grad():
            model[0].weight.mul_(2000)
        loop(model, lambda: model(x(8, 8).half()).float().pow(2).mean(), rate=1e-3, count=2)

    return body


@pytest.mark.parametrize(("how", "name"), [("rsqrt", "rsqrt"), ("div", "truediv|div")])
def test_a_variance_that_overflows_and_vanishes(how: str, name: str) -> None:
    result = health(normed(RMSNorm(False, how)))
    found = result.of("non-finite")
    assert [one.severity for one in found] == ["warn"]
    assert re.match(
        rf"\d of 8 divisors overflowed to inf in float16: ({name}) at .*test_silent\.py:\d+ forward"
        " makes 0 of what they divide",
        found[0].sentence,
    )


def test_a_norm_of_rows_that_overflows() -> None:
    class Rows(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return F.normalize(h)

    (found,) = health(normed(nn.Sequential(ScaleUp(), Rows()))).of("non-finite")
    assert "divisors overflowed to inf in float16: normalize at" in found.sentence


class ScaleUp(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.clamp(-1, 1) * 3e4


def test_a_variance_in_float32() -> None:
    is_silent(normed(RMSNorm(True)))


def test_a_distance_that_is_masked_with_inf() -> None:
    def body() -> None:
        model = nn.Linear(4, 4).cuda().half()

        def loss() -> Tensor:
            h = model(x().half())
            distance = (h[:, None] - h[None]).abs().sum(-1) + 1
            eye = torch.eye(8, device="cuda", dtype=torch.bool)
            return (1 / distance.masked_fill(eye, torch.inf)).float().mean()

        loop(model, loss)

    is_silent(body)


# ---- layers that nothing trains


def test_a_relu_that_never_opens() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).cuda()
        with torch.no_grad():
            model[0].bias.fill_(-100)
        loop(model, lambda: (model(x()) - 1).pow(2).mean(), count=2)

    text = warning(body)
    assert text.startswith(
        "the gradients of 0.weight, 0.bias and 2.weight are exactly 0 at updates 1 and 2 of "
        "optimizer SGD, while others are not: nothing trains them\n"
        "  1 (ReLU) gave nothing but zeros\n"
    )


class Gated(nn.Module):
    """Blocks behind gates that start at 0, and a last layer that does, too."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.gate = nn.Parameter(torch.zeros(4), requires_grad=learns)
        nn.init.zeros_(self.last.weight)

    def forward(self, h: Tensor) -> Tensor:
        return self.last(h + self.gate * self.inner(h).tanh())


def test_a_gate_that_never_opens() -> None:
    def body() -> None:
        model = Gated(learns=False).cuda()
        loop(model, lambda: (model(x()) - 1).pow(2).mean())

    assert warning(body).startswith("the gradients of inner.weight and inner.bias are exactly 0")


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_gates_that_start_at_zero(count: int) -> None:
    def body() -> None:
        model = Gated(learns=True).cuda()
        loop(model, lambda: (model(x()) - 1).pow(2).mean(), count)

    is_silent(body)


def test_rows_that_a_hook_freezes_and_rows_that_no_batch_has() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        model[1].weight.register_hook(lambda grad: grad * 0)
        ids = torch.zeros(8, dtype=torch.long, device="cuda")
        loop(model, lambda: (model(ids) - 1).pow(2).mean())

    is_silent(body)


def test_a_loss_times_zero() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        loop(model, lambda: model(x()).pow(2).mean() * 0)

    assert re.match(
        r"the loss is exactly 0 at all 4 backward passes \(the last at .*test_silent\.py:\d+ loop\)"
        " and so is every gradient: 4 updates of optimizer SGD learnt nothing",
        warning(body),
    )


# ---- tied weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def loaded(assign: bool, again: bool) -> Body:
    def body() -> None:
        model = Tied().cuda()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        model.tie() if again else None
        loop(model, lambda: model(torch.arange(16, device="cuda").view(2, 8)))

    return body


def from_meta(again: bool) -> Body:
    def body() -> None:
        with torch.device("meta"):
            model = Tied()
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        model.tie() if again else None
        loop(model, lambda: model(torch.arange(16, device="cuda").view(2, 8)))

    return body


@pytest.mark.parametrize(
    ("body", "how"),
    [
        (loaded(assign=True, again=False), r"load_state_dict\(assign=True\)"),
        (from_meta(again=False), "the module was moved or cast"),
    ],
    ids=["assign", "to_empty"],
)
def test_weights_that_came_untied(body: Body, how: str) -> None:
    assert re.match(
        rf"embedding\.weight and head\.weight were one parameter until {how} at "
        r".*test_silent\.py:\d+ body, and are trained apart since",
        warning(body),
    )


@pytest.mark.parametrize(
    "body",
    [loaded(False, False), loaded(True, True), from_meta(True)],
    ids=["copied", "assigned and tied again", "to_empty and tied again"],
)
def test_weights_that_stay_tied(body: Body) -> None:
    is_silent(body)


# ---- order


def scheduled(first: bool, forward: int = 0) -> Body:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(forward):  # resume
            scheduler.step()
        for _ in range(3):
            optimizer.zero_grad()
            (model(x()) - 1).pow(2).mean().backward()
            scheduler.step() if first else None
            optimizer.step()
            scheduler.step() if not first else None

    return body


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_goes_first() -> None:
    assert re.match(
        r"the scheduler steps before optimizer SGD does: StepLR at .*test_silent\.py:\d+ body comes"
        r" before optimizer\.step\(\) at .*test_silent\.py:\d+ body, so the first learning rate is "
        "never used",
        warning(scheduled(first=True)),
    )


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("forward", [0, 2])
def test_a_scheduler_in_its_place(forward: int) -> None:
    is_silent(scheduled(first=False, forward=forward))


def twice(scaled: bool, clear: bool = False) -> Body:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=scaled)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x()) - 1).pow(2).sum()
            scaler.scale(loss).backward(retain_graph=True)
            optimizer.zero_grad() if clear else None
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return body


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_one_loss_backward_twice(scaled: bool) -> None:
    assert re.match(
        r"backward ran twice from the same loss, at .*test_silent\.py:\d+ body "
        r"\(retain_graph=True\) and at .*test_silent\.py:\d+ body, without zero_grad between: the "
        "gradients of weight and bias are doubled",
        warning(twice(scaled)),
    )


def test_one_loss_backward_twice_with_zero_grad_between() -> None:
    is_silent(twice(scaled=False, clear=True))


def test_backward_inside_autocast_is_a_remark() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                (model(x()) - 1).pow(2).mean().backward()
            optimizer.step()

    result = health(body)
    assert result.findings == ()
    (note,) = result.watch.notes
    assert re.match(r"backward at .*test_silent\.py:\d+ body runs inside autocast", note)


# ---- torch.func


def functional(function: Callable[[Tensor], Tensor]) -> Body:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            return function(torch.func.functional_call(model, parameters, (sample,)).sum())

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        per_sample(parameters, x())

    return body


def test_a_loss_of_torch_func() -> None:
    text = health(functional(lambda h: (h - 1e9).log())).text()
    assert re.match(
        r"a loss that torch\.func differentiated at .*test_silent\.py:\d+ body is not finite: "
        r"8 NaN of 8 elements\n  first non-finite operator: log \(float32, .*<lambda>\)",
        text,
    )


def test_a_gradient_of_torch_func() -> None:
    text = health(functional(lambda h: (0 * h).sqrt())).text()
    assert "is not finite: 0.weight, 0.bias, 1.weight and 1.bias (float32, 128 NaN of 128" in text


def test_torch_func_in_health() -> None:
    is_silent(functional(lambda h: h.pow(2)))
