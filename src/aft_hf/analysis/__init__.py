"""Analysis of the position biases, keys and attention of a trained AFT, and of the attention of a vision transformer.

Functions of this package compute arrays, and `pictures` draws them; `aft-hf visualize` does both.
"""

from .maps import PatchMaps, bias_maps, key_features, on_patches, patch_maps
from .pictures import draw_losses, draw_maps, plot_position_biases, save
from .relative_attention import mean_attention, relative_attention


__all__ = [
    "PatchMaps",
    "bias_maps",
    "draw_losses",
    "draw_maps",
    "key_features",
    "mean_attention",
    "on_patches",
    "patch_maps",
    "plot_position_biases",
    "relative_attention",
    "save",
]
