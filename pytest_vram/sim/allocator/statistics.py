"""The allocator's counters, kept as plain sums, and PyTorch's ``memory_stats`` made from them.

PyTorch updates up to thirty figures at every allocation. Here an event adds to three sums of its
size class; everything else is a difference or a maximum of those and is worked out when somebody
asks. A peak needs a look only where a figure begins to fall, and only if enough came since the last
look that it could have been exceeded: what may come until then is worked out at each look.
"""

from __future__ import annotations

from collections.abc import Iterator

#: DeviceStats in c10/core/CachingDeviceAllocator.h: name there -> name here.
FIGURES = {
    "allocation": "blocks",
    "segment": "segments",
    "active": "active",
    "inactive_split": "split",
    "allocated_bytes": "bytes",
    "reserved_bytes": "reserved",
    "active_bytes": "active_bytes",
    "inactive_split_bytes": "split_bytes",
    "requested_bytes": "requested",
}


class Peaks:
    """The highest value each figure had; right after a look."""

    __slots__ = (
        "peak_active",
        "peak_active_bytes",
        "peak_blocks",
        "peak_bytes",
        "peak_requested",
        "peak_reserved",
        "peak_segments",
        "peak_split",
        "peak_split_bytes",
    )

    def __init__(self) -> None:
        self.peak_blocks = self.peak_bytes = self.peak_requested = 0
        self.peak_active = self.peak_active_bytes = 0
        self.peak_split = self.peak_split_bytes = 0
        self.peak_segments = self.peak_reserved = 0

    def raise_active(self, blocks: int, size: int) -> None:
        self.peak_active = max(self.peak_active, blocks)
        self.peak_active_bytes = max(self.peak_active_bytes, size)


class Tally(Peaks):
    """What came and went: small blocks, or large ones.

    ``late`` blocks were given up by the program while another stream still used them: PyTorch
    calls them active but no longer allocated. When more came than a ``due_*`` says, or more is
    there than a ``most_*``, the next fall has to be preceded by a look.
    """

    __slots__ = (
        "blocks_in",
        "blocks_out",
        "bytes_in",
        "bytes_out",
        "due_blocks",
        "due_bytes",
        "late",
        "late_bytes",
        "most_split",
        "most_split_bytes",
        "requested_in",
        "requested_out",
        "reserved_in",
        "reserved_out",
        "segments_in",
        "segments_out",
        "split_bytes_in",
        "split_bytes_out",
        "split_in",
        "split_out",
    )

    def __init__(self) -> None:
        super().__init__()
        self.blocks_in = self.blocks_out = self.due_blocks = 0
        self.bytes_in = self.bytes_out = self.due_bytes = 0
        self.requested_in = self.requested_out = 0
        self.split_in = self.split_out = self.most_split = 0
        self.split_bytes_in = self.split_bytes_out = self.most_split_bytes = 0
        self.segments_in = self.segments_out = 0
        self.reserved_in = self.reserved_out = 0
        self.late = self.late_bytes = 0

    def flow(self, figure: str) -> tuple[int, int]:
        """How much of ``figure`` came and went since the beginning."""
        if figure == "active":
            return self.blocks_in, self.blocks_out - self.late
        if figure == "active_bytes":
            return self.bytes_in, self.bytes_out - self.late_bytes
        return getattr(self, f"{figure}_in"), getattr(self, f"{figure}_out")


class Flow:
    """A figure that is rare enough to be kept in PyTorch's own form."""

    __slots__ = ("base_in", "base_out", "came", "peak", "went")

    def __init__(self) -> None:
        self.came = self.went = self.peak = self.base_in = self.base_out = 0

    def add(self, amount: int = 1) -> None:
        self.came += amount
        self.peak = max(self.peak, self.came - self.went)

    def remove(self, amount: int = 1) -> None:
        self.went += amount

    def reset_peak(self) -> None:
        self.peak = self.came - self.went

    def reset_accumulated(self) -> None:
        self.base_in, self.base_out = self.came, self.went

    def items(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield f"{prefix}.current", self.came - self.went
        yield f"{prefix}.peak", self.peak
        yield f"{prefix}.allocated", self.came - self.base_in
        yield f"{prefix}.freed", self.went - self.base_out


class Statistics:
    """All counters of one device's allocator."""

    def __init__(self) -> None:
        self.small = Tally()
        self.large = Tally()
        self.total = Peaks()
        self.due = self.due_split = False  # whether a look must precede the next fall
        self.oversize_allocations = Flow()
        self.oversize_segments = Flow()
        # By private pool: bytes reserved, in all and as small and large segments. A pool's figures
        # outlive it.
        self.private: dict[tuple[int, int], tuple[Flow, Flow, Flow]] = {}
        self.alloc_retries = 0
        self.ooms = 0
        self.oom_rejections = 0
        self.sync_all_streams = 0
        self.device_allocs = 0
        self.device_frees = 0
        self._bases: dict[tuple[str, str], tuple[int, int]] = {}

    # -- peaks ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Bring the peaks of what is held up to date, and say when the next look is due.

        Written out in full because it runs at every tenth event or so.
        """
        small, large, total = self.small, self.large, self.total
        self.due = False
        small_blocks = small.blocks_in - small.blocks_out
        large_blocks = large.blocks_in - large.blocks_out
        small_bytes = small.bytes_in - small.bytes_out
        large_bytes = large.bytes_in - large.bytes_out
        small_requested = small.requested_in - small.requested_out
        large_requested = large.requested_in - large.requested_out
        if small_blocks > small.peak_blocks:
            small.peak_blocks = small_blocks
        if large_blocks > large.peak_blocks:
            large.peak_blocks = large_blocks
        if small_bytes > small.peak_bytes:
            small.peak_bytes = small_bytes
        if large_bytes > large.peak_bytes:
            large.peak_bytes = large_bytes
        if small_requested > small.peak_requested:
            small.peak_requested = small_requested
        if large_requested > large.peak_requested:
            large.peak_requested = large_requested
        blocks_left = total.peak_blocks - small_blocks - large_blocks
        if blocks_left < 0:
            total.peak_blocks -= blocks_left
            blocks_left = 0
        bytes_left = total.peak_bytes - small_bytes - large_bytes
        if bytes_left < 0:
            total.peak_bytes -= bytes_left
            bytes_left = 0
        requested_left = total.peak_requested - small_requested - large_requested
        if requested_left < 0:
            total.peak_requested -= requested_left
            requested_left = 0
        # An allocation adds no more requested bytes than block bytes, so one limit serves both.
        # What the total has left is divided: an eighth of the bytes, and half of the blocks, may
        # come as small ones.
        if requested_left < bytes_left:
            bytes_left = requested_left
        small.due_blocks = small.blocks_in + min(small.peak_blocks - small_blocks, blocks_left >> 1)
        large.due_blocks = large.blocks_in + min(large.peak_blocks - large_blocks, blocks_left >> 1)
        small.due_bytes = small.bytes_in + min(
            small.peak_bytes - small_bytes,
            small.peak_requested - small_requested,
            bytes_left >> 3,
        )
        large.due_bytes = large.bytes_in + min(
            large.peak_bytes - large_bytes,
            large.peak_requested - large_requested,
            bytes_left - (bytes_left >> 3),
        )
        if small.late or large.late:
            self._look_late()

    def _look_late(self) -> None:
        """The active figures, where they differ: rare enough to look at every allocation."""
        late = late_bytes = 0
        for tally in (self.small, self.large):
            tally.due_blocks, tally.due_bytes = tally.blocks_in, tally.bytes_in
            late += tally.late
            late_bytes += tally.late_bytes
            tally.raise_active(
                tally.blocks_in - tally.blocks_out + tally.late,
                tally.bytes_in - tally.bytes_out + tally.late_bytes,
            )
        small, large = self.small, self.large
        self.total.raise_active(
            small.blocks_in - small.blocks_out + large.blocks_in - large.blocks_out + late,
            small.bytes_in - small.bytes_out + large.bytes_in - large.bytes_out + late_bytes,
        )

    def look_split(self) -> None:
        """The same for inactive split blocks."""
        small, large, total = self.small, self.large, self.total
        self.due_split = False
        small_blocks = small.split_in - small.split_out
        large_blocks = large.split_in - large.split_out
        small_bytes = small.split_bytes_in - small.split_bytes_out
        large_bytes = large.split_bytes_in - large.split_bytes_out
        if small_blocks > small.peak_split:
            small.peak_split = small_blocks
        if large_blocks > large.peak_split:
            large.peak_split = large_blocks
        if small_bytes > small.peak_split_bytes:
            small.peak_split_bytes = small_bytes
        if large_bytes > large.peak_split_bytes:
            large.peak_split_bytes = large_bytes
        blocks_left = total.peak_split - small_blocks - large_blocks
        if blocks_left < 0:
            total.peak_split -= blocks_left
            blocks_left = 0
        bytes_left = total.peak_split_bytes - small_bytes - large_bytes
        if bytes_left < 0:
            total.peak_split_bytes -= bytes_left
            bytes_left = 0
        # Free pieces come and go at almost every event: limits on what is there, not on what comes.
        small.most_split = min(small.peak_split, small_blocks + (blocks_left >> 1))
        large.most_split = min(large.peak_split, large_blocks + (blocks_left >> 1))
        small.most_split_bytes = min(small.peak_split_bytes, small_bytes + (bytes_left >> 3))
        large.most_split_bytes = min(
            large.peak_split_bytes, large_bytes + bytes_left - (bytes_left >> 3)
        )

    def reset_peak(self) -> None:
        for scope, peaks in self._scopes():
            for figure in FIGURES.values():
                came, went = self._flow(scope, figure)
                setattr(peaks, f"peak_{figure}", came - went)
        self.look()
        self.look_split()
        for flow in self._flows():
            flow.reset_peak()

    def reset_accumulated(self) -> None:
        for scope, _ in self._scopes():
            for figure in FIGURES.values():
                self._bases[scope, figure] = self._flow(scope, figure)
        for flow in self._flows():
            flow.reset_accumulated()
        self.alloc_retries = self.ooms = self.oom_rejections = 0
        self.sync_all_streams = self.device_allocs = self.device_frees = 0

    # -- segments (rare enough to look at once) --------------------------------------------------

    def reserve(self, tally: Tally, size: int, segments: int) -> None:
        """``size`` bytes were reserved; ``segments`` is 0 where a mapping grew."""
        tally.segments_in += segments
        tally.reserved_in += size
        self.device_allocs += 1
        for scope, peaks in self._scopes():
            if peaks is tally or peaks is self.total:
                came, went = self._flow(scope, "segments")
                peaks.peak_segments = max(peaks.peak_segments, came - went)
                came, went = self._flow(scope, "reserved")
                peaks.peak_reserved = max(peaks.peak_reserved, came - went)

    def unreserve(self, tally: Tally, size: int, segments: int) -> None:
        tally.segments_out += segments
        tally.reserved_out += size
        self.device_frees += 1

    def of_pool(self, mempool: tuple[int, int], small: bool) -> tuple[Flow, Flow]:
        """The figures of one private pool that a segment of it adds to."""
        flows = self.private.setdefault(mempool, (Flow(), Flow(), Flow()))
        return flows[0], flows[1 if small else 2]

    def _flows(self) -> Iterator[Flow]:
        yield self.oversize_allocations
        yield self.oversize_segments
        for flows in self.private.values():
            yield from flows

    # -- PyTorch's form ------------------------------------------------------------------------

    def _scopes(self) -> tuple[tuple[str, Peaks], ...]:
        return (("all", self.total), ("small_pool", self.small), ("large_pool", self.large))

    def _flow(self, scope: str, figure: str) -> tuple[int, int]:
        if scope == "small_pool":
            return self.small.flow(figure)
        if scope == "large_pool":
            return self.large.flow(figure)
        small, large = self.small.flow(figure), self.large.flow(figure)
        return small[0] + large[0], small[1] + large[1]

    def items(self, max_split_size: int) -> Iterator[tuple[str, int]]:
        """``torch.cuda.memory_stats()``, key by key."""
        self.look()
        self.look_split()
        # Without late blocks the active figures are the allocated ones.
        for _, peaks in self._scopes():
            peaks.raise_active(peaks.peak_blocks, peaks.peak_bytes)
        for name, figure in FIGURES.items():
            for scope, peaks in self._scopes():
                came, went = self._flow(scope, figure)
                base = self._bases.get((scope, figure), (0, 0))
                prefix = f"{name}.{scope}"
                yield f"{prefix}.current", came - went
                yield f"{prefix}.peak", getattr(peaks, f"peak_{figure}")
                yield f"{prefix}.allocated", came - base[0]
                yield f"{prefix}.freed", went - base[1]
        yield from self.oversize_allocations.items("oversize_allocations")
        yield from self.oversize_segments.items("oversize_segments")
        yield "num_alloc_retries", self.alloc_retries
        yield "num_ooms", self.ooms
        yield "num_sync_all_streams", self.sync_all_streams
        yield "num_device_alloc", self.device_allocs
        yield "num_device_free", self.device_frees
        yield "max_split_size", max_split_size

    def private_items(self) -> Iterator[tuple[str, int]]:
        """``reserved_bytes_by_private_pools``, flat."""
        for (first, second), flows in self.private.items():
            for scope, flow in zip(("all", "small_pool", "large_pool"), flows, strict=True):
                prefix = f"reserved_bytes_by_private_pools.{first}_{second}.{scope}"
                yield from flow.items(prefix)
