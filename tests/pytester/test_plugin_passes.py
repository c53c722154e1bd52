"""What the passes of one item mean together, and how other plugins and fixtures fare with them."""

from __future__ import annotations

import re

import pytest
from projects import Project, outcomes

BUDGET = '@pytest.mark.vram_budget("1 GiB")'


def test_a_value_decides_in_the_pass_that_has_values(project: Project) -> None:
    path = project.write(f"""
{BUDGET}
def test_x():
    losses = loop("cuda")
    assert losses[-1] < losses[0]  # the line
""")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "the line" in text)
    result = project.run(cpu=True)
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(
        [
            "  test_x *a100-80gb *ok",
            "numbers: 1 by a real run on the CPU",
            f"test_x: the simulated pass ended at test_a.py:{line}: AssertionError: *; simulated "
            "tensors have no values: the pass on the CPU decided, and memory was judged up to that "
            "line",
            "  hint: guard what looks at values with `if vram.has_values:`",
        ]
    )


def test_the_users_own_code_may_lie_in_a_directory_called_torch(project: Project) -> None:
    project.write(
        f"""
{BUDGET}
def test_x():
    if loop("cuda")[-1] == 1.0:  # what a simulated read answers
        raise ValueError("no progress")
""",
        "torch/test_a.py",
    )
    assert outcomes(project.run(cpu=True)) == {"passed": 1}


def test_without_a_real_pass_it_is_an_error_that_says_so(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x():
    losses = loop("cuda")
    assert losses[-1] < losses[0]
""")
    result = project.run()
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            ">       assert losses[[]-1] < losses[[]0]",
            "*- Captured vram call -*",
            "The test failed in the simulated pass, which has no values, and no other pass ran to "
            "decide:",
            "test_a.py:*: AssertionError: *",
            "If it looked at a value, guard that with `if vram.has_values:`; or let the numbers be "
            "checked with --vram-numerics cpu.",
        ]
    )


def test_has_values(project: Project) -> None:
    project.write(f"""
seen = []

{BUDGET}
def test_x(vram):
    measured = vram.train(*build(vram.device))
    seen.append((vram.has_values, len(measured.losses), measured.peak_allocated))
    if vram.has_values:
        assert measured.losses[-1] < measured.losses[0]

def test_y():
    (simulated, no_losses, peak), (real, losses, same_peak) = seen
    assert (simulated, no_losses, real, losses) == (False, 0, True, 4)
    assert peak == same_peak > 0
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_an_assertion_that_fails_with_values_is_the_tests_own_failure(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x():
    losses = loop("cuda")
    assert losses[-1] > losses[0]
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(["E       assert * > *", "  test_x *failed"])
    result.stdout.no_fnmatch_line("*simulated pass ended*")


def test_a_test_that_raises_for_its_own_reasons(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x():
    loop("cuda")
    raise KeyError("mine")
""")
    result = project.run(cpu=True)
    result.stdout.fnmatch_lines(["E       KeyError: 'mine'", "FAILED *KeyError: 'mine'"])


def test_findings_beside_the_tests_own_failure_are_a_section(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("1 KiB")
def test_x():
    loop("cuda")
    raise KeyError("mine")
""")
    result = project.run(cpu=True)
    result.stdout.fnmatch_lines(
        ["E       KeyError: 'mine'", "*Captured vram call*", "VRAM over budget: peak allocated *"]
    )


def test_skips_and_xfails_from_inside(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_skip():
    pytest.skip("not today")

{BUDGET}
def test_xfail():
    pytest.xfail("known")

@pytest.mark.xfail(strict=True)
@pytest.mark.vram_budget("1 KiB")
def test_over(vram):
    vram.train(*build(vram.device))

@pytest.mark.xfail(strict=True)
{BUDGET}
def test_fine(vram):
    vram.train(*build(vram.device))

@pytest.mark.xfail(raises=ZeroDivisionError)
{BUDGET}
def test_raises(vram):
    vram.train(*build(vram.device))
    1 / 0
""")
    result = project.run("-rsxX", cpu=True)
    assert outcomes(result) == {"skipped": 1, "xfailed": 3, "failed": 1}
    result.stdout.fnmatch_lines(["*[[]XPASS(strict)]*", "SKIPPED * not today"])


def test_out_of_memory(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget(gpu="t4")
def test_x():
    kept = []
    while True:
        kept.append(torch.empty(3 << 30, dtype=torch.uint8, device="cuda"))

@pytest.mark.vram_budget(gpu="t4")
def test_caught():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
    loop("cuda")

@pytest.mark.vram_budget(gpu="t4")
def test_share():
    torch.cuda.set_per_process_memory_fraction(0.25)
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
""")
    result = project.run(cpu=False)
    assert outcomes(result) == {"failed": 2, "passed": 1}
    result.stdout.fnmatch_lines(
        [
            "VRAM out of memory: 3.00 GiB asked for, * free of 14.74 GiB on t4 (simulated): "
            "12.00 GiB allocated, *",
            "  asked for by aten::empty  test_a.py:* test_x",
            "VRAM out of memory: 4.00 GiB asked for, 3.69 GiB left of the 3.69 GiB that "
            "set_per_process_memory_fraction allows, * free of 14.74 GiB on t4 (simulated): 0 *",
            "  test_x *t4 *out-of-memory",
            "  test_caught *t4 *ok",
        ]
    )


def test_nothing_allocated_and_never_trained(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_nothing(vram):
    loop("cpu")

{BUDGET}
def test_forward(vram):
    build(vram.device)[2]()

{BUDGET}
def test_without_optimizer(vram):
    nn.Linear(4, 4).to(vram.device)(torch.randn(4, 4, device=vram.device))
""")
    result = project.run()
    assert outcomes(result) == {"failed": 1, "passed": 2}
    result.stdout.no_fnmatch_line("test_without_optimizer: *")
    result.stdout.fnmatch_lines(
        [
            "VRAM not checked: the test allocated nothing on *, so there is nothing to hold *",
            "  hint: move model and inputs with .to(vram.device) or .cuda() inside the test",
            "test_forward: VRAM: the test never trained *",
        ]
    )


@pytest.mark.parametrize("numerics", ["--vram-numerics=off", "--vram-numerics=cpu"])
def test_what_the_simulation_cannot_know_is_never_a_silent_pass(
    project: Project, numerics: str
) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, loss_fn = build(vram.device)
    chosen = torch.nonzero(torch.randn(100, device=vram.device) > 0)
    vram.train(model, optimizer, loss_fn)
""")
    result = project.run(numerics)
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        ["VRAM not checked: the simulation could not go on: torch.nonzero at test_a.py:*"]
    )


def test_every_pass_starts_from_the_same_seeds(project: Project) -> None:
    project.write(f"""
import random
import numpy
seen = []

{BUDGET}
def test_x(vram):
    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())
    seen.append(drawn)
    vram.train(*build(vram.device))

def test_y():
    assert len(seen) == 2 and seen[0] == seen[1]
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_a_fixtures_model_is_real_again_after_the_simulation(project: Project) -> None:
    project.write(f"""
@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Linear(300, 300)

@pytest.fixture(scope="module")
def optimizer(model):
    return torch.optim.AdamW(model.parameters())

{BUDGET}
@pytest.mark.parametrize("again", [1, 2])
def test_x(vram, model, optimizer, again):
    model.to(vram.device)
    x = torch.randn(4, 300, device=vram.device)
    measured = vram.train(model, optimizer, lambda: model(x).square().mean())
    if vram.has_values:
        assert 0 < measured.losses[-1] < measured.losses[0] < 10

def test_y(model, optimizer):
    assert type(model.weight) is nn.Parameter and model.weight.device.type == "cpu"
    assert model.weight.abs().sum().item() > 0
    assert len(optimizer.param_groups[0]["params"]) == 2
    model(torch.ones(1, 300)).sum().backward()
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"passed": 3}


def test_fixtures_may_hold_weak_proxies_of_the_dead(project: Project) -> None:
    project.write(f"""
import weakref

@pytest.fixture
def model():
    model = nn.Linear(4, 4)
    model.__dict__["trainer"] = weakref.proxy(nn.ReLU())
    return model

{BUDGET}
def test_x(vram, model):
    vram.train(model.to(vram.device), torch.optim.SGD(model.parameters(), 0.1),
               lambda: model(torch.ones(2, 4, device=vram.device)).sum())
""")
    assert outcomes(project.run()) == {"passed": 1}


def test_monkeypatches_of_the_simulated_card_are_undone(project: Project) -> None:
    project.write(f"""
real = torch.cuda.is_available, torch.cuda.empty_cache, torch.manual_seed

{BUDGET}
def test_x(vram, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    vram.train(*build(vram.device))

def test_y():
    assert (torch.cuda.is_available, torch.cuda.empty_cache, torch.manual_seed) == real
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_pure_precisions_give_optimizers_back(project: Project) -> None:
    project.write("""
@pytest.fixture(scope="module")
def model():
    return nn.Linear(300, 300)

@pytest.mark.vram_budget(precision="bf16-pure")
@pytest.mark.parametrize("again", [1, 2])
def test_x(vram, model, again):
    model.to(vram.device)
    x = torch.randn(4, 300, device=vram.device, dtype=vram.dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    measured = vram.train(model, optimizer, lambda: model(x).square().mean())
    weights = 300 * 301
    if not vram.has_values:
        assert measured.ledger.master_weights >= 4 * weights
        assert 2 * weights <= measured.ledger.parameters < 2.1 * weights
""")
    assert outcomes(project.run()) == {"passed": 2}


def test_garbage_collection_is_as_before(project: Project) -> None:
    project.write(f"""
import gc

{BUDGET}
def test_x(vram):
    assert not gc.isenabled()
    vram.train(*build(vram.device))
    raise ValueError

def test_y():
    assert gc.isenabled() and gc.get_freeze_count() == 0
""")
    assert outcomes(project.run(cpu=True)) == {"failed": 1, "passed": 1}


def test_reference_cycles_do_not_leak_from_step_to_step(project: Project) -> None:
    project.write(f"""
class Keeps:
    def __init__(self, tensor):
        self.tensor, self.me = tensor, self

{BUDGET}
def test_x():
    model, optimizer, loss_fn = build("cuda")
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_fn()
        Keeps(torch.empty(1 << 20, device="cuda"))
        loss.backward()
        optimizer.step()
""")
    result = project.run("-v")
    assert outcomes(result) == {"passed": 1}


def test_nothing_of_a_test_is_kept_until_the_session_ends(project: Project) -> None:
    project.write("""
import gc, weakref
refs = []

@pytest.mark.vram_budget("1 KiB")
def test_over(vram):
    model, optimizer, loss_fn = build(vram.device)
    refs.append(weakref.ref(model))
    vram.train(model, optimizer, loss_fn)

@pytest.mark.vram_budget("1 GiB")
def test_asserts(vram):
    model, optimizer, loss_fn = build(vram.device)
    refs.append(weakref.ref(model))
    vram.train(model, optimizer, loss_fn)
    assert vram.has_values

def test_gone():
    gc.collect()
    assert len(refs) == 4 and [ref() for ref in refs] == [None] * 4
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"failed": 1, "passed": 2}


def test_leaks(project: Project) -> None:
    project.write(f"""
KEPT = []

{BUDGET}
def test_slope(vram):
    model, optimizer, loss_fn = build(vram.device)
    kept = []
    def loss():
        kept.append(torch.empty(1 << 18, device=vram.device))
        return loss_fn()
    vram.train(model, optimizer, loss)

{BUDGET}
def test_survivor(vram):
    vram.train(*build(vram.device))
    KEPT.append(torch.empty(1 << 18, device=vram.device))
""")
    result = project.run()
    assert outcomes(result) == {"failed": 2}
    result.stdout.fnmatch_lines(
        [
            "VRAM leak: at least 1.0 MiB more stay alive after every step (allowed 64.0 KiB *)",
            "  alive after step 2: *, 3: *, 4: *",
            "VRAM leak: 1.0 MiB survive the test, after garbage collection (allowed 64.0 KiB)",
            "*1.0 MiB  float32[[]262144]  aten::empty*  test_a.py:* test_survivor",
        ]
    )


def test_figures_do_not_depend_on_other_tests(project: Project) -> None:
    project.write(f"""
@pytest.mark.parametrize("width", [64, 300, 1000])
{BUDGET}
def test_x(vram, width):
    vram.train(*build(vram.device, width))
""")

    def figures(*args: str) -> dict[str, str]:
        text = project.run("-v", *args).stdout.str()
        found = re.findall(r"^(\S+)  \(sim.*\n  peak allocated \S+ \S+ (\(.*)$", text, re.MULTILINE)
        return dict(found)

    together = figures()
    assert len(together) == 3
    for nodeid, figure in together.items():
        assert figures(nodeid) == {nodeid: figure}


def test_large_models_are_not_run_on_the_cpu(project: Project) -> None:
    project.ini("vram_numerics_limit = 1 MiB\n")
    project.write(f"{BUDGET}\ndef test_x(vram):\n    vram.train(*build(vram.device))\n")
    result = project.run(cpu=True)
    result.stdout.fnmatch_lines(
        [
            "numbers: 1 not checked",
            "test_x: numbers were not checked: a peak of * MiB is above the limit of 1.0 MiB for a "
            "run on the CPU (vram_numerics_limit; --vram-numerics cpu runs it all the same)",
        ]
    )
    result = project.run("--vram-numerics=cpu", cpu=True)
    result.stdout.fnmatch_lines(["numbers: 1 by a real run on the CPU"])


def test_reruns_judge_every_attempt(project: Project) -> None:
    project.write("""
attempts = []

@pytest.mark.flaky(reruns=2)
@pytest.mark.vram_budget("20 MiB")
def test_x(vram):
    if not attempts or attempts[-1] != vram:
        attempts.append(vram)
    model, optimizer, loss_fn = build(vram.device)
    if len(attempts) < 3:
        waste = torch.empty(30 << 20, device=vram.device)
    vram.train(model, optimizer, loss_fn)
""")
    result = project.run("--vram-update")
    assert outcomes(result) == {"passed": 1, "rerun": 2}
    result.stdout.fnmatch_lines(["  test_x *ok", "vram baselines: 1 recorded"])


def test_hypothesis(project: Project) -> None:
    project.write(f"""
from hypothesis import given, settings, strategies as st

{BUDGET}
@settings(max_examples=3, deadline=None, database=None)
@given(st.integers(1, 4))
def test_x(steps):
    loop("cuda", steps=steps)
""")
    result = project.pytester.runpytest_inprocess("--vram-numerics=off")
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(["  test_x *a100-80gb *ok"])


def test_other_wrappers_see_one_call(project: Project) -> None:
    project.write(
        """
import pytest
calls = []

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except BaseException as error:
        calls.append(type(error).__name__)
        raise
    else:
        calls.append("passed")

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"calls: {calls}")
""",
        "conftest.py",
    )
    project.write("""
@pytest.mark.vram_budget("1 KiB")
def test_x(vram):
    vram.train(*build(vram.device))
""")
    project.run(cpu=True).stdout.fnmatch_lines(["calls: ['Failed']"])


def test_ctrl_c_in_a_pass(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    vram.train(*build(vram.device))
    raise KeyboardInterrupt

def test_y(): pass
""")
    result = project.subprocess("--vram-update=all")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["vram baselines: nothing to do", "vram baselines: nothing was pruned: interrupted*"]
    )


TRAINING_ERRORS = [
    ("loss_fn().detach()", "the loss has no gradient: is the model called under torch.no_grad()*"),
    ("model(x)", "loss_fn returned a tensor of shape (16, 8), not a scalar: reduce it*"),
    ("5.0", "loss_fn returned float, not a tensor: return the loss tensor"),
    (
        "type('Output', (), {'loss': 1})()",
        "loss_fn returned *Output, not a tensor: return its .loss",
    ),
    (
        "torch.ones(1, device=vram.device, requires_grad=True).sum()",
        "no parameter of the optimizer got a gradient: the loss does not depend on them*",
    ),
]


@pytest.mark.parametrize(("loss", "sentence"), TRAINING_ERRORS)
def test_losses_that_cannot_be_trained(project: Project, loss: str, sentence: str) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, loss_fn = build(vram.device)
    x = torch.randn(16, 64, device=vram.device)
    vram.train(model, optimizer, lambda: {loss})
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"failed": 1}
    escaped = sentence.replace("[", "[[]")
    result.stdout.fnmatch_lines(
        [f">       vram.train(*{loss.split('(')[0]}*)", f"E       *TrainingError: {escaped}"]
    )
    # The user's line is shown, not ours.
    result.stdout.no_fnmatch_line("*training.py:*")


RANDOM = """
import hashlib, random
import numpy

def states():
    python = repr(random.getstate()).encode()
    kind, keys, place, *rest = numpy.random.get_state()
    parts = (python, keys.tobytes() + bytes([place % 256]), torch.get_rng_state().numpy().tobytes())
    return [hashlib.sha256(part).hexdigest()[:12] for part in parts]

def report(name):
    with open("states.txt", "a") as file:
        print(name, *states(), file=file)

def test_before():
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    report("before")

@pytest.mark.vram_budget("1 GiB", steps=1)
def test_x(vram):
    random.random(), numpy.random.rand(), torch.rand(3)
    # large enough to be simulated on the host
    model = nn.Linear(1000, 1000).to(vram.device)
    x = F.dropout(torch.randn(8, 1000, device=vram.device))
    vram.train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(x).sum())

def test_after():
    report("after")
"""


def test_random_states_afterwards_are_those_of_an_ordinary_run(project: Project) -> None:
    project.write(RANDOM)
    seen = []
    for cpu, arguments in ((False, ["--no-vram"]), (True, []), (False, [])):
        assert outcomes(project.run(*arguments, cpu=cpu)) == {"passed": 3}
        seen.append((project.path / "states.txt").read_text().splitlines())
        (project.path / "states.txt").unlink()
    ordinary, real, simulated = seen
    assert real == ordinary
    # where nothing ran for real, PyTorch's state is what it was
    python, numpy, _ = ordinary[1].split()[1:]
    before = ordinary[0].split()[3]
    assert simulated == [ordinary[0], f"after {python} {numpy} {before}"]
    assert ordinary[1].split()[3] != before


def test_every_pass_begins_with_the_seeds_that_a_plugin_sets(project: Project) -> None:
    """As pytest-randomly does: seeds are set when the call begins, before the passes."""
    project.write(
        """
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    torch.manual_seed(42)
""",
        "conftest.py",
    )
    project.write("""
drawn = []

@pytest.mark.vram_budget("1 GiB")
def test_x():
    drawn.append(torch.rand(4).tolist())
    loop("cuda")

def test_y():
    assert drawn == [torch.rand(4).tolist()] * 2
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_the_closed_form_stands_beside_the_figure_that_counts(project: Project) -> None:
    """With -v, where the model's shape is a transformer's; whatever else checks the numbers."""
    project.write(f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))

{BUDGET}
def test_x():
    model, ids = Model().to("cuda"), torch.zeros(2, 32, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

{BUDGET}
def test_y():
    loop("cuda")
""")
    quiet = project.run(cpu=True)
    assert outcomes(quiet) == {"passed": 2}
    quiet.stdout.no_fnmatch_line("*closed form*")
    result = project.run("-v", cpu=True)
    result.stdout.fnmatch_lines("test_x: closed form * MiB, the test took * MiB (*%)*")
    result.stdout.no_fnmatch_line("test_y: closed form*")


def test_assertions_on_torch_cuda_hold_in_every_pass(project: Project) -> None:
    """As users write them: by hand, without a word about passes."""
    project.write("""
from torch.cuda import max_memory_allocated

seen = []

@pytest.mark.vram_budget("1 GiB", gpu="t4")
def test_x(tmp_path):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = nn.Linear(512, 512).cuda()
    assert torch.cuda.memory_allocated() - before == 513 * 512 * 4
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 2**20 < torch.cuda.max_memory_allocated() < 2**30
    assert max_memory_allocated() == torch.cuda.max_memory_allocated("cuda:0")
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() < peak
    assert peak <= torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    assert torch.cuda.memory_stats()["allocation.all.current"] > 0
    if hasattr(torch.accelerator, "max_memory_allocated"):
        assert torch.accelerator.max_memory_allocated() < peak
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory
    assert "T4" in torch.cuda.get_device_name() and torch.cuda.get_device_capability() == (7, 5)
    assert "Allocated memory" in torch.cuda.memory_summary()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    seen.append((peak, free, (tmp_path / "snapshot.pickle").stat().st_size > 1_000))

def test_y():
    simulated, on_the_cpu = seen
    assert simulated == on_the_cpu and simulated[2]
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_lines_that_only_a_pass_with_values_reaches_hear_the_card_after_the_same_step(
    project: Project,
) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, loss = build("cuda")
    peaks = []
    for step in range(3):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if vram.has_values:
            peaks.append(torch.cuda.max_memory_allocated())
            assert torch.cuda.memory_allocated() > 0
    assert value < 1e9
    if vram.has_values:
        assert 0 < peaks[0] <= peaks[1] == peaks[2]
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == peaks[2]

{BUDGET}
def test_ended_early(vram):
    model, optimizer, loss = build("cuda")
    for step in range(3):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.memory_allocated() > 0  # recorded once: the simulation ends below
        assert value.item() != 1.0  # what a simulated read answers
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


def test_what_a_cpu_build_lacks_is_there_on_the_cpu_as_well(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x():
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert torch.rand(4, device="cuda", generator=generator).is_cuda
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    if hasattr(torch.cuda, "use_mem_pool"):
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            torch.ones(4, device="cuda")
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1000))
    torch.cuda.set_per_process_memory_fraction(0.5)
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.utilization() == 0
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 1}
