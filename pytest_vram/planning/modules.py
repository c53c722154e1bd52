"""A :class:`ModelShape` from a live ``nn.Module``: the only room of the planner that needs torch.

The parameter tensors are the module's own, so the fixed bills are exact. What a layer keeps for
backward follows from the recognised shape: from the Hugging Face configuration that the model
carries, else from the block that the model repeats and the linear layers inside it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pytest_vram.planning.configs import from_config
from pytest_vram.planning.shapes import (
    Activation,
    ModelShape,
    PlanError,
    Role,
    Tower,
    UnknownFamilyError,
    Weight,
)
from pytest_vram.planning.states import LORA_NAMES, Lora

if TYPE_CHECKING:
    from torch import nn

_HEAD_NAMES = ("num_heads", "n_head", "n_heads", "nhead", "heads", "num_attention_heads")
_KV_NAMES = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head")


def load_module(target: str) -> nn.Module:
    """The module that ``package.module:attribute`` names; a class or function is called first.

    Built under ``torch.device("meta")``, so that a large model costs no memory.
    """
    import torch

    name, _, attribute = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"{target}: {error}") from None
    if not isinstance(found, torch.nn.Module) and callable(found):
        try:
            with torch.device("meta"):
                found = found()
        except Exception as error:
            raise PlanError(f"{target}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, torch.nn.Module):
        raise PlanError(f"{target} is a {type(found).__name__}, not an nn.Module")
    return found


def from_module(module: nn.Module) -> ModelShape:
    """The shape of ``module`` with its own parameter tensors counted.

    :raises PlanError: no configuration and no repeated block whose layers can be told apart.
    """
    base: nn.Module = module
    if callable(unwrap := getattr(module, "get_base_model", None)):  # peft
        base = unwrap()
    config: Any = getattr(base, "config", None)
    shape = _of_config(base, config.to_dict()) if hasattr(config, "to_dict") else _recognise(base)
    return replace(shape, name=type(base).__name__, counted=tuple(_counted(base)))


def _of_config(module: nn.Module, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a module's configuration describes; that of its blocks where its family is not
    known or only taken for another."""
    name, known = type(module).__name__, None
    try:
        known = from_config({**config, "architectures": [name]}, name)
        if not known.guessed:
            return _whole_of(known)
    except UnknownFamilyError as error:
        if not error.readable:
            raise
        known = error.guess
    try:
        _cover(module)
        shape = _recognise(module)
    except PlanError as error:
        if known is not None:
            said = (
                f"model_type {config.get('model_type')!r} is not known to the planner: planned as "
                "if its layers were Llama's; parameters are those of the model that was built"
            )
            return _whole_of(replace(known, notes=(said, *known.notes[1:])))
        kind = config.get("model_type")
        raise PlanError(f"model_type {kind!r} is not known to the planner, and {error}") from None
    note = (
        f"{config.get('model_type')} has no closed form here: parameters are those of the model "
        "that was built, layers are read off the blocks that it repeats"
    )
    explicit = not getattr(module, "_supports_sdpa", True)
    causal = any(word in name for word in ("CausalLM", "LMHead"))
    return replace(
        shape,
        recognised=True,
        notes=(note,),
        attention="explicit" if explicit else "",
        upcast=causal,
    )


def _whole_of(shape: ModelShape) -> ModelShape:
    """``shape`` of a model whose tensors are counted, all of them."""
    if not shape.partial:
        return shape
    notes = tuple(note for note in shape.notes if note != shape.partial)
    note = "all its parts are counted, activations are those of its language model alone"
    return replace(shape, notes=(*notes, note), partial="")


def build(path: Path) -> nn.Module:
    """The model that transformers makes of a ``config.json``, on the meta device: no weights, no
    download, no code but its own.

    :raises PlanError: transformers is not installed, does not know the family, or cannot build it.
    """
    import torch

    try:
        import transformers
    except ImportError:
        raise PlanError("transformers, which could build it, is not installed") from None
    file = path / "config.json" if path.is_dir() else path
    raw = json.loads(file.read_text(encoding="utf-8"))
    kind, names = str(raw.get("model_type")), raw.get("architectures") or []
    if kind not in transformers.CONFIG_MAPPING:
        raise PlanError(f"transformers {transformers.__version__} does not know {kind!r} either")
    made = next((cls for name in names if (cls := _model_class(str(name)))), None)
    if names and made is None:
        called = " or ".join(map(str, names))
        raise PlanError(f"transformers {transformers.__version__} has no model called {called}")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(raw)
        with torch.device("meta"):
            auto: Any = transformers.AutoModel
            module = made(config) if made else auto.from_config(config)
    except Exception as error:
        raise PlanError(
            f"transformers {transformers.__version__} cannot build it: "
            f"{type(error).__name__}: {error}"
        ) from error
    return cast("nn.Module", module)


def _model_class(name: str) -> Any:
    """The file chooses among models, not among all that transformers offers to call."""
    import transformers

    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def _cover(module: nn.Module) -> None:
    """Refuse a model that is not, by and large, the blocks that were recognised.

    :raises PlanError: another stack of layers, or convolutions that are more than an embedding of
        patches: what these keep is not in the plan.
    """
    import torch

    blocks, path = _blocks(module)
    own = sum(p.numel() for block in blocks for p in block.parameters())
    tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    seen = {id(p): p.numel() for table in tables for p in table.parameters()}
    heads = {id(p): p.numel() for name, p in module.named_parameters() if "head" in name.lower()}
    rest = sum(p.numel() for p in module.parameters()) - sum((seen | heads).values())
    if own < 0.8 * rest:
        share = f"{own / max(1, rest):.0%}"
        raise PlanError(
            f"its {len(blocks)} equal blocks at {path!r} hold only {share} of the parameters "
            "beside embeddings; `pytest-vram simulate` counts the rest too"
        )
    for name, layer in module.named_modules():
        kernel = getattr(layer, "kernel_size", None)
        if (
            isinstance(kernel, tuple)
            and kernel != getattr(layer, "stride", None)
            and max(kernel) > 1
        ):
            raise PlanError(
                f"its convolution {name!r} keeps what the plan has no formula for; "
                "`pytest-vram simulate` counts it"
            )


def adapters(module: nn.Module) -> Lora | None:
    """The low-rank adapters that peft has put into ``module``."""
    targets: dict[str, None] = {}
    rank = size = 0
    for path, child in module.named_modules():
        inner: Any = getattr(child, "lora_A", None)
        for low in inner.values() if hasattr(inner, "values") else ():
            name = path.rsplit(".", 1)[-1]
            targets[LORA_NAMES.get(name, name)] = None
            rank, size = max(rank, low.weight.shape[0]), low.weight.element_size()
    return Lora(rank, tuple(targets), size) if targets else None


def dropout(module: nn.Module) -> float:
    """The largest rate among the dropouts of a model in training."""
    import torch

    rates = [m.p for m in module.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    return max(rates, default=0.0)


def _counted(module: nn.Module) -> Iterator[Weight]:
    """Every parameter tensor, tied ones once, with the job that its owner's class gives it.

    Adapters that peft has put in are left out: they are asked for as LoRA.
    """
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, tensor in owner.named_parameters(recurse=False):
            if id(tensor) in seen or "lora_" in path:
                continue
            seen.add(id(tensor))
            yield _weight(path.replace(".base_layer", ""), name, owner, tensor)


def _weight(path: str, name: str, owner: nn.Module, tensor: Any) -> Weight:
    import torch

    shape = tuple(tensor.shape)
    inner = any(part.isdigit() for part in path.split("."))
    role: Role = "other"
    if isinstance(owner, torch.nn.Embedding):
        role = "embedding"
    elif len(shape) < 2:
        role = "norm" if "norm" in type(owner).__name__.lower() else "bias"
    elif inner and len(shape) == 3 and "expert" in path.lower():
        role = "expert"
    elif inner:
        role = "matrix"
        path = ".".join(LORA_NAMES.get(part, part) for part in path.split("."))
        if type(owner).__name__ == "Conv1D":  # transformers keeps these as (in, out)
            shape = shape[::-1]
    elif "head" in path.lower():
        role = "head"
    full = path if role == "matrix" and name == "weight" else f"{path}.{name}".lstrip(".")
    frozen = not tensor.requires_grad
    return Weight(f"layers.{full}" if inner else full, shape, role, frozen=frozen)


@dataclass(frozen=True, slots=True)
class _Linear:
    """One matrix of a block, whatever class holds it."""

    name: str
    out: int
    inner: int
    bias: bool


def _recognise(module: nn.Module) -> ModelShape:
    blocks, path = _blocks(module)
    block = blocks[0]
    hidden = _hidden(module, block)
    linears = list(_linears(block))
    attention = [item for item in linears if _is_attention(item, hidden)]
    rest = [item for item in linears if item not in attention]
    ups = [item for item in rest if item.inner == hidden]
    downs = [item for item in rest if item.out == hidden and item not in ups]
    if not ups or not downs:
        raise PlanError(
            f"{type(block).__name__} blocks at {path!r} have no feed-forward pair of "
            f"{hidden} -> F -> {hidden}; give the sizes with --layers, --hidden, --heads"
        )
    heads = _attribute(module, block, _HEAD_NAMES)
    if not heads:
        raise PlanError(
            f"cannot tell how many heads {type(block).__name__} has "
            f"(no attribute {', '.join(_HEAD_NAMES[:3])}); say --heads"
        )
    fused = any(item.out == 3 * hidden for item in attention)
    tower = Tower(
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=_attribute(module, block, _KV_NAMES) or heads,
        ffn=ups[0].out,
        gated=len(ups) >= 2,
        activation=_activation(block),
        norm="rmsnorm" if _has(block, "rms") else "layernorm",
        norms=max(1, sum(_is_norm(child) for child in block.modules())),
        fused_qkv=fused,
        qkv_bias=attention[0].bias if attention else False,
        rotary=not _positions(module, hidden) and _has(module, "rot"),
        inner_dropout=type(block).__name__.startswith("Transformer"),  # torch's own layers
    )
    return _whole(module, tower)


def _whole(module: nn.Module, tower: Tower) -> ModelShape:
    """Embedding and head around a recognised tower."""
    import torch

    tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    vocab = max((m.num_embeddings for m in tables), default=0)
    heads = [
        m
        for m in module.modules()
        if isinstance(m, torch.nn.Linear) and vocab and m.out_features == vocab
    ]
    tied = any(head.weight is table.weight for head in heads for table in tables)
    return ModelShape(
        type(module).__name__,
        (tower,),
        vocab=vocab,
        positions=_positions(module, tower.hidden),
        tied=tied,
        head="lm" if heads else "none",
        upcast=False,
        repeats_kv=True,
    )


def _blocks(module: nn.Module) -> tuple[list[nn.Module], str]:
    """The longest run of equal submodules: the layers."""
    import torch

    best: tuple[list[nn.Module], str] = ([], "")
    for path, child in module.named_modules():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(child) > 1:
            sizes = {sum(p.numel() for p in item.parameters()) for item in child}
            kinds = {type(item) for item in child}
            if len(sizes) == len(kinds) == 1 and sizes != {0} and len(child) > len(best[0]):
                best = (list(child), path)
    if not best[0]:
        raise PlanError(
            f"{type(module).__name__} repeats no block of layers, so its shape is not a "
            "transformer's; simulate it instead (pytest-vram simulate)"
        )
    return best


def _hidden(module: nn.Module, block: nn.Module) -> int:
    """H: the width that most matrices of a block read or write."""
    sides: Counter[int] = Counter()
    for item in _linears(block):
        sides[item.inner] += 1
        sides[item.out] += 1
    if not sides:
        raise PlanError(f"{type(block).__name__} has no linear layers")
    norms = [p.numel() for m in block.modules() if _is_norm(m) for p in m.parameters(False)]
    return max(norms, key=norms.count) if norms else sides.most_common(1)[0][0]


def _linears(block: nn.Module) -> Iterator[_Linear]:
    import torch

    for path, child in block.named_modules():
        if isinstance(child, torch.nn.MultiheadAttention):
            width = child.embed_dim
            yield _Linear(f"{path}.in_proj", 3 * width, width, child.in_proj_bias is not None)
        elif isinstance(child, torch.nn.Linear):
            yield _Linear(path, child.out_features, child.in_features, child.bias is not None)
        elif type(child).__name__ == "Conv1D" and hasattr(child, "nf"):
            inner, out = child.weight.shape
            yield _Linear(path, out, inner, True)


def _is_attention(item: _Linear, hidden: int) -> bool:
    words = ("attn", "attention", "in_proj", "qkv", "q_proj", "k_proj", "v_proj", "o_proj")
    named = any(word in item.name.lower() for word in words)
    return named or (item.out == item.inner == hidden)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(False))


def _has(module: nn.Module, word: str) -> bool:
    return any(
        word in type(child).__name__.lower() or word in path.lower()
        for path, child in module.named_modules()
    )


def _activation(block: nn.Module) -> Activation:
    names = {type(child).__name__.lower() for child in block.modules()}
    if names & {"silu", "siluactivation", "swish"}:
        return "silu"
    if "newgeluactivation" in names:
        return "gelu_new"
    function = getattr(getattr(block, "activation", None), "__name__", "")
    return "relu" if "relu" in names or function == "relu" else "gelu"


def _attribute(module: nn.Module, block: nn.Module, names: tuple[str, ...]) -> int:
    """A whole number that some part of the block, or the model's own config, calls by a name."""
    holders: list[Any] = [*block.modules(), getattr(module, "config", None), module]
    for holder in holders:
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _positions(module: nn.Module, hidden: int) -> int:
    """Rows of a learned position table: of an embedding or a parameter whose name says so, else the
    smaller of two embeddings of width H (one of a few rows tells kinds of tokens apart)."""
    import torch

    wide: list[int] = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding) and child.embedding_dim == hidden:
            if _of_positions(name):
                return child.num_embeddings
            wide.append(child.num_embeddings)
    if len(wide) >= 2 and min(wide) >= 16:
        return min(wide)
    for name, tensor in module.named_parameters():
        if _of_positions(name) and tensor.dim() > 1 and tensor.shape[-1] == hidden:
            return int(tensor.shape[-2])
    return 0


def _of_positions(name: str) -> bool:
    parts = name.lower().replace("_", ".").split(".")
    return any(
        part in ("wpe", "pe") or (part.startswith("pos") and not part.startswith("post"))
        for part in parts
    )
