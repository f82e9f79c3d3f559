"""``torch.utils.checkpoint`` inside traced functions: the values of the plain module, and less memory."""

from __future__ import annotations

import copy
from typing import Any

import jax
import pytest
import torch
from helpers import marked
from torch import nn
from torch.utils.checkpoint import checkpoint

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x).sin()))


class Net(nn.Module):
    def __init__(self, width: int, count: int, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(count)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return nn.Sequential(*self.blocks)(x)
        inner = lambda x: checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)  # nested in the second one
        for block in (self.blocks[0], inner, *self.blocks[2:]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def pair(width: int, count: int, reentrant: bool) -> tuple[Net, Net]:
    torch.manual_seed(0)
    net = Net(width, count, reentrant)
    plain = copy.deepcopy(net)
    plain.reentrant = None
    return net, plain


def loss_of(net: nn.Module) -> Any:
    return lambda params, x: torch.func.functional_call(net, params, (x,)).square().sum()


def assert_close(got: Any, want: Any) -> None:
    for g, w in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


TRANSFORMS = {
    "jax.grad": lambda f: as_torch(jax.grad(as_jax(f))),
    "micro_grad": lambda f: lambda p, x: mt.micro_grad(f, microbatch_size=2)(p, x)[0],
    "clipped_grad": lambda f: mt.clipped_grad(f, l2_clip_norm=1.0),
}
COMPILED = TRANSFORMS | {
    "micro_grad": lambda f: mt.micro_grad(
        f, microbatch_size=4, transform_fn=lambda g: {k: v.clamp(-1, 1) for k, v in g.items()}
    ),
}


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", marked(TRANSFORMS, quick=("jax.grad",)))
def test_the_second_pass_sees_the_parameters_of_the_first(name: str, reentrant: bool) -> None:
    net, plain = pair(3, 2, reentrant)
    others = {k: torch.randn_like(p) for k, p in net.named_parameters()}  # not the module's own
    x = torch.randn(4, 3)
    assert_close(TRANSFORMS[name](loss_of(net))(others, x), TRANSFORMS[name](loss_of(plain))(others, x))


def test_captured_and_trained_modules() -> None:
    net, plain = pair(3, 3, False)
    x = torch.randn(4, 3)
    grad = as_torch(jax.grad(as_jax(lambda x: net(x).square().sum())))(x)
    assert_close(grad, torch.func.grad(lambda x: plain(x).square().sum())(x))
    mt.microbatch(lambda x: net(x).square().sum(), 0, 2)(x).backward()
    plain(x).square().sum().backward()
    assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.slow
def test_clipped_gradients_of_a_module() -> None:
    net, plain = pair(3, 3, False)
    x = torch.randn(4, 3)
    for model in (net, plain):
        mt.clipped_backward(model, lambda model, x: model(x).square().sum(), max_grad_norm=1.0)(x)
    assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("name", marked(COMPILED, quick=("jax.grad",)))
def test_memory_is_saved(name: str) -> None:
    used = []
    x = torch.randn(8, 32, 16)
    for net in pair(16, 6, False):
        params = {k: p.detach() for k, p in net.named_parameters()}
        call = COMPILED[name](loss_of(net))
        used.append(call.compiled(params, x).memory_analysis().temp_size_in_bytes)
    saved, plain = used
    assert saved < 0.75 * plain


def test_a_compiled_module_runs_as_what_it_was_compiled_from() -> None:
    linear = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    for compiled in (torch.compile(linear, backend="eager"), torch.compile(lambda x: linear(x), backend="eager")):
        got = mt.microbatch(lambda x, compiled=compiled: compiled(x).sum(), 0, 1)(x)
        torch.testing.assert_close(got, linear(x).sum())
    linear.compile(backend="eager")
    mt.clipped_backward(linear, lambda model, x: model(x).sum(), max_grad_norm=1.0)(x)
    assert linear.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_a_transformers_model_with_gradient_checkpointing() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=17, n_positions=8, attn_pdrop=0, embd_pdrop=0)
    config.resid_pdrop = 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(17, (3, 5))
    loss = lambda model, ids: model(ids, labels=ids, use_cache=False).loss
    grads = []
    for enabled in (False, True):
        if enabled:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()
        model.zero_grad()
        mt.clipped_backward(model, loss, max_grad_norm=0.1)(ids)
        grads.append([p.grad.clone() for p in model.parameters()])
    assert_close(grads[1], grads[0])
