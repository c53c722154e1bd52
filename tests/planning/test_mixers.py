"""Layers that carry a state: what their kernels keep, and how they stand among other layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_vram.planning.activations import (
    Forward,
    Recompute,
    Sharding,
    kinds,
    layer_saved,
    tower_bytes,
)
from pytest_vram.planning.configs import from_config, named
from pytest_vram.planning.mixers import DeltaNet, Scan, ShortConv, StateSpace
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Setup
from pytest_vram.planning.states import PRECISIONS, Lora

PLAIN = PRECISIONS["bf16-plain"]
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_dt_rank": 256,
    "vocab_size": 65536,
}


@pytest.mark.parametrize(
    ("mixer", "kept", "wide"),
    [
        # xz, the scan's output, x_dbl, B and C: mamba_ssm's MambaInnerFn
        (Scan(5120, 16, 160, 4), 2 * 5120 + 5120 + (160 + 32) + 32, 0),
        # zxbcdt, out_x; rstd in fp32: mamba_ssm's MambaSplitConv1dScanCombinedFn
        (StateSpace(128, 64, 8, 128, 4), (2 * 8192 + 2 * 8 * 128 + 128) + 8192, 8),
        # in_proj, B x, the convolution, C times it
        (ShortConv(2048, 3), 6 * 2048, 0),
        # fla's q, k, v, beta, A; the convolution's input, o, z, the projection's input
        (
            DeltaNet(16, 32, 128, 128, 4),
            8192 + 2 * 2048 + 4 * 4096 + 66 * 32,
            3 * 32 + 2 * 16,
        ),
    ],
    ids=["mamba", "mamba2", "lfm2", "qwen3-next"],
)
def test_what_kernels_keep_of_a_token(mixer, kept, wide):
    assert (mixer.kept, mixer.wide) == (kept, wide)


def test_a_layer_of_mamba_tensor_by_tensor():
    """The stream in fp32 (the norm's), its normalised copy, the input of the projection, and what
    the kernel keeps: no attention, no feed-forward block."""
    tower = named("mamba-2.8b").tower
    items = {item.name: item.size for item in layer_saved(tower, Forward(1, 2048, PLAIN))}
    tokens, mixer = 2048, tower.mixer
    assert items == {
        "norm 1 input in fp32": tokens * 2560 * 4,
        "norm 1 statistics": tokens * 4,
        "norm 1 normalised": tokens * 2560 * 2,
        "attention input": tokens * 2560 * 2,
        "mixer": tokens * mixer.kept * 2,
    }


def test_the_kinds_of_layers_of_a_hybrid():
    """Jamba: 4 of 32 layers attend, 16 are mixtures."""
    tower = from_config(JAMBA).tower
    shares = {(kind.core, kind.block): 32 * kind.share for kind in kinds(tower)}
    assert shares == {
        ("attention", "mlp"): 2,
        ("attention", "moe"): 2,
        ("mixer", "mlp"): 14,
        ("mixer", "moe"): 14,
    }
    assert (tower.attention_layers, tower.dense_layers) == (4, 16)


def test_the_kinds_of_alternating_layers():
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-*-ME",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "vocab_size": 99,
    }
    tower = from_config(config).tower
    shares = {kind.core or kind.block: 8 * kind.share for kind in kinds(tower)}
    assert shares == {"mixer": 3, "attention": 1, "mlp": 3, "moe": 1}


def test_a_checkpointed_hybrid_runs_its_largest_kind_again():
    tower, run = from_config(JAMBA).tower, Forward(1, 1024, PLAIN)
    whole = tower_bytes(tower, 32, run, Recompute("full"), Sharding())
    sizes = [sum(item.size for item in layer_saved(tower, run, kind)) for kind in kinds(tower)]
    assert whole.rerun == max(sizes)
    assert whole.kept == 32 * 1024 * 4096 * 2


def test_plans_name_the_kernels_that_they_assume():
    plan = make_plan(Setup(named("mamba-2.8b"), sequence=512, precision=PLAIN))
    assert plan.notes == (
        "planned with the kernels of mamba_ssm, by what their source keeps for backward; without "
        "that package transformers runs a loop in PyTorch that keeps many times as much",
    )
    lfm2 = {
        "model_type": "lfm2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 99,
        "layer_types": ["conv", "full_attention"],
    }
    assert make_plan(Setup(from_config(lfm2))).notes == ()


def test_a_hybrid_keeps_its_proportions_when_it_gets_deeper():
    deeper = from_config(JAMBA).with_layers(64).tower
    assert (deeper.layers, deeper.attention_layers, deeper.moe_layers) == (64, 8, 32)


def test_adapters_on_the_projections_of_a_mixer():
    """``all-linear`` reaches in, x, dt and out of each layer."""
    shape = named("mamba-2.8b")
    sides = (2560 + 10240) + (5120 + 192) + (160 + 5120) + (5120 + 2560)
    trained = make_plan(Setup(shape, lora=Lora(8, ("all-linear",)), precision=PLAIN)).trainable
    assert trained == 64 * 8 * sides


def test_layers_are_counted_by_kind():
    shape = from_config(JAMBA)
    counted = {weight.name: weight.count for weight in shape.weights()}
    assert counted["layers.attention.q"] == 4
    assert counted["layers.mixer.in"] == 28
    assert counted["layers.mlp.gate"] == counted["layers.experts.router"] == 16
    assert counted["layers.norm.weight"] == 64
    with pytest.raises(ValueError, match="33 recurrent layers out of 32 layers"):
        replace(shape.tower, mixer_layers=33)
