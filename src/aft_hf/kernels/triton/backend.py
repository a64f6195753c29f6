"""The Triton backend: Eq. 2 by fused GPU kernels, as custom operators of PyTorch.

The kernels compute in float32, bfloat16 or float16, with one key per feature or per head, and include the sigmoid gate
of the query. They cover causal problems with every structure of w and packed documents
(`causal.py`), generation with a state of constant size (`decoding.py`), and
bidirectional problems for which a table of all pairs is efficient (`bidirectional.py`). The portable
backend computes all other cases: float64, pair masks, positions that are not in order, torch.func and forward-mode
differentiation, gradients of gradients, and other bidirectional problems.

The kernels need Triton and a CUDA device. For tests they also run on a CPU, interpreted (`TRITON_INTERPRET=1`).
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

from ...caching_aft import AFTLayerState
from ...mixing_aft import Backend, Mixing
from ...portable_aft import are_plain_tensors
from .bidirectional import mix as mix_bidirectional
from .bidirectional import table_is_efficient
from .causal import has_table
from .causal import mix as mix_causal
from .decoding import prefill, step


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def triton_is_installed() -> bool:
    return find_spec("triton") is not None


class TritonBackend(Backend):
    """Fused GPU kernels."""

    name = "triton"
    # Not measured on a GPU yet, so used only if the user names it.
    only_by_name = True
    takes_documents = True

    @staticmethod
    def supports(problem: Mixing) -> bool:
        """Whether the kernels can compute this problem, and its device can run them."""
        if problem.is_pairwise or problem.padding_mask is not None:
            return False
        biases, packed = problem.biases, problem.documents is not None
        if not problem.causal and (packed or not table_is_efficient(biases, problem.length)):
            return False
        given = [problem.key, problem.value, *biases.tensors()]
        given += [] if problem.query is None else [problem.query]
        if any(x.dtype not in DTYPES for x in given if x.is_floating_point()):
            return False
        device = problem.value.device
        if problem.key.dtype != problem.value.dtype or not _runs_kernels(device):
            return False
        if any(x.device != device or x.numel() == 0 for x in given):
            return False
        if packed and has_table(biases) and torch.are_deterministic_algorithms_enabled():
            return False
        return torch.compiler.is_compiling() or are_plain_tensors(*given)

    @staticmethod
    def mix(problem: Mixing) -> torch.Tensor:
        """Eq. 2 times sigmoid(query), if there is one: (B, T, d) in the dtype of the values."""
        return mix_causal(problem) if problem.causal else mix_bidirectional(problem)

    @staticmethod
    def step(state: AFTLayerState, problem: Mixing) -> torch.Tensor | None:
        """As `Backend.step`: (B, 1, d) in the dtype of the values, times sigmoid(query)."""
        return step(state, problem) if _can_be_taken_in(state, problem) else None

    @staticmethod
    def prefill(state: AFTLayerState, problem: Mixing, counts: torch.Tensor | None) -> torch.Tensor | None:
        """As `Backend.prefill`: (B, T, d) in the dtype of the values, times sigmoid(query)."""
        return prefill(state, problem, counts) if _can_be_taken_in(state, problem) else None


def _can_be_taken_in(state: AFTLayerState, problem: Mixing) -> bool:
    """Whether the kernels can update this state: it has a constant size, and no input requires gradients."""
    if state.window is None or not TritonBackend.supports(problem):
        return False
    given = problem.query, problem.key, problem.value, *problem.biases.tensors()
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given))


def _runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on the device, compiled or interpreted. On meta tensors, whether Triton is installed."""
    if not triton_is_installed():
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type in ("cuda", "meta") or (device.type == "cpu" and interpreted)
