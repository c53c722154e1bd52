"""A test's own errors inside a simulated pass: the user's frames, and the card's words."""

from __future__ import annotations

import re

import pytest
from projects import Project, outcomes

BUDGET = '@pytest.mark.vram_budget("1 GiB", steps=1)'

TRAIN = """
def train(vram, loss):
    model = nn.Linear(8, 8).to(vram.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return vram.train(model, optimizer, lambda: loss(model))
"""


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (
            'm(torch.ones(4, 9, device="cuda")).sum()',
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x9 and 8x8)",
        ),
        (
            "m(torch.ones(4, 8)).sum()",
            "RuntimeError: Expected all tensors to be on the same device, but found at least two "
            "devices, cuda:0 and cpu!",
        ),
        (
            "(m.weight + torch.ones(8)).sum()",
            "RuntimeError: Expected all tensors to be on the same device, but found at least two "
            "devices, cuda:0 and cpu!",
        ),
        (
            "m.weight.view(3, 3).sum()",
            "RuntimeError: shape '[3, 3]' is invalid for input of size 64",
        ),
        (
            "m.weight[99].sum()",
            "IndexError: index 99 is out of bounds for dimension 0 with size 8",
        ),
        (
            "F.cross_entropy(m.weight, torch.arange(3).cuda())",
            "ValueError: Expected input batch_size (8) to match target batch_size (3).",
        ),
        (
            "F.mse_loss(m.weight, torch.ones(3, 3).cuda())",
            "RuntimeError: The size of tensor a (8) must match the size of tensor b (3) at "
            "non-singleton dimension 1",
        ),
        ("{}['x']", "KeyError: 'x'"),
    ],
)
def test_the_users_line_and_the_words_of_the_card(project: Project, loss: str, error: str) -> None:
    project.write(f"""{TRAIN}
{BUDGET}
def test_x(vram):
    train(vram, lambda m: {loss})  # the line
""")
    result = project.run("--tb=short")
    assert outcomes(result) == {"failed": 1}
    text = result.stdout.str()
    assert f"E   {error}\n" in text
    assert f"train(vram, lambda m: {loss})" in text
    for foreign in (
        "pytest_vram/",
        "fake_tensor",
        "_subclasses",
        "_dynamo",
        "_meta_registrations",
        "handle_torch_function",
        "log call",
    ):
        assert foreign not in text, foreign
    # Errors of the user's own lines may come from a value; those of PyTorch's do not.
    assert ("has no values" in text) == (not error.startswith(("RuntimeError", "ValueError")))


def test_a_device_mismatch_fails_though_the_cpu_would_compute_it(project: Project) -> None:
    project.write(f"""{TRAIN}
{BUDGET}
def test_x(vram):
    train(vram, lambda m: m(torch.ones(4, 8)).sum())
""")
    result = project.run("-rf", cpu=True)
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(["FAILED *RuntimeError: Expected all tensors to be on the sa*"])


def test_there_is_one_card(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    torch.ones(2, device="cuda:1")

{BUDGET}
def test_y(vram):
    nn.Linear(2, 2).to("cuda:1")
""")
    result = project.run("--tb=short", cpu=True)
    assert outcomes(result) == {"failed": 2}
    found = re.findall("^E .*Error: CUDA error: invalid device ordinal$", result.stdout.str(), re.M)
    assert len(found) == 2
    result.stdout.no_fnmatch_line("*_dynamo*")


def test_graphs_are_simulated_and_not_run_on_the_cpu(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    vram.train(*build(vram.device))
    graph = torch.cuda.CUDAGraph()
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(
        [
            "test_x: numbers were not checked: torch.cuda.CUDAGraph at test_a.py:* test_x: a CPU "
            "replays no graphs"
        ]
    )


def test_data_parallel_on_one_card(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, _ = build(vram.device)
    parallel = nn.DataParallel(model)
    vram.train(model, optimizer, lambda: parallel(torch.ones(4, 64)).sum())
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 1}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_rank_of_a_distributed_run(project: Project, backend: str) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram, tmp_path):
    store = f"file://{{tmp_path}}/store"
    torch.distributed.init_process_group("{backend}", init_method=store, rank=0, world_size=1)
    try:
        model, optimizer, _ = build(vram.device)
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        x = torch.ones(4, 64, device=vram.device)
        vram.train(model, optimizer, lambda: parallel(x).sum())
    finally:
        torch.distributed.destroy_process_group()
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 1}


def test_a_process_group_that_nobody_destroys(project: Project) -> None:
    """Each pass, and the next test, begins without it."""
    project.write(f"""
@pytest.fixture(params=[0, 1])
def number(request):
    return request.param

{BUDGET}
def test_x(number, tmp_path, vram):
    store = f"file://{{tmp_path}}/store{{number}}"
    torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    loop(vram.device)
""")
    assert outcomes(project.run(cpu=True)) == {"passed": 2}


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="pytest has subtests since 9.0")
@pytest.mark.parametrize("cpu", [True, False])
def test_a_failing_subtest_is_reported_once(project: Project, cpu: bool) -> None:
    project.write(f"""
import unittest

class TestCase(unittest.TestCase):
    {BUDGET}
    def test_unit(self):
        for step in range(3):
            with self.subTest(step=step):
                loop("cuda")
                self.assertNotEqual(step, 1)

{BUDGET}
def test_plain(subtests):
    for step in range(3):
        with subtests.test(msg="plain", step=step):
            loop("cuda")
            assert step != 1

@pytest.mark.vram_budget("1 GiB", gpu="t4")
def test_oom(subtests):
    with subtests.test():
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
""")
    result = project.run(cpu=cpu)
    text = result.stdout.str()
    assert text.count("SUBFAILED(step=1) test_a.py::TestCase::test_unit") == 1
    assert text.count("SUBFAILED[plain] (step=1) test_a.py::test_plain") == 1
    assert "FAILED test_a.py::test_plain - contains 1 failed subtest\n" in text
    assert "FAILED test_a.py::test_oom - Failed: VRAM out of memory: 20.00 GiB asked" in text


def test_subtests(project: Project) -> None:
    """pytest 9 reports each of them while the test runs."""
    project.write(f"""
import unittest

{BUDGET}
class TestU(unittest.TestCase):
    def test_x(self):
        for width in (16, 32):
            with self.subTest(width=width):
                loop("cuda", width)
""")
    result = project.run(cpu=True)
    assert outcomes(result)["passed"] == 1
    assert result.ret == 0
    result.stdout.fnmatch_lines(["  TestU::test_x *a100-80gb *ok"])


def test_out_of_memory_can_be_caught_as_on_a_card(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.ones(1 << 40, device="cuda")
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total capacity of 79"
    )
    vram.train(*build(vram.device))
""")
    assert outcomes(project.run()) == {"passed": 1}


def test_a_place_is_named_once(project: Project) -> None:
    path = project.write(f"""{TRAIN}
{BUDGET}
def test_x(vram):
    x = torch.randn(100, 100, device=vram.device)
    train(vram, lambda m: m(x[x > 0][:8]).sum())  # the line
""")
    lines = path.read_text().splitlines()
    place = f"test_a.py:{next(n for n, text in enumerate(lines, 1) if 'the line' in text)}"
    text = project.run().stdout.str()
    (found,) = re.findall(r"^VRAM not checked: the simulation could not go on.*$", text, re.M)
    assert found.startswith(
        f"VRAM not checked: the simulation could not go on: torch.index at {place} <lambda> makes "
        "a tensor whose size depends on values"
    )
    assert found.count(place) == 1
