"""What people write: markers, levels, bad values; and what happens without any."""

from __future__ import annotations

import sys

import pytest
from projects import Project, outcomes

BUDGET = "@pytest.mark.vram_budget"


def test_a_marked_test_within_its_budget(project: Project) -> None:
    project.write(f"""
{BUDGET}("1 GiB", precision="fp16", steps=2)
def test_x(vram):
    model, optimizer, loss_fn = build(vram.device)
    measured = vram.train(model, optimizer, loss_fn, clip_grad_norm=1.0)
    assert str(vram.device) == "cuda:0"
    assert measured.peak_allocated == sum(measured.ledger.bills.values()) > 0
    assert measured.ledger.parameters == measured.parameters > 0
    assert measured.peak_reserved >= measured.peak_allocated
    assert len(measured.ledger.steps) == 3
""")
    result = project.run()
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(
        [
            "*== vram ==*",
            "test *device *peak *of budget *scaler *verdict",
            "test_a.py",
            "  test_x *a100-80gb *iB * %  *65536 *ok",
            "simulated on a100-80gb, torch *, to the byte and without values",
            "numbers: 1 not checked",
            "test_x: numbers were not checked: --vram-numerics off",
            "1 test has no baseline here: pytest --vram-update records it",
        ]
    )


def test_over_budget_is_an_ordinary_failure_of_the_call(project: Project) -> None:
    project.write(f"""
{BUDGET}("4 KiB")
def test_x(vram):
    vram.train(*build(vram.device))
""")
    result = project.run("-rf")
    assert outcomes(result) == {"failed": 1}
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*_ test_x _*",
            "VRAM over budget: peak allocated *, budget 4.0 KiB, +* (>1000x the budget)",
            "  alive then (*, step *): *iB",
            "    parameters *",
            "  largest allocations",
            "  hint: most of it *",
            "FAILED test_a.py::test_x - Failed: VRAM over budget: *",
        ]
    )
    result.stdout.no_fnmatch_line("*hidden*")


def test_a_bare_marker_measures_any_body(project: Project) -> None:
    project.write(f"""
{BUDGET}("1 GiB")
def test_x():
    loop("cuda")
    assert torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0

def test_plain():
    assert not torch.cuda.is_available()
""")
    result = project.run("-v")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(["  peaks by phase: *forward *backward *", "      *optimizer *"])


def test_the_fixture_alone_counts_as_a_marker(project: Project) -> None:
    project.write("def test_x(vram):\n    vram.train(*build(vram.device))\n")
    result = project.run()
    result.stdout.fnmatch_lines(["  test_x *a100-80gb *ok"])


LEVELS = f"""
pytestmark = pytest.mark.vram_budget("2 KiB", gpu="t4", steps=2, warmup=0)

def seen(vram):
    return vram.budget.peak, vram.budget.gpu, vram.budget.steps, vram.budget.precision

def test_module(vram):
    assert seen(vram) == (2048, "t4", 2, "fp32")

@pytest.mark.vram_budget("3 KiB", precision="bf16")
class Base:
    def test_base(self, vram):
        assert seen(vram) == (PEAK[type(self).__name__], "t4", 2, "bf16")

class TestSame(Base):
    pass

@pytest.mark.vram_budget("4 KiB")
class TestCloser(Base):
    pass

PEAK = {{"TestSame": 3072, "TestCloser": 4096}}

class TestC:
    {BUDGET}(peak=None, steps=5)
    def test_relaxed(self, vram):
        assert seen(vram) == (None, "t4", 5, "fp32")

{BUDGET}("5 KiB", steps=7)
@pytest.mark.parametrize("peak", [
    5120, pytest.param(6144, marks=pytest.mark.vram_budget("6 KiB")),
])
def test_parameter(vram, peak):
    assert seen(vram) == (peak, "t4", 7, "fp32")
"""


def test_the_closest_marker_wins_each_keyword(project: Project) -> None:
    project.write(LEVELS)
    result = project.run("--no-vram")
    assert outcomes(result) == {"passed": 6}


def test_defaults_from_the_configuration(project: Project) -> None:
    project.ini("vram_budget =\n    peak = 7 GiB\n    steps = 9\n")
    project.write(f"""
{BUDGET}(steps=2)
def test_x(vram):
    assert (vram.budget.peak, vram.budget.steps) == (7 << 30, 2)
    vram.train(*build(vram.device))
""")
    assert outcomes(project.run()) == {"passed": 1}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('"10 MBxyz"', "peak='10 MBxyz': '10 MBxyz' has the unknown unit 'MBxyz': expected one *"),
        ("-5", "peak=-5: -5 is negative: expected a whole number of bytes*"),
        ("0", "peak=0: a budget must be more than 0 bytes"),
        ('"1 GiB", stpes=3', "unknown keyword 'stpes'; did you mean 'steps'?"),
        ("steps=0", "steps=0: expected a whole number, at least 1"),
        ('gpu="rtx4091"', "gpu='rtx4091': unknown GPU 'rtx4091'; did you mean rtx4090*"),
        ('precision="half"', "precision='half': expected one of fp32, fp16, bf16*"),
        ('1, "2 GiB"', "takes one positional argument, the peak, but got 2: 1, '2 GiB'"),
    ],
)
def test_bad_markers_are_collection_errors(project: Project, arguments: str, problem: str) -> None:
    path = project.write(f"""
{BUDGET}({arguments})
def test_x(vram):
    pass
""")
    line = path.read_text().splitlines().index(f"{BUDGET}({arguments})") + 1
    result = project.run()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert outcomes(result) == {"errors": 1}
    escaped = problem.replace("[", "[[]")
    result.stdout.fnmatch_lines(
        ["*ERROR collecting test_a.py*", f"test_a.py:{line}: test_x: vram_budget: {escaped}"]
    )
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert outcomes(project.run("--no-vram")) == {"passed": 1}


def test_all_bad_markers_of_a_class_are_named_and_other_files_still_run(project: Project) -> None:
    project.write(f"""
class TestC:
    {BUDGET}(1, steps="a")
    def test_one(self): pass
    {BUDGET}(1, steps="b")
    def test_two(self): pass
""")
    project.write("def test_fine(): pass\n", "test_b.py")
    result = project.run("--continue-on-collection-errors")
    assert outcomes(result) == {"passed": 1, "errors": 1}
    result.stdout.fnmatch_lines(
        ["*TestC.test_one: vram_budget: steps='a': *", "*TestC.test_two: vram_budget: steps='b': *"]
    )


def test_a_marked_function_that_is_no_test(project: Project) -> None:
    project.write(f"""
{BUDGET}("1 GiB")
def train_gpt2(vram):
    pass

def test_fine(): pass
""")
    result = project.run()
    assert outcomes(result) == {"errors": 1}
    result.stdout.fnmatch_lines(
        [
            "test_a.py:*: train_gpt2: vram_budget marks no test that pytest collects: its budget "
            "would never be checked"
        ]
    )


def test_a_marked_method_that_is_no_test(project: Project) -> None:
    project.write(f"""
import unittest

class TestPlain:
    {BUDGET}("1 GiB")
    def train(self, vram): pass
    def test_fine(self): pass

class Cases(unittest.TestCase):
    {BUDGET}("1 GiB")
    def train(self): pass
    def test_fine(self): pass
""")
    result = project.run()
    assert outcomes(result) == {"errors": 2}
    text = result.stdout.str()
    assert text.count(": train: vram_budget marks no test that pytest collects") == 2


def test_last_failed_leaves_tests_out_without_an_error(project: Project) -> None:
    """``--lf`` filters what modules collect, and skips modules without failures unread."""
    for name in ("a", "b"):
        project.write(
            f"""
import pytest

{BUDGET}("1 GiB")
def test_left_out(): pass

def test_{name}(): assert {name == "b"}
""",
            f"test_{name}.py",
        )
    assert outcomes(project.run("--no-vram", "-pcacheprovider")) == {"passed": 3, "failed": 1}
    result = project.run("--lf", "-pcacheprovider")
    assert outcomes(result) == {"failed": 1}
    assert "never be checked" not in result.stdout.str()


def test_a_marked_fixture(project: Project) -> None:
    project.write(f"""
{BUDGET}("1 GiB")
@pytest.fixture
def model():
    pass

def test_fine(model): pass
""")
    result = project.run()
    assert result.ret != 0
    assert "INTERNALERROR" not in result.stdout.str()
    result.stdout.re_match_lines([".*([Mm]arks cannot be applied to fixtures|marks a fixture).*"])


def test_objects_that_have_every_attribute_or_none_are_left_alone(project: Project) -> None:
    project.write("""
from torch import classes, ops

class Lazy:
    def __getattr__(self, name):
        raise RuntimeError(f"{name}: what this needs is not installed")

lazy = Lazy()

def test_fine(): pass
""")
    assert outcomes(project.run()) == {"passed": 1}


def test_unittest_methods_are_held_to_their_budget(project: Project) -> None:
    project.write(f"""
import unittest

{BUDGET}("4 KiB")
class TestU(unittest.TestCase):
    def setUp(self):
        self.device = "cuda"
    def test_over(self):
        loop(self.device)
    {BUDGET}("1 GiB")
    def test_fine(self):
        loop(self.device)
    {BUDGET}("1 GiB")
    def test_fails(self):
        loop(self.device)
        self.assertEqual(1, 2)
    {BUDGET}("1 GiB")
    def test_skips(self):
        self.skipTest("not today")
    @unittest.expectedFailure
    def test_expected(self):
        loop(self.device)
        self.fail("as expected")
""")
    result = project.run("-rs", cpu=True)
    assert outcomes(result) == {"failed": 2, "passed": 1, "skipped": 1, "xfailed": 1}
    result.stdout.fnmatch_lines(
        ["*AssertionError: 1 != 2", "VRAM over budget: *", "SKIPPED * not today"]
    )


@pytest.mark.parametrize("plugin", ["asyncio", "anyio"])
def test_async_tests(project: Project, plugin: str) -> None:
    if plugin == "anyio":
        project.write("@pytest.fixture\ndef anyio_backend(): return 'asyncio'\n", "conftest.py")
    project.write(f"""
import asyncio

@pytest.mark.{plugin}
{BUDGET}("4 KiB")
async def test_over(vram):
    await asyncio.sleep(0)
    vram.train(*build(vram.device))

@pytest.mark.{plugin}
{BUDGET}("1 GiB")
async def test_fine():
    await asyncio.sleep(0)
    loop("cuda")
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"failed": 1, "passed": 1}
    result.stdout.fnmatch_lines(["VRAM over budget: peak allocated *"])


def test_no_vram_makes_markers_inert(project: Project) -> None:
    project.write(f"""
{BUDGET}("1 KiB", steps=2)
def test_trains(vram):
    model, optimizer, loss_fn = build(vram.device)
    with vram.phase("mine"), vram.autocast():
        assert vram.has_values and vram.device.type == "cpu"
    vram.train(model, optimizer, loss_fn)

{BUDGET}("1 KiB")
def test_asserts_on_figures(vram):
    assert vram.train(*build(vram.device)).peak_allocated < 5
""")
    result = project.run("--no-vram", "-rs")
    assert outcomes(result) == {"passed": 1, "skipped": 1}
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * test_a.py:*: nothing was measured, so there is no figure to assert on (no "
            "device: --no-vram)"
        ]
    )
    result.stdout.no_fnmatch_line("*== vram ==*")


QUIET = """
import sys

def test_plain():
    assert "torch" not in sys.modules
    assert "yaml" not in sys.modules

def test_fails():
    assert "deepdiff" not in sys.modules
    assert 0
"""


def test_without_marked_tests_nothing_is_imported_said_or_written(project: Project) -> None:
    (project.path / "test_a.py").write_text(QUIET)
    result = project.subprocess("-p", "no:hypothesispytest")
    assert outcomes(result) == {"passed": 1, "failed": 1}
    result.stdout.no_fnmatch_line("*vram ==*")
    assert not (project.path / "vram_baselines").exists()


@pytest.mark.parametrize("argument", ["--collect-only", "--help", "--markers", "--version"])
def test_looking_around_creates_nothing(
    project: Project, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # pytest's own __pycache__
    project.write(f"{BUDGET}(1)\ndef test_x(vram): pass\n")
    result = project.run(argument, "--vram-update", "-p", "no:cacheprovider")
    assert result.ret == 0
    assert sorted(path.name for path in project.path.iterdir()) == ["test_a.py", "tox.ini"]


def test_the_marker_is_registered(project: Project) -> None:
    project.write(f"{BUDGET}(1)\ndef test_x(): pass\n")
    assert project.run("--strict-markers", "--collect-only").ret == 0
    project.run("--markers").stdout.fnmatch_lines(["@pytest.mark.vram_budget(peak=None, *"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--vram-device=tpu"], "*--vram-device: 'tpu' is no device: expected auto, cuda, *"),
        (["--vram-device=sim:rtx4091"], "*--vram-device: unknown GPU 'rtx4091'; did you mean*"),
        (["--vram-dry-run"], "*--vram-dry-run says what --vram-update would do: give both"),
        (
            ["--vram-update=nwe"],
            "ERROR: --vram-update=nwe: expected new, changed, tighten, prune or all, or no*",
        ),
    ],
)
def test_bad_options(project: Project, arguments: list[str], sentence: str) -> None:
    project.write("def test_x(): pass\n")
    result = project.run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([sentence])


def test_bad_ini_settings(project: Project) -> None:
    project.ini("vram_device = sim:\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --vram-device: 'sim:' is no device: expected *"])


def test_cuda_was_asked_for_in_vain(project: Project) -> None:
    project.write(f"{BUDGET}(1)\ndef test_x(vram): pass\n\ndef test_plain(): pass\n")
    result = project.run("--vram-device=cuda")
    assert outcomes(result) == {"failed": 1, "passed": 1}
    result.stdout.fnmatch_lines(
        [
            "VRAM not checked: --vram-device cuda, but this machine offers PyTorch * no CUDA "
            "device; --vram-device sim simulates one"
        ]
    )


def test_whose_profile_is_simulated(project: Project) -> None:
    project.ini("vram_gpu = l4\nvram_gpus =\n    mine: like=rtx4090, memory=48 GiB\n")
    project.write(f"""
@pytest.mark.parametrize("name", [
    pytest.param("t4", marks=pytest.mark.vram_budget(gpu="t4")),
    pytest.param("mine", marks=pytest.mark.vram_budget(gpu="mine")),
    "l4",
])
{BUDGET}("1 GiB")
def test_x(vram, name):
    vram.train(*build(vram.device))
""")
    result = project.run()
    result.stdout.fnmatch_lines(["*[[]t4] *t4 *ok", "*[[]mine] *mine *ok", "*[[]l4] *l4 *ok"])
    result = project.run("--vram-device=sim:h100-80gb")
    result.stdout.fnmatch_lines(["*[[]t4] *t4 *ok", "*[[]mine] *mine *ok", "*[[]l4] *h100-80gb *"])
