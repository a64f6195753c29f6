"""Derivation of a tensor from tensors of a checkpoint, by steps that are data: reports store them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..position_biases_aft import widen


Step = tuple[str | int, ...]  # the name of a step (see `_execute`) and its arguments
PARTS = 3  # of a fused projection: query, key and value


@dataclass(frozen=True)
class Derivation:
    """A tensor as the result of applying `steps` in order to tensors of a checkpoint.

    Attributes:
        sources: the names of the tensors in the checkpoint; more than one only if the step "mean" averages them.
        steps: the steps; none for a plain copy.
    """

    sources: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def then(self, *steps: Step) -> "Derivation":
        """Return this derivation with more steps appended."""
        return Derivation(self.sources, self.steps + steps)

    @property
    def factors(self) -> list[str]:
        """The names of the tensors that this one is multiplied by."""
        return [str(step[1]) for step in self.steps if step[0] == "scale"]

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of its sources that it uses: all `PARTS`, or one part of a fused projection."""
        return next(((int(step[1]),) for step in self.steps if step[0] == "part"), tuple(range(PARTS)))

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the tensor from the tensors of a checkpoint.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a step is unknown.
            RuntimeError or IndexError: a step cannot be applied to a tensor of this shape.
        """
        given = [tensors[name] for name in self.sources]
        tensor = given[0] if len(given) == 1 else torch.stack(given)
        for step in self.steps:
            tensor = _execute(step, tensor, tensors)
        return tensor


def _execute(step: Step, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    match step:
        case ("cast", ("float16" | "bfloat16" | "float32" | "float64") as dtype):
            return tensor.to(getattr(torch, dtype))
        case ("part", int(index)):  # of the rows
            return tensor.chunk(PARTS)[index]
        case ("mean",):
            return widen(tensor).mean(0).to(tensor.dtype)
        case ("scale", str(factor)):  # a layer scale: one factor for each row
            columns = tensors[factor].unflatten(0, (-1, *[1] * (tensor.dim() - 1)))
            return (widen(tensor) * widen(columns)).to(tensor.dtype)
        # Position embeddings are (1, T, d), with the grid of patches at the end.
        case ("prepend_position",):
            return nn.functional.pad(tensor, (0, 0, 1, 0))
        case ("drop_position", int(index)):
            return torch.cat([tensor[:, :index], tensor[:, index + 1 :]], 1)
        case ("resize_positions", int(rows), int(columns), int(new_rows), int(new_columns)):
            return _resize_positions(tensor, (rows, columns), (new_rows, new_columns))
    raise ValueError(f"{step!r} is no step of a conversion")


def _resize_positions(positions: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Interpolate the grid of position embeddings as ViT does: bicubic, corners not aligned, no antialiasing."""
    start = positions.shape[1] - old[0] * old[1]
    grid = widen(positions[:, start:]).unflatten(1, old).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :start], grid.flatten(2).mT.to(positions.dtype)], 1)
