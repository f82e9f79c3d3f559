"""What the tests of torch transforms share: the comparison and random data."""

import torch

from microtome.torch_api.testing import assert_same

__all__ = ["assert_same", "data"]


def data(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
