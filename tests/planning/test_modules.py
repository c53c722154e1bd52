"""Shapes of live modules."""

from __future__ import annotations

import json

import pytest

from pytest_vram.planning.modules import build, from_module, load_module
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Setup
from pytest_vram.planning.shapes import PlanError

torch = pytest.importorskip("torch")
nn = torch.nn


class Block(nn.Module):
    """As people write them: fused qkv, pre-norm, GELU."""

    def __init__(self, hidden=64, heads=4):
        super().__init__()
        self.n_head = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)}
        )
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )


class Model(nn.Module):
    def __init__(self, layers=3, hidden=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(100, hidden), nn.Embedding(32, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 100, bias=False)
        self.head.weight = self.tok.weight


def test_a_hand_written_model_is_recognised():
    model = Model()
    shape = from_module(model)
    tower = shape.tower
    assert (tower.layers, tower.hidden, tower.heads, tower.ffn) == (3, 64, 4, 256)
    assert (tower.fused_qkv, tower.norms, tower.norm, tower.activation) == (
        True,
        2,
        "layernorm",
        "gelu",
    )
    assert (shape.vocab, shape.positions, shape.tied, shape.head) == (100, 32, True, "lm")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_fixed_bills_are_the_tensors_own():
    model = Model()
    bills = make_plan(Setup(from_module(model), sequence=16)).bills
    rounded = sum(-(-4 * parameter.numel() // 512) * 512 for parameter in model.parameters())
    assert bills["parameters"] == bills["gradients"] == rounded
    assert bills["optimizer_state"] == 2 * rounded


def test_torchs_own_encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128)
    shape = from_module(nn.TransformerEncoder(layer, 5, enable_nested_tensor=False))
    tower = shape.tower
    assert (tower.layers, tower.heads, tower.ffn, tower.activation) == (5, 4, 128, "relu")
    assert shape.head == "none"


def test_frozen_layers_have_no_gradients_and_the_plan_says_so():
    model = Model()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    plan = make_plan(Setup(from_module(model), sequence=16))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.trainable == trained
    assert plan.notes == ("frozen layers: activations are planned as if every layer were trained",)


def test_a_model_with_a_configuration():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2))
    shape = from_module(model)
    assert shape.name == "GPT2LMHeadModel"
    assert shape.tower.activation == "gelu_new"
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_adapters_are_not_part_of_the_shape():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(n_layer=2)
    plain = sum(p.numel() for p in transformers.GPT2LMHeadModel(config).parameters())
    adapted = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config), peft.LoraConfig(target_modules=["c_attn"])
    )
    assert from_module(adapted).parameters == plain


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.Linear(3, 4), "Linear repeats no block of layers"),
        (nn.Sequential(nn.Identity(), nn.Identity()), "Sequential repeats no block of layers"),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(2))),
            "cannot tell how many heads Sequential has",
        ),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))),
            "have no feed-forward pair of 8 -> F -> 8",
        ),
        (
            nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Sequential(nn.Conv2d(1, 1, 1))),
            "Sequential has no linear layers",
        ),
    ],
)
def test_what_cannot_be_recognised(module, sentence):
    with pytest.raises(PlanError, match=sentence):
        from_module(module)


def test_targets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def good():\n    return nn.Linear(2, 2)\n"
        "def bad():\n    raise RuntimeError('no weights')\n"
        "number = 3\n"
    )
    assert load_module("my_models:good").weight.is_meta
    for target, sentence in (
        ("my_models:bad", r"my_models:bad\(\) failed: RuntimeError: no weights"),
        ("my_models:number", "my_models:number is a int, not an nn.Module"),
        ("my_models:nothing", "has no attribute 'nothing'"),
        ("no_such_models:x", "No module named 'no_such_models'"),
    ):
        with pytest.raises(PlanError, match=sentence):
            load_module(target)


@pytest.fixture
def published(tmp_path):
    """Writes a config.json of the sizes given."""

    def write(kind, **fields):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
        return tmp_path / "config.json"

    return write


CTRL = {"n_embd": 64, "dff": 128, "n_layer": 3, "n_head": 4, "vocab_size": 211, "n_positions": 32}


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_is_not_known_is_built_and_counted(published):
    transformers = pytest.importorskip("transformers")
    module = build(published("ctrl", architectures=["CTRLLMHeadModel"], **CTRL))
    assert isinstance(module, transformers.CTRLLMHeadModel)
    assert all(parameter.is_meta for parameter in module.parameters())
    shape = from_module(module)
    assert shape.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert (shape.layers, shape.tower.ffn, shape.recognised) == (3, 128, True)
    assert shape.notes == (
        "ctrl has no closed form here: parameters are those of the model that was built, layers "
        "are read off the blocks that it repeats",
    )
    plan = make_plan(Setup(shape, sequence=16))
    assert "architecture" in {item.name for item in plan.assumptions}


@pytest.mark.filterwarnings("ignore")
def test_a_guess_is_counted_where_the_model_can_be_built(published):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 211, "pad_token_id": 0}
    module = build(
        published("modernbert-decoder", architectures=["ModernBertDecoderForCausalLM"], **sizes)
    )
    shape = from_module(module)
    assert shape.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_tower_that_is_not_known_is_counted_where_the_model_can_be_built(published):
    pytest.importorskip("transformers")
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 211}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    path = published("got_ocr2", text_config=text, vision_config={"model_type": "got_ocr2_vision"})
    module = build(path)
    shape = from_module(module)
    assert shape.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert shape.notes == (
        "all its parts are counted, activations are those of its language model alone",
    )
    assert shape.partial == ""


def test_what_cannot_be_built(published):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(PlanError) as error:
        build(published("newllm"))
    assert (
        str(error.value) == f"transformers {transformers.__version__} does not know 'newllm' either"
    )
    with pytest.raises(PlanError, match="cannot build it: "):
        build(published("ctrl", n_embd=-3))
    for name in ("CTRLWithoutHead", "pipeline", "TrainingArguments"):
        with pytest.raises(PlanError, match=f"has no model called {name}$"):
            build(published("ctrl", architectures=[name]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("rwkv", "rwkv has recurrent layers"),
        (
            "convnext",
            "model_type 'convnext' is not known to the planner, and its 9 equal blocks at "
            r"'.*' hold only \d+% of the parameters beside embeddings; ",
        ),
    ],
)
def test_what_was_built_and_is_no_transformer(published, kind, sentence):
    pytest.importorskip("transformers")
    with pytest.raises(PlanError, match=sentence):
        from_module(build(published(kind)))


@pytest.mark.filterwarnings("ignore")
def test_a_table_of_token_kinds_is_not_one_of_positions():
    class Embedded(Model):
        def __init__(self):
            super().__init__()
            self.types = nn.Embedding(2, 64)
            self.post_norm = nn.Parameter(torch.zeros(64))

    assert from_module(Embedded()).positions == from_module(Model()).positions
