"""Reading a Hugging Face configuration: what the functions of all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_vram.planning.shapes import Activation, ModelShape, PlanError, Tower, Weight

Config = Mapping[str, Any]


class Fields:
    """Reads one config: every needed field that is missing is named in the error."""

    def __init__(self, config: Config, where: str) -> None:
        self.config = config
        self.where = where

    def need(self, *names: str) -> int:
        """The first of ``names`` that is there, as a positive whole number."""
        value = self.get(*names)
        if value is None:
            raise PlanError(f"{self.where}: field {names[0]!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise PlanError(f"{self.where}: {names[0]} must be a positive number, not {value!r}")
        return value

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        return default

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.get(name, default=default))

    @property
    def heads(self) -> int:
        return self.need("num_attention_heads", "n_head", "num_heads")

    @property
    def activation(self) -> Activation:
        name = str(self.get("hidden_act", "activation_function", "hidden_activation", "activation"))
        if "silu" in name or "swish" in name:
            return "silu"
        if name == "quick_gelu":
            return "quick_gelu"
        if name in ("gelu_new", "gelu_fast", "gelu_python_tanh"):
            return "gelu_new"
        return "relu" if "relu" in name else "gelu"

    def head(self) -> dict[str, Any]:
        """Head of the class named in ``architectures``; a language model where none is named."""
        names = self.get("architectures") or []
        first = str(names[0]) if names else ""
        if "Classification" in first or "ForImage" in first:
            labels = self.get("num_labels", default=len(self.get("id2label") or (0, 1)))
            return {"head": "classes", "head_rows": int(labels), "tied": False}
        if first.endswith("Model") and "LMHead" not in first and "MTModel" not in first:
            return {"head": "none", "tied": False}
        return {"head": "lm"}


def usual_tower(f: Fields, **others: Any) -> Tower:
    """A tower whose five sizes have the names that most configurations use."""
    return Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        **others,
    )


def assemble(f: Fields, tower: Tower, *, tied: bool, positions: int = 0) -> ModelShape:
    """What most families share: token embedding, head, whether they are one tensor."""
    options = {"tied": f.flag("tie_word_embeddings", tied), **f.head()}
    kind = str(f.get("model_type", default="transformer"))
    vocab = f.need("vocab_size")
    return ModelShape(kind, (tower,), vocab=vocab, positions=positions, **options)


def changed(shape: ModelShape, **changes: Any) -> ModelShape:
    """``dataclasses.replace`` that leaves a tie alone where there is no language-model head."""
    if shape.head != "lm":
        changes.pop("tied", None)
        if shape.head == "none":
            changes.pop("head_bias", None)
    return replace(shape, **changes)


def dense(name: str, hidden: int) -> list[Weight]:
    """A square layer with bias, such as a pooler."""
    matrix = Weight(name, (hidden, hidden), "other")
    return [matrix, Weight(f"{name}.bias", (hidden,), "other")]
