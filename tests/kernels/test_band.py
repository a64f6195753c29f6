"""The operator `band`: w of a causal window by its factors, against products in float64."""

import math
from functools import partial

import pytest
import torch

from aft_hf.kernels import operators
from aft_hf.kernels.library import runnable_variants


OPS = torch.ops.aft_hf_v4
pytestmark = pytest.mark.skipif(not runnable_variants(), reason="no compiled kernels for this CPU")
# (h, P, d'), start, T, s: one of each, primes, parts of vectors, a window that is longer than the sequence, no tokens.
CASES = [((1, 1, 1), 0, 1, 1), ((2, 65, 64), 0, 65, 3), ((1, 130, 128), 0, 130, 32), ((3, 67, 37), 0, 50, 9)]
CASES += [((2, 70, 17), 33, 20, 5), ((1, 40, 8), 39, 1, 16), ((1, 3, 16), 0, 3, 40), ((2, 9, 8), 4, 0, 3)]


def products(query, key, start, length, window):
    """w as defined, and whether it is defined: (1, T, h, s)."""
    t = start + torch.arange(length)[:, None]
    keys = t - (window - 1) + torch.arange(window)
    w = (query @ key.mT)[:, t, keys.clamp(0)]
    return w.transpose(0, 1)[None], (keys >= 0)[None, :, None].expand(1, -1, len(query), -1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("strided", (False, True))
def test_values_and_gradients_are_those_of_the_products(case, dtype, strided, variant):
    shape, *sizes = case
    factors = [torch.randn(shape).to(dtype) for _ in range(2)]
    if strided:
        factors = [factors[0].transpose(0, 1).contiguous().transpose(0, 1), factors[1].mT.contiguous().mT]
    exact = [x.double().requires_grad_() for x in factors]
    factors = [x.requires_grad_() for x in factors]
    expected, defined = products(*exact, *sizes)
    actual = OPS.band(*factors, *sizes, None)
    assert actual.dtype == torch.float32 and actual.isfinite().all()
    rounding = 4 * torch.finfo(torch.float32).eps * math.sqrt(shape[2]) * 4
    torch.testing.assert_close(actual[defined].double(), expected[defined], rtol=rounding, atol=rounding)
    weight = torch.randn(actual.shape) * defined
    gradients = torch.autograd.grad(actual, factors, weight.mT.contiguous().mT)
    rounding = 4 * torch.finfo(dtype).eps * (math.sqrt(sizes[2]) if dtype == torch.float32 else 1.0)
    for x, y in zip(gradients, torch.autograd.grad(expected, exact, weight.double())):
        torch.testing.assert_close(x.double(), y, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("length", (1, 3))
def test_rows_may_start_at_positions_of_their_own(length, variant):
    factors, starts = torch.randn(2, 2, 9, 4), torch.tensor([4, 2, 6])  # keys before position 0 are not defined
    actual = OPS.band(*factors, 0, length, 3, starts)
    expected = [OPS.band(*factors, start, length, 3, None) for start in starts.tolist()]
    assert torch.equal(actual, torch.cat(expected))
    weight, factors = torch.randn(actual.shape), factors.requires_grad_()
    gradient = torch.autograd.grad(OPS.band(*factors, 0, length, 3, starts), factors, weight)[0]
    parts = (OPS.band(*factors, start, length, 3, None) for start in starts.tolist())
    torch.testing.assert_close(gradient, torch.autograd.grad(torch.cat(list(parts)), factors, weight)[0])


def test_threads_and_other_tokens_do_not_matter(variant):
    factors, before = torch.randn(2, 1, 300, 24).requires_grad_(), torch.get_num_threads()
    weight, actual = torch.randn(1, 300, 1, 9), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            w = OPS.band(*factors, 0, 300, 9, None)
            actual.append((w, *torch.autograd.grad(w, factors, weight)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in actual[1:] for x, y in zip(other, actual[0]))
    for size in (math.nan, math.inf):  # of positions that are not used
        changed = factors.detach().clone()
        changed[0, :, :200], changed[1, :, :192], changed[:, :, 290:] = size, size, size
        changed.requires_grad_()
        w = OPS.band(*changed, 200, 90, 9, None)
        assert torch.equal(w, actual[0][0][:, 200:290])
        gradient = torch.autograd.grad(w, changed, weight[:, 200:290])[0]
        expected = torch.autograd.grad(OPS.band(*factors, 200, 90, 9, None), factors, weight[:, 200:290])[0]
        assert torch.equal(gradient, expected)


def test_it_is_an_ordinary_operator(variant):
    for dtype in (torch.float32, torch.float64):
        torch.library.opcheck(
            OPS.band.default, (*torch.randn(2, 2, 9, 4, dtype=dtype).requires_grad_(), 2, 5, 3, None)
        )
    torch.library.opcheck(
        OPS.band_backward.default, (torch.randn(1, 5, 2, 3), *torch.randn(2, 2, 9, 4), 2, 5, 3, None)
    )
    strided = torch.randn(2, 9, 2, 4).requires_grad_()
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.simdlen": 1}  # C++ compiles in seconds
    compiled = torch.compile(
        lambda x: OPS.band(*(2 * x).transpose(1, 2), 0, 9, 3, None).sin().sum(), fullgraph=True, options=quick
    )
    compiled(strided).backward()
    expected = torch.autograd.grad(OPS.band(*(2 * strided).transpose(1, 2), 0, 9, 3, None).sin().sum(), strided)[0]
    torch.testing.assert_close(strided.grad, expected)
    factors, run = (
        torch.randn(2, 2, 9, 4, dtype=torch.float64).requires_grad_(),
        partial(OPS.band, start=2, length=5, starts=None),
    )
    assert torch.autograd.gradgradcheck(lambda x: run(*x, window=3), (factors,))
    actual = OPS.band(*factors.float(), 2, 5, 3, None)
    torch.testing.assert_close(actual, operators.portable("band", *factors, 2, 5, 3, None).float())
    batched = torch.autograd.grad(actual, factors, torch.ones(3, *actual.shape), True, is_grads_batched=True)
    torch.testing.assert_close(batched[0][1], torch.autograd.grad(actual.sum(), factors)[0])


@pytest.mark.parametrize(
    "factors", (torch.randn(2, 1, 9, 4)[:, :, :0], (torch.ones(1, 9, 4), torch.ones(1, 9, 5)), torch.randn(2, 1, 9, 4))
)
def test_arguments_that_do_not_match_are_errors(factors, variant):
    with pytest.raises(ValueError, match="do not match"):
        OPS.band(*factors, 0, 5, 0, None)
    with pytest.raises(ValueError, match="gradient must be"):
        OPS.band_backward(torch.ones(1, 5, 1, 3), *factors, 0, 4, 3, None)
