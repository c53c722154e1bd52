"""The closed form beside a test that has run."""

from __future__ import annotations

import pytest

from pytest_vram.planning.beside import closed_form, sentence
from pytest_vram.planning.configs import named
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Setup
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
    bills["temporary"] -= 200 << 20
    bills["inputs"] += 1000
    moved = sentence(plan, plan.peak - (100 << 20), bills)
    assert moved.endswith("; temporary -200.0 MiB, activations +100.0 MiB")


def test_logits_that_outlive_the_step_are_held():
    gone = closed_form(model(), IDS, precision="bf16")
    held = closed_form(model(), IDS, precision="bf16", alive=[(4, 256), (4, 256, 50257)])
    assert not gone.setup.held
    assert held.setup.held


def test_adapters_and_dropout_are_read_from_the_module():
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).train()
    plan = closed_form(adapted, IDS, precision="fp32")
    assert (plan.setup.lora.rank, plan.setup.lora.targets) == (4, ("q", "down"))
    assert plan.trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert plan.setup.dropout == 0
    assert closed_form(model().train(), IDS, precision="fp32").setup.dropout == 0.1
    assert closed_form(model().eval(), IDS, precision="fp32").setup.dropout == 0


def test_models_in_16_bits_are_planned_in_16_bits():
    half = model().to(torch.bfloat16)
    assert closed_form(half, IDS, precision="fp32").setup.precision.name == "bf16-plain"
    assert closed_form(half, IDS, precision="bf16").setup.precision.name == "bf16"
