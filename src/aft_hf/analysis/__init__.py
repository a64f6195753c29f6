"""Looking at what an AFT has learned."""

from .position_bias import plot_position_biases


__all__ = ["plot_position_biases"]
