"""``pytest-vram simulate`` and ``search``: scripts as people have them."""

from __future__ import annotations

import io
import json
import pickle
import textwrap

import pytest
from click.testing import CliRunner

from pytest_vram.cli import main
from pytest_vram.commands.search import bisect

torch = pytest.importorskip("torch")


def _trained() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.full((256, 256), 0.5)}, file)
    return file.getvalue()


TRAINED = _trained()
TRAIN = """
    import argparse, sys
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    assert __name__ == "__main__"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 512, device=device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("done", step)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script and return its name; the test runs in its folder."""
    monkeypatch.chdir(tmp_path)

    def write(source=TRAIN, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(source))
        return name

    return write


def run(*words):
    return CliRunner().invoke(main, list(map(str, words)))


PARAMETERS = 2 * 512 * 2048 + 2048 + 512


def test_a_script_runs_unmodified_and_stops_after_its_steps(script):
    result = run("simulate", "--gpu", "t4", script(), "--batch-size", 4)
    assert result.exit_code == 0, result.output
    assert "Tesla T4 (t4, simulated), 3 training steps in" in result.output
    assert "3 training steps were seen." in " ".join(result.output.split())
    assert "done" not in result.output
    assert "parameters" in result.output
    assert "Fits on t4:" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_json_holds_the_ledger_and_nothing_else(script):
    result = CliRunner().invoke(
        main, ["simulate", "--json", "--steps", "2", script(), "--steps", "2"]
    )
    data = json.loads(result.stdout)
    assert (data["gpu"], data["answer"], data["steps"]) == ("a100-80gb", "yes", 2)
    bills = data["ledger"]["peak"]["bills"]
    assert bills["parameters"] == pytest.approx(4 * PARAMETERS, abs=2048)
    assert bills["optimizer_state"] == pytest.approx(8 * PARAMETERS, abs=4096)
    assert sum(bills.values()) == data["peak_allocated"]
    assert "done 1" in result.stderr


def test_out_of_memory_is_the_answer_no_with_the_ledger_then(script):
    result = run("simulate", "--gpu", "t4", script(), "--batch-size", 4_000_000)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "Out of memory in aten::" in text
    assert "when memory ran out" in text
    assert "Does not fit on t4: 14.25 GiB are there for PyTorch." in text


def test_a_script_that_fails_by_itself(script):
    name = script("import torch\nraise ValueError('my own bug')\n")
    result = run("simulate", name)
    assert result.exit_code == 4
    assert "ValueError: my own bug" in result.output
    assert "The script failed by itself" in result.output
    assert "runpy" not in result.output


def test_a_script_that_exits_with_a_code(script):
    assert run("simulate", script("raise SystemExit(3)")).exit_code == 4
    left = run("simulate", "--steps", 0, script("raise SystemExit(0)"))
    assert left.exit_code == 0


def test_a_script_that_never_steps(script):
    name = script("import torch\nx = torch.ones(1024, device='cuda')\n")
    result = run("simulate", name)
    assert result.exit_code == 3
    assert "No optimizer stepped, so no training was seen" in " ".join(result.output.split())
    assert run("simulate", "--steps", 0, name).exit_code == 0


def test_a_script_whose_memory_depends_on_values(script):
    name = script(
        """
        import torch
        x = torch.randn(100, device="cuda")
        y = x[x > 0]
        """
    )
    result = run("simulate", name)
    assert result.exit_code == 3
    assert "cannot be told" in result.output


def test_a_time_limit(script):
    name = script(
        """
        import torch
        while True:
            torch.ones(10, device="cuda")
        """
    )
    result = run("simulate", "--limit", 0.3, name)
    assert result.exit_code == 3
    assert "the time limit of 0.3 s was reached" in " ".join(result.output.split())


def test_a_module(script):
    script(name="trainer.py")
    result = run("simulate", "-m", "trainer", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert run("simulate", "-m", "no_such_trainer").exit_code == 2


def test_bad_input_writes_nothing(script, tmp_path):
    name = script()
    missing = run("simulate", "no.py")
    assert missing.exit_code == 2
    assert "no.py: no such script" in missing.output
    assert run("simulate", "--gpu", "rtx49", name).exit_code == 2
    result = run("simulate", "--snapshot", tmp_path / "no" / "s.pickle", name)
    assert result.exit_code == 2
    assert "no such folder" in " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_the_snapshot_it_writes_can_be_explained(script, tmp_path):
    simulated = CliRunner().invoke(
        main, ["simulate", "--json", "--snapshot", "s.pickle", script(), "--batch-size", "4"]
    )
    data = json.loads(simulated.stdout)
    assert set(pickle.loads((tmp_path / "s.pickle").read_bytes())) >= {"segments", "device_traces"}
    explained = json.loads(run("explain", "s.pickle", "--json").output)
    assert explained["peak"]["allocated"] == data["peak_allocated"]
    assert explained["peak_reserved"] == data["peak_reserved"]


def test_the_process_is_left_as_it_was(script):
    import sys

    argv, path, current = list(sys.argv), list(sys.path), sys.modules["__main__"]
    run("simulate", script())
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, current)
    assert not torch.cuda.is_initialized()


def test_a_timeline_is_drawn(script, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("simulate", "--plot", "t.svg", script()).exit_code == 0
    assert (tmp_path / "t.svg").read_text().count("<path") > 10


def test_search_bisects(script):
    options = ("--gpu", "t4", "--low", 3, "--high", 6, "--json")
    result = run("search", *options, script(), "--batch-size", "{}00000")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    # x, two hidden tensors and the output are kept, 20 KiB a sample; gradients come on top
    trials = {trial["value"]: trial["fits"] for trial in data["trials"]}
    best = data["best"]
    assert trials[best]
    assert not trials[best + 1]
    assert data["trials"][0]["peak_allocated"] > 300_000 * 20 * 1024


def test_search_needs_a_place_for_the_number(script):
    result = run("search", script(), "--batch-size", 4)
    assert result.exit_code == 2
    assert "no {} among the script's arguments" in result.output
    assert run("search", "--low", 9, "--high", 3, script(), "{}").exit_code == 2


def test_search_passes_the_scripts_own_failure_on(script):
    result = run("search", script("import sys\nint(sys.argv[1])\nraise KeyError('x')\n"), "{}")
    assert result.exit_code == 4
    assert "with 1: KeyError: 'x'" in result.output


@pytest.mark.parametrize(
    ("limit", "low", "high", "best"),
    [(37, 1, 4096, 37), (4096, 1, 4096, 4096), (5000, 1, 4096, 4096), (0, 1, 64, 0), (1, 1, 64, 1)],
)
def test_bisection(limit, low, high, best):
    asked = []

    def works(value):
        asked.append(value)
        return value <= limit

    assert bisect(works, low, high) == best
    assert len(asked) == len(set(asked)) <= 26


BY_HAND = """
    import torch
    from torch import nn
    model = nn.Linear(256, 256).cuda()
    for step in range(100):
        model.zero_grad()
        model(torch.ones(8, 256, device="cuda")).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        torch.save(model.state_dict(), "model.pt")
        torch.save(model.state_dict(), f"step{step}.pt")
        model.load_state_dict(torch.load("model.pt", map_location="cpu"), strict=False)
"""


def test_a_script_without_an_optimizer_steps_by_hand(script):
    result = run("simulate", script(BY_HAND))
    assert result.exit_code == 0, result.output
    assert "3 training steps were seen." in " ".join(result.output.split())
    assert [line.split()[0] for line in result.output.splitlines()[-5:-2]] == ["1", "2", "3"]


def test_checkpoints_leave_no_trace(script, tmp_path):
    """A trained model is not overwritten by shapes without values, and none is left behind."""
    name = script(BY_HAND)
    (tmp_path / "model.pt").write_bytes(TRAINED)
    result = run("simulate", name)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "not overwritten, there are no values to save: model.pt" in text
    assert "saved without values, and removed again: step0.pt, step1.pt, step2.pt" in text
    assert (tmp_path / "model.pt").read_bytes() == TRAINED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "train.py"]


OPENS = """
import os, shutil
with open("best.pth", "wb") as file:
    torch.save(model.state_dict(), file)
with open("fresh.weights", "wb") as file:
    torch.save(model.state_dict(), file)
torch.save(model.state_dict(), "new.tmp")
os.replace("new.tmp", "last.pt")
torch.save(model.state_dict(), "other.tmp")
os.replace("other.tmp", "model.pt")
shutil.copyfile("last.pt", "copy.pth.tar")
assert torch.load("last.pt").keys() == model.state_dict().keys()
with open("log.bin", "wb") as file:
    file.write(b"kept")
"""


def test_checkpoints_that_a_script_opens_or_renames_leave_no_trace(script, tmp_path):
    """``open(..., "wb")`` would empty a trained model before anything is saved."""
    (tmp_path / "best.pth").write_bytes(TRAINED)
    (tmp_path / "model.pt").write_bytes(TRAINED)
    result = run("simulate", "--steps", 0, script(textwrap.dedent(TRAIN) + OPENS), "--steps", 2)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "not overwritten, there are no values to save: best.pth, model.pt" in text
    assert "saved without values, and removed again: fresh.weights, new.tmp, last.pt" in text
    assert (tmp_path / "best.pth").read_bytes() == (tmp_path / "model.pt").read_bytes() == TRAINED
    left = ["best.pth", "log.bin", "model.pt", "train.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


CHECKS = """
pinned = torch.rand(8, 4, pin_memory=True).to(device)
boxes = values = torch.rand(8, 4, device=device)
assert (boxes[:, 2:] >= boxes[:, :2]).all(), f"corners of {boxes.shape}"
if not (boxes >= 0).all():
    raise ValueError("negative")
if not torch.isfinite(values.mean()) or not values.isfinite().all():
    raise SystemExit("not finite")
if torch.isnan(values).any():
    raise SystemExit("nan")
"""


def test_the_main_module_knows_its_own_file(script, tmp_path):
    """As under ``python train.py``: an absolute path, so that neighbours are found."""
    result = run("simulate", "--steps", 0, script("print('here', __file__)"))
    assert f"here {tmp_path / 'train.py'}" in result.output


def test_a_script_that_expects_a_launcher(script, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = run("simulate", script("import os; os.environ['LOCAL_RANK']"))
    assert result.exit_code == 4, result.output
    assert "One rank is simulated with the variables that torchrun sets" in result.output


def test_what_a_script_checks_before_it_raises_holds(script):
    """Values are not there, but they would be finite, and what the script asserts of them."""
    result = run("simulate", "--steps", 0, script(textwrap.dedent(TRAIN) + CHECKS), "--steps", 2)
    assert result.exit_code == 0, result.output


def test_a_script_that_stays_on_the_cpu(script):
    name = script(TRAIN.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"'))
    result = run("simulate", "--gpu", "t4", name)
    assert result.exit_code == 3
    text = " ".join(result.output.split())
    assert "Nothing was put on t4: the script ran on the CPU." in text
    assert "Fits" not in text


LOADED = """
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    transform = nn.Flatten(0)  # as torchvision's: a module, and the worker calls it

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.transform(torch.ones(2, 2))

for batch in DataLoader(Images(), num_workers=1):
    print("loaded", tuple(batch.shape))
model(torch.ones(1, 512, device=device))
"""


def test_workers_that_load_data_go_on_after_the_last_step(script):
    """The stop before the next forward is that of the training, not of a worker's transform."""
    result = run("simulate", "--steps", 2, script(textwrap.dedent(TRAIN) + LOADED), "--steps", 2)
    assert result.exit_code == 0, result.output
    assert result.output.count("loaded (1, 4)") == 2
    assert "2 training steps were seen" in " ".join(result.output.split())


SPAWNS = """
import multiprocessing

process = multiprocessing.get_context("spawn").Process(target=print, args=(model,))
process.start()
"""


def test_a_process_that_would_share_the_card(script):
    name = script(textwrap.dedent(TRAIN) + SPAWNS)
    result = run("simulate", "--steps", 0, name, "--steps", 1)
    assert result.exit_code == 3, result.output
    said = " ".join(result.output.split())
    line = (textwrap.dedent(TRAIN) + SPAWNS).splitlines().index("process.start()") + 1
    assert f"A process is started at {name}:{line} <module> with tensors of the card" in said
    assert "the simulated card lives in one process" in said


def test_a_declared_share_lets_a_script_go_on_whose_masks_have_no_values(script):
    logged = '    print("alive", int((x > 0).nonzero().shape[0]), len(torch.unique(x)))\n'
    source = textwrap.dedent(TRAIN).replace("    loss = ", f"{logged}    loss = ")
    stopped = run("simulate", script(source))
    assert stopped.exit_code == 3
    said = " ".join(stopped.output.split())
    assert "For a script as it is, --assume-selected 0.5 says so of every mask" in said
    result = run("simulate", "--assume-selected", 0.25, "--steps", 1, script(source))
    assert result.exit_code == 0, result.output
    assert "alive 1024 1024" in result.output
    searched = run(
        "search", "--assume-selected", 0.25, "--high", 2, script(source), "--batch-size", "{}"
    )
    assert searched.exit_code == 0, searched.output
    assert run("simulate", "--assume-selected", 2, script(source)).exit_code == 2


SCRIPTED = """
scripted = torch.jit.script(model)
scripted.save("trained.pt")
torch.jit.save(scripted, "new.pt")
print("loaded", type(torch.jit.load("new.pt")).__name__)
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_models_leave_no_trace_either(script, tmp_path):
    (tmp_path / "trained.pt").write_bytes(TRAINED)
    name = script(textwrap.dedent(TRAIN) + SCRIPTED)
    result = run("simulate", "--steps", 0, name, "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "loaded RecursiveScriptModule" in result.output
    assert (tmp_path / "trained.pt").read_bytes() == TRAINED
    assert not (tmp_path / "new.pt").exists()
