"""What is overwritten or made again: nothing that anybody sees, and with the same numbers and gradients."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from aft_hf.activations_aft import made_again, project_and_activate


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.Linear(8, 32), ACT2FN["gelu"], nn.Linear(32, 8)


def plain(layers, x):
    first, activation, second = layers
    return second(activation(first(x)))


def thrifty(layers, x):
    first, activation, second = layers
    projected = first(x)
    activated = activation(projected)
    with made_again(activated, activation, projected):
        return second(activated)


def gradients(function, layers, x, **options):
    inputs = [x, *layers[0].parameters(), *layers[2].parameters()]
    return torch.autograd.grad(function(layers, x).square().sum(), inputs, **options)


def kept_sizes(y):
    """The elements of each tensor that the graph behind y keeps, by their place in memory."""
    sizes, todo, seen = {}, [y.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved"):
                kept = getattr(node, name)
                for each in kept if isinstance(kept, (tuple, list)) else [kept]:
                    tensor = each.data
                    if isinstance(tensor, torch.Tensor):
                        sizes[tensor.data_ptr()] = tensor.numel()
    return sizes


@pytest.mark.parametrize("shape", ((3, 5, 8), (5, 8), (8,), (0, 8)), ids=str)
def test_gradients_are_the_same_bit_for_bit(layers, shape):
    x = torch.randn(shape, requires_grad=True)
    for a, b in zip(gradients(thrifty, layers, x), gradients(plain, layers, x)):
        assert torch.equal(a, b)


def test_the_gradient_of_a_gradient_is_right(layers):
    x = torch.randn(2, 8, dtype=torch.double, requires_grad=True)
    layers = [layer.double() for layer in layers]
    assert torch.autograd.gradgradcheck(lambda x: thrifty(layers, x), x)


def test_what_is_made_again_is_not_kept(layers):
    x = torch.randn(5, 8, requires_grad=True)
    assert sorted(kept_sizes(plain(layers, x)).values()).count(5 * 32) == 2
    assert sorted(kept_sizes(thrifty(layers, x)).values()).count(5 * 32) == 1


def test_other_tensors_stay_as_they_are():
    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    product = a * b
    with made_again(product, torch.mul, a, b):
        y = (product * a * b.exp()).sum()
    for got, expected in zip(torch.autograd.grad(y, (a, b)), torch.autograd.grad((a * b * a * b.exp()).sum(), (a, b))):
        torch.testing.assert_close(got, expected)


def test_checkpointing_decides_itself_on_what_is_kept(layers):
    x = torch.randn(5, 8, requires_grad=True)
    y = checkpoint(thrifty, layers, x, use_reentrant=False)
    assert 5 * 32 not in kept_sizes(y).values()
    inputs = [x, *layers[0].parameters(), *layers[2].parameters()]
    for a, b in zip(torch.autograd.grad(y.square().sum(), inputs), gradients(plain, layers, x)):
        assert torch.equal(a, b)


def test_without_gradients_gelu_overwrites_the_projection(layers):
    first, activation, _ = layers
    x, places = torch.randn(5, 8), []
    original = first.forward
    first.forward = lambda x: places.append(original(x)) or places[-1]
    with torch.no_grad():
        y = project_and_activate(first, activation, x)
        assert y.data_ptr() == places[0].data_ptr()
        assert torch.equal(y, activation(original(x)))


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
            project_and_activate(first, activation, x)
    finally:
        handle.remove()
    for tensor in seen:
        assert torch.equal(tensor, nn.functional.linear(x, first.weight, first.bias))
    assert seen


@pytest.mark.parametrize("name", ("gelu", "gelu_new", "gelu_python", "relu", "silu", "tanh"))
def test_any_activation_is_applied(layers, name):
    x, activation = torch.randn(5, 8), ACT2FN[name]
    with torch.no_grad():
        torch.testing.assert_close(project_and_activate(layers[0], activation, x), activation(layers[0](x)))
    x.requires_grad_()
    assert project_and_activate(layers[0], activation, x).requires_grad
