"""Random draws: new in each call, the same after the same seed, of torch's distribution, one for each example."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers import marked, through
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import lift

Fun = Callable[[torch.Tensor], torch.Tensor]
D = torch.distributions

# What fails today, with the reason: an entry that no longer fails is reported and has to go.
_ONE_MASK_WRONG = {"torch.func": "jacrev maps the backward pass, whose mask counts as a draw within vmap"}
# One of each family and way to draw runs always, the others with the slow sweeps.
_QUICK = frozenset(
    (
        *("dropout", "rrelu", "randperm", "normal_", "bernoulli_", "multinomial", "Exponential"),
        "noise under no_grad",
    )
)


pytestmark = pytest.mark.usefixtures("seeded")


_LAYER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
_LSTM = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
_ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

# Functions of a vector [512] of numbers between 0 and 1.
DRAWS: dict[str, Fun] = {
    "dropout": lambda x: F.dropout(x + 1, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone() + 1, 0.3, inplace=True),
    "dropout module": lambda x: nn.Dropout(0.3)(x),
    "dropout1d": lambda x: F.dropout1d(x.reshape(1, 128, 4) + 1, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.reshape(1, 128, 2, 2) + 1, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.reshape(1, 128, 2, 2), 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x - 1.5, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.reshape(64, 8), hard=False),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x.reshape(64, 8), hard=True),
    "rand": lambda x: x + torch.rand(512),
    "rand_like": lambda x: torch.rand_like(x),
    "rand of another dtype": lambda x: torch.rand(512, dtype=torch.float64) + x,
    "randn": lambda x: x + torch.randn(512),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: x + torch.randint(3, 9, (512,)),
    "randint_like": lambda x: torch.randint_like(x, 2, 7),
    "randperm": lambda x: torch.randperm(512) + 0 * x.long(),
    "random_": lambda x: x.clone().random_(0, 5),
    "random_ of integers": lambda x: x.long().random_(10),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of tensors": lambda x: torch.normal(x, x + 1),
    "normal_": lambda x: x.clone().normal_(3, 2),
    "normal_ of empty": lambda x: torch.empty(512).normal_() + x,
    "uniform_": lambda x: x.clone().uniform_(-2, 5),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.2),
    "bernoulli_ of a tensor": lambda x: torch.zeros(512).bernoulli_(x),
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.7),
    "bernoulli of booleans": lambda x: (x > 2).bernoulli_(0.5),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "cauchy_": lambda x: x.clone().cauchy_().atan(),
    "log_normal_": lambda x: x.clone().log_normal_(0.0, 0.3),
    "geometric_": lambda x: x.clone().geometric_(0.4),
    "poisson": lambda x: torch.poisson(x * 4),
    "multinomial": lambda x: torch.multinomial(x + 0.1, 300, replacement=True),
    "multinomial without replacement": lambda x: torch.multinomial(x + 0.1, 300),
    "multinomial of rows": lambda x: torch.multinomial(x.reshape(64, 8) + 0.1, 3),
    "one draw of rows": lambda x: torch.multinomial(x.reshape(64, 8) + 0.1, 1),
    "binomial": lambda x: torch.binomial(torch.full((512,), 8.0), x),
    "Normal.rsample": lambda x: D.Normal(x, x + 1).rsample(),
    "Normal.sample": lambda x: D.Normal(x, x + 1).sample((2,)),
    "Uniform": lambda x: D.Uniform(x, x + 2).rsample(),
    "Categorical": lambda x: D.Categorical(x.reshape(64, 8) + 0.1).sample((4,)),
    "OneHotCategorical": lambda x: D.OneHotCategorical(x.reshape(64, 8) + 0.1).sample(),
    "Bernoulli": lambda x: D.Bernoulli(x).sample(),
    "Poisson": lambda x: D.Poisson(x + 1).sample(),
    "Exponential": lambda x: D.Exponential(x + 1).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0).rsample(),
    "Gumbel": lambda x: D.Gumbel(x, 1.0).rsample(),
    "Gamma": lambda x: D.Gamma(x + 1, 1.0).rsample(),
    "Beta": lambda x: D.Beta(x + 1, 2.0).rsample(),
    "Dirichlet": lambda x: D.Dirichlet(x.reshape(64, 8) + 1).rsample(),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x.reshape(64, 8), torch.eye(8)).rsample(),
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(torch.tensor(0.5), x).rsample(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 64, 8)] * 3, dropout_p=0.5),
    "multi-head attention": lambda x: _ATTENTION(*[x.reshape(1, 64, 8)] * 3)[0],
    "transformer layer": lambda x: _LAYER(x.reshape(2, 32, 8)),
    "LSTM": lambda x: _LSTM(x.reshape(32, 4, 4))[0],
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x.clone(), 0.0, 1.0, -1.0, 1.0),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x.clone().reshape(16, 32)),
    "orthogonal_": lambda x: nn.init.orthogonal_(x.clone().reshape(8, 64)) ** 2,
    "new layer": lambda x: nn.Linear(8, 4)(x.reshape(64, 8)),
    "fractional pool": lambda x: F.fractional_max_pool2d(x.reshape(1, 8, 8, 8), 2, output_size=5),
    "set of rows": lambda x: x.reshape(64, 8)[torch.randperm(64)[:32]],
    "noise under no_grad": lambda x: _noise(x),
}
REFUSED = ("fractional pool", "trunc_normal_")


@torch.no_grad()
def _noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


def _x() -> torch.Tensor:
    return torch.linspace(0.05, 0.95, 512)


@pytest.mark.filterwarnings("ignore:.*weights is not None:UserWarning")
@pytest.mark.parametrize("name", marked(DRAWS, quick=_QUICK))
def test_a_draw_is_new_in_each_call_repeats_by_seed_and_has_torchs_distribution(name: str) -> None:
    fun, x = DRAWS[name], _x()
    call = through(fun)
    with torch.no_grad():
        torch.manual_seed(1)
        try:
            first = call(x)  # traced and compiled here
        except TypeError as error:
            if name not in REFUSED:
                raise AssertionError(name) from error
            return
        after = torch.rand(1)
        second, third = call(x), call(x)
        torch.manual_seed(1)
        again = call(x)
        assert torch.equal(torch.rand(1), after), "tracing moves the generator"
        draws = [fun(x) for _ in range(3)]
    assert name not in REFUSED
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    for got in (first, second):
        assert got.dtype == draws[0].dtype
        assert got.shape == draws[0].shape
    got, expected = torch.stack([first, second, third]).double(), torch.stack(draws).double()
    spread = expected.std().item() + 0.05
    assert abs(got.mean() - expected.mean()).item() < 0.25 * spread
    assert 0.75 < (got.std().item() + 0.05) / spread < 1.33
    low, high = expected.min().item(), expected.max().item()
    if name not in ("exponential_", "log_normal_", "normal_"):
        assert low - 3 * spread <= got.min().item()
        assert got.max().item() <= high + 3 * spread


SUPPORTS: dict[str, Callable[[torch.Tensor], bool]] = {
    "dropout": lambda y: set(y.unique().tolist()) == {0.0, 2.0},
    "randperm": lambda y: y.sort().values.tolist() == list(range(64)),
    "multinomial": lambda y: len(set(y.tolist())) == 5 and y.min() > 0,
    "randint": lambda y: set(y.tolist()) == {3, 4},
    "bernoulli": lambda y: set(y.tolist()) == {0.0, 1.0},
    "rand": lambda y: bool((y >= 0).all() and (y < 1).all()),
    "one hot": lambda y: bool((y.sum(-1) == 1).all()),
    "extremes of bernoulli": lambda y: y.tolist() == [0.0, 1.0],
    "dropout of all and of nothing": lambda y: y.tolist() == [[0.0] * 4, [1.0] * 4],
}
SUPPORTED: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(torch.ones(64), 0.5),
    "randperm": lambda: torch.randperm(64),
    "multinomial": lambda: torch.multinomial(torch.tensor([0.0, 1, 1, 1, 1, 1]), 5),
    "randint": lambda: torch.randint(3, 5, (64,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "rand": lambda: torch.rand(4096, dtype=torch.bfloat16),
    "one hot": lambda: F.gumbel_softmax(torch.zeros(16, 4), hard=True),
    "extremes of bernoulli": lambda: torch.bernoulli(torch.tensor([0.0, 1.0])),
    "dropout of all and of nothing": lambda: torch.stack(
        [F.dropout(torch.ones(4), 1.0), F.dropout(torch.ones(4), 0.0)]
    ),
}


@pytest.mark.slow
def test_draws_stay_within_their_support() -> None:
    """All in one program: the names say which is wrong."""
    drawn = through(lambda x: {name: draw() + 0 * x.long() for name, draw in SUPPORTED.items()})(torch.zeros(()))
    assert [name for name, is_within in SUPPORTS.items() if not is_within(drawn[name])] == []


def test_draws_of_one_call_differ_from_each_other() -> None:
    layer = nn.Dropout(0.5)
    call = through(lambda x: [layer(x), layer(x), F.dropout(x), torch.rand(64), torch.rand(64), torch.rand_like(x)])
    outs = call(torch.ones(64))
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])
    assert len({tuple(o.tolist()) for o in outs[3:]}) == 3


# Seeds and generators


def _seeds_inside(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + torch.rand(3)


def _forks_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        noise = torch.rand(3)
    return x + noise


def _sets_the_state_inside(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    one = torch.rand(3)
    torch.set_rng_state(state)
    return x + one - torch.rand(3)


def _own_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, generator=torch.Generator().manual_seed(7))


def _default_generator(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(7)
    return x + torch.rand(3)


_GENERATOR = torch.Generator()


def _running_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, generator=_GENERATOR)


def _generator_of_a_distribution(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randperm(3, generator=torch.Generator().manual_seed(7))


def _in_place_by_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty(3).normal_(generator=torch.Generator().manual_seed(7))


def _seed_of_the_system(x: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return x + torch.rand(3)


FIXED: dict[str, tuple[Fun, bool]] = {
    "manual_seed": (_seeds_inside, True),
    "fork_rng": (_forks_inside, True),
    "set_rng_state": (_sets_the_state_inside, True),
    "generator": (_own_generator, True),
    "default_generator": (_default_generator, True),
    "running generator": (_running_generator, False),
    "generator of randperm": (_generator_of_a_distribution, True),
    "generator in place": (_in_place_by_generator, True),
    "seed of the system": (_seed_of_the_system, False),
}


@pytest.mark.parametrize("name", FIXED)
def test_seeds_and_generators_inside_are_honoured_or_refused(name: str) -> None:
    fun, repeats = FIXED[name]
    call, x = through(fun), torch.zeros(3)
    try:
        results = [call(x) for _ in range(3)]
    except TypeError as error:
        assert "test_randomness.py:" in str(error) or "generator" in str(error)  # noqa: PT017
        return
    assert torch.equal(results[0], results[1]) == repeats
    assert torch.equal(results[1], results[2]) == repeats


@pytest.mark.parametrize("name", [n for n in FIXED if n != "seed of the system"])
def test_the_generator_outside_is_where_torch_would_leave_it_or_where_it_was(name: str) -> None:
    fun, x = FIXED[name][0], torch.zeros(3)
    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    fun(x)
    left = torch.get_rng_state()
    torch.manual_seed(3)
    try:
        through(fun)(x)
    except TypeError:
        assert torch.equal(torch.get_rng_state(), untouched)
    else:
        now = torch.get_rng_state()
        assert not torch.equal(left, untouched) or torch.equal(now, untouched)


def test_a_function_that_does_not_draw_leaves_the_generator_alone() -> None:
    call = through(lambda x: F.dropout(x, 0.5, training=False) * 2)
    state = torch.get_rng_state()
    call(torch.ones(3))
    call(torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_forking_the_generator_around_a_call() -> None:
    call, x = through(lambda x: F.dropout(x)), torch.ones(64)
    call(x)
    state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        one = call(x)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        assert torch.equal(call(x), one)
    saved = torch.get_rng_state()
    two = call(x)
    torch.set_rng_state(saved)
    assert torch.equal(call(x), two)


# One mask for all that belongs together


def test_forward_and_backward_share_a_mask() -> None:
    call = through(lambda x: F.dropout(x, 0.5) * x)
    for _ in range(2):
        x = torch.full((64,), 3.0, requires_grad=True)
        out = call(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        torch.testing.assert_close(g.detach() * 3 / 2, out.detach())  # d(m·x²) = 2·m·x
        (h,) = torch.autograd.grad(g.sum(), x)
        torch.testing.assert_close(h * 3, g.detach())


def test_value_and_gradient_share_a_mask() -> None:
    value, grad = lift(jax.value_and_grad)(lambda x: (F.dropout(x) * x).sum())(torch.full((64,), 3.0))
    torch.testing.assert_close(value, (grad * 3 / 2).sum())


def _dropped(x: torch.Tensor) -> torch.Tensor:
    mixing = torch.arange(36.0).reshape(6, 6).sin()
    return F.dropout(torch.sin(mixing @ x), 0.5).pow(2).sum()


ONE_MASK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hessian": lambda x: lift(jax.hessian)(_dropped)(x),
    "reverse over reverse": lambda x: lift(lambda f: jax.jacrev(jax.grad(f)))(_dropped)(x),
    "second gradients": lambda x: _second_gradients(through(_dropped), x),
    "autograd.functional.hessian": lambda x: torch.autograd.functional.hessian(through(_dropped), x),
    "torch.func": lambda x: torch.func.jacfwd(torch.func.jacrev(through(_dropped)), randomness="same")(x),
}


def _second_gradients(f: Fun, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.stack([torch.autograd.grad(part, x, retain_graph=True)[0] for part in g])


@pytest.mark.parametrize("name", marked(ONE_MASK, _ONE_MASK_WRONG, slow=("second gradients", "reverse over reverse")))
def test_a_hessian_has_one_mask_and_the_next_one_another(name: str) -> None:
    x = torch.linspace(-1, 1, 6)
    one, two = ONE_MASK[name](x), ONE_MASK[name](x)
    torch.testing.assert_close(one, one.T, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, two)


def test_the_columns_of_a_jacobian_share_a_mask() -> None:
    x = torch.ones(16)
    for transform in (jax.jacfwd, jax.jacrev):
        matrix = lift(transform)(lambda x: F.dropout(x.sum() * torch.ones(16)))(x)
        assert (matrix == matrix[:, :1]).all()
        assert set(matrix.unique().tolist()) == {0.0, 2.0}


def test_a_function_that_a_transform_calls_twice_draws_twice() -> None:
    """An average over several masks, say: were they all one, the average would say nothing."""
    drop = lambda x: F.dropout(x)
    both = lift(lambda f: lambda x: (f(x), f(x)))(drop)
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(0)
    first, second = both(x)
    assert not torch.equal(first, second)
    (3 * first + 5 * second).sum().backward()
    torch.testing.assert_close(x.grad, (3 * first + 5 * second).detach())
    torch.manual_seed(0)
    assert all(map(torch.equal, both(torch.ones(64)), (first, second)))


def test_a_derivative_beside_a_value_has_its_mask() -> None:
    three = lift(lambda f: lambda x: (f(x), jax.grad(lambda x: f(x).sum())(x), jax.jvp(f, (x,), (x,))[1]))
    value, slope, moved = three(lambda x: F.dropout(x))(torch.ones(64))
    assert torch.equal(value, slope)
    assert torch.equal(value, moved)


# One draw for each example


def _per_example() -> dict[str, Fun]:
    layer = nn.Dropout(0.5)
    return {
        "dropout": lambda x: F.dropout(x, 0.5),
        "module": lambda x: layer(x),
        "noise": lambda x: x + torch.randn_like(x),
        "noise of its own": lambda x: x + torch.rand(16),
        "permutation": lambda x: x[torch.randperm(16)] + torch.randperm(16),
        "multinomial": lambda x: torch.multinomial(x, 8).float(),
        "bernoulli_": lambda x: torch.zeros(16).bernoulli_(0.5) * x,
        "sample": lambda x: D.Normal(x, 1.0).rsample(),
        "several": lambda x: F.dropout(x + torch.rand(16), 0.5),
    }


@pytest.mark.parametrize("name", marked(_per_example(), quick=("dropout",)))
def test_each_example_draws_its_own_whatever_the_microbatch(name: str) -> None:
    fun, x, results = _per_example()[name], torch.ones(5, 16), []
    for size, partition in ((None, "strided"), (2, "contiguous")):
        mapped = mt.micro_vmap(fun, microbatch_size=size, partition=partition)
        torch.manual_seed(4)
        rows = mapped(x)
        assert len({tuple(r.tolist()) for r in rows}) == 5
        results.append(rows)
        assert not torch.equal(mapped(x), rows)
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_gradients_values_and_aux_of_an_example_share_its_mask() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
        masked = F.dropout(x[0])
        return (w * masked).sum(), masked

    w, x = torch.ones(16), torch.ones(5, 16)
    for size in (None, 2):
        torch.manual_seed(9)
        grads, aux = mt.micro_grad(loss, has_aux=True, microbatch_size=size, accumulator=mt.AccumulationType.CONCAT)(
            w, x
        )
        torch.testing.assert_close(grads, aux.aux)
        torch.testing.assert_close(aux.values, aux.aux.sum(1))
        assert len({tuple(r.tolist()) for r in grads}) == 5


@functools.cache
def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))


def test_a_microbatch_draws_its_own_and_backward_repeats_it() -> None:
    net, x = _net(), torch.randn(6, 8)
    run = mt.microbatch(lambda x: net(x).sum(), 0, 2)
    torch.manual_seed(2)
    value = run(x)
    (grad,) = torch.autograd.grad(value, net[2].weight)
    torch.testing.assert_close((grad * net[2].weight).sum() + 6 * net[2].bias.sum(), value.reshape(()))
