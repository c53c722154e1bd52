"""The closed form beside a test that has run."""

from __future__ import annotations

import pytest

from pytest_vram.planning.beside import closed_form, sentence
from pytest_vram.planning.configs import named
from pytest_vram.planning.plan import Setup, make_plan
from pytest_vram.quantities import format_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def model():
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2))


IDS = [("float32", (3,)), ("int64", (4, 256)), ("int64", (4, 256))]


def test_shape_batch_and_optimizer_are_read_from_what_ran():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    plan = closed_form(module, IDS, precision="bf16", optimizer=optimizer)
    setup = plan.setup
    assert (setup.batch, setup.sequence, setup.step) == (4, 256, "fused")
    assert (setup.optimizer.name, setup.precision.name) == ("adamw", "bf16")
    assert plan.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("make", "name", "step"),
    [
        (lambda p: torch.optim.SGD(p), "sgd", "foreach"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "sgd-momentum", "foreach"),
        (lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False), "adam-amsgrad", "loop"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "rmsprop-momentum", "foreach"),
        (lambda p: None, "none", "foreach"),
    ],
)
def test_optimizers_are_recognised(make, name, step):
    module = model()
    plan = closed_form(module, IDS, precision="fp32", optimizer=make(module.parameters()))
    assert (plan.setup.optimizer.name, plan.setup.step) == (name, step)


def test_nothing_is_said_where_nothing_is_recognised():
    assert closed_form(torch.nn.Linear(2, 2), IDS, precision="fp32") is None
    assert closed_form(model(), [("float32", (4, 8))], precision="fp32") is None
    long = [("int64", (1, 4096))]  # beyond GPT-2's positions
    assert closed_form(model(), long, precision="fp32") is None


def test_the_sentence_names_what_departs_most():
    plan = make_plan(Setup(named("gpt2"), batch=4, sequence=512))
    bills = dict(plan.peak_moment.bills)
    same = sentence(plan, plan.peak, bills)
    size = format_bytes(plan.peak)
    assert same == f"closed form {size}, the test took {size} (0 %)"
    bills["activations"] += 100 << 20
    moved = sentence(plan, plan.peak + (100 << 20), bills)
    assert moved.endswith("; activations +100.0 MiB")
