"""The AFT operation: a problem (`Mixing`), who sees whom (`Visibility`), the reference (Eq. 2 as printed), and `mix`,
which chooses a form.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103) mix positions by

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')        (Eq. 2, before the query's gate)

element-wise in the features. `mix` computes it by an operator of an installed aft-hf if the device has one, and
otherwise by the portable form (`portable_aft.py`).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .portable_aft import (
    CHUNK_SIZE,
    by_head,
    finish,
    hide,
    join_heads,
    pairwise,
    power_of_two_from,
    read,
    recomputed,
    split_heads,
    total,
)
from .portable_aft import causal as portable_causal
from .portable_aft import grid as portable_grid
from .portable_aft import table as portable_table
from .portable_aft import window as portable_window
from .position_biases_aft import Dense, GridKernel, LagKernel, NoBias, PositionBias, Window, widen, working_dtype


logger = logging.get_logger(__name__)

# -------- who sees whom

# The model inputs that describe packed documents, of which AFT needs `position_ids` or `cu_seq_lens_q`.
PACKING_INPUTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which tokens of its row each token may see: the real tokens of its document. Made by `of`, once for all layers.

    Attributes:
        real: (B, T) boolean, False for padding.
        document: (B, T), the number of each token's document in its row.
        position: (B, T), the position of each token in its document, which does not count padding.
        first: (B, T), for each token the first token that it sees, T for padding. None if padding lies between the
            tokens of a document, or may do so in a traced program.
        is_packed: whether rows may hold several documents.
        longest: the length of the longest document; None in a traced program.
        order: (2, B, T) indices into the tokens of the batch, which move padding behind the real tokens of each row,
            and back. None with packed documents, and if all padding is there.
    """

    real: Tensor
    document: Tensor
    position: Tensor
    first: Tensor | None
    is_packed: bool
    longest: int | None
    order: Tensor | None

    is_shard = False  # True for the shards of context parallelism, which have a `mix` of their own

    @classmethod
    def of(cls, mask: Tensor | None, starts: Tensor | None = None, *, may_wait: bool = True) -> "Visibility | None":
        """Return who sees whom; None if each row is known to be one document without padding.

        Args:
            mask: (B, T), 0 for padding; None without padding.
            starts: (B, T) boolean, True where a document starts; the first token of a row starts one anyway. None for
                one document in each row.
            may_wait: whether the host may wait for an accelerator to read what the tensors say.

        Raises:
            ValueError: the mask has other values than 0 and 1.
        """
        like = starts if mask is None else mask
        if like is None or like.numel() == 0:
            return None
        real = torch.ones_like(like, dtype=torch.bool) if mask is None else mask.bool()
        unknown = ~real if mask is None else (real != mask) & real
        batch, length = like.shape
        places = torch.arange(length, device=like.device)
        begins = (places == 0).expand_as(real) if starts is None else starts | (places == 0)
        before = real.cumsum(1) - real.long()
        position = before - torch.where(begins, before, 0).cummax(1).values
        leads_document = real & (position == 0)
        first_seen = torch.where(leads_document, places, 0).cummax(1).values
        holes = real & (places - first_seen != position)
        known = None
        if (may_wait or like.device.type == "cpu") and not torch.compiler.is_compiling():
            facts = unknown, ~real, leads_document.sum(1) > 1, holes, ~real[:, :1]
            known = read(torch.stack([*(x.any() for x in facts), torch.where(real, position + 1, 0).amax()]))
        if known and known.pop(0):
            raise ValueError(
                "attention_mask must be 1 for tokens and 0 for padding: for a mask that is added to logits, "
                "give mask == 0; for numbers of documents, give position_ids"
            )
        padded, packed, has_holes, leads, longest = known or (True, starts is not None, mask is not None, True, None)
        if not (padded or packed):
            return None
        order = None
        if not packed and (has_holes or leads):
            rows = length * torch.arange(batch, device=like.device).unsqueeze(1)
            order = rows + torch.stack([(~real).long().argsort(stable=True), position])
        first = None if has_holes else first_seen.masked_fill(~real, length)
        return cls(real, begins.cumsum(1), position, first, bool(packed), longest, order)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Visibility":
        """Return a copy on another device."""
        if self.real.device == torch.device(device):
            return self
        tensors: Any = {name: x.to(device) for name, x in vars(self).items() if torch.is_tensor(x)}
        return replace(self, **tensors)

    def padding_last(self) -> "Visibility":
        """Return who sees whom after `moved`: padding follows the real tokens, which do not see it."""
        if self.order is None:
            return self
        real, position = (x.flatten()[self.order[0]] for x in (self.real, self.position))
        first = torch.zeros_like(position).masked_fill(~real, real.shape[1])
        return replace(self, real=real, position=position, first=first, order=None)

    def moved(self, x: Tensor) -> Tensor:
        """Move the tokens of x, (B, T, d)."""
        return x if self.order is None else _tokens(x, self.order[0])

    def restored(self, x: Tensor) -> Tensor:
        """Move the tokens of x, (B, T, d), back, with 0 for padding."""
        return (x if self.order is None else _tokens(x, self.order[1])).masked_fill(~self.real.unsqueeze(-1), 0.0)

    def pairs(self) -> Tensor:
        """Return whether a token sees another one, (B, T, T), before any causal mask."""
        document = torch.where(self.real, self.document, 0)
        return (document[:, :, None] == document[:, None, :]) & self.real[:, None]

    @cached_property
    def rows(self) -> list[Tensor]:
        """Return the documents as rows, (N, L) indices into the tokens of the batch, B T after the end of a document:
        a batch for all documents whose lengths have the same next power of two.
        """
        index = self.real.flatten().nonzero().squeeze(1)
        starts = (self.position.flatten()[index] == 0).nonzero().squeeze(1)
        lengths = torch.diff(starts, append=starts.new_tensor([len(index)]))
        index = torch.cat([index, index.new_tensor([self.real.numel()])])
        groups: dict[int, list[int]] = {}
        for document, length in enumerate(lengths.tolist()):
            groups.setdefault(power_of_two_from(length), []).append(document)
        rows = []
        for documents in groups.values():
            chosen = torch.tensor(documents, device=index.device)
            steps = torch.arange(int(lengths[chosen].max()), device=index.device)
            place = torch.where(steps < lengths[chosen, None], starts[chosen, None] + steps, len(index) - 1)
            rows.append(index[place])
        return rows


def visibility_of(
    inputs: dict[str, Tensor | None], mask: Tensor | None, batch_size: int, length: int
) -> Visibility | None:
    """Return who sees whom for the padding mask (B, T) and the `PACKING_INPUTS` of a model, which describe packed
    documents by `position_ids` or `cu_seq_lens_q`.

    Raises:
        ValueError: the positions do not describe documents.
    """
    position_ids, boundaries, starts = inputs["position_ids"], inputs["cu_seq_lens_q"], None
    if boundaries is not None:
        end = batch_size * length
        known = read(boundaries) if boundaries.device.type == "cpu" and boundaries.dim() == 1 else None  # do not wait
        bad = known is not None and (known != sorted(known) or known[:1] != [0] or known[-1:] != [end])
        if boundaries.dim() != 1 or boundaries.is_floating_point() or bad:
            raise ValueError(
                f"cu_seq_lens_q must hold integers from 0 to {end}, the number of tokens, in ascending order, got "
                f"{tuple(boundaries.shape)} {boundaries.dtype}{'' if known is None else f': {shown(known)}'}"
            )
        starts = torch.zeros(end + 1, dtype=torch.bool, device=boundaries.device)
        # The last boundary is the end of the last document. It marks an extra entry, which is dropped.
        starts = starts.index_fill(0, boundaries.long(), True)[:-1].view(batch_size, length)
    elif position_ids is not None:
        if position_ids.shape != (batch_size, length) and position_ids.shape != (1, length):
            raise ValueError(f"position_ids must be ({batch_size} or 1, {length}), got {tuple(position_ids.shape)}")
        starts, places = (position_ids == 0).expand(batch_size, -1), torch.arange(length, device=position_ids.device)
        wrong = position_ids != places - torch.where(starts, places, 0).cummax(1).values
        if mask is not None:  # in one document, padding may have any positions
            real = mask != 0
            other = real & (position_ids != real.cumsum(1) - 1)
            starts = starts & (other.any(1, keepdim=True) | ~wrong.any(1, keepdim=True))
    visibility = Visibility.of(mask, starts)
    if position_ids is not None and boundaries is None and position_ids.device.type == "cpu":
        if visibility is not None:  # they may leave out padding
            wrong &= visibility.real & (position_ids != visibility.position)
        if read(wrong.any()):
            raise ValueError(
                "position_ids must count 0, 1, 2, ... and start again at 0 with each packed document; for padded "
                "rows, pass attention_mask instead"
            )
    return visibility


@dataclass(frozen=True, eq=False)
class Mixing:
    """One mixing problem: keys, values, position biases, and the positions that are visible to each query.

    Attributes:
        key: (B, T', h k) for h position-bias heads; k is d / h (a key per feature) or 1 (a key per head, as in
            AFT-conv). -inf hides a position.
        value: (B, T', d).
        num_heads: h.
        biases: w.
        causal: whether position t sees only t' <= t.
        num_queries: T, the number of queries; None for T = T'.
        visibility: the padding among the keys, and packed documents if T = T'; None if each query sees all keys. If w
            depends on the order of tokens, positions do not count padding.
        pair_mask: (B or 1, T, T') boolean, False where a key is hidden from a query.
        positions: (B or 1, T), positions of queries and keys other than 0, 1, 2, ...; then T = T'.
        query: (B, T, d); the averages are multiplied by sigmoid(query). None for the averages alone.
    """

    key: Tensor
    value: Tensor
    num_heads: int
    biases: PositionBias
    causal: bool = False
    num_queries: int | None = None
    visibility: Visibility | None = None
    pair_mask: Tensor | None = None
    positions: Tensor | None = None
    query: Tensor | None = None

    @property
    def length(self) -> int:
        """T', the number of keys."""
        return self.key.shape[1]

    def by_head(self) -> tuple[Tensor, Tensor]:
        """Return key and value as (B, h, T', k) and (B, h, T', c)."""
        return split_heads(self.key, self.num_heads), split_heads(self.value, self.num_heads)

    def table(self) -> tuple[Tensor, Tensor | None]:
        """Return the dense w, (B or 1, h, T, T'), and the visibility mask, (B or 1, 1, T, T'); None hides nothing."""
        device, count = self.key.device, self.length if self.num_queries is None else self.num_queries
        queries = torch.arange(count, device=device).unsqueeze(0)
        keys = torch.arange(self.length, device=device).unsqueeze(0)
        masks = [] if self.pair_mask is None else [self.pair_mask]
        in_order = count == self.length
        if self.causal:
            masks.append((queries.mT >= keys).unsqueeze(0))
        if self.visibility is not None:
            masks.append(self.visibility.pairs() if in_order else self.visibility.real.unsqueeze(1))
        if self.positions is not None:
            queries = keys = self.positions
            in_order = False
        elif self.visibility is not None and (self.biases.ordered or self.visibility.is_packed):
            keys = self.visibility.position
            queries = keys if in_order else queries.expand(len(keys), -1)
            in_order = False
        bias = self.biases.dense(count).unsqueeze(0) if in_order else self.biases.between(queries, keys)
        if not self.biases.global_connectivity:
            masks.append((bias != -math.inf).any(-3))
        return bias, reduce(torch.bitwise_and, masks).unsqueeze(1) if masks else None


# -------- which form

# The namespace of the operators, which `aft_hf.kernels.operators` describes.
OPERATORS = "aft_hf_v4"

# Bidirectional windows of more chunks than this are computed by running sums; for fewer, a table is faster.
FEW_CHUNKS = 16

_provided: dict[tuple[str, str], bool] = {}


@torch.compiler.assume_constant_result
def provides(name: str, device_type: str) -> bool:
    """Whether an imported aft-hf provides an operator for a type of device.

    It is found by name, since a checkpoint's own copy of this file does not belong to the package.
    """
    known = _provided.get((name, device_type))
    if known is None:
        package = getattr(torch.ops, OPERATORS)
        if not hasattr(package, "provides"):  # the package may be imported later
            if device_type in ("cpu", "cuda"):
                logger.warning_once(
                    f"AFT computes with PyTorch operations, which take several times longer on a {device_type} device "
                    "than the kernels of the package aft_hf, which is not on PyPI: run `pip install .` in a clone of "
                    "its repository, and import aft_hf"
                )
            return False
        known = _provided[name, device_type] = package.provides(name, device_type)
    return known


def uses_operator(name: str, implementation: str, device: torch.device) -> bool:
    """Whether an operator computes: it falls back to the portable form for inputs that its kernels do not take."""
    return implementation == "auto" and not torch.compiler.is_exporting() and provides(name, device.type)


def causal_w(problem: Mixing, by_operator: bool, start: int | Tensor = 0) -> tuple[Tensor | None, ...]:
    """Return w as the causal operators take it; the first token has position `start`."""
    biases, length, dtype = problem.biases, problem.value.shape[1], working_dtype(problem.value)
    if by_operator and isinstance(biases, Window) and biases.key is not None:
        starts = (0, start) if isinstance(start, Tensor) else (start, None)
        bias = torch.ops.aft_hf_v4.band(biases.query, biases.key, starts[0], length, biases.size, starts[1])
        bias = bias if biases.multiplier == 1.0 else bias * biases.multiplier
    else:
        bias = biases.by_lag(length, start)
    slopes = biases.slopes
    return bias if bias is None else bias.to(dtype), slopes if slopes is None else slopes.to(dtype)


def mix(problem: Mixing, implementation: str = "auto") -> Tensor:
    """Compute Eq. 2, times sigmoid(query) if the problem has a query.

    The backward pass may need the result, so do not modify it in place if gradients are computed.

    Args:
        problem: the mixing problem.
        implementation: one of `MIXING_IMPLEMENTATIONS`.

    Returns:
        (B, T, d) in the dtype of the values; 0 for a query that sees no key.
    """
    value, biases, length = problem.value, problem.biases, problem.length
    count = length if problem.num_queries is None else problem.num_queries
    if 0 in (length, count):
        return value.new_zeros(len(value), count, value.shape[-1])
    if implementation == "reference":
        return reference_mixing(problem)
    seen: Any = problem.visibility
    of_pairs = problem.pair_mask is not None or (problem.positions is not None and biases.ordered)
    if count != length or of_pairs:
        few = not problem.causal and (biases.reach is None or min(count, length) < CHUNK_SIZE)
        if of_pairs or few or seen is not None or torch.compiler.is_exporting():
            return _pairwise(problem)
        # Pad the shorter of queries and keys. Later keys, which no query of a causal problem sees, are cut off.
        longest, pad = count if problem.causal else max(count, length), nn.functional.pad
        given = (problem.key, -math.inf), (value, 0.0), (problem.query, 0.0)
        padded: Any = [x if x is None else pad(x, (0, 0, 0, longest - x.shape[1]), value=y) for x, y in given]
        problem = replace(problem, key=padded[0], value=padded[1], query=padded[2], num_queries=None)
        return mix(problem, implementation)[:, :count]
    by_first = seen is not None and seen.first is not None and problem.causal and biases.reach is not None
    if seen is None or (by_first and not (seen.is_packed and torch.compiler.is_exporting())):
        return _mix_whole(problem, implementation)
    if seen.is_packed:
        return _mix_documents(problem, implementation)
    problem, seen = without_padding(problem)
    return seen.restored(mix(problem, implementation))


def _mix_whole(problem: Mixing, implementation: str) -> Tensor:
    """Compute whole sequences, or causal ones with `first`, by the function for the structure of w."""
    biases: Any = problem.biases
    query, key, value = problem.query, problem.key, problem.value
    if problem.causal and biases.reach is not None:
        return mix_causal(problem, implementation, None if problem.visibility is None else problem.visibility.first)
    device, length, causal, exporting = value.device, problem.length, problem.causal, torch.compiler.is_exporting()
    on_both_sides = isinstance(biases, Window) or (isinstance(biases, LagKernel) and not (biases.causal or causal))
    if isinstance(biases, LagKernel) and on_both_sides and uses_operator("grid", implementation, device):
        biases = GridKernel(biases.kernels.unsqueeze(1), (1, length), biases.global_connectivity)
    if isinstance(biases, GridKernel) and not causal:
        run = torch.ops.aft_hf_v4.grid if uses_operator("grid", implementation, device) else portable_grid
        kernels = biases.kernels.to(working_dtype(value))
        return run(query, key, value, kernels, *biases.grid_size, biases.global_connectivity)
    if isinstance(biases, NoBias) and not causal:
        average = total(*(x.unsqueeze(3) for x in by_head(key, value, problem.num_heads))).average
        return finish(query, average.squeeze(3).expand(-1, -1, length, -1), value.dtype)
    if on_both_sides and (exporting or length > FEW_CHUNKS * power_of_two_from(max(biases.reach, CHUNK_SIZE))):
        given = by_head(key, value, problem.num_heads)
        # Recomputed in the backward pass: the sums take many times the memory of the inputs.
        return finish(query, recomputed(partial(portable_window, biases), *given), value.dtype)
    longest = causal and exporting and isinstance(biases, Dense)
    bias = biases.dense(biases.query.shape[1] if longest else length).to(working_dtype(value))
    if uses_operator("table", implementation, device):
        return torch.ops.aft_hf_v4.table(query, key, value, bias, causal)
    return portable_table(query, key, value, bias, causal, not biases.global_connectivity)


def mix_causal(problem: Mixing, implementation: str, first: Tensor | None, start: int | Tensor = 0) -> Tensor:
    """Compute a causal problem without padding whose w is 0, decays, or has a window, by the operator `causal`. Tokens
    without `first` have positions from `start` on.
    """
    query, key, value = problem.query, problem.key, problem.value
    by_operator = uses_operator("causal", implementation, value.device)
    window, slopes = causal_w(problem, by_operator, start)
    if window is None and key.shape != value.shape:  # without a window, keys are per feature
        key = key.repeat_interleave(value.shape[-1] // problem.num_heads, -1)
    run = torch.ops.aft_hf_v4.causal if by_operator else portable_causal
    return run(query, key, value, window, slopes, first, problem.biases.global_connectivity)


def _pairwise(problem: Mixing) -> Tensor:
    """Compute Eq. 2 from the table and the mask of all pairs."""
    given = by_head(problem.key, problem.value, problem.num_heads)
    return finish(problem.query, pairwise(*given, *problem.table()), problem.value.dtype)


def _mix_documents(problem: Mixing, implementation: str) -> Tensor:
    """Compute packed documents as rows of their own, those of about the same length in one batch."""
    seen: Any = problem.visibility
    if seen.longest is None or torch.compiler.is_compiling():
        return _pairwise(problem)
    value = problem.value
    context = value.new_zeros(value.shape[0] * value.shape[1] + 1, value.shape[2])
    for index in seen.rows:
        inside = (index < len(context) - 1).unsqueeze(-1)
        taken: list[Any] = [
            x if x is None else torch.where(inside, _tokens(x, index.clamp_max(len(context) - 2)), hidden)
            for x, hidden in ((problem.key, -math.inf), (value, 0.0), (problem.query, 0.0))
        ]
        part = replace(problem, key=taken[0], value=taken[1], query=taken[2], num_queries=None, visibility=None)
        context = context.index_put((index,), mix(part, implementation))
    return context[:-1].view_as(value)


def without_padding(problem: Mixing) -> tuple[Mixing, Visibility]:
    """Hide the padding of rows without packed documents, behind their real tokens if the order of tokens counts.
    Return the problem, and the visibility whose `restored` returns its averages to their places.
    """
    seen: Any = problem.visibility
    seen = seen if problem.biases.ordered or problem.causal else replace(seen, order=None)
    hidden = ~seen.padding_last().real.unsqueeze(-1)
    key, value = hide(seen.moved(problem.key), seen.moved(problem.value), hidden)
    query = problem.query if problem.query is None else seen.moved(problem.query).masked_fill(hidden, 0.0)
    return replace(problem, key=key, value=value, query=query, visibility=None), seen


def _tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x, (B, T, d), at indices into those of the batch."""
    return nn.functional.embedding(index, x.flatten(0, 1))


def reference_mixing(problem: Mixing) -> Tensor:
    """Compute Eq. 2 as printed, query by query. Every form is tested against this function.

    It computes in float64 for float64 inputs and in float32 otherwise, and multiplies by sigmoid(query) if the problem
    has a query. A query that sees no key gives 0.
    """
    bias, visible = problem.table()
    key, value = (widen(x) for x in problem.by_head())
    contexts = []
    for t in range(bias.shape[-2]):
        logits, values = key + bias[..., t, :].unsqueeze(-1).to(key.dtype), value  # (B, h, T', k)
        if visible is not None:  # hidden values may be NaN, so they are replaced instead of multiplied by 0
            hidden = ~visible[..., t if visible.shape[-2] > 1 else 0, :].unsqueeze(-1)
            logits, values = logits.masked_fill(hidden, -math.inf), value.masked_fill(hidden, 0.0)
        contexts.append((_softmax(logits, -2) * values).sum(-2))
    context = join_heads(torch.stack(contexts, -2))
    if problem.query is not None:
        context = torch.sigmoid(widen(problem.query)) * context
    return context.to(problem.value.dtype)


def _softmax(logits: Tensor, dim: int) -> Tensor:
    """Softmax whose value and gradient are 0 where all logits along `dim` are -inf."""
    nothing = (logits == -math.inf).all(dim, keepdim=True)
    return torch.softmax(logits.masked_fill(nothing, 0.0), dim).masked_fill(nothing, 0.0)


def mixing_weights(key: Tensor, position_bias: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
    """Return the implicit attention of Eq. 3 without the query's gate: (B, h, k, T, T'), where each row sums to 1.

    Keys are (B, h, T', k), the bias is (B or 1, h, T, T') or None for w = 0, and False in `visible` hides a position.
    """
    key = widen(key).transpose(-1, -2).unsqueeze(-2)  # (B, h, k, 1, T')
    logits = key if position_bias is None else key + position_bias.to(key.dtype).unsqueeze(-3)
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(-3), -math.inf)
    return _softmax(logits, -1)


__all__ = ["Mixing", "Visibility", "mix", "mixing_weights", "reference_mixing"]
