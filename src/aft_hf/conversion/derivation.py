"""How a tensor is made of tensors of a checkpoint: in words that a report can hold and a program can execute."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..scaled_sums_aft import widen


@dataclass(frozen=True)
class Derivation:
    """A tensor as the result of `steps`, one after the other, on tensors of a checkpoint.

    Attributes:
        sources: their names in the checkpoint; several only where `MEAN` is the step that joins them.
        steps: what is done; none for a plain copy. `STEPS` lists what there is.
        factor: the name of the tensor that `SCALE` multiplies with.
    """

    sources: tuple[str, ...]
    steps: tuple[str, ...] = ()
    factor: str | None = None

    def then(self, *steps: str) -> "Derivation":
        """The same with more steps at the end."""
        return replace(self, steps=self.steps + steps)

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Execute it.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a step that is not known.
            RuntimeError: shapes to which a step cannot be applied.
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
    """The step that leaves out one of the positions of (1, T, d)."""
    return f"drop position {index}"


def resize_positions(old: tuple[int, int], new: tuple[int, int]) -> str:
    """The step that interpolates the last positions of (1, T, d), a grid, and keeps those before them."""
    return f"resize positions {old[0]}x{old[1]} to {new[0]}x{new[1]}, bicubic"


def cast(dtype: torch.dtype) -> str:
    """The step that changes the dtype."""
    return f"cast to {str(dtype).removeprefix('torch.')}"


def row_range(steps: tuple[str, ...], length: int) -> range:
    """The rows of a source of `length` rows that a derivation with these steps takes."""
    match = next(filter(None, (re.fullmatch(ROWS, step) for step in steps)), None)
    return range(*map(int, match.groups())) if match else range(length)


def _mean(stacked: torch.Tensor) -> torch.Tensor:
    return widen(stacked).mean(0).to(stacked.dtype)


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    columns = factor.reshape(-1, *[1] * (tensor.dim() - 1))
    return (widen(tensor) * widen(columns)).to(tensor.dtype)


def _prepend_position(positions: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(positions, (0, 0, 1, 0))


def _drop_position(positions: torch.Tensor, index: int) -> torch.Tensor:
    return torch.cat([positions[:, :index], positions[:, index + 1 :]], 1)


def _resize_positions(positions: torch.Tensor, *sizes: int) -> torch.Tensor:
    """As ViT interpolates them: bicubic, corners not aligned, no antialiasing."""
    old, new = sizes[:2], sizes[2:]
    start = positions.shape[1] - old[0] * old[1]
    grid = widen(positions[:, start:]).unflatten(1, old).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :start], grid.flatten(2).mT.to(positions.dtype)], 1)


ROWS = r"rows (\d+):(\d+)"
# The whole vocabulary: the numbers in a step are the arguments of its function.
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
