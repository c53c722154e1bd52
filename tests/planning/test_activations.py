"""What a layer keeps for backward, tensor by tensor."""

from __future__ import annotations

import pytest

from pytest_vram.planning.activations import (
    Forward,
    Kind,
    Recompute,
    Saved,
    Sharding,
    head_bytes,
    layer_saved,
    parse_recompute,
    tower_bytes,
)
from pytest_vram.planning.configs import named
from pytest_vram.planning.shapes import PlanError, Tower, decoder
from pytest_vram.planning.states import PRECISIONS, Lora

H = 1024
GPT = Tower(layers=8, hidden=H, heads=16, ffn=4 * H, fused_qkv=True)
LLAMA = Tower(
    layers=8,
    hidden=H,
    heads=16,
    kv_heads=8,
    ffn=3 * H,
    gated=True,
    norm="rmsnorm",
    rotary=True,
    activation="silu",
)


def forward(precision="bf16-plain", **more):
    return Forward(2, 256, PRECISIONS[precision], **more)


def per_element(tower, f, **more):
    """Bytes per token and hidden element, statistics and log-sum-exp left out."""
    small = ("statistics", "log-sum-exp")
    items = layer_saved(tower, f, **more)
    size = sum(item.size for item in items if not item.name.endswith(small))
    return size / (f.tokens * tower.hidden)


@pytest.mark.parametrize(
    ("tower", "precision", "expected"),
    [
        # two norm inputs, two norm outputs, qkv 3, attention output, up 4, gelu output 4: 16 H
        (GPT, "bf16-plain", 2 * 16),
        (GPT, "fp32", 4 * 16),
        # the residual stream stays fp32 (2 x 4), everything else is cast (14 x 2)
        (GPT, "bf16", 2 * 4 + 2 * 14),
        # RMSNorm: fp32 input 4, normalised 2, output 2, twice; q 2, k v 2, output 2; four of 3 H
        (LLAMA, "bf16-plain", 2 * 8 + 2 + 2 + 2 + 4 * 3 * 2),
        # under autocast each of q, k, v and of gate, up casts its input for itself
        (LLAMA, "bf16", 2 * 8 + 5 * 2 + 2 + 2 + 2 + 4 * 3 * 2),
        (LLAMA, "fp32", 2 * 12 + 4 + 4 + 4 + 4 * 3 * 4),
    ],
)
def test_bytes_per_token_and_hidden_element(tower, precision, expected):
    assert per_element(tower, forward(precision)) == expected


def test_flash_attention_keeps_the_log_sum_exp_instead_of_scores():
    """B A S fp32 numbers."""
    flash = {item.name: item.size for item in layer_saved(GPT, forward())}
    assert flash["attention log-sum-exp"] == 2 * 16 * 256 * 4
    assert not any(item.quadratic for item in layer_saved(GPT, forward()))


@pytest.mark.parametrize(
    ("precision", "dropout", "per_score"),
    [
        ("bf16", 0.0, 4 + 2),
        ("bf16-plain", 0.1, 4 + 1 + 2),
        ("bf16-plain", 0.0, 4 + 2),
        ("fp32", 0.0, 4),
        ("fp32", 0.1, 9),
    ],
)
def test_explicit_attention_keeps_scores(precision, dropout, per_score):
    items = layer_saved(GPT, forward(precision, attention="explicit", dropout=dropout))
    quadratic = sum(item.size for item in items if item.quadratic)
    assert quadratic == per_score * 2 * 16 * 256 * 256


def test_dropout_adds_a_byte_per_element_after_attention_and_feed_forward():
    assert per_element(GPT, forward(dropout=0.1)) - per_element(GPT, forward()) == 2


def test_frozen_matrices_keep_no_inputs():
    lora = Lora(8, ("q", "v"), size=4)
    frozen = {item.name: item.size for item in layer_saved(LLAMA, forward(lora=lora))}
    tokens = 2 * 256
    assert frozen["attention input"] == 2 * tokens * H * 4  # an fp32 copy for each adapter
    assert frozen["feed-forward input"] == 0
    assert "norm 1 normalised" not in frozen
    assert "mlp down input" not in frozen
    cast = {item.name: item.size for item in layer_saved(LLAMA, forward("bf16", lora=lora))}
    assert cast["attention input"] == 2 * tokens * H * 2


def test_activation_functions():
    def kept(activation, precision="bf16-plain"):
        tower = Tower(layers=1, hidden=H, heads=16, ffn=4 * H, activation=activation)
        items = layer_saved(tower, forward(precision))
        size = sum(item.size for item in items if item.name.startswith("mlp"))
        return size / (2 * 256 * 4 * H)

    assert kept("relu") == 2  # its output is the next matrix's input
    assert kept("gelu") == 2 + 2
    assert kept("gelu_new") == 4 * 2 + 2
    assert kept("gelu_new", "bf16") == 3 * 4 + 2 + 2  # pow, tanh and 1 + tanh in fp32


def test_mixture_of_experts_keeps_each_tokens_copies():
    tower = Tower(
        layers=2, hidden=H, heads=16, ffn=2 * H, gated=True, experts=8, top_k=2, activation="silu"
    )
    items = {
        item.name: item.size for item in layer_saved(tower, forward(), Kind(1, "attention", "moe"))
    }
    copies = 2 * 2 * 256
    assert items["expert inputs"] == copies * H * 2
    assert items["experts gate"] == copies * 2 * H * 2
    assert items["expert outputs"] == copies * H * 2
    assert items["router"] == 2 * 256 * 8 * 8


def test_recomputation():
    f, alone = forward(), Sharding()
    layer = sum(item.size for item in layer_saved(GPT, f))
    whole = tower_bytes(GPT, 8, f, Recompute(), alone)
    assert (whole.kept, whole.rerun) == (8 * layer, 0)
    full = tower_bytes(GPT, 8, f, Recompute("full"), alone)
    assert (full.kept, full.rerun) == (8 * 2 * 256 * H * 2, layer)
    every = tower_bytes(GPT, 8, f, Recompute("every", 3), alone)
    assert (every.kept, every.rerun) == (3 * 2 * 256 * H * 2, 3 * layer)


def test_selective_recomputation_drops_what_grows_with_the_square():
    f = forward(attention="explicit")
    alone = Sharding()
    with_scores = tower_bytes(GPT, 1, f, Recompute(), alone).kept
    without = tower_bytes(GPT, 1, f, Recompute("selective"), alone).kept
    assert with_scores - without == 6 * 2 * 16 * 256 * 256


def test_checkpoints_every_sqrt_l_layers():
    assert parse_recompute("sqrt", 36) == Recompute("every", 6)
    assert parse_recompute("sqrt", 40) == Recompute("every", 7)
    assert parse_recompute("every:4", 40) == Recompute("every", 4)
    assert str(Recompute("every", 4)) == "every:4"
    for wrong in ("half", "every", "every:0", "full:2", "sqrt:1"):
        with pytest.raises(PlanError, match="unknown recomputation"):
            parse_recompute(wrong, 12)


def test_parallelism_cuts_what_it_can():
    """Tensor parallelism leaves norms whole, sequence parallelism cuts them too."""
    cut, whole = Saved("up", 800, cut=True), Saved("norm", 800)
    tensor, both = Sharding(tensor=4), Sharding(tensor=4, sequence=True)
    assert (tensor.share(cut), tensor.share(whole)) == (200, 800)
    assert (both.share(cut), both.share(whole)) == (200, 200)
    assert Sharding(context=2).share(whole) == 400


def test_the_head_of_a_language_model():
    shape = decoder(layers=1, hidden=H, heads=16, vocab=1000)
    values = 2 * 256 * 1000
    half = head_bytes(shape, forward(), Sharding())
    assert half.saved == values * (2 + 4)  # held logits and the fp32 log-softmax
    assert (half.forward, half.backward) == (values * 4, values * 8)
    single = head_bytes(shape, forward("fp32"), Sharding(), held=False)
    assert single.saved == values * 4
    assert (single.forward, single.backward) == (values * 4, values * 8)


def test_cross_entropy_without_upcast():
    shape = named("bert-base")
    values = 2 * 256 * 30522
    cast = head_bytes(shape, forward("bf16"), Sharding())
    assert cast.saved == values * (2 + 2 + 4)
    assert (cast.forward, cast.backward) == (0, values * 4)
