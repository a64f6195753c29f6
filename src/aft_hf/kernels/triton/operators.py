"""The operators of `kernels/operators.py` by Triton kernels, for CUDA devices.

The kernels take float32, bfloat16 and float16, with sums in float32. The portable form computes other dtypes, and what
does not compile on a GPU. Triton is imported at the first call of an operator.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from ...position_biases_aft import working_dtype
from .. import operators as schema
from .kept import kept_like


logger = logging.get_logger(__name__)
Tensors = tuple[torch.Tensor, ...]
Result = TypeVar("Result")

# Operators, dtypes and devices that some kernel failed to compile for.
FAILED: set[tuple[str, torch.dtype, torch.device]] = set()


def launches(name: str) -> Any:
    """Return the module that launches the kernels of an operator."""
    from . import causal_launch, product_launch

    return product_launch if name in ("grid", "table") else causal_launch


def implementations() -> dict[str, Callable[..., Any]]:
    """Return the functions of all operators by name."""
    functions: dict[str, Callable[..., Any]] = {"causal_state": _causal_state, "band": _band}
    functions["band_backward"] = _band_backward
    for name in ("causal", "grid", "table"):
        functions[name] = partial(_forward, name)
        functions[f"{name}_keeping"] = partial(_keeping, name)
        functions[f"{name}_backward_keeping"] = partial(_backward, name)
    return functions


def register(dispatch_key: str = "CUDA") -> torch.library.Library:
    """Register the kernels for a dispatch key, in place of what is registered for it, as long as the result exists."""
    library = torch.library.Library(schema.NAMESPACE, "IMPL")
    for name, function in implementations().items():
        library.impl(name, function, dispatch_key, allow_override=True)
    schema.KEEPING.add(dispatch_key.lower())
    return library


def _run(name: str, like: torch.Tensor, launch: Callable[[Any], Result], otherwise: Callable[[], Result]) -> Result:
    """Launch kernels for tensors of a dtype on their device, or compute otherwise from the first failure on."""
    problem = name, like.dtype, like.device
    if problem not in FAILED and like.shape[1:].numel() < 2**31:  # offsets within a row have 32 bits
        try:
            with torch.cuda.device_of(like):  # Triton launches on the current device
                return launch(launches(name))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # of any kind: of Triton, LLVM, the assembler, or the C compiler of a launcher
            # Triton raises errors of CUDA that have nothing to do with the kernel as RuntimeError.
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            if "captur" in str(error):  # of a CUDA graph
                raise
            result = otherwise()  # an error in it is one of the call, and no reason to turn the kernels off
            FAILED.add(problem)
            logger.warning(
                f"the Triton kernels for {name} in {like.dtype} do not work on {like.device}, so PyTorch operations "
                f"compute it, which take several times longer ({type(error).__name__}: {str(error)[:300]}); "
                "AFT_HF_TRITON=0 turns the kernels off"
            )
            return result
    return otherwise()


def _forward(name: str, *problem: Any) -> torch.Tensor:
    value = problem[2]
    if value.numel() == 0:
        return torch.empty_like(value)
    otherwise = partial(schema.portable, name, *problem)
    if not schema._takes(name, problem):
        return otherwise()
    return _run(name, value, lambda module: getattr(module, name)(*problem, False)[0], otherwise)


def _keeping(name: str, *problem: Any) -> Tensors:
    def otherwise() -> Tensors:
        output = torch.empty_like(problem[2]) if problem[2].numel() == 0 else schema.portable(name, *problem)
        return output, *kept_like(name, *problem[1:4])

    if problem[2].numel() == 0:
        return otherwise()
    return _run(name, problem[2], lambda module: getattr(module, name)(*problem, True), otherwise)


def _backward(name: str, gradient: torch.Tensor, *arguments: Any) -> Tensors:
    *problem, _, _, _, bias_needed = arguments
    if problem[2].numel() == 0:
        return tuple(x.zero_() for x in schema.new_gradients(gradient, *problem, bias_needed))
    otherwise = partial(_portable_gradients, name, gradient, problem, bias_needed)
    return _run(name, problem[2], lambda module: getattr(module, f"{name}_backward")(gradient, *arguments), otherwise)


def _portable_gradients(name: str, gradient: torch.Tensor, problem: list[Any], bias_needed: bool) -> Tensors:
    """Compute gradients by the portable form."""
    gradients = list(schema.new_gradients(gradient, *problem, bias_needed))
    places = [i for i, x in enumerate(gradients) if problem[i] is not None and x.shape == problem[i].shape]
    with torch.enable_grad():
        given = [x.detach().requires_grad_(i in places) if torch.is_tensor(x) else x for i, x in enumerate(problem)]
        output, wanted = schema.portable(name, *given), [given[i] for i in places]
        for i, x in zip(places, torch.autograd.grad(output, wanted, gradient, materialize_grads=True)):
            gradients[i] = x.contiguous()  # as compiled programs expect them
    return tuple(gradients)


def _causal_state(*arguments: Any) -> torch.Tensor:
    value = arguments[2]
    if value.numel() == 0:
        return torch.empty_like(value)
    otherwise = partial(schema.portable_state, *arguments)
    if not schema._takes("causal", arguments[:7]) or not all(x.is_contiguous() for x in arguments[7:]):
        return otherwise()
    return _run("causal_state", value, lambda module: module.causal_state(*arguments), otherwise)


def _band(*problem: Any) -> torch.Tensor:
    def otherwise() -> torch.Tensor:
        return schema.portable("band", *problem).to(working_dtype(problem[0]))

    if not schema._takes("band", problem):
        return otherwise()
    return _run("band", problem[0], lambda module: module.band(*problem), otherwise)


def _band_backward(gradient: torch.Tensor, *problem: Any) -> Tensors:
    def otherwise() -> Tensors:
        with torch.enable_grad():
            factors = [x.detach().requires_grad_() for x in problem[:2]]
            gradients = torch.autograd.grad(schema.portable("band", *factors, *problem[2:]), factors, gradient)
            return tuple(x.contiguous() for x in gradients)

    return _run("band", problem[0], lambda module: module.band_backward(gradient, *problem), otherwise)
