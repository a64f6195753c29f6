"""Documents that are packed into one row: where they start, and each of them as a row of its own.

A document never sees another one. So a packed row is computed as the batch of its documents, those of about the same
length together; with at most twice the tokens this is exact for every type and as fast as the type is. A traced
program, which cannot depend on their number, computes a table of all pairs of tokens instead.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from .scaled_sums_aft import may_look_at, power_of_two_from


# What models take about packed documents. Attention kernels need all of it, and an AFT the first or the second.
PACKING_INPUTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch.

    Args:
        starts: (B, T) boolean, True at the first token of each document; the first token of a row always is one.
        offsets: (B,), the position of the first token of each row where it continues a document; None for 0.
    """

    starts: torch.Tensor
    offsets: torch.Tensor | None = None

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
        """Whether each row is one document; False where the host may not know."""
        return self.can_be_unpacked and not self.starts[:, 1:].any()

    def longest(self) -> int | None:
        """The length of the longest document; None where the host may not know, or would have to wait for it."""
        known = may_look_at(self.starts) or (self.can_be_unpacked and "rows" in vars(self))
        return max((rows.longest for rows in self.rows), default=0) if known else None

    def to(self, device: torch.device, non_blocking: bool = False) -> "Documents":
        """The same documents on another device, for the hooks of models that lie on several."""
        if self.starts.device == torch.device(device):
            return self
        first = self.offsets
        first = first if first is None else first.to(device, non_blocking=non_blocking)
        return Documents(self.starts.to(device, non_blocking=non_blocking), first)

    def pairs(self) -> torch.Tensor:
        """(B, T, T), whether two tokens are of one document."""
        document = self.starts.cumsum(1)
        return document[:, :, None] == document[:, None, :]

    def positions(self, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T), the position of each token in its document, where padding does not count."""
        counted = torch.ones_like(self.starts) if padding_mask is None else padding_mask.bool()
        before = counted.cumsum(1) - counted.long()
        positions = before - torch.where(self.starts, before, 0).cummax(1).values
        if self.offsets is None:
            return positions
        continues = self.starts[:, 1:].cumsum(1) == 0
        continues = nn.functional.pad(continues, (1, 0), value=True)
        return positions + torch.where(continues, self.offsets[:, None], 0)

    def first_positions(self) -> torch.Tensor:
        """(B, T), for each token the place in its row where its document starts."""
        places = torch.arange(self.starts.shape[1], device=self.starts.device)
        return torch.where(self.starts, places, 0).cummax(1).values

    def moved(self, order: torch.Tensor) -> "Documents":
        """The documents after tokens moved to places order[b, t], which keeps those of a document side by side."""
        document = torch.zeros_like(order).scatter(1, order, self.starts.cumsum(1))
        return Documents(torch.diff(document, prepend=torch.zeros_like(document[:, :1])) != 0)

    @cached_property
    def rows(self) -> list["DocumentRows"]:
        """All documents as rows, in batches of those that start at the same position and whose lengths have the same
        next power of two.

        Made once for all layers: the host has to know the lengths.
        """
        first = self.starts.flatten().nonzero().squeeze(1)
        lengths = torch.diff(first, append=first.new_tensor([self.starts.numel()]))
        positions = torch.zeros_like(lengths)
        if self.offsets is not None:
            positions[first % self.starts.shape[1] == 0] = self.offsets
        batches: dict[tuple[int, int], list[int]] = {}
        for document, (length, position) in enumerate(zip(lengths.tolist(), positions.tolist())):
            batches.setdefault((power_of_two_from(length), position), []).append(document)
        rows = []
        for (_, position), documents in batches.items():
            chosen = torch.tensor(documents, device=first.device)
            rows.append(DocumentRows(first[chosen], lengths[chosen], position))
        return rows


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Some documents as rows that are padded on the right.

    Args:
        first: (N,), the place of the first token of each document in all rows of the batch one after the other.
        lengths: (N,).
        position: of the first tokens in their documents, 0 unless these began elsewhere.
    """

    first: torch.Tensor
    lengths: torch.Tensor
    position: int = 0

    @cached_property
    def longest(self) -> int:
        """The length of the rows."""
        return int(self.lengths.max())

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
        steps = torch.arange(self.longest, device=self.first.device)
        inside = steps < self.lengths[:, None]
        index = torch.where(inside, self.first[:, None] + steps, self.first[:, None])
        return index, None if len(self.lengths) * self.longest == int(self.lengths.sum()) else inside


def packed_documents(
    inputs: dict[str, torch.Tensor | None],
    mask: torch.Tensor | None,
    batch_size: int,
    length: int,
    *,
    may_wait: bool = True,
) -> Documents | None:
    """The documents that `position_ids` or `cu_seq_lens_q` give.

    Args:
        inputs: those of a model in `PACKING_INPUTS`.
        mask: the attention mask of the model, if any.
        may_wait: whether the host may wait for an accelerator to know whether each row is one document.

    Returns:
        The documents; None where each row is one, and that may be known.

    Raises:
        ValueError: positions that are not those of documents, or a 3-D mask beside them.
    """
    position_ids, boundaries = inputs["position_ids"], inputs["cu_seq_lens_q"]
    if boundaries is not None:
        documents = Documents.from_cumulative_lengths(boundaries, batch_size, length)
    elif position_ids is not None:
        documents = _documents_of_positions(position_ids, mask, batch_size, length)
    else:
        return None
    if (may_wait or may_look_at(documents.starts)) and documents.are_rows():
        return None
    if mask is not None and mask.dim() == 3:
        raise ValueError("give packed documents either as position_ids or as a 3-D attention_mask, and not both")
    return documents


def _documents_of_positions(
    position_ids: torch.Tensor, mask: torch.Tensor | None, batch_size: int, length: int
) -> Documents:
    if position_ids.shape not in ((batch_size, length), (1, length)):
        raise ValueError(f"position_ids must be ({batch_size} or 1, {length}), got {tuple(position_ids.shape)}")
    documents = Documents.from_position_ids(position_ids, batch_size)
    if may_look_at(position_ids):
        wrong = documents.positions() != position_ids
        if mask is not None and mask.shape == wrong.shape:
            wrong &= mask.bool()  # those of padding do not matter
        if wrong.any():
            raise ValueError(
                "position_ids must count 0, 1, 2, ... and start again at 0 with each packed document: other positions "
                "follow from the attention_mask alone"
            )
    return documents
