"""Triton kernels for causal Eq. 2: the chunks of a sequence in parallel, with running sums between them.

A program computes one chunk of C positions for one block of features of one row. It reads the keys of its own chunk
and of the near chunks, those before it that have position biases. All earlier keys enter as one sum, with w = 0 or
with a w that decreases linearly with the distance. These sums are scanned over the chunks of a row beforehand. Only
the table gradients of packed documents are accumulated by atomics. Tiles are computed as in `tiles.py`.

`launch.py` launches these kernels.
"""

from .tiles import (
    ALIBI,
    EMPTY,
    FULL,
    HALF,
    NOTHING,
    WINDOW,
    _add_queries,
    _add_tile,
    _add_to_table,
    _bias,
    _kept_averages,
    _key_features,
    _program,
    _queries,
    _table_rows,
    _tile,
    tl,
    triton,
)


# -------------------------------------------------------------------------------------- sums of chunks, and their scan


@triton.jit
def _store_sums(m_ptr, n_ptr, d_ptr, place, mask, m, n, d):
    tl.store(m_ptr + place, m, mask)
    tl.store(n_ptr + place, n, mask)
    tl.store(d_ptr + place, d, mask)


@triton.jit
def totals_kernel(
    k_ptr, v_ptr, slope_ptr, first_ptr, initial_m_ptr, initial_n_ptr, initial_d_ptr, m_ptr, n_ptr, d_ptr,
    T, N, D, kb, kt, vb, vt,
    MODE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, DOCUMENTS: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Compute the sums of each chunk as seen from its last position. Entry 0 holds the sums before the sequence."""
    b, n, head, _, features, exists = _program(N, HEADS, BLOCKS, HEAD, BD)
    u = n * C + tl.arange(0, C)
    inside = (u < T)[:, None] & exists[None, :]
    if DOCUMENTS:
        inside &= (u >= tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1))[:, None]
    k = _tile(k_ptr + b * kb, u, kt, _key_features(features, head, KEY_PER_HEAD), inside, -float("inf"))
    v = _tile(v_ptr + b * vb, u, vt, features, inside, 0.0)
    if MODE == ALIBI:
        fade = tl.load(slope_ptr + head) * (C - 1 - tl.arange(0, C))[:, None].to(tl.float32)
        m = tl.maximum(tl.max(k - fade, 0), EMPTY)
        p = tl.exp((k - m[None, :]) - fade)
    else:
        m = tl.maximum(tl.max(k, 0), EMPTY)
        p = tl.exp(k - m[None, :])
    place = (b * (N + 1) + n + 1) * D + features
    _store_sums(m_ptr, n_ptr, d_ptr, place, exists, m, tl.sum(p * v, 0), tl.sum(p, 0))
    if n == 0:
        if INITIAL:
            m = tl.load(initial_m_ptr + b * D + features, exists)
            num = tl.load(initial_n_ptr + b * D + features, exists)
            den = tl.load(initial_d_ptr + b * D + features, exists)
            _store_sums(m_ptr, n_ptr, d_ptr, b * (N + 1) * D + features, exists, m, num, den)
        else:
            nothing = tl.zeros((BD,), tl.float32)
            _store_sums(m_ptr, n_ptr, d_ptr, b * (N + 1) * D + features, exists, nothing + EMPTY, nothing, nothing)


@triton.jit
def _join(m1, n1, d1, age1, m2, n2, d2, age2):
    """Combine two elements of a scan: the first sums, decayed by `age2`, plus the second sums. The age of an element
    is its decay; an infinite `age2` drops the first sums.
    """
    kept = age2 < float("inf")
    m = tl.maximum(tl.where(kept, m1 - age2, EMPTY), m2)
    a, b = tl.exp((m1 - m) - age2), tl.exp(m2 - m)  # m1 - age2 may be rounded; m1 - m is exact where it matters
    n = tl.where(kept, n1 * a, 0.0) + n2 * b
    d = tl.where(kept, d1 * a, 0.0) + d2 * b
    return m, n, d, age1 + age2


@triton.jit
def scan_kernel(
    m_ptr, n_ptr, d_ptr, age_ptr, carry_m_ptr, carry_n_ptr, carry_d_ptr, to_m_ptr, to_n_ptr, to_d_ptr, to_age_ptr,
    slope_ptr, first_ptr, E, T, D, blocks,
    MODE: tl.constexpr, HEAD: tl.constexpr, C: tl.constexpr, NB: tl.constexpr, BD: tl.constexpr,
    DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, OF_CHUNKS: tl.constexpr, CARRY: tl.constexpr,
    REDUCE: tl.constexpr,
):  # fmt: skip
    """Compute the inclusive scan of the E sums of a row, in blocks of NB elements.

    With CARRY, the sums of all earlier blocks are added to a block. With REDUCE, only the total of each block is
    stored, as an element of the scan one level up. The elements of the lowest level are the chunks, and one element
    for the sums before (in reverse: after) all chunks.
    """
    pid = tl.program_id(0)
    features = (pid % tl.cdiv(D, BD)) * BD + tl.arange(0, BD)
    block = (pid // tl.cdiv(D, BD)) % blocks
    b = (pid // tl.cdiv(D, BD) // blocks).to(tl.int64)
    order = block * NB + tl.arange(0, NB)
    e = order
    if REVERSE:
        e = E - 1 - order
    exists = features < D
    inside = (order < E)[:, None] & exists[None, :]
    place = (b * E + e[:, None]) * D + features[None, :]
    m = tl.load(m_ptr + place, inside, EMPTY)
    n = tl.load(n_ptr + place, inside, 0.0)
    d = tl.load(d_ptr + place, inside, 0.0)
    if OF_CHUNKS:
        age = tl.zeros((NB, BD), tl.float32)
        if MODE == ALIBI:
            age += (tl.load(slope_ptr + features // HEAD, exists, 0.0) * C)[None, :]
        if DOCUMENTS:
            chunk = e
            if not REVERSE:
                chunk = e - 1
            is_chunk = (order < E) & (chunk >= 0) & (chunk * C < T)
            first = tl.load(first_ptr + b * T + tl.minimum(chunk * C + C, T) - 1, is_chunk, -1)
            age += tl.where(is_chunk & (first >= chunk * C), float("inf"), 0.0)[:, None]
    else:
        age = tl.load(age_ptr + place, inside, 0.0)
    m, n, d, age = tl.associative_scan((m, n, d, age), 0, _join)
    if REDUCE:
        last = (tl.arange(0, NB) == NB - 1)[:, None]
        place = (b * blocks + block) * D + features
        tl.store(to_m_ptr + place, tl.max(tl.where(last, m, -float("inf")), 0), exists)
        tl.store(to_n_ptr + place, tl.sum(tl.where(last, n, 0.0), 0), exists)
        tl.store(to_d_ptr + place, tl.sum(tl.where(last, d, 0.0), 0), exists)
        tl.store(to_age_ptr + place, tl.sum(tl.where(last, age, 0.0), 0), exists)
    else:
        if CARRY:
            before = (b * blocks + block - 1) * D + features
            known = exists & (block > 0)
            cm = tl.load(carry_m_ptr + before, known, EMPTY)
            cn = tl.load(carry_n_ptr + before, known, 0.0)
            cd = tl.load(carry_d_ptr + before, known, 0.0)
            m, n, d, age = _join(cm[None, :], cn[None, :], cd[None, :], 0.0, m, n, d, age)
        _store_sums(to_m_ptr, to_n_ptr, to_d_ptr, place, inside, m, n, d)


# ------------------------------------------------------------------------------------------------------------- forward


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, slope_ptr, first_ptr, m_ptr, n_ptr, d_ptr, y_ptr, c_ptr, l_ptr, r_ptr,
    T, N, D, near, reach, positions, span, qb, qt, kb, kt, vb, vt, w_head, w_chunk,
    MODE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, DOCUMENTS: tl.constexpr, ALONE: tl.constexpr, GATED: tl.constexpr,
    KEEP: tl.constexpr, COMPACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the averages of a chunk of queries, times sigmoid(query) if GATED.

    With KEEP, also store what the backward pass needs: the averages, and the log-denominators relative to the largest
    maximum of the chunk. That maximum is stored separately, since one float32 cannot hold the sum of both exactly.
    Averages are stored in float32 or, with COMPACT, in float16, scaled to -1 .. 1 between the smallest and the
    largest average of the chunk. This is as exact as products in tf32, even if the averages have a large offset.
    """
    b, n, head, _, features, exists = _program(N, HEADS, BLOCKS, HEAD, BD)
    key_features = _key_features(features, head, KEY_PER_HEAD)
    k_ptr += b * kb
    v_ptr += b * vb
    slope = 0.0
    if MODE == ALIBI:
        slope = tl.load(slope_ptr + head)
    i = tl.arange(0, C)
    t = n * C + i
    start, first = _queries(first_ptr, b, t, T, reach, DOCUMENTS, ALONE)
    rows, origin = start.to(tl.int64), start
    if MODE >= WINDOW:
        rows, origin = _table_rows(t, start, near, positions, span, w_chunk, MODE, C)
        w_ptr += head.to(tl.int64) * w_head

    top = tl.zeros((C, BD), tl.float32) + EMPTY
    num = tl.zeros((C, BD), tl.float32)
    den = tl.zeros((C, BD), tl.float32)
    if MODE != FULL and not ALONE:
        place = (b * (N + 1) + tl.maximum(n - near, 0)) * D + features
        far = tl.load(m_ptr + place, exists, EMPTY)[None, :]
        seen = ((start < (n - near) * C) | (n <= near))[:, None] & exists[None, :]
        num = tl.where(seen, tl.load(n_ptr + place, exists, 0.0)[None, :], 0.0)
        den = tl.where(seen, tl.load(d_ptr + place, exists, 0.0)[None, :], 0.0)
        top = tl.where(seen, far, EMPTY)
        if MODE == ALIBI:
            fade = slope * (i + 1).to(tl.float32)[:, None]
            top = tl.where(seen, far - fade, EMPTY)
            rounded = tl.exp((far - top) - fade)  # corrects the rounding of the new maximum
            num = tl.where(seen, num * rounded, 0.0)
            den = tl.where(seen, den * rounded, 0.0)
    if MODE >= WINDOW:
        lowest = tl.maximum(n - near, 0)
        if DOCUMENTS or ALONE:
            lowest = tl.maximum(lowest, tl.min(tl.where(t < T, first, T)) // C)
        for step in range(0, n - lowest):
            begin = (lowest + step) * C
            top, num, den = _add_tile(
                top, num, den, k_ptr, v_ptr, w_ptr, rows, origin, slope, t, first, begin, key_features, features,
                exists, T, kt, vt, span, MODE, C, False, DOCUMENTS or ALONE, PRECISION)  # fmt: skip
    top, num, den = _add_tile(
        top, num, den, k_ptr, v_ptr, w_ptr, rows, origin, slope, t, first, n * C, key_features, features,
        exists, T, kt, vt, span, MODE, C, True, DOCUMENTS or ALONE, PRECISION)  # fmt: skip

    empty = den == 0.0
    context = tl.where(empty, 0.0, num / tl.where(empty, 1.0, den))
    inside = (t < T)[:, None] & exists[None, :]
    y = context
    if GATED:
        y = context * tl.sigmoid(_tile(q_ptr + b * qb, t, qt, features, inside, 0.0))
    place = (b * T + t[:, None]) * D + features[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), inside)
    if KEEP:
        largest = tl.maximum(tl.max(tl.where(empty, -float("inf"), top), 0), EMPTY)
        log_den = top - largest[None, :] + tl.log(tl.where(empty, 1.0, den))
        r_ptr += (b * N + n) * 3 * D
        centre, unit = largest * 0.0, largest * 0.0 + 1.0
        if COMPACT:
            known = inside & (context * 0.0 == 0.0)
            low = tl.min(tl.where(known, context, float("inf")), 0)
            high = tl.max(tl.where(known, context, -float("inf")), 0)
            centre, unit = low * 0.5 + high * 0.5, high * 0.5 - low * 0.5
            centre, unit = tl.where(low <= high, centre, 0.0), tl.where(unit > 0.0, unit, 1.0)
            context = (context - centre[None, :]) / unit[None, :]
        tl.store(c_ptr + place, context.to(c_ptr.dtype.element_ty), inside)
        tl.store(l_ptr + place, tl.where(empty, NOTHING, log_den), inside)
        tl.store(r_ptr + features, largest, exists)
        tl.store(r_ptr + D + features, centre, exists)
        tl.store(r_ptr + 2 * D + features, unit, exists)


# ------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def _query_gradients(
    g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, slope_ptr, first_ptr, dq_ptr, m_ptr, s_ptr, z_ptr, b, n, head, features, exists,
    T, N, D, gb, gt, qb, qt,
    MODE: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, COMPACT: tl.constexpr,
    TOTALS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the queries of a chunk. With TOTALS, also compute the sums over the chunk of
    g / denominator and of g / denominator times the average.

    The gradients of all keys before the chunk need these sums. They are relative to the largest 1 / denominator, and
    as seen from the first position of the chunk.
    """
    i = tl.arange(0, C)
    t = n * C + i
    inside = (t < T)[:, None] & exists[None, :]
    g = _tile(g_ptr + b * gb, t, gt, features, inside, 0.0)
    place = (b * T + t[:, None]) * D + features[None, :]
    of_chunk = (b * N + n) * 3 * D + features
    centre, unit = _kept_averages(r_ptr, of_chunk, D, exists, COMPACT)
    c = tl.load(c_ptr + place, inside, 0.0).to(tl.float32) * unit[None, :] + centre[None, :]
    if GATED:
        gate = tl.sigmoid(_tile(q_ptr + b * qb, t, qt, features, inside, 0.0))
        tl.store(dq_ptr + place, (g * c * gate * (1.0 - gate)).to(dq_ptr.dtype.element_ty), inside)
        g *= gate
    if TOTALS:
        log_den = tl.load(l_ptr + place, inside, NOTHING)
        if MODE == ALIBI:
            log_den += tl.load(slope_ptr + head) * i.to(tl.float32)[:, None]
        if DOCUMENTS:
            first = tl.load(first_ptr + b * T + t, t < T, T)
            log_den = tl.where((first < n * C)[:, None], log_den, NOTHING)
        largest = tl.load(r_ptr + of_chunk, exists, EMPTY)
        low = tl.minimum(tl.min(log_den, 0), NOTHING)
        top = tl.where(low < HALF, -(largest + low), EMPTY)
        # Relative to the rounded `top`, so that a large maximum costs no precision
        p = tl.where(log_den >= HALF, 0.0, tl.exp((-largest - top)[None, :] - log_den) * g)
        pc = tl.where(log_den >= HALF, 0.0, p * c)
        place = (b * (N + 1) + n) * D + features
        _store_sums(m_ptr, s_ptr, z_ptr, place, exists, top, tl.sum(p, 0), tl.sum(pc, 0))
        if n == N - 1:  # nothing comes after the sequence
            nothing = features.to(tl.float32) * 0.0
            _store_sums(m_ptr, s_ptr, z_ptr, place + D, exists, nothing + EMPTY, nothing, nothing)


@triton.jit
def query_gradient_kernel(
    g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, slope_ptr, first_ptr, dq_ptr, m_ptr, s_ptr, z_ptr,
    T, N, D, gb, gt, qb, qt,
    MODE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, COMPACT: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    """Run `_query_gradients` for every chunk and block of features."""
    b, n, head, _, features, exists = _program(N, HEADS, BLOCKS, HEAD, BD)
    _query_gradients(
        g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, slope_ptr, first_ptr, dq_ptr, m_ptr, s_ptr, z_ptr, b, n, head, features,
        exists, T, N, D, gb, gt, qb, qt, MODE, C, DOCUMENTS, GATED, COMPACT, TOTALS)  # fmt: skip


@triton.jit
def key_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, slope_ptr, first_ptr, m_ptr, s_ptr, z_ptr, dk_ptr, dv_ptr,
    T, N, D, near, reach, positions, span, gb, gt, qb, qt, kb, kt, vb, vt, w_head, w_chunk,
    MODE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, DOCUMENTS: tl.constexpr, ALONE: tl.constexpr, GATED: tl.constexpr,
    COMPACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk of keys and values: from the queries of its own chunk and of the near chunks
    after it, and from the sums over all later chunks. With one key per head, the gradient of a key has one entry for
    each block of features, which the caller sums.
    """
    b, n, head, f, features, exists = _program(N, HEADS, BLOCKS, HEAD, BD)
    slope = 0.0
    if MODE == ALIBI:
        slope = tl.load(slope_ptr + head)
    if MODE >= WINDOW:
        w_ptr += head.to(tl.int64) * w_head
    j = tl.arange(0, C)
    u = n * C + j
    inside = (u < T)[:, None] & exists[None, :]
    key_features = _key_features(features, head, KEY_PER_HEAD)
    k = _tile(k_ptr + b * kb, u, kt, key_features, inside, -float("inf"))
    v = _tile(v_ptr + b * vb, u, vt, features, inside, 0.0)
    # The mean of the values cancels in the gradient of the keys; subtracting it first reduces rounding errors
    centre = tl.sum(v, 0) / tl.minimum(T - n * C, C)
    centre = tl.where(centre * 0.0 == 0.0, centre, 0.0)
    of_num = tl.zeros((C, BD), tl.float32)
    of_den = tl.zeros((C, BD), tl.float32)
    if MODE != FULL and not ALONE:
        later = n + near + 1
        place = (b * (N + 1) + tl.minimum(later, N)) * D + features
        seen = inside
        if DOCUMENTS:
            boundary = tl.load(first_ptr + b * T + later * C, later * C < T, T)
            seen &= (u >= boundary)[:, None]
        far = k + tl.load(m_ptr + place, exists, EMPTY)[None, :]
        if MODE == ALIBI:
            far -= slope * (C - j).to(tl.float32)[:, None]
        far = tl.where(seen, tl.exp(far), 0.0)
        s = tl.load(s_ptr + place, exists, 0.0)
        of_num += tl.where(seen, far * s[None, :], 0.0)
        of_den += tl.where(seen, far * (tl.load(z_ptr + place, exists, 0.0) - s * centre)[None, :], 0.0)
    last = n
    if MODE >= WINDOW:
        last = tl.minimum(n + near, N - 1)
    for step in range(0, last - n + 1):
        of_num, of_den = _add_queries(
            of_num, of_den, k, centre, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, w_ptr, slope, first_ptr, b, u, n + step,
            features, (b * N + n + step) * 3 * D + features, exists, T, D, near, reach, positions, span, w_chunk,
            gb, gt, qb, qt, MODE, C, DOCUMENTS, ALONE, GATED, COMPACT, True, PRECISION)  # fmt: skip
    place = (b * T + u[:, None]) * D + features[None, :]
    tl.store(dv_ptr + place, of_num.to(dv_ptr.dtype.element_ty), inside)
    dk = (v - centre[None, :]) * of_num - of_den
    if KEY_PER_HEAD:
        place = (b * T + u) * (HEADS * BLOCKS) + f
        tl.store(dk_ptr + place, tl.sum(tl.where(exists[None, :], dk, 0.0), 1), u < T)
    else:
        tl.store(dk_ptr + place, dk.to(dk_ptr.dtype.element_ty), inside)


@triton.jit
def table_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, first_ptr, dw_ptr, dq_ptr, m_ptr, s_ptr, z_ptr,
    B, T, N, D, near, reach, positions, span, gb, gt, qb, qt, kb, kt, vb, vt, w_head, w_chunk,
    dw_part, dw_head, dw_chunk, rows_each,
    MODE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, DOCUMENTS: tl.constexpr, ALONE: tl.constexpr, GATED: tl.constexpr,
    COMPACT: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of w for one tile of queries and keys, summed over the features of a head and some rows.

    With QUERIES, the programs of diagonal tiles also run `_query_gradients`, which reads the same tensors.

    Packed documents share the position biases of their positions, so their tiles are added to the table by atomics.
    """
    pid = tl.program_id(0)
    back = pid % (near + 1)
    n = (pid // (near + 1)) % N
    head = (pid // (near + 1) // N) % HEADS
    part = (pid // (near + 1) // N // HEADS).to(tl.int64)
    i = tl.arange(0, C)
    t = n * C + i
    u = (n - back) * C + i
    w_ptr += head.to(tl.int64) * w_head
    total = tl.zeros((C, C), tl.float32)
    if n >= back:
        for row in range(rows_each):
            b = part * rows_each + row
            length = tl.where(b < B, T, 0)  # 0 for a row that does not exist
            start, first = _queries(first_ptr, b, t, length, reach, DOCUMENTS, ALONE)
            rows, origin = _table_rows(t, start, near, positions, span, w_chunk, MODE, C)
            visible = (u[None, :] <= t[:, None]) & (u[None, :] >= first[:, None]) & (t < length)[:, None]
            w = _bias(w_ptr, rows[:, None], origin[:, None], 0.0, t[:, None], u[None, :], visible, span, MODE)
            for block in range(BLOCKS):
                own = block * BD + tl.arange(0, BD)
                exists, features = own < HEAD, head * HEAD + own
                if QUERIES:  # noqa: SIM102
                    if (back == 0) & (b < B):
                        _query_gradients(
                            g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, first_ptr, dq_ptr, m_ptr, s_ptr, z_ptr, b, n,
                            head, features, exists, T, N, D, gb, gt, qb, qt,
                            MODE, C, DOCUMENTS, GATED, COMPACT, TOTALS)  # fmt: skip
                of_chunk = (b * N + n) * 3 * D + features
                total = _add_to_table(
                    total, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, b, t, (n - back) * C, w, visible, features,
                    _key_features(features, head, KEY_PER_HEAD), of_chunk, exists & (b < B), T, D,
                    gb, gt, qb, qt, kb, kt, vb, vt, C, GATED, COMPACT, PRECISION)  # fmt: skip
            if DOCUMENTS:
                column = u[None, :] - origin[:, None]
                mask = visible & (column >= 0) & (column < span)
                to = dw_ptr + head.to(tl.int64) * dw_head + rows[:, None] + column
                tl.atomic_add(to, total, mask)
                total = tl.zeros((C, C), tl.float32)
    if not DOCUMENTS:
        to = dw_ptr + part * dw_part + head.to(tl.int64) * dw_head + n.to(tl.int64) * dw_chunk
        if MODE == FULL:
            tl.store(to + i[:, None] * span + u[None, :], total, ((u >= 0) & (u < T))[None, :] & (t < T)[:, None])
        else:  # also for a chunk that has no tile this far back, whose gradient is 0
            tl.store(to + i[:, None] * span + (u - (n - near) * C)[None, :], total)
