"""``pytest-vram plan`` and ``gpus`` as people type them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pytest_vram.cli import main


def run(*words):
    return CliRunner().invoke(main, list(map(str, words)))


def test_a_plan_at_80_columns():
    result = run("plan", "gpt2", "-b", 4, "-s", 512)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "gpt2: 124,439,808 parameters, 12 layers"
    assert lines[1] == "batch 4, sequence 512, bf16, adamw, flash attention"
    rows = [line.split("  ") for line in lines]
    figures = {row[0]: [part.strip() for part in row[1:] if part.strip()] for row in rows}
    assert figures["parameters"] == ["474.7 MiB", "474.7 MiB"]
    assert figures["gradients"] == ["0", "474.7 MiB"]
    assert figures["optimizer state"] == ["949.4 MiB", "949.4 MiB"]
    assert "Peak: 4.47 GiB (4.79 GB) allocated, backward, at the loss." in result.output
    assert max(map(len, lines)) <= 80


def test_json_has_the_same_figures():
    data = json.loads(run("plan", "gpt2", "-b", 4, "-s", 512, "-g", "t4", "--json").output)
    assert data["parameters"] == data["trainable"] == 124_439_808
    assert data["peak_moment"] == "backward, at the loss"
    assert data["low"] <= data["peak"] <= data["high"]
    assert data["peak"] == max(moment["total"] for moment in data["moments"])
    assert data["fit"]["verdict"] == "yes"
    assert data["fit"]["memory"] == 15_828_320_256


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("gpt2", "-g", "rtx4090"), 0, "Fits: rtx4090 has 23.16 GiB for PyTorch"),
        (("llama-3-8b", "-g", "rtx4090"), 1, "Does not fit: rtx4090 has 23.16 GiB for PyTorch"),
        (("gpt2", "-b", 9, "-g", "t4"), 3, "Too close to tell: t4 has 14.25 GiB for PyTorch"),
    ],
)
def test_exit_codes_are_the_answer(words, code, sentence):
    result = run("plan", *words)
    assert sentence in result.output
    assert result.exit_code == code


def test_a_backbone_of_adapters_is_in_16_bits_unless_it_is_said():
    """Adapters are trained on a backbone that was loaded in 16 bits: 16.06 GB of Llama 3 8B, its
    matrices in NF4 3.93 GB beside 2.10 GB of embedding and head."""
    for words, gb in ((("--lora", 8), 16.07), (("--lora", 8, "--quantize", "nf4"), 6.04)):
        data = json.loads(run("plan", "llama-3-8b", *words, "--json").output)
        assert round(data["bills"]["parameters"] / 1e9, 2) == gb
        assert data["bills"]["autocast_cache"] == 0
    cast = run("plan", "llama-3-8b", "--lora", 8, "--quantize", "nf4", "-p", "bf16", "--json")
    assert json.loads(cast.output)["bills"]["autocast_cache"] < 1.1e9  # the head and the adapters


def test_a_configuration_whose_family_is_not_known_is_built(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "dff": 128, "n_layer": 3, "n_head": 4, "vocab_size": 211}
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "ctrl", "architectures": ["CTRLLMHeadModel"], **sizes})
    )
    data = json.loads(run("plan", file, "-s", 32, "--json").output)
    layer = 4 * 64 * 65 + 64 * 128 + 128 + 128 * 64 + 64 + 4 * 64
    assert data["parameters"] == 211 * 64 + 3 * layer + 2 * 64 + 211
    assert "ctrl has no closed form here" in data["notes"][0]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("rwkv", "rwkv has recurrent layers (state-space or linear attention); what their kernels"),
        ("convnext", "is not known to the planner, and its 9 equal blocks at"),
        ("newllm", "does not know 'newllm' either"),
    ],
)
def test_what_cannot_be_planned_is_said_once(kind, sentence, tmp_path):
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind}))
    result = run("plan", file)
    assert result.exit_code == 2
    assert result.output.count(sentence) == 1
    assert result.output.count(f"{kind!r} is not known") + result.output.count("rwkv has") == 1


def test_what_does_not_fit_is_blamed_and_rescued():
    result = run("plan", "llama-3-8b", "-b", 2, "-s", 2048, "-g", "a100-80gb")
    assert "The bill to blame is optimizer state: ZeRO-1, 8-bit states or offload." in result.output
    assert "cheapest first" in result.output
    assert "+ fused optimizer" in result.output


def test_largest_batch():
    result = run("plan", "gpt2", "--gpu", "rtx3090", "--largest", "batch")
    assert "The largest batch that fits on rtx3090 is 15." in result.output
    assert run("plan", "llama-7b", "-g", "t4", "--largest", "batch").exit_code == 1
    missing = run("plan", "gpt2", "--largest", "batch")
    assert missing.exit_code == 2
    assert "--largest needs --gpu" in missing.output


def test_cards_sensitivity_and_versus():
    result = run("plan", "gpt2", "--cards", "--sensitivity", "--versus", "--recompute full -b 16")
    assert result.exit_code == 0
    assert "h200-141gb 139.80 GiB" in " ".join(result.output.split())
    assert "batch +50 %" in result.output
    assert "versus: gpt2, batch 16, sequence 1024" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_model_from_sizes_and_from_a_file(tmp_path):
    by_size = run(
        "plan", "--layers", 12, "--hidden", 768, "--heads", 12, "--vocab", 50257, "--json"
    )
    assert by_size.exit_code == 0
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}'
    )
    assert json.loads(run("plan", file, "--json").output)["parameters"] == 171_968


def test_offload_names_bytes_and_seconds():
    result = run("plan", "llama-7b", "-p", "bf16-pure", "--offload", "optimizer", "-s", 512)
    text = " ".join(result.output.split())
    assert "(161.72 GB) over the bus a step, 8.1 s at 20 GB/s if not overlapped." in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "which model? Give a name"),
        (("--layers", "12"), "a model given by its sizes needs --hidden and --heads too"),
        (("gpt3",), "'gpt3' is neither a config.json, a module:attribute nor a known model"),
        (("gpt2", "-g", "rtx49"), "unknown GPU 'rtx49'"),
        (("gpt2", "-g", "a100"), "may be more than one card: a100-40gb or a100-80gb?"),
        (("gpt2", "-o", "adamm"), "unknown optimizer 'adamm'; did you mean"),
        (("gpt2", "-p", "fp61"), "unknown precision 'fp61'"),
        (("gpt2", "-b", "-3"), "batch must be at least 1, not -3"),
        (("gpt2", "-s", "-3"), "sequence must be at least 1, not -3"),
        (("gpt2", "-s", "4096"), "gpt2 has 1024 positions, not 4096"),
        (("dinov2-base", "-s", "5"), "dinov2-base reads images: its sequence is 1370 tokens"),
        (("gpt2", "-r", "most"), "unknown recomputation 'most'"),
        (("gpt2", "--tensor", "5"), "12 heads do not divide over 5 tensor ranks"),
        (("gpt2", "--offload", "everything"), "cannot offload 'everything'"),
        (("gpt2", "--bus", "fast"), "'fast' is not a size"),
        (("gpt2", "--lora", "8", "--lora-targets", "nope"), "no matrix of this model is called"),
        (("gpt2", "--quantize", "nf4"), "add LoRA adapters"),
        (("missing.json",), "missing.json: no such file"),
        (("gpt2", "--check"), "--check simulates a live model"),
        (("gpt2", "--kv-heads", "5"), "--kv-heads describes a model that is given by sizes; gpt2"),
        (("gpt2", "--untied"), "--untied describes a model that is given by sizes; gpt2 has its"),
        (("gpt2", "--versus", "'"), "--versus: No closing quotation"),
        (("no_such_package:model",), "no_such_package:model: No module named"),
        (("--layers", "2", "--hidden", "10", "--heads", "3"), "3 heads do not divide"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(words, sentence):
    result = run("plan", *words)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    for name, over in (("a.png", "batch"), ("b.svg", "sequence")):
        file = tmp_path / name
        assert run("plan", "gpt2", "-g", "t4", "--plot", file, "--plot-over", over).exit_code == 0
        assert file.stat().st_size > 1000


def test_plots_that_cannot_be_written(tmp_path):
    assert "a plot is written as .png, .svg, .pdf" in run("plan", "gpt2", "--plot", "a.txt").output
    result = run("plan", "gpt2", "--plot", tmp_path / "no" / "a.png")
    assert result.exit_code == 2
    assert "no such folder" in " ".join(result.output.split())


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = run("plan", "gpt2", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install 'pytest-vram[plot]'" in result.output
    assert not (tmp_path / "a.png").exists()


def test_gpus_lists_cards_and_own_ones(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nvram_gpus =\n    lab-box: like=rtx4090, memory=48 GiB\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("gpus")
    assert result.exit_code == 0
    assert "lab-box" in result.output
    assert f"{48 << 30:,}" in result.output
    assert run("plan", "gpt2", "-g", "lab-box").exit_code == 0
    cards = {card["name"]: card for card in json.loads(run("gpus", "--json").output)}
    assert cards["h100-80gb"]["capability"] == [9, 0]
    assert cards["lab-box"]["multiprocessors"] == 128


@pytest.mark.parametrize(
    "text",
    [
        '[tool.pytest.ini_options]\nvram_gpus = ["lab-box: like=t4, memory=8 GiB"]\n',
        '[tool.pytest.ini_options]\nvram_gpus = "lab-box: like=t4, memory=8 GiB"\n',
    ],
)
def test_own_cards_from_pyproject(tmp_path, monkeypatch, text):
    (tmp_path / "pyproject.toml").write_text(text)
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    assert "8,589,934,592" in run("gpus", "lab-box").output


def test_a_wrong_card_names_file_and_setting(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\nvram_gpus =\n    box: memory=48 GiB\n")
    monkeypatch.chdir(tmp_path)
    result = run("gpus")
    assert result.exit_code == 2
    assert "vram_gpus: GPU 'box': capability and multiprocessors missing" in " ".join(
        result.output.split()
    )
