"""Fixtures of marked tests: a new setup for every pass, or a sentence that names the fixture."""

from __future__ import annotations

import pytest
from projects import Project, outcomes

BUDGET = '@pytest.mark.vram_budget("1 GiB", steps=1)'

TRAIN = """
def train(model, vram):
    assert next(model.parameters()).device == vram.device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, model.in_features, device=vram.device)
    return vram.train(model, optimizer, lambda: model(x).sum())
"""


def test_a_fixture_builds_its_model_on_the_device_of_every_pass(project: Project) -> None:
    project.write(f"""{TRAIN}
log = []

@pytest.fixture
def model(vram):
    log.append(("up", vram.has_values))
    yield nn.Linear(64, 64).to(vram.device)
    log.append(("down", vram.has_values))

@pytest.fixture(params=[torch.optim.SGD, torch.optim.AdamW])
def optimizer(request, model):
    return request.param(model.parameters(), lr=0.1)

{BUDGET}
def test_x(vram, model, optimizer):
    x = torch.ones(4, 64, device=vram.device)
    measured = vram.train(model, optimizer, lambda: model(x).sum())
    # what the fixture allocates belongs to the test: 64 x 64 floats and a bias
    assert measured.parameters == 16384 + 512

def test_log():
    once = [("up", False), ("down", False), ("up", True), ("down", True)]
    assert log == once * 2
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 3}


def test_fixtures_that_say_cuda_and_methods_that_prepare(project: Project) -> None:
    project.write(f"""{TRAIN}
import unittest

@pytest.fixture
def model():
    return nn.Linear(8, 8).cuda()

{BUDGET}
def test_direct(vram, model):
    train(model, vram)

{BUDGET}
def test_on_demand(vram, request):
    train(request.getfixturevalue("model"), vram)

{BUDGET}
class TestC:
    def setup_method(self, method):
        self.model = nn.Linear(8, 8).cuda()
    @pytest.fixture(autouse=True)
    def prepare(self, model):
        self.other = model
    def test_both(self, vram):
        train(self.model, vram)
        train(self.other, vram)

{BUDGET}
class TestU(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def prepare(self, vram):
        self.vram, self.other = vram, nn.Linear(8, 8).to(vram.device)
    def setUp(self):
        self.model = nn.Linear(8, 8).cuda()
    def test_both(self):
        train(self.model, self.vram)
        train(self.other, self.vram)
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 4}


@pytest.mark.parametrize("plugin", ["asyncio", "anyio"])
def test_async_fixtures(project: Project, plugin: str) -> None:
    fixture = "pytest_asyncio.fixture" if plugin == "asyncio" else "pytest.fixture"
    if plugin == "anyio":
        project.write("@pytest.fixture\ndef anyio_backend(): return 'asyncio'\n", "conftest.py")
    project.write(f"""{TRAIN}
import asyncio, pytest_asyncio

log = []

@{fixture}
async def model(vram):
    await asyncio.sleep(0)
    yield nn.Linear(8, 8).to(vram.device)
    log.append(vram.has_values)

@pytest.mark.{plugin}
{BUDGET}
async def test_x(vram, model):
    await asyncio.sleep(0)
    train(model, vram)

def test_log():
    assert log == [False, True]
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_every_pass_begins_anew(project: Project) -> None:
    """What a pass patched, wrote to tmp_path or changed in a fixture is not there in the next."""
    project.write(f"""{TRAIN}
@pytest.fixture
def seen():
    return []

@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(nn.Linear, "calls", getattr(nn.Linear, "calls", 0) + 1, raising=False)

{BUDGET}
def test_x(vram, seen, patched, tmp_path, monkeypatch):
    train(nn.Linear(8, 8).to(vram.device), vram)
    assert seen == [] and nn.Linear.calls == 1
    seen.append(1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "a.pt").touch()
    (tmp_path / "log").touch(exist_ok=False)

def test_nothing_is_left():
    assert not hasattr(nn.Linear, "calls")
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_wider_fixtures_on_the_cpu_come_back_as_they_were(project: Project) -> None:
    project.write(f"""{TRAIN}
@pytest.fixture(scope="module")
def model():
    return nn.Linear(8, 8)

{BUDGET}
@pytest.mark.parametrize("again", [1, 2])
def test_x(vram, model, again):
    train(model.to(vram.device), vram)

def test_plain(model):
    assert model.weight.device.type == "cpu" and type(model.weight.data) is torch.Tensor
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 3}


def test_wider_fixtures_that_ask_for_cuda_are_named(project: Project) -> None:
    path = project.write(f"""
import unittest

@pytest.fixture(scope="module")
def model():
    return nn.Linear(8, 8).cuda()

{BUDGET}
def test_x(vram, model): pass

class TestU(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = nn.Linear(8, 8).cuda()
    {BUDGET}
    def test_y(self): pass
""")
    line = path.read_text().splitlines().index('@pytest.fixture(scope="module")') + 1
    result = project.run()
    assert outcomes(result) == {"errors": 2}
    result.stdout.fnmatch_lines(
        [
            f"VRAM not checked: fixture 'model' (test_a.py:{line}, module scope) used CUDA before "
            "the passes of the test, and this machine has none (*Error: *); give it function scope "
            "(such fixtures are set up inside every pass), or build on the CPU there and move to "
            "vram.device in the test",
            "VRAM not checked: setUpClass of TestU used CUDA before the passes of the test, and "
            "this machine has none (*Error: *); do that "
            "in setUp or setup_method, which run inside every pass, or build on the CPU there and "
            "move to vram.device in the test",
        ]
    )
    result.stdout.no_fnmatch_line("*def _lazy_init*")


def test_errors_of_fixtures_are_the_tests_own(project: Project) -> None:
    project.write(f"""
@pytest.fixture
def broken(vram):
    raise KeyError("mine")

@pytest.fixture
def skips(vram):
    pytest.skip("not today")

@pytest.fixture
def twice(vram):
    yield 1
    yield 2

{BUDGET}
def test_broken(broken): pass

{BUDGET}
def test_skips(skips): pass

{BUDGET}
def test_twice(twice): pass
""")
    result = project.run("-rs", cpu=True)
    assert outcomes(result) == {"failed": 2, "skipped": 1}
    result.stdout.fnmatch_lines(
        [
            '>       raise KeyError("mine")',
            "E       KeyError: 'mine'",
            "fixture 'twice' has more than one 'yield'",
            "SKIPPED * not today",
        ]
    )
    result.stdout.no_fnmatch_line("*pass_fixtures.py*")


def test_reprs_say_which_device_answers(project: Project) -> None:
    project.write(f"""
said = []

{BUDGET}
def test_x(vram):
    measured = vram.train(*build(vram.device))
    said.append(repr(measured))
    assert repr(vram) == repr(measured).replace("Measurement", "vram")

def test_said():
    assert said == [
        "<Measurement on a100-80gb (simulated)>",
        "<Measurement on cpu, with the memory figures of a100-80gb (simulated)>",
    ]

def test_unmarked(request):
    vram = request.getfixturevalue("vram")
    measured = vram.train(*build(vram.device))
    assert repr(measured) == (
        "<Measurement on no device: the test has neither the marker vram_budget nor vram as an "
        "argument>"
    )
    measured.peak_allocated
""")
    result = project.run("-rs", cpu=True)
    assert outcomes(result) == {"passed": 2, "skipped": 1}
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * test_a.py:*: nothing was measured, so there is no figure to assert on (no "
            "device: the test has neither the marker vram_budget nor vram as an argument)"
        ]
    )
    project.write(f"""
{BUDGET}
def test_x(vram):
    assert repr(vram.train(*build(vram.device))) == "<Measurement on no device: --no-vram>"
""")
    assert outcomes(project.run("--no-vram")) == {"passed": 1}


def test_markers_that_come_late(project: Project) -> None:
    """From conftest.py they count; from a fixture they come too late, which is said."""
    project.write(
        """
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_listed":
            item.add_marker(pytest.mark.vram_budget("1 KiB"))
""",
        "conftest.py",
    )
    project.write("""
def test_listed():
    loop("cuda")

@pytest.fixture
def late(request):
    request.applymarker(pytest.mark.vram_budget("1 KiB"))

def test_late(late): pass
""")
    result = project.run()
    assert outcomes(result) == {"failed": 2}
    result.stdout.fnmatch_lines(
        [
            "VRAM over budget: peak allocated *, budget 1.0 KiB*",
            "VRAM not checked: vram_budget was added to test_late while it was set up; decorate "
            "the test, or add the marker in pytest_collection_modifyitems",
        ]
    )
    project.write(
        """
def pytest_collection_modifyitems(items):
    items[0].add_marker(pytest.mark.vram_budget("1 Kib/s"))
""",
        "conftest.py",
    )
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: test_a.py:*: test_listed: vram_budget: peak='1 Kib/s': *"])
