"""Reading PyTorch's memory history, on entries and stacks written by hand: no GPU, no CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_vram.cuda.casts import Casts
from pytest_vram.cuda.history import _Ranges, _Reader
from pytest_vram.cuda.stacks import Stacks, operators
from pytest_vram.trace import Allocation, Event, Phase, Trace


def frame(name: str, filename: str = "libtorch_cuda.so", line: int = 0) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


EMPTY = frame("at::detail::empty_strided_cuda(c10::ArrayRef<long>)")
USER = frame("step", "train/loop.py", 41)
TORCH = frame("forward", torch.__file__.replace("__init__.py", "nn/modules/linear.py"), 134)


def call(operator: str) -> dict[str, Any]:
    return frame(f"at::_ops::{operator}::call(at::Tensor const&)")


def test_the_operator_is_the_outermost_with_a_kernel_of_its_own() -> None:
    stack = [EMPTY, call("empty_strided"), call("_to_copy"), call("to_dtype"), call("linear")]
    origin = Stacks().origin([*stack, TORCH, USER])
    assert origin.operator == "aten::_to_copy"
    assert origin.frame == "train/loop.py:41 step"
    assert origin.bill == ""
    assert not origin.cast


def test_operators_outside_an_inner_python_frame_are_not_meant() -> None:
    dispatch = frame("__torch_dispatch__", torch.__file__.replace("__init__.py", "sub.py"), 7)
    origin = Stacks().origin([EMPTY, call("mm"), dispatch, call("relu"), USER])
    assert origin.operator == "aten::mm"


def test_backward_has_no_python_frame() -> None:
    node = frame("torch::autograd::generated::GeluBackward0::apply(std::vector<at::Tensor>&&)")
    origin = Stacks().origin([EMPTY, call("gelu_backward"), node])
    assert (origin.operator, origin.frame) == ("aten::gelu_backward", "")


def test_autocast_casts_and_library_workspaces_are_told_apart() -> None:
    cast = frame("at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)")
    assert Stacks().origin([EMPTY, call("_to_copy"), cast, call("linear"), USER]).cast
    handle = frame("at::cuda::getCurrentCUDABlasHandle(bool)")
    origin = Stacks().origin([handle, call("mm"), USER])
    assert (origin.bill, origin.name) == ("workspace", "cublas workspace")
    plan = Stacks().origin([frame("??"), call("cudnn_convolution"), call("convolution"), USER])
    assert (plan.operator, plan.bill) == ("aten::convolution", "workspace")
    output = Stacks().origin([EMPTY, call("cudnn_convolution"), call("convolution"), USER])
    assert output.bill == ""
    grown = frame("at::native::resize_bytes_cuda(c10::StorageImpl*, unsigned long)")
    assert Stacks().origin([grown, call("resize_"), call("convolution"), USER]).bill == ""


def test_every_operator_has_one_cpp_name() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    assert len(operators()) == len(names)
    assert operators()["log_softmax_int"] == "aten::log_softmax.int"


def cast(size: int, module: str) -> Allocation:
    return Allocation(size, size, module=module)


def test_a_cast_is_kept_if_the_module_has_a_parameter_of_its_size() -> None:
    casts = Casts()
    casts.parameter("fc.weight", (8, 8), "float32")
    casts.parameter("fc.bias", (8,), "float32")
    casts.parameter("frozen.weight", (9, 9), "bfloat16")
    x, weight, bias = cast(64, "fc"), cast(128, "fc"), cast(16, "fc")
    for allocation in (x, weight, bias):
        casts.made(allocation)
    assert [a.bill for a in (x, weight, bias)] == ["", "autocast_cache", "autocast_cache"]
    assert weight.name == "autocast copy of fc.weight"


def test_an_input_of_a_weights_size_gives_way_to_the_weight() -> None:
    casts = Casts()
    casts.parameter("fc.weight", (8, 8), "float32")
    x, weight = cast(128, "fc"), cast(128, "fc")
    casts.made(x)
    casts.made(weight)
    assert (x.bill, weight.bill) == ("", "autocast_cache")


def test_a_submodules_weight_may_be_used_without_calling_it() -> None:
    casts = Casts()
    casts.parameter("attention.in_proj_weight", (24, 8), "float32")
    casts.parameter("attention.out_proj.weight", (8, 8), "float32")
    made = cast(128, "attention")
    casts.made(made)
    assert made.name == "autocast copy of attention.out_proj.weight"


def test_tied_weights_are_found_by_size_and_once_per_region() -> None:
    casts = Casts()
    casts.parameter("tokens.weight", (16, 8), "float32")
    first, again, later = cast(256, "head"), cast(256, "head"), cast(256, "head")
    casts.made(first)
    casts.made(again)
    casts.forget()
    casts.made(later)
    assert [a.bill for a in (first, again, later)] == ["autocast_cache", "", "autocast_cache"]


def test_ranges_give_what_they_have() -> None:
    ranges = _Ranges([(100, 50), (200, 10)])
    assert ranges.remove(120, 10) == 10
    assert ranges.remove(100, 50) == 40
    assert ranges.remove(90, 200) == 10
    assert ranges.remove(0, 1000) == 0


def segment(address: int, size: int, *blocks: tuple[int, int, str]) -> dict[str, Any]:
    return {
        "address": address,
        "total_size": size,
        "blocks": [{"address": a, "size": n, "state": s} for a, n, s in blocks],
    }


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}


def test_marks_meet_the_history_by_position_and_old_memory_counts_for_nothing() -> None:
    old = segment(0, 2048, (0, 1024, "active_allocated"), (1024, 1024, "inactive"))
    marks = [
        (0, ("phase", "forward", 1, "test_a.py:3 body")),
        (0, ("enter", "fc")),
        (1, ("leave",)),
        (1, ("label", 4096, "parameters", "fc.weight", (2, 2), "float32", True)),
        (3, ("phase", "backward", 1, "test_a.py:4 body")),
    ]
    reader = _Reader([old], marks, Stacks())
    reader.read(
        [
            entry("segment_alloc", 4096, 8192),
            entry("alloc", 4096, 100),
            entry("alloc", 4608, 600),
            entry("free_requested", 0, 1024),
            entry("free_completed", 0, 1024),
            entry("segment_free", 0, 2048),
            entry("free_requested", 4608, 600),
        ],
        [512, 1024],
    )
    assert reader.phases == [Phase("forward", 1), Phase("backward", 1)]
    assert [(e.kind, e.index, e.size) for e in reader.events] == [
        ("phase", 0, 0),
        ("segment_alloc", -1, 8192),
        ("alloc", 0, 0),
        ("alloc", 1, 0),
        ("phase", 1, 0),
        ("free", 1, 0),
    ]
    first, second = reader.allocations
    assert (first.module, first.bill, first.name, first.shape) == (
        "fc",
        "parameters",
        "fc.weight",
        (2, 2),
    )
    assert (second.module, second.frame) == ("", "test_a.py:3 body")
    assert (reader.allocated, reader.reserved) == (512, 8192)
    assert reader._peaks == (2560, 10240)


def test_what_the_history_lacks_is_other_at_the_peak_and_said() -> None:
    reader = _Reader([], [], Stacks())
    reader.read(
        [
            entry("segment_alloc", 0, 2048),
            entry("alloc", 0, 512),
            entry("alloc", 512, 512),
            entry("free_requested", 0, 512),
        ],
        [512, 512],
    )
    notes: list[str] = []
    reader.settle_peaks((1536, 2048), notes)
    trace = Trace(reader.allocations, reader.events, reader.phases)
    assert max(allocated for _, _, allocated, _ in trace.walk()) == 1536
    assert reader.allocations[-1] == Allocation(
        512, 512, bill="other", name="missing from PyTorch's history"
    )
    assert reader.events[-1] == Event("free", 0)
    assert notes == [
        "peak allocated: PyTorch's counter says 1,536 bytes, its recorded history 1,024; "
        "the difference of +512 bytes is unexplained"
    ]


def test_the_first_label_of_the_most_telling_bill_wins() -> None:
    def label(bill: str, name: str) -> tuple[int, Any]:
        return 1, ("label", 0, bill, name, (1,), "float32", True)

    marks = [label("inputs", ""), label("parameters", "w"), label("buffers", "b")]
    reader = _Reader([], marks, Stacks())
    reader.read([entry("alloc", 0, 4)], [512])
    assert (reader.allocations[0].bill, reader.allocations[0].name) == ("parameters", "w")


@pytest.mark.parametrize("chained", [False, True])
def test_an_out_of_memory_error_is_found_behind_others(chained: bool) -> None:
    reader = _Reader([], [(0, ("enter", "fc"))], Stacks())
    failed = {**entry("oom", 0, 4096), "device_free": 100, "frames": [call("mm"), USER]}
    reader.read([entry("segment_alloc", 0, 2048), entry("alloc", 0, 4), failed], [512])
    notes: list[str] = []
    try:
        try:
            raise torch.cuda.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB. Of this, 1.50 GiB allowed; of it"
            )
        except RuntimeError as error:
            if not chained:
                raise
            raise ValueError("in the trainer") from error
    except (RuntimeError, ValueError) as error:
        oom = reader.out_of_memory(error, 8192, notes)
    assert oom is not None
    assert (oom.requested, oom.allocated, oom.reserved, oom.free) == (4096, 512, 2048, 100)
    assert (oom.operator, oom.module, oom.frame) == ("aten::mm", "fc", "train/loop.py:41 step")
    assert oom.allowed == 3 << 29
    assert reader.out_of_memory(None, 8192, notes) is None
    assert notes == ["ran out of memory 1 times, and the test went on"]
