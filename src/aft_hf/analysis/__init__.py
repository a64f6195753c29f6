"""Looking at what an AFT has learned, and at what the vision transformer before it had."""

from .position_bias import plot_position_biases
from .relative_attention import mean_attention, relative_attention


__all__ = ["mean_attention", "plot_position_biases", "relative_attention"]
