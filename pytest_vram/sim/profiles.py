"""Cards that can be simulated: what PyTorch's host code asks a device about.

Limits that depend only on the compute capability come from NVIDIA's CUDA C++ Programming Guide
(table "Technical Specifications per Compute Capability"). Multiprocessors and L2 come from the
cards' data sheets; ``memory`` is ``cudaDeviceProp.totalGlobalMem`` as drivers print it, in bytes
where a device query gave bytes (GTX 1080 Ti: deviceQuery, 11,715,084,288) and otherwise rounded
down to the MiB that ``torch.cuda.get_device_properties`` prints (A40: 45416MB, RTX 4070 Ti SUPER:
15934MB, RTX 5080: 16302MB). Driver versions move it by up to 1 %: other machines print 15974MB for
the RTX 4070 Ti SUPER. Two are less certain: of the RTX 4070, 11,837 to 11,994 MiB are on record;
the GH200's is the capacity in PyTorch's out-of-memory errors, 94.50 GiB.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU model. ``memory`` is ``total_memory`` in bytes as the driver reports it.

    ``context`` is what the CUDA context takes before PyTorch allocates anything: it lowers what is
    free, never what PyTorch counts.
    """

    name: str
    title: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    l2_cache: int
    context: int = 500 << 20
    warp_size: int = 32
    registers_per_multiprocessor: int = 65536

    @property
    def sm(self) -> int:
        """Capability as PyTorch's sources write it: 80 for (8, 0)."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def free(self) -> int:
        """What a lone PyTorch process can get: total memory less the CUDA context."""
        return self.memory - self.context


class ProfileError(ValueError):
    """A card that nobody knows, or a definition of one that cannot be true."""


#: capability -> threads and blocks per multiprocessor, shared memory per multiprocessor and the
#: most that one block may opt in to, bytes.
CAPABILITIES: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (6, 0): (2048, 32, 65536, 49152),
    (6, 1): (2048, 32, 98304, 49152),
    (7, 0): (2048, 32, 98304, 98304),
    (7, 5): (1024, 16, 65536, 65536),
    (8, 0): (2048, 32, 167936, 166912),
    (8, 6): (1536, 16, 102400, 101376),
    (8, 7): (1536, 16, 167936, 166912),
    (8, 9): (1536, 24, 102400, 101376),
    (9, 0): (2048, 32, 233472, 232448),
    (10, 0): (2048, 32, 233472, 232448),
    (10, 3): (2048, 32, 233472, 232448),
    (12, 0): (1536, 24, 102400, 101376),
}


def _card(
    name: str, title: str, capability: tuple[int, int], sms: int, memory: int, l2: int
) -> Profile:
    threads, blocks, shared, optin = CAPABILITIES[capability]
    return Profile(name, title, capability, sms, memory, threads, blocks, shared, optin, l2)


_CARDS = (
    _card("p100-16gb", "Tesla P100-PCIE-16GB", (6, 0), 56, 16280 * MIB, 4 * MIB),
    _card("gtx1080ti", "NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 11_715_084_288, 2_883_584),
    _card("v100-16gb", "Tesla V100-SXM2-16GB", (7, 0), 80, 16_945_512_448, 6 * MIB),
    _card("v100-32gb", "Tesla V100-SXM2-32GB", (7, 0), 80, 34_089_730_048, 6 * MIB),
    _card("t4", "Tesla T4", (7, 5), 40, 15_828_320_256, 4 * MIB),
    _card("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 11_554_717_696, 5_767_168),
    _card("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 42_298_834_944, 40 * MIB),
    _card("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 84_987_740_160, 40 * MIB),
    _card("a10g", "NVIDIA A10G", (8, 6), 80, 22587 * MIB, 6 * MIB),
    _card("rtx3060-12gb", "NVIDIA GeForce RTX 3060", (8, 6), 28, 11931 * MIB, 2_359_296),
    _card("rtx3080-10gb", "NVIDIA GeForce RTX 3080", (8, 6), 68, 10018 * MIB, 5 * MIB),
    _card("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 25_438_126_080, 6 * MIB),
    _card("rtxa6000", "NVIDIA RTX A6000", (8, 6), 84, 51_033_931_776, 6 * MIB),
    _card("a40", "NVIDIA A40", (8, 6), 84, 45416 * MIB, 6 * MIB),
    _card("l4", "NVIDIA L4", (8, 9), 58, 23_654_825_984, 48 * MIB),
    _card("l40s", "NVIDIA L40S", (8, 9), 142, 45589 * MIB, 96 * MIB),
    _card("rtx4070", "NVIDIA GeForce RTX 4070", (8, 9), 46, 11874 * MIB, 36 * MIB),
    _card("rtx4070ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 66, 15934 * MIB, 48 * MIB),
    _card("rtx4080", "NVIDIA GeForce RTX 4080", (8, 9), 76, 16049 * MIB, 64 * MIB),
    _card("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 25_393_692_672, 72 * MIB),
    _card("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 48622 * MIB, 96 * MIB),
    _card("h100-80gb", "NVIDIA H100 80GB HBM3", (9, 0), 132, 84_942_979_072, 50 * MIB),
    _card("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 81008 * MIB, 50 * MIB),
    _card("gh200-96gb", "NVIDIA GH200 480GB", (9, 0), 132, 96768 * MIB, 60 * MIB),
    _card("h200-141gb", "NVIDIA H200", (9, 0), 132, 150_110_011_392, 60 * MIB),
    _card("b200", "NVIDIA B200", (10, 0), 148, 182642 * MIB, 132_644_864),
    _card("rtx5080", "NVIDIA GeForce RTX 5080", (12, 0), 84, 16302 * MIB, 64 * MIB),
    _card("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 33_677_180_928, 96 * MIB),
)

#: Every built-in card by name, from the oldest capability to the newest.
PROFILES: dict[str, Profile] = {card.name: card for card in _CARDS}


def _plain(name: str) -> str:
    """``"NVIDIA GeForce RTX 4090"`` and ``rtx-4090`` are the same card."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def find_profile(name: str, own: Iterable[Profile] = ()) -> Profile:
    """The card called ``name``: its short name, its driver's name, or an unambiguous beginning.

    ``own`` are cards from the user's configuration; they win over built-in ones.

    :raises ProfileError: unknown or ambiguous, with the nearest names.
    """
    cards = {**PROFILES, **{card.name: card for card in own}}
    wanted = _plain(name)
    for card in cards.values():
        if wanted in (_plain(card.name), _plain(card.title)):
            return card
    begun = [card for card in cards.values() if wanted and _plain(card.name).startswith(wanted)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        names = " or ".join(card.name for card in begun)
        raise ProfileError(f"{name!r} may be more than one card: {names}?")
    plain = {_plain(key): key for key in cards}
    near = [plain[key] for key in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.55)]
    ask = f"did you mean {' or '.join(near)}?" if near else f"known cards: {', '.join(cards)}"
    raise ProfileError(f"unknown GPU {name!r}; {ask}")


_KEYS = {field.name for field in fields(Profile)} - {"name"} | {"like"}
_NEEDED = ("memory", "capability", "multiprocessors")


def parse_profile(name: str, table: Mapping[str, Any]) -> Profile:
    """A card from a user's configuration table.

    ``memory`` (bytes, or text such as ``"24 GiB"``), ``capability`` (``"8.9"`` or ``[8, 9]``) and
    ``multiprocessors`` are needed, unless ``like`` names a built-in card to start from; limits that
    follow from the capability are filled in.

    :raises ProfileError: an unknown key, a missing one, or a value that no card can have.
    """
    where = f"GPU {name!r}"
    if unknown := sorted(set(table) - _KEYS):
        raise ProfileError(
            f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}"
        )
    base = find_profile(str(table["like"])) if "like" in table else None
    if base is None and (missing := [key for key in _NEEDED if key not in table]):
        raise ProfileError(f'{where}: {" and ".join(missing)} missing (or say like = "a100-80gb")')
    values = {key: _value(where, key, raw) for key, raw in table.items() if key != "like"}
    capability = values.get("capability") or (base.capability if base else (0, 0))
    values.setdefault("title", name)
    if base is None or capability != base.capability:
        if capability not in CAPABILITIES:
            known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
            raise ProfileError(
                f"{where}: no compute capability {capability[0]}.{capability[1]}; known: {known}"
            )
        limits = _card(name, name, capability, 1, 1, base.l2_cache if base else 4 * MIB)
        values = {**{key: getattr(limits, key) for key in _LIMITS}, **values}
        base = base or limits
    profile = replace(base, **{**values, "name": name})
    if profile.context >= profile.memory:
        raise ProfileError(f"{where}: the CUDA context takes all of its memory")
    return profile


def parse_profile_line(line: str) -> Profile:
    """A card from one line of configuration: ``name: like=rtx4090, memory=48 GiB``."""
    name, colon, rest = line.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if not colon or not name.strip() or not all(key.strip() and sign for key, sign, _ in pairs):
        raise ProfileError(f"{line!r}: expected 'name: like=rtx4090, memory=48 GiB'")
    return parse_profile(name.strip(), {key.strip(): value.strip() for key, _, value in pairs})


_LIMITS = (
    "threads_per_multiprocessor",
    "blocks_per_multiprocessor",
    "shared_memory_per_multiprocessor",
    "shared_memory_per_block_optin",
    "l2_cache",
)
_SIZES = {
    "memory",
    "context",
    "l2_cache",
    "shared_memory_per_multiprocessor",
    "shared_memory_per_block_optin",
}


def _value(where: str, key: str, raw: Any) -> Any:
    """One configured value, of the type that :class:`Profile` wants."""
    if key == "title":
        return str(raw)
    if key == "capability":
        match = re.fullmatch(r"\(?\[?\s*(\d+)\s*[.,]\s*(\d+)\s*\]?\)?", str(raw))
        if not match:
            raise ProfileError(f'{where}: capability is written "8.9", not {raw!r}')
        return int(match[1]), int(match[2])
    if key in _SIZES and isinstance(raw, str):
        from pytest_vram.quantities import parse_size

        try:
            return parse_size(raw)
        except ValueError as error:
            raise ProfileError(f"{where}: {key}: {error}") from None
    if isinstance(raw, bool) or not isinstance(raw, (int, str)) or not str(raw).isdigit():
        raise ProfileError(f"{where}: {key} must be a whole number, not {raw!r}")
    if int(raw) <= 0 and key != "context":
        raise ProfileError(f"{where}: {key} must be positive, not {raw!r}")
    return int(raw)
