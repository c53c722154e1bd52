"""A :class:`ModelShape` from a live ``nn.Module``: the only room of the planner that needs torch.

The parameter tensors are the module's own, so the fixed bills are exact. What a layer keeps for
backward follows from the recognised shape: from the Hugging Face configuration that the model
carries, else from the block that the model repeats and the linear layers inside it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_vram.planning.configs import from_config
from pytest_vram.planning.shapes import Activation, ModelShape, PlanError, Role, Tower, Weight
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
    if hasattr(config, "to_dict"):
        raw = {**config.to_dict(), "architectures": [type(base).__name__]}
        shape = from_config(raw, type(base).__name__)
    else:
        shape = _recognise(base)
    return replace(shape, name=type(base).__name__, counted=tuple(_counted(base)))


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
    """Rows of a learned position table: the smaller of two embeddings of width H, or a parameter
    whose name says so."""
    import torch

    tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    wide = sorted(m.num_embeddings for m in tables if m.embedding_dim == hidden)
    if len(wide) >= 2:
        return wide[0]
    for name, tensor in module.named_parameters():
        if "pos" in name.lower() and tensor.shape[-1] == hidden:
            return int(tensor.shape[-2])
    return 0
