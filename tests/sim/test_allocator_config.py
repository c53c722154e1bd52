"""PYTORCH_CUDA_ALLOC_CONF as PyTorch's versions read it."""

from __future__ import annotations

import pytest

from pytest_vram.sim.allocator import CachingAllocator, Config, InvalidConfig

MIB = 1 << 20


def read(text: str, version: tuple[int, int] = (2, 14)) -> Config:
    return Config().updated(text, version)


def test_nothing_said() -> None:
    assert read("") == Config()


def test_everything_said() -> None:
    config = read(
        "max_split_size_mb:64, max_non_split_rounding_mb:40,garbage_collection_threshold:0.75,"
        "expandable_segments:True, large_segment_size_mb:32, per_process_memory_fraction:0.5,"
        "throw_on_cudamalloc_oom:True, roundup_power2_divisions:8, backend:native,"
        "pinned_use_background_threads:True,pinned_num_register_threads:8"
    )
    assert config == Config(
        max_split_size=64 * MIB,
        max_non_split_rounding=40 * MIB,
        garbage_collection_threshold=0.75,
        roundup_power2_divisions=(8,) * 16,
        expandable_segments=True,
        large_segment=32 * MIB,
        memory_fraction=0.5,
        reject_early=True,
    )


def test_a_new_text_resets_three_settings_and_keeps_the_others() -> None:
    first = read(
        "max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:4,"
        "expandable_segments:True,large_segment_size_mb:32,max_non_split_rounding_mb:48"
    )
    second = first.updated("", (2, 14))
    assert second == Config(
        expandable_segments=True, large_segment=32 * MIB, max_non_split_rounding=48 * MIB
    )


@pytest.mark.parametrize(
    ("version", "above"),
    [((2, 8), [1, 1, 2, 2, 8, 8, 8]), ((2, 14), [1, 1, 2, 2, 4, 8, 8])],
)
def test_divisions_by_interval(version: tuple[int, int], above: list[int]) -> None:
    """``>`` used to overwrite the last interval that was named."""
    divisions = read("roundup_power2_divisions:[2:1,4:2,16:4,>:8]", version)
    expected = divisions.roundup_power2_divisions
    assert expected[0] == 1
    assert list(expected[1:3]) == [1, 2]
    assert expected[3] == 0
    assert list(expected[4:7]) == above[4:]


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        ("4", 1200, 1536),  # 512 * 4 bytes and less are rounded to 512 as ever
        ("4", 2049, 2560),
        ("4", 2048, 2048),
        ("4", 5 * MIB + 1, 6 * MIB),
        ("8", 33 * MIB, 36 * MIB),
        ("1", 33 * MIB + 1, 33 * MIB + 512),
        ("[256:1,512:2,1024:4,>:8]", 300 * MIB + 1, 300 * MIB + 512),
        ("[256:1,512:2,1024:4,>:8]", 513 * MIB, 768 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 2049 * MIB, 2304 * MIB),
    ],
)
def test_rounding_to_divisions(divisions: str, size: int, rounded: int) -> None:
    config = read(f"roundup_power2_divisions:{divisions}")
    assert config.round_size(size) == rounded
    allocator = CachingAllocator(1 << 40, f"roundup_power2_divisions:{divisions}")
    block = allocator.malloc(size)
    assert rounded <= block.size <= rounded + MIB
    assert block.requested == size


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("foo:1", "Unrecognized key 'foo' in Accelerator allocator config."),
        (
            "max_split_size_mb:5",
            "CachingAllocator option max_split_size_mb too small, must be >= 20",
        ),
        (
            "max_split_size_mb:25,large_segment_size_mb:40",
            "CachingAllocator option max_split_size_mb too small, must be >= 40",
        ),
        (
            "max_non_split_rounding_mb:3",
            "CachingAllocator option max_non_split_rounding_mb too small, must be >= 20",
        ),
        (
            "garbage_collection_threshold:2",
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        ),
        ("roundup_power2_divisions:3", "For roundups, the divisions has to be power of 2 "),
        (
            "roundup_power2_divisions:[2:3]",
            "For roundups, the divisions has to be power of 2 or 0 to disable roundup ",
        ),
        ("roundup_power2_divisions:[3:4]", "For roundups, the intervals have to be power of 2 "),
        (
            "large_segment_size_mb:10",
            "CachingAllocator option large_segment_size_mb must be > 10 MB",
        ),
        (
            "expandable_segments:maybe",
            "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'maybe'",
        ),
        (
            "per_process_memory_fraction:1.5",
            "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
        ),
        (
            "pinned_num_register_threads:3",
            "Number of register threads has to be power of 2, got 3",
        ),
        (
            "pinned_num_register_threads:256",
            "Number of register threads should be less than or equal to 128, got 256",
        ),
        (
            "pinned_reserve_segment_size_mb:0",
            "Pinned reserve segment size has to be greater than 0",
        ),
        ("backend:foo", "Unknown allocator backend, options are native and cudaMallocAsync"),
        ("max_split_size_mb", "Index out of bounds in ConfigTokenizer"),
        ("max_split_size_mb:", "Index out of bounds in ConfigTokenizer"),
        ("max_split_size_mb:abc", "stoull"),
        ("garbage_collection_threshold:abc", "stod"),
    ],
)
def test_what_2_14_says(text: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read(text)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("foo:1", "Unrecognized CachingAllocator option: foo"),
        ("large_segment_size_mb:32", "Unrecognized CachingAllocator option: large_segment_size_mb"),
        (
            "max_split_size_mb:20",
            "CachingAllocator option max_split_size_mb too small, must be > 20",
        ),
        ("max_split_size_mb", "Error parsing CachingAllocator settings, expected :"),
        ("max_split_size_mb:", "Error, expecting max_split_size_mb value"),
        ("max_split_size_mb:40 expandable_segments:True", "expected ,"),
        ("garbage_collection_threshold:0", "garbage_collect_threshold too small, set it 0.0~1.0"),
        ("garbage_collection_threshold:1", "garbage_collect_threshold too big, set it 0.0~1.0"),
        (
            "expandable_segments:maybe",
            "Expected a single True/False argument for expandable_segments",
        ),
        ("roundup_power2_divisions:3", "For roundups, the divisons has to be power of 2 "),
    ],
)
def test_what_2_6_says(text: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read(text, (2, 6))
    assert sentence in str(caught.value)


def test_the_asynchronous_backend_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="only backend:native can be simulated"):
        read("backend:cudaMallocAsync")
