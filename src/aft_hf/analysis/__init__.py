"""Analysis of the position biases, keys and attention of a trained AFT, and of the attention of a vision transformer.

Functions of this package compute arrays, and `pictures` draws them; `aft-hf visualize` does both.
"""

from .maps import bias_maps, key_features, mean_attention, on_patches, relative_attention
from .pictures import draw_losses, draw_maps, plot_position_biases, save


__all__ = [
    "bias_maps",
    "draw_losses",
    "draw_maps",
    "key_features",
    "mean_attention",
    "on_patches",
    "plot_position_biases",
    "relative_attention",
    "save",
]
