"""Parameter counts, by formula and by the models that transformers builds."""

from __future__ import annotations

import json

import pytest

from pytest_vram.planning.configs import FAMILIES, PAIRS, UNLIKE, from_config, named, read_config
from pytest_vram.planning.published import MODELS
from pytest_vram.planning.senses import SENSE_DEFAULTS
from pytest_vram.planning.seq2seq import BART_LIKE
from pytest_vram.planning.shapes import PlanError, Tower, UnknownFamilyError, decoder
from pytest_vram.planning.states import Lora
from pytest_vram.planning.text_defaults import TEXT_DEFAULTS


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Published counts: huggingface.co model cards and torch's own sums of the checkpoints.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("vit-base", 86_567_656),
        ("bart-base", 139_420_416),
        ("bart-large", 406_291_456),
        ("mbart-large-50", 610_879_488),
        ("whisper-tiny", 37_760_640),
        ("whisper-base", 72_593_920),
        ("whisper-small", 241_734_912),
        ("whisper-medium", 763_857_920),
        ("whisper-large-v2", 1_543_304_960),
        ("whisper-large-v3", 1_543_490_560),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-1b", 999_885_952),
        ("opt-125m", 125_239_296),
        ("opt-350m", 331_196_416),
        ("opt-6.7b", 6_658_473_984),
        ("pythia-6.9b", 6_857_302_016),
        ("gpt-neox-20b", 20_554_567_680),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("llama-3.1-405b", 405_853_388_800),
        ("codellama-34b", 33_743_970_304),
        ("yi-34b", 34_388_917_248),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("smollm3-3b", 3_075_098_624),
        ("mistral-nemo-12b", 12_247_782_400),
        ("mistral-small-24b", 23_572_403_200),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("olmoe-1b-7b", 6_919_161_856),
        ("phi-3.5-moe", 41_873_153_344),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("phi-3-mini", 3_821_079_552),
        ("phi-4", 14_659_507_200),
        ("gemma-3-12b", 11_766_034_176),
        ("olmo-7b", 6_888_095_744),
        ("olmo-2-7b", 7_298_617_344),
        ("granite-3.0-2b", 2_533_531_648),
        ("granite-3.0-8b", 8_170_848_256),
        ("command-r", 34_980_831_232),
        ("command-r-plus", 103_810_674_688),
        ("glm-4-9b-0414", 9_400_279_040),
        ("seed-oss-36b", 36_151_104_512),
        ("stablelm-3b-4e1t", 2_795_443_200),
        ("starcoder2-3b", 3_030_371_328),
        ("starcoder2-7b", 7_173_923_840),
        ("starcoder", 15_517_456_384),
        ("falcon-7b", 6_921_720_704),
        ("mpt-7b", 6_649_286_656),
        ("dinov2-base", 86_580_480),
        ("dinov2-large", 304_368_640),
        ("dinov2-giant", 1_136_480_768),
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
        ("flan-t5-small", 76_961_152),
        ("flan-t5-base", 247_577_856),
        ("flan-t5-large", 783_150_080),
        ("flan-t5-xl", 2_849_757_184),
        ("flan-t5-xxl", 11_135_332_352),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("mamba-2.8b", 2_768_345_600),
        ("mamba-codestral-7b", 7_285_403_648),
        ("llava-1.5-7b", 7_063_427_072),
        # 671,026,419,200 with the 58 x 256 correction biases, which are buffers
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_published_parameter_counts(name, parameters):
    assert named(name).parameters == parameters


T5_SIZES = {"d_model": 64, "num_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 96}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 8, "mamba_n_groups": 2}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SEQ2SEQ = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 128,
}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-base", 109_482_240),
        ("distilbert-base", 66_362_880),
        ("roberta-base", 124_645_632),
        ("roberta-large", 355_359_744),
        ("xlm-roberta-base", 278_043_648),
        ("electra-base", 108_891_648),
        ("modernbert-base", 149_014_272),
        ("modernbert-large", 394_781_696),
        ("mpnet-base", 109_486_464),
        ("nomic-embed-text", 136_731_648),
        ("albert-base-v2", 11_683_584),
        ("deberta-v3-base", 183_831_552),
        ("deberta-v3-large", 434_012_160),
    ],
)
def test_published_counts_of_bare_encoders(name, parameters):
    assert from_config({**MODELS[name], "architectures": ["Model"]}).parameters == parameters


def _small(family):
    sizes = {
        "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
        "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
        "t5": T5_SIZES,
        "gpt_neo": {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
        },
        "distilbert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96},
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
        "qwen3_moe": {"num_experts": 8},
        "qwen2_moe": {"num_experts": 8, "decoder_sparse_step": 2},
        "olmoe": {"num_experts": 8},
        "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "llama4_text": {
            "num_local_experts": 4,
            "intermediate_size_mlp": 112,
            "interleave_moe_layer_step": 2,
        },
        "cohere": {"use_qk_norm": True},
        "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
        "phimoe": {"lm_head_bias": True, "attention_bias": True},
        "ministral": {"head_dim": 16},
        "seed_oss": {"attention_out_bias": True},
        "ernie4_5": {"use_bias": True},
        "helium": {"head_dim": 16},
        "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4},
        "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
        "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4},
        "dbrx": {
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {
                "ffn_hidden_size": 96,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 64,
            },
        },
        "glm4_moe": {
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "n_group": 1,
        },
        "deit": {"architectures": ["DeiTForImageClassification"]},
        "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
        "whisper": {**SEQ2SEQ, "max_source_positions": 20, "max_target_positions": 30},
        "electra": {"embedding_size": 48},
        "albert": {"embedding_size": 48},
        "deberta": DISENTANGLED,
        "deberta-v2": {**DISENTANGLED, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
        "deepseek_v2": {**LATENT, "q_lora_rank": None},
        "deepseek_v3": {**LATENT, "q_lora_rank": 40},
        "mt5": T5_SIZES,
        "umt5": {**T5_SIZES, "num_decoder_layers": 2},
        **dict.fromkeys(BART_LIKE, SEQ2SEQ),
        "marian": {**SEQ2SEQ, "decoder_vocab_size": 211},
        "xglm": {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96},
        "openai-gpt": {"n_embd": 64, "n_layer": 3, "n_head": 4},
        "qwen3_vl_moe_text": {"num_experts": 8, "num_experts_per_tok": 2},
        "hunyuan_v1_dense": {"head_dim": 16},
        "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
        "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 48},
        "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
        "dots1": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        "ernie4_5_moe": {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "use_bias": True,
        },
        "ernie": {"use_task_id": True},
        "beit": {"use_relative_position_bias": True, "use_mask_token": True},
        "dinov3_vit": {"num_register_tokens": 4, "use_gated_mlp": True},
        "mamba": {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, "use_bias": True},
        "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 3, "expand": 3},
        "mamba2": {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 8,
        },
        "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        "bamba": {**MAMBA2, "attn_layer_indices": [1]},
        "granitemoehybrid": {
            **MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "shared_intermediate_size": 48,
        },
        "nemotron_h": {
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M-*EM",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
        },
        "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
        "lfm2_moe": {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
        },
        **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA),
    }
    usual = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    own = sizes.get(family, {})
    alone = family in (
        "gpt2",
        "gptj",
        "t5",
        "gpt_neo",
        "distilbert",
        "whisper",
        "gpt_bigcode",
        "codegen",
        "mpt",
        "dbrx",
        "mt5",
        "umt5",
        *BART_LIKE,
        "xglm",
        "openai-gpt",
        "mamba",
        "mamba2",
        "falcon_mamba",
    )
    return {**({} if alone else usual), **own, "vocab_size": 211, "pad_token_id": 0}


#: No class of transformers builds these without the tower that sees; their layers are Qwen2's.
SEEING = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "mllama_text_model")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SEEING])
@pytest.mark.filterwarnings("ignore")
def test_counts_agree_with_transformers(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = transformers.CONFIG_MAPPING[family](**_small(family))
    checked = 0
    for kind in (
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSpeechSeq2Seq",
        "AutoModelForCTC",
        "AutoModelForAudioClassification",
        "AutoModelForImageClassification",
        "AutoModelForSequenceClassification",
        "AutoModel",
    ):
        if type(config) not in getattr(transformers, kind)._model_mapping:
            continue  # the family has no such head
        with torch.device("meta"):
            model = getattr(transformers, kind).from_config(config)
        raw = {**config.to_dict(), "architectures": [type(model).__name__]}
        raw["num_labels"] = config.num_labels
        counted = sum(parameter.numel() for parameter in model.parameters())
        if family == "whisper" and "AudioClassification" in kind:
            continue  # refused, in a test of its own
        if family in (*BART_LIKE, "whisper") and "CausalLM" in kind:
            with pytest.raises(PlanError, match="the decoder alone is not planned"):
                from_config(raw)
            continue
        assert from_config(raw).parameters == counted, type(model).__name__
        checked += 1
    assert checked


def test_explicit_sizes_make_gpt2():
    shape = decoder(layers=12, hidden=768, heads=12, vocab=50257, positions=1024)
    assert shape.parameters == named("gpt2").parameters


def test_the_gated_default_is_llamas():
    shape = decoder(
        layers=32,
        hidden=4096,
        heads=32,
        vocab=32000,
        gated=True,
        rmsnorm=True,
        bias=False,
        tied=False,
    )
    assert shape.tower.ffn == 11008
    assert shape.parameters == 6_738_415_616


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heads": 7}, "7 heads do not divide a hidden size of 768"),
        ({"layers": 0}, "layers must be positive, not 0"),
        ({"hidden": -1}, "hidden must be positive, not -1"),
        ({"vocab": 0}, "a language-model head needs a vocabulary"),
        ({"kv_heads": 5}, "5 key/value heads do not divide 12 heads"),
        ({"experts": 4, "top_k": 9}, "9 experts per token out of 4"),
    ],
)
def test_impossible_shapes_are_refused(change, sentence):
    sizes = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, **change}
    with pytest.raises(PlanError, match=sentence):
        decoder(**sizes)


def test_a_head_may_be_wider_than_hidden_over_heads():
    tower = Tower(layers=1, hidden=768, heads=7, ffn=100, head_dim=128)
    assert tower.query == 896


def test_depth_changes_keep_the_towers_proportions():
    t5 = from_config(
        {
            "model_type": "t5",
            "d_model": 64,
            "num_heads": 4,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 6,
            "vocab_size": 99,
        }
    )
    deeper = t5.with_layers(20)
    assert [tower.layers for tower in deeper.towers] == [10, 10]
    with pytest.raises(PlanError, match="1 layers for 2 towers"):
        t5.with_layers(1)


def test_a_config_needs_its_fields():
    whole = MODELS["llama-7b"]
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        broken = {key: value for key, value in whole.items() if key != field}
        with pytest.raises(PlanError, match=f"field '{field}' is missing"):
            from_config(broken)
    with pytest.raises(PlanError, match="hidden_size must be a positive number, not -4"):
        from_config({**whole, "hidden_size": -4})
    with pytest.raises(PlanError, match="field 'model_type' is missing"):
        from_config({"hidden_size": 4})
    with pytest.raises(PlanError, match=r"model_type 'lama' is not known .*llama"):
        from_config({**whole, "model_type": "lama"})


def test_what_cannot_be_planned_says_what_can_be_done():
    with pytest.raises(PlanError) as error:
        from_config({"model_type": "perceiver", "d_model": 1280}, "c.json")
    assert str(error.value) == (
        "c.json: model_type 'perceiver' is not known to the planner. Plan it from its code "
        "(module:attribute of the nn.Module) or from its sizes (--layers, --hidden, --heads, "
        "--vocab); `pytest-vram simulate train.py` runs a step of it on a simulated card and "
        "counts every bill"
    )
    rwkv = {"model_type": "rwkv", "hidden_size": 2560, "num_hidden_layers": 64}
    with pytest.raises(PlanError, match=r"^config: rwkv has recurrent layers \(state-space or"):
        from_config({**rwkv, "vocab_size": 50277, "architectures": ["RwkvForCausalLM"]})


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # state-spaces/mamba-2.8b-hf, mistralai/Mamba-Codestral-7B-v0.1, ai21labs/Jamba-v0.1
        (
            {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "expand": 2}
            | {"vocab_size": 50280, "state_size": 16, "time_step_rank": 160},
            2_768_345_600,
        ),
        (
            {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64}
            | {"num_heads": 128, "head_dim": 64, "n_groups": 8, "vocab_size": 32768},
            7_285_403_648,
        ),
        (
            {"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
            | {"num_experts": 16, "attn_layer_period": 8, "attn_layer_offset": 4}
            | {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 256}
            | {"vocab_size": 65536},
            51_570_323_328,
        ),
    ],
    ids=["mamba-2.8b", "mamba-codestral-7b", "jamba-v0.1"],
)
def test_published_counts_of_models_that_carry_a_state(config, parameters):
    shape = from_config(config)
    assert shape.parameters == parameters


UNKNOWN = {**MODELS["llama-7b"], "model_type": "newllm", "architectures": ["NewForCausalLM"]}


def test_an_unknown_family_with_llamas_sizes_is_planned_as_llama_and_says_so():
    shape = from_config(UNKNOWN)
    assert shape.parameters == 6_738_415_616
    assert shape.notes == (
        "model_type 'newllm' is not known to the planner: planned as if its layers were Llama's; "
        "compare 6,738,415,616 parameters with what its authors say",
    )


def test_a_family_that_is_known_to_be_otherwise_is_not_taken_for_llama():
    with pytest.raises(UnknownFamilyError, match="'gemma4_text' is not known") as error:
        from_config({**UNKNOWN, "model_type": "gemma4_text"})
    assert error.value.guess.guessed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(UNLIKE & {"bitnet", "diffllama", "apertus", "rembert"}))
def test_what_is_known_to_be_otherwise_is(kind):
    """Their counts as Llama are not those of the models that transformers builds."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnknownFamilyError) as error:
        from_config({**config.to_dict(), "architectures": [type(model).__name__]})
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert error.value.guess.parameters != counted


@pytest.mark.parametrize(
    "other",
    [
        {"n_routed_experts": 8},
        {"kv_lora_rank": 512},
        {"ssm_state_size": 16},
        {"is_encoder_decoder": True},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"architectures": ["NewForMaskedLM"]},
        {"architectures": None},
        {"intermediate_size": None},
    ],
)
def test_an_unknown_family_with_anything_else_is_refused(other):
    with pytest.raises(PlanError, match="model_type 'newllm' is not known to the planner"):
        from_config({**UNKNOWN, **other})


VISION = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096}
VISION |= {"num_hidden_layers": 24, "image_size": 336, "patch_size": 14}


def test_llava_as_its_file_is_published():
    """llava-1.5-7b: 7,063,427,072 parameters on its card; the language model 6,738,939,904, CLIP
    ViT-L/14 at 336 pixels 303,507,456, the projector 20,979,712."""
    published = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "vision_config": VISION,
        "tie_word_embeddings": False,
    }
    shape = from_config(published)
    assert shape.parameters == 7_063_427_072
    assert shape.notes == (
        "its vision tower and projector are counted (324,487,168 parameters); what they keep for "
        "backward is not: freeze the tower, or simulate",
    )
    alone = {**published, "architectures": ["LlamaForCausalLM"]}
    assert from_config(alone).parameters == 6_738_939_904


@pytest.mark.parametrize(
    ("outer", "inner", "parameters"),
    [
        # Fields as the published files have them; language models' counts of the checkpoints.
        (
            "gemma3",
            {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
            },
            3_880_263_168,
        ),
        ("mistral3", MODELS["mistral-small-24b"], 23_572_403_200),
        ("llama4", {"model_type": "llama4_text"}, 107_769_861_120),
    ],
)
def test_towers_that_are_not_known_are_left_out_and_it_is_said(outer, inner, parameters):
    seeing = {"model_type": "other", "hidden_size": 8}
    shape = from_config({"model_type": outer, "text_config": inner, "vision_config": seeing})
    assert shape.parameters == parameters
    assert shape.notes == ("planned without its vision tower",)


def test_flat_multimodal_configurations_and_their_ties():
    """Qwen2.5-VL-7B: 7,615,616,512 parameters of Qwen2.5-7B and 676,550,144 of its tower."""
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    flat = {**MODELS["qwen2.5-7b"], "model_type": "qwen2_5_vl", "vision_config": tower}
    assert from_config(flat).parameters == 7_615_616_512 + 676_550_144 == 8_292_166_656
    nested = {"model_type": "x", "text_config": MODELS["llama-7b"], "tie_word_embeddings": True}
    assert from_config(nested).tied


def test_adapters_reach_a_tower_by_the_names_of_its_modules():
    """CLIP's q_proj and v_proj are targets as the language model's are; Qwen's tower has a qkv."""
    adapters = Lora(8, ("q", "v"))
    llava, llama = named("llava-1.5-7b"), named("llama-7b")
    counts = [sum(w.total for w in adapters.weights(s.weights())) for s in (llava, llama)]
    assert counts[0] - counts[1] == 24 * 2 * 8 * (1024 + 1024)
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    flat = {**MODELS["qwen2.5-7b"], "model_type": "qwen2_5_vl", "vision_config": tower}
    names = {w.name for w in adapters.weights(from_config(flat).weights())}
    assert not any(name.startswith("vision") for name in names)


def test_the_whole_decides_about_the_tie_and_its_part_where_the_whole_is_silent():
    part = {**MODELS["qwen2.5-0.5b"], "tie_word_embeddings": True}
    whole = {"model_type": "x", "text_config": part}
    assert from_config(whole).tied
    assert not from_config({**whole, "tie_word_embeddings": False}).tied
    onevision = {**whole, "model_type": "llava_onevision", "tie_word_embeddings": False}
    assert from_config(onevision).tied  # its class asks the part


def test_other_parts_beside_a_language_model_are_named():
    parts = {"encoder_config": {"hidden_size": 8}, "projector_config": {"model_type": "q"}}
    whole = {"model_type": "x", "text_config": MODELS["llama-7b"], **parts}
    assert from_config(whole).notes == ("planned without its encoder_config and projector_config",)


def test_a_detector_around_a_language_model_is_refused():
    whole = {
        "model_type": "grounding-dino",
        "text_config": MODELS["bert-base"],
        "encoder_layers": 6,
    }
    with pytest.raises(PlanError, match="has layers of its own around the language model"):
        from_config(whole)


SEEING_MODELS = (
    *("llava", "llava_next", "llava_onevision", "vipllava", "paligemma", "gemma3", "mistral3"),
    *("llama4", "mllama", "idefics3", "smolvlm", "internvl", "cohere2_vision", "qwen2_vl"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_audio", "voxtral"),
)


@pytest.mark.parametrize("published", [True, False], ids=["as published", "every field"])
@pytest.mark.parametrize("kind", SEEING_MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_that_see_or_hear_agree_with_transformers(kind, published):
    """Whole models of their classes' own sizes, from files without what equals those."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.CONFIG_MAPPING[kind]()
    auto = getattr(transformers, "AutoModelForMultimodalLM", None)
    if auto is None or type(config) not in auto._model_mapping:
        pytest.skip(f"this transformers has no class for {kind}")
    with torch.device("meta"):
        model = auto.from_config(config)
    config.architectures = [type(model).__name__]
    raw = json.loads(config.to_json_string(use_diff=published))
    shape = from_config(raw)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert "and projector are counted" in shape.notes[-1]


@pytest.mark.parametrize("inner", [None, 28672])
@pytest.mark.filterwarnings("ignore")
def test_aya_vision_agrees_with_transformers(inner):
    """Its class's own sizes cannot be built: 14 heads do not divide 1,152."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    auto = getattr(transformers, "AutoModelForMultimodalLM", None)
    if auto is None:
        pytest.skip("this transformers has no AutoModelForMultimodalLM")
    sizes = {"num_attention_heads": 16, "num_hidden_layers": 2, "intermediate_size": 96}
    seen = {"model_type": "siglip_vision_model", "hidden_size": 64, "image_size": 28, **sizes}
    read = {"model_type": "cohere2", "hidden_size": 64, "num_key_value_heads": 8, **sizes}
    config = transformers.CONFIG_MAPPING["aya_vision"](
        vision_config={**seen, "patch_size": 14}, text_config={**read, "vocab_size": 211}
    )
    if inner:
        config.alignment_intermediate_size = inner
    with torch.device("meta"):
        model = auto.from_config(config)
    config.architectures = [type(model).__name__]
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert from_config(json.loads(config.to_json_string())).parameters == counted


SOUND = {"model_type": "wav2vec2", "hidden_size": 768, "num_hidden_layers": 12}
SOUND |= {"num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 32}
LARGE_SOUND = {**SOUND, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
LARGE_SOUND |= {"intermediate_size": 4096, "feat_extract_norm": "layer", "conv_bias": True}
LARGE_SOUND |= {"do_stable_layer_norm": True}


@pytest.mark.parametrize(
    ("config", "head", "parameters"),
    [
        (SOUND, "Wav2Vec2ForCTC", 94_396_320),  # wav2vec2-base-960h
        (LARGE_SOUND, "Wav2Vec2Model", 315_438_720),  # wav2vec2-large-xlsr-53, xls-r-300m
        ({**SOUND, "model_type": "hubert"}, "HubertModel", 94_371_712),  # hubert-base-ls960
    ],
)
def test_encoders_of_raw_sound(config, head, parameters):
    shape = from_config({**config, "architectures": [head]})
    assert shape.parameters == parameters
    assert shape.audio_per_token == 320
    assert shape.notes == ("the sequence counts frames of 320 samples, 50 a second at 16 kHz",)


def test_pre_training_on_sound_is_refused():
    with pytest.raises(PlanError, match="Wav2Vec2ForPreTraining is not planned; CTC and sequence"):
        from_config({**SOUND, "architectures": ["Wav2Vec2ForPreTraining"]})


CLIP_LARGE = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "projection_dim": 768,
    "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "vision_config": {**VISION, "image_size": 224, "num_attention_heads": 16},
}


def test_two_towers_in_a_contrastive_loss():
    """openai/clip-vit-large-patch14: 427,616,513 parameters; clip-vit-base-patch32 is what the
    class has: 151,277,313."""
    shape = from_config(CLIP_LARGE)
    assert shape.parameters == 427_616_513
    assert from_config({"model_type": "clip"}).parameters == 151_277_313
    assert [tower.tokens for tower in shape.towers] == [257, 0]
    assert (shape.positions, shape.head) == (77, "none")
    with pytest.raises(PlanError, match="of clip the two towers together are planned"):
        from_config({**CLIP_LARGE, "architectures": ["CLIPVisionModel"]})


@pytest.mark.parametrize("published", [True, False], ids=["as published", "every field"])
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.filterwarnings("ignore")
def test_pairs_agree_with_transformers(kind, published):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    config.architectures = [type(model).__name__]
    raw = json.loads(config.to_json_string(use_diff=published))
    assert from_config(raw).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", SENSE_DEFAULTS)
@pytest.mark.filterwarnings("ignore")
def test_defaults_of_towers_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    whole = transformers.CONFIG_MAPPING[kind]().to_dict()
    usual = {name: value for name, value in SENSE_DEFAULTS[kind].items() if value != []}
    assert {name: whole[name] for name in usual} == usual


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
@pytest.mark.filterwarnings("ignore")
def test_text_defaults_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    whole = transformers.CONFIG_MAPPING[kind]().to_dict()
    assert {name: whole[name] for name in TEXT_DEFAULTS[kind]} == TEXT_DEFAULTS[kind]


def test_config_files(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["gpt2"]))
    assert read_config(folder).name == "my-model"
    assert read_config(folder / "config.json").parameters == 124_439_808
    with pytest.raises(PlanError, match="no such file"):
        read_config(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        read_config(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(PlanError, match="is a JSON object, this is a list"):
        read_config(tmp_path / "list.json")


def test_unknown_models_suggest_the_nearest():
    with pytest.raises(PlanError, match=r"did you mean llama-3-8b"):
        named("llama3-8b")
    with pytest.raises(PlanError, match="Nothing is downloaded"):
        named("somebody/other-7b")


@pytest.mark.parametrize(
    ("hub", "short"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("google/vit-base-patch16-224", "vit-base"),
        ("openai/whisper-large-v3", "whisper-large-v3"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("GPT2", "gpt2"),
    ],
)
def test_names_of_the_hub(hub, short):
    assert named(hub).name == short


def test_of_a_model_that_sees_the_text_part_is_planned_and_said():
    seeing = {"model_type": "unheard-of"}
    whole = {"model_type": "gemma3", "text_config": MODELS["gemma-3-1b"], "vision_config": seeing}
    shape = from_config(whole)
    assert shape.parameters == named("gemma-3-1b").parameters
    assert shape.notes == ("planned without its vision tower",)


def test_whisper_classification_is_refused():
    config = {**MODELS["whisper-tiny"], "architectures": ["WhisperForAudioClassification"]}
    with pytest.raises(PlanError, match="planned for speech recognition, not classification"):
        from_config(config)
