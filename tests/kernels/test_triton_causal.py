"""The Triton kernels for causal Eq. 2, with what they keep for the backward pass, against float64.

`test_triton.py` tests them as operators. Here are what the operators' contract does not ask: every size of a window,
biases of each row, hidden tokens of any kind, and what is kept.
"""

from functools import partial

import pytest
import torch

from aft_hf.kernels.operators import portable


pytest.importorskip("triton")

from aft_hf.kernels.triton import causal_launch
from aft_hf.kernels.triton.options import OPTIONS


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
slow = partial(pytest.param, marks=pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy warns of inf - inf


@pytest.fixture(autouse=True)
def one_segment(monkeypatch):
    """Carry sums from chunk to chunk, as where rows are many. Otherwise, each chunk here is a segment."""
    monkeypatch.setattr(causal_launch, "PROGRAMS", 1)


class Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *problem):
        output, *kept = causal_launch.causal(*problem, keep=True)
        ctx.others = [x if not isinstance(x, torch.Tensor) else None for x in problem]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in problem), *kept)
        return output

    @staticmethod
    def backward(ctx, gradient):
        *problem, average, logsumexp, center = ctx.saved_tensors
        problem = [x if x is not None else y for x, y in zip(problem, ctx.others)]
        actual = causal_launch.causal_backward(gradient, *problem, average, logsumexp, center, problem[3] is not None)
        return *(None if x is None else y for x, y in zip(problem, actual)), None, None, None


def problem(
    length, size=None, width=8, heads=1, *, batch=1, rows=1, positions=None, shared=False, alibi=False, **changes
):
    """Return the arguments of `causal`, as float32 on the CPU, with w of a window of `size` (None: no window)."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, length, n) for n in (width, heads if shared else width, width))
    bias = None if size is None else torch.randn(rows, positions or length, heads, size)
    slopes = 2.0 ** -torch.arange(1.0, heads + 1) if alibi else None
    given = {"query": query, "key": key, "value": value, "bias": bias, "slopes": slopes, "first": None}
    given["global_connectivity"] = True
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    return list(given.values())


def assert_exact(given, dtype=FP32, terms=1.0):
    """Check outputs and gradients against the portable form in float64, where hidden tokens have no NaN."""
    rounded = [x if x is None else x.to(dtype).double() for x in given[:3]]
    weight = torch.linspace(0.2, 1, given[2].numel()).view_as(given[2]).to(dtype)
    actual, exact = [], []
    for results, function, inputs in (
        (actual, Causal.apply, [x if x is None else x.to(DEVICE, dtype) for x in given[:3]]),
        (
            exact,
            lambda *x: portable("causal", *x),
            [x if x is None else x.nan_to_num(nan=0.0, neginf=-torch.inf) for x in rounded],
        ),
    ):
        device = inputs[2].device
        others = [x.to(device) if isinstance(x, torch.Tensor) else x for x in given[3:]]
        if inputs[2].dtype == torch.float64:
            others = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in others]
        leaves = [x if x is None else x.detach().clone().requires_grad_() for x in (*inputs, others[0])]
        output = function(*leaves, *others[1:])
        wanted = [x for x in leaves if x is not None]
        results += [
            output,
            *torch.autograd.grad(output, wanted, weight.to(device, output.dtype), materialize_grads=True),
        ]
    size = exact[-2 if given[3] is not None else -1].abs()  # of the gradient of the values
    of_values = given[2].to(dtype).float().nan_to_num().abs().max().item() * 2
    for x, y in zip(actual, exact):
        allowed = max(y.abs().max().item(), of_values * size.max().item() if y is not exact[0] else of_values)
        allowed *= 2e-5 * terms + (torch.finfo(BF16).eps if dtype == BF16 else 0.0)
        torch.testing.assert_close(x.detach().double().cpu(), y.detach(), rtol=0, atol=allowed)


def documents(length, *starts, padding=0):
    """`first` for a row with documents from these tokens on, and padding at its end."""
    tokens = torch.arange(length)
    first = torch.zeros(length, dtype=torch.int64)
    for start in starts:
        first = torch.where(tokens >= start, start, first)
    return torch.where(tokens >= length - padding, length, first)


@pytest.mark.parametrize("size", (1, 33, slow(100)))
def test_a_window_of_any_size(size):
    assert_exact(problem(70, size, positions=None if size < 40 else 9))


@pytest.mark.parametrize(("width", "heads", "shared"), (slow(3, 3, False), slow(34, 2, True), (1, 1, True)))
def test_heads_of_any_width_with_a_key_each_or_one_per_feature(width, heads, shared):
    assert_exact(problem(35, 3, width, heads, shared=shared, positions=1))
    assert_exact(problem(35, None, width, heads, shared=shared, alibi=True))


def test_biases_of_each_row():
    assert_exact(problem(40, 5, batch=2, rows=2))
    first = torch.stack([documents(40, 9, 33), documents(40, 35, padding=3)])
    assert_exact(problem(40, 5, batch=2, rows=2, positions=7, first=first))


HIDDEN = {
    "keys of -inf": ({}, torch.arange(40) % 3 == 1),
    "keys of -inf at the start": ({}, torch.arange(40) < 5),
    "padding before": ({"first": torch.where(torch.arange(40) < 33, 40, 33)[None]}, torch.arange(40) < 33),
    "padding after": ({"first": documents(40, 5, 31, padding=6)[None]}, torch.arange(40) >= 34),
}


@pytest.mark.parametrize(
    ("hidden", "size"),
    [
        (hidden, size) if size == ("alibi" if "start" in hidden else 4) else slow(hidden, size)
        for hidden in HIDDEN
        for size in (4, "alibi", "alone")
    ],
    ids=str,
)
def test_nan_in_hidden_tokens_changes_nothing(hidden, size):
    options, tokens = HIDDEN[hidden]
    given = problem(
        40,
        {"alone": 4, "alibi": None}.get(size, size),
        global_connectivity=size != "alone",
        alibi=size == "alibi",
        **options,
    )
    if options:
        given[0][:, tokens] = given[1][:, tokens] = torch.nan
    else:
        given[1][:, tokens] = -torch.inf
    given[2][:, tokens] = torch.nan
    assert_exact(given)


@pytest.mark.parametrize(("size", "dtype"), ((4, FP32), slow(4, BF16), slow("alibi", FP32)), ids=str)
@pytest.mark.parametrize(
    "changes",
    (
        {"key": lambda x: 90 * x},
        {"key": lambda x: x + torch.linspace(0, 1000, 36)[:, None]},
        {"key": lambda x: x + torch.linspace(1000, 0, 36)[:, None]},
        {"value": lambda x: x + 100},
        {"value": lambda x: 1e6 * x},
        {"query": None},
    ),
    ids=("large keys", "a rising ramp", "a falling ramp", "values with an offset", "large values", "no gate"),
)
def test_large_numbers_cost_no_precision(changes, size, dtype):
    changes = changes | {"alibi": True} if size == "alibi" else changes
    terms = 5.0 if "key" in changes else 1.0  # differences of keys are rounded
    assert_exact(problem(36, None if size == "alibi" else size, width=4, **changes), dtype, terms)


def test_large_keys_cost_no_precision_where_a_program_repairs_several_chunks(monkeypatch):
    monkeypatch.setattr(causal_launch, "ENOUGH_REPAIRS", 3)
    # Two of three chunks, then the last. The last two are flagged.
    ramp = 30 * (torch.arange(70.0) - 31).clamp_min(0)[:, None]
    assert_exact(problem(70, 4, width=1, batch=2, rows=2, key=lambda x: x + ramp), terms=5.0)


def results(given, dtype=FP32):
    """Outputs and the gradients of query, key and value."""
    inputs = [x.to(DEVICE, dtype).requires_grad_() for x in given[:3]]
    output = Causal.apply(*inputs, *(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in given[3:]))
    return [output, *torch.autograd.grad(output.sum(), inputs)]


@pytest.mark.parametrize(
    ("size", "place"),
    ((3, "before the window"), slow(3, "hidden by a key of -inf"), slow(40, "hidden by a key of -inf")),
)
def test_the_value_of_a_token_that_is_not_seen_costs_no_precision(size, place):
    tokens, actual = size if place == "before the window" else 1, []
    for value in (0.0, 1e8):
        given = problem(72, size, width=2, global_connectivity=False)
        given[2][:, 0] = value
        if tokens == 1:
            given[1][:, 0], given[5] = -torch.inf, torch.zeros(1, 72, dtype=torch.int64)
        actual.append([x[:, tokens:] for x in results(given)])
    for x, y in zip(*actual):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", (3, slow(40)))
def test_an_outlier_with_a_small_weight_costs_the_gradients_of_others_no_precision(size):
    given = problem(64, size)
    given[1][:, 0], given[2][:, 0] = -12.0, 1000.0
    actual = results(given, BF16)[2][:, 1:].double().cpu()
    query, key, value, bias = (x.to(y).double() for x, y in zip(given, (BF16, BF16, BF16, FP32)))
    key.requires_grad_()
    (exact,) = torch.autograd.grad(portable("causal", query, key, value, bias, None, None, True).sum(), key)
    assert (actual - exact[:, 1:]).norm() <= torch.finfo(BF16).eps * exact[:, 1:].norm()


@pytest.mark.parametrize("size", (33, slow(1), slow(40)))
def test_tokens_before_a_window_count_where_its_largest_key_has_a_small_bias(size):
    key = problem(73, size, width=1)[1]
    key[:, 40] += 100
    assert_exact(problem(73, size, width=1, key=key, bias=lambda w: w - 150), terms=5.0)


HOSTILE = {
    "far larger keys": ("key", lambda x: x + 200),
    "far smaller keys": ("key", lambda x: x - 200),
    "infinite keys": ("key", lambda x: x + torch.inf),
    "larger values": ("value", lambda x: 1e4 * x),
    "NaN": ("value", lambda x: x * torch.nan),
    "a gradient of NaN": ("gradient", lambda x: x * torch.nan),
}


@pytest.mark.parametrize("size", (5, slow("alibi"), slow(40), slow("alone")), ids=str)
@pytest.mark.parametrize("begin", (41, slow(32), slow(63)))
@pytest.mark.parametrize("hostile", [x if x in ("far larger keys", "infinite keys") else slow(x) for x in HOSTILE])
def test_a_document_does_not_reach_the_one_before_or_after(hostile, begin, size, monkeypatch):
    monkeypatch.setattr(causal_launch, "PROGRAMS", 1000 if begin == 32 else causal_launch.PROGRAMS)
    special = {"alone": {"global_connectivity": False}, "alibi": {"alibi": True}}.get(size, {})
    window = {"alone": 4, "alibi": None}.get(size, size)
    given = problem(70, window, width=2, first=documents(70, begin)[None], **special)
    parts, (name, make_hostile) = (slice(0, begin), slice(begin, 70)), HOSTILE[hostile]
    for changed, other in (parts, parts[::-1]):
        actual = []
        for change in (lambda x: x, make_hostile):
            tensors = dict(zip(("query", "key", "value"), given)) | {"gradient": torch.ones(1, 70, 2)}
            x = tensors[name]
            tensors[name] = torch.cat([change(x[:, part]) if part == changed else x[:, part] for part in parts], 1)
            *inputs, gradient = tensors.values()
            inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
            output = Causal.apply(*inputs, *(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in given[3:]))
            actual.append([output, *torch.autograd.grad(output, inputs, gradient.to(DEVICE))])
        for x, y in zip(*actual):
            torch.testing.assert_close(y[:, other], x[:, other], rtol=2e-5, atol=2e-5)


def test_the_keys_of_padding_reach_no_gradient():
    first, key = torch.zeros(1, 70, dtype=torch.int64), problem(70, 5, width=2)[1]
    first[:, 66:], key[:, 66:] = 70, 1e6
    assert_exact(problem(70, 5, width=2, first=first, key=key))


@pytest.mark.parametrize(("length", "size"), ((1, 5), (1, "alibi"), (33, 5), slow(33, "alibi"), slow(130, 5)), ids=str)
def test_any_length_in_one_segment_or_several(length, size, monkeypatch):
    given = problem(length, None if size == "alibi" else size, width=4, alibi=size == "alibi")
    assert_exact(given)
    monkeypatch.setattr(causal_launch, "PROGRAMS", 1000)
    assert_exact(given)
    if length > 33:
        given[5] = documents(length, 7, 64, 100)[None]
        assert_exact(given)


def test_an_offset_of_later_values_costs_the_gradients_of_earlier_keys_no_precision(monkeypatch):
    monkeypatch.setattr(causal_launch, "PROGRAMS", 8)  # several chunks per segment
    late = torch.arange(256)[:, None] >= 64
    given = problem(256, 5, 16, positions=1, key=lambda x: x + 20 * late, value=lambda x: x + 1e4 * late)
    actual = results(given)[2][:, :64].double().cpu()
    query, key, value, bias = (x.double() for x in given[:4])
    key.requires_grad_()
    (exact,) = torch.autograd.grad(portable("causal", query, key, value, bias, None, None, True).sum(), key)
    assert (actual - exact[:, :64]).norm() <= 2e-5 * exact[:, :64].norm()


@pytest.mark.parametrize(("programs", "keys"), ((1, 2), (8, 1)))
def test_the_gradient_of_w_sums_several_rows_in_a_program(programs, keys, monkeypatch):
    monkeypatch.setattr(causal_launch, "ENOUGH_PROGRAMS", programs)
    monkeypatch.setitem(OPTIONS["window_gradient_kernel"]["float32"], "KEYS", keys)
    assert_exact(problem(40, 3, width=4, batch=3, positions=1))  # programs of three rows, and of two rows and one


def test_options_name_every_kernel_and_dtype():
    for kernel, entries in OPTIONS.items():
        assert {"bfloat16", "float32"} <= set(entries), kernel
        whole = [x for name, x in entries.items() if not name.endswith(("documents", "window alone", "wide"))]
        assert all("num_warps" in x for x in whole), kernel


def empty_state(window, width, heads=1, shared=False, batch=1):
    """The state of a layer before its first token."""
    features = width // heads
    per_key, options, dtype = 1 if shared else features, {"device": DEVICE}, torch.float64
    keys = torch.full((batch, heads, window, per_key), -torch.inf, **options)
    numerator = torch.zeros(batch, heads, 1, features, dtype=dtype, **options)
    denominator = torch.zeros(batch, heads, 1, per_key, dtype=dtype, **options)
    values = torch.zeros(batch, heads, window, features, **options)
    return keys, values, numerator, denominator, torch.full((batch, heads, 1, per_key), -1e30, **options)


@pytest.mark.parametrize(
    ("size", "options"),
    (
        (None, {"heads": 2}),
        (None, {"alibi": True, "heads": 2}),
        (3, {}),
        (1, {}),
        (3, {"heads": 2, "shared": True}),
        (3, {"global_connectivity": False}),
        (36, {}),
    ),
    ids=str,
)
def test_a_prompt_in_pieces_and_tokens_after_it_continue_a_state(size, options):
    pieces, start, actual = (3, 34, 1, 5, 1), 0, []
    given = problem(sum(pieces), size, width=4, **options)
    exact = portable("causal", *(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    state = empty_state((size or 1) - 1, 4, options.get("heads", 1), options.get("shared", False))
    for piece in pieces:
        part = [x if x is None else x[:, start : start + piece].to(DEVICE) for x in given[:4]]
        slopes = given[4] if given[4] is None else given[4].to(DEVICE)
        actual.append(causal_launch.causal_state(*part, slopes, *given[5:], *state).cpu())
        start += piece
    torch.testing.assert_close(torch.cat(actual, 1).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", (None, 2), ids=str)
def test_sums_of_a_state_in_float64_do_not_drift(size):
    """After 2^25 tokens, float32 sums would not change any more."""
    state = empty_state((size or 1) - 1, 4)
    _, _, numerator, denominator, maximum = state
    maximum.fill_(0.0)
    denominator.fill_(2.0**25)
    numerator.fill_(3.0 * 2**25)
    token = [torch.full((1, 1, 4), x, device=DEVICE) for x in (0.0, -0.5, 1.0)]
    bias = None if size is None else torch.zeros(1, 1, 1, size, device=DEVICE)
    steps = 9
    for _ in range(steps):
        causal_launch.causal_state(*token, bias, None, None, True, *state)
    added = (steps - (size or 1) + 1) * torch.tensor(-0.5).exp().double()
    torch.testing.assert_close(denominator.cpu() - 2.0**25, added.expand(1, 1, 1, 4), rtol=1e-6, atol=0)
    torch.testing.assert_close(numerator.cpu() - 3.0 * 2**25, added.expand(1, 1, 1, 4), rtol=1e-6, atol=0)


# Heads, positions, features, first token, tokens, window
BANDS = (
    ((1, 40, 17), 0, 40, 5),
    ((2, 70, 4), 33, 30, 40),
    ((1, 9, 8), 4, 0, 3),
    ((1, 3, 16), 0, 3, 40),
    ((1, 40, 8), 39, 1, 1),
)


@pytest.mark.parametrize("case", BANDS, ids=str)
@pytest.mark.parametrize("dtype", (FP32, BF16, torch.float16), ids=str)
def test_a_band_and_its_gradients_are_those_of_the_products(case, dtype):
    shape, *sizes = case
    start, length, window = sizes
    torch.manual_seed(0)
    factors = [torch.randn(shape).to(dtype) for _ in range(2)]
    exact = [x.double().requires_grad_() for x in factors]
    t = start + torch.arange(length)[:, None]
    keys = t - (window - 1) + torch.arange(window)
    defined = (keys >= 0)[None, :, None].expand(1, -1, shape[0], -1)
    expected = (exact[0] @ exact[1].mT)[:, t, keys.clamp(0)].transpose(0, 1)[None] * defined
    weight = torch.randn(expected.shape) * defined
    factors = [x.to(DEVICE) for x in factors]
    actual = causal_launch.band(*factors, *sizes, None).cpu() * defined
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    of_rows = causal_launch.band(*factors, 0, length, window, torch.tensor([start, start], device=DEVICE)).cpu()
    assert torch.equal(of_rows * defined, torch.cat([actual, actual]))
    gradients = causal_launch.band_backward(weight.to(DEVICE), *factors, *sizes, None)
    allowed = 2e-5 + (torch.finfo(dtype).eps if dtype != FP32 else 0.0)
    for x, y in zip(gradients, torch.autograd.grad(expected, exact, weight.double(), allow_unused=True)):
        torch.testing.assert_close(x.double().cpu(), y, rtol=allowed, atol=allowed)
