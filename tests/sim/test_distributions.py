"""``torch.distributions`` asks the values of its arguments: in a simulation they are valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from pytest_vram.sim import Simulation, find_profile


def _eye(mean: Tensor) -> Tensor:
    return torch.eye(mean.shape[-1], device="cuda")


MAKERS: dict[str, Callable[[Tensor, Tensor, bool | None], Any]] = {
    "categorical": lambda x, s, v: D.Categorical(logits=x, validate_args=v),
    "probabilities": lambda x, s, v: D.Categorical(probs=s, validate_args=v),
    "normal": lambda x, s, v: D.Normal(x, s, validate_args=v),
    "independent": lambda x, s, v: D.Independent(D.Normal(x, s), 1, validate_args=v),
    "triangular": lambda x, s, v: D.MultivariateNormal(x, scale_tril=_eye(x), validate_args=v),
    "covariance": lambda x, s, v: D.MultivariateNormal(x, _eye(x), validate_args=v),
    "beta": lambda x, s, v: D.Beta(s, s, validate_args=v),
    "dirichlet": lambda x, s, v: D.Dirichlet(s, validate_args=v),
    "gamma": lambda x, s, v: D.Gamma(s, s, validate_args=v),
    "bernoulli": lambda x, s, v: D.Bernoulli(logits=x, validate_args=v),
    "squashed": lambda x, s, v: D.TransformedDistribution(
        D.Normal(x, s, validate_args=v), [D.TanhTransform(cache_size=1)], validate_args=v
    ),
    "von_mises": lambda x, s, v: D.VonMises(x, s, validate_args=v),
}


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("name", MAKERS)
def test_samples_and_their_probabilities(name: str, validate: bool | None) -> None:
    with Simulation(find_profile("a100-80gb")):
        mean = torch.randn(8, 4, device="cuda", requires_grad=True)
        scale = torch.rand(8, 4, device="cuda", requires_grad=True)
        found = MAKERS[name](mean, scale, validate)
        sample = found.rsample() if found.has_rsample else found.sample()
        found.log_prob(sample).sum().backward()
        assert mean.grad is not None or scale.grad is not None


@pytest.mark.parametrize("name", ["categorical", "normal", "independent", "beta", "triangular"])
def test_divergences(name: str) -> None:
    with Simulation(find_profile("a100-80gb")):
        mean, scale = torch.randn(8, 4, device="cuda"), torch.rand(8, 4, device="cuda")
        one, other = (MAKERS[name](mean, scale, True) for _ in range(2))
        assert D.kl_divergence(one, other).shape[0] == 8


def test_outside_a_simulation_arguments_are_checked() -> None:
    with Simulation(find_profile("a100-80gb")):
        pass
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        # By name: a process that compiles turns the default off (_dynamo/eval_frame.py).
        D.Normal(torch.zeros(2), -torch.ones(2), validate_args=True)
