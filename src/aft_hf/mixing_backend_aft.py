"""The base class of all backends, with the methods that `mixing_aft.py` calls."""

import re
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from .caching_aft import AFTLayerState
    from .mixing_aft import Mixing
    from .position_biases_aft import PositionBias
    from .projections_aft import Projections


# The namespace of custom operators. A copy of these files that is loaded with a checkpoint has a namespace of its own,
# so its operators do not collide with those of the installed package.
OPERATORS = re.sub(r"\W", "_", __package__ or "aft_hf")


class Backend:
    """One implementation of Eq. 2.

    Attributes:
        name: the name of the backend as a value of `mixing_implementation`.
        only_by_name: whether the backend is used only if `mixing_implementation` names it.
        applies_gate: whether `mix` multiplies by sigmoid(query) if the problem has a query; otherwise the caller does.
            `step` and `prefill` always apply the gate.
        takes_documents: whether `mix` supports packed documents; otherwise each document becomes a row of its own.
    """

    name: str
    only_by_name = False
    applies_gate = False
    takes_documents = False

    @staticmethod
    def supports(problem: "Mixing") -> bool:
        """Whether `mix` can compute this problem."""
        raise NotImplementedError

    @staticmethod
    def mix(problem: "Mixing") -> torch.Tensor:
        """Compute Eq. 2: (B, T, d) in the dtype of the values."""
        raise NotImplementedError

    @staticmethod
    def step(state: "AFTLayerState", problem: "Mixing") -> torch.Tensor | None:
        """Compute Eq. 2 for the next token of every row, times the gate, (B, 1, d), and add the token to the state.

        Returns None if this backend does not support the step; the state then computes it.
        """
        return None

    @staticmethod
    def prefill(state: "AFTLayerState", problem: "Mixing", counts: torch.Tensor | None) -> torch.Tensor | None:
        """Compute Eq. 2 for several tokens, times the gate, (B, T, d), and add the tokens to the state.

        Returns None if this backend does not support the problem; the state then computes it.

        Args:
            state: the state of the layer, which is not initialized before the first tokens.
            problem: the mixing problem, without a padding mask: the real tokens of a row come first.
            counts: (B,), the number of real tokens in each row; None if all tokens are real.
        """
        return None

    @staticmethod
    def layer(
        x: torch.Tensor, projections: "Projections", biases: "PositionBias", causal: bool
    ) -> torch.Tensor | None:
        """Compute a mixer with its projections for x (B, T, d); None if the projections have to be computed apart."""
        return None
