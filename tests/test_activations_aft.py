"""Activations in place, recomputed or fused: the same results and gradients as the plain modules, with less memory."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from aft_hf.activations_aft import _gelu_in_place, gated_projection, perceptron


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [nn.Linear(8, 32), ACT2FN["gelu"], nn.Linear(32, 8)]


def plain(layers, x):
    first, activation, second = layers
    return second(activation(first(x)))


def thrifty(layers, x):
    return perceptron(*layers, x)


def gradients(function, layers, x):
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    torch.manual_seed(1)
    return torch.autograd.grad(function(layers, x).square().sum(), [x, *parameters])


def assert_same_gradients(layers, x):
    expected = gradients(plain, layers, x)
    for a, b in zip(gradients(thrifty, layers, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def kept_sizes(y):
    """Return the number of elements of each tensor that the graph of y keeps, counting shared memory once."""
    sizes, todo, seen = {}, [y.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved")]
        for tensor in [*saved, *getattr(node, "saved_tensors", ())]:
            if isinstance(tensor, torch.Tensor):
                sizes[tensor.data_ptr()] = tensor.numel()
    return list(sizes.values())


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("shape", ((3, 5, 8), (5, 8), (8,), (0, 8)), ids=str)
def test_gradients_are_the_same(layers, shape, bias):
    layers[2] = nn.Linear(32, 8, bias=bias)
    assert_same_gradients(layers, torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize("frozen", ("input", "weight", "bias", "all of the second"))
def test_what_is_frozen_gets_no_gradient(layers, frozen):
    x = torch.randn(5, 8, requires_grad=True)
    for name, parameter in layers[2].named_parameters():
        parameter.requires_grad_(frozen not in (name, "all of the second"))
    if frozen == "input":
        layers[0].requires_grad_(False)
        y = perceptron(*layers, x.detach())
        expected = plain(layers, x.detach())
        for a, b in zip(*(torch.autograd.grad(z.sum(), list(layers[2].parameters())) for z in (y, expected))):
            torch.testing.assert_close(a, b)
    else:
        assert_same_gradients(layers, x)


def test_gradients_of_gradients_are_right(layers):
    layers = [layer.double() for layer in layers]
    x = torch.randn(2, 8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: perceptron(*layers, x), x)
    gate = torch.randn(2, 32, dtype=torch.double, requires_grad=True)
    context = torch.randn(2, 32, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: gated_projection(a, b, layers[2]), (gate, context))
    assert torch.autograd.gradgradcheck(lambda a, b: gated_projection(a, b, layers[2]), (gate, context))


def test_gradients_come_in_batches(layers):
    x = torch.randn(5, 8, requires_grad=True)
    y, vectors = perceptron(*layers, x), torch.randn(3, 5, 8)
    batched = torch.autograd.grad(y, x, vectors, is_grads_batched=True, retain_graph=True)[0]
    for a, vector in zip(batched, vectors):
        torch.testing.assert_close(a, torch.autograd.grad(y, x, vector, retain_graph=True)[0])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast_is_as_without(layers, dtype):
    x = torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y, expected = perceptron(*layers, x), plain(layers, x)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    weights = [layers[0].weight, layers[2].weight, layers[2].bias]
    for a, b in zip(*(torch.autograd.grad(z.float().square().sum(), weights) for z in (y, expected))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3 * float(b.abs().max()))


def test_one_wide_tensor_is_kept_and_freed_with_the_result(layers):
    x = torch.randn(5, 8, requires_grad=True)
    assert kept_sizes(plain(layers, x)).count(5 * 32) == 2
    y = perceptron(*layers, x)
    assert kept_sizes(y).count(5 * 32) == 1
    kept = weakref.ref(y.grad_fn)
    gc.disable()
    try:
        del y
        assert kept() is None
    finally:
        gc.enable()


def test_the_gated_product_is_not_kept():
    gate, context = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    projection = nn.Linear(8, 8, bias=False)
    assert kept_sizes(projection(gate * context)).count(5 * 8) == 3
    y = gated_projection(gate, context, projection)
    assert kept_sizes(y).count(5 * 8) == 2
    expected = torch.autograd.grad(projection(gate * context).sum(), (gate, context, projection.weight))
    for a, b in zip(torch.autograd.grad(y.sum(), (gate, context, projection.weight)), expected):
        torch.testing.assert_close(a, b)


def test_a_weight_that_was_changed_before_the_backward_pass_is_noticed(layers):
    y = perceptron(*layers, torch.randn(5, 8, requires_grad=True)).sum()
    with torch.no_grad():
        layers[2].weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_checkpointing_gives_the_same_gradients(layers, use_reentrant):
    x = torch.randn(5, 8, requires_grad=True)
    checkpoint(thrifty, layers, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, gradients(plain, layers, x)[0])


def replaced_forward(layers):
    layers[1].forward = lambda x: x.relu()


def hook_that_changes(layers):
    layers[2].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


# Changes after which the layers are not plain, so that they have to be called.
OTHERS = {
    "dropout": lambda layers: layers.__setitem__(1, nn.Sequential(layers[1], nn.Dropout(0.5))),
    "in place": lambda layers: layers.__setitem__(2, nn.Sequential(nn.Dropout(0.5, inplace=True), layers[2])),
    "activation in place": lambda layers: layers.__setitem__(1, nn.SiLU(inplace=True)),
    "another forward": replaced_forward,
    "hook that changes": hook_that_changes,
    "parametrized": lambda layers: nn.utils.parametrizations.weight_norm(layers[2]),
    "identity": lambda layers: layers.__setitem__(slice(0, 3, 2), [nn.Identity(), nn.Linear(8, 8)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_called_as_they_are(layers, name):
    OTHERS[name](layers)
    x = torch.randn(5, 8, requires_grad=True)
    assert_same_gradients(layers, x)
    before = x.detach().clone()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.manual_seed(1)
            y = perceptron(*layers, x.detach())
            torch.manual_seed(1)
            torch.testing.assert_close(y, plain(layers, x.detach()))
            assert torch.equal(x, before)


def test_without_gradients_gelu_overwrites_the_projection(layers, monkeypatch):
    x, linear, given, made = torch.randn(5, 8), nn.functional.linear, [], []

    def spy(x, *parameters):
        given.append(x.data_ptr())
        made.append(linear(x, *parameters))
        return made[-1]

    monkeypatch.setattr(nn.functional, "linear", spy)
    with torch.no_grad():
        y = perceptron(*layers, x)
        assert given[1] == made[0].data_ptr()
        torch.testing.assert_close(y, plain(layers, x))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (1, 1024), (8, 1, 1024), (2**5, 2**10), (2**5 + 1, 2**10)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_gelu_in_place_is_gelu_of_few_numbers_and_of_many(shape, dtype):
    x = 3 * torch.randn(shape, dtype=dtype)
    expected = nn.functional.gelu(x)
    result = _gelu_in_place(x)
    assert result is x
    torch.testing.assert_close(x, expected)


def test_gelu_in_place_takes_what_is_not_contiguous():
    x = torch.randn(4, 6).T
    expected = nn.functional.gelu(x)
    torch.testing.assert_close(_gelu_in_place(x), expected)


@pytest.mark.parametrize("hooked", ("projection", "activation", "activation before", "all modules"))
def test_what_a_hook_has_seen_is_not_overwritten(layers, hooked):
    first, activation, second = layers
    seen = []

    def keep(module, inputs, output=None):
        if module in (first, activation):
            seen.append(inputs[0] if module is activation else output)

    handle = {
        "projection": lambda: first.register_forward_hook(keep),
        "activation": lambda: activation.register_forward_hook(keep),
        "activation before": lambda: activation.register_forward_pre_hook(keep),
        "all modules": lambda: nn.modules.module.register_module_forward_hook(keep),
    }[hooked]()
    x = torch.randn(5, 8)
    try:
        with torch.no_grad():
            perceptron(first, activation, second, x)
    finally:
        handle.remove()
    assert seen
    for tensor in seen:
        assert torch.equal(tensor, nn.functional.linear(x, first.weight, first.bias))


def test_a_hook_of_the_activation_runs_once_in_a_training_step(layers):
    calls = []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    perceptron(*layers, torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("name", ("gelu", "gelu_new", "gelu_python", "relu", "silu", "tanh"))
def test_any_activation_is_applied(layers, name):
    x, layers[1] = torch.randn(5, 8), ACT2FN[name]
    with torch.no_grad():
        torch.testing.assert_close(perceptron(*layers, x), plain(layers, x))
    assert_same_gradients(layers, x.requires_grad_())


def test_transformations_of_functions_see_through(layers):
    x = torch.randn(5, 8)
    of_rows = torch.func.vmap(torch.func.grad(lambda row: perceptron(*layers, row).square().sum()))(x)
    torch.testing.assert_close(of_rows, gradients(plain, layers, x.clone().requires_grad_())[0])
    directions = x, torch.ones_like(x)
    _, tangent = torch.func.jvp(lambda x: perceptron(*layers, x), *((each,) for each in directions))
    _, expected = torch.func.jvp(lambda x: plain(layers, x), *((each,) for each in directions))
    torch.testing.assert_close(tangent, expected)


def test_fx_traces_it(layers):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            return perceptron(*self.layers, x)

    x = torch.randn(5, 8)
    torch.testing.assert_close(torch.fx.symbolic_trace(Module())(x), plain(layers, x))


ONEDNN = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def of_bfloat16(layers):
    return [nn.Linear(8, 32).bfloat16(), layers[1], nn.Linear(32, 8).bfloat16()]


@pytest.fixture
def gelus(monkeypatch):
    """Record the calls of GELU as a separate operation, not fused into a product."""
    calls, gelu = [], torch._C._nn.gelu_
    monkeypatch.setattr(torch._C._nn, "gelu_", lambda x: (calls.append(x), gelu(x))[1])
    return calls


@pytest.mark.skipif(not ONEDNN, reason="bfloat16 of oneDNN is not for this processor")
@pytest.mark.parametrize("shape", ((3, 5, 8), (5, 8), (1, 8), (0, 8)), ids=str)
@pytest.mark.parametrize("bias", (True, False))
def test_a_product_of_bfloat16_applies_gelu(layers, shape, bias, gelus):
    layers = of_bfloat16(layers)
    if not bias:
        layers[0] = nn.Linear(8, 32, bias=False).bfloat16()
    x = torch.randn(shape).bfloat16()
    with torch.no_grad():
        y = perceptron(*layers, x)
        exact = plain([layer.double() if isinstance(layer, nn.Linear) else layer for layer in layers], x.double())
    assert not gelus and y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not ONEDNN, reason="bfloat16 of oneDNN is not for this processor")
@pytest.mark.parametrize("value", (float("nan"), float("inf"), 3e38))
def test_a_product_with_gelu_hides_nothing(layers, value):
    layers, x = of_bfloat16(layers), torch.randn(4, 8).bfloat16()
    x[1, 2] = value
    with torch.no_grad():
        y, expected = perceptron(*layers, x), plain(layers, x)
    assert torch.equal(y.isfinite(), expected.isfinite())
    torch.testing.assert_close(y[[0, 2, 3]], expected[[0, 2, 3]], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", ((2, 7), ()), ids=str)
def test_an_input_of_another_width_is_an_error_about_shapes(layers, shape):
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"shape|1D"):
        perceptron(*of_bfloat16(layers), torch.randn(shape).bfloat16())


def with_strided_bias(layers, x):
    layers[0].bias = nn.Parameter(torch.randn(32, 2).bfloat16()[:, 0])
    return x


def with_strided_weight(layers, x):
    layers[0].weight = nn.Parameter(torch.randn(8, 32).bfloat16().mT)
    return x


def with_strided_input(layers, x):
    return torch.randn(8, 5).bfloat16().mT


def without_onednn(layers, x):
    torch.backends.mkldnn.set_flags(False)
    return x


@pytest.mark.parametrize("change", (with_strided_bias, with_strided_weight, with_strided_input, without_onednn))
def test_what_onednn_does_not_take_is_multiplied_first(layers, change, gelus):
    layers, enabled = of_bfloat16(layers), torch.backends.mkldnn.enabled
    try:
        x = change(layers, torch.randn(5, 8).bfloat16())
        with torch.no_grad():
            y = perceptron(*layers, x)
            expected = plain(layers, x)
    finally:
        torch.backends.mkldnn.set_flags(enabled)
    assert len(gelus) == 1
    torch.testing.assert_close(y, expected)


def test_autocast_without_gradients_is_as_without(layers, gelus):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(5, 8).bfloat16()
        torch.testing.assert_close(perceptron(*layers, x), plain(layers, x))
        assert perceptron(*of_bfloat16(layers), x).dtype == torch.bfloat16
    assert len(gelus) == 2
