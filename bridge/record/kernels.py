"""Which dtypes torch's kernels take: asked of the kernels, on tensors of a few elements.

The form of what an op returns comes from torch's meta functions, which take dtypes that no kernel does: whole numbers
in a softmax, a product of matrices of two dtypes. XLA would compute something there, where eager torch raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from ..base import torch_internals as ti
from ..lowerings.half import HALF
from ..lowerings.signatures import Arguments, Keywords

_ABOUT_DTYPES = re.compile(
    r"dtype|not implemented for|scalar type|floating[- ]point|data type|integral|not supported|type (Byte|Long|Bool)"
)
_ANSWERS: dict[object, Exception | torch.dtype | None] = {}
_MOST = 4096


def kernel_dtype(
    func: OpOverload, args: Arguments, kwargs: Keywords, tensors: Sequence[torch.Tensor]
) -> torch.dtype | None:
    """Return the dtype of the tensor that torch's kernel gives for tensors of several dtypes, or of whole numbers.

    Raises what the kernel raises. None where nothing is to be asked, as one floating dtype is taken everywhere.
    """
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1 and all(d.is_floating_point or d.is_complex for d in dtypes):
        return None
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return None
    if any(t.device.type != "cpu" and t.dtype in HALF for t in tensors):
        return None  # the kernels asked are those of the CPU
    leaves, spec = ti.torch_pytree.tree_flatten((args, kwargs))
    key = func, str(spec), tuple(_form(x) for x in leaves)
    if key not in _ANSWERS:
        if len(_ANSWERS) >= _MOST:
            _ANSWERS.clear()
        _ANSWERS[key] = _ask(func, args, kwargs)
    answer = _ANSWERS[key]
    if isinstance(answer, Exception):
        raise type(answer)(*answer.args)
    return answer


def _form(leaf: object) -> object:
    return (leaf.dtype, _few(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _few(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if n < 5 else 4 - n % 2 for n in shape)  # even or odd as before: some ops halve an axis


def _ask(func: OpOverload, args: Arguments, kwargs: Keywords, wide: bool = False) -> Exception | torch.dtype | None:
    def make(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros(_few(t.shape), dtype=torch.int64 if wide and t.dtype == torch.int32 else t.dtype)

    try:
        with ti.no_dispatch(), torch.device("cpu"):
            result = func(*ti.map_tensors(make, args), **ti.map_tensors(make, kwargs))
    except Exception as error:  # about the few elements, if not about dtypes
        if not _ABOUT_DTYPES.search(str(error)):
            return None
        dtypes = {t.dtype for t in ti.torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if not wide and torch.int32 in dtypes and any(d.is_floating_point for d in dtypes):
            return _ask(func, args, kwargs, wide=True)  # labels and indices of JAX's
        return error.with_traceback(None)
    return result.dtype if isinstance(result, torch.Tensor) else None
