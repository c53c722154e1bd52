from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_vram.settings import Device, Settings, SettingsError, parse_device, read_settings

ROOT = Path("/project")


def read(option: dict[str, Any] | None = None, ini: dict[str, Any] | None = None) -> Settings:
    given = {"vram_enabled": True, **(option or {})}
    return read_settings(given.get, (ini or {}).get, ROOT)


def test_defaults() -> None:
    settings = read()
    assert settings == Settings(rootdir=ROOT, baselines=ROOT / "vram_baselines")
    assert settings.device == Device("auto")
    assert settings.profile_name(None) == "a100-80gb"


def test_options_win_over_ini_settings() -> None:
    ini = {"vram_device": "sim:t4", "vram_numerics": "off", "vram_strict": True}
    assert read(ini=ini).device == Device("sim", profile="t4")
    assert read(ini=ini).numerics == "off"
    assert read(ini=ini).strict
    settings = read({"vram_device": "cuda:1", "vram_numerics": "cpu"}, ini)
    assert settings.device == Device("cuda", index=1)
    assert settings.numerics == "cpu"


def test_whose_gpu_is_simulated() -> None:
    settings = read({"vram_device": "sim:t4"}, {"vram_gpu": "l4"})
    assert settings.profile_name("rtx4090") == "rtx4090"
    assert settings.profile_name(None) == "t4"
    assert read(ini={"vram_gpu": "l4"}).profile_name(None) == "l4"


@pytest.mark.parametrize(
    ("given", "categories"),
    [
        (None, set()),
        ([""], {"new", "changed"}),
        (["all"], {"new", "changed", "prune"}),
        (["tighten"], {"tighten"}),
        (["new", "prune"], {"new", "prune"}),
    ],
)
def test_update_categories(given: list[str] | None, categories: set[str]) -> None:
    assert read({"vram_update": given}).update == categories


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "sim:", "Sim", "cuda:0:1"])
def test_no_such_device(text: str) -> None:
    with pytest.raises(SettingsError, match="expected auto, cuda, cuda:N, sim or sim:PROFILE"):
        parse_device(text)


def test_marker_defaults() -> None:
    ini = {"vram_budget": ["peak = 20 GiB", "steps = 2", "baseline = 1% + 1 MiB"]}
    assert read(ini=ini).defaults == {"peak": "20 GiB", "steps": 2, "baseline": "1% + 1 MiB"}


def test_own_gpus() -> None:
    settings = read(
        {"vram_device": "sim:mine"}, {"vram_gpus": ["mine: like=rtx4090, memory=48 GiB"]}
    )
    assert [(gpu.name, gpu.memory, gpu.multiprocessors) for gpu in settings.gpus] == [
        ("mine", 48 << 30, 128)
    ]


@pytest.mark.parametrize(
    ("option", "ini", "sentence"),
    [
        ({"vram_device": "tpu"}, {}, "--vram-device: 'tpu' is no device: expected auto"),
        ({"vram_device": "sim:rtx4091"}, {}, "--vram-device: unknown GPU 'rtx4091'; did you mean"),
        ({}, {"vram_gpu": "h999"}, "vram_gpu: unknown GPU 'h999'"),
        ({"vram_numerics": "gpu"}, {}, "--vram-numerics: 'gpu': expected auto or cpu or off"),
        ({"vram_estimate": "no"}, {}, "--vram-estimate: 'no': expected on or off"),
        ({"vram_dry_run": True}, {}, "--vram-dry-run says what --vram-update would do: give both"),
        ({}, {"vram_numerics_limit": "big"}, "vram_numerics_limit: 'big' is not a size"),
        ({}, {"vram_budget": ["peak"]}, "vram_budget: 'peak': expected 'keyword = value'"),
        ({}, {"vram_budget": ["peek = 1"]}, "vram_budget: unknown keyword 'peek'; did you mean"),
        ({}, {"vram_gpus": ["mine"]}, "vram_gpus: 'mine': expected 'name: like=rtx4090"),
        ({}, {"vram_gpus": ["mine: speed=5"]}, "vram_gpus: GPU 'mine': unknown key 'speed'"),
    ],
)
def test_bad_settings(option: dict[str, Any], ini: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        read(option, ini)
    assert str(error.value).startswith(sentence)


def test_no_vram() -> None:
    assert not read_settings({}.get, {}.get, ROOT).enabled
