"""Parameter counts, by formula and by the models that transformers builds."""

from __future__ import annotations

import json

import pytest

from pytest_vram.planning.configs import FAMILIES, MODELS, from_config, named, read_config
from pytest_vram.planning.shapes import PlanError, Tower, decoder


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
    ],
)
def test_published_parameter_counts(name, parameters):
    assert named(name).parameters == parameters


def _small(family):
    sizes = {
        "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
        "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
        "t5": {"d_model": 64, "num_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 96},
        "gpt_neo": {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
        },
        "distilbert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96},
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
        "qwen3_moe": {"num_experts": 8},
    }
    usual = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    own = sizes.get(family, {})
    alone = family in ("gpt2", "gptj", "t5", "gpt_neo", "distilbert")
    return {**({} if alone else usual), **own, "vocab_size": 211, "pad_token_id": 0}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_counts_agree_with_transformers(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[family](**_small(family))
    checked = 0
    for kind in (
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
        "AutoModelForSeq2SeqLM",
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
        assert from_config(raw).parameters == counted, type(model).__name__
        checked += 1
    assert checked >= 2


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
