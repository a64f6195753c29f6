"""The MLP keeps one of its two wide tensors: the same results and gradients as the plain modules, with less memory."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from aft_hf import AFTConfig
from aft_hf.modeling_aft import AFTMLP


MLP = AFTMLP(AFTConfig(hidden_size=8, intermediate_size=32))


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [nn.Linear(8, 32), ACT2FN["gelu"], nn.Linear(32, 8)]


def plain(layers, x):
    first, activation, second = layers
    return second(activation(first(x)))


def thrifty(layers, x):
    MLP.fc1, MLP.activation, MLP.fc2 = layers
    return MLP(x)


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
        y = thrifty(layers, x.detach())
        expected = plain(layers, x.detach())
        for a, b in zip(*(torch.autograd.grad(z.sum(), list(layers[2].parameters())) for z in (y, expected))):
            torch.testing.assert_close(a, b)
    else:
        assert_same_gradients(layers, x)


def test_gradients_of_gradients_are_right(layers):
    layers = [layer.double() for layer in layers]
    x = torch.randn(2, 8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: thrifty(layers, x), x)


def test_gradients_come_in_batches(layers):
    x = torch.randn(5, 8, requires_grad=True)
    y, vectors = thrifty(layers, x), torch.randn(3, 5, 8)
    batched = torch.autograd.grad(y, x, vectors, is_grads_batched=True, retain_graph=True)[0]
    for a, vector in zip(batched, vectors):
        torch.testing.assert_close(a, torch.autograd.grad(y, x, vector, retain_graph=True)[0])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast_is_as_without(layers, dtype):
    x = torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y, expected = thrifty(layers, x), plain(layers, x)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    weights = [layers[0].weight, layers[2].weight, layers[2].bias]
    for a, b in zip(*(torch.autograd.grad(z.float().square().sum(), weights) for z in (y, expected))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3 * float(b.abs().max()))


def test_one_wide_tensor_is_kept_and_freed_with_the_result(layers):
    x = torch.randn(5, 8, requires_grad=True)
    assert kept_sizes(plain(layers, x)).count(5 * 32) == 2
    y = thrifty(layers, x)
    assert kept_sizes(y).count(5 * 32) == 1
    kept = weakref.ref(y.grad_fn)
    gc.disable()
    try:
        del y
        assert kept() is None
    finally:
        gc.enable()


def test_a_weight_that_was_changed_before_the_backward_pass_is_noticed(layers):
    y = thrifty(layers, torch.randn(5, 8, requires_grad=True)).sum()
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
            y = thrifty(layers, x.detach())
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
        y = thrifty(layers, x)
        assert given[1] == made[0].data_ptr()
        torch.testing.assert_close(y, plain(layers, x))


@pytest.mark.parametrize("hooked", ("projection", "activation", "activation before", "all modules"))
def test_what_a_hook_has_seen_is_not_overwritten(layers, hooked):
    first, activation, _ = layers
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
            thrifty(layers, x)
    finally:
        handle.remove()
    assert seen
    for tensor in seen:
        assert torch.equal(tensor, nn.functional.linear(x, first.weight, first.bias))


def test_a_hook_of_the_activation_runs_once_in_a_training_step(layers):
    calls = []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    thrifty(layers, torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("name", ("gelu", "gelu_new", "gelu_python", "relu", "silu", "tanh"))
def test_any_activation_is_applied(layers, name):
    x, layers[1] = torch.randn(5, 8), ACT2FN[name]
    with torch.no_grad():
        torch.testing.assert_close(thrifty(layers, x), plain(layers, x))
    assert_same_gradients(layers, x.requires_grad_())


def test_transformations_of_functions_see_through(layers):
    x = torch.randn(5, 8)
    of_rows = torch.func.vmap(torch.func.grad(lambda row: thrifty(layers, row).square().sum()))(x)
    torch.testing.assert_close(of_rows, gradients(plain, layers, x.clone().requires_grad_())[0])
    directions = x, torch.ones_like(x)
    _, tangent = torch.func.jvp(lambda x: thrifty(layers, x), *((each,) for each in directions))
    _, expected = torch.func.jvp(lambda x: plain(layers, x), *((each,) for each in directions))
    torch.testing.assert_close(tangent, expected)


def test_fx_traces_it(layers):
    x = torch.randn(5, 8)
    expected = thrifty(layers, x)
    torch.testing.assert_close(torch.fx.symbolic_trace(MLP)(x), expected)
