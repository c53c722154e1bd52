"""35 training bugs from public reports, each in a faulty and a healthy form (``cases/bugs`` of the
shared folder): the faulty form gets a finding that names the cause, the healthy one none.

Numbers are checked on the CPU in the GPU's place, memory on a simulated A100. Findings about memory
are ``judge``'s, or, where only a baseline can fail (``explain``), the note beside that failure;
then the peak must have grown.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_vram.bills import settle
from pytest_vram.findings import Finding
from pytest_vram.ledger import Ledger
from pytest_vram.numerics import CpuStandIn, Watch
from pytest_vram.numerics.memory_causes import judge
from pytest_vram.numerics.memory_explain import explain
from pytest_vram.numerics.memory_watch import MemoryWatch
from pytest_vram.observe import Observer
from pytest_vram.sim import Simulation, find_profile

SHARED = Path(os.environ.get("VRAM_SHARED") or Path(__file__).parents[2].parent / "shared")
CASES = SHARED / "cases" / "bugs"

pytestmark = [
    pytest.mark.skipif(not CASES.is_dir(), reason=f"no bug cases at {CASES} (set VRAM_SHARED)"),
    pytest.mark.filterwarnings("ignore"),
]


def load(number: str) -> ModuleType:
    path = next(CASES.glob(f"{number}_*.py"))
    spec = importlib.util.spec_from_file_location(f"bug_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def body_of(case: ModuleType, fixed: bool) -> Callable[[], None]:
    """The case as a test body written for CUDA."""

    def run() -> None:
        random.seed(0)
        torch.manual_seed(0)
        if hasattr(case, "run"):
            case.run(fixed=fixed, device="cuda")
            return
        model, make_optimizer, make_batch, loss_of = case.make(fixed=fixed)
        model = model.cuda()
        optimizer = make_optimizer(model)
        dtype = getattr(case, "AUTOCAST", torch.bfloat16)
        for step in range(getattr(case, "STEPS", 4)):
            batch = make_batch(step, "cuda")
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, batch

    return run


# ---- numbers


def health(case: ModuleType, fixed: bool, trainable: str | None = None) -> tuple[Finding, ...]:
    budget = SimpleNamespace(warmup=1, skipped_steps=None, trainable=trainable)
    first, again = Watch(), None
    with CpuStandIn(), first:
        body_of(case, fixed)()
    if first.needs_replay(budget):
        again = Watch(diagnose=True)
        with CpuStandIn(), again:
            body_of(case, fixed)()
    found = first.findings(budget, again)
    notes = tuple(Finding("note", "note", note) for note in first.notes)
    return found + (notes if not fixed else ())


NUMBERS = {
    "36": r"^3 skipped warm-up steps, scale 65536 -> 8192, then stable for 5 steps\n"
    r"scheduler advanced 3 steps more than optimizer SGD",
    "37": r"6 of 6 steps were skipped, scale 65536 -> 1024 and falling; gradients are not finite "
    r"even at scale 1, so the scale is not the cause.*backward of sqrt",
    "39": r"'proposal' received 0 of 2 gradients.*unused branch.*proposal\.weight and proposal\.",
    "40": r"backward at .* adds gradients scaled by 65536 to gradients that unscale_\(\) at .* had "
    r"already divided \(x65536\)",
    "41": r"gradients were clipped while scaled by 65536.*norm that clip saw 262144, true norm 4; "
    r".*clipped to 1\.52588e-05 instead of 1",
    "42": r"1 of 3 trainable parameters is float16 under a GradScaler: 1\.weight",
    "44": r"_softmax \(float16,.*made NaN of it: -inf entered softmax, 1 row entirely -inf -> NaN",
    "45": r"loss is finite \(0\.81.*gradient of w is not finite.*backward of log1p.*its forward "
    r"output was already -inf",
    "47": r"2 of 4 trainable parameters have grad None after backward: 0\.weight and 0\.bias; "
    r"their modules ran",
    "48": r"optimizer\.step\(\) at .* ran inside an autocast region that stayed open.*bit-"
    r"identical \(1\.3.*although parameters moved",
    "49": r"use_reentrant=True\) at .*a\.weight and b\.weight",
    "50": r"after 20 updates 100 % of the elements of 0\.weight are bit-identical although their "
    r"gradients are not zero",
    "53": r"is unscaled with 131072 at .*produced with scale 65536 \(x0\.5\)",
    "54": r"is stepped twice per backward \(step 1\); it applied gradients that the scaler had "
    r"rejected \(found_inf\)",
    "57": r"binary_cross_entropy inside autocast at .*: raises on cuda",
    "60": r"module 2, float16,.*max \|x\| is 7\.3\de\+04 in float32, float16 ends at 65504",
}


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers(number: str) -> None:
    case = load(number)
    said = "\n".join(finding.text() for finding in health(case, fixed=False))
    assert re.search(NUMBERS[number], said, re.S), said
    assert health(case, fixed=True) == ()


def test_trainable_pattern_names_what_lora_left_trainable() -> None:
    case = load("21")
    said = "\n".join(f.text() for f in health(case, False, trainable="*lora_*"))
    assert re.search(
        r"9 parameters outside trainable='\*lora_\*' received gradients: 0\.weight.*"
        r"1,053,696 elements train instead of 4,096 \(x257",
        said,
    ), said
    assert health(case, True, trainable="*lora_*") == ()


# ---- memory


def simulate(case: ModuleType, fixed: bool) -> tuple[Any, Any, Any, Ledger]:
    gc.collect()
    gc.disable()
    try:
        simulation = Simulation(find_profile("a100-80gb"), alloc_conf="")
        observer, watch = Observer(simulation), MemoryWatch()
        with simulation, observer, watch:
            body_of(case, fixed)()
        trace = settle(observer.renumber(simulation.trace()))
    finally:
        gc.enable()
    return simulation, trace, watch.observed, Ledger.from_trace(trace)


JUDGED = {
    "03": r"after step 1 is over float32\[256, 8192\] is still alive.*'out' in run.*allocated at "
    r".*03_logits",
    "07": r"checkpointing was requested \(gradient_checkpointing of Sequential\), but 0 operators "
    r"were recomputed",
    "08": r"has one segment, too large to help: the peak moved to backward",
    "17": r"at the forward peak \(step 2\) gradients of step 1 are still alive: 8\.0 MiB, which "
    r"step 1 did not have",
    "18": r"live memory grows by 2\.0 MiB or more per step.*'total' in run has a grad_fn",
    "24": r"live bytes grow from step to step, but gc\.collect\(\) releases 6\.0 MiB: a reference "
    r"cycle",
    "25": r"4 tensors stored on modules survive the step \(8\.0 MiB\): float32\[2048, 256\] as "
    r"attribute 'probs' of module 0",
    "28": r"copies of weights in float8_e4m3fn \(w8, w8t\): 1\.0 MiB",
    "30": r"reserved 7\.50 GiB is x5\.1 of the peak allocated.*expandable_segments:True: peak "
    r"reserved 1\.46 GiB",
    "33": r"torch\.compile at .*: the compiler's partitioner",
}


@pytest.mark.parametrize("number", JUDGED)
def test_memory_fault(number: str) -> None:
    case = load(number)
    simulation, trace, observed, _ = simulate(case, fixed=False)
    said = "\n".join(f.text() for f in judge(trace, observed, attention=simulation.attention))
    assert re.search(JUDGED[number], said, re.S), said
    simulation, trace, observed, _ = simulate(case, fixed=True)
    assert judge(trace, observed, attention=simulation.attention) == ()


EXPLAINED = {
    "01": r"logits/loss in float32: 3 tensors of float32\[512, 8192\] hold 48\.0 MiB at the peak.*"
    r"_to_copy at",
    "05": r"2 copies made by aten::clone \(\.contiguous\(\)\) hold 32\.0 MiB at the peak while "
    r"their originals are alive: float32\[4, 127, 8192\] of float32\[512, 8192\]",
    "09": r"masks of length 4096 while no tensor of the batch has 4096 positions \(the batch uses "
    r"64\).*buffer causal 16\.0 MiB",
    "10": r"attention masks written out as B x H x S x S: \d tensors of bfloat16\[2, 8, 256, 256\]",
    "12": r"the autocast weight cache holds 8\.0 MiB \(= 0\.50 x fp32 weights\) at the peak; it is "
    r"released when",
    "14": r"activations in float32: 79 % .*the first that widened is aten::_to_copy in module 1\.n",
    "15": r"optimizer temporaries: 4\.0 MiB = 1\.0 x the trained parameters at the peak, which is "
    r"in the optimizer phase",
    "21": r"optimizer temporaries: 4\.0 MiB",
    "22": r"frozen parameters by dtype: 100 % in float32 \(16\.0 MiB\), 0\.weight",
}


@pytest.mark.parametrize("number", EXPLAINED)
def test_memory_growth_is_explained(number: str) -> None:
    case = load(number)
    simulation, trace, observed, faulty = simulate(case, fixed=False)
    said = "\n".join(finding.text() for finding in explain(trace, observed))
    assert re.search(EXPLAINED[number], said, re.S), said
    simulation, trace, observed, healthy = simulate(case, fixed=True)
    assert judge(trace, observed, attention=simulation.attention) == ()
    assert faulty.peak_allocated > 1.05 * healthy.peak_allocated


def test_all_cases_are_here() -> None:
    files = {path.name[:2] for path in CASES.glob("[0-9][0-9]_*.py")}
    assert files == {*NUMBERS, *JUDGED, *EXPLAINED}
    assert len(files) == 35
