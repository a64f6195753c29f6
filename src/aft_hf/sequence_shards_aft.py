"""Which piece of its sequences this process holds, where each sequence lies over several processes.

Context parallelism: the processes of a group hold contiguous pieces of the same sequences, in the order of their
ranks. A sequence is a text, or the patches of an image, row by row. The pieces may differ in length. A `SequenceShard`
knows from the lengths, the padding and the documents of all pieces where this one starts and which tokens the
processes send to each other. `context_parallel` tells a model that its inputs are such pieces.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .documents_aft import Documents
from .scaled_sums_aft import may_look_at


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# A plain global, which `torch.compile` can read and guards on.
_active_group: Any = None


@contextmanager
def context_parallel(group: "ProcessGroup | DeviceMesh") -> Iterator[None]:
    """Within this context, the inputs of AFT models are this process's pieces of longer texts or taller images.

    Process r of the group holds the r-th piece of `input_ids`, `attention_mask`, `position_ids` and `labels`, all cut
    in the same places, or of `pixel_values`, cut between rows of patches; `local_piece` cuts them. All processes of
    the group call the model together, and hold the same weights. Hidden states, logits of tokens and feature maps are
    those of the piece; what is pooled over an image is that of the whole image. The loss is that of the whole texts or
    images, the same number in every process. Its gradients are those that this piece contributes, times the number of
    processes: their average over the processes, which DDP and FSDP compute, is the gradient of one process with
    everything.

    The backward pass may run outside of the context.

    Args:
        group: the processes that share each text or image, or a device mesh of one dimension.
    """
    global _active_group
    surrounding, _active_group = _active_group, group.get_group() if hasattr(group, "get_group") else group
    try:
        yield
    finally:
        _active_group = surrounding


def active_group() -> "ProcessGroup | None":
    """The group of the surrounding `context_parallel`."""
    return _active_group


def local_piece(x: torch.Tensor, group: "ProcessGroup | DeviceMesh", dim: int = 1, unit: int = 1) -> torch.Tensor:
    """The piece of a whole that belongs to this process; the first ones are longer where lengths do not divide.

    Args:
        x: tokens (B, T), or images (B, channels, height, width) with `dim=2`.
        group: the processes that share it, or a device mesh of one dimension.
        dim: the dimension to cut.
        unit: every piece is a multiple of it; for images, the height of a patch.

    Raises:
        ValueError: a length that is no multiple of the unit, or fewer units than processes.
    """
    group = group.get_group() if hasattr(group, "get_group") else group
    size, (count, rest) = distributed.get_world_size(group), divmod(x.shape[dim], unit)
    if rest:
        raise ValueError(f"a length of {x.shape[dim]} is no multiple of {unit}")
    if count < size:
        kind = "tokens" if unit == 1 else f"parts of {unit}"
        raise ValueError(f"{count} {kind} cannot be cut into {size} pieces: each process needs one at least")
    ends = [unit * (rank * (count // size) + min(rank, count % size)) for rank in range(1, size)]
    return x.tensor_split(ends, dim)[distributed.get_rank(group)]


def gather_pieces(x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    """The tensors of all processes, (N, ...), without gradients."""
    x = x.contiguous()
    pieces = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(pieces, x, group)
    return torch.stack(pieces)


def following_labels(labels: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    """The label of the token after each one of a piece, (B, T): after the last one, the first of the next piece, and
    -100 at the end of the rows.
    """
    first = gather_pieces(labels[:, 0], group)
    first = torch.cat([first, torch.full_like(first[:1], -100)])[distributed.get_rank(group) + 1]
    return torch.cat([labels[:, 1:], first[:, None]], 1)


def total_over(group: "ProcessGroup", x: torch.Tensor) -> torch.Tensor:
    """The sum over the processes, without gradients."""
    x = x.detach().clone()
    distributed.all_reduce(x, group=group)
    return x


def average_over(group: "ProcessGroup", x: torch.Tensor) -> torch.Tensor:
    """The average over the processes, the gradient of which goes to what is here alone."""
    return x + (total_over(group, x) / distributed.get_world_size(group) - x.detach())


def shard_of_inputs(
    group: "ProcessGroup",
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: dict[str, torch.Tensor | None],
) -> "SequenceShard":
    """The piece that the inputs of a model (B, T, d) are.

    Args:
        attention_mask: (B, T), 0 for padding.
        packing: the inputs of `PACKING_INPUTS`; `position_ids` start again at 0 with each document.

    Raises:
        ValueError: masks and boundaries that do not tell about a piece, or positions that are not those of documents.
    """
    (batch, length), position_ids = inputs_embeds.shape[:2], packing["position_ids"]
    if attention_mask is not None and attention_mask.shape != (batch, length):
        raise ValueError(
            f"within context_parallel, attention_mask must be the padding of the piece, ({batch}, {length}), got "
            f"{tuple(attention_mask.shape)}"
        )
    if packing["cu_seq_lens_q"] is not None:
        raise ValueError("within context_parallel, give packed documents as the position_ids of the piece")
    if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids must be ({batch} or 1, {length}), got {tuple(position_ids.shape)}")
    documents = None if position_ids is None else Documents((position_ids == 0).expand(batch, -1))
    mask = None if attention_mask is None else attention_mask.bool()
    shard = SequenceShard(group, batch, length, inputs_embeds.device, mask, documents)
    given = position_ids if mask is None else None
    if given is not None and may_look_at(given) and (shard.positions() != given).any():
        raise ValueError(
            "position_ids of a piece must go on from those of the piece before it, and start again at 0 with each "
            "packed document: other positions follow from the attention_mask alone"
        )
    return shard


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """This process's piece of the rows of a batch. All processes of the group make theirs together.

    Real tokens of a row are counted from its start over all pieces; here these counts are called places.

    Args:
        group: the processes that share the rows.
        batch_size: B.
        length: T, the tokens of this piece, padding included.
        device: where the tensors of the piece are.
        padding_mask: (B, T) boolean, False for padding; None where there is none.
        documents: the documents that start within the piece, whose first tokens may continue a document; None where
            none starts.
        columns: of a piece of images, whose rows of patches follow each other; 1 for text.
        backward: whether the sequences are taken from their end, so that what lies after a piece comes before it.

    Raises:
        ValueError: the processes hold rows of images of different lengths.
    """

    group: "ProcessGroup"
    batch_size: int
    length: int
    device: torch.device
    padding_mask: torch.Tensor | None = None
    documents: Documents | None = None
    columns: int = 1
    backward: bool = False

    def __post_init__(self) -> None:
        columns = self._pieces[..., 6]  # a collective: here, where all processes are
        if (columns != self.columns).any():
            given = columns[:, 0].tolist()
            raise ValueError(f"pieces of an image are whole rows of patches: the processes hold rows of {given}")

    @property
    def rank(self) -> int:
        """Of this piece in the order of the pieces."""
        rank = distributed.get_rank(self.group)
        return self.size - 1 - rank if self.backward else rank

    @property
    def size(self) -> int:
        """N, the number of pieces."""
        return distributed.get_world_size(self.group)

    def to(self, *arguments: Any, **options: Any) -> "SequenceShard":
        """Itself: what it tells is told to the host."""
        return self

    @cached_property
    def from_the_end(self) -> "SequenceShard":
        """The same pieces, and the tokens of each, in reverse order; without padding and documents."""
        return replace(self, backward=True)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all pieces, (N, ...), without gradients."""
        pieces = gather_pieces(x, self.group)
        return pieces.flip(0) if self.backward else pieces

    # ---------------------------------------------------------------------------------------- all pieces, on the host

    @cached_property
    def _pieces(self) -> torch.Tensor:
        """Of all pieces, (N, B, 7): real tokens, those before the first start of a document, those from the last start
        on, the longest document that starts there, whether one does, all tokens, and those of a row of an image.
        """
        return self.gather(self._piece()).cpu()

    def _piece(self) -> torch.Tensor:
        """This piece's part of `_pieces`."""
        if self.padding_mask is None and self.documents is None:
            whole = [self.length, self.length, self.length, 0, 0, self.length, self.columns]
            return torch.tensor(whole, device=self.device).repeat(self.batch_size, 1)
        mask = self._mask()
        starts = torch.zeros_like(mask) if self.documents is None else self.documents.starts
        document = starts.cumsum(1)  # 0 for tokens that continue a document
        lengths = torch.where(mask & (document > 0), Documents(starts).positions(mask) + 1, 0)
        columns = (
            mask.sum(1),
            (mask & (document == 0)).sum(1),
            (mask & (document == document[:, -1:])).sum(1),
            lengths.amax(1),
            (document[:, -1] > 0).long(),
            torch.full_like(document[:, -1], self.length),
            torch.full_like(document[:, -1], self.columns),
        )
        return torch.stack(columns, -1)

    def _mask(self) -> torch.Tensor:
        if self.padding_mask is not None:
            return self.padding_mask.bool()
        return torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.device)

    @cached_property
    def counts(self) -> torch.Tensor:
        """(N, B), real tokens of each piece."""
        return self._pieces[..., 0]

    @cached_property
    def starts(self) -> torch.Tensor:
        """(N + 1, B), the place of the first token of each piece, and the end of the rows."""
        return torch.nn.functional.pad(self.counts.cumsum(0), (0, 0, 1, 0))

    @cached_property
    def open_documents(self) -> torch.Tensor:
        """(N, B), the place where the document starts that is open at the end of each piece."""
        last, any_start = self._pieces[..., 2], self._pieces[..., 4]
        return torch.where(any_start > 0, self.starts[1:] - last, 0).cummax(0).values

    @cached_property
    def begins(self) -> torch.Tensor:
        """(N + 1, B), the place where the document starts that each piece continues: its own, if it continues none."""
        lead, any_start = self._pieces[..., 1], self._pieces[..., 4]
        before = torch.nn.functional.pad(self.open_documents, (0, 0, 1, 0))
        fresh = torch.nn.functional.pad((any_start > 0) & (lead == 0), (0, 0, 0, 1))
        return torch.where(fresh, self.starts, before)

    @cached_property
    def before(self) -> torch.Tensor:
        """(B,), how many tokens of the document that this piece continues lie in earlier pieces."""
        return (self.starts - self.begins)[self.rank]

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest document of all."""
        lead, inner = self._pieces[..., 1], self._pieces[..., 3]
        return int(torch.maximum((self.starts - self.begins)[:-1] + lead, inner).max())

    @property
    def total_length(self) -> int:
        """The tokens of a row over all pieces, padding included."""
        return int(self._pieces[:, 0, 5].sum())

    @cached_property
    def is_whole(self) -> bool:
        """Whether no token of this piece is padding and no document starts in it."""
        return bool((self.counts[self.rank] == self.length).all()) and not self._pieces[self.rank, :, 4].any()

    @property
    def first_row(self) -> int:
        """The row of the images that this piece begins with."""
        return int(self.starts[self.rank, 0]) // self.columns

    @property
    def share(self) -> float:
        """The tokens of this piece among all, times the number of pieces: the weight of its mean in an average."""
        return self.length * self.size / self.total_length

    # ------------------------------------------------------------------------------------------------ for the mixers

    @cached_property
    def real_documents(self) -> Documents | None:
        """`documents` when padding has been moved behind the real tokens of each row; None where none starts."""
        if self.documents is None or not self._pieces[self.rank, :, 4].any():
            return None
        if self.padding_mask is None:
            return self.documents
        document = self.documents.starts.cumsum(1)
        document = document.gather(1, (~self.padding_mask.bool()).long().argsort(stable=True))
        # Those of padding that was between documents stand behind: they are of the last one.
        document = document.cummax(1).values
        return Documents(torch.diff(document, dim=1, prepend=torch.zeros_like(document[:, :1])) > 0)

    def positions(self) -> torch.Tensor:
        """(B, T), the position of each token in its document; padding has that of a real token beside it."""
        mask, before = self._mask(), self.before.to(self.device)
        if self.documents is None:
            return (before[:, None] + mask.cumsum(1) - 1).clamp_min(0)
        return Documents(self.documents.starts, before).positions(mask)

    def last_tokens(self, reach: int) -> torch.Tensor:
        """Over which of `reach` tokens before this piece and its own the running sum goes on, (B, 2): from and to.

        These are the tokens that lie farther back than `reach` for the first token of the next piece, and in the
        document that is open there.
        """
        here, reset = self.starts[self.rank], self.open_documents[self.rank]
        return torch.stack([(reset - here + reach).clamp_min(0), self.counts[self.rank]], -1)

    @cached_property
    def _continued(self) -> torch.Tensor:
        """(N + 1, N, B), whether the running sum over piece q counts for what begins with piece r."""
        pieces = torch.arange(self.size + 1)
        earlier = pieces[:-1] < pieces[:, None]
        return earlier.unsqueeze(-1) & (self.open_documents == self.begins.unsqueeze(1))

    @cached_property
    def _distances(self) -> torch.Tensor:
        """(N + 1, N, B), tokens between the last one of piece q and the last one before piece r."""
        return (self.starts.unsqueeze(1) - self.starts[1:]).clamp_min(0)

    def received(self, piece: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of whose running sums a piece (by default this one) is the sum, (N, B), and how far back they end."""
        piece = self.rank if piece is None else piece
        return self._continued[piece], self._distances[piece]

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In which pieces the running sum of this one counts, (N, B), and how far back it lies there."""
        return self._continued[: self.size, self.rank], self._distances[: self.size, self.rank]

    def routes(self, reach: int, *, to_end: bool = False) -> "Routes":
        """Which tokens go where, so that each piece has the `reach` tokens before it of the document it continues.

        Args:
            to_end: instead, every process gets the last `reach` tokens of the rows.
        """
        cached = self.__dict__.setdefault("_routes", {})
        if (reach, to_end) not in cached:
            cached[reach, to_end] = self._find_routes(reach, to_end)
        return cached[reach, to_end]

    def _find_routes(self, reach: int, to_end: bool) -> "Routes":
        sent: list[int] = []
        received: list[int] = []
        sent_sizes, received_sizes = [], []
        for other in reversed(range(self.size)) if self.backward else range(self.size):  # as the processes are
            there, here = (self.size, self.size) if to_end else (other, self.rank)
            sent += (places := self._overlap(self.rank, there, reach, in_piece=True))
            received += (slots := self._overlap(other, here, reach, in_piece=False))
            sent_sizes.append(len(places))
            received_sizes.append(len(slots))
        from_here, to_here = (torch.tensor(x, dtype=torch.long, device=self.device) for x in (sent, received))
        return Routes(from_here, to_here, sent_sizes, received_sizes)

    def _overlap(self, source: int, target: int, reach: int, in_piece: bool) -> list[int]:
        """The tokens of one piece that another one needs: as flat places in the piece that gives them, or among the
        (B, reach) that take them.
        """
        start, stop = self.starts[source], self.starts[source + 1]
        first = torch.maximum(torch.maximum(self.begins[target], self.starts[target] - reach), start)
        last = torch.minimum(self.starts[target], stop)
        width, origin = (self.length, start) if in_piece else (reach, self.starts[target] - reach)
        found: list[int] = []
        for row, (lo, hi, zero) in enumerate(zip(first.tolist(), last.tolist(), origin.tolist())):
            found += range(row * width + lo - zero, row * width + hi - zero)
        return found


@dataclass(frozen=True, eq=False)
class Routes:
    """Which tokens this process sends and receives, ordered by the other process."""

    sent: torch.Tensor  # flat places in (B, T)
    received: torch.Tensor  # flat places in (B, reach)
    sent_sizes: list[int]
    received_sizes: list[int]


__all__ = ["SequenceShard", "active_group", "context_parallel", "gather_pieces", "local_piece"]
