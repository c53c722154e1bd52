"""The card itself: its profile, what it runs on, and who may measure on it now."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from pytest_vram.sim.profiles import CAPABILITIES, PROFILES, Profile


def profile_of(index: int = 0) -> Profile:
    """What the card ``cuda:index`` says about itself, so that a simulation of it is this card.

    What PyTorch does not ask a card about (resident blocks per multiprocessor; more of it before
    2.13) follows from the compute capability; an unknown, newer one is taken for the newest known.
    ``context`` is what others, the CUDA context among them, hold of the card at this moment.
    """
    said = torch.cuda.get_device_properties(index)
    capability = (said.major, said.minor)
    limits = CAPABILITIES.get(capability) or CAPABILITIES[max(CAPABILITIES)]
    threads, blocks, shared, optin = limits
    known = next((card for card in PROFILES.values() if card.title == said.name), None)
    free, total = torch.cuda.mem_get_info(index)
    card = Profile(
        name=known.name if known else said.name,
        title=said.name,
        capability=capability,
        multiprocessors=said.multi_processor_count,
        memory=said.total_memory,
        threads_per_multiprocessor=getattr(said, "max_threads_per_multi_processor", threads),
        blocks_per_multiprocessor=blocks,
        shared_memory_per_multiprocessor=getattr(said, "shared_memory_per_multiprocessor", shared),
        shared_memory_per_block_optin=getattr(said, "shared_memory_per_block_optin", optin),
        l2_cache=said.L2_cache_size,
        context=max(0, total - free - torch.cuda.memory_reserved(index)),
    )
    return replace(
        card,
        warp_size=getattr(said, "warp_size", card.warp_size),
        registers_per_multiprocessor=getattr(
            said, "regs_per_multiprocessor", card.registers_per_multiprocessor
        ),
    )


def environment(index: int = 0) -> dict[str, str]:
    """Facts that a measured figure depends on: card, driver, and the libraries' versions."""
    facts = {
        "gpu": torch.cuda.get_device_properties(index).name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": _cudnn_version(),
        "driver": _driver_version(),
    }
    return {name: value for name, value in facts.items() if value}


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    # cudnn.h: 9 and later count major * 10000 + minor * 100 + patch, before it major * 1000.
    unit = 10000 if number >= 90000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}" if number else ""


def _driver_version() -> str:
    """NVML's answer, ``580.65.06``; empty where NVML cannot be asked (Jetson, ROCm)."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2():
        return ""
    try:
        failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
        return "" if failed else text.value.decode()
    finally:
        nvml.nvmlShutdown()


@contextmanager
def device_lock(
    index: int = 0, *, holder: str = "", waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold ``cuda:index`` for measuring: one process at a time per physical card.

    The lock is a file in the temporary directory, named by the card's UUID, so that it holds
    across CUDA_VISIBLE_DEVICES and test workers; the system releases it with the process. When
    another process holds it, ``waiting`` is told who, in one sentence, and the call waits.
    ``holder`` is what others are told meanwhile (a test's name, say).
    """
    said = torch.cuda.get_device_properties(index)
    uuid = str(getattr(said, "uuid", "")) or f"{said.name}-{index}".replace(" ", "-")
    path = Path(tempfile.gettempdir()) / f"pytest-vram-{uuid}.lock"
    note = path.with_suffix(".holder")
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if waiting is not None:
            waiting(f"waiting for {said.name} (cuda:{index}), which {_read(note)} measures on")
        lock.acquire()
    try:
        _write(note, f"process {os.getpid()}" + (f" ({holder})" if holder else ""))
        yield
    finally:
        _write(note, "")
        lock.release()


def _read(note: Path) -> str:
    try:
        return note.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"


def _write(note: Path, text: str) -> None:
    """A courtesy to those who wait: another user's file must not fail a test."""
    try:
        note.write_text(text, encoding="utf-8")
    except OSError:
        return
