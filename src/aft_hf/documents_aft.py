"""Documents that are packed into one row: where they start, and each of them as a row of its own.

A document never sees another one. So a packed row is computed as the batch of its documents, those of about the same
length together; with at most twice the tokens this is exact for every type and as fast as the type is.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from .scaled_sums_aft import power_of_two_from


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch.

    Args:
        starts: (B, T) boolean, True at the first token of each document; the first token of a row always is one.
    """

    starts: torch.Tensor

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor, batch_size: int) -> "Documents":
        """From positions (B or 1, T) that start again at 0 with each document."""
        starts = position_ids == 0
        starts = torch.cat([torch.ones_like(starts[:, :1]), starts[:, 1:]], 1)
        return cls(starts.expand(batch_size, -1))

    @classmethod
    def from_cumulative_lengths(cls, cu_seq_lens: torch.Tensor, batch_size: int, length: int) -> "Documents":
        """From the boundaries of the documents in all rows one after the other: (N + 1,), from 0 to B T."""
        starts = torch.arange(length, device=cu_seq_lens.device).eq(0).repeat(batch_size)
        # The last boundary is the end of the last document. As a start it falls on an entry that is dropped.
        starts = torch.cat([starts, starts[:1]]).index_fill(0, cu_seq_lens.long(), True)[:-1]
        return cls(starts.view(batch_size, length))

    @property
    def can_be_unpacked(self) -> bool:
        """Whether the number and the lengths of documents may be read by the host, which a traced program cannot."""
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        return not traced and self.starts.device.type != "meta"

    def are_rows(self) -> bool:
        """Whether each row is one document; False where that is not known."""
        return self.can_be_unpacked and self.starts.device.type == "cpu" and not self.starts[:, 1:].any()

    def longest(self) -> int | None:
        """The length of the longest document; None where that is not known without waiting for an accelerator."""
        if not self.can_be_unpacked or self.starts.device.type != "cpu":
            return None
        return int(self.positions().max()) + 1

    def pairs(self) -> torch.Tensor:
        """(B, T, T), whether two tokens are of one document."""
        document = self.starts.cumsum(1)
        return document[:, :, None] == document[:, None, :]

    def positions(self) -> torch.Tensor:
        """(B, T), the position of each token in its document."""
        places = torch.arange(self.starts.shape[1], device=self.starts.device)
        return places - torch.where(self.starts, places, 0).cummax(1).values

    @cached_property
    def rows(self) -> list["DocumentRows"]:
        """All documents as rows, in batches of those whose lengths have the same next power of two.

        Made once for all layers: the host has to know the lengths.
        """
        first = self.starts.flatten().nonzero().squeeze(1)
        lengths = torch.diff(first, append=first.new_tensor([self.starts.numel()]))
        by_size: dict[int, list[int]] = {}
        for document, length in enumerate(lengths.tolist()):
            by_size.setdefault(power_of_two_from(length), []).append(document)
        chosen = (torch.tensor(documents, device=first.device) for documents in by_size.values())
        return [DocumentRows(first[documents], lengths[documents]) for documents in chosen]


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Some documents as rows that are padded on the right.

    Args:
        first: (N,), the place of the first token of each document in all rows of the batch one after the other.
        lengths: (N,).
    """

    first: torch.Tensor
    lengths: torch.Tensor

    def take(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """(B, T, c) -> (N, longest, c), with `fill` behind each document."""
        index, inside = self._places
        taken = x.flatten(0, 1)[index]
        return taken if inside is None else taken.masked_fill(~inside.unsqueeze(-1), fill)

    def put(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A copy of (B, T, c) with (N, longest, c) in the places of these documents."""
        index, inside = self._places
        if inside is not None:
            index, rows = index[inside], rows[inside]
        return x.flatten(0, 1).index_put((index,), rows).view_as(x)

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The place of each token of each row, (N, longest), and whether it belongs to the document."""
        longest = int(self.lengths.max())
        steps = torch.arange(longest, device=self.first.device)
        inside = steps < self.lengths[:, None]
        index = torch.where(inside, self.first[:, None] + steps, self.first[:, None])
        return index, None if len(self.lengths) * longest == int(self.lengths.sum()) else inside
