"""The projections of a mixer, for backends that compute them together with Eq. 2."""

from typing import NamedTuple

import torch
from torch import nn

from .activations_aft import autocast_dtype, has_no_hooks, is_linear


# The dtypes in which a backend may compute the projections. For gradients, bfloat16 features are summed in float32.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Projections(NamedTuple):
    """The modules of a mixer, and its number of position-bias heads; `query` is None for a mixer without a gate."""

    query: nn.Module | None
    activation: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    num_heads: int

    def of_input(self) -> list[nn.Module]:
        """Return the projections of the input: key, value and, if there is a gate, query."""
        return [self.key, self.value] if self.query is None else [self.key, self.value, self.query]

    def can_be_replaced(self, x: torch.Tensor) -> bool:
        """Whether a backend can project x (B, T, d) by the weights of the modules, without calling the modules.

        All modules must be plain linear layers and a sigmoid, in one dtype. Modules with hooks, of other classes or of
        other sizes have to be called.
        """
        layers = [*self.of_input(), self.output]
        if not self._are_plain(x.shape[-1]):
            return False
        dtypes = {x.dtype, *(p.dtype for layer in layers for p in layer.parameters())}
        if autocast_dtype(x.device.type) is not None:  # autocast does not convert float64
            return self.dtype(x) == torch.bfloat16 and dtypes <= {torch.float32, torch.bfloat16}
        return len(dtypes) == 1 and x.dtype in DTYPES

    @staticmethod
    def dtype(x: torch.Tensor) -> torch.dtype:
        """Return the dtype of the output of a linear layer for x."""
        return autocast_dtype(x.device.type) or x.dtype

    def _are_plain(self, width: int) -> bool:
        layers = self.of_input()
        gated = self.query is None or (type(self.activation) is nn.Sigmoid and has_no_hooks(self.activation))
        ends = is_linear(self.output) or (type(self.output) is nn.Identity and has_no_hooks(self.output))
        linear = [layer for layer in layers if is_linear(layer)]
        if not (gated and ends and len(linear) == len(layers)):
            return False
        key_shape, *others = (tuple(layer.weight.shape) for layer in linear)
        others += [tuple(self.output.weight.shape)] if is_linear(self.output) else []
        usual = key_shape in ((width, width), (self.num_heads, width)) and set(others) == {(width, width)}
        biases = [layer.bias for layer in linear]
        whole = all(b is not None and b.shape == y.weight.shape[:1] for b, y in zip(biases, linear))
        return usual and (whole or all(b is None for b in biases))
