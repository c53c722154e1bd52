"""What closed code may take, as intervals of the peaks, against allocators that took it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.bounds import COMPILED, Uncertainty, Unknown
from pytest_vram.sim.kernels import Span
from pytest_vram.sim.kernels.fallback import (
    FACTORIES,
    PLAIN,
    assume_scratch,
    is_plain,
)
from pytest_vram.sim.triton_kernels import NOTE
from pytest_vram.trace import Bounds
from pytest_vram.trace import Trace as Recorded

MIB = 1 << 20


def bounds_of(body: Callable[[Simulation], object], profile: str = "a100-80gb") -> Bounds | None:
    return trace_of(body, profile).bounds


def trace_of(body: Callable[[Simulation], object], profile: str = "a100-80gb") -> Recorded:
    with Simulation(find_profile(profile)) as gpu:
        body(gpu)
        return gpu.trace()


def unknown(gpu: Simulation, low: int, high: int | None, part: str = "closed") -> None:
    """Some closed library is called now."""
    gpu.uncertainty.note(
        Unknown(len(gpu.books.events), -1, Span(part, "because", low, high), "aten::op", "", None)
    )


def test_nothing_is_uncertain_where_every_rule_is_known() -> None:
    def body(gpu: Simulation) -> None:
        layer = torch.nn.Linear(64, 64).cuda()
        layer(torch.randn(8, 64, device="cuda")).relu().sum().backward()
        torch.optim.AdamW(layer.parameters()).step()

    assert bounds_of(body) is None


def test_what_matters_is_the_size_at_the_peak() -> None:
    """40 MiB are the peak; 30 MiB more while 8 are alive change nothing, 10 MiB more do."""

    def body(gpu: Simulation) -> None:
        small = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        unknown(gpu, 0, 30 * MIB)
        large = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        unknown(gpu, 0, 10 * MIB)
        del small, large

    found = bounds_of(body)
    assert found is not None
    assert found.allocated == (40 * MIB, 50 * MIB)
    # 20 MiB for the small one and 32 for the large; then 10 fit into the segment of the first 30
    assert found.reserved == (52 * MIB, 82 * MIB)
    (part,) = found.parts
    assert (part.part, part.why, part.calls) == ("closed", "because", 2)


def test_each_part_has_its_own_interval_and_all_of_them_one() -> None:
    def body(gpu: Simulation) -> None:
        held = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        unknown(gpu, 2 * MIB, 10 * MIB, "one")
        unknown(gpu, 0, 20 * MIB, "other")
        del held

    found = bounds_of(body)
    assert found is not None
    assert [(part.part, part.allocated) for part in found.parts] == [
        ("one", (32 * MIB, 42 * MIB)),
        ("other", (32 * MIB, 52 * MIB)),
    ]
    assert found.allocated == (32 * MIB, 52 * MIB)  # never both at once


def test_an_open_part_leaves_the_upper_end_open() -> None:
    def body(gpu: Simulation) -> None:
        held = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        unknown(gpu, 0, 10 * MIB, "one")
        unknown(gpu, 0, None, "other")
        del held

    found = bounds_of(body)
    assert found is not None
    assert [part.allocated for part in found.parts] == [
        (32 * MIB, 42 * MIB),
        (32 * MIB, None),
    ]
    assert found.allocated == (32 * MIB, None)
    assert found.reserved == (32 * MIB, None)


def test_more_than_the_card_has_is_all_that_the_card_has() -> None:
    def body(gpu: Simulation) -> None:
        held = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        unknown(gpu, 0, 1 << 40)
        del held

    profile = find_profile("t4")
    found = bounds_of(body, "t4")
    assert found is not None
    assert found.allocated == (MIB, profile.memory - profile.context)


def test_the_second_run_hears_what_the_program_said_to_the_allocator() -> None:
    """Without ``empty_cache`` and ``record_stream`` another size would be reserved."""

    def body(gpu: Simulation) -> None:
        large = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        del large
        torch.cuda.empty_cache()
        unknown(gpu, 0, 6 * MIB)
        large = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            large.record_stream(torch.cuda.current_stream())
        del large

    found = bounds_of(body)
    assert found is not None
    assert found.reserved == (60 * MIB, 80 * MIB)  # the 6 MiB keep a segment of 20


def test_replayed_without_changes_the_simulation_is_the_same() -> None:
    """A span of no width at every operator: the second allocator must agree to the byte."""

    def body(gpu: Simulation) -> None:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.Flatten(), torch.nn.Linear(6272, 10),
        ).cuda()  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            images = torch.randn(8, 3, 32, 32, device="cuda")
            model(images).logsumexp(1).sum().backward()
            unknown(gpu, 512, 512)
            optimizer.step()
            optimizer.zero_grad()

    with torch.backends.cudnn.flags(enabled=False):
        trace = trace_of(body)
    peaks = [(allocated, reserved) for _, _, allocated, reserved in trace.walk()]
    assert trace.bounds is not None
    assert trace.bounds.allocated == (max(peaks)[0],) * 2
    assert trace.bounds.reserved == (max(reserved for _, reserved in peaks),) * 2


# ---- who is uncertain


def test_convolutions_are() -> None:
    def body(gpu: Simulation) -> None:
        layer = torch.nn.Conv2d(64, 64, 1, bias=False).cuda()
        layer(torch.randn(8, 64, 56, 56, device="cuda"))

    found = bounds_of(body)
    assert found is not None
    (part,) = found.parts
    assert part.part == "cuDNN convolution workspace"
    assert part.operator == "aten::convolution"
    assert part.frame.startswith("tests/sim/test_bounds.py:")
    x, w = 8 * 64 * 56 * 56 * 4, 64 * 64 * 4
    low, high = found.allocated
    assert low >= 2 * x + w
    assert high is not None
    assert 2 * x + w <= high - low < 2 * x + w + MIB  # a rest that is not split off


def test_cudnn_layers_are_and_may_take_less_than_is_simulated() -> None:
    def body(gpu: Simulation) -> None:
        layer = torch.nn.LSTM(64, 128, num_layers=2, dropout=0.1).cuda()
        layer(torch.randn(30, 8, 64, device="cuda"))[0].sum().backward()

    trace = trace_of(body)
    assert trace.bounds is not None
    (part,) = trace.bounds.parts
    assert part.part == "cuDNN RNN reserve and workspace"
    assert part.calls == 4  # dropout state, forward's workspace and reserve, backward's workspace
    low, high = trace.bounds.allocated
    peak = max(allocated for _, _, allocated, _ in trace.walk())
    assert high is not None
    assert low < peak < high


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="no fake kernel for it in 2.6")
def test_transforms_are() -> None:
    """8 complex numbers an element, and a copy of operand and result (cuFFT's documentation)."""

    def body(gpu: Simulation) -> None:
        torch.fft.rfft(torch.randn(64, 8192, device="cuda"))

    found = bounds_of(body)
    assert found is not None
    (part,) = found.parts
    source, result = 64 * 8192 * 4, 64 * 4097 * 8
    assert (part.part, part.operator) == ("cuFFT work area", "aten::_fft_r2c")
    low, high = found.allocated
    assert high is not None
    extra = 8 * 64 * 8192 * 8 + source + result
    assert extra <= high - low < extra + MIB


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (lambda x: torch.linalg.inv(x), "aten::linalg_inv_ex: scratch of cuSOLVER or MAGMA"),
        (lambda x: torch.linalg.eigvalsh(x), "aten::_linalg_eigh: scratch of cuSOLVER or MAGMA"),
        (lambda x: torch.linalg.matrix_exp(x), "aten::linalg_matrix_exp: scratch"),
    ],
)
def test_solvers_and_operators_without_a_rule_have_no_upper_end(
    body: Callable[[torch.Tensor], object], part: str
) -> None:
    found = bounds_of(lambda gpu: body(torch.randn(64, 64, device="cuda")))
    assert found is not None
    assert [one.part for one in found.parts] == [part]
    assert found.allocated[1] is None


@contextmanager
def custom_operator() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    library = torch.library.Library("vram_tests", "FRAGMENT")
    library.define("norm(Tensor x) -> Tensor")
    library.impl("norm", torch.empty_like, "Meta")
    try:
        yield torch.ops.vram_tests.norm.default
    finally:
        library._destroy()


def test_a_custom_operator_has_no_upper_end_until_the_test_says_one() -> None:
    with custom_operator() as norm:
        found = bounds_of(lambda gpu: norm(torch.randn(MIB, device="cuda")))
        assert found is not None
        assert found.parts[0].part == "vram_tests::norm: scratch"
        assert found.parts[0].why == "a custom operator: only its outputs are known"
        assert found.allocated == (8 * MIB, None)

        def declared(gpu: Simulation) -> None:
            with assume_scratch("vram_tests::norm", 2 * MIB):
                norm(torch.randn(MIB, device="cuda"))

        found = bounds_of(declared)
        assert found is not None
        assert found.allocated == (8 * MIB, 10 * MIB)

        def without(gpu: Simulation) -> None:
            with assume_scratch("vram_tests::norm", 0):
                norm(torch.randn(MIB, device="cuda"))

        assert bounds_of(without) is None


@pytest.mark.parametrize(("name", "size"), [("norm", 1), ("mylib::norm", -1)])
def test_malformed_declarations(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=r"an operator is called|0 bytes or more"):
        assume_scratch(name, size).__enter__()


# ---- compiled code


def train(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()


def test_compiled_code_is_between_what_is_held_and_a_second_set_of_gradients() -> None:
    sizes: dict[str, int] = {}

    def body(gpu: Simulation) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
        for name, parameter in model.named_parameters():
            gpu.label(parameter, "parameters", name)
        train(torch.compile(model))
        for name, parameter in model.named_parameters():
            gpu.label(parameter.grad, "gradients", name)
        sizes["peak"] = torch.cuda.max_memory_allocated()

    found = bounds_of(body)
    assert found is not None
    (part,) = found.parts
    assert part.part == COMPILED
    held = 2 * (512 * 512 + 512) * 4
    assert found.allocated == (held, sizes["peak"] + 2 * MIB)  # gradients, up to a segment


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, True),
        ({"mode": "default"}, True),
        ({"backend": "aot_eager"}, True),
        ({"mode": "reduce-overhead"}, False),
        ({"mode": "max-autotune"}, False),
        ({"options": {"triton.cudagraphs": True}}, False),
        ({"backend": "cudagraphs"}, False),
    ],
)
def test_modes_with_memory_of_their_own_leave_the_end_open(
    options: dict[str, object], known: bool
) -> None:
    def body(gpu: Simulation) -> None:
        torch.compile(torch.nn.Linear(8, 8).cuda(), **options)(torch.randn(8, 8, device="cuda"))

    found = bounds_of(body)
    assert found is not None
    assert (found.allocated[1] is not None) is known


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"disable": True}])
def test_what_does_not_compile_is_known(options: dict[str, object]) -> None:
    def body(gpu: Simulation) -> None:
        torch.compile(torch.nn.Linear(8, 8).cuda(), **options)(torch.randn(8, 8, device="cuda"))

    assert bounds_of(body) is None


def test_what_was_compiled_before_counts_when_it_runs() -> None:
    plain = torch.compile(lambda x: x.sin())
    graphs = torch.compile(lambda x: x.sin(), mode="reduce-overhead")

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> Bounds | None:
        return bounds_of(lambda gpu: function(torch.randn(8, device="cuda")))

    found = run(plain)
    assert found is not None
    assert [part.part for part in found.parts] == [COMPILED]
    assert found.allocated[1] is not None
    found = run(graphs)
    assert found is not None
    assert found.allocated[1] is None
    assert bounds_of(lambda gpu: None) is None


def test_an_account_of_nothing_needs_no_allocator() -> None:
    assert Uncertainty(lambda: pytest.fail("no allocator is needed"), 0).bounds([], []) is None


# ---- operators without a rule


def test_plain_operators_exist() -> None:
    packets = {name.partition("::")[2].partition(".")[0] for name in _operators()}
    assert sorted((PLAIN | FACTORIES) - packets) == []


def _operators() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]


@pytest.mark.parametrize("name", ["abs_", "mul.Tensor", "expand", "view_copy", "_foreach_add.List"])
def test_elementwise_operators_and_views_are_plain(name: str) -> None:
    packet, _, overload = name.partition(".")
    assert is_plain(getattr(getattr(torch.ops.aten, packet), overload or "default"))


# ---- Triton, or what stands in for it


class Kernel:
    """As ``triton.runtime.jit.JITFunction``: launching it needs a card."""

    def run(self, *args: object, grid: object, warmup: bool, **options: object) -> None:
        raise AssertionError("launched")


class Tuned:
    """As ``triton.runtime.autotuner.Autotuner``."""

    def __init__(self, configs: int, restored: list[str]) -> None:
        self.configs, self.restore_value = list(range(configs)), restored

    def run(self, *args: object, **options: object) -> None:
        raise AssertionError("tuned")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("jit", {"JITFunction": Kernel}), ("autotuner", {"Autotuner": Tuned})):
        module = types.ModuleType(f"triton.runtime.{name}")
        vars(module).update(kind)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("triton")
def test_kernels_are_not_launched_on_simulated_tensors() -> None:
    def body(gpu: Simulation) -> None:
        Kernel().run(torch.empty(8, device="cuda"), 8, grid=(1,), warmup=False)

    trace = trace_of(body)
    assert trace.notes == (NOTE,)
    assert trace.bounds is None
    with pytest.raises(AssertionError, match="launched"):
        trace_of(lambda gpu: Kernel().run(torch.empty(8), 8, grid=(1,), warmup=False))


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("configs", "restored", "high"),
    [(1, [], "known"), (4, [], 264 * MIB), (4, ["out"], None)],
)
def test_tuning_takes_a_buffer_once(configs: int, restored: list[str], high: object) -> None:
    def body(gpu: Simulation) -> None:
        held = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        kernel = Tuned(configs, restored)
        kernel.run(held)
        kernel.run(held)

    found = bounds_of(body)
    if high == "known":
        assert found is None
        return
    assert found is not None
    assert found.allocated == (8 * MIB, high)
    assert [(part.part, part.calls) for part in found.parts] == [("Triton autotuning", 1)]
