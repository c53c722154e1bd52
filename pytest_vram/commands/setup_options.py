"""The options that describe a training run, and the :class:`Setup` that they make."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from pytest_vram.commands.common import Problem
from pytest_vram.planning.activations import parse_recompute
from pytest_vram.planning.configs import named, read_config
from pytest_vram.planning.published import MODELS
from pytest_vram.planning.runs import Offload, Parallel, Setup
from pytest_vram.planning.shapes import ModelShape, PlanError, UnknownFamilyError, decoder
from pytest_vram.planning.states import (
    OPTIMIZERS,
    PRECISIONS,
    Lora,
    find_optimizer,
    find_precision,
    parse_targets,
)
from pytest_vram.quantities import parse_size
from pytest_vram.sim.profiles import Profile

F = TypeVar("F", bound=Callable[..., Any])
_SIZES = click.IntRange(min=1)


def _names(values: Mapping[str, object]) -> Callable[..., list[str]]:
    """Shell completion among ``values``."""
    return lambda ctx, param, incomplete: [key for key in values if key.startswith(incomplete)]


_OPTIONS = (
    click.option("--layers", type=int, help="Layers of a model given by sizes."),
    click.option("--hidden", type=int, help="Hidden size."),
    click.option("--heads", type=int, help="Attention heads."),
    click.option("--kv-heads", type=int, default=0, help="Key/value heads (grouped queries)."),
    click.option("--head-dim", type=int, default=0, help="Width of a head if not hidden/heads."),
    click.option("--ffn", type=int, default=0, help="Feed-forward size (default 4 x hidden)."),
    click.option("--vocab", type=int, default=32000, show_default=True, help="Vocabulary."),
    click.option("--positions", type=int, default=0, help="Learned positions; 0 for rotary."),
    click.option("--gated", is_flag=True, help="Gated feed-forward (SwiGLU)."),
    click.option("--rmsnorm", is_flag=True, help="RMSNorm instead of LayerNorm."),
    click.option("--no-bias", is_flag=True, help="Linear layers without bias."),
    click.option("--untied", is_flag=True, help="The head has weights of its own."),
    click.option("--experts", type=int, default=0, help="Experts of a mixture."),
    click.option("--top-k", type=int, default=2, help="Experts per token."),
    click.option("-b", "--batch", type=int, default=1, show_default=True, help="Micro-batch."),
    click.option("-s", "--seq", type=int, default=0, help="Sequence (default 1024, or positions)."),
    click.option("--accumulate", type=int, default=1, help="Micro-batches per step."),
    click.option(
        "-p",
        "--precision",
        help="fp32; bf16, fp16 (autocast); *-pure (16-bit with fp32 masters); *-plain; fp8. "
        "Default: bf16, and bf16-plain (a 16-bit backbone) with --lora.",
        shell_complete=_names(PRECISIONS),
    ),
    click.option(
        "-o",
        "--optimizer",
        default="adamw",
        show_default=True,
        help="Any of torch.optim, or 8-bit and paged ones.",
        shell_complete=_names(OPTIMIZERS),
    ),
    click.option(
        "--step",
        type=click.Choice(("foreach", "fused", "loop")),
        default="foreach",
        show_default=True,
        help="The optimizer's implementation.",
    ),
    click.option(
        "--attention", type=click.Choice(("flash", "explicit")), default="flash", show_default=True
    ),
    click.option("--dropout", type=float, default=0.0, help="Dropout rate (0: no masks)."),
    click.option(
        "-r",
        "--recompute",
        default="none",
        show_default=True,
        help="none, selective, full, every:N or sqrt.",
    ),
    click.option("--lora", "lora_rank", type=int, default=0, help="LoRA rank; 0 for none."),
    click.option("--lora-targets", default="q,v", show_default=True, help="q,k,v,o,gate,up,down."),
    click.option(
        "--quantize",
        type=click.Choice(("", "nf4", "nf4-double", "int8")),
        default="",
        help="Frozen matrices in 4 or 8 bits (QLoRA).",
    ),
    click.option("--data", type=int, default=1, help="Data-parallel ranks."),
    click.option("--zero", type=int, default=0, help="ZeRO stage among them; 3 is FSDP."),
    click.option("--tensor", type=int, default=1, help="Tensor-parallel ranks."),
    click.option("--sequence-parallel", is_flag=True, help="Sequence parallel with --tensor."),
    click.option("--context", type=int, default=1, help="Context-parallel ranks."),
    click.option("--pipeline", type=int, default=1, help="Pipeline stages (1F1B)."),
    click.option("--expert", type=int, default=1, help="Expert-parallel ranks."),
    click.option("--offload", default="", help="optimizer,parameters,activations to the host."),
    click.option("--bus", default="20 GB", show_default=True, help="Bytes a second to the host."),
    click.option("--cpu-step", is_flag=True, help="Offloaded optimizer steps on the CPU."),
    click.option("--loss", type=click.Choice(("upcast", "direct")), help="logits.float() or not."),
)


def setup_options(function: F) -> F:
    """All options that describe a run."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


#: What describes a model given by sizes, with the values that these options have if not given.
_OF_SIZES = {
    **dict.fromkeys(("layers", "hidden", "heads")),
    **dict.fromkeys(("kv_heads", "head_dim", "ffn", "positions", "experts"), 0),
    **dict.fromkeys(("gated", "rmsnorm", "no_bias", "untied"), False),
    "vocab": 32000,
    "top_k": 2,
}


def find_shape(model: str | None, values: Mapping[str, Any]) -> ModelShape:
    """The model: a name, a config.json or its folder, ``module:attribute``, or sizes."""
    if model is None:
        missing = [name for name in ("layers", "hidden", "heads") if not values[name]]
        if missing:
            if len(missing) < 3:
                given = "model given by its sizes"
                raise Problem(f"a {given} needs --{' and --'.join(missing)} too")
            raise Problem(
                "which model? Give a name (such as llama-3-8b), a config.json, module:attribute, "
                f"or --{' --'.join(missing)}"
            )
        return _explicit(values)
    for name, usual in _OF_SIZES.items():
        if values[name] != usual:
            option = "--" + name.replace("_", "-")
            raise Problem(f"{option} describes a model that is given by sizes; {model} has its own")
    path = Path(model)
    if path.exists() or model.endswith(".json"):
        return _of_file(path)
    if ":" in model:
        from pytest_vram.planning.modules import from_module, load_module

        return from_module(load_module(model))
    return named(model)


def _of_file(path: Path) -> ModelShape:
    """The shape in a configuration file. Where the planner does not know the family, or not all of
    its parts, transformers builds the model, if it is installed: slower, but exact in what it
    counts."""
    shape = unknown = None
    try:
        shape = read_config(path)
        if not (shape.guessed or shape.partial):
            return shape
    except UnknownFamilyError as error:
        if not error.readable:
            raise
        unknown = error
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "torch")):
        if shape is not None:
            return shape
        raise PlanError(f"{unknown}. With transformers installed, it is built and counted")
    from pytest_vram.planning.modules import build, from_module

    try:
        module = build(path)
    except PlanError as error:
        if shape is not None:
            return shape
        raise PlanError(f"{unknown} ({error})") from None
    try:
        return from_module(module)
    except PlanError as error:
        if shape is not None:
            return shape
        raise PlanError(f"{path}: {error}") from None


def _explicit(values: Mapping[str, Any]) -> ModelShape:
    return decoder(
        layers=values["layers"],
        hidden=values["hidden"],
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        head_dim=values["head_dim"],
        ffn=values["ffn"],
        vocab=values["vocab"],
        positions=values["positions"],
        gated=values["gated"],
        rmsnorm=values["rmsnorm"],
        bias=not values["no_bias"],
        tied=not values["untied"],
        rotary=not values["positions"],
        experts=values["experts"],
        top_k=values["top_k"],
    )


def build_setup(model: str | None, values: Mapping[str, Any], card: Profile | None) -> Setup:
    """The run that the options describe; every impossibility is a :class:`Problem`."""
    try:
        return _build(model, values, card)
    except (PlanError, ValueError) as error:
        raise Problem(str(error)) from None


def _build(model: str | None, values: Mapping[str, Any], card: Profile | None) -> Setup:
    shape = find_shape(model, values)
    if values["loss"]:
        shape = replace(shape, upcast=values["loss"] == "upcast")
    if values["seq"] < 0:
        raise PlanError(f"sequence must be at least 1, not {values['seq']}")
    if values["seq"] and shape.tokens_per_sample:
        raise PlanError(
            f"{shape.name} reads images: its sequence is {shape.tokens_per_sample} tokens, "
            "and --seq says otherwise"
        )
    lora = None
    if values["lora_rank"]:
        lora = Lora(values["lora_rank"], parse_targets(values["lora_targets"]))
    away = frozenset(part.strip() for part in values["offload"].split(",") if part.strip())
    threads = card.multiprocessors * card.threads_per_multiprocessor if card else 108 * 2048
    hopper = card is not None and card.capability >= (9, 0)
    return Setup(
        shape=shape,
        batch=values["batch"],
        sequence=values["seq"] or min(1024, shape.positions or 1024),
        accumulation=values["accumulate"],
        precision=find_precision(values["precision"] or ("bf16-plain" if lora else "bf16")),
        optimizer=find_optimizer(values["optimizer"]),
        step=values["step"],
        attention=values["attention"],
        dropout=values["dropout"],
        recompute=parse_recompute(values["recompute"], shape.layers),
        lora=lora,
        quantisation=values["quantize"],
        parallel=Parallel(
            data=values["data"],
            zero=values["zero"],
            tensor=values["tensor"],
            sequence=values["sequence_parallel"],
            context=values["context"],
            pipeline=values["pipeline"],
            expert=values["expert"],
        ),
        offload=Offload(away, parse_size(values["bus"]), "cpu" if values["cpu_step"] else "gpu"),
        # ATen/cuda/CublasHandlePool.cpp: 32 MiB from Hopper on, else 4096 KiB x 2 + 16 KiB x 8.
        workspace=32 << 20 if hopper else 8_519_680,
        threads=threads,
    )


def model_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of the model argument."""
    return [name for name in MODELS if name.startswith(incomplete)]
