"""The simulated GPU as a program sees it."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.tensors import SimTensor
from pytest_vram.sim.values import DataDependent

MIB = 1 << 20


def test_a_tensor_takes_blocks_of_512_bytes(gpu: Simulation) -> None:
    tensor = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() == 512
    assert torch.cuda.memory_reserved() == 2 * MIB
    del tensor
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 512


def test_a_linear_forward_leaves_the_cublas_workspace(gpu: Simulation) -> None:
    # pytorch/pytorch#95668: 8,519,680 bytes stay after a 1x1 Linear's forward
    def forward() -> None:
        nn.Linear(1, 1, device="cuda")(torch.randn(1, 1, device="cuda"))

    forward()
    gc.collect()
    assert torch.cuda.memory_allocated() == 8_519_680


def test_python_sees_a_cuda_tensor(gpu: Simulation) -> None:
    tensor = torch.zeros(2, 3, device="cuda")
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert not tensor.is_meta
    assert tensor.device == torch.device("cuda:0")
    assert tensor.get_device() == 0
    assert repr(tensor) == "tensor(..., device='cuda:0', size=(2, 3), dtype=torch.float32)"


def test_moving_to_where_it_is_returns_the_same_tensor(gpu: Simulation) -> None:
    tensor = torch.zeros(4, device="cuda")
    assert tensor.to("cuda") is tensor
    assert tensor.cuda() is tensor
    assert tensor.to(torch.float32) is tensor
    assert tensor.to("cuda", copy=True) is not tensor
    assert tensor.half().dtype is torch.float16


def test_parameters_keep_their_identity_when_a_module_moves(gpu: Simulation) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.cuda()
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert model[1].weight is model[0].weight
    assert optimizer.param_groups[0]["params"][0].is_cuda
    assert torch.cuda.memory_allocated() == 3 * 512


def test_a_module_made_outside_is_itself_again_afterwards() -> None:
    model = nn.Linear(4, 4)
    weight, expected = model.weight, model.weight.detach().clone()
    batch_norm = nn.BatchNorm1d(4)
    with Simulation(find_profile("t4")):
        model.cuda()
        batch_norm.cuda()
        assert isinstance(model.weight, SimTensor)
        model(torch.randn(2, 4, device="cuda")).sum().backward()
    assert model.weight is weight
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, expected)
    assert model.weight.grad is None
    assert type(batch_norm.running_mean) is torch.Tensor
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_a_lazy_module_gets_its_shapes_on_the_card(gpu: Simulation) -> None:
    module = nn.Sequential(nn.LazyLinear(256, bias=False), nn.LazyBatchNorm1d()).to("cuda")
    weight: torch.Tensor = module[0].weight
    module(torch.ones(2, 1024, device="cuda"))
    assert module[0].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.is_cuda
    assert weight.shape == (256, 1024)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = gpu.allocator.allocated
    module(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    assert gpu.allocator.allocated - before >= 256 * 1024 * 4


def test_a_module_that_goes_to_meta_leaves_the_card(gpu: Simulation) -> None:
    """The skeleton of ``torch.func``'s ensembles."""
    model = nn.Linear(256, 256, device="cuda")
    held = gpu.allocator.allocated
    skeleton = copy.deepcopy(model)
    assert gpu.allocator.allocated == 2 * held
    skeleton.to("meta")
    assert gpu.allocator.allocated == held
    assert skeleton.weight.device.type == "meta"
    assert model.weight.to(torch.device("meta")).is_meta
    out = torch.func.functional_call(
        skeleton, dict(model.named_parameters()), torch.ones(2, 256, device="cuda")
    )
    assert out.is_cuda


def test_an_optimizer_made_outside_forgets_what_it_learned_inside() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Simulation(find_profile("t4")):
        model.cuda()
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 2
    assert len(optimizer.state) == 0
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert torch.isfinite(model.weight).all()


def test_everything_is_undone_on_leaving() -> None:
    functions = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    tensor_methods = dict(vars(torch.Tensor))
    with contextlib.suppress(ZeroDivisionError), Simulation(find_profile("t4")):
        assert torch.cuda.is_available()
        1 / 0  # noqa: B018
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == functions
    assert dict(vars(torch.Tensor)) == tensor_methods
    assert type(torch.zeros(2)) is torch.Tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.layer_norm(torch.ones(2, 4), (4,)).dtype is not torch.float64


def test_two_simulations_do_not_see_each_other() -> None:
    with Simulation(find_profile("t4")):
        kept = torch.zeros(MIB, device="cuda")
        assert torch.cuda.memory_allocated() == 4 * MIB
    with Simulation(find_profile("h100-80gb")):
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.get_device_capability() == (9, 0)
        torch.zeros(256, device="cuda")
        assert torch.cuda.max_memory_allocated() == 1024
    del kept


def test_out_of_memory_is_the_familiar_exception(gpu: Simulation) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
    trace = gpu.trace()
    assert trace.oom is not None
    assert trace.oom.requested == 200 << 30
    assert trace.events[-1].kind == "oom"
    assert torch.empty(4, device="cuda").is_cuda


def test_known_values_are_answered_and_others_follow_the_policy(gpu: Simulation) -> None:
    assert torch.tensor([3, 5], device="cuda").tolist() == [3, 5]
    assert torch.arange(4, device="cuda")[2].item() == 2
    assert bool((torch.ones(4, dtype=torch.long, device="cuda") == 1).all())
    assert torch.zeros(3, dtype=torch.bool, device="cuda").nonzero().shape == (0, 1)
    unknown = torch.randn(4, device="cuda")
    assert unknown.sum().item() == 1.0
    assert bool((unknown > 0).any()) is False
    assert unknown.cpu().tolist() == [1.0] * 4


def test_an_operand_that_settles_the_result_is_enough(gpu: Simulation) -> None:
    """How loops that generate text know that they are at the end."""
    ended = torch.rand(4, device="cuda") > 0.5  # unknown
    at_the_limit = torch.full((4,), True, device="cuda")
    assert (ended | at_the_limit).tolist() == [True] * 4
    unfinished = torch.rand(4, device="cuda").long() & ~(at_the_limit | ended)
    assert bool(unfinished.max() == 0)
    open_ = torch.rand(4, device="cuda") > 0.5
    open_ &= ~at_the_limit
    assert not open_.any()
    assert not (ended | torch.tensor([True, True, False, True]).cuda()).any()  # the policy


def test_a_value_written_in_place_is_not_answered_from_memory(gpu: Simulation) -> None:
    flags = torch.zeros(4, dtype=torch.long, device="cuda")
    flags.add_(torch.randint(0, 2, (4,), device="cuda"))
    assert flags.tolist() == [1, 1, 1, 1]
    flags.fill_(7)
    assert flags.tolist() == [7, 7, 7, 7]


def test_a_size_that_depends_on_values_names_the_line(gpu: Simulation) -> None:
    scores = torch.randn(8, device="cuda")
    with pytest.raises(DataDependent, match=r"torch\.nonzero at .*test_simulation\.py:\d+ test_a"):
        (scores > 0).nonzero()


def test_streams_are_handed_out_in_turn(gpu: Simulation) -> None:
    """32 of each priority, then the first again; every simulation begins anew."""
    streams = [torch.cuda.Stream() for _ in range(33)]
    high = torch.cuda.Stream(priority=-1)
    assert [stream.stream_id for stream in streams] == [*range(1, 33), 1]
    assert streams[32] == streams[0]
    assert high.stream_id == 33


def test_streams_have_their_own_pools(gpu: Simulation) -> None:
    first = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    del first
    with torch.cuda.stream(side):
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 4 * MIB
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_deep_copy_costs_its_own_memory(gpu: Simulation) -> None:
    model = nn.Linear(256, 256, bias=False, device="cuda")
    twin = copy.deepcopy(model)
    assert torch.cuda.memory_allocated() == 2 * 256 * 256 * 4
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad


def test_resizing_a_storage_frees_and_takes_memory(gpu: Simulation) -> None:
    tensor = torch.empty(1024, device="cuda")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert torch.cuda.memory_allocated() == 0
    storage.resize_(4096)
    assert torch.cuda.memory_allocated() == 4096
    del tensor, storage
    assert torch.cuda.memory_allocated() == 0


def test_autocast_follows_the_cuda_policy_and_keeps_one_copy_per_weight(gpu: Simulation) -> None:
    linear = nn.Linear(64, 64, device="cuda")
    hidden = torch.randn(2, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        once = linear(hidden)
        held = torch.cuda.memory_allocated()
        twice = linear(hidden)
        assert torch.cuda.memory_allocated() - held == 2 * 512  # input copy and output
        assert once.dtype is twice.dtype is torch.float16
        assert nn.functional.layer_norm(once, (64,)).dtype is torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(once.sigmoid(), once.sigmoid())
    del once, twice
    gc.collect()
    labels = [a.bill for a in gpu.trace().allocations]
    assert labels.count("autocast_cache") == 2


def test_grad_scaler_works_and_never_skips(gpu: Simulation) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 8, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536.0
    assert optimizer.state[model.weight]["step"].item() == 2


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "RAdam", "NAdam",
                                  "Adamax", "Adadelta", "ASGD", "Rprop", "Adafactor"])  # fmt: skip
def test_every_optimizer_steps(gpu: Simulation, name: str) -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
    assert torch.cuda.memory_allocated() > 2 * 64 * 64 * 4


def test_the_snapshot_has_pytorchs_format(gpu: Simulation, tmp_path) -> None:
    kept = torch.zeros(MIB, device="cuda")
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc"]
    entry = snapshot["device_traces"][0][1]
    assert entry["size"] == kept.nbytes
    assert entry["frames"][-1]["name"] == "test_the_snapshot_has_pytorchs_format"
    segment = snapshot["segments"][0]
    assert segment["total_size"] == 20 * MIB
    assert segment["allocated_size"] == 4 * MIB


def test_checkpointing_lowers_the_peak(gpu: Simulation) -> None:
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                           for _ in range(4)).cuda()  # fmt: skip
    hidden = torch.randn(512, 256, device="cuda")

    def peak(recompute: bool) -> int:
        torch.cuda.reset_peak_memory_stats()
        out = hidden
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=False) if recompute else block(out)
        out.sum().backward()
        blocks.zero_grad()
        return torch.cuda.max_memory_allocated()

    assert peak(True) < peak(False) - 3 * 512 * 1024 * 4


def test_packed_sequences_run_on_lengths_of_the_host(gpu: Simulation) -> None:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    lstm = nn.LSTM(32, 64, 2, batch_first=True).cuda()
    batch = torch.randn(6, 20, 32, device="cuda", requires_grad=True)
    lengths = torch.tensor([20, 17, 17, 9, 4, 4])
    packed = pack_padded_sequence(batch, lengths, batch_first=True)
    assert packed.data.shape == (71, 32)
    assert packed.batch_sizes.tolist() == [6] * 4 + [4] * 5 + [3] * 8 + [1] * 3
    out, found = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    assert out.shape == (6, 20, 64)
    assert found.tolist() == lengths.tolist()
    out.sum().backward()
    assert batch.grad is not None


def test_groups_are_multiplied_in_any_floating_type(gpu: Simulation) -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped product")
    tokens, experts = torch.randn(64, 32, device="cuda"), torch.randn(4, 32, 48, device="cuda")
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="cuda")
    assert torch._grouped_mm(tokens, experts, offs=ends).shape == (64, 48)


def test_a_declared_share_decides_what_unknown_masks_select(gpu: Simulation) -> None:
    from pytest_vram.sim.selection import assume_selected

    tokens = torch.randn(1000, 16, device="cuda")
    with assume_selected(0.25):
        chosen = tokens[tokens[:, 0] > 0]
        assert chosen.shape == (250, 16)
        assert (tokens > 0).nonzero().shape == (4000, 2)
        assert tokens.masked_select(tokens > 0).shape == (4000,)
    with pytest.raises(DataDependent, match=r"vram\.assume_selected"):
        tokens[tokens[:, 0] > 0]


def test_known_masks_select_what_they_say(gpu: Simulation) -> None:
    mask = torch.tensor([True, False, True, True]).cuda()
    picked = torch.randn(4, 3, device="cuda")[mask]
    assert picked.shape == (3, 3)
    assert mask.nonzero().flatten().tolist() == [0, 2, 3]


def test_what_one_simulation_learned_of_shapes_holds_for_any_default_dtype() -> None:
    def divided() -> torch.dtype:
        with Simulation(find_profile("t4")):
            return (torch.empty(7, 11, dtype=torch.int64, device="cuda") / 3).dtype

    torch.set_default_dtype(torch.float64)
    try:
        assert divided() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert divided() is torch.float32


def test_workspace_variables_are_read_by_every_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def left() -> int:
        with Simulation(find_profile("t4")):
            torch.mm(torch.empty(3, 5, device="cuda"), torch.empty(5, 7, device="cuda"))
            return int(torch.cuda.memory_allocated())

    assert left() == 8_519_680  # 4096 KiB * 2 + 16 KiB * 8
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert left() == 16 * 1024 * 8


def test_simulations_do_not_nest(gpu: Simulation) -> None:
    with pytest.raises(RuntimeError, match=r"^torch\.cuda is simulated already"):
        Simulation(find_profile("t4")).__enter__()
    assert torch.empty(1, device="cuda").is_cuda


def test_generators_of_any_device_are_generators(gpu: Simulation) -> None:
    assert isinstance(torch.Generator("cuda"), torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)


def test_reshaping_an_expanded_tensor_copies_it_contiguously(gpu: Simulation) -> None:
    """Grouped key/value heads are repeated so: a copy is asked for with a layout of its own."""
    heads = torch.randn(2, 16, 4, 8, device="cuda").transpose(1, 2)
    repeated = heads[:, :, None].expand(2, 4, 3, 16, 8).reshape(2, 12, 16, 8)
    assert repeated.stride() == (12 * 16 * 8, 16 * 8, 8, 1)
    assert repeated.untyped_storage().nbytes() == 3 * heads.untyped_storage().nbytes()


def test_a_conjugate_is_remembered_apart_from_what_undoes_it(gpu: Simulation) -> None:
    """A conjugate is a view that operators resolve into a copy when they read it
    (ConjugateFallback.cpp, v2.14.1); the conjugate of a conjugate is the plain tensor again."""
    number = torch.zeros(1 << 16, dtype=torch.complex64, device="cuda")
    assert not number.conj().conj().is_conj()
    assert number.conj().is_conj()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    number * number.conj()
    assert torch.cuda.max_memory_allocated() - held == 2 * 8 * (1 << 16)
    real = torch.zeros(4, device="cuda")
    assert not torch._neg_view(torch._neg_view(real)).is_neg()
    assert torch._neg_view(real).is_neg()
