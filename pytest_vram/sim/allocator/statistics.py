"""The allocator's counters, kept as plain sums, and PyTorch's ``memory_stats`` made from them.

PyTorch updates up to thirty figures at every allocation. Here an event adds to three sums of its
size class; everything else is a difference or a maximum of those and is worked out when somebody
asks. A peak needs a look only where a figure begins to fall after it rose: between two such
turning points the last value is the highest.
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
    """The highest value each figure had, and whether a look at it is due."""

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
        "rising",
        "split_rising",
    )

    def __init__(self) -> None:
        self.peak_blocks = self.peak_bytes = self.peak_requested = 0
        self.peak_active = self.peak_active_bytes = 0
        self.peak_split = self.peak_split_bytes = 0
        self.peak_segments = self.peak_reserved = 0
        self.rising = False  # blocks came since the last look
        self.split_rising = False  # inactive split blocks came since the last look


class Tally(Peaks):
    """What came and what went: small blocks, or large ones.

    ``late`` blocks were given up by the program while another stream still used them: PyTorch
    calls them active but no longer allocated.
    """

    __slots__ = (
        "blocks_in",
        "blocks_out",
        "bytes_in",
        "bytes_out",
        "late",
        "late_bytes",
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
        self.blocks_in = self.blocks_out = 0
        self.bytes_in = self.bytes_out = 0
        self.requested_in = self.requested_out = 0
        self.split_in = self.split_out = 0
        self.split_bytes_in = self.split_bytes_out = 0
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
        self.oversize_allocations = Flow()
        self.oversize_segments = Flow()
        self.alloc_retries = 0
        self.ooms = 0
        self.oom_rejections = 0
        self.sync_all_streams = 0
        self.device_allocs = 0
        self.device_frees = 0
        self._bases: dict[tuple[str, str], tuple[int, int]] = {}

    # -- peaks ---------------------------------------------------------------------------------

    def settle(self, tally: Tally) -> None:
        """Look at the figures of allocated blocks, before they fall."""
        if tally.rising:
            tally.rising = False
            blocks = tally.blocks_in - tally.blocks_out
            if blocks > tally.peak_blocks:
                tally.peak_blocks = blocks
            size = tally.bytes_in - tally.bytes_out
            if size > tally.peak_bytes:
                tally.peak_bytes = size
            requested = tally.requested_in - tally.requested_out
            if requested > tally.peak_requested:
                tally.peak_requested = requested
            if tally.late:
                tally.peak_active = max(tally.peak_active, blocks + tally.late)
                tally.peak_active_bytes = max(tally.peak_active_bytes, size + tally.late_bytes)
        total = self.total
        if total.rising:
            total.rising = False
            small, large = self.small, self.large
            blocks = small.blocks_in - small.blocks_out + large.blocks_in - large.blocks_out
            if blocks > total.peak_blocks:
                total.peak_blocks = blocks
            size = small.bytes_in - small.bytes_out + large.bytes_in - large.bytes_out
            if size > total.peak_bytes:
                total.peak_bytes = size
            requested = (
                small.requested_in - small.requested_out + large.requested_in - large.requested_out
            )
            if requested > total.peak_requested:
                total.peak_requested = requested
            if small.late or large.late:
                late = small.late_bytes + large.late_bytes
                total.peak_active = max(total.peak_active, blocks + small.late + large.late)
                total.peak_active_bytes = max(total.peak_active_bytes, size + late)

    def settle_split(self, tally: Tally) -> None:
        """Look at the figures of inactive split blocks, before they fall."""
        if tally.split_rising:
            tally.split_rising = False
            split = tally.split_in - tally.split_out
            if split > tally.peak_split:
                tally.peak_split = split
            size = tally.split_bytes_in - tally.split_bytes_out
            if size > tally.peak_split_bytes:
                tally.peak_split_bytes = size
        total = self.total
        if total.split_rising:
            total.split_rising = False
            small, large = self.small, self.large
            split = small.split_in - small.split_out + large.split_in - large.split_out
            if split > total.peak_split:
                total.peak_split = split
            size = (
                small.split_bytes_in
                - small.split_bytes_out
                + large.split_bytes_in
                - large.split_bytes_out
            )
            if size > total.peak_split_bytes:
                total.peak_split_bytes = size

    def settle_all(self) -> None:
        """Look at every figure; afterwards all peaks are right."""
        for tally in (self.small, self.large):
            self.settle(tally)
            self.settle_split(tally)
        # Without late blocks the active figures are the allocated ones.
        for peaks in (self.small, self.large, self.total):
            peaks.peak_active = max(peaks.peak_active, peaks.peak_blocks)
            peaks.peak_active_bytes = max(peaks.peak_active_bytes, peaks.peak_bytes)

    def reset_peak(self) -> None:
        self.settle_all()
        for scope, peaks in self._scopes():
            for figure in FIGURES.values():
                came, went = self._flow(scope, figure)
                setattr(peaks, f"peak_{figure}", came - went)
        for oversize in (self.oversize_allocations, self.oversize_segments):
            oversize.reset_peak()

    def reset_accumulated(self) -> None:
        for scope, _ in self._scopes():
            for figure in FIGURES.values():
                self._bases[scope, figure] = self._flow(scope, figure)
        for oversize in (self.oversize_allocations, self.oversize_segments):
            oversize.reset_accumulated()
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
        self.settle_all()
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
        yield "num_oom_rejections", self.oom_rejections
        yield "num_sync_all_streams", self.sync_all_streams
        yield "num_device_alloc", self.device_allocs
        yield "num_device_free", self.device_frees
        yield "max_split_size", max_split_size
