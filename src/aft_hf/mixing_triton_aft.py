"""The Triton backend: Eq. 2 by fused kernels on a GPU, as custom operators of PyTorch.

The kernels compute problems in float32, bfloat16 or float16, one key per feature or per head, with the sigmoid gate of
the query: causal ones with every structure of w and packed documents (`mixing_triton_causal_aft.py`), those of tokens
that a state of constant size takes in (`mixing_triton_decoding_aft.py`), and bidirectional ones for which a table of
all pairs is the way (`mixing_triton_bidirectional_aft.py`). The portable backend computes what they do not: float64,
pair masks and positions that are not in order, tensors of torch.func and of forward-mode differentiation, gradients of
gradients, and the bidirectional rest.

Kernels run on CUDA devices where Triton is installed, and interpreted (`TRITON_INTERPRET=1`) on a CPU, for tests.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from .activations_aft import runs_as_written
from .mixing_backend_aft import Backend
from .mixing_triton_bidirectional_aft import mix as mix_both_ways
from .mixing_triton_bidirectional_aft import pays
from .mixing_triton_causal_aft import has_table
from .mixing_triton_causal_aft import mix as mix_causal
from .mixing_triton_decoding_aft import prefill, step


if TYPE_CHECKING:
    from .caching_aft import AFTLayerState
    from .mixing_aft import Mixing


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def triton_is_installed() -> bool:
    return find_spec("triton") is not None


class TritonBackend(Backend):
    """Fused kernels on a GPU."""

    name = "triton"
    # Not measured on a GPU yet: taken only where a user names it.
    only_by_name = True
    applies_gate = True
    takes_documents = True

    @staticmethod
    def supports(problem: "Mixing") -> bool:
        """Whether kernels compute this problem, on a device that runs them."""
        if problem.is_pairwise or problem.padding_mask is not None:
            return False
        biases, packed = problem.biases, problem.documents is not None
        if not problem.causal and (packed or not pays(biases, problem.length)):
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
        return torch.compiler.is_compiling() or runs_as_written(*given)

    @staticmethod
    def mix(problem: "Mixing") -> torch.Tensor:
        """(B, T, d) in the dtype of the values, times the sigmoid of the query."""
        return mix_causal(problem) if problem.causal else mix_both_ways(problem)

    @staticmethod
    def step(state: "AFTLayerState", problem: "Mixing") -> torch.Tensor | None:
        """(B, 1, d) in the dtype of the values, times the sigmoid of the query."""
        return step(state, problem) if _can_be_taken_in(state, problem) else None

    @staticmethod
    def prefill(state: "AFTLayerState", problem: "Mixing", counts: torch.Tensor | None) -> torch.Tensor | None:
        """(B, T, d) in the dtype of the values, times the sigmoid of the query."""
        return prefill(state, problem, counts) if _can_be_taken_in(state, problem) else None


def _can_be_taken_in(state: "AFTLayerState", problem: "Mixing") -> bool:
    """Whether kernels update this state: one of constant size, of which no gradients are asked for."""
    if state.window is None or not TritonBackend.supports(problem):
        return False
    given = problem.query, problem.key, problem.value, *problem.biases.tensors()
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given))


def _runs_kernels(device: torch.device) -> bool:
    """Whether kernels run there, or are interpreted; on meta tensors, whether they would."""
    if not triton_is_installed():
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type in ("cuda", "meta") or (device.type == "cpu" and interpreted)
