"""Looking at what an AFT has learned, and at what the vision transformer before it had."""

from .patch_maps import PatchMaps, patch_maps
from .position_bias import plot_position_biases
from .relative_attention import mean_attention, relative_attention


__all__ = ["PatchMaps", "mean_attention", "patch_maps", "plot_position_biases", "relative_attention"]
