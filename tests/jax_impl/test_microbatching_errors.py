"""What microbatching refuses: one error of a standard kind, before anything runs, that names argument and way out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microtome.jax_impl import AccumulationType, micro_grad, micro_vmap, microbatch, reshape_batch_axis, weighted_mean

SUM, MEAN, CONCAT = AccumulationType.SUM, AccumulationType.MEAN, AccumulationType.CONCAT
ROWS, WEIGHTS = jnp.ones((6, 2)), jnp.ones(2)


def fun(params, batch, *, flag=0):
    return batch["x"].sum() * params


def loss(params, batch):
    return (params * batch).sum()


def run(batch, **options):
    return microbatch(fun, **({"argnums": 1, "microbatch_size": 2} | options))(1.0, batch)


def joined(output, accumulator, size=2, **options):
    return microbatch(output, 0, size, accumulator, **options)(ROWS)


# What is wrong when the function is wrapped.
OPTIONS = {
    "size zero": (ValueError, "microbatch_size must be positive, got 0. Pass None", lambda: microbatch(fun, 1, 0)),
    "size negative": (ValueError, "microbatch_size must be positive, got -2",
        lambda: micro_vmap(fun, microbatch_size=-2)),
    "size float": (TypeError, "microbatch_size must be a positive int, or None", lambda: microbatch(fun, 1, 2.0)),
    "size bool": (TypeError, "got True of type bool", lambda: micro_grad(fun, microbatch_size=True)),
    "remainder": (ValueError, "remainder must be one of 'error', 'run', got 'drop'",
                  lambda: microbatch(fun, 1, 2, remainder="drop")),
    "partition": (ValueError, "partition must be one of 'strided', 'contiguous', got 'x'",
                  lambda: micro_grad(fun, partition="x")),
    "no callable": (TypeError, "fun must be callable, got 3", lambda: microbatch(3, 0, 2)),
    "argnums range": (ValueError, "argnums=2 is out of range: fun takes 2 positional arguments (params, batch)",
                      lambda: microbatch(fun, 2, 2)),
    "argnums negative": (ValueError, "argnums=-3 is out of range", lambda: micro_grad(fun, argnums=-3)),
    "batch_argnums range": (ValueError, "batch_argnums=4 is out of range", lambda: micro_grad(fun, batch_argnums=4)),
    "argnums type": (TypeError, "argnums must be an int or a sequence of ints, got 1.0",
        lambda: microbatch(fun, 1.0, 2)),
    "argnames unknown": (ValueError, "argnames names 'z', which is no argument of fun: ['batch', 'flag', 'params']",
                         lambda: microbatch(fun, (), 2, argnames="z")),
    "argnames type": (TypeError, "argnames must be a string", lambda: microbatch(fun, (), 2, argnames=(1,))),
    "in_axes length": (ValueError, "in_axes must have one entry for each of argnums and argnames, 1, got 2: (0, 0)",
                       lambda: microbatch(fun, 1, 2, in_axes=(0, 0))),
    "in_axes none": (TypeError, "in_axes must be an int or a sequence", lambda: microbatch(fun, 1, 2, in_axes=None)),
    "in_axes of vmap": (TypeError, "in_axes must be an int or a sequence", lambda: micro_vmap(fun, None)),
    "out_axes": (NotImplementedError, "out_axes must be 0, got 1", lambda: micro_vmap(fun, 0, 1)),
    "accumulator": (TypeError, "accumulator must be an AccumulationType or an Accumulator of microtome, got 'sum'",
                    lambda: microbatch(fun, 1, 2, "sum")),
    "accumulator leaf": (TypeError, "accumulator['b'] must be an AccumulationType",
        lambda: micro_vmap(fun, accumulator={"b": 1})),
    "real negative": (ValueError, "num_real_microbatches must not be negative, got -1",
                      lambda: microbatch(fun, 1, 2, num_real_microbatches=-1)),
    "real float": (TypeError, "num_real_microbatches must be an int or an integer array of shape (), got 1.0",
                   lambda: microbatch(fun, 1, 2, num_real_microbatches=1.0)),
    "real float array": (TypeError, "got float32[]", lambda: microbatch(fun, 1, 2, num_real_microbatches=jnp.ones(()))),
    "real vector": (TypeError, "got int32[2]",
        lambda: microbatch(fun, 1, 2, num_real_microbatches=np.ones(2, np.int32))),
}  # fmt: skip

# What is wrong with the arguments of a call.
CALLS = {
    "division": (ValueError, "batch_size=6 must be divisible by microbatch_size=4: 2 rows are left over. "
                 "Pass remainder='run'", lambda: run({"x": ROWS}, microbatch_size=4)),
    "larger than the batch": (ValueError, "batch_size=6 must be divisible by microbatch_size=8",
                              lambda: micro_vmap(loss, microbatch_size=8)(ROWS, ROWS)),
    "lengths": (ValueError, "batch arguments must have the same number of rows: batch['x'] has 6 (axis 0), "
                "batch['y'] has 4 (axis 0)", lambda: run({"x": ROWS, "y": ROWS[:4]})),
    "lengths of arguments": (ValueError, "params has 2 (axis 0), batch has 6 (axis 0)",
                             lambda: micro_vmap(loss)(WEIGHTS, ROWS)),
    "missing": (TypeError, "argument 'batch', which argnums or argnames names, is missing from the call",
                lambda: microbatch(fun, 1, 2)(0)),
    "twice": (ValueError, "names the argument 'batch' twice",
              lambda: microbatch(fun, 1, 2, argnames="batch")(0, {"x": ROWS})),
    "beyond *args": (TypeError, "argument number 3, which argnums or argnames names, is missing",
                     lambda: microbatch(lambda *args: args[0], 3, 2)(ROWS)),
    "no leaves": (ValueError, "the batch arguments (batch) hold no array with a batch axis", lambda: run({})),
    "all shared": (ValueError, "hold no array with a batch axis", lambda: run({"x": ROWS}, in_axes=(None,))),
    "no axis": (ValueError, "batch['x'] needs a batch axis, but has shape ()", lambda: run({"x": jnp.ones(())})),
    "number": (ValueError, "batch['x'] needs a batch axis", lambda: run({"x": 3.0})),
    "string": (TypeError, "batch['x'] must be an array, got a str", lambda: run({"x": "abc"})),
    "axis": (ValueError, "batch['x'] has shape (6, 2), so its batch axis cannot be 2",
        lambda: run({"x": ROWS}, in_axes=2)),
    "in_axes tree": (ValueError, "in_axes of batch must be an int, None or a prefix of its tree",
                     lambda: run({"x": ROWS}, in_axes=({"y": 0},))),
    "in_axes leaf": (TypeError, "in_axes of batch must hold ints or None, got 0.5",
                     lambda: run({"x": ROWS}, in_axes=(0.5,))),
    "in_axes short": (ValueError, "in_axes must have one entry for each positional argument, 2, got 1",
                      lambda: micro_vmap(loss, (0,))(ROWS, ROWS)),
    "too many real": (ValueError, "num_real_microbatches=4 exceeds the number of microbatches, 3",
                      lambda: run({"x": ROWS}, num_real_microbatches=4)),
    "only integers": (TypeError, "params is to be differentiated, but holds no floating-point array, only int32, int8. "
                      "Cast it to a float", lambda: micro_grad(loss)({"a": 1, "b": jnp.int8(1)}, ROWS)),
    "keys": (TypeError, "params holds random keys", lambda: micro_grad(loss)((WEIGHTS, jax.random.key(0)), ROWS)),
    "string parameter": (TypeError, "params['a'] must be an array, got a str",
        lambda: micro_grad(loss)({"a": "s"}, ROWS)),
    "left at default": (TypeError, "argument 1, which argnums names, was left at its default",
                        lambda: micro_grad(lambda b, p=1.0: b.sum() * p, argnums=1, batch_argnums=0)(ROWS)),
    "axis to split": (ValueError, "tree['a'] has shape (6, 2), so its batch axis cannot be 2",
                      lambda: reshape_batch_axis({"a": ROWS}, 2, 2)),
    "division to split": (ValueError, "must be divisible by microbatch_size=4", lambda: reshape_batch_axis(ROWS, 4)),
}  # fmt: skip

# What is wrong with the function's output, known once it is traced.
OUTPUTS = {
    "accumulator arity": (ValueError, "the accumulator tree must be a prefix of the output's tree",
                          lambda: joined(lambda b: (b, b), (SUM, SUM, SUM))),
    "accumulator keys": (ValueError, "Accumulators: {'b': '*'}; output: {'a': '*'}",
                         lambda: joined(lambda b: {"a": b}, {"b": SUM})),
    "mean of integers": (TypeError, "output['n'] is int32, which has no mean of its own dtype. Use SUM or CONCAT",
                         lambda: joined(lambda b: {"n": (b > 0).sum()}, MEAN)),
    "mean of booleans": (TypeError, "output is bool",
                         lambda: micro_vmap(lambda b: b.sum() > 0, accumulator=AccumulationType.RUNNING_MEAN)(ROWS)),
    "mean of integer gradients": (TypeError, "output[0] is int32",

        lambda: micro_grad(loss, transform_fn=lambda g: g.astype(int), accumulator=MEAN)(WEIGHTS, ROWS)),
    "sum of rows": (ValueError, "output has shape (4, 2) from a full microbatch and (2, 2) from the rows left over, so "
                    "SUM cannot join them. Use CONCAT", lambda: joined(lambda b: b, SUM, 4, remainder="run")),
    "another tree": (ValueError, "fun must return the same tree for the rows left over",
                     lambda: joined(lambda b: (b,) if len(b) == 4 else b, CONCAT, 4, remainder="run")),
    "no pair": (TypeError, "weighted_mean() needs a pair (value, weight)",
        lambda: joined(lambda b: b.sum(), weighted_mean())),
    "weight of rows": (ValueError, "output[1] must be a weight of shape (), got (2,)",
                       lambda: joined(lambda b: (b.sum(), b[:, 0]), weighted_mean())),
    "weight of an example": (ValueError, "output[1] must be a weight of shape (), got (2,)",
                             lambda: micro_vmap(lambda b: (b.sum(), b), accumulator=weighted_mean())(ROWS)),
    "weight tree": (TypeError, "the weight of weighted_mean() must be one array",
                    lambda: joined(lambda b: (b.sum(), None), weighted_mean())),
    "weight complex": (TypeError, "output[1] is complex64; a weight must be real",
                       lambda: joined(lambda b: (b.sum(), 1j * b.sum()), weighted_mean())),
    "value integer": (TypeError, "output[0] is int32, which has no weighted mean",
                      lambda: joined(lambda b: (b.astype(int).sum(), 1.0), weighted_mean())),
    "loss shape": (TypeError, "fun must return a scalar loss for each example, got shape (1,). Reduce it",
                   lambda: micro_grad(lambda p, b: (p * b).sum(-1))(WEIGHTS, ROWS)),
    "loss tree": (TypeError, "pass has_aux=True and return (loss, aux)",
                  lambda: micro_grad(lambda p, b: ((p * b).sum(), b))(WEIGHTS, ROWS)),
    "loss without aux": (TypeError, "has_aux=True needs fun to return (loss, aux)",
                         lambda: micro_grad(loss, has_aux=True)(WEIGHTS, ROWS)),
    "loss integer": (TypeError, "fun must return a real floating-point loss, got int32",
                     lambda: micro_grad(lambda p, b: 1)(WEIGHTS, ROWS)),
    "loss complex": (TypeError, "fun must return a real floating-point loss, got complex64",
                     lambda: micro_grad(lambda p, b: 1j * (p * b).sum())(WEIGHTS, ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("case", [*OPTIONS, *CALLS, *OUTPUTS])
def test_refused(case):
    kind, message, call = (OPTIONS | CALLS | OUTPUTS)[case]
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is kind


def test_nothing_ran_and_nothing_changed():
    ran = []

    def watched(params, batch):
        jax.debug.callback(lambda: ran.append(1))
        return batch

    params, batch = np.ones(2), {"x": np.ones((6, 2)), "y": [np.ones((6, 2))]}
    with pytest.raises(ValueError, match="SUM cannot join"):
        microbatch(watched, 1, 4, SUM, remainder="run")(params, batch)
    with pytest.raises(TypeError, match="scalar loss"):
        micro_grad(watched)(params, batch["x"])
    jax.effects_barrier()
    assert not ran
    microbatch(lambda params, batch: batch.pop("x").sum(), 1, 2)(params, batch)  # it gets dicts of its own
    assert list(batch) == ["x", "y"]
    assert (batch["x"] == 1).all()
    assert (params == 1).all()
