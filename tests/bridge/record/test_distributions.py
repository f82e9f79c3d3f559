"""The checks of ``torch.distributions``: what eager torch refuses is refused, at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import marked, through
from torch import distributions as D

from microtome import torch_api as mt

t = torch.tensor
Case = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]  # right, and wrong
ONES = torch.ones(2)
COVARIANCE, INDEFINITE, SKEW = t([[2.0, 0.5], [0.5, 1.0]]), t([[1.0, 2.0], [2.0, 1.0]]), t([[2.0, 0.5], [0.0, 1.0]])
CASES: dict[str, Case] = {
    "scale": (lambda s: D.Normal(0.0, s).log_prob(ONES), t([0.5, 2.0]), t([0.5, -2.0])),
    "interval": (lambda x: D.Beta(2.0, 3.0).log_prob(x), t(0.5), t(1.5)),
    "counts": (lambda x: D.Poisson(2.0).log_prob(x), t([0.0, 3.0]), t([0.0, 1.5])),
    "simplex": (lambda p: D.Categorical(probs=p).log_prob(t(0)), t([1.0, 2.0]), t([-1.0, 2.0])),
    "value on the simplex": (lambda x: D.Dirichlet(ONES).log_prob(x), t([0.25, 0.75]), t([0.25, 0.8])),
    "covariance": (lambda m: D.MultivariateNormal(ONES, m).log_prob(0 * ONES), COVARIANCE, INDEFINITE),
    "symmetry": (lambda m: D.MultivariateNormal(ONES, m).log_prob(0 * ONES), COVARIANCE, SKEW),
    "lower factor": (lambda m: D.MultivariateNormal(ONES, scale_tril=m).log_prob(0 * ONES), SKEW.mT, SKEW),
    "positive values": (lambda x: D.LogNormal(0.0, 1.0).log_prob(x), t(2.0), t(-2.0)),
    "ends": (lambda x: D.Uniform(0.0, 1.0).log_prob(x), t(0.25), t(2.0)),
    "probability": (lambda p: D.Geometric(p).log_prob(t(2.0)), t(0.25), t(0.0)),
    "continuous": (lambda p: D.ContinuousBernoulli(p, validate_args=True).log_prob(t(0.5)), t(0.25), t(1.5)),
    "divergence": (lambda s: D.kl_divergence(D.Normal(0.0, s), D.Normal(0.0, 1.0)), t(0.5), t(-0.5)),
    "Wishart": (lambda m: D.Wishart(t(3.0), m).log_prob(torch.eye(2)), COVARIANCE, INDEFINITE),
}


@pytest.fixture(autouse=True)
def _checks_are_on() -> Iterator[None]:
    before = D.Distribution._validate_args  # torch.compile switches them off for good
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


def test_right_parameters_and_values_give_what_eager_torch_gives() -> None:
    given = {name: right.clone().requires_grad_() for name, (_, right, _) in CASES.items()}
    everything = lambda given: {name: fun(given[name]) for name, (fun, _, _) in CASES.items()}
    found = []
    for values in (through(everything)(given), everything(given)):
        total = sum(v.sum() for v in values.values())
        found.append((values, torch.autograd.grad(total, list(given.values()), allow_unused=True)))
    torch.testing.assert_close(*found)


_NEAR = ("interval", "lower factor", "covariance", "Wishart", "continuous", "value on the simplex", "divergence")


@pytest.mark.parametrize("name", marked(CASES, slow=_NEAR))
def test_what_eager_torch_refuses_is_refused_at_each_call(name: str) -> None:
    fun, right, wrong = CASES[name]
    call = through(fun)
    with pytest.raises(ValueError, match=r"to satisfy the constraint|within the support|to be positive|invalid values"):
        fun(wrong)
    call(right)
    with pytest.raises(ValueError, match=r"test_distributions.py:\d+: outside of what a distribution takes "):
        call(wrong)
    call(right)


def test_one_wrong_example_is_found() -> None:
    grads = mt.micro_grad(lambda s, x: D.Exponential(s).log_prob(x).sum(), microbatch_size=2)
    grads(t(2.0), torch.ones(4))
    with pytest.raises(ValueError, match="outside of what a distribution takes"):
        grads(t(2.0), t([1.0, 1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="outside of what a distribution takes"):
        mt.micro_grad(lambda s, x: (s * D.Normal(0.0, t(-1.0)).log_prob(x)).sum())(t(2.0), torch.ones(4))


def test_checks_that_are_switched_off_stay_off() -> None:
    call = through(lambda s: D.Normal(0.0, s).log_prob(ONES))
    assert through(lambda s: D.Normal(0.0, s, validate_args=False).log_prob(ONES))(t(-1.0)).isnan().all()
    with pytest.raises(ValueError, match="outside of what a distribution takes"):
        call(t(-1.0))
    D.Distribution.set_default_validate_args(False)
    assert call(t(-1.0)).isnan().all()


def test_a_mask_of_one_number_chooses_what_is_written() -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x.sum() > 0] = 7
        x[x.sum() < 0] = x * 2
        return x

    for x in (t(0.5), t(-0.5), ONES, -ONES, t([3]), t([-3])):
        torch.testing.assert_close(through(changed)(x), changed(x))
