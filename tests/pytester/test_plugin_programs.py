"""Programs that a marked test may be: compiled models, loader workers, checkpoints on disk."""

from __future__ import annotations

import pytest

SOURCE = """
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@torch.compile
def act(x):
    return torch.relu(x) * 2


@pytest.mark.vram_budget(steps=1)
def test_compiled(vram):
    model = torch.compile(nn.Linear(8, 8).to(vram.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 8, device=vram.device)
    vram.train(model, optimizer, lambda: act(model(inputs)).square().mean())


@pytest.mark.vram_budget(steps=1)
def test_loader():
    model = nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    for x, y in DataLoader(data, batch_size=8, num_workers=1, pin_memory=True):
        loss = (model(x.cuda(non_blocking=True)) - y.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.vram_budget(steps=1)
def test_saved(vram, tmp_path):
    model = nn.Linear(8, 8).to(vram.device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(4, 8, device=vram.device)
    vram.train(model, optimizer, lambda: model(inputs).square().mean())
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="cuda")
    assert loaded["model"]["weight"].is_cuda
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
"""


def test_compiled_models_loader_workers_and_checkpoints_pass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOURCE)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["*torch.compile was simulated eagerly: a compiled step may keep other tensors"]
    )
