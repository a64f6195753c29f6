"""Tests that large keys lead to hardly any subnormal numbers, with which processors of Intel calculate up to 40 times
slower, and multiply matrices 200 times slower.
"""

import pytest
import torch
from test_backend_contract_aft import STRUCTURES, WIDTH
from torch.utils._python_dispatch import TorchDispatchMode

from aft_hf import AFTSimple


PRODUCTS = {"bmm", "baddbmm", "mm", "addmm"}
MIXERS = ["full", "full causal", "local, wide", "local causal, wide", "local causal, wide, window alone", "simple"]
MIXERS += ["simple causal", "alibi causal, 8 heads", "conv causal, wide", "conv 2-D"]


class Subnormals(TorchDispatchMode):
    """Counts the factors of matrix products, and the subnormal numbers among them."""

    def __init__(self):
        super().__init__()
        self.factors = self.subnormal = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__.rstrip("_") in PRODUCTS:
            for factor in args[-2:]:
                size = factor.abs()
                self.factors += factor.numel()
                self.subnormal += int(((size > 0) & (size < torch.finfo(factor.dtype).tiny)).sum())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", (30.0, 90.0))
@pytest.mark.parametrize("mixer", MIXERS)
def test_large_keys_lead_to_hardly_any_subnormal_numbers(mixer, size):
    torch.manual_seed(0)
    module = STRUCTURES[mixer](mixing_implementation="portable")
    x = torch.randn(4, 324, WIDTH)
    with torch.no_grad():
        module.k_proj.weight.mul_(size / module.k_proj(x).std())
    with Subnormals() as actual, torch.no_grad():
        module(x)
    assert actual.subnormal / actual.factors < 2e-3


def test_gradients_in_float16_keep_their_subnormal_numbers():
    """Gradients of 1e-6 are subnormal in float16, and ordinary numbers there."""
    torch.manual_seed(0)
    module = AFTSimple(WIDTH, causal=True).half()
    keys = []
    module.k_proj.register_forward_hook(lambda _, __, output: keys.append(output) or output.retain_grad())
    with torch.no_grad():
        module.k_proj.weight.mul_(30.0)
    x = torch.randn(2, 64, WIDTH).half()
    module(x).backward(torch.full_like(x, 1e-5))
    gradient = keys[0].grad
    assert ((gradient != 0) & (gradient.abs() < torch.finfo(torch.float16).tiny)).any()
