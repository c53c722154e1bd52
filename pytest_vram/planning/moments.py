"""The moments of a training step at which memory can peak."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_vram.planning.answers import BILLS, Moment
from pytest_vram.planning.flows import Flow, summed_bytes
from pytest_vram.planning.ranks import Rank, step_temporaries


def moments_of(rank: Rank, static: Mapping[str, int], flow: Flow) -> tuple[Moment, ...]:
    """The moments of a step at which memory can peak, in order.

    With one micro-batch a step, gradients do not exist before backward
    (``zero_grad(set_to_none=True)``, PyTorch's default); with accumulation, and in gradient
    buffers of ZeRO, they live through the whole step.
    """
    setup = rank.setup
    gradients = static["gradients"]
    lasting = setup.accumulation > 1 or setup.parallel.zero in (1, 2)
    rest = {name: size for name, size in static.items() if name != "gradients"}
    vocabulary = 0
    if setup.shape.head == "lm" and not setup.lora:
        table = [w for w in rank.base if setup.shape.is_vocabulary(w)]
        vocabulary = rank.size(table, setup.precision.gradient)
    layers, head = flow.kept + flow.head.kept, flow.head
    # The head's weight gradient: made in the compute type, under autocast cast to the parameter's.
    weight = vocabulary // 2 if setup.precision.cache else 0
    if setup.shape.head_bias and setup.shape.head == "lm" and not setup.lora:
        columns = setup.shape.logits // setup.parallel.tensor
        weight += summed_bytes(setup.batch * setup.tokens, columns, setup.threads)

    def moment(
        name: str, grads: int, activations: int, copies: int = 0, temporary: int = 0
    ) -> Moment:
        bills = dict.fromkeys(BILLS, 0) | rest
        bills["gradients"] = gradients if lasting else min(grads, gradients)
        bills["activations"] = activations
        bills["autocast_cache"] = copies
        bills["temporary"] = temporary
        return Moment(name, bills)

    return (
        moment("forward, at the loss", 0, layers + head.saved, flow.copies, head.forward),
        moment("backward, at the loss", 0, layers + head.saved, flow.kept_copies, head.backward),
        moment(
            "backward, in the head",
            vocabulary,
            layers + head.logits,
            flow.kept_copies,
            flow.logits + weight,
        ),
        moment(
            "backward, in the last layer",  # the final norm is through
            vocabulary,
            flow.kept + head.logits + flow.rerun,
            flow.kept_copies,
            flow.working,
        ),
        moment(
            "backward, at its end",
            gradients,
            head.logits,
            0,
            vocabulary if setup.shape.tied else 0,
        ),
        moment("optimizer step", gradients, head.logits, 0, step_temporaries(rank)),
    )
