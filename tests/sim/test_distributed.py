"""One rank of a data-parallel run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pytest_vram.sim.profiles import find_profile  # noqa: E402
from pytest_vram.sim.simulation import Simulation  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)


@pytest.mark.skipif(
    find_spec("torch.distributed._meta_registrations") is None,
    reason="this PyTorch has no fake collectives: 2.6 has none, 2.11 has",
)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (3, 8)])
def test_data_parallel_training_holds_its_buckets(monkeypatch, rank, ranks):
    """Buckets are copies of all gradients: reducer.hpp, ``gradient_as_bucket_view=False``."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with Simulation(find_profile("t4")):
        torch.distributed.init_process_group("nccl")
        try:
            assert torch.distributed.get_rank() == rank
            assert torch.distributed.get_world_size() == ranks
            model = nn.Linear(1024, 1024).cuda()
            alone = torch.cuda.memory_allocated()
            parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0])
            buckets = torch.cuda.memory_allocated() - alone
            assert buckets == pytest.approx(alone, abs=1 << 20)
            parallel(torch.ones(2, 1024, device="cuda")).sum().backward()
            assert model.weight.grad.is_cuda
        finally:
            torch.distributed.destroy_process_group()


def test_a_single_spawned_process_runs_here():
    seen = []
    with Simulation(find_profile("t4")):
        torch.multiprocessing.spawn(lambda rank, name: seen.append((rank, name)), ("a",), 1)
    assert seen == [(0, "a")]


def test_a_group_that_is_left_to_the_end_of_the_process_ends_with_the_simulation():
    for _ in range(2):
        with Simulation(find_profile("t4")):
            torch.distributed.init_process_group("nccl")
    assert not torch.distributed.is_initialized()


def test_objects_of_other_ranks_are_taken_to_be_ours(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    with Simulation(find_profile("t4")):
        torch.distributed.init_process_group("nccl")
        everywhere, sent, got = [None] * 3, ["from 0"], [None]
        torch.distributed.all_gather_object(everywhere, {"loss": 2})
        torch.distributed.broadcast_object_list(sent, src=0)
        torch.distributed.scatter_object_list(got, ["a", "b", "c"])
        torch.distributed.gather_object("mine", everywhere_else := [None] * 3)
    assert everywhere == [{"loss": 2}] * 3
    assert sent == ["from 0"]
    assert got == ["b"]
    assert everywhere_else == ["mine"] * 3


def test_sharded_parameters_are_refused_with_a_way_out():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with Simulation(find_profile("t4")):
        torch.distributed.init_process_group("nccl")
        for wrap in (FullyShardedDataParallel, fully_shard):
            with pytest.raises(NotImplementedError, match=r"^FSDP is not simulated; measure it on"):
                wrap(nn.Linear(8, 8).cuda())
