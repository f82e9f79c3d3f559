"""Single tensors across the two frameworks: every dtype, every layout, who shares memory with whom, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import marked
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from microtome.bridge.base import versions
from microtome.bridge.memory import dtypes, values
from microtome.bridge.memory.dtypes import jax_dtype, torch_dtype
from microtome.bridge.memory.values import (
    array_to_tensor,
    jax_device,
    results_to_tensors,
    tensor_to_array,
    tensors_to_arguments,
    torch_device,
)

DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
ALL_TORCH_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# For each layout, how to get it from a contiguous [4, 6, 2, 32] tensor, and whether the memory can be shared. The last
# axis holds at least 32 bytes of any type, so that [2:] on the first axis stays at a multiple of 64.
SHARED = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "permuted": lambda t: t.permute(2, 0, 3, 1),
    "channels-last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "aligned slice": lambda t: t[2:],
    "flattened": lambda t: t.reshape(-1),
    "size-1 axes": lambda t: t.reshape(-1, 1, 6, 1).transpose(0, 1),
    "size-1 stride": lambda t: t.reshape(1, -1).as_strided((1, 8, 1), (77, 1, 13)),
    "permuted size-1 stride": lambda t: t.reshape(-1).as_strided((96, 1, 16), (1, 5, 96)),
    "0-d": lambda t: t[0, 0, 0, 0],
    "no elements": lambda t: t[:, :0].permute(1, 3, 0, 2),
    "empty": lambda t: torch.empty(0, dtype=t.dtype),
}
COPIED = {
    "strided": lambda t: t[:, ::2],
    "gap": lambda t: t[..., :5],
    "selected": lambda t: t[..., 1],
    "offset": lambda t: t.reshape(-1)[1:],
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "0-d offset": lambda t: t[0, 0, 0, 1],
    "expanded scalar": lambda t: t[0, 0, 0, 0].expand(2, 3),
    "diagonal": lambda t: t[:, :4, 0, 0].diagonal(),
}
LAYOUTS = SHARED | COPIED


def _bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits in the given type, every value of the narrow types among them."""
    size = int(np.prod(shape))
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(size))
    return bits.remainder(2).bool().reshape(shape) if dtype is torch.bool else bits.view(dtype).reshape(shape)


def _torch_bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _assert_same_value(array: jax.Array, tensor: torch.Tensor) -> None:
    """Bit for bit, so that NaNs and the sign of zero count too."""
    assert array.shape == tuple(tensor.shape)
    assert array.dtype == jax_dtype(tensor.dtype)
    assert np.asarray(array).tobytes() == _torch_bits(tensor)


def _shares_memory(array: jax.Array, tensor: torch.Tensor) -> bool:
    return array.unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.fixture(params=["native", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The jaxlib functions and what stands in for them where a release lacks them."""
    if request.param == "public":
        monkeypatch.setattr(values, "native_import", lambda: None)
        monkeypatch.setattr(values, "native_export", lambda: None)
    return request.param


# --- dtypes


def test_the_list_of_dtypes_is_complete() -> None:
    assert {dtype for dtype in ALL_TORCH_DTYPES if dtype in dtypes.TO_JAX} == set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_one_counterpart(dtype: torch.dtype) -> None:
    theirs = jax_dtype(dtype)
    assert str(theirs) == str(dtype).removeprefix("torch.")
    assert theirs.itemsize == dtype.itemsize
    for spelling in (theirs, theirs.type, theirs.name):
        assert torch_dtype(spelling) is dtype


@pytest.mark.parametrize("dtype", sorted(ALL_TORCH_DTYPES - set(DTYPES), key=str), ids=str)
def test_other_torch_dtypes_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"no counterpart of {dtype}: convert"):
        jax_dtype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint2, jnp.float8_e3m4, jax.dtypes.float0, np.str_, ">f4", None])
def test_other_jax_dtypes_are_named(dtype: object) -> None:
    with pytest.raises(TypeError, match="no counterpart of JAX's"):
        torch_dtype(dtype)


def test_random_keys_name_the_way_out() -> None:
    key = jax.random.key(0)
    for wrong in (lambda: torch_dtype(key.dtype), lambda: array_to_tensor(key)):
        with pytest.raises(TypeError, match="key_data"):
            wrong()


# --- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_layout(dtype: torch.dtype) -> None:
    for layout, view in LAYOUTS.items():
        tensor = view(_bytes(dtype, 4, 6, 2, 32))
        array = tensor_to_array(tensor)
        _assert_same_value(array, tensor)
        assert array.committed
        if tensor.numel():
            assert _shares_memory(array, tensor) == (layout in SHARED), layout
        back = array_to_tensor(array)
        assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert _torch_bits(back) == _torch_bits(tensor), layout
        assert back.data_ptr() == array.unsafe_buffer_pointer() or not tensor.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.complex128], ids=str)
def test_both_ways_of_crossing_agree(way: str, dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](_bytes(dtype, 4, 6, 2, 32))
    array = tensor_to_array(tensor)
    _assert_same_value(array, tensor)
    assert _shares_memory(array, tensor) == (layout in SHARED) or not tensor.numel()
    assert _torch_bits(array_to_tensor(array)) == _torch_bits(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_functions_read_the_layout_right(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.arange(4 * 6 * 2 * 32, dtype=torch.float32).reshape(4, 6, 2, 32))
    out = jax.jit(lambda x: (x + 1, jnp.sum(x)))(tensor_to_array(tensor))
    assert torch.equal(array_to_tensor(out[0]), tensor + 1)
    assert torch.equal(array_to_tensor(out[1]), tensor.sum())


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_any_view_crosses(data: st.DataObject) -> None:
    """Chains of views of one buffer: the value is torch's, and what is dense and aligned is never copied."""
    tensor = torch.arange(4 * 3 * 16 * 2, dtype=torch.float32).reshape(4, 3, 16, 2)
    for _ in range(data.draw(st.integers(0, 3))):
        axis = data.draw(st.integers(0, tensor.dim() - 1))
        kind = data.draw(st.sampled_from(["transpose", "slice", "step", "unsqueeze", "expand"]))
        if kind == "transpose":
            tensor = tensor.transpose(0, axis)
        elif kind == "slice":
            start = data.draw(st.integers(0, tensor.shape[axis]))
            tensor = tensor.narrow(axis, start, data.draw(st.integers(0, tensor.shape[axis] - start)))
        elif kind == "step":
            tensor = tensor[(slice(None),) * axis + (slice(None, None, data.draw(st.integers(1, 3))),)]
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(axis)
        elif tensor.shape[axis] == 1:
            tensor = tensor.expand(*[2 if i == axis else -1 for i in range(tensor.dim())])
    array = tensor_to_array(tensor)
    _assert_same_value(array, tensor)
    dense = torch.empty_like(tensor).stride() == tensor.stride()  # torch keeps the strides of dense tensors only
    if tensor.numel() and dense and tensor.data_ptr() % 64 == 0:
        assert _shares_memory(array, tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugation_and_negation_are_carried_out(dtype: torch.dtype) -> None:
    z = torch.randn(3, 4, dtype=dtype, generator=torch.manual_seed(0))
    lazy = {
        "conj": z.conj(),
        "adjoint": z.mH,
        "negated": z.conj().imag,
        "negative view": torch._neg_view(z),
        "both": torch._neg_view(z.conj()),
        "0-d": z.conj()[0, 0],
    }
    for name, tensor in lazy.items():
        assert tensor.is_conj() or tensor.is_neg(), name
        _assert_same_value(tensor_to_array(tensor), tensor)


def test_gradients_inference_mode_parameters_and_subclasses() -> None:
    class Named(torch.Tensor):
        pass

    leaf = torch.randn(4, requires_grad=True, generator=torch.manual_seed(0))
    with torch.inference_mode():
        inferred = torch.ones(4)
    cases = [leaf, leaf * 2, torch.nn.Parameter(torch.ones(4)), torch.nn.Buffer(torch.ones(4)), inferred]
    for tensor in [*cases, torch.ones(4).as_subclass(Named)]:
        array = tensor_to_array(tensor)
        _assert_same_value(array, tensor)
        assert _shares_memory(array, tensor)
        assert not array_to_tensor(array).requires_grad
        with torch.inference_mode():
            assert torch.equal(array_to_tensor(tensor_to_array(tensor)), tensor)


def test_64_bit_types_stay_without_touching_the_setting() -> None:
    assert not jax.config.jax_enable_x64
    for tensor in (torch.tensor(2**40), torch.tensor(1 + 2**-40, dtype=torch.float64)):
        array = tensor_to_array(tensor)
        assert array.dtype == jax_dtype(tensor.dtype)
        assert torch.equal(array_to_tensor(array), tensor)
    assert not jax.config.jax_enable_x64
    with versions.enable_x64():
        assert array_to_tensor(jnp.float64(1) / 3).dtype is torch.float64
    assert not jax.config.jax_enable_x64


_FEW = (torch.bool, torch.int64, torch.uint32, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", marked(DTYPES, quick=_FEW), ids=str)
def test_arrays_made_by_jax(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (2, 0, 3), (1,), (2, 1, 3), (5, 7)]:
        with versions.enable_x64():
            array = jnp.asarray(np.arange(np.prod(shape)).reshape(shape).astype(jax_dtype(dtype)))
        tensor = array_to_tensor(array)
        _assert_same_value(array, tensor)
        assert _shares_memory(array, tensor) or not tensor.numel()
        assert tensor.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arguments_of_compiled_functions(dtype: torch.dtype) -> None:
    """Whatever form an argument takes, the compiled function sees the value and the dtype of the tensor."""
    tensors = [view(_bytes(dtype, 4, 6, 2, 32)) for view in LAYOUTS.values()]
    arguments = tensors_to_arguments(tensors)
    with versions.enable_x64():
        results = jax.jit(lambda *args: args)(*arguments)
    for layout, tensor, argument, result in zip(LAYOUTS, tensors, arguments, results, strict=True):
        _assert_same_value(argument, tensor)
        _assert_same_value(result, tensor)
        if isinstance(argument, np.ndarray) and tensor.numel():
            assert argument.__array_interface__["data"][0] == tensor.data_ptr(), layout
        elif tensor.numel():
            assert _shares_memory(argument, tensor) == (layout in SHARED), layout


def test_arguments_do_not_recompile_for_another_address() -> None:
    buffer = torch.zeros(65)
    fun = jax.jit(lambda x: x + 1)
    for tensor in (buffer[:64], buffer[1:], torch.nn.Parameter(torch.zeros(64)), torch.zeros(64)):
        fun(*tensors_to_arguments([tensor]))
    assert fun._cache_size() == 1


def test_arguments_are_arrays_where_jax_computes_elsewhere() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        (argument,) = tensors_to_arguments([torch.zeros(4)])
    assert isinstance(argument, jax.Array)


def test_lazy_views_as_arguments() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64, generator=torch.manual_seed(0))
    tensors = [z.conj(), z.conj().imag, torch._neg_view(z), z.real.requires_grad_()]
    for argument, tensor in zip(tensors_to_arguments(tensors), tensors, strict=True):
        _assert_same_value(argument, tensor)


# --- who shares memory with whom


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_are_seen_exactly_where_memory_is_shared(layout: str) -> None:
    base = torch.zeros(4, 6, 2, 32)
    tensor = LAYOUTS[layout](base)
    array = tensor_to_array(tensor)
    (base if tensor._is_view() else tensor).fill_(3)
    assert np.all(np.asarray(array) == (3 if layout in SHARED else 0))


def test_memory_outlives_the_other_framework() -> None:
    expected = np.arange(1000.0, dtype=np.float32)
    array = tensor_to_array(torch.arange(1000.0))
    tensor = array_to_tensor(jnp.arange(1000.0))
    fillers = [torch.full((1000,), -1.0) for _ in range(8)]  # would be given memory that was freed
    assert np.array_equal(array, expected)
    assert np.array_equal(tensor.numpy(), expected)
    assert len(fillers) == 8


def test_copy_has_its_own_memory() -> None:
    array = jnp.arange(4.0)
    copied = array_to_tensor(array, copy=True)
    copied.zero_()
    assert np.array_equal(array, np.arange(4.0))


def test_a_crossed_tensor_is_freed() -> None:
    freed = []

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            freed.append(True)

    array = tensor_to_array(torch.ones(4))
    tensor = array_to_tensor(array).as_subclass(Watched)
    del tensor
    assert freed
    assert not array.is_deleted()


def _compiled_results() -> dict[str, object]:
    captured = jnp.arange(4.0)
    constant = np.arange(4.0, dtype=np.float32)
    return {
        "an argument": lambda x: x,
        "an argument and its view": lambda x: (x, x.reshape(2, 2), x),
        "one value twice": lambda x: (lambda y: (y, y))(x + 1),
        "equal values": lambda x: (x + 1, x + 1),
        "a captured array": lambda x: (captured, captured, x),
        "a captured constant": lambda x: (jnp.asarray(constant), x),
        "constants": lambda x: (jnp.zeros(4), jnp.zeros(4), jnp.ones(4), x * 0),
    }


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "op by op"])
@pytest.mark.parametrize("name", _compiled_results())
def test_results_may_be_written(name: str, compiled: bool) -> None:
    """Filling one result with a number of its own leaves inputs, other results and the next call as they were."""
    plain = _compiled_results()[name]
    fun = jax.jit(plain) if compiled else plain
    x = torch.arange(4.0)
    array = tensor_to_array(x)
    expected = [np.array(leaf) for leaf in jax.tree.leaves(fun(array))]
    # Op by op, what the function captured comes back as it is: those arrays count as inputs.
    captured = [cell.cell_contents for cell in plain.__closure__ or () if isinstance(cell.cell_contents, jax.Array)]
    results = results_to_tensors(jax.tree.leaves(fun(array)), inputs=[x, *captured])
    assert all(np.array_equal(result.numpy(), value) for result, value in zip(results, expected, strict=True))
    for number, result in enumerate(results):
        result.fill_(100 + number)
    assert [result.unique().tolist() for result in results] == [[100.0 + n] for n in range(len(results))]
    assert torch.equal(x, torch.arange(4.0))
    again = jax.tree.leaves(fun(array))
    assert all(np.array_equal(leaf, value) for leaf, value in zip(again, expected, strict=True))


def test_results_of_a_compiled_call_are_not_copied() -> None:
    arrays = jax.jit(lambda x: (x, x + 1, jnp.zeros((0, 3)), jnp.zeros((0, 3))))(tensor_to_array(torch.ones(8)))
    pointers = [array.unsafe_buffer_pointer() for array in arrays[:2]]
    assert [tensor.data_ptr() for tensor in results_to_tensors(arrays)[:2]] == pointers


# --- when memory may be written again

_slow = jax.jit(lambda x: (x[0], jax.lax.fori_loop(0, 30, lambda _, c: jnp.sin(c) + x, x)))


def test_inputs_may_be_written_once_any_result_has_crossed() -> None:
    """JAX returns before it has computed; the crossing of the quick result has to wait for the slow one's reads."""
    x = torch.ones(400, 500)
    expected = array_to_tensor(_slow(tensor_to_array(x))[1], copy=True)
    for _ in range(5):
        x.fill_(1.0)
        quick, slow = _slow(tensor_to_array(x))
        array_to_tensor(quick)
        x.fill_(7.0)
        assert torch.equal(array_to_tensor(slow), expected)


def test_arguments_may_be_written_and_freed_once_a_result_has_crossed() -> None:
    buffer = torch.ones(400 * 500 + 1)
    views = [buffer[:-1].view(400, 500), buffer[1:].view(400, 500)]  # one taken as it is, one copied by the call
    expected = array_to_tensor(_slow(*tensors_to_arguments(views[:1]))[1], copy=True)
    for x in views * 3:
        buffer.fill_(1.0)
        quick, slow = _slow(*tensors_to_arguments([x]))
        array_to_tensor(quick)
        buffer.fill_(7.0)
        assert torch.equal(array_to_tensor(slow), expected)
    slow = _slow(*tensors_to_arguments([torch.ones(400, 500)]))[1]
    fillers = [torch.full((400, 500), 7.0) for _ in range(4)]
    assert torch.equal(array_to_tensor(slow), expected)
    assert len(fillers) == 4


@pytest.mark.parametrize("layout", COPIED)
def test_copied_layouts_are_complete_on_return(layout: str) -> None:
    base = torch.ones(4 * 64, 6, 2, 320)
    tensor = COPIED[layout](base)
    for _ in range(5):
        base.fill_(1.0)
        array = tensor_to_array(tensor)
        base.fill_(2.0)
        assert np.all(np.asarray(array) == 1.0)


# --- refusals


def _refused() -> dict[str, tuple[object, str]]:
    eye = torch.eye(3)
    with FakeTensorMode():
        fake = torch.empty(3)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {
        "coo": (eye.to_sparse(), r"sparse_coo tensor to JAX: .*\.to_dense\(\)"),
        "meta": (torch.empty(3, device="meta"), "meta tensor holds no data"),
        "fake": (fake, "fake tensor .* FakeTensorMode"),
        "jagged": (jagged, r"nested tensor .*to_padded_tensor"),
        "mkldnn": (eye.to_mkldnn(), r"mkldnn tensor .*\.to_dense\(\)"),
        "half complex": (torch.zeros(2, dtype=torch.complex32), r"complex32: .*complex64"),
        "packed": (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
        "int4": (torch.zeros(2, dtype=torch.uint8).view(torch.int4), "torch.int4: "),
        "numpy": (np.zeros(3), "Expected a torch.Tensor, got ndarray"),
        "float": (1.0, "Expected a torch.Tensor, got float"),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(
    "kind", ["coo", "meta", "fake", "jagged", "mkldnn", "half complex", "packed", "int4", "numpy", "float"]
)
def test_tensors_that_jax_cannot_have(kind: str) -> None:
    tensor, message = _refused()[kind]
    with pytest.raises(TypeError, match=message):
        tensor_to_array(tensor)
    with pytest.raises(TypeError, match=message):
        tensors_to_arguments([tensor])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_more_tensors_that_jax_cannot_have() -> None:
    with pytest.raises(TypeError, match="sparse_csr tensor"):
        tensor_to_array(torch.eye(3).to_sparse_csr())
    with pytest.raises(TypeError, match=r"qint8: .*dequantize"):
        tensor_to_array(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(TypeError, match="nested tensor"):
        tensor_to_array(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_tensors_inside_torch_func_are_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        for wrong in (tensor_to_array, lambda x: tensors_to_arguments([x])):
            with pytest.raises(TypeError, match=r"inside torch\.func .* as_torch"):
                wrong(x)
        return x.sum()

    torch.func.vmap(inside)(torch.ones(3, 2))
    torch.func.grad(inside)(torch.ones(3))
    torch.func.jvp(inside, (torch.ones(3),), (torch.ones(3),))


def test_tensors_with_their_data_elsewhere_are_refused() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Wrapper:
            return torch.Tensor._make_wrapper_subclass(cls, (3,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    with pytest.raises(TypeError, match="Cannot pass a Wrapper to JAX"):
        tensor_to_array(Wrapper())


def test_arrays_that_torch_cannot_have() -> None:
    with pytest.raises(TypeError, match="got ndarray"):
        array_to_tensor(np.zeros(3))
    with pytest.raises(TypeError, match=r"int4: .*astype"):
        array_to_tensor(jnp.zeros(3, jnp.int4))
    with pytest.raises(TypeError, match=r"traced value .* as_jax"):
        jax.jit(array_to_tensor)(jnp.zeros(3))


# --- names outside JAX's public interface


def test_native_names_are_found_under_torch_modes_and_jax_tracing() -> None:
    found = []
    for context in (FakeTensorMode(), contextlib.nullcontext()):
        for cached in (versions.native_import, versions.native_export):
            cached.cache_clear()
        with context:
            jax.eval_shape(lambda: found.extend((versions.native_import(), versions.native_export())))
    assert all(found)


@pytest.mark.parametrize(
    "replacement", [None, lambda: None, lambda *_: 1 / 0], ids=["gone", "other arguments", "broken"]
)
def test_native_names_that_changed_are_not_used(
    monkeypatch: pytest.MonkeyPatch, replacement: Callable[..., object] | None
) -> None:
    monkeypatch.setattr(versions, "_native", lambda _: replacement)
    for cached in (versions.native_import, versions.native_export):
        cached.cache_clear()
    try:
        assert versions.native_import() is None
        assert versions.native_export() is None
        assert torch.equal(array_to_tensor(tensor_to_array(torch.arange(3))), torch.arange(3))
    finally:
        versions.native_import.cache_clear()
        versions.native_export.cache_clear()


# --- devices


def test_devices_correspond() -> None:
    cpu = jax_device(torch.device("cpu"))
    assert cpu.platform == "cpu"
    assert torch_device(cpu) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_missing_backend_names_the_package() -> None:
    with pytest.raises(ValueError, match=r"no backend for tensors on cuda:0: install jax\[cuda\d+\]"):
        jax_device(torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"xpu.*\.cpu\(\)"):
        jax_device(torch.device("xpu"))


def test_arrays_on_several_devices_are_refused() -> None:
    class Spread:
        device_set = frozenset({1, 2})

    with pytest.raises(ValueError, match=r"2 devices to torch: .*device_put"):
        values._only_device(Spread())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_tensors_cross(way: str, dtype: torch.dtype) -> None:
    for layout, view in LAYOUTS.items():
        tensor = view(_bytes(dtype, 4, 6, 2, 32).cuda())
        array = tensor_to_array(tensor)
        assert array.devices() == {jax_device(tensor.device)}
        assert (array.shape, array.dtype) == (tuple(tensor.shape), jax_dtype(dtype))
        back = array_to_tensor(array)
        assert back.device == tensor.device
        assert _torch_bits(back.cpu()) == _torch_bits(tensor.cpu()), layout


@pytest.mark.gpu
def test_cuda_streams_are_ordered() -> None:
    """Writes on torch's side stream before a call are seen by it, writes after its result crossed are not."""
    x = torch.zeros(4_000_000, device="cuda")
    fun = jax.jit(lambda v: jax.lax.fori_loop(0, 50, lambda _, c: c + v, v))
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(1, 5):
            x.fill_(number)
            (result,) = results_to_tensors([fun(tensor_to_array(x))], inputs=[x])
            x.fill_(-1)
            assert torch.all(result == 51 * number)
