"""What a user reads when numbers or memory are not healthy."""

from __future__ import annotations

import pytest
from projects import Project, outcomes

BUDGET = '@pytest.mark.vram_budget("64 MiB")'


def test_what_is_not_finite_is_named_by_module_operator_and_line(project: Project) -> None:
    project.write("""
class Norm(nn.Module):
    def forward(self, h):
        return h / h.pow(2).sum(-1, keepdim=True).sqrt()

@pytest.mark.vram_budget("64 MiB", precision="fp16")
def test_collapse(vram):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Norm(), nn.Linear(8, 1)).to(vram.device)
    nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, device=vram.device)
    vram.train(model, optimizer, lambda: model(x).float().pow(2).mean())
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "loss is nan at step 1 (backward at test_a.py:* test_collapse)",
            "  first non-finite operator: div (module 1, float16, test_a.py:* forward) made NaN "
            "out of finite inputs*",
            "  hint: guard the divisor: x / y.clamp_min(1e-6); *",
            "4 of 4 steps were skipped, scale 65536 -> 4096 and falling; gradients are not "
            "finite even at scale 1, so the scale is not the cause",
            "  step 1: scale 65536, skipped, inf or NaN in the gradients",
            "  hint: skipped because the loss is not finite: see there",
        ]
    )


def test_healthy_first_overflows_pass(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("64 MiB", precision="fp16", steps=5)
def test_overflow(vram):
    model, optimizer, loss_fn = build(vram.device)
    measured = vram.train(model, optimizer, lambda: loss_fn().float() * 20)
    if vram.has_values:
        assert 0 < measured.scaler.skipped < 6
""")
    result = project.run(cpu=True)
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(["* skipped warm-up step*, scale 65536 -> *, then stable for *"])


def test_a_failing_budget_says_what_the_peak_consists_of(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("1 MiB")
def test_logits(vram):
    model = nn.Sequential(nn.Embedding(8192, 64), nn.Linear(64, 8192, bias=False))
    model = model.to(vram.device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 8192, (512,), device=vram.device)
    vram.train(model, optimizer, lambda: F.cross_entropy(model(ids).float(), ids))
""")
    result = project.run()
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "VRAM over budget: peak allocated 66.3 MiB, budget 1.0 MiB*",
            "  cause: logits/loss in float32: 3 tensors of float32[[]512, 8192] hold 48.0 MiB at "
            "the peak, made from float32[[]512, 8192] by aten::_to_copy at test_a.py:* <lambda>",
        ]
    )


def test_a_leak_says_who_holds_it(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, _ = build(vram.device)
    kept = []
    for _ in range(6):
        optimizer.zero_grad()
        out = model(torch.randn(16384, 64, device=vram.device))
        out.mean().backward()
        optimizer.step()
        kept.append(out.detach())
""")
    result = project.run()
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "VRAM leak: at least 512.0 KiB more stay alive after every step (allowed 64.0 KiB *",
            "  cause: live memory grows by 512.0 KiB or more per step, 3 times in a row: list "
            "'kept' in test_x (2 -> 5 tensors) keeps tensors of past steps",
            "  hint: store .item() or .detach().cpu(), or clear it each step",
        ]
    )


def test_batches_that_grow_are_no_leak(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model = nn.Linear(256, 256).to(vram.device)
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (512, 1024, 1536, 2048, 2560, 3072):
        optimizer.zero_grad()
        out = model(torch.randn(rows, 256, device=vram.device))
        out.pow(2).mean().backward()
        optimizer.step()
""")
    result = project.run()
    assert outcomes(result) == {"passed": 1}
    assert "VRAM leak" not in result.stdout.str()


def test_checkpointing_that_does_nothing_fails_without_a_baseline(project: Project) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, loss_fn = build(vram.device)
    model.gradient_checkpointing = True
    vram.train(model, optimizer, loss_fn)
""")
    result = project.run()
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "checkpointing was requested (gradient_checkpointing of Sequential), but 0 operators "
            "were recomputed in backward*",
        ]
    )


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_wiring_is_judged_even_where_numbers_are_not(project: Project, mode: str) -> None:
    project.write(f"""
{BUDGET}
def test_x(vram):
    model, optimizer, loss_fn = build(vram.device)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_fn()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""")
    result = project.run(f"--vram-numerics={mode}", cpu=True)
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "gradients were clipped while scaled by 65536: clip_grad_norm_ at test_a.py:* test_x*",
            "  hint: call scaler.unscale_(optimizer) before clipping",
        ]
    )
