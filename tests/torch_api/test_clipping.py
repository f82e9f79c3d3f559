"""Clipped per-example gradients of torch losses against torch.func, on the path that they say."""

from __future__ import annotations

import math

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers import crossed, marked
from torch import nn

from microtome import torch_api as mt

ROWS = 4


pytestmark = pytest.mark.usefixtures("seeded")


class Last(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(self.embedding(x)) @ self.embedding.weight.T).mean(1)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(30, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(x + self.embedding.weight[: x.shape[1]]))


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 30, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.conv.bias, padding=1)


def head(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)


# name -> (module, batch, parameters that must stay factors)
MODELS = {
    "linear": lambda: (head(nn.Linear(9, 12), nn.GELU()), torch.randn(ROWS, 9), ["0.weight", "3.weight"]),
    "conv1d": lambda: (head(nn.Conv1d(6, 16, 3), nn.ReLU()), torch.randn(ROWS, 6, 6), ["0.weight"]),
    "conv2d": lambda: (
        head(nn.Conv2d(6, 16, 3, padding=1, stride=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=2)),
        torch.randn(ROWS, 6, 6, 6),
        ["0.weight", "3.weight"],
    ),
    "conv3d": lambda: (head(nn.Conv3d(6, 8, 2)), torch.randn(ROWS, 6, 3, 3, 3), ["0.weight"]),
    "embedding": lambda: (head(nn.Embedding(40, 6)), torch.randint(7, (ROWS, 5)), ["0.weight", "2.weight"]),
    "tied": lambda: (Tied(), torch.randint(7, (ROWS, 3)), ["embedding.weight"]),
    "layer norm": lambda: (head(nn.Linear(9, 12), nn.LayerNorm(12)), torch.randn(ROWS, 9), ["0.weight"]),
    "attention": lambda: (
        head(attention()),
        torch.randn(ROWS, 3, 16),
        ["0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight", "0.linear1.weight", "0.linear2.weight"],
    ),
    "lstm": lambda: (
        head(Last(nn.LSTM(7, 12, batch_first=True))),
        torch.randn(ROWS, 3, 7),
        ["0.layer.weight_ih_l0", "0.layer.weight_hh_l0"],
    ),
    "gru": lambda: (
        head(Last(nn.GRU(7, 12, batch_first=True))),
        torch.randn(ROWS, 3, 7),
        ["0.layer.weight_ih_l0", "0.layer.weight_hh_l0"],
    ),
    "weight norm": lambda: (
        head(nn.utils.parametrizations.weight_norm(nn.Linear(9, 12))),
        torch.randn(ROWS, 9),
        ["0.parametrizations.weight.original1"],
    ),
}


def set_up(name):
    model, x, factored = MODELS[name]()
    model(x)  # lazy layers
    y = torch.arange(ROWS) % 5

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    return model, {k: p.detach() for k, p in model.named_parameters()}, x, y, loss, factored


def one_by_one(loss, params, x, y, max_norm):
    total, norms = {k: torch.zeros_like(p) for k, p in params.items()}, []
    for i in range(len(x)):
        grads = torch.func.grad(loss)(params, x[i : i + 1], y[i : i + 1])
        norms.append(torch.sqrt(sum(g.square().sum() for g in grads.values())))
        total = {k: total[k] + g * (max_norm / norms[-1]).clamp(max=1) for k, g in grads.items()}
    return total, torch.stack(norms)


def assert_close(got, want):
    assert got.keys() == want.keys()
    for k in want:
        assert got[k].dtype == want[k].dtype
        torch.testing.assert_close(got[k], want[k], rtol=1e-4, atol=2e-5 * float(want[k].abs().max()) + 1e-7)


@pytest.mark.parametrize(
    "name",
    marked(MODELS, quick=("linear",)),
)
def test_modules_take_the_factored_path(name):
    _, params, x, y, loss, factored = set_up(name)
    want, norms = one_by_one(loss, params, x, y, 0.5)
    fun = mt.clipped_grad(loss, l2_clip_norm=0.5, batch_argnums=(1, 2), return_grad_norms=True)
    got, aux = fun(params, x, y)
    assert_close(got, want)
    torch.testing.assert_close(aux.grad_norms, norms, rtol=1e-4, atol=1e-6)
    explanation = fun.explain(params, x, y)
    paths = {k.removeprefix("['").removesuffix("']"): p.path for k, p in explanation.paths.items()}
    assert {k: paths[k] for k in factored} == dict.fromkeys(factored, "factored"), str(explanation)
    assert "materialised" not in paths.values(), str(explanation)


@pytest.mark.parametrize(
    ("model", "shape"), [pytest.param(Places(), (3, 8), marks=pytest.mark.slow), (Standardised(), (6, 3, 3))]
)
def test_parameters_that_are_sliced_or_standardised(model, shape):
    loss = lambda p, x: torch.tanh(torch.func.functional_call(model, p, (x,))).square().mean()
    params, x = {k: p.detach() for k, p in model.named_parameters()}, torch.randn(ROWS, *shape)
    grads = [torch.func.grad(loss)(params, row[None]) for row in x]
    norms = torch.stack([mt.global_norm(g) for g in grads])
    bound = float(norms.median())
    want = {k: sum(g[k] * min(1, bound / float(n)) for g, n in zip(grads, norms, strict=True)) for k in params}
    fun = mt.clipped_grad(loss, l2_clip_norm=bound, return_grad_norms=True)
    got, aux = fun(params, x)
    assert_close(got, want)
    torch.testing.assert_close(aux.grad_norms, norms, rtol=1e-4, atol=1e-6)
    explanation = fun.explain(params, x)
    assert "materialised" not in {p.path for p in explanation.paths.values()}, str(explanation)
    assert fun.explain(params, x) == explanation


def by_hand(grads):
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    return {k: g * (0.5 / norm).clamp(max=1) for k, g in grads.items()}


TRANSFORMS = {
    "by a number": lambda: mt.clip_by_global_norm(0.5),
    "by a tensor": lambda: mt.clip_by_global_norm(torch.tensor(0.5)),
    "by hand": lambda: by_hand,
    "by a function of the norm": lambda: mt.rescale_by_norm(lambda n: torch.clamp(0.5 / n, max=1.0)),
}


@pytest.mark.parametrize("name", marked(TRANSFORMS, quick=("by hand",)))
def test_transforms_of_micro_grad(name):
    _, params, x, y, loss, _ = set_up("linear")
    want, norms = one_by_one(loss, params, x, y, 0.5)
    options = {"batch_argnums": (1, 2), "microbatch_size": 3, "metrics_fn": mt.global_norm}
    fun = mt.micro_grad(loss, transform_fn=TRANSFORMS[name](), **options)
    got, aux = fun(params, x, y)
    assert_close(got, want)
    torch.testing.assert_close(aux.metrics, norms)
    paths = {k: p.path for k, p in fun.explain(params, x, y).paths.items()}
    assert paths["['0.weight']"] == paths["['3.weight']"] == "factored"


def test_a_transform_clips_a_tree_on_its_own():
    grads = {"w": torch.ones(3, 4), "b": torch.tensor([3.0, -4.0])}
    torch.testing.assert_close(mt.global_norm(grads), torch.tensor(37.0).sqrt())
    torch.testing.assert_close(mt.global_norm(mt.clip_by_global_norm(0.01)(grads)), torch.tensor(0.01))


@pytest.mark.parametrize("dtype", marked([torch.complex64, torch.complex128], quick=(torch.complex128,)))
def test_complex_gradients_count_in_norms_and_are_clipped(dtype):
    grads = {"z": torch.tensor([3 + 4j, -12j], dtype=dtype), "w": torch.tensor([84.0])}
    norm = torch.nn.utils.get_total_norm([grads["z"], grads["w"]])
    torch.testing.assert_close(mt.global_norm(grads), norm.to(mt.global_norm(grads).dtype))
    for transform in (mt.clip_by_global_norm(1.0), mt.rescale_by_norm(lambda n: 1 / n)):
        clipped = transform(grads)
        assert clipped["z"].dtype == dtype
        torch.testing.assert_close(clipped, {k: (g / 85).to(g.dtype) for k, g in grads.items()})

    x, z = torch.randn(3, 4), torch.randn(4, dtype=dtype)
    loss = lambda z, x: (x.to(dtype) * z).abs().pow(2).sum()
    each = [torch.func.grad(loss)(z, row[None]) for row in x]
    for clip in (mt.clip_by_global_norm(0.5), lambda g: g * (0.5 / g.abs().square().sum().sqrt()).clamp(max=1)):
        got, aux = mt.micro_grad(loss, transform_fn=clip, metrics_fn=mt.global_norm, microbatch_size=1)(z, x)
        norms = torch.stack([g.norm() for g in each])
        torch.testing.assert_close(aux.metrics, norms)
        torch.testing.assert_close(got, sum(g * min(1, 0.5 / float(n)) for g, n in zip(each, norms, strict=True)))


def test_a_complex_parameter_beside_one_of_half_precision_is_refused_by_name():
    model = torch.nn.ParameterDict({"w": torch.ones(2, dtype=torch.bfloat16), "z": torch.ones(2, dtype=torch.cfloat)})
    with pytest.raises(TypeError, match=r"'z'\] is complex64; clipping needs parameters of a real floating-point type"):
        mt.clipped_backward(model, lambda m, x: (m["z"].abs() * m["w"] * x).sum(), max_grad_norm=1.0)(torch.ones(2, 2))


def test_clip_norms_change_without_compiling_anew():
    calls = []

    def loss(w, x):
        calls.append(1)
        return (x @ w).sum()

    x, w = torch.randn(3, 4), torch.ones(4, 2)
    bound = torch.tensor(1.0)
    funs = [mt.clipped_grad(loss, l2_clip_norm=bound), mt.micro_grad(loss, transform_fn=mt.clip_by_global_norm(bound))]
    for fun in funs:
        fun(w, x)
        calls.clear()
        for value in (0.5, 2.0):
            bound.fill_(value)
            got = fun(w, x)
            scale = (value / (x.norm(dim=1) * 2**0.5)).clamp(max=1)
            torch.testing.assert_close(got[0] if isinstance(got, tuple) else got, (scale @ x)[:, None].expand(4, 2))
        assert not calls


def test_a_clip_norm_that_becomes_negative_gives_nan():
    x, w, bound = torch.randn(3, 4), torch.ones(4, 2), torch.tensor(1.0)
    loss = lambda w, x: (x @ w).sum()
    funs = [mt.clipped_grad(loss, l2_clip_norm=bound), mt.micro_grad(loss, transform_fn=mt.clip_by_global_norm(bound))]
    for value in (-1.0, 0.0, math.nan):
        bound.fill_(value)
        got = [funs[0](w, x), funs[1](w, x)[0]]
        assert all(g.isnan().all() for g in got)


@pytest.mark.parametrize("microbatch_size", marked([None, 2], quick=(None,)))
def test_padding_may_hold_what_an_example_must_not(microbatch_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 4))
    ids, labels, share = torch.randint(5, (6, 2)), torch.randint(4, (6,)), torch.rand(6)
    padding = torch.tensor([True, False, False, True, False, True])

    def loss(model, ids, labels, share):
        out = model(ids)
        return F.cross_entropy(out, labels) + F.binary_cross_entropy(out[:, 0].sigmoid(), share)

    backward = mt.clipped_backward(model, loss, max_grad_norm=1.0, microbatch_size=microbatch_size)
    backward(ids[~padding], labels[~padding], share[~padding])
    want = [p.grad for p in model.parameters()]
    ids[padding], labels[padding], share[padding] = 5, -1, 2.0
    model.zero_grad()
    aux = backward(ids, labels, share, is_padding_example=padding)
    assert len(aux.values) == 3
    torch.testing.assert_close([p.grad for p in model.parameters()], want)
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|between 0 and 1"):  # whichever comes first
        backward(ids, labels, share, is_padding_example=torch.zeros(6, dtype=torch.bool))
    ids[:], labels[:], share[:] = -7, -1, -2.0
    with pytest.raises(ValueError, match="empty"):
        backward(ids, labels, share, is_padding_example=torch.ones(6, dtype=torch.bool))


def test_padding_nan_frozen_and_empty():
    model, params, x, y, loss, _ = set_up("linear")
    want, _ = one_by_one(loss, params, x, y, 0.5)
    fun = mt.clipped_grad(loss, l2_clip_norm=0.5, batch_argnums=(1, 2))
    bad, labels = torch.cat([x, torch.full((2, 9), math.nan)]), torch.cat([y, y[:2]])
    assert_close(fun(params, bad, labels), want)
    padding = torch.arange(6) >= 4
    assert_close(fun(params, bad, labels, is_padding_example=padding), want)
    assert_close(fun(params, x[:0], y[:0]), {k: torch.zeros_like(p) for k, p in params.items()})
    named = dict(model.named_parameters())
    named["0.weight"].requires_grad_(False)
    got = fun(named, x, y)
    assert not got["0.weight"].any()
    assert got["3.weight"].any()


def test_backward_writes_gradients_with_noise():
    model, params, x, y, loss, _ = set_up("linear")
    want, norms = one_by_one(loss, params, x, y, 0.5)
    criterion = lambda model, x, y: F.cross_entropy(model(x), y)
    aux = mt.clipped_backward(model, criterion, max_grad_norm=0.5)(x, y)
    assert_close({k: p.grad for k, p in model.named_parameters()}, {k: g / ROWS for k, g in want.items()})
    torch.testing.assert_close(aux.grad_norms, norms)
    torch.testing.assert_close(aux.values, F.cross_entropy(model(x), y, reduction="none").detach())

    model[0].bias.requires_grad_(False)
    model[0].bias.grad = None
    options = {"max_grad_norm": 0.5, "noise_multiplier": 3.0, "expected_batch_size": 8}
    noisy = mt.clipped_backward(model, criterion, generator=torch.Generator().manual_seed(1), **options)
    runs = []
    for batch in ((x, y), (x[:0], y[:0])):
        model.zero_grad()
        noisy(*batch)
        runs.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
    assert model[0].bias.grad is None
    generator = torch.Generator().manual_seed(1)
    for grads, total in zip(runs, (want, {k: torch.zeros_like(g) for k, g in want.items()}), strict=True):
        expected = {k: (total[k] + 1.5 * torch.randn(total[k].shape, generator=generator)) / 8 for k in grads}
        if total is not want:  # with a parameter frozen, the norms of the first run are smaller
            assert_close(grads, expected)
    model.zero_grad()
    again = mt.clipped_backward(model, criterion, generator=torch.Generator().manual_seed(1), **options)
    again(x, y)
    assert_close({k: p.grad for k, p in model.named_parameters() if p.grad is not None}, runs[0])


@pytest.mark.parametrize("dtype", marked([torch.float16, torch.bfloat16], quick=(torch.float16,)))
def test_half_precision_holds_the_mean_of_what_does_not_fit_it(dtype):
    x = torch.full((256, 4), 400.0)
    model = nn.Linear(4, 1).to(dtype)
    model.bias.data = model.bias.data.float()
    criterion = lambda model, x: (x.to(model.weight.dtype) @ model.weight.T).float().sum() + model.bias.sum()
    for size in (None, 64):
        model.zero_grad()
        mt.clipped_backward(model, criterion, max_grad_norm=1000.0, microbatch_size=size)(x)
        assert model.weight.grad.dtype == dtype
        assert model.bias.grad.dtype == torch.float32
        torch.testing.assert_close(model.weight.grad.float(), torch.full((1, 4), 400.0))
    loss = lambda w, x: (w * x.to(w.dtype)).sum().float()
    for divisor, clip, want in ((256.0, 1000.0, 400.0), (70000.0, 1.0, 0.5 * 256 / 70000)):
        grad = mt.clipped_grad(loss, l2_clip_norm=clip, normalize_by=divisor)(torch.ones(4, dtype=dtype), x)
        torch.testing.assert_close(grad.float(), torch.full((4,), want), rtol=1e-2, atol=0)
    # Noise of standard deviation 1e5 is added before the sum is divided.
    model.zero_grad()
    norm = torch.tensor(1000.0, dtype=dtype)
    options = {"noise_multiplier": 100.0, "expected_batch_size": 1e5}
    wide = nn.Linear(400, 1, bias=False).to(dtype)
    criterion = lambda model, x: model(x.to(model.weight.dtype)).float().sum()
    generator = torch.Generator().manual_seed(0)
    mt.clipped_backward(wide, criterion, max_grad_norm=norm, generator=generator, **options)(torch.zeros(2, 400))
    assert 0.8 < wide.weight.grad.float().std() < 1.2


def test_factors_of_norms_are_real_numbers():
    w, x = torch.ones(4), torch.ones(3, 4)
    loss = lambda w, x: (w * x).sum()
    for scale, error, message in (
        (lambda n: n * 1j, TypeError, "must return a real number"),
        (lambda n: n[None], ValueError, "must return a number, got shape"),
    ):
        transform = mt.rescale_by_norm(scale)
        with pytest.raises(error, match=message):
            transform(w)
        with pytest.raises(error, match=message):
            mt.micro_grad(loss, transform_fn=transform)(w, x)


def test_backward_adds_to_what_is_there():
    model, params, x, y, loss, _ = set_up("linear")
    want, _ = one_by_one(loss, params, x, y, 0.5)
    criterion = lambda model, x, y: F.cross_entropy(model(x), y)
    backward = mt.clipped_backward(model, criterion, max_grad_norm=0.5)
    plain = {k: torch.randn_like(p) for k, p in model.named_parameters() if k != "0.bias"}
    for k, grad in plain.items():
        model.get_parameter(k).grad = grad.clone()
    held = model[0].weight.grad
    for calls in (1, 2):
        backward(x, y)
        expected = {k: calls * g / ROWS + plain.get(k, 0) for k, g in want.items()}
        assert_close({k: p.grad for k, p in model.named_parameters()}, expected)
    assert model[0].weight.grad is held


def test_noise_is_added_once_a_step():
    model, _, x, y, _, _ = set_up("linear")
    criterion = lambda model, x, y: F.cross_entropy(model(x), y)
    other = mt.clipped_backward(model, criterion, max_grad_norm=0.5)
    backward = mt.clipped_backward(model, criterion, max_grad_norm=0.5, noise_multiplier=1.0)
    other(x, y)
    backward(x, y)  # to a gradient of another loss
    before = {k: p.grad.clone() for k, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"a step takes noise once.*zero_grad\(\).*microbatch_size"):
        backward(x, y)
    assert_close({k: p.grad for k, p in model.named_parameters()}, before)
    for set_to_none in (False, True):
        model.zero_grad(set_to_none)
        backward(x, y)


@pytest.mark.parametrize(
    ("real", "microbatch_size"),
    crossed([[True] * 4 + [False] * 3, [False, True, False, True, True, False, True]], [None, 2]),
)
def test_backward_counts_no_padding(real, microbatch_size):
    model, params, x, y, loss, _ = set_up("linear")
    want, norms = one_by_one(loss, params, x, y, 0.5)
    criterion = lambda model, x, y: F.cross_entropy(model(x), y)
    rows = torch.tensor(real)
    padded, labels = torch.full((7, 9), math.nan), torch.zeros(7, dtype=torch.long)
    padded[rows], labels[rows] = x, y
    backward = mt.clipped_backward(model, criterion, max_grad_norm=0.5, microbatch_size=microbatch_size)
    aux = backward(padded, labels, is_padding_example=~rows)
    assert_close({k: p.grad for k, p in model.named_parameters()}, {k: g / ROWS for k, g in want.items()})
    torch.testing.assert_close(aux.grad_norms, norms)
    torch.testing.assert_close(aux.values, F.cross_entropy(model(x), y, reduction="none").detach())
    model.zero_grad()
    with pytest.raises(ValueError, match="the batch is empty"):
        backward(padded, labels, is_padding_example=torch.ones(7, dtype=torch.bool))


@pytest.mark.slow
def test_memory_is_that_of_the_plain_gradient():
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), *hidden, nn.Linear(128, 10))
    x, y = torch.randn(64, 32), torch.randint(10, (64,))
    loss = lambda p, x, y: F.cross_entropy(torch.func.functional_call(model, p, (x,)), y, reduction="sum")
    params = {k: p.detach() for k, p in model.named_parameters()}
    plain = mt.as_torch(lambda p, x, y: jax.grad(mt.as_jax(loss))(p, x, y))
    fun = mt.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    used = [f.compiled(params, x, y).memory_analysis().temp_size_in_bytes for f in (fun, plain)]
    # Inputs and cotangents of each layer are kept until the norms are known; of GELU the plain gradient keeps less.
    assert used[0] <= 1.4 * used[1]
    assert used[0] <= 1.1 * 2 * 4 * 64 * 128 * 4  # two arrays for each of four layers


def test_bad_input():
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss = lambda p, x: torch.func.functional_call(norm, p, (x,)).sum()
    params = {k: p.detach() for k, p in norm.named_parameters()}
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) normalises over the batch in training mode"):
        mt.clipped_grad(loss, l2_clip_norm=1.0)(params, x)
    with pytest.raises(ValueError, match="normalises over the batch"):
        mt.clipped_backward(norm, lambda model, x: model(x).sum(), max_grad_norm=1.0)(x)

    class Trainer:
        def __init__(self):
            self.model = norm

        def loss(self, p, x):
            return torch.func.functional_call(self.model, p, (x,)).sum()

    within = {"models": [norm]}
    for elsewhere in (Trainer().loss, lambda p, x: within["models"][0](x).sum() * p["0.bias"].sum()):
        with pytest.raises(ValueError, match="normalises over the batch"):
            mt.clipped_grad(elsewhere, l2_clip_norm=1.0)(params, x)
    norm.eval()
    assert mt.clipped_grad(loss, l2_clip_norm=1.0)(params, x)["0.weight"].shape == (4, 4)
    plain = lambda p, x: (x @ p["w"]).sum()
    with pytest.raises(ValueError, match="l2_clip_norm must be positive"):
        mt.clipped_grad(plain, l2_clip_norm=torch.tensor(0.0))
    with pytest.raises(ValueError, match="max_norm must be positive"):
        mt.clip_by_global_norm(-1.0)
    with pytest.raises(ValueError, match="prefix of the gradients' tree"):
        mt.clipped_grad(plain, l2_clip_norm={"v": 1.0})({"w": torch.ones(4, 2)}, x)
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(TypeError, match=r"clipping needs|holds no floating-point array"):
            mt.clipped_grad(plain, l2_clip_norm=1.0)({"w": torch.ones(4, 2, dtype=dtype)}, x)
    with pytest.raises(ValueError, match="noise_multiplier must not be negative"):
        mt.clipped_backward(norm, loss, max_grad_norm=1.0, noise_multiplier=-1.0)
    with pytest.raises(ValueError, match="the batch is empty"):
        mt.clipped_backward(norm[0], lambda model, x: model(x).sum(), max_grad_norm=1.0)(x[:0])
    with pytest.raises(TypeError, match="scale_fn must be a function"):
        mt.rescale_by_norm(2.0)


@pytest.mark.parametrize("transform", [mt.micro_grad, lambda fun: mt.clipped_grad(fun, l2_clip_norm=1.0)])
def test_a_batch_that_is_taken_by_keyword_only(transform):
    """What an example draws does not depend on how it is passed either."""

    def loss(params, rows):
        return (F.dropout(rows, 0.5) @ params["w"]).square().mean()

    params, rows = {"w": torch.randn(5)}, torch.randn(ROWS, 5)
    torch.manual_seed(1)
    expected = transform(loss)(params, rows)
    torch.manual_seed(1)
    result = transform(lambda params, *, rows: loss(params, rows))(params, rows=rows)
    torch.testing.assert_close(result, expected)


def test_hooks_of_all_modules_run_for_those_of_the_user_alone():
    model, x, seen = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]]), []
    loss = lambda m, x: m(x).square().sum()

    def halve(module, inputs, output):
        seen.append(type(module))
        return output * 0.5

    module = torch.nn.modules.module
    hooks = [
        module.register_module_forward_hook(halve),
        module.register_module_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,)),
    ]
    try:
        expected = torch.autograd.grad(loss(model, x), model.weight)[0]
        aux = mt.clipped_backward(model, loss, max_grad_norm=1e6)(x)
        torch.testing.assert_close(aux.values[0], loss(model, x))
    finally:
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(model.weight.grad, expected)
    assert set(seen) == {torch.nn.Linear}
