"""Less memory for activations, with the same numbers: they are overwritten, or made again for the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_hooks
from transformers.activations import GELUActivation


def runs_eagerly() -> bool:
    """Whether operations run as they are written, and not to be traced or transformed into other ones."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (traced or torch._C._are_functorch_transforms_active())


def project_and_activate(projection: nn.Module, activation: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """activation(projection(x)). Without gradients GELU overwrites what the projection gave.

    Hooks may keep what they see, so where there are some, nothing is overwritten.
    """
    projected = projection(x)
    hooks = projection._forward_hooks, activation._forward_hooks, activation._forward_pre_hooks
    unseen = not any(hooks) and not module_hooks._has_any_global_hook()
    gelu = type(activation) is GELUActivation and activation.act is nn.functional.gelu
    if gelu and unseen and runs_eagerly() and not torch.is_grad_enabled():
        return torch.ops.aten.gelu_(projected)
    return activation(projected)


@contextmanager
def made_again(
    tensor: torch.Tensor, function: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> Iterator[None]:
    """Operations in this context do not keep `tensor` for their gradients: it is made again, as function(*arguments).

    For a cheap function of tensors that are kept anyway. Where somebody else decides on what is kept, such as gradient
    checkpointing, that stays so.
    """
    if not (tensor.requires_grad and runs_eagerly()) or torch._C._autograd._top_saved_tensors_default_hooks(True):
        yield
        return

    wanted = _identity(tensor)  # the graph keeps `pack`, which must not keep the tensor

    def pack(kept: torch.Tensor) -> torch.Tensor | torch.Size:
        return kept.shape if kept.is_contiguous() and _identity(kept) == wanted else kept

    def unpack(kept: torch.Tensor | torch.Size) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        with torch.no_grad():
            return function(*arguments).view(kept)

    with saved_tensors_hooks(pack, unpack):
        yield


def _identity(x: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """The same for all contiguous views of the same numbers."""
    return x.data_ptr(), x.numel(), x.dtype
