"""Device functions shared by the Triton kernels: index computations, loads of tiles and position biases, and the sums
of one tile of Eq. 2.

A tile of C queries and C keys is computed as one matrix product with exp(w), relative to the largest key of the tile.
If a query could lose terms to underflow that way, this tile alone is summed key by key. The kernel itself decides, so
the host never waits for the device. All sums are a numerator and a denominator relative to a maximum.

The kernels are in `causal_kernels.py`, `bidirectional_kernels.py` and `decoding_kernels.py`.
"""

import triton
import triton.language as tl


# The structures of w: 0; -slope * distance; the table of a window (one row per query, with columns for the keys of the
# near chunks and the query's own chunk); the table of all pairs.
SIMPLE = tl.constexpr(0)
ALIBI = tl.constexpr(1)
WINDOW = tl.constexpr(2)
FULL = tl.constexpr(3)

EMPTY = tl.constexpr(-1e30)  # the maximum of an empty set: finite, so that the difference of two of them is 0, not NaN
NOTHING = tl.constexpr(1e30)  # stored as the log-denominator of a query that sees nothing
HALF = tl.constexpr(5e29)  # the threshold that distinguishes NOTHING from log-denominators
LIMIT = tl.constexpr(60.0)  # the largest allowed log-ratio between the reference of a product and its result
LOWERED = tl.constexpr(20.0)  # a denominator of at least exp(-LOWERED) has a known lower bound without its logarithm
SMALLEST = tl.constexpr(2.06e-9)  # exp(-LOWERED)


# -------------------------------------------------------------------------------------------------- index computations


@triton.jit
def _program(N, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr):
    """The row, chunk, head, block of features and features of this program, and which of the features exist."""
    pid = tl.program_id(0)
    f = pid % (HEADS * BLOCKS)
    n = (pid // (HEADS * BLOCKS)) % N
    b = (pid // (HEADS * BLOCKS) // N).to(tl.int64)
    head = f // BLOCKS
    own = (f % BLOCKS) * BD + tl.arange(0, BD)
    return b, n, head, f, head * HEAD + own, own < HEAD


@triton.jit
def _key_features(features, head, KEY_PER_HEAD: tl.constexpr):
    """The index of the key of each feature."""
    if KEY_PER_HEAD:
        return features * 0 + head
    return features


@triton.jit
def _tile(ptr, rows, stride, features, inside, other: tl.constexpr):
    """Load a tile (positions, features) as float32."""
    place = rows[:, None].to(tl.int64) * stride + features[None, :]
    return tl.load(ptr + place, inside, other).to(tl.float32)


@triton.jit
def _row(ptr, row, stride, features, inside, other: tl.constexpr):
    """Load the features of one position as float32."""
    return tl.load(ptr + row.to(tl.int64) * stride + features, inside, other).to(tl.float32)


@triton.jit
def _queries(first_ptr, b, t, T, reach, DOCUMENTS: tl.constexpr, ALONE: tl.constexpr):
    """The start of the document of each query, and the first position that it sees."""
    start = t * 0
    if DOCUMENTS:
        start = tl.load(first_ptr + b * T + t, t < T, 0)
    first = start
    if ALONE:
        first = tl.maximum(start, t - reach)
    return start, first


@triton.jit
def _table_rows(t, start, near, positions, span, w_chunk, MODE: tl.constexpr, C: tl.constexpr):
    """The offset of the row of w of each query t, and the position of the key in its column 0."""
    p = tl.minimum(t - start, positions - 1)
    rows = (p // C).to(tl.int64) * w_chunk + (p % C) * span
    if MODE == FULL:
        return rows, start
    return rows, t - p % C - near * C


@triton.jit
def _bias(w_ptr, rows, origin, slope, t, u, visible, span, MODE: tl.constexpr):
    """Load w between queries t and keys u, which are broadcast against each other."""
    if MODE == ALIBI:
        return (u - t).to(tl.float32) * slope
    elif MODE == SIMPLE:
        return tl.where(visible, 0.0, 0.0)
    else:
        column = u - origin
        return tl.load(w_ptr + (rows + column), visible & (column >= 0) & (column < span), 0.0).to(tl.float32)


@triton.jit
def _kept_averages(r_ptr, of_chunk, D, exists, COMPACT: tl.constexpr):
    """The offset and the scale of the averages that the forward pass stored for a chunk; 0 and 1 unless COMPACT."""
    centre, unit = of_chunk.to(tl.float32) * 0.0, of_chunk.to(tl.float32) * 0.0 + 1.0
    if COMPACT:
        centre = tl.load(r_ptr + of_chunk + D, exists, 0.0)
        unit = tl.load(r_ptr + of_chunk + 2 * D, exists, 1.0)
    return centre, unit


@triton.jit
def _is_finite(x):
    """Whether all entries are finite."""
    return tl.max((x * 0.0 != 0.0).to(tl.int32)) == 0


# ---------------------------------------------------------------------------------------------------- sums of one tile


@triton.jit
def _add_tile(
    top, num, den, k_ptr, v_ptr, w_ptr, rows, origin, slope, t, first, begin, key_features, features, exists,
    T, kt, vt, span,
    MODE: tl.constexpr, C: tl.constexpr, DIAGONAL: tl.constexpr, PARTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add C keys, starting at `begin`, to the sums of the queries, (C, BD). Query t sees the keys from `first` to `t`.

    PARTIAL: whether a query may see only a part of a tile before its own.
    """
    u = begin + tl.arange(0, C)
    inside = (u < T)[:, None] & exists[None, :]
    k = _tile(k_ptr, u, kt, key_features, inside, -float("inf"))
    v = _tile(v_ptr, u, vt, features, inside, 0.0)
    visible = (u[None, :] <= t[:, None]) & (u[None, :] >= first[:, None]) & (t < T)[:, None]
    w = _bias(w_ptr, rows[:, None], origin[:, None], slope, t[:, None], u[None, :], visible, span, MODE)
    sees = tl.max(visible.to(tl.int32), 1) > 0
    w_top = tl.maximum(tl.max(tl.where(visible, w, -float("inf")), 1), EMPTY)
    m = tl.maximum(tl.max(k, 0), EMPTY)
    peak = w_top[:, None] + m[None, :]
    # A lower bound of the logarithm of each query's sum: on the diagonal from its own key, elsewhere from all keys of
    # the tile, or from the last one if it sees only a part of them; and from its sum so far.
    if DIAGONAL:
        known = k + tl.sum(tl.where(u[None, :] == t[:, None], w, 0.0), 1)[:, None]
    else:
        w_low = tl.min(tl.where(visible, w, float("inf")), 1)
        known = m[None, :] + w_low[:, None]
        if PARTIAL:
            last = tl.arange(0, C) == C - 1
            last_key = tl.max(tl.where(last[:, None], k, -float("inf")), 0)
            last_w = tl.sum(tl.where(last[None, :], w, 0.0), 1)
            known = tl.where((first <= begin)[:, None], known, last_key[None, :] + last_w[:, None])
    known = tl.maximum(known, tl.where(den >= SMALLEST, top - LOWERED, EMPTY))
    together = tl.max(tl.where(sees[:, None], peak - known, -float("inf"))) <= LIMIT
    if DIAGONAL or PARTIAL:  # hidden keys and values may be NaN, and 0 * NaN is NaN
        together = together & _is_finite(v) & (tl.max((~(k < float("inf"))).to(tl.int32)) == 0)
    if together:
        table = tl.where(visible, tl.exp(w - w_top[:, None]), 0.0)
        p = tl.exp(k - m[None, :])
        new = tl.maximum(top, peak)
        # `peak` is rounded if keys are large, but the products are relative to the exact sum w_top + m
        old, here = tl.exp(top - new), tl.exp(peak - new + (w_top[:, None] - (peak - m[None, :])))
        num = num * old + tl.dot(table, p * v, input_precision=PRECISION) * here
        den = den * old + tl.dot(table, p, input_precision=PRECISION) * here
        top = new
    else:
        for s in range(C):
            key = begin + s
            seen = (key <= t) & (key >= first) & (t < T)
            ws = _bias(w_ptr, rows, origin, slope, t, key, seen, span, MODE)
            ks = _row(k_ptr, key, kt, key_features, exists & (key < T), -float("inf"))
            vs = _row(v_ptr, key, vt, features, exists & (key < T), 0.0)
            logits = tl.where(seen[:, None], ks[None, :] + ws[:, None], -float("inf"))
            new = tl.maximum(top, logits)
            old, p = tl.exp(top - new), tl.exp((ks[None, :] - new) + ws[:, None])
            num = num * old + tl.where(seen[:, None], p * vs[None, :], 0.0)
            den = den * old + tl.where(seen[:, None], p, 0.0)
            top = new
    return top, num, den


@triton.jit
def _gradient(g_ptr, q_ptr, b, t, gb, gt, qb, qt, features, inside, GATED: tl.constexpr):
    """Load the gradient of the averages, (positions, features)."""
    g = _tile(g_ptr + b * gb, t, gt, features, inside, 0.0)
    if GATED:
        g *= tl.sigmoid(_tile(q_ptr + b * qb, t, qt, features, inside, 0.0))
    return g


@triton.jit
def _add_queries(
    of_num, of_den, k, centre, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, w_ptr, slope, first_ptr, b, u, tile, features,
    of_chunk, exists, T, D, near, reach, positions, span, w_chunk, gb, gt, qb, qt,
    MODE: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr, ALONE: tl.constexpr, GATED: tl.constexpr,
    COMPACT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the C queries of chunk `tile` to the gradients of keys u: sums of a g and of
    a g (c - centre), where a is the weight of the key for a query, g the gradient and c the average of the query.
    """
    t = tile * C + tl.arange(0, C)
    inside = (t < T)[:, None] & exists[None, :]
    start, first = _queries(first_ptr, b, t, T, reach, DOCUMENTS, ALONE)
    rows, origin = start.to(tl.int64), start
    if MODE >= WINDOW:
        rows, origin = _table_rows(t, start, near, positions, span, w_chunk, MODE, C)
    visible = (u[:, None] >= first[None, :]) & (t < T)[None, :] & (u < T)[:, None]  # (keys, queries)
    if CAUSAL:
        visible &= u[:, None] <= t[None, :]
    w = _bias(w_ptr, rows[None, :], origin[None, :], slope, t[None, :], u[:, None], visible, span, MODE)
    place = (b * T + t[:, None]) * D + features[None, :]
    log_den = tl.load(l_ptr + place, inside, NOTHING)
    relative = k - tl.load(r_ptr + of_chunk, exists, 0.0)[None, :]
    g = _gradient(g_ptr, q_ptr, b, t, gb, gt, qb, qt, features, inside, GATED)
    average, unit = _kept_averages(r_ptr, of_chunk, D, exists, COMPACT)
    average -= centre
    c = tl.load(c_ptr + place, inside, 0.0).to(tl.float32) * unit[None, :] + average[None, :]
    w_top = tl.maximum(tl.max(tl.where(visible, w, -float("inf")), 1), EMPTY)
    low = tl.min(log_den, 0)
    # exp(K + w - log den) <= 1 for every visible key. It is computed as a product of three exponentials. Only the
    # first can exceed 1; if it is at most exp(LIMIT), the others underflow only for negligible terms.
    exponent = relative - low[None, :] + w_top[:, None]
    p = tl.where(log_den >= HALF, 0.0, tl.exp(low[None, :] - log_den) * g)
    pc = p * c
    together = (tl.max(exponent) <= LIMIT) & (tl.max((~(relative < float("inf"))).to(tl.int32)) == 0)
    if together & _is_finite(p) & _is_finite(pc):
        table = tl.where(visible, tl.exp(w - w_top[:, None]), 0.0)
        e = tl.exp(exponent)
        of_num += e * tl.dot(table, p, input_precision=PRECISION)
        of_den += e * tl.dot(table, pc, input_precision=PRECISION)
    else:
        for s in range(C):
            query = tile * C + s
            there = exists & (query < T)
            this, since = _queries(first_ptr, b, query, T, reach, DOCUMENTS, ALONE)
            row, column = this.to(tl.int64), this
            if MODE >= WINDOW:
                row, column = _table_rows(query, this, near, positions, span, w_chunk, MODE, C)
            seen = (u >= since) & (query < T) & (u < T)
            if CAUSAL:
                seen &= u <= query
            ws = _bias(w_ptr, row, column, slope, query, u, seen, span, MODE)
            ls = _row(l_ptr + b * T * D, query, D, features, there, NOTHING)
            gs = _row(g_ptr + b * gb, query, gt, features, there, 0.0)
            if GATED:
                gs *= tl.sigmoid(_row(q_ptr + b * qb, query, qt, features, there, 0.0))
            cs = _row(c_ptr + b * T * D, query, D, features, there, 0.0) * unit + average
            a = tl.exp(relative + ws[:, None] - ls[None, :]) * gs[None, :]
            of_num += tl.where(seen[:, None], a, 0.0)
            of_den += tl.where(seen[:, None], a * cs[None, :], 0.0)
    return of_num, of_den


@triton.jit
def _add_to_table(
    total, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, b, t, begin, w, visible, features, key_features, of_chunk,
    exists, T, D, gb, gt, qb, qt, kb, kt, vb, vt,
    C: tl.constexpr, GATED: tl.constexpr, COMPACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of some features to the gradient of w between queries t and the C keys that start at
    `begin`, (C, C).
    """
    u = begin + tl.arange(0, C)
    w_top = tl.maximum(tl.max(tl.where(visible, w, -float("inf")), 0), EMPTY)  # for each key
    seen, asked = (u < T)[:, None] & exists[None, :], (t < T)[:, None] & exists[None, :]
    k = _tile(k_ptr + b * kb, u, kt, key_features, seen, -float("inf"))
    v = _tile(v_ptr + b * vb, u, vt, features, seen, 0.0)
    centre = tl.sum(v, 0) / C
    centre = tl.where(centre * 0.0 == 0.0, centre, 0.0)
    place = (b * T + t[:, None]) * D + features[None, :]
    log_den = tl.load(l_ptr + place, asked, NOTHING)
    average, unit = _kept_averages(r_ptr, of_chunk, D, exists, COMPACT)
    average -= centre
    c = tl.load(c_ptr + place, asked, 0.0).to(tl.float32) * unit[None, :] + average[None, :]
    g = _gradient(g_ptr, q_ptr, b, t, gb, gt, qb, qt, features, asked, GATED)
    largest = tl.load(r_ptr + of_chunk, exists, 0.0)
    relative = k - largest[None, :]
    low = tl.min(log_den, 0)
    exponent = relative - low[None, :] + w_top[:, None]
    p = tl.where(log_den >= HALF, 0.0, tl.exp(low[None, :] - log_den) * g)
    pc = p * c
    vc = v - centre[None, :]
    together = (tl.max(exponent) <= LIMIT) & (tl.max((~(relative < float("inf"))).to(tl.int32)) == 0)
    if together & _is_finite(p) & _is_finite(pc) & _is_finite(vc):
        e = tl.exp(exponent)
        products = tl.dot(p, tl.trans(e * vc), input_precision=PRECISION)
        products -= tl.dot(pc, tl.trans(e), input_precision=PRECISION)
        total += tl.where(visible, tl.exp(w - w_top[None, :]), 0.0) * products
    else:
        for s in range(C):
            key = begin + s
            this, there = u == key, exists & (key < T)
            ks = _row(k_ptr + b * kb, key, kt, key_features, there, -float("inf"))
            vs = _row(v_ptr + b * vb, key, vt, features, there, 0.0)
            ws = tl.sum(tl.where(this[None, :], w, 0.0), 1)
            # g / den is 0 for a query that sees nothing; hidden keys are excluded below
            a = tl.exp((ks - largest)[None, :] + ws[:, None] - log_den) * g
            of_key = tl.sum(tl.where(asked, a * ((vs - centre)[None, :] - c), 0.0), 1)
            total += tl.where(this[None, :] & visible, of_key[:, None], 0.0)
    return total
