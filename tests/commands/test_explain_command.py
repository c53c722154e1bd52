"""``pytest-vram explain``: real recordings to the byte, hostile files refused."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_vram.cli import main
from pytest_vram.commands.snapshots import SnapshotError, explain, read_snapshot
from pytest_vram.ledger import Ledger

SHARED = Path(os.environ.get("VRAM_SHARED", Path(__file__).resolve().parents[3] / "shared"))
RECORDINGS = SHARED / "groundtruth" / "snapshots"

#: file -> (peak allocated, peak reserved): ``max_memory_allocated`` style figures of real GPUs,
#: published with the recordings.
PEAKS = {
    "lm4x512_forward_ctx100_fp32": (416_297_472, 463_470_592),
    "lm4x512_forward_ctx150_fp32": (639_149_056, 666_894_336),
    "lm4x512_forward_ctx200_fp32": (882_670_592, 945_815_552),
    "lm4x512_forward_ctx200_bf16": (701_606_400, 742_391_808),
    "lm4x512_train_ctx100_fp32": (695_675_904, 786_432_000),
    "lm4x512_train_ctx150_fp32": (953_719_808, 1_063_256_064),
    "lm4x512_train_ctx200_fp32": (1_234_635_264, 1_390_411_776),
    "lm4x512_train_ctx200_bf16": (984_657_920, 1_205_862_400),
    "lm24x1024_forward_ctx128": (1_738_928_128, 1_763_704_832),
    "lm24x1024_forward_ctx256": (1_795_741_696, 1_864_368_128),
    "lm24x1024_forward_ctx512": (1_951_309_824, 1_981_808_640),
    "lm24x1024_forward_ctx1024": (2_879_401_984, 3_204_448_256),
    "lm24x1024_train_ctx128_fp32": (7_026_606_592, 7_235_174_400),
    "lm_small_forward_fp32": (560_939_008, 610_271_232),
    "lm_small_forward_bf16": (815_783_936, 861_929_472),
    "attention_probe": (3_249_144_832, 3_781_165_056),
    "lm_large_forward_autocast": (44_634_833_408, 47_234_154_496),
    "lm_large_forward_fp32": (45_148_871_168, 45_730_496_512),
    "lm_large_train": (23_281_500_672, 23_842_521_088),
    "lm_windows_train": (13_927_832_064, 14_180_941_824),
    "lm_compiled_train": (3_861_684_736, 4_238_344_192),
    "lm_forward_torch211": (764_083_200, 937_426_944),
}


def ledger_of(path):
    return Ledger.from_trace(explain(read_snapshot(path), 0).trace)


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
@pytest.mark.parametrize("name", PEAKS)
def test_real_recordings_to_the_byte(name):
    ledger = ledger_of(RECORDINGS / f"{name}.json.gz")
    assert (ledger.peak_allocated, ledger.peak_reserved) == PEAKS[name]
    assert sum(ledger.bills.values()) == ledger.peak_allocated


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
def test_a_training_recording_has_its_bills_inferred():
    ledger = ledger_of(RECORDINGS / "lm4x512_train_ctx100_fp32.json.gz")
    assert ledger.workspace == 2 * 8_519_680  # one cuBLAS workspace per thread
    assert ledger.activations > ledger.peak_allocated // 2


def frame(name, filename="/home/me/train.py", line=7):
    return {"name": name, "filename": filename, "line": line}


def entry(action, addr, size, *frames, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": list(frames)}


FORWARD = (frame("at::native::mm(...)", "mm.cpp"), frame("forward"))
BACKWARD = (frame("torch::autograd::Engine::evaluate_function(...)", "engine.cpp"),)
BASE = 0x7000_0000_0000


def snapshot(entries, segments=()):
    return {"segments": list(segments), "device_traces": [entries]}


STEP = snapshot(
    [
        entry("segment_alloc", BASE, 20 << 20),
        entry("alloc", BASE, 4 << 20, *FORWARD),
        entry("alloc", BASE + (4 << 20), 2 << 20, *BACKWARD),
        entry("free_requested", BASE, 4 << 20, *BACKWARD),
        entry("free_completed", BASE, 4 << 20),
    ],
    [
        {
            "device": 0,
            "address": BASE,
            "total_size": 20 << 20,
            "stream": 0,
            "segment_type": "large",
            "blocks": [
                {"size": 4 << 20, "requested_size": 0, "state": "inactive"},
                {
                    "address": BASE + (4 << 20),
                    "size": 2 << 20,
                    "requested_size": 2 << 20,
                    "state": "active_allocated",
                },
                {"size": 14 << 20, "requested_size": 0, "state": "inactive"},
            ],
        }
    ],
)


def write(tmp_path, data, name="snapshot.pickle"):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(data))
    return path


def test_bills_come_from_where_memory_was_taken_and_given_back(tmp_path):
    ledger = ledger_of(write(tmp_path, STEP))
    assert ledger.peak_allocated == 6 << 20
    assert ledger.peak_reserved == 20 << 20
    assert ledger.activations == 4 << 20
    assert ledger.gradients == 2 << 20
    largest = ledger.largest[0]
    assert (largest.operator, largest.frame) == ("aten::mm", "me/train.py:7 forward")


def test_the_command_prints_the_ledger(tmp_path):
    path = write(tmp_path, STEP)
    result = CliRunner().invoke(main, ["explain", str(path)])
    assert result.exit_code == 0
    assert "Peak allocated 6.0 MiB (6,291,456 bytes)." in result.output
    assert "activations      4.0 MiB  4,194,304  66.7 %" in result.output
    assert "Bills are inferred from the stacks" in result.output
    data = json.loads(CliRunner().invoke(main, ["explain", str(path), "--json"]).output)
    assert data["peak"]["allocated"] == 6 << 20


def test_plain_gzipped_and_json_are_the_same(tmp_path):
    plain = ledger_of(write(tmp_path, STEP))
    packed = tmp_path / "s.pickle.gz"
    packed.write_bytes(gzip.compress(pickle.dumps(STEP, protocol=2)))
    text = tmp_path / "s.json"
    text.write_text(json.dumps(STEP))
    assert ledger_of(packed) == ledger_of(text) == plain


def test_an_out_of_memory_is_the_answer_no(tmp_path):
    data = snapshot(
        [
            entry("segment_alloc", BASE, 20 << 20),
            entry("alloc", BASE, 16 << 20, *FORWARD),
            entry("oom", 3 << 20, 64 << 20, *FORWARD),
        ]
    )
    result = CliRunner().invoke(main, ["explain", str(write(tmp_path, data))])
    assert result.exit_code == 1
    assert "Out of memory: 64.0 MiB asked for, 3.0 MiB free, 4.0 MiB cached." in result.output


def test_memory_from_before_the_recording_counts(tmp_path):
    data = snapshot(
        [entry("free_requested", BASE, 1 << 20), entry("free_completed", BASE, 1 << 20)]
    )
    explained = explain(read_snapshot(write(tmp_path, data)), 0)
    assert explained.before == 1
    assert not explained.inferred
    assert Ledger.from_trace(explained.trace).peak_allocated == 1 << 20


def test_devices(tmp_path):
    data = {"segments": [], "device_traces": [[], STEP["device_traces"][0]]}
    path = str(write(tmp_path, data))
    assert "cuda:1, 4 events" in CliRunner().invoke(main, ["explain", path]).output
    result = CliRunner().invoke(main, ["explain", path, "--device", "0"])
    assert result.exit_code == 2
    assert "nothing about device 0; it has [1]" in result.output


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path):
    target = tmp_path / "was-here"
    path = write(tmp_path, {"segments": [Evil(target)], "device_traces": []})
    result = CliRunner().invoke(main, ["explain", str(path)])
    assert result.exit_code == 2
    assert "refused: the pickle asks for posix.mkdir" in " ".join(result.output.split())
    assert not target.exists()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (pickle.dumps(STEP)[:-100], "truncated"),
        (gzip.compress(pickle.dumps(STEP))[:-50], "truncated"),
        (b"", "truncated"),
        (b"\x80\x04hello", "not a pickle, or a broken one"),
        (b'{"segments": [', "not JSON to the end"),
        (pickle.dumps([1, 2]), "not a memory snapshot"),
        (pickle.dumps({"segments": 3}), "not a memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [3]}), "not a list of lists"),
        (b"cposix\nsystem\n(S'true'\ntR.", "refused: the pickle asks for posix.system"),
        (b"\x80\x04\x8c\x01xQ.", "refused: the pickle refers to objects outside"),
    ],
)
def test_broken_files(tmp_path, data, sentence):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=sentence):
        read_snapshot(path)


def test_files_that_are_not_there_or_empty_of_content(tmp_path):
    result = CliRunner().invoke(main, ["explain", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "cannot be read: No such file or directory" in " ".join(result.output.split())
    empty = write(tmp_path, {"segments": [], "device_traces": []})
    assert "the snapshot is empty" in CliRunner().invoke(main, ["explain", str(empty)]).output
    odd = write(tmp_path, snapshot([{"action": "alloc"}]))
    assert "entries are not as PyTorch writes them" in " ".join(
        CliRunner().invoke(main, ["explain", str(odd)]).output.split()
    )
