"""Threads that a test starts work on the device of the pass."""

from __future__ import annotations

from projects import Project, outcomes

BUDGET = '@pytest.mark.vram_budget("1 GiB")'

PROGRAM = f"""
import asyncio, contextlib, threading, time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

OLD = ThreadPoolExecutor(1)
OLD.submit(int).result()

def train_one(width=64):
    model, optimizer, loss_fn = build("cuda", width)
    loss_fn().backward()
    optimizer.step()
    return model

def is_there(model):
    weight = model[0].weight
    return weight.is_cuda and weight.grad is not None

{BUDGET}
def test_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(train_one()))
    thread.start()
    thread.join()
    assert is_there(found[0])

class Trainer(threading.Thread):
    def run(self):
        self.model = train_one()

{BUDGET}
def test_subclass():
    trainer = Trainer()
    trainer.start()
    trainer.join()
    assert is_there(trainer.model)

{BUDGET}
def test_executors():
    with ThreadPoolExecutor(1) as pool:
        assert all(map(is_there, pool.map(train_one, [16, 32, 48])))
    with ThreadPool(1) as pool:
        assert all(map(is_there, pool.map(train_one, [16, 32, 48])))
    assert is_there(OLD.submit(train_one).result())

{BUDGET}
@pytest.mark.asyncio
async def test_to_thread():
    assert is_there(await asyncio.to_thread(train_one))

{BUDGET}
def test_forward_in_a_thread_and_backward_here():
    model, optimizer, loss_fn = build("cuda")
    losses = []
    def forward():
        with torch.autocast("cuda", torch.float16):
            losses.append(loss_fn())
    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    losses[0].backward()
    optimizer.step()

BLOCKED = threading.Event()
ANSWERS = []

def outlive():
    BLOCKED.wait()
    with contextlib.suppress(Exception):
        ANSWERS.append(torch.ones(2).device.type)
        ANSWERS.append(torch.ones(2, device="cuda"))

{BUDGET}
def test_a_thread_that_outlives_the_test():
    train_one()
    threads.append(threading.Thread(target=outlive))
    threads[-1].start()

threads = []

def test_afterwards():
    BLOCKED.set()
    for thread in threads:
        thread.join()
    assert ANSWERS == ["cpu"] * len(threads)
    assert OLD.submit(lambda: torch.ones(2).device.type).result() == "cpu"
    assert "run" not in vars(threads[0])
"""


def test_threads_of_all_kinds(project: Project) -> None:
    project.write(PROGRAM)
    assert outcomes(project.run(cpu=True)) == {"passed": 7}


def test_a_thread_takes_what_the_main_thread_would(project: Project) -> None:
    """The same figures, but for a cuBLAS workspace of the thread's own; and a second thread uses
    the handle that the first one left."""
    project.write(f"""
import threading

def peak(runs, count):
    for _ in range(count):
        runs(lambda: loop("cuda"))
    return torch.cuda.max_memory_allocated()

def here(work):
    work()

def elsewhere(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

peaks = []

@pytest.mark.parametrize("runs", [here, elsewhere])
@pytest.mark.parametrize("count", [1, 2])
{BUDGET}
def test_x(runs, count):
    peaks.append(peak(runs, count))

def test_peaks():
    assert len(peaks) == 4 and len(set(peaks)) == 1
""")
    assert outcomes(project.run()) == {"passed": 5}


def test_streams_belong_to_threads(project: Project) -> None:
    project.write(f"""
import threading

{BUDGET}
def test_x():
    side = torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream()]
    loop("cuda")
""")
    assert outcomes(project.run()) == {"passed": 1}
