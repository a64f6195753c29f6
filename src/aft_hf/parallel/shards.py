"""The shards of sequences that are divided among several processes, one contiguous shard each.

The shards follow the order of the ranks, and their lengths may differ. A sequence is a text, or the patches of an
image, row by row. A `Shard` describes the shard of this process: from the lengths, the padding and the documents of
all shards it computes where this one starts and which tokens the processes send to each other.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..mixing_aft import Visibility


def group_of(group: "distributed.ProcessGroup | distributed.DeviceMesh") -> "distributed.ProcessGroup":
    """Return the process group of a mesh; raise a ValueError if this process is not in the group."""
    own: Any = group.get_group() if hasattr(group, "get_group") else group
    if own is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group of the shards")
    return own


def local_shard(
    x: Tensor, group: "distributed.ProcessGroup | distributed.DeviceMesh", dim: int = 1, unit: int = 1
) -> Tensor:
    """Return this process's shard of a tensor that holds whole sequences.

    If the length is not a multiple of the number of processes, the first shards are longer.

    Args:
        x: tokens (B, T), or images (B, channels, height, width) with `dim=2`.
        group: the process group that shares the sequences, or a one-dimensional device mesh.
        dim: the dimension to cut.
        unit: the length of each shard is a multiple of it. For images, the height of a patch.

    Raises:
        ValueError: the length is not a multiple of `unit`, or there are fewer units than processes.
    """
    group = group_of(group)
    size, (count, rest) = distributed.get_world_size(group), divmod(x.shape[dim], unit)
    if rest:
        raise ValueError(f"a length of {x.shape[dim]} is not a multiple of {unit}")
    if count < size:
        kind = "tokens" if unit == 1 else f"units of {unit}"
        raise ValueError(f"{count} {kind} cannot be divided into {size} shards: each process needs at least one")
    ends = [unit * (rank * (count // size) + min(rank, count % size)) for rank in range(1, size)]
    return x.tensor_split(ends, dim)[distributed.get_rank(group)]


def gather_shards(x: Tensor, group: "distributed.ProcessGroup") -> Tensor:
    """Gather the tensors of all processes, (N, ...), without gradients."""
    x = x.contiguous()
    shards = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(shards, x, group)
    return torch.stack(shards)


@dataclass(frozen=True, eq=False)
class Shard:
    """The shard of a batch of sequences that this process holds. All processes of the group create theirs together.

    The index of a real token in its whole row, over all shards and without padding, is called its place here.

    Args:
        group: the process group that shares the rows.
        batch_size: B.
        length: T, the number of tokens in this shard, padding included.
        device: the device of the tensors of the shard.
        padding_mask: (B, T), 0 for padding; None if there is no padding.
        begins_documents: (B, T) boolean, True where a packed document starts; tokens before the first start continue a
            document of an earlier shard. None if no document starts here.
        columns: for images, the number of patches in a row; 0 for text.
        backward: whether the sequences are reversed, so that the tokens after a shard count as those before it.
        position_ids: (B or 1, T), the positions of the tokens, for `single_documents`.

    Raises:
        ValueError: the processes have images with different numbers of patches in a row.
    """

    group: "distributed.ProcessGroup"
    batch_size: int
    length: int
    device: torch.device
    padding_mask: Tensor | None = None
    begins_documents: Tensor | None = None
    columns: int = 0
    backward: bool = False
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        columns = self._descriptions[..., 6]  # a collective, so it runs here, which all processes reach
        if (columns != self.columns).any():
            given = columns[:, 0].tolist()
            raise ValueError(f"images must be cut between rows of patches: the processes have rows of {given} patches")

    @property
    def rank(self) -> int:
        """Index of this shard in the order of the shards."""
        rank = distributed.get_rank(self.group)
        return self.size - 1 - rank if self.backward else rank

    @property
    def size(self) -> int:
        """N, the number of shards."""
        return distributed.get_world_size(self.group)

    def to(self, *arguments: Any, **options: Any) -> "Shard":
        """Return itself: its information is on the host, so there is nothing to move to another device."""
        return self

    @cached_property
    def from_the_end(self) -> "Shard":
        """The shards of the reversed sequences. Only for sequences without padding and documents."""
        return replace(self, backward=True)

    def gather(self, x: Tensor) -> Tensor:
        """Gather the tensors of all shards, (N, ...), in the order of the shards and without gradients."""
        shards = gather_shards(x, self.group)
        return shards.flip(0) if self.backward else shards

    # ---------------------------------------------------------------------------------------- all shards, on the host

    @cached_property
    def _descriptions(self) -> Tensor:
        """Eleven integers for each shard and row, (N, B, 11): the number of real tokens, of real tokens before the
        first start of a document, and of real tokens from the last start on; the length of the longest document that
        starts in the shard; whether a document starts in it; the number of all tokens; the patches in a row of an
        image; and of `position_ids`, or -1 without them: how many real tokens are before the shard if they count real
        tokens, else -1; whether a position is neither 0 nor one more than that before it; the first and the last one.
        """
        return self.gather(self._description()).cpu()

    def _description(self) -> Tensor:
        """The part of `_descriptions` that describes this shard, (B, 11)."""
        if self.visibility is None and self.begins_documents is None:
            whole = [self.length, self.length, self.length, 0, 0, self.length, self.columns, -1, -1, -1, -1]
            return torch.tensor(whole, device=self.device).repeat(self.batch_size, 1)
        mask, document = self._mask, self._begins_documents.cumsum(1)  # document 0 continues an earlier one
        lengths = torch.where(mask & (document > 0), self._position + 1, 0)
        columns = (
            mask.sum(1),
            (mask & (document == 0)).sum(1),
            (mask & (document == document[:, -1:])).sum(1),
            lengths.amax(1),
            (document[:, -1] > 0).long(),
            torch.full_like(document[:, -1], self.length),
            torch.full_like(document[:, -1], self.columns),
        )
        return torch.cat([torch.stack(columns, -1), self._given_positions()], -1)

    def _given_positions(self) -> Tensor:
        """The part of `_descriptions` about `position_ids`, (B, 4)."""
        if self.position_ids is None:
            return torch.full((self.batch_size, 4), -1, device=self.device)
        positions = self.position_ids.expand(self.batch_size, -1).long()
        before = positions - self._mask.cumsum(1) + 1
        lowest, highest = before.masked_fill(~self._mask, 2**62).amin(1), before.masked_fill(~self._mask, -1).amax(1)
        jumps = (positions[:, 1:] != 0) & (positions[:, 1:] != positions[:, :-1] + 1)
        ends = positions[:, 0], positions[:, -1]
        return torch.stack([torch.where(lowest == highest, lowest, -1), jumps.any(1).long(), *ends], -1)

    @cached_property
    def visibility(self) -> Visibility | None:
        """The padding of this shard; None without padding."""
        return Visibility.of(self.padding_mask)

    @cached_property
    def _mask(self) -> Tensor:
        if self.visibility is not None:
            return self.visibility.real
        return torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.device)

    @cached_property
    def _begins_documents(self) -> Tensor:
        return torch.zeros_like(self._mask) if self.begins_documents is None else self.begins_documents

    @property
    def _position(self) -> Tensor:
        """(B, T), how many real tokens of this shard and of the same document are before each token."""
        before = self._mask.cumsum(1) - self._mask.long()
        return before - torch.where(self._begins_documents, before, 0).cummax(1).values

    @cached_property
    def counts(self) -> Tensor:
        """(N, B), the number of real tokens of each shard."""
        return self._descriptions[..., 0]

    @cached_property
    def starts(self) -> Tensor:
        """(N + 1, B), the place of the first token of each shard; the last entry is the end of the rows."""
        return torch.nn.functional.pad(self.counts.cumsum(0), (0, 0, 1, 0))

    @cached_property
    def open_documents(self) -> Tensor:
        """(N, B), the place of the first token of the last document of each shard, the one that may continue in the
        next shard.
        """
        last, any_start = self._descriptions[..., 2], self._descriptions[..., 4]
        return torch.where(any_start > 0, self.starts[1:] - last, 0).cummax(0).values

    @cached_property
    def begins(self) -> Tensor:
        """(N + 1, B), the place of the first token of the document that each shard continues."""
        return torch.nn.functional.pad(self.open_documents, (0, 0, 1, 0))

    @cached_property
    def before(self) -> Tensor:
        """(B,), how many tokens of the document that this shard continues are in earlier shards."""
        return (self.starts - self.begins)[self.rank]

    @cached_property
    def longest(self) -> int:
        """The number of positions that the layers compute with: those of the longest document of all shards, or those
        of this shard of an image.
        """
        if self.columns or self.batch_size == 0:
            return self.length
        lead, inner = self._descriptions[..., 1], self._descriptions[..., 3]
        return int(torch.maximum((self.starts - self.begins)[:-1] + lead, inner).max())

    @property
    def total_length(self) -> int:
        """Length of a whole row, over all shards and with padding."""
        return int(self._descriptions[:, :1, 5].sum())

    @cached_property
    def single_documents(self) -> Tensor:
        """(B,), the rows, over all shards, of which `position_ids` say that they are one document: they count the real
        tokens, and either start only with the first of them, or do not count all tokens of packed documents.
        """
        real, inner, last, _, starts, _, _, before, jumps, first, end = self._descriptions.unbind(-1)
        counted = (before == self.starts[:-1]) | (real == 0)
        starts_first = (starts == 0) | ((self.starts[:-1] + inner == 0) & (last == real))
        jumps = jumps.bool() | (first != 0) & (first != torch.nn.functional.pad(end[:-1] + 1, (0, 0, 1, 0)))
        return counted.all(0) & (starts_first.all(0) | jumps.any(0))

    @cached_property
    def is_whole(self) -> bool:
        """Whether this shard has no padding and no document starts in it."""
        return bool((self.counts[self.rank] == self.length).all()) and not self._descriptions[self.rank, :, 4].any()

    # ------------------------------------------------------------------------------------------------ for the mixers

    @property
    def real(self) -> Tensor:
        """Raise a ValueError: no process has all pairs of tokens."""
        raise ValueError("output_attentions needs whole sequences and does not support context_parallel")

    pairs = real

    @cached_property
    def ordered_documents(self) -> Tensor | None:
        """(B, T), the number of each token's document, 0 for the one that this shard continues, with padding after the
        real tokens. None if no document starts here.
        """
        if self.begins_documents is None or not self._descriptions[self.rank, :, 4].any():
            return None
        document = self.begins_documents.cumsum(1)
        if self.visibility is not None and self.visibility.order is not None:
            document = document.flatten()[self.visibility.order[0]]
        return document.cummax(1).values  # padding that was between documents counts as part of the last document

    @property
    def position(self) -> Tensor:
        """(B, T), the position of each token in its document, not counting the padding of the shard."""
        continued = self._begins_documents.cumsum(1) == 0
        return self._position + torch.where(continued, self.before.to(self.device)[:, None], 0)

    @cached_property
    def continued(self) -> Tensor:
        """(N + 1, N, B), entry (r, q): whether the running sum of shard q belongs to the document at the start of
        shard r.
        """
        shards = torch.arange(self.size + 1)
        earlier = shards[:-1] < shards[:, None]
        return earlier.unsqueeze(-1) & (self.open_documents == self.begins.unsqueeze(1))

    @cached_property
    def distances(self) -> Tensor:
        """(N + 1, N, B), entry (r, q): the distance from the last token of shard q to the last one before shard r."""
        return (self.starts.unsqueeze(1) - self.starts[1:]).clamp_min(0)

    def routes(self, reach: int, *, to_end: bool = False) -> "Routes":
        """Which tokens the processes exchange so that each shard has the `reach` tokens before it, as far as they
        belong to the document that it continues.

        Args:
            reach: the number of tokens.
            to_end: whether every process receives the last `reach` tokens of the rows instead.
        """
        cached = self.__dict__.setdefault("_routes", {})
        if (reach, to_end) not in cached:
            cached[reach, to_end] = self._find_routes(reach, to_end)
        return cached[reach, to_end]

    def _find_routes(self, reach: int, to_end: bool) -> "Routes":
        sent, received = [], []
        for other in reversed(range(self.size)) if self.backward else range(self.size):  # in the order of the ranks
            there, here = (self.size, self.size) if to_end else (other, self.rank)
            sent.append(self._overlap(self.rank, there, reach, in_shard=True))
            received.append(self._overlap(other, here, reach, in_shard=False))
        flat = (torch.tensor([*chain(*x)], dtype=torch.long, device=self.device) for x in (sent, received))
        from_here, to_here = ((x // width, x % width) for x, width in zip(flat, (self.length, reach)))
        return Routes(from_here, to_here, [*map(len, sent)], [*map(len, received)])

    def _overlap(self, source: int, target: int, reach: int, in_shard: bool) -> list[int]:
        """The tokens of shard `source` that shard `target` needs, as flat indices: into the (B, T) tokens of the
        source if `in_shard`, otherwise into the (B, reach) slots of the target.
        """
        start, stop = self.starts[source], self.starts[source + 1]
        first = torch.maximum(torch.maximum(self.begins[target], self.starts[target] - reach), start)
        last = torch.minimum(self.starts[target], stop)
        width, origin = (self.length, start) if in_shard else (reach, self.starts[target] - reach)
        indices: list[int] = []
        for row, (lo, hi) in enumerate(zip((first - origin).tolist(), (last - origin).tolist())):
            indices += range(row * width + lo, row * width + hi)
        return indices


class Routes(NamedTuple):
    """The tokens that this process sends and receives, in the order of the other processes."""

    sent: tuple[Tensor, ...]  # indices into (B, T)
    received: tuple[Tensor, ...]  # indices into (B, reach)
    sent_sizes: list[int]
    received_sizes: list[int]


__all__ = ["Shard", "gather_shards", "group_of", "local_shard"]
