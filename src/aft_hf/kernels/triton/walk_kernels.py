"""Triton kernels for causal Eq. 2 with w = 0 or w = -slope * distance: walks of features through the tokens.

A thread owns features and goes through the tokens of a segment, with the sums of Eq. 2 in registers; a backward pass
goes from the end. There is no matrix product and no shared memory. The sums are relative to the key M that was the
largest, `age` tokens ago: numerator and denominator are N exp(M - slope age) and D exp(M - slope age). Of the two
exponentials of a new maximum one is 1, so one exponential serves both, and is exact for any keys.

Sums of segments are made first (TOTALS), and each segment then joins those before (or, backwards, after) it.

Kept for the backward pass are, for each chunk, the averages relative to a center, and the base-2 logarithms of the
denominators relative to a reference, which is that of the first query that sees a key. `causal_launch.py` launches
these kernels.
"""

from .device import EMPTY, LOG2E, _divide, _log2, kernel, tl, triton


# Tokens that are loaded at once, before those that were loaded last are used: forwards and backwards
GROUP, PAIR = tl.constexpr(4), tl.constexpr(2)

SMALL = tl.constexpr(2.0**-100)


@triton.jit
def _row(ptr, t, T, step, features, exists, other: tl.constexpr):
    return tl.load(ptr + (t * step + features), exists & (t >= 0) & (t < T), other)


@triton.jit
def _pair(ptr, t, T, step, features, exists, other: tl.constexpr):
    """Load the features of the tokens t and t + 1."""
    return _row(ptr, t, T, step, features, exists, other), _row(ptr, t + 1, T, step, features, exists, other)


@triton.jit
def _group(ptr, t, T, step, features, exists, other: tl.constexpr):
    """Load the features of the tokens from t to t + 3."""
    x, y = _pair(ptr, t, T, step, features, exists, other)
    z, w = _pair(ptr, t + 2, T, step, features, exists, other)
    return x, y, z, w


@triton.jit
def _center_of_two(k_ptr, v_ptr, t, other, T, kt, vt, key_features, features, exists):
    """The number nearest to 0 between the values of two tokens, of those that are finite and not hidden by a key of
    -inf. An outlier as a center would cost all other values digits.
    """
    k, other_k = _row(k_ptr, t, T, kt, key_features, exists, 0.0), _row(k_ptr, other, T, kt, key_features, exists, 0.0)
    v = _row(v_ptr, t, T, vt, features, exists, 0.0).to(tl.float32)
    other_v = _row(v_ptr, other, T, vt, features, exists, 0.0).to(tl.float32)
    none, counts = float("inf"), (tl.abs(v) < float("inf")) & (k.to(tl.float32) > -float("inf"))
    other_counts = (tl.abs(other_v) < float("inf")) & (other_k.to(tl.float32) > -float("inf"))
    low = tl.minimum(tl.where(counts, v, none), tl.where(other_counts, other_v, none))
    high = tl.maximum(tl.where(counts, v, -none), tl.where(other_counts, other_v, -none))
    return tl.where(low <= high, tl.minimum(tl.maximum(low, 0.0), high), 0.0)


@triton.jit
def _load_sums(sums_ptr, features, width, exists):
    """Load the sums of a segment: the largest key, numerator, denominator, age, and the number of tokens."""
    length = tl.load(sums_ptr + 4 * width)
    sums_ptr += features
    m, n = tl.load(sums_ptr, exists, EMPTY), tl.load(sums_ptr + width, exists, 0.0)
    d, a = tl.load(sums_ptr + 2 * width, exists, 0.0), tl.load(sums_ptr + 3 * width, exists, 0.0)
    return m, n, d, a, length


@triton.jit
def _join(M, age, N, D, m, n, d, a, length, slope, UNIT: tl.constexpr):
    """Join sums with those of a segment that the walk passes later; drop the former if a document begins in it."""
    dropped = length == float("inf")
    age += tl.where(dropped, 0.0, length)
    x = tl.where(dropped, float("inf"), (m - M) + slope * (age - a))
    e = tl.exp2(-tl.abs(x) * UNIT)
    p, s = tl.where(x > 0.0, 1.0, e), tl.where(x > 0.0, e, 1.0)
    N, D = tl.where(dropped, 0.0, N * s) + n * p, tl.where(dropped, 0.0, D * s) + d * p
    return tl.where(x > 0.0, m, M), tl.where(x > 0.0, a, age), N, D


@triton.jit
def _store_sums(sums_ptr, features, width, exists, M, age, N, D, length):
    tl.store(sums_ptr + 4 * width, length)
    sums_ptr += features
    tl.store(sums_ptr, M, exists)
    tl.store(sums_ptr + width, N, exists)
    tl.store(sums_ptr + 2 * width, D, exists)
    tl.store(sums_ptr + 3 * width, age, exists)


@triton.jit
def _add(M, age, N, D, length, k, v, t, T, first, slope, ALIBI: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Add a token to the sums."""
    k = k.to(tl.float32)
    if DOCUMENTS:
        begins, hidden = first == t, first > t
        M, N, D = tl.where(begins, EMPTY, M), tl.where(begins, 0.0, N), tl.where(begins, 0.0, D)
        length = tl.where(begins, float("inf"), length)
        k = tl.where(hidden, -float("inf"), k)
        if ALIBI:
            age += tl.where(hidden | (t >= T), 0.0, 1.0)
            length += tl.where(hidden | (t >= T), 0.0, 1.0)
    elif ALIBI:
        age += tl.where(t < T, 1.0, 0.0)
        length += tl.where(t < T, 1.0, 0.0)
    # The value of a hidden token may be NaN; that of a key of infinity becomes NaN
    v = tl.where(k > -float("inf"), v.to(tl.float32) + k * 0.0, 0.0)
    x = k - M
    if ALIBI:
        x += slope * age
    e, larger = tl.exp2(-tl.abs(x) * LOG2E), x > 0.0
    p, s = tl.where(larger, 1.0, e), tl.where(larger, e, 1.0)
    if ALIBI:
        age = tl.where(larger, 0.0, age)
    return tl.where(larger, k, M), age, N * s + p * v, D * s + p, length


@triton.jit
def _output(
    M, age, N, D, reference, center, q, t, T, first, slope, y_ptr, c_ptr, l_ptr, step, features, exists,
    ALIBI: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Store the output of a token and, with KEEP, what its gradient needs."""
    at, inside = t * step + features, exists & (t < T)
    if DOCUMENTS:
        D = tl.where(first > t, 0.0, D)
    # D is 0 if no token is visible, and then N is 0, too. Otherwise, the token of the largest key adds about 1 to D.
    den, gate = tl.maximum(D, SMALL, propagate_nan=tl.PropagateNan.ALL), 1.0
    if GATED:
        exponent = tl.minimum(-q.to(tl.float32) * LOG2E, 100.0, propagate_nan=tl.PropagateNan.ALL)
        gate = 1.0 + tl.exp2(exponent)
    y = _divide(N, den * gate)
    c = y * gate
    if DOCUMENTS:
        y = tl.where(first > t, 0.0, y)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), inside)
    if KEEP:
        reference = tl.where(reference <= EMPTY, M, reference)
        log_den = M - reference
        if ALIBI:
            log_den -= slope * age
        log_den = log_den * LOG2E + _log2(den)
        tl.store(c_ptr + at, c - center, inside)
        tl.store(l_ptr + at, tl.where(D != 0.0, log_den, float("inf")), inside)
    return reference


@kernel
def walk_kernel(
    q_ptr, k_ptr, v_ptr, slope_ptr, first_ptr, sums_ptr, m_ptr, n_ptr, d_ptr, y_ptr, c_ptr, l_ptr, r_ptr,
    to_m_ptr, to_n_ptr, to_d_ptr, T, D, S, L, shift, HEAD, KEYS, qb, qt, kb, kt, vb, vt,
    ALIBI: tl.constexpr, KEY_PER_HEAD: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
    TOTALS: tl.constexpr, SEGMENTS: tl.constexpr, INITIAL: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a segment of L tokens or, with TOTALS, the sums of one that begins `shift` tokens before.
    INITIAL: the sums before the first token are given, and those after the last one are stored.
    """
    pid, blocks = tl.program_id(0), tl.cdiv(D, BD)
    features = pid % blocks * BD + tl.arange(0, BD)
    segment, b = pid // blocks % S, (pid // blocks // S).to(tl.int64)
    exists, key_features = features < D, features
    if KEY_PER_HEAD:
        key_features = features // HEAD
    slope = 0.0
    if ALIBI:
        slope = tl.load(slope_ptr + features // HEAD, exists, 0.0)
    M, age = tl.zeros((BD,), tl.float32) + EMPTY, tl.zeros((BD,), tl.float32)
    num, den, length = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), 0.0
    if INITIAL and not TOTALS:
        M = tl.load(m_ptr + b * KEYS + key_features, exists, EMPTY).to(tl.float32)
        num = tl.load(n_ptr + b * D + features, exists, 0.0).to(tl.float32)
        den = tl.load(d_ptr + b * KEYS + key_features, exists, 0.0).to(tl.float32)
    if SEGMENTS and not TOTALS:
        for earlier in range(segment):
            m, n, d, a, length = _load_sums(sums_ptr + (b * S + earlier) * 5 * D, features, D, exists)
            M, age, num, den = _join(M, age, num, den, m, n, d, a, length, slope, LOG2E)
    k_ptr, v_ptr, none = k_ptr + b * kb, v_ptr + b * vb, -float("inf")
    if GATED:
        q_ptr += b * qb
    if not TOTALS:
        y_ptr += b * T * D
    if KEEP:
        c_ptr += b * T * D
        l_ptr += b * T * D
    if DOCUMENTS:
        first_ptr += b * T
    start, end, f = tl.maximum(segment * L - shift, 0), tl.minimum(segment * L - shift + L, T), (T, T, T, T)
    k, v = _group(k_ptr, start, T, kt, key_features, exists, none), _group(v_ptr, start, T, vt, features, exists, 0.0)
    q = v
    if GATED:
        q = _group(q_ptr, start, T, qt, features, exists, 0.0)
    if DOCUMENTS:
        f = _group(first_ptr, start, T, 1, 0, start < T, 0)
    reference, center = M, M
    for chunk in range(start // C, tl.cdiv(end, C)):
        if KEEP:
            last = tl.minimum(chunk * C + C, T) - 1
            reference = tl.full((BD,), none, tl.float32)
            center = _center_of_two(k_ptr, v_ptr, chunk * C, last, T, kt, vt, key_features, features, exists)
            if DOCUMENTS:  # a chunk of several documents has none, since one may not change the rounding of another
                whole = tl.load(first_ptr + last) <= chunk * C
                reference, center = tl.where(whole, reference, 0.0), tl.where(whole, center, 0.0)
        for t in range(chunk * C, tl.minimum(chunk * C + C, end), GROUP):
            k_next = _group(k_ptr, t + GROUP, T, kt, key_features, exists, none)
            v_next = _group(v_ptr, t + GROUP, T, vt, features, exists, 0.0)
            q_next, f_next = v_next, f
            if GATED:
                q_next = _group(q_ptr, t + GROUP, T, qt, features, exists, 0.0)
            if DOCUMENTS:
                f_next = _group(first_ptr, t + GROUP, T, 1, 0, start < T, 0)
            for i in tl.static_range(GROUP):
                M, age, num, den, length = _add(
                    M, age, num, den, length, k[i], v[i], t + i, T, f[i], slope, ALIBI, DOCUMENTS)  # fmt: skip
                if not TOTALS:
                    reference = _output(
                        M, age, num, den, reference, center, q[i], t + i, T, f[i], slope, y_ptr, c_ptr, l_ptr, D,
                        features, exists, ALIBI, DOCUMENTS, GATED, KEEP)  # fmt: skip
            k, v, q, f = k_next, v_next, q_next, f_next
        if KEEP:
            to = r_ptr + (b * tl.cdiv(T, C) + chunk) * 2 * D + features
            tl.store(to, tl.where(reference <= EMPTY, 0.0, reference), exists)
            tl.store(to + D, center, exists)
    if TOTALS:
        _store_sums(sums_ptr + (b * (S + 1) + segment) * 5 * D, features, D, exists, M, age, num, den, length)
    if INITIAL and not TOTALS:
        faded = M - slope * age
        s = tl.exp2(((M - faded) - slope * age) * LOG2E)  # corrects the rounding of the new maximum
        kept = exists & (segment == S - 1)
        tl.store(to_m_ptr + b * KEYS + key_features, faded, kept)
        tl.store(to_n_ptr + b * D + features, num * s, kept)
        tl.store(to_d_ptr + b * KEYS + key_features, den * s, kept)


# ------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def _add_query(
    R, age, X, Z, length, g, q, c, log_den, t, T, first, center, slope, dq_ptr, step, features, exists,
    ALIBI: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    """Add the query of a token to the sums over its gradient / denominator (X), times its average (Z), which are
    relative to exp2(R - slope age), and store the gradient of the query.
    """
    g, c, inside = g.to(tl.float32), c.to(tl.float32), exists & (t < T)
    if DOCUMENTS:
        hidden = first > t
        g, c, log_den = tl.where(hidden, 0.0, g), tl.where(hidden, 0.0, c), tl.where(hidden, float("inf"), log_den)
    if GATED:
        gate = _divide(1.0, 1.0 + tl.exp2(-q.to(tl.float32) * LOG2E))
        if DOCUMENTS:
            gate = tl.where(hidden, 0.0, gate)
        gated = g * gate
        if not TOTALS:
            dq = (c + center) * (gated - gated * gate)
            tl.store(dq_ptr + (t * step + features), dq.to(dq_ptr.dtype.element_ty), inside)
        g = gated
    x = -log_den - R
    if ALIBI:
        one = tl.where(t < T, 1.0, 0.0)
        if DOCUMENTS:
            one = tl.where(hidden, 0.0, one)
        age += one
        length += one
        x += slope * age
    e, larger = tl.exp2(-tl.abs(x)), x > 0.0
    p, s = tl.where(larger, g, e * g), tl.where(larger, e, 1.0)
    if ALIBI:
        age = tl.where(larger, 0.0, age)
    return tl.where(larger, -log_den, R), age, X * s + p, Z * s + p * c, length


@triton.jit
def _key_gradients(
    R, age, X, Z, k, v, t, T, first, reference, center, slope, dk_ptr, dv_ptr, step, features, exists,
    ALIBI: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    k, at, inside = k.to(tl.float32), t * step + features, exists & (t < T)
    if DOCUMENTS:
        k = tl.where(first > t, -float("inf"), k)
    if ALIBI:
        R -= slope * age
    seen, w = k != -float("inf"), tl.exp2((k - reference) * LOG2E + R)  # X and Z may be NaN
    dv, dk = tl.where(seen, w * X, 0.0), tl.where(seen, w * ((v.to(tl.float32) - center) * X - Z), 0.0)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), inside)
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), inside)


@kernel
def walk_backward_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, slope_ptr, first_ptr, sums_ptr, dq_ptr, dk_ptr, dv_ptr,
    T, D, S, L, HEAD, gb, gt, qb, qt, kb, kt, vb, vt,
    ALIBI: tl.constexpr, KEY_PER_HEAD: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr,
    TOTALS: tl.constexpr, SEGMENTS: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a segment of L tokens or, with TOTALS, the sums over its queries. With a key per head,
    the gradient of a key has one entry per feature, which the caller sums.
    """
    pid, blocks = tl.program_id(0), tl.cdiv(D, BD)
    features = pid % blocks * BD + tl.arange(0, BD)
    segment, b = pid // blocks % S, (pid // blocks // S).to(tl.int64)
    if TOTALS:
        segment += 1
    exists, key_features = features < D, features
    if KEY_PER_HEAD:
        key_features = features // HEAD
    slope = 0.0
    if ALIBI:
        slope = tl.load(slope_ptr + features // HEAD, exists, 0.0) * LOG2E
    R, age = tl.zeros((BD,), tl.float32) + EMPTY, tl.zeros((BD,), tl.float32)
    X, Z, length = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), 0.0
    r_ptr += b * tl.cdiv(T, C) * 2 * D + features
    start, end = segment * L, tl.minimum(segment * L + L, T)
    last = tl.cdiv(end, C) - 1
    reference, center = tl.load(r_ptr + last * 2 * D, exists, 0.0), tl.load(r_ptr + last * 2 * D + D, exists, 0.0)
    if SEGMENTS and not TOTALS:
        for passed in range(S - 1 - segment):
            later = S - 1 - passed
            m, n, d, a, length = _load_sums(sums_ptr + (b * S + later) * 5 * D, features, D, exists)
            of_chunk = r_ptr + later * (L // C) * 2 * D
            m += (reference - tl.load(of_chunk, exists, 0.0)) * LOG2E
            d += (tl.load(of_chunk + D, exists, 0.0) - center) * n
            R, age, X, Z = _join(R, age, X, Z, m, n, d, a, length, slope, 1.0)
        length = 0.0
    row = b * T * D
    g_ptr, k_ptr, v_ptr, c_ptr, l_ptr = g_ptr + b * gb, k_ptr + b * kb, v_ptr + b * vb, c_ptr + row, l_ptr + row
    dk_ptr, dv_ptr = dk_ptr + row, dv_ptr + row
    if GATED:
        q_ptr, dq_ptr = q_ptr + b * qb, dq_ptr + row
    if DOCUMENTS:
        first_ptr += b * T
    none, f, t = -float("inf"), (T, T), last * C + C - PAIR
    g, c = _pair(g_ptr, t, T, gt, features, exists, 0.0), _pair(c_ptr, t, T, D, features, exists, 0.0)
    log_den, q, k, v = _pair(l_ptr, t, T, D, features, exists, float("inf")), g, g, g
    if GATED:
        q = _pair(q_ptr, t, T, qt, features, exists, 0.0)
    if not TOTALS:
        k, v = _pair(k_ptr, t, T, kt, key_features, exists, none), _pair(v_ptr, t, T, vt, features, exists, 0.0)
    if DOCUMENTS:
        f = _pair(first_ptr, t, T, 1, 0, start < T, 0)
    for back in range(0, last + 1 - start // C):
        chunk = last - back
        before, center_before = reference, center
        reference = tl.load(r_ptr + chunk * 2 * D, exists, 0.0)
        center = tl.load(r_ptr + chunk * 2 * D + D, exists, 0.0)
        R, Z = R + (reference - before) * LOG2E, Z + (center_before - center) * X
        for group in range(0, C, PAIR):
            t = chunk * C + C - PAIR - group
            g_next, c_next = (
                _pair(g_ptr, t - PAIR, T, gt, features, exists, 0.0),
                _pair(c_ptr, t - PAIR, T, D, features, exists, 0.0),
            )
            log_den_next, q_next = _pair(l_ptr, t - PAIR, T, D, features, exists, float("inf")), q
            k_next, v_next, f_next = k, v, f
            if GATED:
                q_next = _pair(q_ptr, t - PAIR, T, qt, features, exists, 0.0)
            if not TOTALS:
                k_next = _pair(k_ptr, t - PAIR, T, kt, key_features, exists, none)
                v_next = _pair(v_ptr, t - PAIR, T, vt, features, exists, 0.0)
            if DOCUMENTS:
                f_next = _pair(first_ptr, t - PAIR, T, 1, 0, start < T, 0)
            for i in tl.static_range(PAIR - 1, -1, -1):
                R, age, X, Z, length = _add_query(
                    R, age, X, Z, length, g[i], q[i], c[i], log_den[i], t + i, T, f[i], center, slope, dq_ptr, D,
                    features, exists, ALIBI, DOCUMENTS, GATED, TOTALS)  # fmt: skip
                if not TOTALS:
                    _key_gradients(
                        R, age, X, Z, k[i], v[i], t + i, T, f[i], reference, center, slope, dk_ptr, dv_ptr, D,
                        features, exists, ALIBI, DOCUMENTS)  # fmt: skip
                if DOCUMENTS:  # the queries of a document do not see the tokens before it
                    begins = f[i] == t + i
                    R, X, Z = tl.where(begins, EMPTY, R), tl.where(begins, 0.0, X), tl.where(begins, 0.0, Z)
                    length = tl.where(begins, float("inf"), length)
            g, q, k, v, c, log_den, f = g_next, q_next, k_next, v_next, c_next, log_den_next, f_next
    if TOTALS:
        _store_sums(sums_ptr + (b * (S + 1) + segment) * 5 * D, features, D, exists, R, age, X, Z, length)
