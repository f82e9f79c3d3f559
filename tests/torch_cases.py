"""The comparison that the tests of torch transforms share."""

import torch


def assert_same(actual, expected, exact=False):
    """Equal in structure (types and the order of keys), shape, dtype and value; sums to a few roundings."""
    if isinstance(expected, torch.Tensor):
        assert type(actual) is torch.Tensor
        assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
        assert not actual.is_conj()
        assert not actual.is_neg()
        a, e = actual.detach(), expected.detach()
        if exact or not (a.is_floating_point() or a.is_complex()):
            assert torch.equal(a, e)
            return
        eps = torch.finfo(a.dtype).eps
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, e = a.to(wide), e.to(wide)
        scale = max([1.0, *e.abs()[e.isfinite()].tolist()])
        torch.testing.assert_close(a, e, rtol=0, atol=32 * eps * scale, equal_nan=True)
        return
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = tuple(actual.values()), tuple(expected.values())
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e, exact)
    else:
        assert actual == expected


def data(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
