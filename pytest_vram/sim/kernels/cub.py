"""Temporary storage of the CUB algorithms that PyTorch calls.

Read from CCCL 3.0.1 (CUDA 13.0, the wheels of torch 2.12 to 2.14) and 2.3.2 (CUDA 12.4, torch
2.6): cub/device/dispatch/dispatch_{radix_sort,scan,scan_by_key,unique_by_key,reduce}.cuh with their
tunings, cub/util_temporary_storage.cuh, cub/util_arch.cuh and
cub/agent/single_pass_scan_operators.cuh. Tile sizes depend on the architecture a kernel was
compiled for, never on the driver.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_vram.sim.kernels import Card, Give, Step, Take, versions

_SHARED = 48 * 1024


def storage(size: int, what: str) -> Iterator[Step]:
    """``CUB_WRAPPER``: temporary storage for one algorithm."""
    yield Take(f"cub.{what}", size, f"CUB {what}")
    yield Give(f"cub.{what}")


def alias(*sizes: int) -> int:
    """``AliasTemporaries``: several buffers in one, each aligned to 256 bytes."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def _tiles(n: int, tile: int) -> int:
    return -(-n // tile)


def register_bound(threads: int, items: int, itemsize: int) -> int:
    """Items of a tile after ``RegBoundScaling``."""
    items = max(1, items * 4 // max(4, itemsize))
    return items * min(threads, -(-(_SHARED // (itemsize * items)) // 32) * 32)


def memory_bound(threads: int, items: int, itemsize: int) -> int:
    """Items of a tile after ``MemBoundScaling``."""
    items = max(1, min(items * 4 // itemsize, items * 2))
    return items * min(threads, -(-(_SHARED // (itemsize * items)) // 32) * 32)


def _tile_state(tiles: int, itemsize: int, card: Card) -> int:
    """``ScanTileState::AllocationSize`` for primitive types, padded by a warp."""
    word = 16 if itemsize == 8 else 8 if itemsize == 4 else 4
    size = (tiles + 32) * word
    return alias(size, 0, 0) if versions.nests_tile_states(card.torch) else size


# -- radix sort -----------------------------------------------------------------------------------

#: sm90_small_key_tuning with 64-bit offsets: (key bytes, value bytes) -> threads, items.
_SMALL_KEYS = {
    (1, 0): (512, 19),
    (2, 0): (512, 19),
    (1, 1): (448, 16),
    (1, 2): (512, 14),
    (1, 4): (512, 14),
    (1, 8): (384, 18),
    (2, 1): (384, 16),
    (2, 2): (448, 16),
    (2, 4): (512, 12),
    (2, 8): (512, 23),
}


def _onesweep_tile(key: int, value: int, card: Card) -> int:
    """Items of one onesweep block; 64-bit offsets, as PyTorch passes the count as int64."""
    widest = max(key, value)
    if card.profile.capability >= (9, 0):
        if key < 4:
            return register_bound(*_SMALL_KEYS[key, value], widest)
        if key == 4:
            items = 19 if not value else 17 if value < 8 else 29
        else:
            items = 30 if value < 8 else 24
        return register_bound(384, items, widest)
    if card.profile.capability >= (8, 0):
        return register_bound(384, 17 if key == 4 and value else 21, widest)
    return register_bound(256, 46 if key == 4 and value == 4 else 23, widest)


def radix_sort(n: int, key: int, value: int, card: Card, bits: int | None = None) -> int:
    """Bytes for sorting ``n`` keys of ``key`` bytes with values of ``value`` bytes (0: none).

    Keys of one or two bytes take another path before capability 9, whose scratch grows with the
    blocks that fit a multiprocessor. Registers decide that in a compiled kernel; here threads do,
    so this is an upper bound (at most 4.5 MB above the truth on an A100).
    """
    bits = key * 8 if bits is None else bits
    if n == 0 or n <= register_bound(256, 19, max(key, value)):
        return 1
    if key < 4 and card.profile.capability < (9, 0):
        return _spine_sort(n, key, value, card)
    tile = _onesweep_tile(key, value, card)
    portion = ((1 << 28) - 1) // tile * tile
    passes, portions = -(-bits // 8), -(-n // portion)
    blocks = -(-min(n, portion) // tile)
    double = passes > 1
    return alias(
        portions * passes * 256 * 8,
        blocks * 256 * 4,
        n * key if double else 0,
        n * value if double else 0,
        portions * passes * 4,
    )


def _spine_sort(n: int, key: int, value: int, card: Card) -> int:
    digits = 128 if key > 1 else 32
    profile = card.profile
    blocks = profile.threads_per_multiprocessor // (256 if key > 1 else 128)
    grid = min(blocks, profile.blocks_per_multiprocessor) * profile.multiprocessors * 5
    spine = grid * digits + register_bound(512, 23, 8)
    return alias(spine * 8, n * key, n * value)


def merge_sort(n: int, key: int, value: int) -> int:
    """``DeviceMergeSort`` of pairs in place: bounds of the merged parts, a second buffer of each
    (dispatch_merge_sort.cuh, tuning_merge_sort.cuh)."""
    tile = 256 * max(1, min(17, 17 * 4 // key))
    offset = 4 if n < 1 << 31 else 8
    return alias((1 + _tiles(n, tile)) * offset, n * key, n * value, 0)


def segmented_radix_sort(n: int, key: int, value: int) -> int:
    """``DeviceSegmentedRadixSort``: one more buffer of keys and of values."""
    return alias(n * key, n * value) if n else 1


# -- scans ----------------------------------------------------------------------------------------


def scan(n: int, itemsize: int, card: Card, *, primitive: bool = True) -> int:
    """A scan with PyTorch's own operators, which no CUB tuning knows. Half and complex types are
    no primitive ones for CUB: status and values lie in three buffers."""
    tiles = _tiles(n, memory_bound(128, 15, itemsize))
    if primitive:
        return alias(_tile_state(tiles, itemsize, card))
    values = (tiles + 32) * itemsize
    return alias(alias((tiles + 32) * 4, values, values))


def scan_by_key(n: int, key: int, card: Card) -> int:
    tiles = _tiles(n, 256 * 9)
    return alias((tiles + 32) * 16, key * (tiles + 1))


#: Tuned tiles of unique_by_key: (capability major, key bytes) -> items, key and value alike.
_UNIQUE = {(8, 4): 256 * 11, (8, 8): 192 * 7, (9, 4): 512 * 14, (9, 8): 448 * 11}


def unique_by_key(n: int, key: int, card: Card, count: int = 8) -> int:
    """``count``: bytes of the type that positions are counted in."""
    major, minor = card.profile.capability
    tuned = _UNIQUE.get((min(major, 9), key)) if (major, minor) == (8, 0) or major >= 9 else None
    tile = tuned or 64 * max(1, min(11 * 4 // key, 11))
    return alias(_tile_state(_tiles(n, tile), count, card), 0)


# -- reductions and selections ---------------------------------------------------------------------


def reduce(n: int, itemsize: int, card: Card) -> int:
    """``DeviceReduce``: one partial result per block that the card could run five times over."""
    if n <= 256 * max(1, min(16 * 4 // itemsize, 32)):
        return 1
    blocks = card.profile.threads_per_multiprocessor // 256
    return alias(card.profile.multiprocessors * blocks * 5 * itemsize)


def select(n: int, card: Card) -> int:
    """``DeviceSelect::Flagged`` of 64-bit positions."""
    capability = card.profile.capability
    tile = 384 * 11 if capability >= (9, 0) else 384 * 6 if capability == (8, 0) else 128 * 5
    return alias(_tile_state(_tiles(n, tile), 4, card), 0, 0)
