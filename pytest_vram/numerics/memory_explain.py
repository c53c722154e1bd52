"""What a peak consists of, in the terms of causes that people can act on.

Each reader looks at the allocations alive at the peak (a few at the whole trace) and returns
``None`` or a note with the bytes at stake. Many of these are legitimate: they are only told next to
a budget or a baseline that failed, the largest first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from pytest_vram.findings import Finding
from pytest_vram.numerics.lives import Life, Lives, in_words
from pytest_vram.numerics.memory_watch import Observed
from pytest_vram.quantities import format_bytes
from pytest_vram.trace import Trace

_HALF = ("float16", "bfloat16")
_MADE = ("activations", "temporary", "other")
#: Operators of the explicit attention computation: their square outputs are scores, not masks.
_SCORES = {
    "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::_softmax", "aten::softmax", "aten::div",
    "aten::_softmax_backward_data", "aten::native_dropout", "aten::_safe_softmax",
}  # fmt: skip


def explain(
    trace: Trace, observed: Observed, *, most: int = 4, fallback: bool = True
) -> tuple[Finding, ...]:
    """Notes on the peak of a settled ``trace``, those with the most bytes first. ``fallback``:
    where nothing stands out, say which line makes the most."""
    lives = Lives(trace)
    notes = [note for reader in _READERS for note in reader(lives, observed)]
    least = max(256 << 10, lives.peak // 50)
    notes = [note for note in notes if note.data["bytes"] >= least]
    notes.sort(key=lambda note: -int(note.data["bytes"]))
    if not notes and fallback:
        notes = lines_of_activations(lives)
    return tuple(notes[:most])


def _note(sentence: str, size: int, *details: str, hint: str) -> Finding:
    return Finding("memory-cause", "note", sentence, details, hint, {"bytes": size})


def _total(lives: Sequence[Life]) -> int:
    return sum(life.block for life in lives)


def _last(shape: tuple[int, ...] | None) -> int:
    return shape[-1] if shape else 0


# ---- the widest tensors: logits

#: Operators whose results have the logits' shape and belong to a loss.
_LOSSES = {
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::nll_loss_backward",
    "aten::binary_cross_entropy_with_logits",
}


def logits_in_fp32(lives: Lives, observed: Observed) -> list[Finding]:
    """A cast of a wide half-precision tensor, and the loss that keeps everything of its shape."""
    casts = [
        life
        for life in lives.all
        if life.operator == "aten::_to_copy"
        and life.dtype == "float32"
        and life.phase.name not in ("setup", "between", "backward", "optimizer")
        and life.bill in _MADE
        and _last(life.shape) >= 1024
    ]
    if not casts:
        return []
    cast = max(casts, key=lambda life: life.block)
    # The head's product in the lower precision must exist: else nothing was widened.
    halves = {
        life.requested * 2
        for life in lives.all
        if life.dtype in _HALF and life.bill in _MADE and _last(life.shape) == _last(cast.shape)
    }
    if cast.requested not in halves:
        return []
    # Only a loss makes it logits: a wide activation that was cast is another matter.
    if not any(
        life.operator in _LOSSES and _last(life.shape) == _last(cast.shape) for life in lives.all
    ):
        return []
    wide = [
        life
        for life in lives.at_peak
        if life.dtype == "float32" and life.bill in _MADE and life.requested == cast.requested
    ]
    if not wide:
        return []
    largest = max(wide, key=lambda life: life.block)
    size = _total(wide)
    return [
        _note(
            f"logits/loss in float32: {len(wide)} tensors of {in_words('float32', largest.shape)} "
            f"hold {format_bytes(size)} at the peak, made from {in_words('float32', cast.shape)} "
            f"by {cast.operator} at {cast.frame}",
            size // 2,
            *(f"{format_bytes(life.block)} {life.operator} ({life.bill})" for life in wide[:5]),
            hint="compute the loss from the low-precision logits, in chunks, or with a fused "
            "linear cross-entropy; without the cast the same tensors take "
            f"{format_bytes(size // 2)}, saves {format_bytes(size - size // 2)}",
        )
    ]


def layout_copies(lives: Lives, observed: Observed) -> list[Finding]:
    """``.contiguous()`` or ``.clone()`` of a wide tensor whose original is still alive."""
    candidates = [
        life for life in lives.at_peak if life.operator == "aten::clone" and life.bill in _MADE
    ]
    copies, originals = [], []
    for copy in candidates:
        for life in lives.at_peak:
            if (
                life is not copy
                and life.operator != "aten::clone"
                and life.birth < copy.birth
                and life.dtype == copy.dtype
                and _last(life.shape) == _last(copy.shape)
                and copy.requested <= life.requested <= 2 * copy.requested
                and life not in originals
            ):
                copies.append(copy)
                originals.append(life)
                break
    if not copies:
        return []
    size = _total(copies)
    copy, original = copies[0], originals[0]
    return [
        _note(
            f"{len(copies)} copies made by aten::clone (.contiguous()) hold {format_bytes(size)} "
            f"at the peak while their originals are alive: {in_words(copy.dtype, copy.shape)} of "
            f"{in_words(original.dtype, original.shape)} at {copy.frame}",
            size,
            *(f"original: {life.operator} at {life.frame}" for life in originals[:4]),
            hint="work on the view (gather and logsumexp take it), or drop the original first; "
            f"saves {format_bytes(size)}",
        )
    ]


# ---- masks


def _square(life: Life) -> int:
    shape = life.shape
    return shape[-1] if shape and len(shape) >= 2 and shape[-1] == shape[-2] >= 32 else 0


#: Operators that begin a mask, and those that convert one.
_MASK_ROOTS = {"aten::full", "aten::ones", "aten::triu", "aten::tril", "aten::where"}
_MASK_STEPS = {
    *_MASK_ROOTS, "aten::_to_copy", "aten::mul", "aten::masked_fill", "aten::rsub", "aten::sub",
    "aten::add", "aten::clone", "aten::bitwise_not", "aten::logical_not", "aten::zeros",
}  # fmt: skip


def masks_of_maximum_length(lives: Lives, observed: Observed) -> list[Finding]:
    """Quadratic buffers and temporaries of a length that no input and no activation has."""
    squares = [
        life
        for life in lives.at_peak
        if _square(life)
        and (life.bill == "buffers" or (life.bill in _MADE and life.operator in _MASK_STEPS))
    ]
    roots = {
        _square(life)
        for life in lives.all
        if _square(life) and (life.bill == "buffers" or life.operator in _MASK_ROOTS)
    }
    lengths = {
        size
        for life in lives.all
        if life.bill in ("inputs", "activations", "temporary") and life.shape
        and not _square(life)
        for size in life.shape
    }  # fmt: skip
    idle = [l for l in squares if _square(l) in roots and _square(l) not in lengths]  # noqa: E741
    if not idle:
        return []
    size, longest = _total(idle), max(_square(life) for life in idle)
    used = [s for s in (_square(life) for life in lives.all) if s and s in lengths]
    buffers = [life for life in idle if life.bill == "buffers"]
    made = [life for life in idle if life.bill != "buffers"]
    return [
        _note(
            f"masks of length {longest} while no tensor of the batch has {longest} positions"
            + (f" (the batch uses {max(used)})" if used else "")
            + f": {format_bytes(size)} at the peak"
            + (
                f", buffer {buffers[0].allocation.name} {format_bytes(_total(buffers))}"
                if buffers
                else ""
            ),
            size,
            *(
                f"{life.bill} {in_words(life.dtype, life.shape)} {format_bytes(life.block)} by "
                f"{life.operator} at {life.frame}"
                for life in [*made, *buffers][:5]
            ),
            hint="build the mask for the batch's length, or slice it before converting; saves up "
            f"to {format_bytes(size)}",
        )
    ]


def expanded_masks(lives: Lives, observed: Observed) -> list[Finding]:
    """[B, H, S, S] tensors that are no attention scores: masks written out per head."""
    masks = [
        life
        for life in lives.at_peak
        if life.shape is not None
        and len(life.shape) == 4
        and life.shape[1] > 1
        and _square(life)
        and life.bill in _MADE
        and life.operator not in _SCORES
        and "attention" not in life.operator
        and life.phase.name != "backward"
    ]
    if not masks:
        return []
    size = _total(masks)
    shape = masks[0].shape or (1, 1, 1, 1)
    once = shape[0] * shape[-1] * shape[-2]
    operators = ", ".join(dict.fromkeys(life.operator for life in masks))
    return [
        _note(
            f"attention masks written out as B x H x S x S: {len(masks)} tensors of "
            f"{in_words(masks[-1].dtype, shape)} hold {format_bytes(size)} at the peak (one bool "
            f"mask of B x S x S is {format_bytes(once)})",
            size,
            f"made by {operators} at {masks[-1].frame}",
            hint="pass the bool mask (broadcast over heads) or is_causal=True; one mask serves all "
            f"layers; saves {format_bytes(max(0, size - once))}",
        )
    ]


# ---- precision


def promotion(lives: Lives, observed: Observed) -> list[Finding]:
    """Share of saved activations in fp32 next to half-precision ones, and who widened first."""
    saved = [life for life in lives.at_peak if life.bill == "activations" and life.dtype]
    by_dtype: Counter[str] = Counter()
    for life in saved:
        by_dtype[life.dtype] += life.block
    wide = by_dtype["float32"]
    half = sum(by_dtype[dtype] for dtype in _HALF)
    if not wide or half * 20 < wide:
        return []
    share = 100 * wide / sum(by_dtype.values())
    if share < 30:
        return []
    fp32 = sorted((l for l in saved if l.dtype == "float32"), key=lambda life: life.birth)  # noqa: E741
    first = next((life for life in fp32 if life.module), fp32[0])
    makers: Counter[str] = Counter()
    for life in fp32:
        makers[life.operator] += life.block
    details = [f"{format_bytes(size)} {name}" for name, size in makers.most_common(4)]
    return [
        _note(
            f"activations in float32: {share:.0f} % ({format_bytes(wide)} of "
            f"{format_bytes(sum(by_dtype.values()))}) under mixed precision; the first that "
            f"widened is {first.operator} in module {first.module or '(none)'} at {first.frame}",
            wide // 2,
            *details,
            hint="norms and losses return float32 under autocast and what follows stays so: cast "
            f"their output back (.to(x.dtype)); saves up to {format_bytes(wide // 2)}",
        )
    ]


def frozen_upcast(lives: Lives, observed: Observed) -> list[Finding]:
    """Frozen parameters in fp32: nothing trains them, half precision would do."""
    frozen = [p for p in observed.parameters if not p.trainable]
    wide = [p for p in frozen if p.dtype == "float32"]
    size = sum(p.size for p in wide)
    if not wide:
        return []
    share = 100 * size / sum(p.size for p in frozen)
    largest = sorted(wide, key=lambda p: -p.size)
    return [
        _note(
            f"frozen parameters by dtype: {share:.0f} % in float32 ({format_bytes(size)}), "
            f"{largest[0].name} with {format_bytes(largest[0].size)} the largest",
            size // 2,
            *(f"{p.name} {format_bytes(p.size)}" for p in largest[:5]),
            hint="keep frozen weights in the dtype they were loaded in (norms excepted); "
            f"saves {format_bytes(size // 2)}",
        )
    ]


# ---- optimizer, autocast


def foreach_temporaries(lives: Lives, observed: Observed) -> list[Finding]:
    if lives.peak_phase.name != "optimizer":
        return []
    made = [
        life
        for life in lives.at_peak
        if life.phase.name == "optimizer" and life.bill == "temporary"
    ]
    foreach = [life for life in made if life.operator.startswith("aten::_foreach")]
    if not foreach:
        return []
    size = _total(foreach)
    parameters = sum(p.size for p in observed.parameters if p.trainable)
    factor = f" = {size / parameters:.1f} x the trained parameters" if parameters else ""
    name = observed.foreach[0] if observed.foreach else "the optimizer"
    operators = ", ".join(dict.fromkeys(life.operator for life in foreach))
    return [
        _note(
            f"optimizer temporaries: {format_bytes(size)}{factor} at the peak, which is in the "
            f"{lives.peak_phase.name} phase (step {lives.peak_phase.step}): {name} runs its "
            f"foreach implementation at {foreach[0].frame} ({operators})",
            size,
            hint=f"{name}(..., fused=True) or foreach=False; saves {format_bytes(size)}",
        )
    ]


def cached_casts(lives: Lives, observed: Observed) -> list[Finding]:
    size = lives.bill_at_peak("autocast_cache")
    if not size:
        return []
    weights = sum(
        life.block
        for life in lives.at_peak
        if life.bill == "parameters" and life.dtype == "float32"
    )
    share = f" (= {size / weights:.2f} x fp32 weights)" if weights else ""
    useless = observed.no_grad_autocast
    where = f"; made under no_grad at {useless}, where nobody needs them again" if useless else ""
    return [
        _note(
            f"the autocast weight cache holds {format_bytes(size)}{share} at the peak; it is "
            f"released when the outermost autocast region exits{where}",
            size,
            hint="torch.autocast(..., cache_enabled=False) for inference, or a region per part; "
            f"saves up to {format_bytes(size)}",
        )
    ]


# ---- the same thing many times


def lines_of_activations(lives: Lives) -> list[Finding]:
    """Where most activations at the peak were made: the place to begin when nothing else stands
    out."""
    saved = [life for life in lives.at_peak if life.bill == "activations"]
    by_line: defaultdict[str, list[Life]] = defaultdict(list)
    for life in saved:
        by_line[life.frame].append(life)
    if len(by_line) < 2:
        return []
    line, members = max(by_line.items(), key=lambda pair: _total(pair[1]))
    size = _total(members)
    if size < max(256 << 10, lives.peak // 10):
        return []
    operators = Counter(life.operator for life in members)
    return [
        _note(
            f"{format_bytes(size)} of {format_bytes(_total(saved))} activations at the peak are "
            f"made at {line} ({len(members)} tensors)",
            size,
            ", ".join(f"{count} x {name}" for name, count in operators.most_common(4)),
            hint="checkpoint this part, or make its batch smaller",
        )
    ]


_READERS: tuple[Callable[[Lives, Observed], list[Finding]], ...] = (
    logits_in_fp32,
    layout_copies,
    masks_of_maximum_length,
    expanded_masks,
    promotion,
    frozen_upcast,
    foreach_temporaries,
    cached_casts,
)
