"""What a backend is: the base class of all of them, with the questions that `mixing_aft.py` asks."""

from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from .mixing_aft import Mixing
    from .position_biases_aft import PositionBias
    from .projections_aft import Projections


class Backend:
    """One way to compute Eq. 2.

    Attributes:
        name: under which a user asks for it, `mixing_implementation`.
        only_by_name: whether it is taken where it is named and nowhere else.
        applies_gate: whether `mix` multiplies by sigmoid(query) where a problem has one; else the caller does.
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
    def layer(
        x: torch.Tensor, projections: "Projections", biases: "PositionBias", causal: bool
    ) -> torch.Tensor | None:
        """A mixer of (B, T, d), its projections included; None where these are computed apart."""
        return None
