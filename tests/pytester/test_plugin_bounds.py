"""What cannot be simulated to the byte, as a user sees it: named, with its interval, everywhere."""

from __future__ import annotations

import json
import re

from projects import Project, outcomes

#: 32 MiB of input and 32 of output on the way through one convolution, without gradients.
CONVOLUTION = """
@pytest.mark.vram_budget("{budget}")
def test_conv(vram):
    layer = nn.Conv2d(64, 64, 1, bias=False).to(vram.device)
    with torch.no_grad():
        layer(torch.zeros(32, 64, 64, 64, device=vram.device))
"""

CUSTOM = """
library = torch.library.Library("vram_bounds_{name}", "FRAGMENT")
library.define("norm(Tensor x) -> Tensor")
library.impl("norm", torch.empty_like, "Meta")

@pytest.mark.vram_budget("1 GiB")
def test_custom(vram):
    {inside}
        torch.ops.vram_bounds_{name}.norm(torch.zeros(1 << 20, device=vram.device))
"""


def test_a_budget_that_closed_code_may_exceed_warns(project: Project) -> None:
    project.write(CONVOLUTION.format(budget="70 MiB"))
    result = project.run()
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(
        [
            "simulated on a100-80gb, torch *, to the byte and without values",
            "but for cuDNN convolution workspace in 1 test: -v shows the interval",
            "test_conv: VRAM uncertain: peak allocated 64.0 MiB is within the budget of 70.0 MiB, "
            "but may be up to 128.0 MiB, 58.0 MiB over it (cuDNN convolution workspace)",
            "  not known to the byte: peak allocated 64.0 MiB to 128.0 MiB, reserved 66.0 MiB to "
            "132.0 MiB",
            "    cuDNN convolution workspace: allocated 64.0 MiB to 128.0 MiB",
            "      cuDNN chooses its engine by closed heuristics",
            "      widest: aten::convolution  Conv2d  test_a.py:*",
            "  hint: a budget of 128.0 MiB holds in any case; a card measures which it is",
        ]
    )


def test_strict_fails_it(project: Project) -> None:
    project.write(CONVOLUTION.format(budget="70 MiB"))
    result = project.run("--vram-strict")
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(["*VRAM uncertain: peak allocated 64.0 MiB is within *"])


def test_a_budget_above_the_interval_is_quiet(project: Project) -> None:
    project.write(CONVOLUTION.format(budget="129 MiB"))
    result = project.run("-v")
    assert outcomes(result) == {"passed": 1}
    assert "VRAM uncertain" not in result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "  not known to the byte: peak allocated 64.0 MiB to 128.0 MiB, reserved 66.0 MiB to "
            "132.0 MiB"
        ]
    )


def test_over_budget_names_the_interval_too(project: Project) -> None:
    project.write(CONVOLUTION.format(budget="60 MiB"))
    result = project.run()
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "*VRAM over budget: peak allocated 64.0 MiB, budget 60.0 MiB*",
            "*not known to the byte: peak allocated 64.0 MiB to 128.0 MiB*",
        ]
    )


def test_reports_have_the_interval(project: Project) -> None:
    project.write(CONVOLUTION.format(budget="70 MiB"))
    files = ("r.json", "r.html", "r.md")
    project.run(*(f"--vram-report={name}" for name in files))
    (test,) = json.loads((project.path / "r.json").read_text())["tests"]
    bounds = test["ledger"]["bounds"]
    low, high = bounds["allocated"]
    assert low == test["ledger"]["peak"]["allocated"]
    assert [part["part"] for part in bounds["parts"]] == ["cuDNN convolution workspace"]
    assert bounds["parts"][0]["allocated"] == [low, high]
    (finding,) = [one for one in test["findings"] if one["kind"] == "uncertain"]
    assert finding["data"]["high"] == high
    page = (project.path / "r.html").read_text()
    assert "<caption>Not known to the byte: peaks if closed code" in page
    assert "<td>cuDNN convolution workspace</td><td>64.0 MiB to 128.0 MiB</td>" in page
    text = (project.path / "r.md").read_text()
    assert "not known to the byte: peak allocated 64.0 MiB to 128.0 MiB" in text
    assert "- not known to the byte: `cuDNN convolution workspace`" in text


def test_custom_operators_are_named_until_the_test_says_what_they_take(project: Project) -> None:
    project.write(CUSTOM.format(name="open", inside="if True:"))
    result = project.run()
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(
        [
            "but for vram_bounds_open::norm: scratch in 1 test: -v shows the interval",
            "test_custom: VRAM uncertain: peak allocated 8.0 MiB is within the budget of 1.00 GiB, "
            "but no upper end is known (vram_bounds_open::norm: scratch)",
            '  hint: vram.assume_scratch("vram_bounds_open::norm", "64 MiB") says what the '
            "operator takes at most",
        ]
    )


def test_what_a_custom_operator_takes_at_most(project: Project) -> None:
    declared = 'with vram.assume_scratch("vram_bounds_said::norm", "16 MiB"):'
    project.write(CUSTOM.format(name="said", inside=declared))
    result = project.run("-v")
    assert outcomes(result) == {"passed": 1}
    assert "VRAM uncertain" not in result.stdout.str()
    result.stdout.fnmatch_lines(
        ["  not known to the byte: peak allocated 8.0 MiB to 24.0 MiB, reserved*"]
    )


def test_compiled_models_are_an_interval(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("1 GiB")
def test_compiled(vram):
    model, optimizer, loss_fn = build(vram.device)
    compiled = torch.compile(model)
    x = torch.zeros(16, 64, device=vram.device)
    vram.train(model, optimizer, lambda: compiled(x).sum())
""")
    result = project.run("-v")
    assert outcomes(result) == {"passed": 1}
    text = result.stdout.str()
    found = re.search(r"torch\.compile: allocated (\S+ \S+) to (\S+ \S+)", text)
    assert found is not None
    assert "but for torch.compile in 1 test: -v shows the interval" in text
    assert "VRAM uncertain" not in text


def test_where_every_byte_is_known_nothing_is_said(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("1 GiB")
def test_x():
    loop("cuda")
""")
    text = project.run("-v").stdout.str()
    assert "not known to the byte" not in text
    assert "but for" not in text
