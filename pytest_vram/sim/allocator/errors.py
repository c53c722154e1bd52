"""The allocator's errors, with the figures behind them and PyTorch's familiar words."""

from __future__ import annotations


def format_size(size: int) -> str:
    """``size`` bytes as c10's ``format_size`` writes them: two decimals, binary units."""
    if size <= 1 << 10:
        return f"{size} bytes"
    if size <= 1 << 20:
        return f"{size / (1 << 10):.2f} KiB"
    if size <= 1 << 30:
        return f"{size / (1 << 20):.2f} MiB"
    return f"{size / (1 << 30):.2f} GiB"


class DeviceOutOfMemory(MemoryError):  # noqa: N818 (a fixed name)
    """An allocation that failed after everything was tried; all figures in bytes.

    ``requested`` is what the caller asked for, ``segment`` what the allocator then asked the
    device for (PyTorch's message names that one). ``allowed`` is the ceiling that a memory
    fraction sets, None without one; ``in_private_pools`` is cached in graph and memory pools.
    ``rejected``: throw_on_cudamalloc_oom made it fail before the device was asked. ``expandable``:
    expandable segments were on, so that newer versions don't recommend them.
    """

    def __init__(
        self,
        *,
        requested: int,
        segment: int,
        allocated: int,
        reserved: int,
        free: int,
        capacity: int,
        fraction: float | None = None,
        allowed: int | None = None,
        in_private_pools: int = 0,
        rejected: bool = False,
        expandable: bool = False,
        device: int = 0,
        version: tuple[int, int] = (2, 14),
    ) -> None:
        self.requested = requested
        self.segment = segment
        self.allocated = allocated
        self.reserved = reserved
        self.free = free
        self.capacity = capacity
        self.fraction = fraction
        self.allowed = allowed
        self.in_private_pools = in_private_pools
        self.rejected = rejected
        self.expandable = expandable
        self.device = device
        self.version = version
        super().__init__(self.message())

    def message(self, process: str = "") -> str:
        """PyTorch's text (c10/cuda/CUDACachingAllocator.cpp, ``malloc``).

        ``process`` stands where PyTorch lists the processes that NVML reports on the card.
        """
        if self.rejected:
            return (
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                "per_process_memory_fraction limit. Requested size: "
                f"{format_size(self.requested)}"
            )
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        pools = self.in_private_pools
        private = (
            f"with {format_size(pools)} allocated in private pools (e.g., CUDA Graphs), "
            if pools
            else ""
        )
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.capacity)} "
            f"of which {format_size(self.free)} is free. {process}{allowed}"
            f"Of the allocated memory {format_size(self.allocated + pools)} is allocated by "
            f"PyTorch, {private}and {format_size(self.reserved - self.allocated - pools)} is "
            f"reserved by PyTorch but unallocated.{self._advice()}"
        )

    def _advice(self) -> str:
        if self.expandable and self.version >= (2, 13):
            return ""
        page = (
            "docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
            if self.version >= (2, 10)
            else "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
        )
        return (
            " If reserved but unallocated memory is large try setting"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
            f"  See documentation for Memory Management  (https://{page})"
        )
