"""Activations with less memory and the same results: computed in place, recomputed in the backward pass, or fused with
a linear layer.

These functions bypass plain modules only. Modules with hooks, of other classes or with another `forward` are called.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.modules import module as module_hooks
from transformers.activations import GELUActivation


# Number of elements below which starting oneDNN takes longer than GELU itself.
FEW_NUMBERS = 2**14


def are_plain_tensors(*tensors: torch.Tensor) -> bool:
    """Whether tensors are plain: operations on them run eagerly, and only reverse-mode gradients are computed.

    False if a program is traced or compiled, for tensor subclasses, and for tensors of torch.func, of batched
    gradients, and of forward-mode differentiation.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if any(type(x) not in (torch.Tensor, nn.Parameter) for x in tensors):
        return False
    if any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors):
        return False
    return all(unpack_dual(x).tangent is None for x in tensors)


def differentiable_gradients(
    output: torch.Tensor, inputs: tuple[torch.Tensor | None, ...], needed: tuple[bool, ...], gradient: torch.Tensor
) -> Iterator[torch.Tensor | None]:
    """Return differentiable gradients of the inputs that are needed, and None for the others."""
    wanted = [x for x, need in zip(inputs, needed) if need and x is not None]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return (next(found) if need else None for need in needed)


def perceptron(first: nn.Module, activation: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """second(activation(first(x))). With GELU, only one of the two wide tensors between the layers is kept."""
    with_gradients, gelu = torch.is_grad_enabled(), _is_gelu(activation)
    if not with_gradients and gelu and _takes_activations(first, x):
        return second(torch.ops.mkldnn._linear_pointwise(x, first.weight, first.bias, "gelu", [], "none"))
    projected = first(x)
    if gelu and are_plain_tensors(projected):
        if with_gradients and is_linear(second):
            return _project(second, GELU, projected)
        if not with_gradients and is_linear(first):
            return second(_gelu_in_place(projected))
    return second(activation(projected))


def gated_projection(gate: torch.Tensor, context: torch.Tensor, projection: nn.Module) -> torch.Tensor:
    """projection(gate * context). The product is not kept for the backward pass."""
    if torch.is_grad_enabled() and are_plain_tensors(gate, context) and is_linear(projection):
        return _project(projection, PRODUCT, gate, context)
    return projection(gate * context)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the module only applies its weight and bias: an `nn.Linear` without hooks or other changes."""
    plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter and has_no_hooks(module)
    return plain and module.weight.layout == torch.strided


def onednn_is_enabled() -> bool:
    """Whether PyTorch has oneDNN (formerly MKL-DNN), and uses it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _takes_activations(module: nn.Module, x: torch.Tensor) -> TypeGuard[nn.Linear]:
    """Whether oneDNN can compute the product, the bias and an activation in one pass, without gradients.

    Only for bfloat16, where two passes over the result take as long as the product; not for float32, where the
    products of other libraries are as fast.
    """
    # The cheap checks come first, since a decoding step consists of many small calls.
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if not is_linear(module):
        return False
    if x.dim() == 0 or x.shape[-1] != module.weight.shape[1]:  # the error of `nn.Linear` names the shapes
        return False
    tensors = [y for y in (x, module.weight, module.bias) if y is not None]
    if any(y.dtype != torch.bfloat16 or not y.is_contiguous() for y in tensors) or not are_plain_tensors(*tensors):
        return False
    if not onednn_is_enabled():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _gelu_in_place(x: torch.Tensor) -> torch.Tensor:
    # PyTorch calls oneDNN for contiguous tensors, and its own kernel for a transposed view of the same memory.
    few = x.is_cpu and x.numel() < FEW_NUMBERS and x.numel() % 2 == 0 and x.is_contiguous()
    torch._C._nn.gelu_(x.view(-1, 2).mT if few else x)  # type: ignore[attr-defined]  # torch does not declare it
    return x


def _is_gelu(module: nn.Module) -> bool:
    return type(module) is GELUActivation and module.act is nn.functional.gelu and has_no_hooks(module)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs only the `forward` of its class, without hooks or a replaced `forward`."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return "forward" not in vars(module) and not module_hooks._has_any_global_hook()


# Cheap functions, each with its backward function, which takes the gradient of the result and the arguments.
Function = tuple[Callable[..., torch.Tensor], Callable[..., tuple[torch.Tensor, ...]]]
GELU: Function = nn.functional.gelu, lambda gradient, x: (torch.ops.aten.gelu_backward(gradient, x),)
PRODUCT: Function = torch.mul, lambda gradient, a, b: (gradient * b, gradient * a)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast converts float32 on a device; None if autocast is not enabled."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def full_precision(device_type: str) -> AbstractContextManager[object]:
    """Return a context that disables autocast.

    It is a null context if autocast is not enabled, since the overhead of calls dominates a decoding step.
    """
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def _project(linear: nn.Linear, function: Function, *arguments: torch.Tensor) -> torch.Tensor:
    """linear(function(*arguments)); the backward pass recomputes the function from its arguments."""
    device, tensors = arguments[0].device.type, [linear.weight, linear.bias, *arguments]
    dtype = autocast_dtype(device)
    if dtype is not None:  # autocast does not convert float64
        tensors = [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]
    with full_precision(device):
        return _LinearOfFunction.apply(function, *tensors)


class _LinearOfFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Function, weight: torch.Tensor, bias: torch.Tensor | None, *arguments: torch.Tensor
    ) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(weight, bias, *arguments)
        x = function[0](*arguments)
        # Not a view, unlike the result of `linear`, since outputs may be modified in place.
        output = x.new_empty(*x.shape[:-1], len(weight))
        rows, columns = x.reshape(-1, x.shape[-1]), weight.mT
        if bias is None:
            torch.mm(rows, columns, out=output.view(len(rows), len(weight)))
        else:
            torch.addmm(bias, rows, columns, out=output.view(len(rows), len(weight)))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, bias, *arguments = ctx.saved_tensors
        call, call_backward = ctx.function
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # the gradients will be differentiated again
            output = nn.functional.linear(call(*arguments), weight, bias)
            return None, *differentiable_gradients(output, (weight, bias, *arguments), needed, gradient)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.mT @ call(*arguments).reshape(-1, weight.shape[1]) if needed[0] else None
        of_bias = rows.sum(0) if needed[1] else None
        of_arguments = call_backward(gradient @ weight, *arguments) if any(needed[2:]) else [None] * len(arguments)
        return None, of_weight, of_bias, *of_arguments
