"""The direct form of AFT-conv on a grid by a depth-wise convolution (Eq. 6)."""

import torch

from .direct_mixing_aft import DirectSums, by_position, gradient_of_inputs, gradient_of_sums
from .mixing_aft import working_dtype


class ConvolutionSums(DirectSums):
    """AFT-conv on a grid as the paper writes it (Eq. 6): a depth-wise convolution with exp(w) - 1, and the sum of all.

    O(T d s^2) time and no table. Position biases are the kernels (h, s, s). For large negative ones, both parts almost
    cancel, so these are left to the safe form.

    Args:
        grid_size: (rows, columns) of the grid.
    """

    lowest_bias = -2.0

    def __init__(self, grid_size: tuple[int, int]):
        self.grid_size = grid_size

    def forward(self, key, value, bias, inverse=None):
        context = by_position(value)
        features = self._features(key, value)
        everything = features.sum((2, 3), keepdim=True)
        sums = self._numerators_and_denominators(self._convolve(features, bias).add_(everything), value)
        numerator, denominator = sums[0], self._reciprocal(sums[1])
        if inverse is not None:
            inverse.copy_(denominator)
        return torch.mul(numerator, denominator, out=context)

    def backward(self, key, value, bias, context, inverse, gradient, bias_needed):
        key_gradient, value_gradient = by_position(key), by_position(value)
        features = self._features(key, value)
        of_sums = torch.empty_like(features)
        gradient_of_sums(gradient, context, inverse, *self._numerators_and_denominators(of_sums, value))
        with torch.enable_grad():
            inputs = features.requires_grad_(), bias.detach().requires_grad_()
            convolved = self._convolve(*inputs)
        of_features, of_bias = torch.autograd.grad(convolved, inputs, of_sums)
        of_features = of_features + of_sums.sum((2, 3), keepdim=True)
        parts = (self._numerators_and_denominators(x, value) for x in (of_features, features.detach()))
        gradient_of_inputs(*parts, key_gradient, value_gradient)
        return key_gradient, value_gradient, of_bias if bias_needed else None

    def _features(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """exp(K) V of all features, then exp(K) of all heads: (B, d + h, rows, columns), channels last in memory."""
        rows, heads, _, width = value.shape
        dtype = working_dtype(value)  # convolutions of bfloat16 are no faster
        features = value.new_empty(rows, *self.grid_size, heads * (width + 1), dtype=dtype).movedim(-1, 1)
        weighted, weights = self._numerators_and_denominators(features, value)
        weights.copy_(torch.exp(key.to(dtype)))
        torch.mul(value, weights, out=weighted)
        return features

    def _numerators_and_denominators(self, channels: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views (B, h, T, c) and (B, h, T, 1) of (B, d + h, rows, columns)."""
        heads, width = value.shape[1], value.shape[3]
        tokens = channels.movedim(1, -1).flatten(1, 2)  # (B, T, d + h)
        parts = tokens.split([heads * width, heads], -1)
        return tuple(part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)

    def _convolve(self, features: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        kernels = torch.expm1(bias.to(features.dtype)).unsqueeze(1)
        heads, size = len(kernels), kernels.shape[-1]
        of_each = torch.cat([kernels.repeat_interleave(features.shape[1] // heads - 1, 0), kernels])
        return torch.nn.functional.conv2d(features, of_each, padding=size // 2, groups=features.shape[1])
