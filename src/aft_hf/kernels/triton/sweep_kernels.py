"""Triton kernels for causal Eq. 2 with a window of position biases: sweeps over the chunks of a sequence.

A program computes all chunks of C tokens of a segment for one block of features, with the sums over the tokens before
the window in registers. The window enters as tiles A = exp(w - a_t) of C queries and C keys, of which NEAR chunks
before the queries' own one have biases; a_t is the largest w of query t. Tiles are made once per call.

Products are relative to the largest key m so far. This is exact unless a chunk has a key far above all before it.
Such chunks are flagged per feature, and `repair_kernel` and `repair_backward_kernel` compute them key by key. CHECK:
some queries do not see the first tokens (no global connectivity, or documents with other windows than of CARRY), so m
is the largest key of the window, and denominators tell which chunks to repair.

CARRY (NEAR = 1): the factors of a chunk are kept for the next one. With documents, m and the sums begin anew where a
document begins; in such chunks, numerators and denominators tell what to repair.

Kept for the backward pass are, as by `walk_kernels.py`, averages and base-2 logarithms of denominators, here without
a_t. `causal_launch.py` launches these kernels.
"""

from .device import EMPTY, LOG2E, _divide, _largest, _log2, _once, kernel, tl, triton
from .walk_kernels import _join, _load_sums, _store_sums


SAFE = tl.constexpr(60.0)  # the largest log-ratio between the reference of a product and its result
TINY = tl.constexpr(8.8e-27)  # exp(-SAFE)
GROUP = tl.constexpr(8)  # chunks of a program of the repair kernels, at most


@triton.jit
def _program(S, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr,
             KEY_PER_HEAD: tl.constexpr, AT_ONCE: tl.constexpr = 16):  # fmt: skip
    """The row, segment and head of a program, its features, which of them exist, and their keys. A thread loads
    AT_ONCE features at most.
    """
    pid = tl.program_id(0)
    f, s, b = pid % (HEADS * BLOCKS), pid // (HEADS * BLOCKS) % S, (pid // (HEADS * BLOCKS) // S).to(tl.int64)
    own, head = tl.max_contiguous(f % BLOCKS * BD + tl.arange(0, BD), AT_ONCE), f // BLOCKS
    features = head * HEAD + own
    keys = features
    if KEY_PER_HEAD:
        keys = features * 0 + head
    return b, s, head, features, own < HEAD, keys


@triton.jit
def _dot(a, x, PRECISION: tl.constexpr):
    return tl.dot(a, x, input_precision=PRECISION)


@triton.jit
def _starts(first_ptr, b, t, T, DOCUMENTS: tl.constexpr):
    """The first token that each token sees; T or more for hidden ones."""
    if DOCUMENTS:
        return tl.load(first_ptr + b * T + t, (t >= 0) & (t < T), T).to(tl.int32)
    return tl.where((t >= 0) & (t < T), 0, T)


@triton.jit
def _tile(ptr, t, step, features, inside, other: tl.constexpr):
    return tl.load(ptr + (t[:, None] * step + features[None, :]), inside, other).to(tl.float32)


@triton.jit
def _keys(k_ptr, v_ptr, t, T, kt, vt, keys, features, exists, start, center, DOCUMENTS: tl.constexpr):
    """Load keys, (C, 1) if `keys` is one that all features share, and values relative to a center: -inf and 0 for
    hidden tokens, whose values may be NaN.
    """
    inside, some = ((t >= 0) & (t < T))[:, None], exists if keys.shape[0] > 1 else keys >= 0
    k = _tile(k_ptr, t, kt, keys, inside & some[None, :], -float("inf"))
    v = _tile(v_ptr, t, vt, features, inside & exists[None, :], 0.0)
    if DOCUMENTS:
        k = tl.where((start > t)[:, None], -float("inf"), k)
    return k, tl.where(k > -float("inf"), v - center[None, :], 0.0)


@triton.jit
def _center(k_ptr, v_ptr, t, seen, kt, vt, keys, features, exists):
    """The number nearest to 0 between the smallest and the largest value of the tokens that are seen, of those that
    are finite and not hidden by a key of -inf. An outlier as a center would cost all other values digits.
    """
    inside = seen[:, None] & exists[None, :]
    k, v = _tile(k_ptr, t, kt, keys, inside, -float("inf")), _tile(v_ptr, t, vt, features, inside, 0.0)
    counts = (tl.abs(v) < float("inf")) & (k > -float("inf"))
    low, high = tl.min(tl.where(counts, v, float("inf")), 0), tl.max(tl.where(counts, v, -float("inf")), 0)
    return tl.where(low <= high, tl.minimum(tl.maximum(low, 0.0), high), 0.0)


@triton.jit
def _carried(k_ptr, v_ptr, t, T, kt, vt, keys, features, exists, start, center, M, DOCUMENTS: tl.constexpr):
    """The largest key so far, M or one of a chunk, and the sums and factors of the chunk relative to it."""
    k, v = _keys(k_ptr, v_ptr, t, T, kt, vt, keys, features, exists, start, center, DOCUMENTS)
    M = tl.maximum(M, tl.max(k, 0))
    p = tl.exp2((k - M[None, :]) * LOG2E)
    pv = p * v
    return M, tl.sum(p, 0), tl.sum(pv, 0), _once(p), _once(pv)


@triton.jit
def _biases(w_ptr, t, u, start, positions, past, size, w_position, w_base, GLOBAL: tl.constexpr):
    """Load w between queries t and keys u, which are broadcast against each other: -inf where u is hidden from t."""
    lag, place = t - u, tl.maximum(tl.minimum(t - start - past, positions - 1), 0).to(tl.int64) * w_position
    visible, inside = (lag >= 0) & (u >= start), (lag >= 0) & (lag < size) & (u >= start)
    w = tl.load(w_ptr + (place + (w_base - lag)), inside, 0.0).to(tl.float32)
    if not GLOBAL:
        return tl.where(inside, w, -float("inf"))
    return tl.where(visible, w, -float("inf"))


@triton.jit
def _lost(num, den, hidden):
    """Return for each feature whether a denominator lost terms or a numerator is not finite, hidden queries aside."""
    right = (den >= TINY) & (tl.abs(num) < float("inf")) | hidden
    return tl.min(right.to(tl.int32), 0) == 0


@kernel
def tiles_kernel(
    w_ptr, first_ptr, a_ptr, b_ptr, top_ptr, far_ptr, spread_ptr,
    T, N, NT, positions, past, size, w_row, w_position, w_head, w_base,
    HEADS: tl.constexpr, NEAR: tl.constexpr, GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, BACKWARD: tl.constexpr,
    INITIAL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Make A, (rows, h, NT, C, (NEAR + 1) C), and with BACKWARD its transposes by chunks of keys; the largest w of
    each query; the weight of the tokens before the near chunks, 0 if it does not see any; and the spread of w.
    """
    pid = tl.program_id(0)
    n, head, b = pid % NT, pid // NT % HEADS, (pid // NT // HEADS).to(tl.int64)
    i = tl.arange(0, C)
    t = n * C + i
    start = _starts(first_ptr, b, t, T, DOCUMENTS)
    w_ptr += b * w_row + head * w_head
    outside = (start < (n - NEAR) * C) & (t >= start)
    if INITIAL:  # tokens of a state precede all of these
        outside = t >= start
    if not GLOBAL:
        outside = outside & (t < 0)
    top, low = tl.where(outside, 0.0, EMPTY), tl.where(outside, 0.0, -EMPTY)
    for j in range(NEAR + 1):
        u = (n - NEAR + j) * C + i
        w = _biases(w_ptr, t[:, None], u[None, :], start[:, None], positions, past, size, w_position, w_base, GLOBAL)
        top = tl.maximum(top, tl.max(w, 1))
        low = tl.minimum(low, tl.min(tl.where(w > -float("inf"), w, -EMPTY), 1))
    tl.store(top_ptr + pid.to(tl.int64) * C + i, top)
    tl.store(far_ptr + pid.to(tl.int64) * C + i, tl.where(outside, tl.exp2(-top * LOG2E), -1.0))
    tl.store(spread_ptr + pid, tl.maximum(tl.max(top - low), 0.0))
    for j in range(NEAR + 1):
        u = (n - NEAR + j) * C + i
        w = _biases(w_ptr, t[:, None], u[None, :], start[:, None], positions, past, size, w_position, w_base, GLOBAL)
        a = tl.exp2((w - top[:, None]) * LOG2E).to(a_ptr.dtype.element_ty)
        tl.store(a_ptr + (pid.to(tl.int64) * C + i[:, None]) * ((NEAR + 1) * C) + j * C + i[None, :], a)
        if BACKWARD:
            of_keys = (b * HEADS + head) * NT + n - NEAR + j
            to = b_ptr + (of_keys * C + i[None, :]) * ((NEAR + 1) * C) + (NEAR - j) * C + i[:, None]
            tl.store(to, a, n - NEAR + j >= 0)


@kernel
def sweep_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, far_ptr, spread_ptr, first_ptr, sums_ptr, y_ptr, c_ptr, l_ptr, r_ptr, flag_ptr,
    state_ptr, m_ptr, n_ptr, d_ptr, T, N, NT, D, S, each, rows, key_width, qb, qt, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, NEAR: tl.constexpr,
    GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, SEGMENTS: tl.constexpr,
    INITIAL: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a segment of `each` chunks. INITIAL: the sums before the first token are given."""
    CARRY: tl.constexpr = NEAR == 1 and GLOBAL
    CHECK: tl.constexpr = not GLOBAL or (DOCUMENTS and not CARRY)
    # A thread that loads fewer features has more rows of them, whose sums take fewer shuffles
    b, s, head, features, exists, keys = _program(S, HEADS, BLOCKS, HEAD, BD, KEY_PER_HEAD, 4)
    k_ptr, v_ptr, y_ptr = k_ptr + b * kb, v_ptr + b * vb, y_ptr + b * T * D
    if GATED:
        q_ptr += b * qb
    if KEEP:
        c_ptr, l_ptr = c_ptr + b * T * D, l_ptr + b * T * D
    tiles = (b * rows * HEADS + head) * NT
    i = tl.arange(0, C)
    M, N0, D0 = tl.zeros((BD,), tl.float32) + EMPTY, tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    first_chunk, end = s * each, tl.minimum(s * each + each, N)
    known = tl.load(k_ptr + (first_chunk * C * kt + keys), exists, -float("inf")).to(tl.float32)
    center = tl.zeros((BD,), tl.float32)
    if CARRY or (GLOBAL and not DOCUMENTS):  # otherwise each chunk has its own
        t = first_chunk * C + i
        seen = t < T
        if DOCUMENTS:  # only a document that began before has a center here
            seen = _starts(first_ptr, b, t, T, DOCUMENTS) < first_chunk * C
        center = _center(k_ptr, v_ptr, t, seen, kt, vt, keys, features, exists)
    if INITIAL:
        M = tl.load(m_ptr + b * key_width + keys, exists, EMPTY).to(tl.float32)
        N0 = tl.load(n_ptr + b * D + features, exists, 0.0).to(tl.float32)
        D0 = tl.load(d_ptr + b * key_width + keys, exists, 0.0).to(tl.float32)
    if SEGMENTS:
        for earlier in range(s):
            top, num, den, age, length = _load_sums(sums_ptr + (b * S + earlier) * 5 * D, features, D, exists)
            M, age, N0, D0 = _join(M, age, N0, D0, top, num, den, age, length, 0.0, LOG2E)
    N0 -= center * D0
    far_top = M
    if CARRY:  # the chunk before is computed once: its factors, and its sums, which join those before the window
        t = (first_chunk - 1) * C + i
        start = t * 0
        if DOCUMENTS:  # only the document of its last token counts
            begin = tl.load(first_ptr + b * T + first_chunk * C - 1, first_chunk > 0, T).to(tl.int32)
            start, before = tl.where(t >= begin, t * 0, T), begin < first_chunk * C - C
            far_top, N0, D0 = tl.where(before, far_top, EMPTY), tl.where(before, N0, 0.0), tl.where(before, D0, 0.0)
        M, joining_p, joining_pv, last_p, last_pv = _carried(
            k_ptr, v_ptr, t, T, kt, vt, keys, features, exists, start, center, far_top, DOCUMENTS)  # fmt: skip
        fade = tl.exp2((far_top - M) * LOG2E)
    elif not CHECK:  # the largest key that all queries of the first chunk see
        for j in tl.range(NEAR):
            t = (first_chunk - NEAR + j) * C + i
            inside = (t >= 0)[:, None] & exists[None, :]
            M = tl.maximum(M, tl.max(_tile(k_ptr, t, kt, keys, inside, -float("inf")), 0))
    if not CHECK:
        M = tl.where(M > EMPTY, M, tl.maximum(known, EMPTY))
    for n in range(first_chunk, end):
        t = n * C + i
        start = _starts(first_ptr, b, t, T, DOCUMENTS)
        oldest, begin, kept, begins = (n - NEAR) * C, 0, True, False
        if CARRY and DOCUMENTS:
            begin = tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1).to(tl.int32)
            begins, kept = begin >= n * C, tl.load(first_ptr + b * T + n * C) < n * C
            # A document may not change the rounding of another one
            moved = tl.where(begins, center, 0.0)
            center, M = center - moved, tl.where(kept, M, EMPTY)
            N0, D0 = tl.where(kept, N0 + moved * D0, 0.0), tl.where(kept, D0, 0.0)
        elif DOCUMENTS or not GLOBAL:
            mine = _center(k_ptr, v_ptr, t, (start <= t) & (t < T), kt, vt, keys, features, exists)
            if DOCUMENTS:  # the tokens that join the sums before the window: those of the document of the last one
                begin = tl.load(first_ptr + b * T + tl.minimum(oldest + C, T) - 1, n >= NEAR, T).to(tl.int32)
                kept = begin < oldest
                # A document may not change the rounding of another one
                whole = tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1) <= tl.maximum(oldest, 0)
                mine = tl.where(whole, mine, 0.0)
            N0, center = N0 + (center - mine) * D0, mine
        k, v = _keys(k_ptr, v_ptr, t, T, kt, vt, keys, features, exists, start, center, DOCUMENTS)
        own = tl.max(k, 0) if CARRY else _largest(k + v * 0.0)
        m = tl.maximum(M, own)
        if CHECK:
            m = tl.maximum(far_top, tl.max(k, 0))
            if not GLOBAL:
                m = tl.maximum(tl.max(k, 0), EMPTY)
            for j in tl.range(NEAR):
                u = oldest + j * C + i
                x, _ = _keys(
                    k_ptr, v_ptr, u, T, kt, vt, keys, features, exists, _starts(first_ptr, b, u, T, DOCUMENTS), center,
                    DOCUMENTS)  # fmt: skip
                m = tl.maximum(m, tl.max(x, 0))
        tile = tiles + tl.minimum(n, NT - 1)
        a_at = a_ptr + (tile * C + i[:, None]) * ((NEAR + 1) * C) + i[None, :]
        num, den = tl.zeros((C, BD), tl.float32), tl.zeros((C, BD), tl.float32)
        top0, num0, den0 = far_top, N0, D0
        if CARRY:
            r, far = tl.exp2((M - m) * LOG2E), tl.load(far_ptr + tile * C + i)[:, None]
            if DOCUMENTS:
                far = tl.maximum(far, 0.0)
            N0, D0, far_top = N0 * fade, D0 * fade, M
            num, den, a = far * N0[None, :], far * D0[None, :], tl.load(a_at)
            num, of_last = num + _dot(a, last_pv, PRECISION), _dot(a, last_p, PRECISION)
            den += of_last
            if DOCUMENTS:
                num += of_last * moved[None, :]
            num, den = num * r[None, :], den * r[None, :]
            N0, D0, fade = N0 + joining_pv, D0 + joining_p, r
        elif GLOBAL:
            r, far = tl.exp2((far_top - m) * LOG2E), tl.load(far_ptr + tile * C + i)[:, None]
            num, den = far * (N0 * r)[None, :], far * (D0 * r)[None, :]
            if CHECK:  # the sums may be NaN, which rows of another document do not see
                num, den = tl.where(far >= 0.0, num, 0.0), tl.where(far >= 0.0, den, 0.0)
        p = tl.exp2((k - m[None, :]) * LOG2E)
        pv, k2, v2, u = p * v, k, v, t
        if NEAR > 0:
            own_p, own_pv = _once(p), _once(pv)
        if CARRY:
            joining_p, joining_pv, last_p, last_pv = tl.sum(p, 0), tl.sum(pv, 0), own_p, own_pv
        elif NEAR > 0:
            u = oldest + i
            k2, v2 = _keys(
                k_ptr, v_ptr, u, T, kt, vt, keys, features, exists, _starts(first_ptr, b, u, T, DOCUMENTS), center,
                DOCUMENTS)  # fmt: skip
            p = tl.exp2((k2 - m[None, :]) * LOG2E)
            pv = p * v2
        if GLOBAL and not CARRY:
            k2 = tl.where((u >= begin)[:, None], k2, -float("inf"))
            far_top = tl.maximum(tl.where(kept, far_top, EMPTY), tl.max(k2, 0))
            fade, joining = tl.exp2((top0 - far_top) * LOG2E), tl.exp2((k2 - far_top[None, :]) * LOG2E)
            N0 = tl.where(kept, N0 * fade, 0.0) + tl.sum(tl.where((u >= begin)[:, None], joining * v2, 0.0), 0)
            D0 = tl.where(kept, D0 * fade, 0.0) + tl.sum(joining, 0)
        if not CARRY:
            a = tl.load(a_at)
            num += _dot(a, pv, PRECISION)
            den += _dot(a, p, PRECISION)
        for j in tl.range(1, NEAR):
            u = oldest + j * C + i
            k2, v2 = _keys(
                k_ptr, v_ptr, u, T, kt, vt, keys, features, exists, _starts(first_ptr, b, u, T, DOCUMENTS), center,
                DOCUMENTS)  # fmt: skip
            p = tl.exp2((k2 - m[None, :]) * LOG2E)
            a = tl.load(a_at + j * C)
            num += _dot(a, p * v2, PRECISION)
            den += _dot(a, p, PRECISION)
        if NEAR > 0:
            a = tl.load(a_at + NEAR * C)
            num += _dot(a, own_pv, PRECISION)
            den += _dot(a, own_p, PRECISION)
        hidden, largest, next_center = ((start > t) | (t >= T))[:, None], m, center
        if CHECK:
            bad = _lost(num, den, hidden)
        else:
            # All queries see a key of M, if there is one, so the largest term of each is at least exp(M - m - spread);
            # without CARRY, `own` is NaN if a key or value is
            bad = ~((M > EMPTY) & (own - M <= SAFE) & (m - M + tl.load(spread_ptr + tile) <= SAFE))
            if CARRY:
                bad |= joining_pv * 0.0 != 0.0  # a value or key that is not finite, which earlier queries do not see
        M = m
        if begins:  # a document begins in the chunk, and only the last one counts later
            bad = _lost(num, den, hidden)
            num, den = tl.where(hidden, 0.0, num), tl.where(hidden, 1.0, den)
            next_center = _center(k_ptr, v_ptr, t, (t >= begin) & (t < T), kt, vt, keys, features, exists)
            M, joining_p, joining_pv, last_p, last_pv = _carried(
                k_ptr, v_ptr, t, T, kt, vt, keys, features, exists, tl.where(t >= begin, start, T), next_center,
                tl.zeros((BD,), tl.float32) + EMPTY, DOCUMENTS)  # fmt: skip
            largest, fade = tl.where(M > EMPTY, M, m), tl.zeros((BD,), tl.float32)
            N0, D0 = fade, fade
        of_chunk = (b * N + n) * D + features
        tl.store(flag_ptr + of_chunk, bad.to(tl.int8), exists)
        state_at, bad = state_ptr + (b * N + n) * 4 * D + features, bad & exists
        tl.store(state_at, top0, bad)
        tl.store(state_at + D, num0, bad)
        tl.store(state_at + 2 * D, den0, bad)
        tl.store(state_at + 3 * D, center, bad)
        inside, at, gate = (t < T)[:, None] & exists[None, :], t[:, None] * D + features[None, :], 1.0
        some = den != 0.0
        if CHECK:  # without it, chunks with visible queries that see no key are bad
            some &= ~hidden
            num, den = tl.where(some, num, 0.0), tl.where(some, den, 1.0)
        if GATED:
            gate = 1.0 + tl.exp2(_tile(q_ptr, t, qt, features, inside, 0.0) * -LOG2E)
        if KEEP:
            average, log_den = _divide(num, den), _log2(den)
            # Finite, since not all queries may see an infinite key
            largest = tl.where(tl.abs(largest) < -EMPTY, largest, 0.0)
            if CHECK:
                log_den = tl.where(some, log_den, float("inf"))
            elif DOCUMENTS:  # relative to a key that all later queries of the last document see
                log_den = tl.where(hidden, float("inf"), log_den + ((m - largest) * LOG2E)[None, :])
            tl.store(c_ptr + at, average, inside)
            tl.store(l_ptr + at, log_den, inside)
            to = r_ptr + (b * N + n) * 3 * D + features
            tl.store(to, largest, exists)
            tl.store(to + D, center, exists)
            tl.store(to + 2 * D, bad.to(tl.float32), exists)
            y = _divide(average + center[None, :], gate)
        else:
            y = _divide(num + center[None, :] * den, den * gate)
        if CHECK:
            y = tl.where(some, y, 0.0)
        elif DOCUMENTS:  # the query of a hidden token may be NaN
            y = tl.where(hidden, 0.0, y)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), inside)
        center = next_center


@triton.jit
def _flagged(flag_ptr, begin, end, D, features, exists):
    """Whether features of the chunks from `begin` up to `end`, at most GROUP, are flagged."""
    n = begin + tl.arange(0, GROUP)
    flags = tl.load(flag_ptr + n[:, None] * D + features[None, :], (n < end)[:, None] & exists[None, :], 0)
    return tl.max(tl.max(flags.to(tl.int32), 1), 0) > 0


@kernel
def repair_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, top_ptr, first_ptr, y_ptr, c_ptr, l_ptr, r_ptr, flag_ptr, state_ptr,
    T, N, NT, D, positions, past, size, w_row, w_position, w_head, w_base, rows, each, qb, qt, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, NEAR: tl.constexpr,
    GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
    INITIAL: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of the flagged features of `each` chunks key by key."""
    b, group, head, features, exists, keys = _program(tl.cdiv(N, each), HEADS, BLOCKS, HEAD, BD, KEY_PER_HEAD)
    # The outputs of the `past` tokens of a state are not used
    begin, end = tl.maximum(group * each, past // C), tl.minimum(group * each + each, N)
    end = tl.where(_flagged(flag_ptr + b * N * D, begin, end, D, features, exists), end, begin)
    w_ptr += b * w_row + head * w_head
    for n in range(begin, end):
        bad = exists & (tl.load(flag_ptr + (b * N + n) * D + features, exists, 0) != 0)
        if tl.max(bad.to(tl.int32)) > 0:
            i = tl.arange(0, C)
            t, oldest = n * C + i, (n - NEAR) * C
            start = _starts(first_ptr, b, t, T, DOCUMENTS)
            num, den = tl.zeros((C, BD), tl.float32), tl.zeros((C, BD), tl.float32)
            top = tl.zeros((C, BD), tl.float32) + EMPTY
            state_at = state_ptr + (b * N + n) * 4 * D + features
            center = tl.load(state_at + 3 * D, bad, 0.0)
            if GLOBAL:
                seen = ((start < oldest) & (start <= t))[:, None] & bad[None, :]
                if INITIAL:
                    seen = (start <= t)[:, None] & bad[None, :]
                top = tl.where(seen, tl.load(state_at, bad, EMPTY)[None, :], EMPTY)
                num = tl.where(seen, tl.load(state_at + D, bad, 0.0)[None, :], 0.0)
                den = tl.where(seen, tl.load(state_at + 2 * D, bad, 0.0)[None, :], 0.0)
            for u in range(tl.maximum(oldest, 0), tl.minimum(n * C + C, T)):
                there = bad
                if DOCUMENTS:
                    there = bad & (tl.load(first_ptr + b * T + u) <= u)
                k = tl.load(k_ptr + b * kb + (u * kt + keys), there, -float("inf")).to(tl.float32)
                v = tl.load(v_ptr + b * vb + (u * vt + features), there, 0.0).to(tl.float32)
                v = tl.where(k > -float("inf"), v - center, 0.0)
                w = _biases(w_ptr, t, u, start, positions, past, size, w_position, w_base, GLOBAL)[:, None]
                seen = (w != -float("inf")) & (k != -float("inf"))[None, :]
                logit = tl.where(seen, k[None, :] + w, EMPTY)
                new = tl.maximum(top, logit)
                old, p = tl.exp2((top - new) * LOG2E), tl.exp2(((k[None, :] - new) + w) * LOG2E)
                p = tl.where(seen, p, 0.0)
                num, den, top = num * old + tl.where(seen, p * v[None, :], 0.0), den * old + p, new
            some, inside, at = den != 0.0, (t < T)[:, None] & bad[None, :], t[:, None] * D + features[None, :]
            den = tl.where(some, den, 1.0)
            c = tl.where(some, num / den, -center[None, :])
            y = c + center[None, :]
            if GATED:
                y = tl.where(some, y * tl.sigmoid(_tile(q_ptr + b * qb, t, qt, features, inside, 0.0)), 0.0)
            tl.store(y_ptr + b * T * D + at, y.to(y_ptr.dtype.element_ty), inside)
            if KEEP:
                tile = (b * rows * HEADS + head) * NT + tl.minimum(n, NT - 1)
                largest = tl.load(r_ptr + (b * N + n) * 3 * D + features, bad, 0.0)
                if not GLOBAL or (DOCUMENTS and NEAR != 1):
                    largest = tl.max(tl.where(some & inside, top, EMPTY), 0)
                    largest = tl.where(tl.abs(largest) < -EMPTY, largest, 0.0)
                    tl.store(r_ptr + (b * N + n) * 3 * D + features, largest, bad)
                log_den = (top - largest[None, :]) - tl.load(top_ptr + tile * C + i)[:, None]
                log_den = log_den * LOG2E + tl.log2(den)
                tl.store(c_ptr + b * T * D + at, c, inside)
                tl.store(l_ptr + b * T * D + at, tl.where(some, log_den, float("inf")), inside)


# ------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def _queries(
    g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, dq_ptr, n, T, D, gt, qt, features, exists, center,
    GATED: tl.constexpr, CHECK: tl.constexpr, QUERY: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Load, of the queries of a chunk: the gradient of the averages; the averages, relative to the given center;
    log-denominators; and the reference of these. With QUERY, store the gradient of the queries (the gate).
    """
    t = n * C + tl.arange(0, C)
    inside, at = (t < T)[:, None] & exists[None, :], t[:, None] * D + features[None, :]
    known = exists & (n * C < T)
    reference = tl.load(r_ptr + n * 3 * D + features, known, -EMPTY)
    own_center = tl.load(r_ptr + n * 3 * D + D + features, known, 0.0)
    g, c = _tile(g_ptr, t, gt, features, inside, 0.0), tl.load(c_ptr + at, inside, 0.0)
    log_den = tl.load(l_ptr + at, inside, float("inf"))
    if GATED:
        gate = _divide(1.0, 1.0 + tl.exp2(_tile(q_ptr, t, qt, features, inside, 0.0) * -LOG2E))
        g *= gate
    if CHECK:  # a hidden token may have a gradient that is NaN
        g = tl.where(log_den != float("inf"), g, 0.0)
    if QUERY and GATED:
        dq = (c + own_center[None, :]) * (g - g * gate)
        if CHECK:
            dq = tl.where(log_den != float("inf"), dq, 0.0)
        tl.store(dq_ptr + at, _once(dq.to(dq_ptr.dtype.element_ty)), inside)
    if not QUERY:
        c += (own_center - center)[None, :]
    return g, c, log_den, reference


@triton.jit
def _far_queries(
    R, X, Z, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, top_ptr, far_ptr, tile, n, T, D, gt, qt, features, exists,
    reference, center, GATED: tl.constexpr, CHECK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the queries of a chunk to the sums over those that see all keys before the near chunks."""
    there, i = n * C < T, tl.arange(0, C)
    g, c, log_den, of_queries = _queries(
        g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, n, T, D, gt, qt, features, exists, center, GATED, CHECK, False, C
    )
    log_den += (tl.load(top_ptr + tile * C + i, there, 0.0) * LOG2E)[:, None]
    shift = (reference - of_queries) * LOG2E
    if CHECK:
        seen = (tl.load(far_ptr + tile * C + i, there, 0.0) >= 0.0)[:, None]
        log_den = tl.where(seen, log_den, float("inf"))
        lowest = tl.maximum(tl.max(-log_den, 0), EMPTY)
        x = tl.where(seen, tl.exp2(-log_den - lowest[None, :]) * g, 0.0)
        of_den = tl.sum(tl.where(seen, x * c, 0.0), 0)
        R, _, X, Z = _join(R, 0.0, X, Z, shift + lowest, tl.sum(x, 0), of_den, 0.0, 0.0, 0.0, 1.0)
    else:  # they see the key of the reference, so no exponential exceeds 1
        x = tl.exp2(shift[None, :] - log_den) * g
        X, Z = X + tl.sum(x, 0), Z + tl.sum(x * c, 0)
    return R, X, Z


@triton.jit
def _far_sums(g, c, log_den, of_queries, r_ptr, below, top_ptr, far_ptr, D, exists, DOCUMENTS: tl.constexpr):
    """Sum the queries of a chunk, loaded before, for the keys up to chunk `below`. They see the key of its reference,
    so no exponential exceeds 1, and the sums are finite unless a query is not. DOCUMENTS: only those that see it.
    """
    shift = (tl.load(r_ptr + below * 3 * D, exists & (below >= 0), EMPTY) - of_queries) * LOG2E
    x = tl.exp2(shift[None, :] - (log_den + (tl.load(top_ptr) * LOG2E)[:, None])) * g
    if DOCUMENTS:
        seen = (tl.load(far_ptr) >= 0.0)[:, None]
        return tl.sum(tl.where(seen, x, 0.0), 0), tl.sum(tl.where(seen, x * c, 0.0), 0)
    return tl.sum(x, 0), tl.sum(x * c, 0)


@triton.jit
def _shift(x, y):
    """log2(exp(x - y)), at most 100: larger values belong to flagged chunks, or are multiplied by 0."""
    return tl.minimum((x - y) * LOG2E, 100.0)


@kernel
def sweep_backward_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, b_ptr, top_ptr, far_ptr, first_ptr, sums_ptr, dq_ptr, dk_ptr,
    dv_ptr, flag_ptr, state_ptr, T, N, NT, D, S, each, rows, gb, gt, qb, qt, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, NEAR: tl.constexpr,
    GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, TOTALS: tl.constexpr, SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a segment of `each` chunks or, with TOTALS, the sums over the queries that all keys
    before the segment see.

    Without CHECK, the reference of a chunk is a key that all of these queries see, so the sums need no maximum.
    """
    CARRY: tl.constexpr = NEAR == 1 and GLOBAL and not TOTALS  # as in the forward pass
    CHECK: tl.constexpr = not GLOBAL or (DOCUMENTS and not CARRY)
    MASK: tl.constexpr = not GLOBAL or DOCUMENTS
    ONE_CENTER: tl.constexpr = CARRY and not DOCUMENTS  # a segment has one since the forward pass
    b, s, head, features, exists, keys = _program(S, HEADS, BLOCKS, HEAD, BD, KEY_PER_HEAD, 4)
    if TOTALS:
        s += 1
    row = b * T * D
    g_ptr, k_ptr, v_ptr, c_ptr, l_ptr = g_ptr + b * gb, k_ptr + b * kb, v_ptr + b * vb, c_ptr + row, l_ptr + row
    dk_ptr, dv_ptr, r_ptr = dk_ptr + row, dv_ptr + row, r_ptr + b * N * 3 * D
    if GATED:
        q_ptr, dq_ptr = q_ptr + b * qb, dq_ptr + row
    tiles, i = (b * rows * HEADS + head) * NT, tl.max_contiguous(tl.arange(0, C), 4)
    if KEY_PER_HEAD:  # a column, which is loaded once for all features
        keys = tl.zeros((1,), tl.int32) + head
    # Sums over later queries of g / denominator (X), times the average relative to `center` (Z); relative to
    # exp2(R) / exp(reference)
    R, X, Z = tl.zeros((BD,), tl.float32) + EMPTY, tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    first_chunk, end, length = s * each, tl.minimum(s * each + each, N), 0.0
    reference = tl.load(r_ptr + (end - 1) * 3 * D + features, exists, 0.0)
    center = tl.load(r_ptr + (end - 1) * 3 * D + D + features, exists, 0.0)
    if SEGMENTS and not TOTALS:
        for passed in range(S - 1 - s):
            sums_at = sums_ptr + (b * S + S - 1 - passed) * 6 * D
            top, num, den, sums_reference, dropped = _load_sums(sums_at, features, D, exists)
            shift = (reference - sums_reference) * LOG2E
            den += (tl.load(sums_at + 5 * D + features, exists, 0.0) - center) * num
            if MASK:
                R, _, X, Z = _join(R, 0.0, X, Z, top + shift, num, den, 0.0, dropped, 0.0, 1.0)
            else:
                X, Z = X + num * tl.exp2(shift), Z + den * tl.exp2(shift)
        if CARRY and DOCUMENTS:
            X, Z = X * tl.exp2(R), Z * tl.exp2(R)
    if CARRY:  # the queries of the chunk after the segment
        g, c, log_den, of_next = _queries(
            g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, end, T, D, gt, qt, features, exists, center, GATED, MASK, False,
            C)  # fmt: skip
        x_next = tl.exp2(-log_den) * g
        center_next, flag_next = center, tl.load(r_ptr + end * 3 * D + 2 * D + features, exists & (end < N), 0.0)
        of_tile = (tiles + tl.minimum(end, NT - 1)) * C + i
        far_x, far_xc = _far_sums(
            g, c, log_den, of_next, r_ptr + features, end - 2, top_ptr + of_tile, far_ptr + of_tile, D, exists,
            DOCUMENTS)  # fmt: skip
        x_next, xc_next = _once(x_next), _once(x_next * c)
    for back in range(0, end - first_chunk):
        n = end - 1 - back
        u = n * C + i
        below = tl.load(r_ptr + (n - 1) * 3 * D + features, exists & (n > 0), EMPTY)
        if not ONE_CENTER:
            old_center, center = center, tl.load(r_ptr + n * 3 * D + D + features, exists, 0.0)
            Z += (old_center - center) * X
            if CARRY:
                far_xc += (old_center - center) * far_x
        begin = 0  # the document of the last key, which the queries after the window see
        if DOCUMENTS:
            begin = tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1).to(tl.int32)
        if not TOTALS:
            inside, at = (u < T)[:, None] & exists[None, :], u[:, None] * D + features[None, :]
            tile = tl.where(NT < N, tl.minimum(n, NT - 1 - NEAR), n)
            b_at = b_ptr + ((tiles + tile) * C + i[:, None]) * ((NEAR + 1) * C) + i[None, :]
            of_num, of_den = tl.zeros((C, BD), tl.float32), tl.zeros((C, BD), tl.float32)
            if CARRY and DOCUMENTS:  # later queries see the last document of the chunk
                seen = (u >= begin)[:, None]
                of_num, of_den = tl.where(seen, X[None, :], 0.0), tl.where(seen, Z[None, :], 0.0)
            elif not CHECK:
                of_num, of_den = of_num + X[None, :], of_den + Z[None, :]
            if CARRY:  # the queries of the chunk after this one, whose factors were computed with it
                a, fade = tl.load(b_at + C, n + 1 < N, 0.0), tl.exp2(_shift(reference, of_next))
                later = _dot(a, x_next, PRECISION)
                if not ONE_CENTER:
                    of_den += later * (fade * (center_next - center))[None, :]
                of_num += later * fade[None, :]
                of_den += _dot(a, xc_next, PRECISION) * fade[None, :]
            g, c, log_den, _ = _queries(
                g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, dq_ptr, n, T, D, gt, qt, features, exists, center, GATED, MASK,
                True, C)  # fmt: skip
            lowest, bad = tl.zeros((BD,), tl.float32), features < 0
            if CHECK:
                rho = _largest(-log_den + (g + c) * 0.0)
                lowest = tl.maximum(rho, EMPTY)
            else:
                bad = tl.load(r_ptr + n * 3 * D + 2 * D + features, exists, 0.0) > 0.0
            x = tl.exp2(-log_den - lowest[None, :]) * g
            if CARRY:
                of_tile = (tiles + tl.minimum(n, NT - 1)) * C + i
                far_own, far_own_c = _far_sums(
                    g, c, log_den, reference, r_ptr + features, n - 2, top_ptr + of_tile, far_ptr + of_tile, D, exists,
                    DOCUMENTS)  # fmt: skip
                bad |= (flag_next > 0.0) | ((far_own + far_own_c) * 0.0 != 0.0)  # a query that is not finite
            x, xc = _once(x), _once(x * c)
            a = tl.load(b_at)
            of_num, of_den = of_num + _dot(a, x, PRECISION), of_den + _dot(a, xc, PRECISION)
            tl.debug_barrier()  # otherwise keys and values are loaded before the products, and registers spill
            k, v = _keys(
                k_ptr, v_ptr, u, T, kt, vt, keys, features, exists, _starts(first_ptr, b, u, T, DOCUMENTS), center,
                DOCUMENTS)  # fmt: skip
            k = (k - reference[None, :]) * LOG2E
            top0, num0, den0 = R, X, Z
            if CHECK:
                highest, e = tl.max(k, 0), tl.exp2(k + lowest[None, :])
                bad = ~(highest + rho <= SAFE * LOG2E)
                of_num, of_den = of_num * e, of_den * e
                if GLOBAL:
                    e, seen = tl.exp2(k + R[None, :]), (u >= begin)[:, None]
                    bad |= highest + R > SAFE * LOG2E
                    of_num += tl.where(seen, e * X[None, :], 0.0)
                    of_den += tl.where(seen, e * Z[None, :], 0.0)
            if not CARRY:
                for j in tl.range(1, NEAR + 1):
                    g, c, log_den, of_queries = _queries(
                        g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, n + j, T, D, gt, qt, features, exists, center, GATED,
                        CHECK, False, C)  # fmt: skip
                    a = tl.load(b_at + j * C, n + j < N, 0.0)
                    shift = (reference - of_queries) * LOG2E
                    if CHECK:
                        rho = _largest(-log_den + (g + c) * 0.0)
                        lowest = tl.maximum(rho, EMPTY)
                        bad |= ~(highest + (shift + rho) <= SAFE * LOG2E)
                        y, e = tl.exp2(-log_den - lowest[None, :]) * g, tl.exp2(k + (shift + lowest)[None, :])
                        of_num += e * _dot(a, y, PRECISION)
                        of_den += e * _dot(a, y * c, PRECISION)
                    else:
                        y = tl.exp2(shift[None, :] - log_den) * g
                        of_num += _dot(a, y, PRECISION)
                        of_den += _dot(a, y * c, PRECISION)
                        there = exists & (n + j < N)
                        bad |= tl.load(r_ptr + (n + j) * 3 * D + 2 * D + features, there, 0.0) > 0.0
            if not CHECK:
                e = tl.exp2(k)
                of_num, of_den = of_num * e, of_den * e
            if not CHECK and (DOCUMENTS or not CARRY):
                bad |= tl.max(((of_num + of_den) * 0.0 != 0.0).to(tl.int32), 0) > 0
            tl.store(dv_ptr + at, of_num.to(dv_ptr.dtype.element_ty), inside)
            tl.store(dk_ptr + at, (v * of_num - of_den).to(dk_ptr.dtype.element_ty), inside)
            tl.store(flag_ptr + (b * N + n) * D + features, bad.to(tl.int8), exists)
            state_at, bad = state_ptr + (b * N + n) * 4 * D + features, bad & exists
            if CHECK:
                tl.store(state_at, top0, bad)
            elif DOCUMENTS:
                tl.store(state_at, tl.zeros((BD,), tl.float32), bad)
            tl.store(state_at + D, num0, bad)
            tl.store(state_at + 2 * D, den0, bad)
        if DOCUMENTS:  # the keys of another document see none of these queries
            same = begin < n * C
            R, X, Z = tl.where(same, R, EMPTY), tl.where(same, X, 0.0), tl.where(same, Z, 0.0)
            length = tl.where(same, length, float("inf"))
        # From here on, relative to the reference of the chunk before, which the queries that join see
        if CHECK:
            R += tl.where(n > 0, (below - reference) * LOG2E, 0.0)
        else:
            fade = tl.exp2(_shift(below, reference))
            X, Z = X * fade, Z * fade
        if CARRY:
            X, Z = X + far_x, Z + far_xc
            far_x, far_xc = far_own, far_own_c
        elif GLOBAL:
            R, X, Z = _far_queries(
                R, X, Z, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, top_ptr, far_ptr, tiles + tl.minimum(n + NEAR, NT - 1),
                n + NEAR, T, D, gt, qt, features, exists, below, center, GATED, CHECK, C)  # fmt: skip
        if CARRY:
            x_next, xc_next, of_next = x, xc, reference
            if not ONE_CENTER:
                center_next = center
            flag_next = tl.load(r_ptr + n * 3 * D + 2 * D + features, exists, 0.0)
        reference = below
    if TOTALS:
        sums_at = sums_ptr + (b * (S + 1) + s) * 6 * D
        _store_sums(sums_at, features, D, exists, R, reference, X, Z, length)
        tl.store(sums_at + 5 * D + features, center, exists)


@kernel
def repair_backward_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, top_ptr, first_ptr, dk_ptr, dv_ptr, flag_ptr, state_ptr,
    T, N, NT, D, positions, past, size, w_row, w_position, w_head, w_base, rows, each, gb, gt, qb, qt, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, NEAR: tl.constexpr,
    GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the flagged features of `each` chunks of keys query by query."""
    b, group, head, features, exists, keys = _program(tl.cdiv(N, each), HEADS, BLOCKS, HEAD, BD, KEY_PER_HEAD)
    begin, end = group * each, tl.minimum(group * each + each, N)
    end = tl.where(_flagged(flag_ptr + b * N * D, begin, end, D, features, exists), end, begin)
    w_ptr, r_ptr = w_ptr + b * w_row + head * w_head, r_ptr + b * N * 3 * D
    for n in range(begin, end):
        bad = exists & (tl.load(flag_ptr + (b * N + n) * D + features, exists, 0) != 0)
        if tl.max(bad.to(tl.int32)) > 0:
            i = tl.arange(0, C)
            u, row = n * C + i, b * T * D
            reference = tl.load(r_ptr + n * 3 * D + features, bad, 0.0)
            center = tl.load(r_ptr + n * 3 * D + D + features, bad, 0.0)
            k, v = _keys(
                k_ptr + b * kb, v_ptr + b * vb, u, T, kt, vt, keys, features, bad,
                _starts(first_ptr, b, u, T, DOCUMENTS), center, DOCUMENTS)  # fmt: skip
            of_num, of_den = tl.zeros((C, BD), tl.float32), tl.zeros((C, BD), tl.float32)
            if GLOBAL:
                state_at = state_ptr + (b * N + n) * 4 * D + features
                e = (k - reference[None, :]) * LOG2E
                if DOCUMENTS:
                    e += tl.load(state_at, bad, EMPTY)[None, :]
                seen = (k != -float("inf")) & bad[None, :]
                if DOCUMENTS:
                    seen &= (u >= tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1))[:, None]
                e = tl.exp2(e)
                of_num = tl.where(seen, e * tl.load(state_at + D, bad, 0.0)[None, :], 0.0)
                of_den = tl.where(seen, e * tl.load(state_at + 2 * D, bad, 0.0)[None, :], 0.0)
            for t in range(n * C, tl.minimum((n + NEAR + 1) * C, T)):
                start = 0
                if DOCUMENTS:
                    start = tl.load(first_ptr + b * T + t).to(tl.int32)
                tile = (b * rows * HEADS + head) * NT + tl.minimum(t // C, NT - 1)
                w = _biases(w_ptr, t, u, start, positions, past, size, w_position, w_base, GLOBAL)
                w = (w - tl.load(top_ptr + tile * C + t % C))[:, None]
                g = tl.load(g_ptr + b * gb + (t * gt + features), bad, 0.0).to(tl.float32)
                if GATED:
                    g *= tl.sigmoid(tl.load(q_ptr + b * qb + (t * qt + features), bad, 0.0).to(tl.float32))
                of_queries = r_ptr + t // C * 3 * D + features
                c = tl.load(c_ptr + row + t * D + features, bad, 0.0)
                c += tl.load(of_queries + D, bad, 0.0) - center
                log_den = tl.load(l_ptr + row + t * D + features, bad, float("inf"))
                e = ((k - tl.load(of_queries, bad, 0.0)[None, :]) + w) * LOG2E - log_den[None, :]
                seen = (w != -float("inf")) & (k != -float("inf")) & (log_den != float("inf"))[None, :]
                a = tl.exp2(tl.where(seen, e, EMPTY)) * g[None, :]
                of_num += tl.where(seen, a, 0.0)
                of_den += tl.where(seen, a * c[None, :], 0.0)
            inside, at = (u < T)[:, None] & bad[None, :], u[:, None] * D + features[None, :]
            tl.store(dv_ptr + row + at, of_num.to(dv_ptr.dtype.element_ty), inside)
            tl.store(dk_ptr + row + at, (v * of_num - of_den).to(dk_ptr.dtype.element_ty), inside)


@triton.jit
def _window_gradient(
    total, careful, w, b, n, t, u, head, own, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, first_ptr, B, T, N, D,
    gb, gt, qb, qt, kb, kt, vb, vt, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, CHECK: tl.constexpr,
    DOCUMENTS: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Add some features of a row to a tile of the gradient of w: their products, which exp(w) multiplies later, or,
    CAREFUL, key by key those whose products may overflow, which are counted otherwise.
    """
    features, exists, row = head * HEAD + own, (own < HEAD) & (b < B), b * T * D
    keys = features
    if KEY_PER_HEAD:
        keys = features * 0 + head
    center = tl.load(r_ptr + (b * N + n) * 3 * D + D + features, exists, 0.0)
    if GATED:
        q_ptr += b * qb
    g, c, log_den, reference = _queries(
        g_ptr + b * gb, q_ptr, c_ptr + row, l_ptr + row, r_ptr + b * N * 3 * D, None, n, T, D, gt, qt, features,
        exists, center, GATED, True, False, C)  # fmt: skip
    k, v = _keys(
        k_ptr + b * kb, v_ptr + b * vb, u, T, kt, vt, keys, features, exists, _starts(first_ptr, b, u, T, DOCUMENTS),
        center, DOCUMENTS)  # fmt: skip
    k, lowest = (k - reference[None, :]) * LOG2E, tl.zeros_like(reference)
    if CHECK:
        rho = _largest(-log_den + (g + c) * 0.0)
        lowest, highest = tl.maximum(rho, EMPTY), _largest(k + v * 0.0)
        good = highest + rho <= SAFE * LOG2E
    else:  # the forward pass has flagged features whose products overflow for gradients up to 1e12
        good = tl.load(r_ptr + (b * N + n) * 3 * D + 2 * D + features, exists, 0.0) == 0.0
    if CAREFUL:
        for s in range(WIDE):
            this = tl.arange(0, WIDE) == s
            key = tl.sum(tl.where(this[:, None], k, 0.0), 0)
            value = tl.sum(tl.where(this[:, None], v, 0.0), 0)
            of_w = tl.sum(tl.where(this[None, :], w, 0.0), 1)[:, None]
            seen = (of_w != -float("inf")) & (exists & ~good & (key != -float("inf")))[None, :]
            seen &= log_den != float("inf")
            a = tl.exp2(tl.where(seen, key[None, :] + of_w * LOG2E - log_den, EMPTY))
            of_pair = tl.sum(tl.where(seen, a * g * (value[None, :] - c), 0.0), 1)
            total += tl.where(this[None, :], of_pair[:, None], 0.0)
    else:
        x = tl.where(good[None, :], tl.exp2(-log_den - lowest[None, :]) * g, 0.0)
        e = tl.where(good[None, :], tl.exp2(k + lowest[None, :]), 0.0)
        ev, xc = tl.where(good[None, :], e * v, 0.0), tl.where(good[None, :], x * c, 0.0)
        total += _dot(_once(x), tl.trans(_once(ev)), PRECISION)
        total += _dot(_once(-xc), tl.trans(_once(e)), PRECISION)
        careful += tl.max((exists & ~good).to(tl.int32))
    return total, careful


@kernel
def window_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, top_ptr, first_ptr, dw_ptr,
    B, T, N, NT, D, each, positions, past, size, w_row, w_position, w_head, w_base, rows, dw_part, dw_token, dw_head,
    gb, gt, qb, qt, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, NEAR: tl.constexpr,
    GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of w between the queries of a chunk and the keys of one or two chunks, summed over the
    features of a head and `each` rows. Entries are stored by query and lag.
    """
    CHECK: tl.constexpr = not GLOBAL or (DOCUMENTS and NEAR != 1)
    WIDE: tl.constexpr = 2 * C if NEAR > 0 else C
    TILES: tl.constexpr = NEAR // 2 + 1
    pid = tl.program_id(0)
    j, n, head = pid % TILES, pid // TILES % N, pid // TILES // N % HEADS
    part = (pid // TILES // N // HEADS).to(tl.int64)
    t, u = n * C + tl.arange(0, C), (n - NEAR) * C + j * WIDE + tl.arange(0, WIDE)
    total, careful = tl.zeros((C, WIDE), tl.float32), 0
    for step in range(each * BLOCKS):
        total, careful = _window_gradient(
            total, careful, None, part * each + step // BLOCKS, n, t, u, head, step % BLOCKS * BD + tl.arange(0, BD),
            g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, first_ptr, B, T, N, D, gb, gt, qb, qt, kb, kt, vb, vt,
            HEAD, KEY_PER_HEAD, CHECK, DOCUMENTS, GATED, PRECISION, C, WIDE, False)  # fmt: skip
    # Where rows have a w of their own, `each` is 1
    b = part * each
    start = _starts(first_ptr, b, t, T, DOCUMENTS)
    w = _biases(
        w_ptr + b * w_row + head * w_head, t[:, None], u[None, :], start[:, None], positions, past, size, w_position,
        w_base, GLOBAL)  # fmt: skip
    w -= tl.load(top_ptr + ((b * rows * HEADS + head) * NT + tl.minimum(n, NT - 1)) * C + tl.arange(0, C))[:, None]
    total = tl.where(w != -float("inf"), tl.exp2(w * LOG2E) * total, 0.0)
    if careful > 0:
        for step in range(each * BLOCKS):
            total, careful = _window_gradient(
                total, careful, w, part * each + step // BLOCKS, n, t, u, head, step % BLOCKS * BD + tl.arange(0, BD),
                g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, first_ptr, B, T, N, D, gb, gt, qb, qt, kb, kt, vb, vt,
                HEAD, KEY_PER_HEAD, CHECK, DOCUMENTS, GATED, PRECISION, C, WIDE, True)  # fmt: skip
    lag = t[:, None] - u[None, :]
    to = dw_ptr + part * dw_part + t[:, None].to(tl.int64) * dw_token + head * dw_head + (w_base - lag)
    tl.store(to, total, (lag >= 0) & (lag < size) & (t < T)[:, None] & (u >= 0)[None, :])
