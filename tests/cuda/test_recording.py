"""The CUDA recording on the stub driver: PyTorch's own allocator, history and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OnStub = Callable[..., Any]

WORKLOADS = [
    "language_model",
    "perceptron",
    "lambda: language_model(recompute=True)",
]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_recording_changes_nothing_and_misses_nothing(
    on_stub: OnStub, workload: str, conf: str
) -> None:
    source = """
        body = WORKLOAD
        trace = None
        if RECORD:
            _, trace = recorded(body)
            # ask the allocator itself: what the history says was compared with it already
            answer(summary(trace))
        else:
            body()
            answer([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    """.replace("WORKLOAD", workload)
    plain = on_stub(source.replace("RECORD", "False"), PYTORCH_CUDA_ALLOC_CONF=conf)
    found = on_stub(source.replace("RECORD", "True"), PYTORCH_CUDA_ALLOC_CONF=conf)
    assert [found["peak"], found["reserved"]] == plain
    assert found["notes"] == []


def test_the_ledger_of_a_mixed_precision_step(on_stub: OnStub) -> None:
    found = on_stub("answer(summary(recorded(language_model)[1]))")
    elements = 4096 * 256 + 3 * (12 * 256 * 256 + 13 * 256) + 2 * 256
    bills = found["bills"]
    assert bills["parameters"] == pytest.approx(4 * elements, rel=0.01)
    assert bills["optimizer_state"] == pytest.approx(8 * elements, rel=0.01)
    # The tied embedding, qkv, proj, fc and out weights with their biases, in fp16.
    cast = 4096 * 256 + 3 * (12 * 256 * 256 + 9 * 256)
    assert bills["autocast_cache"] == pytest.approx(2 * cast, rel=0.02)
    assert bills["workspace"] == pytest.approx(2 * 8_519_680, rel=0.05)  # blocks have rests
    assert bills["inputs"] == 2 * 8 * 128 * 8
    assert found["phase"].startswith("backward, step ")
    assert found["base"] == [0, 0]
    assert bills["other"] == 1024  # the loss scaler's two numbers


def test_modules_operators_lines_and_names(on_stub: OnStub) -> None:
    rows = on_stub("""
        _, trace = recorded(language_model)
        answer([
            [a.bill, a.name, a.operator, a.module, a.frame, a.dtype, a.shape]
            for a in trace.allocations
        ])
    """)
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(row[1], row)
    weight = by_name["blocks.1.fc.weight"]
    assert weight[0] == "parameters"
    assert weight[2] == "aten::_to_copy"
    assert weight[4].endswith(" language_model")
    assert weight[5:] == ["float32", [1024, 256]]
    state = by_name["exp_avg_sq of blocks.0.qkv.weight"]
    assert state[0] == "optimizer_state"
    cast = by_name["autocast copy of blocks.2.out.weight"]
    assert cast[0] == "autocast_cache"
    assert cast[2:4] == ["aten::_to_copy", "blocks.2.out"]
    tied = by_name["autocast copy of tokens.weight"]
    assert tied[3] == "head"
    gelu = next(row for row in rows if row[2] == "aten::gelu")
    assert gelu[0] == "activations"
    assert gelu[3] == "blocks.0"
    assert gelu[4].split(" ")[1] == "forward"
    backward = next(row for row in rows if row[2] == "aten::gelu_backward")
    assert backward[0] == "temporary"
    assert backward[4].endswith(" language_model")
    assert {row[0] for row in rows if row[2] == "aten::_log_softmax"} == {"activations"}
    assert by_name["cublas workspace"][0] == by_name["cublaslt workspace"][0] == "workspace"


def test_figures_do_not_depend_on_what_ran_before(on_stub: OnStub) -> None:
    prelude = """
        import itertools
        kept = {}

        def fixture():  # a session's fixture: stays on the GPU, between tensors that go
            gone = [torch.empty(n, device="cuda") for n in (300, 70_000, 900_000, 4_000_000)]
            kept["small"] = torch.empty(500, device="cuda")
            kept["large"] = torch.empty(3_000_000, device="cuda")
            kept["more"] = [torch.empty(n, device="cuda") for n in (5_000, 260_000, 2_500_000)]

        tests = {
            "model": language_model,
            "recompute": lambda: language_model(recompute=True),
            "perceptron": perceptron,
        }

        def measure(name):
            found = summary(recorded(tests[name])[1])
            del found["base"], found["events"]
            return found
    """
    alone = {
        name: on_stub(prelude + f"\n        answer(measure({name!r}))")
        for name in ("model", "recompute", "perceptron")
    }
    orders = on_stub(
        prelude
        + """
        results = []
        for order in itertools.permutations(tests):
            for name in order:
                results.append([name, measure(name)])
                perceptron(width=600)  # an unmarked test in between, on the GPU too
        fixture()
        for order in itertools.permutations(tests):
            for name in order:
                results.append([name, measure(name)])
        answer(results)
    """
    )
    assert len(orders) == 36
    for name, found in orders:
        assert found == alone[name]


def test_base_is_excluded_also_when_the_test_frees_it(on_stub: OnStub) -> None:
    found = on_stub("""
        before = [torch.empty(25_000_000, device="cuda"), torch.empty(300, device="cuda")]

        def body():
            perceptron()
            before.clear()
            torch.cuda.empty_cache()
            perceptron()

        answer([summary(recorded(perceptron)[1]), summary(recorded(body)[1])])
    """)
    alone, freeing = found
    assert alone["base"] == freeing["base"] == [100_664_832, 102_760_448]
    assert freeing["peak"] == alone["peak"]
    assert freeing["reserved"] == alone["reserved"]
    assert freeing["notes"] == []


def test_a_test_that_resets_and_empties_is_measured_all_the_same(on_stub: OnStub) -> None:
    alone, resetting = on_stub("""
        def body():
            perceptron()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
            torch.cuda.empty_cache()
            x = torch.empty(1000, device="cuda")
            assert torch.cuda.max_memory_allocated() < 20_000_000

        answer([summary(recorded(perceptron)[1]), summary(recorded(body)[1])])
    """)
    for figure in ("peak", "reserved", "phase", "bills", "notes"):
        assert resetting[figure] == alone[figure]


def test_running_out_of_memory(on_stub: OnStub) -> None:
    found = on_stub(
        """
        def body():
            language_model(width=2048, layers=8)

        recording = Recording()
        observer = Observer(recording)
        try:
            with recording, observer:
                body()
        except torch.cuda.OutOfMemoryError as error:
            message = str(error)
        trace = settle(observer.renumber(recording.trace()))
        oom = trace.oom
        positions = [p for p, event in enumerate(trace.events) if event.kind == "oom"]
        totals = [t[2:] for t in trace.walk() if t[0] == positions[0]]
        kinds = Counter()
        for index in alive(trace, positions[0]):
            kinds[trace.allocations[index].bill] += trace.allocations[index].block
        answer([oom.requested, oom.allocated, oom.reserved, oom.capacity, oom.free, oom.operator,
                oom.module, oom.frame, oom.message == message.strip(), totals, kinds,
                str(trace.phases[-1]), torch._C._cuda_isHistoryEnabled(), trace.notes])
    """,
        STUB_MEM_GIB="3",
    )
    requested, allocated, reserved, capacity, free, operator, module, frame, same, *rest = found
    totals, kinds, phase, history, notes = rest
    assert capacity == 3 << 30
    assert requested > free
    assert allocated <= reserved <= capacity - free
    assert totals == [[allocated, reserved]]
    assert same
    assert sum(kinds.values()) == allocated
    assert kinds["parameters"] > 1_600_000_000
    assert operator.startswith("aten::")
    assert frame
    assert phase == "forward, step 1"
    assert history is False
    assert notes == []
    assert module.startswith("blocks.")


def test_running_out_of_memory_that_the_test_handles_is_a_note(on_stub: OnStub) -> None:
    oom, notes, peak = on_stub("""
        def body():
            try:
                torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                perceptron()

        trace = recorded(body)[1]
        answer([trace.oom, list(trace.notes), summary(trace)["peak"]])
    """)
    assert oom is None
    assert notes == ["ran out of memory 1 times, and the test went on"]
    assert peak > 0


def test_everything_is_undone_after_an_exception(on_stub: OnStub) -> None:
    enabled, restored, events, peak = on_stub("""
        names = ["_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats"]
        before = [getattr(torch._C, name) for name in names] + [torch.clear_autocast_cache]

        def body():
            perceptron()
            raise ValueError("the test's own")

        recording = Recording()
        try:
            with recording, Observer(recording):
                body()
        except ValueError:
            pass
        after = [getattr(torch._C, name) for name in names] + [torch.clear_autocast_cache]
        trace = settle(recording.trace())
        perceptron(width=999)
        again = torch.cuda.memory._snapshot()["device_traces"][0]
        answer([torch._C._cuda_isHistoryEnabled(), before == after, len(again),
                summary(trace)["peak"]])
    """)
    assert enabled is False
    assert restored
    assert events == 0
    assert peak > 10_000_000


def test_a_test_that_allocates_nothing(on_stub: OnStub) -> None:
    found = on_stub("answer(summary(recorded(lambda: torch.ones(3) + 1)[1]))")
    assert found["peak"] == found["reserved"] == found["survived"] == 0
    assert found["notes"] == []


def test_cudnn_workspaces_are_told_from_outputs(on_stub: OnStub) -> None:
    source = """
        torch.backends.cudnn.enabled = CUDNN

        def body():
            model = nn.Conv2d(3, 8, 3).cuda()
            y = model(torch.randn(2, 3, 32, 32, device="cuda", requires_grad=True))
            y.sum().backward()

        trace = recorded(body)[1]
        answer([[a.bill, a.requested, a.name] for a in trace.allocations
                if a.operator in ("aten::convolution", "aten::convolution_backward")])
    """
    output = ["activations", 57_600, ""]
    with_cudnn = on_stub(source.replace("CUDNN", "True"), STUB_CUDNN_WS="3000000")
    assert with_cudnn.count(["workspace", 3_000_000, "cudnn workspace"]) == 3
    assert output in with_cudnn
    without = on_stub(source.replace("CUDNN", "False"))
    assert output in without
    assert not [row for row in without if row[2] == "cudnn workspace"]


def test_a_trace_so_far_and_the_whole(on_stub: OnStub) -> None:
    first, second, whole, alone = on_stub("""
        found = []

        def body():
            perceptron(width=500)
            found.append(summary(settle(recording.trace())))
            perceptron()
            found.append(summary(settle(recording.trace())))

        recording = Recording()
        with recording, Observer(recording):
            body()
        alone = summary(recorded(lambda: (perceptron(width=500), perceptron()))[1])
        answer([*found, summary(settle(recording.trace())), alone])
    """)
    assert first["peak"] < second["peak"] == whole["peak"] == alone["peak"]
    assert first["notes"] == second["notes"] == whole["notes"] == []
    assert whole["bills"] == alone["bills"]


def test_each_device_that_is_used_has_a_trace(on_stub: OnStub) -> None:
    devices, summaries, phases, module = on_stub(
        """
        def body():
            perceptron()
            perceptron(device="cuda:2", width=1000)

        recording = Recording(0)
        with recording, Observer(recording) as observer:
            body()
        traces = {i: settle(observer.renumber(t)) for i, t in recording.traces().items()}
        alone = summary(recorded(lambda: perceptron(device="cuda:2", width=1000), device=2)[1])
        answer([[t.device for t in traces.values()],
                [summary(t) for t in traces.values()] + [alone],
                [[str(p) for p in t.phases] for t in traces.values()],
                next(a.module for a in traces[2].allocations if a.operator == "aten::addmm")])
    """,
        STUB_DEVICES="3",
    )
    assert devices == ["cuda:0 (NVIDIA A100-SXM4-80GB)", "cuda:2 (NVIDIA A100-SXM4-80GB)"]
    first, second, alone = summaries
    assert first["peak"] > 0
    assert second["peak"] == alone["peak"]
    assert second["bills"] == alone["bills"]
    assert phases[0] == phases[1]
    assert module == "0"


def test_what_is_kept_by_the_test_survives(on_stub: OnStub) -> None:
    found = on_stub("""
        kept = []

        def body():
            cycle = [torch.empty(1_000_000, device="cuda")]
            cycle.append(cycle)
            kept.append(torch.empty(2_000, device="cuda"))

        answer(summary(recorded(body)[1]))
    """)
    assert found["survived"] == 8192


def test_the_card_says_what_it_is(on_stub: OnStub) -> None:
    source = """
        from dataclasses import asdict
        from pytest_vram.cuda import environment, profile_of
        answer([asdict(profile_of(0)), environment(0)])
    """
    card, facts = on_stub(source, STUB_DEVICE="l4")
    assert card["name"] == "l4"
    assert card["title"] == facts["gpu"] == "NVIDIA L4"
    assert card["capability"] == [8, 9]
    assert card["multiprocessors"] == 58
    assert card["memory"] == 23_654_825_984
    assert card["blocks_per_multiprocessor"] == 24
    assert card["context"] == 500 << 20
    assert facts["driver"] == "580.65.06"
    assert facts["cudnn"] == "9.24.0"
    assert facts["cuda"].startswith("13.")


def test_one_process_at_a_time_measures_on_a_card(on_stub: OnStub) -> None:
    said, order = on_stub(
        """
        import os, subprocess, sys, threading
        from pytest_vram.cuda import device_lock

        said, order = [], []

        def waiting(text):
            said.append(text)
            go.set()

        def other():
            with device_lock(0, waiting=waiting):
                order.append("second")

        go = threading.Event()
        with device_lock(0, holder="tests/test_a.py::test_b"):
            thread = threading.Thread(target=other)
            thread.start()
            go.wait()
            order.append("first")
        thread.join()
        answer([[text.replace(str(os.getpid()), "PID") for text in said], order])
    """,
    )
    assert order == ["first", "second"]
    assert said == [
        "waiting for NVIDIA A100-SXM4-80GB (cuda:0), which process PID (tests/test_a.py::test_b) "
        "measures on"
    ]
