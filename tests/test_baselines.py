from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from traces import A100, MIB, training

from pytest_vram import files
from pytest_vram.baselines import BaselineError, Counts, Edit, Store, edit_for
from pytest_vram.comparison import compare, record_of
from pytest_vram.quantities import parse_tolerance

KEY = A100.key
TOLERANCE = parse_tolerance("3% + 3 MiB")  # a third: 1 % + 1 MiB
DEFAULT = frozenset({"new", "changed"})


def record(**more: Any) -> dict[str, Any]:
    return record_of(training(**more).ledger(), A100)


def edit(nodeid: str = "tests/test_a.py::test_x", **more: Any) -> Edit:
    made = edit_for(nodeid, KEY, None, record(**more), TOLERANCE, DEFAULT)
    assert made is not None
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "vram_baselines", tmp_path)


def test_reading_creates_nothing(store: Store) -> None:
    assert store.environments("tests/test_a.py::test_x") == {}
    assert list(store.modules()) == []
    assert not store.directory.exists()


def test_one_file_per_module_and_raw_names_as_keys(store: Store) -> None:
    names = ["test_x[a/b]", "test_x[a_b]", "TestY::test_z[é: 'q']", "test_x[" + "y" * 400 + "]"]
    store.write([edit(f"tests/sub/test_a.py::{name}") for name in names])
    store.write([edit("test_b.py::test_b")])
    files = sorted(path.relative_to(store.directory).as_posix() for path in _yaml(store))
    assert files == ["test_b.yaml", "tests/sub/test_a.yaml"]
    for name in names:
        assert store.environments(f"tests/sub/test_a.py::{name}") == {KEY: record()}
    assert [module for module, _ in store.modules()] == ["test_b.py", "tests/sub/test_a.py"]


def test_environments_stand_side_by_side(store: Store) -> None:
    store.write([edit()])
    other = Edit("tests/test_a.py", "test_x", "cuda/T4/torch-2.13", record(logits=512), "recorded")
    store.write([other])
    assert set(store.environments("tests/test_a.py::test_x")) == {KEY, "cuda/T4/torch-2.13"}


def test_headers_of_people_are_kept(store: Store) -> None:
    store.write([edit()])
    path = store.path("tests/test_a.py")
    path.write_text("# ask Ada before raising these\n" + path.read_text())
    store.write([edit("tests/test_a.py::test_new")])
    assert path.read_text().startswith("# ask Ada before raising these\n# GPU-memory baselines of")
    assert len(store.tests("tests/test_a.py")) == 2


def test_carriage_returns_are_kept(store: Store) -> None:
    store.write([edit()])
    path = store.path("tests/test_a.py")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    store.write([edit("tests/test_a.py::test_new")])
    text = path.read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n") > 40


def test_removal_and_empty_files(store: Store) -> None:
    store.write([edit(), edit("tests/test_a.py::test_y")])
    store.write([Edit("tests/test_a.py", "test_x", "", None, "pruned")])
    assert list(store.tests("tests/test_a.py")) == ["test_y"]
    store.write([Edit("tests/test_a.py", "test_y", "", None, "pruned")])
    assert _yaml(store) == []
    assert not (store.directory / "tests").exists()


@pytest.mark.parametrize("module", ["../test_a.py", "a/../../test_a.py", "/etc/test_a.py"])
def test_paths_stay_inside(store: Store, module: str) -> None:
    with pytest.raises(BaselineError, match="would lie outside vram_baselines: run pytest with"):
        store.environments(f"{module}::test_x")
    with pytest.raises(BaselineError, match="would lie outside"):
        store.write([edit(f"{module}::test_x")])


def test_a_link_that_leads_outside(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    store.directory.mkdir()
    (store.directory / "tests").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BaselineError, match="would lie outside"):
        store.write([edit()])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_broken_file_is_named_and_left_alone_and_others_are_written(store: Store) -> None:
    store.write([edit()])
    path = store.path("tests/test_a.py")
    broken = path.read_text().replace("peak_allocated: 73400320", "peak_allocated: oops")
    path.write_text(broken)
    sentence = (
        "vram_baselines/tests/test_a.yaml:7: 'oops' is not a size: expected a whole number of "
        "bytes, or a text such as '512 MiB', '1.5 GiB' or '1500 MB' "
        "(nothing was compared and nothing is overwritten: mend or delete the file)"
    )
    with pytest.raises(BaselineError) as error:
        store.environments("tests/test_a.py::test_x")
    assert str(error.value) == sentence
    with pytest.raises(BaselineError) as error:
        store.write([edit(), edit("test_b.py::test_b")])
    assert str(error.value) == sentence
    assert path.read_text() == broken
    assert store.environments("test_b.py::test_b") == {KEY: record()}


def test_a_file_that_is_not_text(store: Store) -> None:
    path = store.path("test_a.py")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BaselineError, match=r"vram_baselines/test_a.yaml: cannot be read"):
        store.environments("test_a.py::test_x")


@pytest.mark.parametrize("step", ["mkstemp", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store.write([edit()])
    before = store.path("tests/test_a.py").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = files.tempfile if step == "mkstemp" else files.os
    monkeypatch.setattr(owner, step, full)
    with pytest.raises(BaselineError) as error:
        store.write([edit("tests/test_a.py::test_y")])
    monkeypatch.undo()
    assert str(error.value) == (
        "vram_baselines/tests/test_a.yaml: not written, it is as it was before: "
        "[Errno 28] No space left on device"
    )
    assert store.path("tests/test_a.py").read_bytes() == before
    assert [path.name for path in (store.directory / "tests").iterdir()] == ["test_a.yaml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable(store: Store, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(BaselineError, match="is not writable, no baseline was stored"):
            store.write([edit()])
    finally:
        tmp_path.chmod(0o755)


def test_a_file_in_the_place_of_the_directory(store: Store) -> None:
    store.directory.write_text("not a directory")
    with pytest.raises(BaselineError, match="vram_baselines is not writable, no baseline was"):
        store.write([edit()])


def _yaml(store: Store) -> list[Path]:
    return sorted(store.directory.rglob("*.yaml"))


# ---- several processes


def _write_many(root: Path, worker: int, count: int) -> None:
    store = Store(root / "vram_baselines", root)
    for index in range(count):
        store.write([edit(f"test_a.py::test_{worker}[{index}]")])


def _write_for_ever(root: Path, worker: int) -> None:
    for index in range(10**6):
        store = Store(root / "vram_baselines", root)
        store.write([edit(f"test_{index % 3}.py::test_{worker}[{index}]")])
        Path(root, f"done_{worker}_{index}").touch()


def test_writers_at_the_same_time_keep_all_entries(tmp_path: Path) -> None:
    workers = [
        multiprocessing.Process(target=_write_many, args=(tmp_path, number, 8))
        for number in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    tests = Store(tmp_path / "vram_baselines", tmp_path).tests("test_a.py")
    assert set(tests) == {f"test_{worker}[{index}]" for worker in range(4) for index in range(8)}


def test_killed_writers_lose_and_break_nothing(tmp_path: Path) -> None:
    """Writers that are killed at random moments. Whole pytest runs are killed in
    ``tests/pytester/test_plugin_broken_runs.py``, two hundred times in the slow stage."""
    kill_writers(tmp_path, kills=6, seed=0)


def kill_writers(root: Path, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    store = Store(root / "vram_baselines", root)
    started = 0
    running: list[multiprocessing.Process] = []
    for _ in range(kills):
        while len(running) < 2:
            running.append(multiprocessing.Process(target=_write_for_ever, args=(root, started)))
            running[-1].start()
            started += 1
        time.sleep(dice.uniform(0.01, 0.15))
        victim = running.pop(dice.randrange(len(running)))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    for process in running:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    stored = {test for number in range(3) for test in store.tests(f"test_{number}.py")}
    for done in root.glob("done_*"):
        _, worker, index = done.name.split("_")
        assert f"test_{worker}[{index}]" in stored
    store.write([edit(f"test_{number}.py::test_last") for number in range(3)])
    assert not list(store.directory.glob("*.tmp"))


# ---- what an update does


@pytest.mark.parametrize(
    ("update", "category"),
    [({"new"}, "recorded"), ({"new", "changed"}, "recorded"), ({"changed"}, None), (set(), None)],
)
def test_new_entries(update: set[str], category: str | None) -> None:
    made = edit_for("a.py::t", KEY, None, record(), TOLERANCE, frozenset(update))
    assert (made and made.category) == category


@pytest.mark.parametrize(
    ("saved", "update", "category"),
    [
        (30 * MIB, {"changed"}, None),
        (31 * MIB, {"changed"}, None),  # a third of the tolerance: 1 % and 1 MiB
        (32 * MIB, {"changed"}, "changed"),
        (32 * MIB, {"tighten"}, None),
        (32 * MIB, {"new"}, None),
        (28 * MIB, {"changed"}, "tightened"),
        (28 * MIB, {"tighten"}, "tightened"),
        (28 * MIB, {"new", "prune"}, None),
    ],
)
def test_changed_entries(saved: int, update: set[str], category: str | None) -> None:
    now = record(saved=saved)
    made = edit_for("a.py::t", KEY, record(), now, TOLERANCE, frozenset(update))
    assert (made and made.category) == category
    if made is not None:
        assert made.record is not None
        assert made.record["peak_allocated"] == now["peak_allocated"]
        assert made.record["bills"]["activations"] == saved


def test_figures_inside_the_band_are_left_alone() -> None:
    before = record()
    before["peak_reserved"] += 512
    before["bills"] = {**before["bills"], "gradients": 10 * MIB - 512}
    made = edit_for("a.py::t", KEY, before, record(saved=40 * MIB), TOLERANCE, DEFAULT)
    assert made is not None
    assert made.record is not None
    assert made.record["peak_reserved"] == before["peak_reserved"]
    assert made.record["bills"]["gradients"] == 10 * MIB - 512
    assert made.record["bills"]["activations"] == 40 * MIB


def test_tightening_never_raises_a_figure() -> None:
    before, now = record(), record(saved=20 * MIB)
    now["phases"]["optimizer"] += 9 * MIB
    made = edit_for("a.py::t", KEY, before, now, TOLERANCE, frozenset({"tighten"}))
    assert made is not None
    assert made.record is not None
    assert made.record["phases"]["optimizer"] == before["phases"]["optimizer"]
    assert made.record["peak_allocated"] == 60 * MIB


def test_an_updated_entry_compares_clean() -> None:
    for saved in (1 * MIB, 29 * MIB, 33 * MIB, 90 * MIB):
        now = record(saved=saved, logits=3 * MIB)
        made = edit_for("a.py::t", KEY, record(), now, TOLERANCE, DEFAULT)
        assert made is not None
        assert made.record is not None
        assert compare(made.record, now, TOLERANCE).changes == ()
        assert edit_for("a.py::t", KEY, made.record, now, TOLERANCE, DEFAULT) is None


def test_counts() -> None:
    categories = ["recorded"] * 12 + ["pruned"] + ["tightened"] * 3
    assert str(Counts.of(categories)) == "12 recorded, 3 tightened, 1 pruned"
    assert str(Counts.of([])) == "nothing to do"
