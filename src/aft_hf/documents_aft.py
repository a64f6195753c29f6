"""Packed documents: the boundaries of documents in a row, and conversion of documents to rows of their own.

A document never sees another document. So packed rows are computed as a batch of documents, with documents of about
the same length in one batch. This is exact for every type, keeps the type's complexity, and computes at most twice the
tokens. A traced program, which cannot depend on the number of documents, computes a table of all pairs of tokens
instead. A backend with `takes_documents` (Triton) computes packed rows directly.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from .scaled_sums_aft import can_read_values, power_of_two_from


# The model inputs that describe packed documents. Attention kernels need all of them; AFT needs `position_ids` or
# `cu_seq_lens_q`.
PACKING_INPUTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch.

    Args:
        starts: (B, T) boolean, True at the first token of each document, and at the first token of each row.
        offsets: (B,), the position of the first token of each row in its document, for rows that continue a document;
            None for 0.
    """

    starts: torch.Tensor
    offsets: torch.Tensor | None = None

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor, batch_size: int) -> "Documents":
        """Return the documents for positions (B or 1, T), which start again at 0 with each document."""
        starts = position_ids == 0
        starts = torch.cat([torch.ones_like(starts[:, :1]), starts[:, 1:]], 1)
        return cls(starts.expand(batch_size, -1))

    @classmethod
    def from_cumulative_lengths(cls, cu_seq_lens: torch.Tensor, batch_size: int, length: int) -> "Documents":
        """Return the documents for cumulative lengths (N + 1,) over all rows concatenated, from 0 to B T."""
        starts = torch.arange(length, device=cu_seq_lens.device).eq(0).repeat(batch_size)
        # The last boundary is the end of the last document. It marks an extra entry, which is dropped.
        starts = torch.cat([starts, starts[:1]]).index_fill(0, cu_seq_lens.long(), True)[:-1]
        return cls(starts.view(batch_size, length))

    @property
    def can_be_unpacked(self) -> bool:
        """Whether the host can read the number and lengths of documents; False in a traced program and on meta."""
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        return not traced and self.starts.device.type != "meta"

    def are_rows(self) -> bool:
        """Whether each row is one document; False if the host cannot read the documents."""
        return self.can_be_unpacked and not self.starts[:, 1:].any()

    def longest(self) -> int | None:
        """Return the length of the longest document; None if the host cannot read it, or would have to wait for it."""
        known = can_read_values(self.starts) or (self.can_be_unpacked and "rows" in vars(self))
        return max((rows.longest for rows in self.rows), default=0) if known else None

    def to(self, device: torch.device, non_blocking: bool = False) -> "Documents":
        """Return the documents on another device, as hooks of models that are dispatched to several devices need."""
        if self.starts.device == torch.device(device):
            return self
        first = self.offsets
        first = first if first is None else first.to(device, non_blocking=non_blocking)
        return Documents(self.starts.to(device, non_blocking=non_blocking), first)

    def pairs(self) -> torch.Tensor:
        """Return whether two tokens belong to the same document, (B, T, T)."""
        document = self.starts.cumsum(1)
        return document[:, :, None] == document[:, None, :]

    def positions(self, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the position of each token in its document, not counting padding, (B, T)."""
        counted = torch.ones_like(self.starts) if padding_mask is None else padding_mask.bool()
        before = counted.cumsum(1) - counted.long()
        positions = before - torch.where(self.starts, before, 0).cummax(1).values
        if self.offsets is None:
            return positions
        continues = self.starts[:, 1:].cumsum(1) == 0
        continues = nn.functional.pad(continues, (1, 0), value=True)
        return positions + torch.where(continues, self.offsets[:, None], 0)

    def first_positions(self) -> torch.Tensor:
        """Return for each token the index in its row at which its document starts, (B, T)."""
        places = torch.arange(self.starts.shape[1], device=self.starts.device)
        return torch.where(self.starts, places, 0).cummax(1).values

    def moved(self, order: torch.Tensor) -> "Documents":
        """Return the documents after tokens move to places order[b, t], where each document stays contiguous."""
        document = torch.zeros_like(order).scatter(1, order, self.starts.cumsum(1))
        return Documents(torch.diff(document, prepend=torch.zeros_like(document[:, :1])) != 0)

    @cached_property
    def rows(self) -> list["DocumentRows"]:
        """All documents as rows, in batches of documents with the same first position whose lengths have the same next
        power of two.

        Computed once for all layers, since the host has to read the lengths.
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
    """A batch of documents as rows that are padded on the right.

    Args:
        first: (N,), the index of the first token of each document in the concatenated rows of the batch.
        lengths: (N,), the lengths of the documents.
        position: the position of the first tokens in their documents, which is not 0 if the rows continue documents.
    """

    first: torch.Tensor
    lengths: torch.Tensor
    position: int = 0

    @cached_property
    def longest(self) -> int:
        """The length of the rows."""
        return int(self.lengths.max())

    def take(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """Copy the documents from x: (B, T, c) -> (N, longest, c), with `fill` after each document."""
        index, inside = self._places
        taken = x.flatten(0, 1)[index]
        return taken if inside is None else taken.masked_fill(~inside.unsqueeze(-1), fill)

    def put(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of x (B, T, c) with the documents replaced by `rows` (N, longest, c)."""
        index, inside = self._places
        if inside is not None:
            index, rows = index[inside], rows[inside]
        return x.flatten(0, 1).index_put((index,), rows).view_as(x)

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The index of each token of each row, (N, longest), and whether it is in the document; None if all are."""
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
    """Return the documents that `position_ids` or `cu_seq_lens_q` describe.

    Args:
        inputs: the inputs of the model that are named in `PACKING_INPUTS`.
        mask: the attention mask of the model, if any.
        batch_size: B.
        length: T.
        may_wait: whether the host may wait for an accelerator to find out whether each row is one document.

    Returns:
        The documents; None if neither input is given, or if each row is known to be one document.

    Raises:
        ValueError: the positions do not describe documents, or packed documents are combined with a 3-D mask.
    """
    position_ids, boundaries = inputs["position_ids"], inputs["cu_seq_lens_q"]
    if boundaries is not None:
        documents = Documents.from_cumulative_lengths(boundaries, batch_size, length)
    elif position_ids is not None:
        documents = _documents_of_positions(position_ids, mask, batch_size, length)
    else:
        return None
    if (may_wait or can_read_values(documents.starts)) and documents.are_rows():
        return None
    if mask is not None and mask.dim() == 3:
        raise ValueError("pass packed documents either as position_ids or as a 3-D attention_mask, not as both")
    return documents


def _documents_of_positions(
    position_ids: torch.Tensor, mask: torch.Tensor | None, batch_size: int, length: int
) -> Documents:
    if position_ids.shape not in ((batch_size, length), (1, length)):
        raise ValueError(f"position_ids must be ({batch_size} or 1, {length}), got {tuple(position_ids.shape)}")
    documents = Documents.from_position_ids(position_ids, batch_size)
    if can_read_values(position_ids):
        wrong = documents.positions() != position_ids
        if mask is not None and mask.shape == wrong.shape:
            wrong &= mask.bool()  # positions of padding are ignored
        if wrong.any():
            raise ValueError(
                "position_ids must count 0, 1, 2, ... and start again at 0 with each packed document; for padded "
                "rows, omit position_ids and pass attention_mask"
            )
    return documents
