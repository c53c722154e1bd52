"""Bytes per parameter: the table of the ledger, and PyTorch's own optimizers."""

from __future__ import annotations

import pytest

from pytest_vram.planning.configs import named
from pytest_vram.planning.shapes import PlanError, Weight
from pytest_vram.planning.states import (
    OPTIMIZERS,
    PRECISIONS,
    Lora,
    find_optimizer,
    find_precision,
    parse_targets,
    per_parameter,
    quantised_size,
)

GB = 10**9


@pytest.mark.parametrize(
    ("precision", "optimizer", "options", "row"),
    [
        ("fp32", "adamw", {}, (4, 4, 0, 8)),
        ("bf16-pure", "adam", {}, (2, 2, 4, 8)),
        ("fp16-pure", "adamw", {}, (2, 2, 4, 8)),
        ("bf16-plain", "adam", {"state_size": 4}, (2, 2, 0, 8)),
        ("bf16-plain", "adam", {}, (2, 2, 0, 4)),
        ("bf16-pure", "adam", {"offloaded": True}, (2, 2, 4, 0)),
        ("bf16", "adamw", {}, (4, 4, 0, 8)),
        ("fp16", "adamw", {}, (4, 4, 0, 8)),
        ("fp8", "adamw", {}, (2, 2, 4, 8)),
        ("fp32", "sgd", {}, (4, 4, 0, 0)),
        ("fp32", "sgd-momentum", {}, (4, 4, 0, 4)),
        ("bf16-plain", "adamw", {"frozen": True}, (2, 0, 0, 0)),
    ],
)
def test_the_table_of_fixed_bills(precision, optimizer, options, row):
    made = per_parameter(find_precision(precision), find_optimizer(optimizer), **options)
    assert (made.parameter, made.gradient, made.master, made.optimizer) == row
    assert made.total == sum(row)


def test_eight_bit_states_take_two_bytes_and_their_scales():
    made = per_parameter(PRECISIONS["bf16-pure"], OPTIMIZERS["adam8bit"])
    assert made.optimizer == 2 + 2 * 4 / 256
    assert round(made.total) == 10


def test_autocast_does_not_shrink_the_fixed_bills():
    amp = per_parameter(PRECISIONS["bf16"], OPTIMIZERS["adamw"])
    assert amp.total == per_parameter(PRECISIONS["fp32"], OPTIMIZERS["adamw"]).total == 16
    assert amp.master == 0


@pytest.mark.parametrize(
    ("billions", "precision", "optimizer", "parts"),
    [
        (7, "fp32", "adamw", (28, 28, 0, 56)),
        (7, "bf16-pure", "adamw", (14, 14, 28, 56)),
        (13, "bf16-pure", "adamw", (26, 26, 52, 104)),
    ],
)
def test_whole_models_in_decimal_gigabytes(billions, precision, optimizer, parts):
    made = per_parameter(find_precision(precision), find_optimizer(optimizer))
    row = (made.parameter, made.gradient, made.master, made.optimizer)
    assert tuple(billions * each for each in row) == parts
    assert sum(parts) == {7: 112, 13: 208}[billions]


def test_112_gb_are_104_3_gib():
    size = 7 * GB * 16
    assert size == 112 * GB
    assert round(size / 2**30, 1) == 104.3


def test_7b_with_an_eight_bit_optimizer_is_70_gb_and_17_5_over_four_ranks():
    ideal = per_parameter(PRECISIONS["bf16-pure"], OPTIMIZERS["adam8bit"])
    parts = (7 * ideal.parameter, 7 * ideal.gradient, 7 * ideal.master, 7 * int(ideal.optimizer))
    assert parts == (14, 14, 28, 14)
    assert sum(parts) == 70
    assert sum(parts) / 4 == 17.5


def test_nf4_with_and_without_double_quantisation():
    assert quantised_size("nf4", 2) == 0.5625
    assert round(quantised_size("nf4-double", 2), 3) == 0.516
    assert quantised_size("int8", 2) == 1
    assert quantised_size("", 2) == 2
    assert 7 * 0.5 == 3.5  # GB of an ideal NF4 backbone of 7B
    with pytest.raises(PlanError, match="unknown quantisation 'fp4'"):
        quantised_size("fp4", 2)  # type: ignore[arg-type]


def test_lora_on_q_and_v_of_a_7b_model():
    """Hu et al. 2021: r (d_in + d_out) per matrix; 64 matrices of 65,536 parameters."""
    shape = named("llama-7b")
    adapters = Lora(8, ("q", "v")).weights(shape.weights())
    total = sum(weight.total for weight in adapters)
    assert sum(weight.count for weight in adapters) == 2 * 64
    assert 8 * (4096 + 4096) == 65_536
    assert total == 64 * 65_536 == 4_194_304
    assert round(100 * total / shape.parameters, 2) == 0.06
    # Every bill in fp32, a master copy included: 4 + 4 + 4 + 8 bytes.
    assert round(total * 20 / 1e6) == 84


def test_a_fused_matrix_answers_to_q_k_and_v():
    adapters = Lora(4, ("q",)).weights(named("gpt2").weights())
    assert [(w.name, w.shape, w.count) for w in adapters] == [
        ("layers.attention.qkv.lora_a", (4, 768), 12),
        ("layers.attention.qkv.lora_b", (2304, 4), 12),
    ]


def test_lora_without_a_target_is_an_error():
    with pytest.raises(PlanError, match="no matrix of this model is called query"):
        Lora(4, ("query",)).weights(named("gpt2").weights())
    with pytest.raises(PlanError, match="rank must be positive, not -1"):
        Lora(-1)
    with pytest.raises(PlanError, match="at least one target"):
        parse_targets(" , ")
    assert parse_targets("q_proj, v_proj,up") == ("q", "v", "up")


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(PlanError, match=r"unknown optimizer 'adamm'; did you mean .*adam"):
        find_optimizer("adamm")
    with pytest.raises(PlanError, match="unknown precision 'bf61'; did you mean"):
        find_precision("bf61")
    assert find_optimizer("torch.optim.AdamW") is OPTIMIZERS["adamw"]
    assert find_optimizer("paged_adamw_8bit") is OPTIMIZERS["paged-adamw8bit"]


def test_small_tensors_stay_in_float32_under_eight_bit_optimizers():
    """bitsandbytes keeps states of fewer than 4096 elements in 32 bits (``min_8bit_size``)."""
    optimizer = OPTIMIZERS["adamw8bit"]
    bias, matrix = Weight("b", (768,), "bias"), Weight("w", (768, 768), "matrix")
    assert optimizer.bytes_for([bias], 4, rounded=False) == 2 * 768 * 4
    assert optimizer.bytes_for([matrix], 4, rounded=False) == 2 * (768 * 768 + 4 * 2304)


def test_states_round_up_to_the_allocators_block():
    bias = Weight("b", (10,), "bias", 3)
    assert OPTIMIZERS["adamw"].bytes_for([bias], 4) == 3 * 2 * 512
    assert OPTIMIZERS["adamw"].bytes_for([bias], 4, rounded=False) == 3 * 2 * 40


TORCH = {
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adam-amsgrad": ("Adam", {"amsgrad": True}),
    "adamw-amsgrad": ("AdamW", {"amsgrad": True}),
    "adamax": ("Adamax", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adadelta": ("Adadelta", {}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "rmsprop-momentum": ("RMSprop", {"momentum": 0.9}),
    "rmsprop-centered": ("RMSprop", {"centered": True}),
    "rprop": ("Rprop", {}),
    "asgd": ("ASGD", {}),
    "adafactor": ("Adafactor", {}),
    "muon": ("Muon", {}),
}


@pytest.mark.parametrize("name", TORCH)
def test_state_of_every_torch_optimizer(name):
    torch = pytest.importorskip("torch")
    kind, options = TORCH[name]
    if not hasattr(torch.optim, kind):
        pytest.skip(f"torch {torch.__version__} has no {kind}")
    shapes = [(64, 48), (48,)] if name != "muon" else [(64, 48)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, kind)(parameters, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1  # step counters are scalars
    )
    weights = [Weight(f"w{i}", shape, "matrix") for i, shape in enumerate(shapes)]
    assert OPTIMIZERS[name].bytes_for(weights, 4, rounded=False) == kept


def test_every_torch_optimizer_has_an_entry():
    torch = pytest.importorskip("torch")
    covered = {kind for kind, _ in TORCH.values()} | {"LBFGS", "SparseAdam", "Optimizer"}
    kinds = {
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    }
    assert kinds <= covered
