"""The AFT operation: what is asked (`Mixing`), the reference (Eq. 2 as printed), and `mix`, which chooses a form.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103) mix positions by

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')        (Eq. 2, before the query's gate)

element-wise in the features. A `Mixing` holds one such problem. `mix` computes it by an operator of an installed
aft-hf if there is one for it, and otherwise by the portable form (`portable_aft.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from transformers.utils import logging

from .portable_aft import (
    are_plain_tensors,
    can_read_values,
    flush_gradient,
    is_short,
    join_heads,
    pairwise_mixing,
    portable_mixing,
    power_of_two_from,
    split_heads,
)
from .position_biases_aft import Dense, GridKernel, LagKernel, LinearDecay, NoBias, PositionBias, Window, widen


logger = logging.get_logger(__name__)

# -------- packed documents

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

    def longest(self) -> int | None:
        """Return the length of the longest document; None if the host cannot read it, or would have to wait for it."""
        known = can_read_values(self.starts) or (self.can_be_unpacked and "rows" in vars(self))
        return max((rows.index.shape[1] for rows in self.rows), default=0) if known else None

    def to(self, device: torch.device, non_blocking: bool = False) -> "Documents":
        """Return the documents on another device, as hooks of models that are dispatched to several devices need."""
        starts, offsets = self.starts.to(device, non_blocking=non_blocking), self.offsets
        offsets = offsets if offsets is None else offsets.to(device, non_blocking=non_blocking)
        return self if starts is self.starts else Documents(starts, offsets)

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
        continues = self.starts.cumsum(1) == self.starts[:, :1].long()  # the first document of a row
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
            steps = torch.arange(int(lengths[chosen].max()), device=first.device)
            inside = steps < lengths[chosen, None]
            rows.append(DocumentRows(torch.where(inside, steps, 0) + first[chosen, None], inside, position))
        return rows


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """A batch of documents as rows (N, L) that are padded on the right: the index of each token in the concatenated
    rows of the batch, whether it is in the document, and the position of the first tokens in their documents.
    """

    index: torch.Tensor
    inside: torch.Tensor
    position: int = 0

    def take(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """Copy the documents from x: (B, T, c) -> (N, L, c), with `fill` after each document."""
        return x.flatten(0, 1)[self.index].masked_fill(~self.inside.unsqueeze(-1), fill)

    def put(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of x (B, T, c) with the documents replaced by `rows` (N, L, c)."""
        return x.flatten(0, 1).index_put((self.index[self.inside],), rows[self.inside]).view_as(x)


def packed_documents(
    inputs: dict[str, torch.Tensor | None],
    mask: torch.Tensor | None,
    batch_size: int,
    length: int,
    *,
    may_wait: bool = True,
) -> Documents | None:
    """Return the documents that `position_ids` or `cu_seq_lens_q` among the `PACKING_INPUTS` of a model describe; None
    if neither is given, or if each row is known to be one document, for which the host waits if it `may_wait`.

    Raises:
        ValueError: the positions do not describe documents, or packed documents are combined with a 3-D mask.
    """
    position_ids, boundaries = inputs["position_ids"], inputs["cu_seq_lens_q"]
    if boundaries is not None:
        documents = Documents.from_cumulative_lengths(boundaries, batch_size, length)
    elif position_ids is not None:
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
    else:
        return None
    can_read = documents.can_be_unpacked if may_wait else can_read_values(documents.starts)
    if can_read and not documents.starts[:, 1:].any():  # each row is one document
        return None
    if mask is not None and mask.dim() == 3:
        raise ValueError("pass packed documents either as position_ids or as a 3-D attention_mask, not as both")
    return documents


# -------- what is asked


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
        padding_mask: (B, T') boolean, False for padding. If w depends on the order of tokens, positions count from
            the first real token of a row. The outputs of padding queries are undefined.
        pair_mask: (B or 1, T, T') boolean, False where a key is hidden from a query.
        positions: (B or 1, T), positions of queries and keys other than 0, 1, 2, ...; then T = T'.
        documents: the documents that are packed into the rows; None if each row is one sequence.
        query: (B, T, d); the averages are multiplied by sigmoid(query). None for the averages alone.
    """

    key: torch.Tensor
    value: torch.Tensor
    num_heads: int
    biases: PositionBias
    causal: bool = False
    num_queries: int | None = None
    padding_mask: torch.Tensor | None = None
    pair_mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    documents: Documents | None = None
    query: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """T', the number of keys."""
        return self.key.shape[1]

    @property
    def is_pairwise(self) -> bool:
        """Whether the problem needs a table of all pairs, because of a pair mask, positions, or T != T'."""
        cross = self.num_queries is not None and self.num_queries != self.length
        return cross or self.pair_mask is not None or self.positions is not None

    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value as (B, h, T', k) and (B, h, T', c)."""
        return split_heads(self.key, self.num_heads), split_heads(self.value, self.num_heads)

    def table(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the dense w, (B or 1, h, T, T'), and the visibility mask, (B or 1, 1, T, T'); None hides nothing."""
        device, count = self.key.device, self.length if self.num_queries is None else self.num_queries
        queries = torch.arange(count, device=device).unsqueeze(0)
        keys = torch.arange(self.length, device=device).unsqueeze(0)
        masks = [] if self.pair_mask is None else [self.pair_mask]
        if self.causal:
            masks.append((queries.mT >= keys).unsqueeze(0))
        if self.padding_mask is not None:
            masks.append(self.padding_mask.unsqueeze(1))
        in_order = False
        if self.positions is not None:
            queries = keys = self.positions
        elif self.documents is not None:
            masks.append(self.documents.pairs())
            queries = keys = self.documents.positions(self.padding_mask)
        elif self.padding_mask is not None and self.biases.ordered:
            keys = real_tokens_first(self.padding_mask)
            queries = keys if count == self.length else queries.expand(len(keys), -1)
        else:
            in_order = count == self.length
        bias = self.biases.dense(count).unsqueeze(0) if in_order else self.biases.between(queries, keys)
        return bias, reduce(torch.bitwise_and, masks).unsqueeze(1) if masks else None


# -------- operators

# The namespace of the operators of an installed aft-hf, which `aft_hf.kernels.operators` describes.
OPERATORS = "aft_hf_v1"

# Maximum number of entries of the table of a grid, of all heads, where there is no operator for grids.
LARGEST_TABLE = 2**24

# Heads with fewer features do not fill a vector of the kernels for tables.
FEW_FEATURES = 16

# The (operator, type of device) that have been found.
_found: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result
def has_operator(name: str, device_type: str) -> bool:
    """Whether an imported aft-hf provides an operator for a type of device.

    It is found by name, since a checkpoint's own copy of this file does not belong to the package.
    """
    if (name, device_type) in _found:
        return True
    if device_type not in ("cpu", "cuda") or not hasattr(getattr(torch.ops, OPERATORS), name):
        if device_type == "cpu":
            logger.warning_once("on a CPU, the kernels of `pip install aft-hf` make AFT faster, after `import aft_hf`")
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"{OPERATORS}::{name}", device_type.upper()):
        _found.add((name, device_type))
    return (name, device_type) in _found


def _operator_takes(name: str, problem: Mixing, implementation: str) -> bool:
    """Whether there is an operator for the tensors of a problem: their device, their dtypes, and how they are run."""
    if implementation != "auto" or problem.is_pairwise or torch._C._are_functorch_transforms_active():
        return False
    if problem.query is not None and problem.query.shape != problem.value.shape:
        return False
    given = [x for x in (problem.query, problem.key, problem.value) if x is not None]
    if {x.dtype for x in given} not in ({torch.float32}, {torch.bfloat16}) or torch.compiler.is_exporting():
        return False
    tensors = [*given, *problem.biases.tensors()]
    if any(x.device != problem.value.device or x.dtype == torch.float64 for x in tensors):
        return False
    runs = torch.compiler.is_compiling() or are_plain_tensors(*tensors)
    return runs and has_operator(name, problem.value.device.type)


def _operators_for(problem: Mixing) -> Iterator[str]:
    """Yield the operators that compute a problem without a padding mask efficiently, the best one first."""
    biases, length = problem.biases, problem.length
    if problem.causal and biases.reach is not None:
        if not isinstance(biases, (NoBias, LinearDecay)) or problem.key.shape == problem.value.shape:
            yield "causal"  # without a window, keys are per feature
        return
    if problem.documents is not None:
        return
    one_row = isinstance(biases, LagKernel) and not (biases.causal or biases.hides_outside)
    if (isinstance(biases, GridKernel) and not problem.causal) or one_row:
        yield "grid"
    if isinstance(biases, GridKernel):
        is_small = problem.num_heads * length**2 <= LARGEST_TABLE
    elif isinstance(biases, (Window, LagKernel)):
        is_small = is_short(biases.reach, length)
    else:
        is_small = isinstance(biases, Dense)
    if is_small and not (biases.hides_outside and problem.value.is_cuda):  # Triton kernels multiply hidden values by 0
        yield "table"


def has_state_operator(problem: Mixing, implementation: str) -> bool:
    """Whether the operator `causal_state`, which has no gradients, computes a problem without a padding mask."""
    tensors = (problem.query, problem.key, problem.value, *problem.biases.tensors())
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return False
    return "causal" in _operators_for(problem) and _operator_takes("causal", problem, implementation)


def window_and_slopes(problem: Mixing, start: int | torch.Tensor = 0) -> tuple[torch.Tensor | None, ...]:
    """Return w as the causal operators take it; the first token has position `start`."""
    biases, length = problem.biases, problem.length
    if (
        isinstance(biases, Window)
        and biases.key is not None
        and biases.key.dtype == biases.query.dtype
        and not isinstance(start, torch.Tensor)
        and has_operator("band", biases.device.type)
    ):
        bias = torch.ops.aft_hf_v1.band(biases.query, biases.key, start, length, biases.size)
        bias = bias if biases.multiplier == 1.0 else bias * biases.multiplier
    else:
        bias = biases.by_lag(length, start)
    slopes = biases.slopes
    return None if bias is None else bias.float(), None if slopes is None else slopes.float()


def _by_operator(name: str, problem: Mixing) -> torch.Tensor:
    """Compute a problem by an operator, gate included."""
    biases: Any = problem.biases
    given = problem.query, problem.key, problem.value
    if name == "causal":
        first = None if problem.documents is None else problem.documents.first_positions()
        return torch.ops.aft_hf_v1.causal(*given, *window_and_slopes(problem), first, biases.hides_outside)
    if name == "grid":
        kernels, is_row = biases.kernels.float(), isinstance(biases, LagKernel)
        kernels, size = (kernels.unsqueeze(1), (1, problem.length)) if is_row else (kernels, biases.grid_size)
        return torch.ops.aft_hf_v1.grid(*given, kernels, *size, biases.hides_outside)
    bias, (rows, length, width) = biases.dense(problem.length).float(), problem.value.shape
    heads, features = problem.num_heads, width // problem.num_heads
    if rows < 2 or features >= FEW_FEATURES:
        return torch.ops.aft_hf_v1.table(*given, bias, problem.causal)
    # All rows share w, so they can be further features of each head.
    by_head = (x if x is None else split_heads(x, heads).expand(-1, -1, -1, features) for x in given)
    folded = (x if x is None else x.permute(2, 1, 0, 3).flatten(1).unsqueeze(0) for x in by_head)
    context = torch.ops.aft_hf_v1.table(*folded, bias, problem.causal)
    return join_heads(context.view(length, heads, rows, features).permute(2, 1, 0, 3))


def mix(problem: Mixing, implementation: str = "auto") -> torch.Tensor:
    """Compute Eq. 2, times sigmoid(query) if the problem has a query.

    The backward pass may need the result, so do not modify it in place if gradients are computed.

    Args:
        problem: the mixing problem.
        implementation: one of `MIXING_IMPLEMENTATIONS`.

    Returns:
        (B, T, d) in the dtype of the values; 0 for a query that sees no key.
    """
    if problem.length == 0:
        return problem.value.new_zeros(len(problem.value), problem.num_queries or 0, problem.value.shape[-1])
    if implementation == "reference":
        return reference_mixing(problem)
    prepared, order = problem, None
    if not problem.is_pairwise:
        prepared, order = without_padding(problem, moved=problem.biases.ordered)
    documents = problem.documents
    from_start = documents is None or documents.offsets is None
    for name in _operators_for(prepared) if from_start else ():
        if _operator_takes(name, prepared, implementation):
            context = _by_operator(name, prepared)
            break
    else:
        if documents is not None and documents.can_be_unpacked and not problem.is_pairwise:
            return gated(problem, _mix_documents(replace(problem, query=None), documents, implementation))
        context = gated(prepared, _portable(prepared))
    return context if order is None else gather(context, order)


def gated(problem: Mixing, context: torch.Tensor) -> torch.Tensor:
    """Multiply averages by sigmoid(query) if the problem has a query."""
    return context if problem.query is None else torch.sigmoid(problem.query) * context


def _portable(problem: Mixing) -> torch.Tensor:
    """Compute Eq. 2 by the portable form: (B, T, d) in the dtype of the values."""
    key, value = (flush_gradient(widen(x)) for x in problem.by_head())
    if problem.is_pairwise or problem.documents is not None or problem.padding_mask is not None:
        context = pairwise_mixing(key, value, *problem.table())
    else:
        context = portable_mixing(key, value, problem.biases, causal=problem.causal)
    return join_heads(context).to(problem.value.dtype)


def _mix_documents(problem: Mixing, documents: Documents, implementation: str) -> torch.Tensor:
    """Compute packed documents as rows of their own, documents of about the same length in one batch."""
    mask, biases, context = problem.padding_mask, problem.biases, torch.zeros_like(problem.value)
    for rows in documents.rows:
        part = replace(
            problem,
            key=rows.take(problem.key, -math.inf),
            value=rows.take(problem.value, 0.0),
            biases=biases.from_position(rows.position, rows.index.shape[1]) if rows.position else biases,
            num_queries=None,
            padding_mask=None if mask is None else rows.take(mask.unsqueeze(-1), False).squeeze(-1),
            documents=None,
        )
        context = rows.put(context, mix(part, implementation))
    return context


def without_padding(problem: Mixing, *, moved: bool) -> tuple[Mixing, torch.Tensor | None]:
    """Remove the padding mask, if there is one: hide padding by keys of -inf and values of 0, whatever they were.

    If `moved`, also move padding behind the real tokens of its row, in keys, values, queries and documents, and return
    the new place of each token, (B, T).
    """
    mask, documents, order = problem.padding_mask, problem.documents, None
    if mask is None:
        return problem, None
    padding = ~mask.unsqueeze(-1)
    moving: dict[str, Any] = {"query": problem.query, "key": problem.key.masked_fill(padding, -math.inf)}
    moving["value"] = problem.value.masked_fill(padding, 0.0)
    if moved:
        order = real_tokens_first(mask)
        for name, x in moving.items():
            moving[name] = x if x is None else torch.zeros_like(x).scatter(1, order.unsqueeze(-1).expand_as(x), x)
        documents = documents if documents is None else documents.moved(order)
    return replace(problem, padding_mask=None, documents=documents, **moving), order


def real_tokens_first(mask: torch.Tensor) -> torch.Tensor:
    """Return the new place of each token, (B, T), when padding moves behind the real tokens.

    The new place of a real token is its position in the sequence.
    """
    real = mask.cumsum(-1)
    return torch.where(mask, real - 1, real[:, -1:] + (~mask).cumsum(-1) - 1)


def gather(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return x[b, order[b, t]] at (b, t): tokens that `without_padding` moved, in their first order."""
    return x.gather(1, order.unsqueeze(-1).expand_as(x))


# -------- the reference


def reference_mixing(problem: Mixing) -> torch.Tensor:
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


def _softmax(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax whose value and gradient are 0 where all logits along `dim` are -inf."""
    nothing = (logits == -math.inf).all(dim, keepdim=True)
    return torch.softmax(logits.masked_fill(nothing, 0.0), dim).masked_fill(nothing, 0.0)


def mixing_weights(
    key: torch.Tensor, position_bias: torch.Tensor | None = None, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the implicit attention of Eq. 3 without the query's gate: (B, h, k, T, T'), where each row sums to 1.

    Keys are (B, h, T', k), the bias is (B or 1, h, T, T') or None for w = 0, and False in `visible` hides a position.
    """
    key = widen(key).transpose(-1, -2).unsqueeze(-2)  # (B, h, k, 1, T')
    logits = key if position_bias is None else key + position_bias.to(key.dtype).unsqueeze(-3)
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(-3), -math.inf)
    return _softmax(logits, -1)


__all__ = [
    "Documents",
    "Mixing",
    "mix",
    "mixing_weights",
    "reference_mixing",
]
