"""Programs that a marked test may be: compiled models, loader workers, checkpoints on disk."""

from __future__ import annotations

import pytest

SOURCE = """
import pytest, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
@torch.compile
def act(x): return torch.relu(x)*2
@pytest.mark.vram_budget(steps=1)
def test_compiled(vram):
    m=torch.compile(nn.Linear(8,8).to(vram.device)); o=torch.optim.SGD(m.parameters(),lr=.1)
    vram.train(m,o,lambda: act(m(torch.randn(4,8,device=vram.device))).square().mean())
@pytest.mark.vram_budget(steps=1)
def test_loader():
    m=nn.Linear(8,1).cuda(); o=torch.optim.SGD(m.parameters(),lr=.1)
    for x,y in DataLoader(TensorDataset(torch.randn(16,8),torch.randn(16,1)),batch_size=8,num_workers=1,pin_memory=True):
        l=(m(x.cuda(non_blocking=True))-y.cuda()).square().mean(); l.backward(); o.step(); o.zero_grad()
@pytest.mark.vram_budget(steps=1)
def test_save(vram,tmp_path):
    m=nn.Linear(8,8).to(vram.device); o=torch.optim.Adam(m.parameters())
    vram.train(m,o,lambda: m(torch.randn(4,8,device=vram.device)).square().mean())
    torch.save(dict(m=m.state_dict(),o=o.state_dict()),tmp_path/'c.pt')
    c=torch.load(tmp_path/'c.pt',map_location='cuda'); assert c['m']['weight'].is_cuda
    m.load_state_dict(c['m']); o.load_state_dict(c['o'])
"""


def test_compiled_models_loader_workers_and_checkpoints_pass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOURCE)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["*torch.compile was simulated eagerly: a compiled step may keep other tensors"]
    )
