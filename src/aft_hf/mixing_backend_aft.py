"""What a backend is: the base class of all of them, with the questions that `mixing_aft.py` asks."""

import re
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from .caching_aft import AFTLayerState
    from .mixing_aft import Mixing
    from .position_biases_aft import PositionBias
    from .projections_aft import Projections


# The namespace of custom operators. Those of a copy of these files that came with a checkpoint are not those of the
# installed package.
OPERATORS = re.sub(r"\W", "_", __package__ or "aft_hf")


class Backend:
    """One way to compute Eq. 2.

    Attributes:
        name: under which a user asks for it, `mixing_implementation`.
        only_by_name: whether it is taken where it is named and nowhere else.
        applies_gate: whether `mix` multiplies by sigmoid(query) where a problem has one; else the caller does.
            `step` and `prefill` always do.
        takes_documents: whether `mix` takes packed documents as they are; else each becomes a row of its own.
    """

    name: str
    only_by_name = False
    applies_gate = False
    takes_documents = False

    @staticmethod
    def supports(problem: "Mixing") -> bool:
        """Whether `mix` computes this problem."""
        raise NotImplementedError

    @staticmethod
    def mix(problem: "Mixing") -> torch.Tensor:
        """(B, T, d) in the dtype of the values."""
        raise NotImplementedError

    @staticmethod
    def step(state: "AFTLayerState", problem: "Mixing") -> torch.Tensor | None:
        """Eq. 2 of the next token of every row, times the gate: (B, 1, d); adds the token to the state. None if this
        backend does not compute it: then the state does.
        """
        return None

    @staticmethod
    def prefill(state: "AFTLayerState", problem: "Mixing", counts: torch.Tensor | None) -> torch.Tensor | None:
        """Eq. 2 of more tokens, times the gate: (B, T, d); adds them to the state. None if this backend does not
        compute it: then the state does.

        Args:
            state: not initialized before the first tokens.
            problem: has no padding mask: real tokens stand first.
            counts: (B,), how many tokens of each row are real; None for all.
        """
        return None

    @staticmethod
    def layer(
        x: torch.Tensor, projections: "Projections", biases: "PositionBias", causal: bool
    ) -> torch.Tensor | None:
        """A mixer of (B, T, d), its projections included; None where these are computed apart."""
        return None
