"""Derivation of a tensor from tensors of a checkpoint: steps as text, which a report stores and `compute` executes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..position_biases_aft import widen


@dataclass(frozen=True)
class Derivation:
    """A tensor as the result of applying `steps` in order to tensors of a checkpoint.

    Attributes:
        sources: the names of the tensors in the checkpoint; more than one only if the step `MEAN` averages them.
        steps: the steps, each `SCALE` or a step that matches a key of `STEPS`; empty for a plain copy.
        factor: the name of the tensor that the step `SCALE` multiplies by.
    """

    sources: tuple[str, ...]
    steps: tuple[str, ...] = ()
    factor: str | None = None

    def then(self, *steps: str) -> "Derivation":
        """Return this derivation with more steps appended."""
        return replace(self, steps=self.steps + steps)

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the tensor from the tensors of a checkpoint.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a step is unknown.
            RuntimeError or IndexError: a step cannot be applied to a tensor of this shape.
        """
        given = [tensors[name] for name in self.sources]
        tensor = given[0] if len(given) == 1 else torch.stack(given)
        factor = None if self.factor is None else tensors[self.factor]
        for step in self.steps:
            tensor = _execute(step, tensor, factor)
        return tensor


MEAN = "mean"
SCALE = "scale rows by the factor"
PREPEND_POSITION = "prepend a zero position"


def rows(start: int, stop: int) -> str:
    """The step that keeps the rows start .. stop - 1."""
    return f"rows {start}:{stop}"


def drop_position(index: int) -> str:
    """The step that drops the position at an index from position embeddings (1, T, d)."""
    return f"drop position {index}"


def resize_positions(old: tuple[int, int], new: tuple[int, int]) -> str:
    """The step that interpolates the grid at the end of position embeddings (1, T, d) and keeps the others."""
    return f"resize positions {old[0]}x{old[1]} to {new[0]}x{new[1]}, bicubic"


def cast(dtype: torch.dtype) -> str:
    """The step that casts to a dtype."""
    return f"cast to {str(dtype).removeprefix('torch.')}"


def row_range(steps: tuple[str, ...], length: int) -> range:
    """Return the rows that a derivation with these steps uses of a source tensor of `length` rows."""
    match = next(filter(None, (re.fullmatch(ROWS, step) for step in steps)), None)
    return range(*map(int, match.groups())) if match else range(length)


def _mean(stacked: torch.Tensor) -> torch.Tensor:
    return widen(stacked).mean(0).to(stacked.dtype)


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if not factor.dim():
        raise IndexError("a scalar is no factor for each row")
    columns = factor.reshape(-1, *[1] * (tensor.dim() - 1))
    return (widen(tensor) * widen(columns)).to(tensor.dtype)


def _prepend_position(positions: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(positions, (0, 0, 1, 0))


def _drop_position(positions: torch.Tensor, index: int) -> torch.Tensor:
    return torch.cat([positions[:, :index], positions[:, index + 1 :]], 1)


def _resize_positions(positions: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Interpolate as ViT does: bicubic, corners not aligned, no antialiasing."""
    old, new = sizes[:2], sizes[2:]
    start = positions.shape[1] - old[0] * old[1]
    grid = widen(positions[:, start:]).unflatten(1, old).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :start], grid.flatten(2).mT.to(positions.dtype)], 1)


ROWS = r"rows (\d+):(\d+)"
# All steps but `SCALE`, by pattern: the numbers in a step are the arguments of its function.
STEPS: dict[str, Callable[..., torch.Tensor]] = {
    ROWS: lambda tensor, start, stop: tensor[start:stop],
    MEAN: _mean,
    PREPEND_POSITION: _prepend_position,
    r"drop position (\d+)": _drop_position,
    r"resize positions (\d+)x(\d+) to (\d+)x(\d+), bicubic": _resize_positions,
    r"cast to float(\d+)": lambda tensor, bits: tensor.to(getattr(torch, f"float{bits}")),
}


def _execute(step: str, tensor: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    if step == SCALE and factor is not None:
        return _scale(tensor, factor)
    for pattern, function in STEPS.items():
        if match := re.fullmatch(pattern, step):
            return function(tensor, *map(int, match.groups()))
    raise ValueError(f"{step!r} is no step of a conversion")
