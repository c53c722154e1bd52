"""A fault is named in a marked test, whichever loop runs it."""

from __future__ import annotations

import pytest
from projects import Project, outcomes

LOOPS = """
import tempfile

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.unused = nn.Linear(8, 8)

    def forward(self, x, y):
        return {"loss": (self.head(self.first(x)).float() - y).pow(2).mean()}

class Root(Net):
    def __init__(self):
        super().__init__()
        del self.unused
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x, y):
        return {"loss": self.head(self.first(x)).float().pow(2).sum(-1).sqrt().mean()}

def rows():
    return [{"x": torch.full((8,), 0.1 * n), "y": torch.ones(1)} for n in range(16)]

def batch(vram, step):
    some = rows()[4 * step : 4 * step + 4]
    return {key: torch.stack([row[key] for row in some]).to(vram.device) for key in "xy"}

def vram_train(vram, model):
    model = model.to(vram.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vram.train(model, optimizer, lambda step: model(**batch(vram, step))["loss"])

def hand_written(vram, model):
    model = model.to(vram.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with vram.autocast():
            loss = model(**batch(vram, step))["loss"]
        vram.scaler.scale(loss).backward()
        vram.scaler.step(optimizer)
        vram.scaler.update()

def trainer(vram, model):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(), max_steps=4, per_device_train_batch_size=4,
        fp16=vram.precision == "fp16", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="no", dataloader_pin_memory=False,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=rows()).train()

@pytest.mark.vram_budget("64 MiB")
@pytest.mark.parametrize("loop", [vram_train, hand_written, trainer])
def test_unused(vram, loop):
    loop(vram, Net())

@pytest.mark.vram_budget("64 MiB", precision="fp16")
@pytest.mark.parametrize("loop", [vram_train, hand_written, trainer])
def test_root(vram, loop):
    loop(vram, Root())
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_loop_gets_the_same_sentence(project: Project) -> None:
    pytest.importorskip("transformers")
    project.write(LOOPS)
    result = project.run("-rN", cpu=True)
    assert outcomes(result) == {"failed": 6}
    text = result.stdout.str()
    unused = "unused.weight and unused.bias; their modules did not run (unused branch)"
    assert text.count(unused) == 3
    skipped = "4 of 4 steps were skipped, scale 65536 -> 4096 and falling; gradients are not finite"
    assert text.count(skipped) == 3
    assert text.count("operator: backward of sqrt (module Root, float32, test_a.py:") == 3
