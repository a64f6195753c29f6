"""The AFT operation: its inputs (`Mixing`), its reference implementation (Eq. 2 as printed), and the backend table.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103) mix positions by

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')        (Eq. 2, before the query's gate)

element-wise in the features. A `Mixing` holds one such problem, and `mix` passes it to the first backend of `BACKENDS`
that supports it.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .documents_aft import Documents
from .mixing_backend_aft import Backend
from .mixing_cpu_aft import CpuBackend
from .mixing_portable_aft import PortableBackend
from .mixing_triton_aft import TritonBackend
from .position_biases_aft import PositionBias
from .projections_aft import Projections
from .scaled_sums_aft import join_heads, split_heads, widen
from .sequence_shards_aft import SequenceShard
from .shard_exchange_aft import count_of_past, with_past


if TYPE_CHECKING:
    from .caching_aft import AFTLayerState


# For each device type, the backends in the order in which `mix` tries them; `None` stands for every other type. A
# backend with `only_by_name` is tried only if the user names it.
BACKENDS = {
    "cpu": (TritonBackend, CpuBackend, PortableBackend),
    None: (TritonBackend, PortableBackend),
}


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
        shard: which part of longer rows this process holds, if the rows are split over several processes. The padding
            and the documents of the problem are then those of the shard.
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
    shard: SequenceShard | None = None
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

    def visible_values(self) -> torch.Tensor:
        """Return the values, with 0 for padding."""
        if self.padding_mask is None:
            return self.value
        return self.value.masked_fill(~self.padding_mask.unsqueeze(-1), 0.0)

    def table(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the dense w, (B or 1, h, T, T'), and the visibility mask, (B or 1, 1, T, T'); None hides nothing."""
        device, count = self.key.device, self.length if self.num_queries is None else self.num_queries
        queries = torch.arange(count, device=device).unsqueeze(0)
        keys = torch.arange(self.length, device=device).unsqueeze(0)
        masks = []
        if self.causal:
            masks.append((queries.mT >= keys).unsqueeze(0))
        if self.padding_mask is not None:
            masks.append(self.padding_mask.unsqueeze(1))
        if self.pair_mask is not None:
            masks.append(self.pair_mask)
        in_order = count == self.length
        if self.positions is not None:
            queries, keys, in_order = self.positions, self.positions, False
        elif self.documents is not None:
            masks.append(self.documents.pairs())
            queries = keys = self.documents.positions(self.padding_mask)
            in_order = False
        elif self.padding_mask is not None and self.biases.ordered:
            keys, in_order = real_tokens_first(self.padding_mask), False
            queries = keys if count == self.length else queries.expand(len(keys), -1)
        visible = None
        for mask in masks:
            visible = mask if visible is None else visible & mask
        bias = self.biases.dense(count).unsqueeze(0) if in_order else self.biases.between(queries, keys)
        return bias, None if visible is None else visible.unsqueeze(1)


def mix(problem: Mixing, implementation: str = "auto") -> torch.Tensor:
    """Compute Eq. 2, times sigmoid(query) if the problem has a query.

    The backward pass may need the result, so do not modify it in place if gradients are computed.

    Args:
        problem: the mixing problem.
        implementation: one of `MIXING_IMPLEMENTATIONS`. A backend that does not support the problem is skipped.

    Returns:
        (B, T, d) in the dtype of the values; 0 for a query that sees no key.
    """
    if problem.length == 0:
        return problem.value.new_zeros(len(problem.value), problem.num_queries or 0, problem.value.shape[-1])
    if problem.shard is not None:
        mix_shard = _mix_shard if problem.causal else _mix_shard_of_rows
        context = mix_shard(replace(problem, query=None), implementation)
        return context if problem.query is None else torch.sigmoid(problem.query) * context
    if implementation == "reference":
        return reference_mixing(problem)
    backend, order, prepared = _choose(problem, implementation)
    if backend is None:
        context = _mix_documents(replace(problem, query=None), implementation)
    else:
        context = backend.mix(prepared)
        context = context if order is None else gather(context, order)
    if problem.query is None or (backend is not None and backend.applies_gate):
        return context
    return torch.sigmoid(problem.query) * context


def fuses_gate(problem: Mixing, implementation: str = "auto") -> bool:
    """Whether the backend that `mix` chooses for a problem also applies the gate (a fused gate)."""
    if not any(backend.applies_gate for backend in _backends(problem.key.device, implementation)):
        return False
    backend = _choose(replace(problem, padding_mask=None), implementation)[0]
    return backend is not None and backend.applies_gate


def _choose(problem: Mixing, implementation: str) -> tuple[type[Backend] | None, torch.Tensor | None, Mixing]:
    """Choose the backend for a problem, and remove the padding from the problem.

    Returns:
        The backend, None if each document has to become a row of its own; the new place of each token, (B, T), None if
        tokens are not moved; and the problem without a padding mask.
    """
    backends, order = _backends(problem.key.device, implementation), None
    if problem.documents is not None:
        from_start = problem.documents.offsets is None
        backends = [backend for backend in backends if backend.takes_documents and from_start]
    if backends and problem.padding_mask is not None and not problem.is_pairwise:
        problem, order = without_padding(problem, moved=problem.biases.ordered)
    return next((backend for backend in backends if backend.supports(problem)), None), order, problem


def mix_layer(
    x: torch.Tensor, projections: Projections, biases: PositionBias, *, causal: bool, implementation: str = "auto"
) -> torch.Tensor | None:
    """Compute a whole mixer, projections and gate included, if a backend can compute them together; else return None.

    Args:
        x: (B, T, d), the input of the query, key and value projections, without padding.
    """
    for backend in _backends(x.device, implementation):
        output = backend.layer(x, projections, biases, causal)
        if output is not None or backend.name == implementation:
            return output
    return None


def mix_next(state: "AFTLayerState", problem: Mixing, implementation: str) -> torch.Tensor | None:
    """Compute Eq. 2 for the next token of every row, times the gate, and add the token to the state (decoding step).

    Returns None, and leaves the state unchanged, if no backend supports the step.
    """
    for backend in _backends(problem.key.device, implementation):
        context = backend.step(state, problem)
        if context is not None:
            return context
    return None


def mix_prompt(
    state: "AFTLayerState", problem: Mixing, counts: torch.Tensor | None, implementation: str
) -> torch.Tensor | None:
    """Compute Eq. 2 for several tokens, times the gate, and add the tokens to the state (prefill).

    Returns None, and leaves the state unchanged, if no backend supports the problem.

    Args:
        state: the state of the layer.
        problem: the mixing problem, without a padding mask.
        counts: (B,), the number of real tokens in each row, which come first; None if all tokens are real.
        implementation: one of `MIXING_IMPLEMENTATIONS`.
    """
    for backend in _backends(problem.key.device, implementation):
        context = backend.prefill(state, problem, counts)
        if context is not None:
            return context
    return None


def _backends(device: torch.device, implementation: str) -> list[Any]:
    """Return the backends that may be used on the device, the named backend first."""
    if implementation == "reference":
        return []
    backends = BACKENDS.get(device.type, BACKENDS[None])
    asked = [backend for backend in backends if backend.name == implementation or not backend.only_by_name]
    return asked if implementation == "auto" else sorted(asked, key=lambda backend: backend.name != implementation)


def _mix_documents(problem: Mixing, implementation: str) -> torch.Tensor:
    """Compute packed documents as rows of their own, documents of about the same length in one batch.

    If the host may not read the number of documents, as in a traced program, a table of all pairs is used instead.
    """
    documents = problem.documents
    if documents is None or problem.is_pairwise or not documents.can_be_unpacked:
        return PortableBackend.mix(problem)
    mask = problem.padding_mask
    context = torch.zeros_like(problem.value)
    for rows in documents.rows:
        part = replace(
            problem,
            key=rows.take(problem.key, -math.inf),
            value=rows.take(problem.value, 0.0),
            num_queries=None,
            padding_mask=None if mask is None else rows.take(mask.unsqueeze(-1), False).squeeze(-1),
            documents=None,
        )
        if rows.position != 0:
            part = replace(part, biases=part.biases.from_position(rows.position, rows.longest))
        context = rows.put(context, mix(part, implementation))
    return context


def _mix_shard(problem: Mixing, implementation: str) -> torch.Tensor:
    """Compute a causal shard: prepend tokens that stand for everything before it, and mix the result as usual."""
    shard, biases, order = problem.shard, problem.biases, None
    if problem.padding_mask is not None:
        problem, order = without_padding(problem, moved=True)
    assert shard is not None and biases.reach is not None
    past = count_of_past(biases.reach, biases.hides_outside)
    key, value = with_past(
        shard,
        problem.key,
        problem.value,
        num_heads=problem.num_heads,
        reach=biases.reach,
        slopes=biases.slopes,
        hides_outside=biases.hides_outside,
    )
    starts, documents = shard.before - past, shard.real_documents  # positions of the first tokens of the rows
    one_table = biases.relative or bool((starts == starts[0]).all())
    if documents is not None or not one_table:
        documents = _with_tokens_in_front(shard, past, None if biases.relative else starts)
    elif not biases.relative:
        biases = biases.from_position(int(starts[0]), key.shape[1])
    whole = replace(
        problem,
        key=key,
        value=value,
        biases=biases,
        num_queries=None,
        shard=None,
        documents=documents,
        padding_mask=None,
    )
    context = mix(whole, implementation)[:, past:].to(problem.value.dtype)
    return context if order is None else gather(context, order)


def _mix_shard_of_rows(problem: Mixing, implementation: str) -> torch.Tensor:
    """Compute a bidirectional shard, of images or of sequences: prepend and append the grid rows within reach of the
    kernels and one sum for all rows farther away, and mix the result as an image with more rows.
    """
    shard, biases = problem.shard, problem.biases
    assert shard is not None and biases.reach_of_rows is not None
    reach = biases.reach_of_rows * biases.columns
    options: dict[str, Any] = {"num_heads": problem.num_heads, "reach": reach, "hides_outside": biases.hides_outside}
    past = count_of_past(reach, biases.hides_outside)
    key, value = with_past(shard, problem.key, problem.value, **options)
    following = with_past(shard.from_the_end, problem.key.flip(1), problem.value.flip(1), **options)
    filling = -past % biases.columns  # hidden tokens that complete the rows of the summary tokens
    key, value = (
        nn.functional.pad(torch.cat([x, after[:, :past].flip(1)], 1), (0, 0, filling, filling), value=hidden)
        for x, after, hidden in zip((key, value), following, (-math.inf, 0.0))
    )
    biases = biases.with_more_rows(2 * (past + filling) // biases.columns)
    whole = replace(problem, key=key, value=value, biases=biases, num_queries=None, shard=None)
    context = mix(whole, implementation).narrow(1, past + filling, problem.length)
    return context.to(problem.value.dtype)


def _with_tokens_in_front(shard: SequenceShard, count: int, positions: torch.Tensor | None) -> Documents:
    """Return the documents of a shard after `count` tokens were prepended to each row."""
    starts = torch.zeros(shard.batch_size, count + shard.length, dtype=torch.bool, device=shard.device)
    if shard.real_documents is not None:
        starts[:, count:] = shard.real_documents.starts
        # A document that starts with the shard has no earlier tokens: the tokens in front of it are hidden.
        starts[:, count] = False
    starts[:, 0] = True
    return Documents(starts, positions if positions is None else positions.to(shard.device))


def without_padding(problem: Mixing, *, moved: bool) -> tuple[Mixing, torch.Tensor | None]:
    """Remove the padding mask from a problem: hide padding by keys of -inf and values of 0.

    Args:
        problem: a problem with a padding mask.
        moved: whether to also move padding behind the real tokens of its row, in keys, values, queries and documents.

    Returns:
        The problem, and the new place of each token, (B, T); None if padding is not moved.
    """
    mask = problem.padding_mask
    assert mask is not None
    hidden: dict[str, Any] = dict(hide_padding(problem.key, problem.value, mask))
    order = None
    if moved:
        order = real_tokens_first(mask)
        if problem.query is not None:
            hidden["query"] = problem.query
        hidden = {name: scatter(x, order) for name, x in hidden.items()}
        if problem.documents is not None:
            hidden["documents"] = problem.documents.moved(order)
    return replace(problem, padding_mask=None, **hidden), order


def hide_padding(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `key` with -inf and `value` with 0 where the mask (B, T) is False, whatever they were (NaN, too)."""
    padding = ~mask.unsqueeze(-1)
    return {"key": key.masked_fill(padding, -math.inf), "value": value.masked_fill(padding, 0.0)}


def real_tokens_first(mask: torch.Tensor) -> torch.Tensor:
    """Return the new place of each token, (B, T), when padding moves behind the real tokens.

    The new place of a real token is its position in the sequence.
    """
    real = mask.cumsum(-1)
    return torch.where(mask, real - 1, real[:, -1:] + (~mask).cumsum(-1) - 1)


def scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Move x[b, t] to place order[b, t]."""
    return torch.zeros_like(x).scatter(1, order.unsqueeze(-1).expand_as(x), x)


def gather(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Undo `scatter`."""
    return x.gather(1, order.unsqueeze(-1).expand_as(x))


# ------------------------------------------------------------------------------------------------------- the reference


def reference_mixing(problem: Mixing) -> torch.Tensor:
    """Compute Eq. 2 as printed, query by query. Every backend is tested against this function.

    It computes in float64 for float64 inputs and in float32 otherwise, and multiplies by sigmoid(query) if the problem
    has a query. A query that sees no key gives 0.
    """
    bias, visible = problem.table()
    key, value = (widen(x) for x in problem.by_head())
    queries = [
        _average(
            key,
            value,
            bias[..., t, :],
            None if visible is None else visible[..., t if visible.shape[-2] > 1 else 0, :],
        )
        for t in range(bias.shape[-2])
    ]
    context = join_heads(torch.stack(queries, -2))
    if problem.query is not None:
        context = torch.sigmoid(widen(problem.query)) * context
    return context.to(problem.value.dtype)


def _average(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Compute the average of one query, (B, h, c), from biases and a visibility mask (..., T')."""
    logits = key + bias.unsqueeze(-1).to(key.dtype)
    if visible is not None:  # hidden values may be NaN, so they are replaced instead of multiplied by 0
        logits = logits.masked_fill(~visible.unsqueeze(-1), -math.inf)
        value = value.masked_fill(~visible.unsqueeze(-1), 0.0)
    return (_softmax(logits, -2) * value).sum(-2)


def _softmax(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax whose value and gradient are 0 where all logits along `dim` are -inf."""
    nothing = (logits == -math.inf).all(dim, keepdim=True)
    return torch.softmax(logits.masked_fill(nothing, 0.0), dim).masked_fill(nothing, 0.0)


def mixing_weights(
    key: torch.Tensor, position_bias: torch.Tensor | None = None, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the implicit attention of Eq. 3 without the query's gate: (B, h, k, T, T'), where each row sums to 1.

    No other function builds a T x T' x d tensor; only `output_attentions` and visualization use it.

    Args:
        key: (B, h, T', k).
        position_bias: (B or 1, h, T, T'), or None for w = 0.
        visible: boolean, broadcast to (B, h, T, T'); False hides a position.
    """
    key = widen(key).transpose(-1, -2).unsqueeze(-2)  # (B, h, k, 1, T')
    logits = key if position_bias is None else key + position_bias.to(key.dtype).unsqueeze(-3)
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(-3), -math.inf)
    return _softmax(logits, -1)


__all__ = ["BACKENDS", "Mixing", "mix", "mixing_weights", "reference_mixing"]
