"""Command-line options and ini settings, read into one frozen :class:`Settings`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_vram.marker import BudgetError, read_budget
from pytest_vram.options import DEFAULT_GPU
from pytest_vram.quantities import parse_size

if TYPE_CHECKING:
    from pytest_vram.sim.profiles import Profile


class SettingsError(ValueError):
    """An option or ini value that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Device:
    """Which device answers: ``kind`` is ``auto``, ``cuda`` or ``sim``."""

    kind: str = "auto"
    index: int | None = None
    profile: str | None = None


def parse_device(text: str) -> Device:
    """``auto``, ``cuda``, ``cuda:1``, ``sim`` or ``sim:rtx4090``."""
    if text in ("auto", "cuda", "sim"):
        return Device(text)
    if match := re.fullmatch(r"cuda:(\d+)", text):
        return Device("cuda", index=int(match[1]))
    if match := re.fullmatch(r"sim:(.+)", text):
        return Device("sim", profile=match[1])
    raise SettingsError(f"{text!r} is no device: expected auto, cuda, cuda:N, sim or sim:PROFILE")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a person can choose for a whole run. ``update`` holds the categories of
    ``--vram-update`` (empty: nothing is written); ``defaults`` are marker keywords that apply
    where no marker gives them."""

    rootdir: Path
    enabled: bool = True
    device: Device = Device()
    gpu: str = DEFAULT_GPU
    gpus: tuple[Profile, ...] = ()
    estimate: bool = True
    numerics: str = "auto"
    numerics_limit: int = 1 << 30
    update: frozenset[str] = frozenset()
    dry_run: bool = False
    strict: bool = False
    baselines: Path = Path("vram_baselines")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reports: tuple[Path, ...] = ()
    snapshots: Path | None = None

    def profile_name(self, marked: str | None) -> str:
        """The card to simulate: the marker's, else the option's, else the ini setting's."""
        return marked or self.device.profile or self.gpu


def read_settings(option: Callable[[str], Any], ini: Callable[[str], Any], root: Path) -> Settings:
    """Settings from ``option(name)`` (``None``: not given) and ``ini(name)`` (falsy: not given).

    :raises SettingsError: naming the option or ini setting at fault.
    """

    def text(name: str, default: str) -> str:
        return str(option(name) or ini(name) or default)

    if not option("vram_enabled"):
        return Settings(rootdir=root, enabled=False)
    strict = option("vram_strict")
    gpus = tuple(_named("vram_gpus", _own_gpu, line) for line in ini("vram_gpus") or ())
    for number, gpu in enumerate(gpus):
        if gpu.name in {other.name for other in gpus[:number]}:
            raise SettingsError(f"vram_gpus: GPU {gpu.name!r} is given twice")
    settings = Settings(
        rootdir=root,
        device=_named("--vram-device", parse_device, text("vram_device", "auto")),
        gpu=text("vram_gpu", DEFAULT_GPU),
        gpus=gpus,
        estimate=_choice("--vram-estimate", text("vram_estimate", "on"), "on", "off") == "on",
        numerics=_choice("--vram-numerics", text("vram_numerics", "auto"), "auto", "cpu", "off"),
        numerics_limit=_named(
            "vram_numerics_limit", parse_size, text("vram_numerics_limit", "1 GiB")
        ),
        update=_categories(option("vram_update") or ()),
        dry_run=bool(option("vram_dry_run")),
        strict=bool(ini("vram_strict") if strict is None else strict),
        baselines=root / text("vram_baselines", "vram_baselines"),
        defaults=_defaults(ini("vram_budget") or ()),
        reports=_reports(option("vram_report") or ()),
        snapshots=_snapshots(option("vram_snapshots")),
    )
    if settings.dry_run and not settings.update:
        raise SettingsError("--vram-dry-run says what --vram-update would do: give both")
    _check_gpus(settings, ini("vram_gpu"))
    return settings


def find_gpu(settings: Settings, name: str) -> Profile:
    """The profile called ``name``, own cards first. :raises ValueError: with the nearest names."""
    from pytest_vram.sim.profiles import find_profile

    return find_profile(name, settings.gpus)


def _check_gpus(settings: Settings, configured: str | None) -> None:
    """A misspelt GPU fails the run at its start, not every test."""
    for origin, name in (
        ("--vram-device", settings.device.profile),
        ("vram_gpu", configured),
    ):
        if name:
            _named(origin, lambda wanted: find_gpu(settings, wanted), name)


def _own_gpu(line: str) -> Profile:
    from pytest_vram.sim.profiles import parse_profile

    name, colon, rest = line.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if not colon or not name.strip() or not all(key.strip() and sign for key, sign, _ in pairs):
        raise SettingsError(f"{line!r}: expected 'name: like=rtx4090, memory=48 GiB'")
    return parse_profile(name.strip(), {key.strip(): value.strip() for key, _, value in pairs})


def _defaults(lines: list[str] | tuple[()]) -> dict[str, Any]:
    """Marker keywords from the ini setting ``vram_budget``, checked like a marker."""
    given: dict[str, Any] = {}
    for line in lines:
        keyword, sign, value = (part.strip() for part in line.partition("="))
        if not sign:
            raise SettingsError(f"vram_budget: {line!r}: expected 'keyword = value'")
        given[keyword] = int(value) if re.fullmatch(r"[0-9]+", value) else value
    try:
        read_budget([given])
    except BudgetError as error:
        raise SettingsError(f"vram_budget: {error}") from None
    return given


def _reports(given: list[str] | tuple[()]) -> tuple[Path, ...]:
    """The files of ``--vram-report``, which can be written as far as one can tell beforehand."""
    if not given:
        return ()
    from pytest_vram.reports.files import obstacle, parse_report

    paths = tuple(_named("--vram-report", parse_report, text).absolute() for text in given)
    for path in paths:
        if problem := obstacle(path):
            raise SettingsError(f"--vram-report: {problem}")
    return tuple(dict.fromkeys(paths))


def _snapshots(given: str | None) -> Path | None:
    """The directory of ``--vram-snapshots``, made when the first one is written."""
    if not given:
        return None
    from pytest_vram.reports.files import obstacle

    path = Path(given).absolute()
    if problem := obstacle(path, directory=True):
        raise SettingsError(f"--vram-snapshots: {problem}")
    return path


def _categories(given: list[str] | tuple[()]) -> frozenset[str]:
    """``--vram-update`` may be repeated; every use adds its categories."""
    found: set[str] = set()
    for name in given:
        found |= {"": {"new", "changed"}, "all": {"new", "changed", "prune"}}.get(name, {name})
    return frozenset(found)


def _choice(origin: str, value: str, *allowed: str) -> str:
    if value not in allowed:
        raise SettingsError(f"{origin}: {value!r}: expected {' or '.join(allowed)}")
    return value


def _named(origin: str, read: Callable[[str], Any], value: str) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise SettingsError(f"{origin}: {error}") from None
