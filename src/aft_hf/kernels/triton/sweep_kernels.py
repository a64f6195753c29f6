"""Triton kernels for causal Eq. 2 with a window of position biases: sweeps over the chunks of a sequence.

A program computes all chunks of C tokens of a segment for one block of features, with the sums over the tokens before
the window in registers. The window enters as tiles A = exp(w - a_t) of C queries and C keys, of which NEAR chunks
before the queries' own one have biases; a_t is the largest w of query t. Tiles are made once per call.

Products are relative to the largest key m so far. This is exact unless a chunk has a key far above all before it.
Such chunks are flagged per feature, and `repair_kernel` and `repair_backward_kernel` compute them key by key. CHECK:
some queries do not see the first tokens (no global connectivity, or documents with other windows than of CARRY), so m
is the largest key of the window, and denominators tell which chunks to repair.

CARRY (NEAR = 1): the products of a chunk with the tile of the next one are computed while its factors are at hand.
With documents, m and the sums begin anew where a document begins; in such chunks, numerators and denominators tell
what to repair.

Kept for the backward pass are, as by `walk_kernels.py`, averages and base-2 logarithms of denominators, here without
a_t. `causal_launch.py` launches these kernels.
"""

from .device import EMPTY, LOG2E, _divide, _largest, _log2, _once, kernel, tl, triton
from .walk_kernels import _join, _load_sums, _store_sums


SAFE = tl.constexpr(60.0)  # the largest log-ratio between the reference of a product and its result
TINY = tl.constexpr(8.8e-27)  # exp(-SAFE)
GROUP = tl.constexpr(8)  # chunks of a program of the repair kernels, at most


@triton.jit
def _columns(BD: tl.constexpr):
    """The features of a block in the order of its columns (below)."""
    column = tl.arange(0, BD)
    return BD // 8 * (column % 8) + column // 8


@triton.jit
def _program(S, HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr):
    """The row, segment and head of a program, its first feature, its features in the order of columns, and which
    of them exist.
    """
    pid = tl.program_id(0)
    f, s, b = pid % (HEADS * BLOCKS), pid // (HEADS * BLOCKS) % S, (pid // (HEADS * BLOCKS) // S).to(tl.int64)
    head, at = f // BLOCKS, f % BLOCKS * BD
    own = at + _columns(BD)
    return b, s, head, head * HEAD + at, head * HEAD + own, own < HEAD


@triton.jit
def _dot(a, x, PRECISION: tl.constexpr):
    return tl.dot(a, x, input_precision=PRECISION)


@triton.jit
def _starts(first_ptr, b, t, T, DOCUMENTS: tl.constexpr):
    """The first token that each token sees; a later one for hidden tokens and tokens that do not exist."""
    if DOCUMENTS:
        return tl.load(first_ptr + b * T + t, (t >= 0) & (t < T), 2**30).to(tl.int32)
    return tl.where((t >= 0) & (t < T), 0, T)


# Forms of blocks of C tokens and BD features, (C, BD). As a factor or a result of matrix products, a lane of a warp
# loads the elements that it holds in a product, so nothing passes through shared memory, and column j holds the
# feature BD / 8 * (j % 8) + j / 8, so a lane loads neighbors. Factors have two forms, 1 and 2: Triton gives a lane one
# row at a time if numbers were loaded in 32 bits, and two if in 16.
RESULT = tl.constexpr(0)


@triton.jit
def _clamped(u, T):
    """Return u, or for a token that does not exist the first or the last one."""
    return tl.maximum(tl.minimum(u, T - 1), 0)


@triton.jit
def _tokens(t, C: tl.constexpr):
    """C tokens from t on as a warp loads those of a factor: (2, C / 16, 2, 1, 4, 1)."""
    u = t + tl.arange(0, 2)[:, None, None, None, None, None] + 2 * tl.arange(0, 4)[None, None, None, None, :, None]
    u += 16 * tl.arange(0, C // 16)[None, :, None, None, None, None]
    return u + 8 * tl.arange(0, 2)[None, None, :, None, None, None]


@triton.jit
def _order(FORM: tl.constexpr, C: tl.constexpr):
    """The tokens of the rows of a block."""
    i = tl.arange(0, C)
    if FORM == 1:
        return i // 16 * 16 + i // 4 % 2 * 8 + i % 4 * 2 + i // 8 % 2
    return i


@triton.jit
def _place(t, T, step, feature, HEAD: tl.constexpr, FORM: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Offsets of C tokens from t on and BD features from `feature` on, and which of them exist. The others have
    offsets of elements that exist, so loads need no mask, whose predicates and zeros would take many registers.
    """
    if FORM > 0:  # (2, C / 16, 2, 8, 4, BD / 8)
        u, j = _tokens(t, C), BD // 8 * tl.arange(0, 8)
        if BD == 8:
            j = _once(j)  # otherwise lanes would load neighbors only
        j = j[None, None, None, :, None, None] + tl.arange(0, BD // 8)[None, None, None, None, None, :]
    else:  # (C, BD)
        u, j = t + tl.arange(0, C)[:, None], tl.max_contiguous(tl.arange(0, BD)[None, :], (1, BD // 4))
    inside, u = u < T, _clamped(u, T)
    if HEAD % BD != 0:
        inside, j = inside & (feature % HEAD + j < HEAD), tl.minimum(j, HEAD - 1 - feature % HEAD)
    return u * step + (feature + j), inside


@triton.jit
def _block(x, FORM: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Return what was loaded from the offsets of `_place`, (C, BD)."""
    if FORM == 1:
        x = tl.reshape(tl.permute(x, (1, 0, 2, 4, 5, 3)), (C, BD))
    elif FORM == 2:
        x = tl.reshape(tl.permute(x, (1, 2, 4, 0, 5, 3)), (C, BD))
    else:
        x = tl.reshape(tl.permute(tl.reshape(x, (C, 8, BD // 8)), (0, 2, 1)), (C, BD))
    return x.to(tl.float32)


@triton.jit
def _load(ptr, t, T, step, feature, HEAD: tl.constexpr, FORM: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Load a block of C tokens from t on and BD features from `feature` on, (C, BD). Tokens that do not exist are
    copies of the first or the last one, and features copies of the last one.
    """
    at, _ = _place(t, T, step, feature, HEAD, FORM, C, BD)
    return _block(tl.load(ptr + at), FORM, C, BD)


@triton.jit
def _store(ptr, x, t, T, step, feature, HEAD: tl.constexpr, FORM: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Store a block, (C, BD)."""
    at, inside = _place(t, T, step, feature, HEAD, FORM, C, BD)
    x = x.to(ptr.dtype.element_ty)
    if FORM == 1:
        x = tl.permute(tl.reshape(x, (C // 16, 2, 2, 4, BD // 8, 8)), (1, 0, 2, 5, 3, 4))
    elif FORM == 2:
        x = tl.permute(tl.reshape(x, (C // 16, 2, 4, 2, BD // 8, 8)), (3, 0, 1, 5, 2, 4))
    else:
        x = tl.reshape(tl.permute(tl.reshape(x, (C, BD // 8, 8)), (0, 2, 1)), (C, BD))
    tl.store(ptr + at, x, inside)


@triton.jit
def _matrix(ptr, tile, j, there, FORM: tl.constexpr, NEAR: tl.constexpr, C: tl.constexpr):
    """Load matrix j of a tile, (C, C), which multiplies a factor, or 0 unless `there` (None: always load it).
    `_store_matrix` stored it in the order in which the lanes of a warp hold it.
    """
    at = ptr + (tile * (NEAR + 1) + j) * (C * C) + tl.arange(0, C * C)
    x = tl.reshape(tl.load(at, there, None if there is None else 0.0), (C // 16, C // 16, 2, 8, 4, 2, 2))
    if FORM == 1:
        return tl.reshape(tl.permute(x, (0, 6, 3, 1, 2, 5, 4)), (C, C))
    return tl.reshape(tl.permute(x, (0, 6, 3, 1, 5, 4, 2)), (C, C))


@triton.jit
def _store_matrix(ptr, tile, j, x, there, NEAR: tl.constexpr, C: tl.constexpr):
    at = ptr + (tile * (NEAR + 1) + j) * (C * C) + tl.arange(0, C * C)
    x = tl.permute(tl.reshape(x, (C // 16, 2, 8, C // 16, 2, 4, 2)), (0, 3, 6, 2, 5, 4, 1))
    tl.store(at, tl.reshape(x, (C * C,)), there)


@triton.jit
def _of_features(ptr, feature, HEAD: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Load a number for each feature from `feature` on, as a result with the same rows, (C, BD)."""
    j = BD // 4 * tl.arange(0, 4)[:, None] + tl.arange(0, BD // 4)[None, :]
    if HEAD % BD != 0:
        j = tl.minimum(j, HEAD - 1 - feature % HEAD)
    x = tl.load(ptr + feature + (j[None, :, :] + 0 * tl.arange(0, 8)[:, None, None]))
    x = tl.permute(tl.reshape(x, (8, 4, 2, BD // 8)), (0, 3, 1, 2))
    x = tl.broadcast_to(tl.reshape(x, (1, 8, BD)), (C // 8, 8, BD))
    return tl.reshape(x, (C, BD))


@triton.jit
def _transposed(x, C: tl.constexpr, BD: tl.constexpr):
    """Return the transpose of a result, (BD, C), as a second factor; `tl.trans` would pass through shared memory."""
    return tl.reshape(tl.permute(tl.reshape(x, (C // 8, 8, BD)), (2, 0, 1)), (BD, C))


@triton.jit
def _rows(x, C: tl.constexpr, BD: tl.constexpr):
    """Return numbers of the rows of a result, which each of 4 lanes loads, (C / 8, 8, 4), as a result, (C, BD)."""
    x = tl.reshape(tl.broadcast_to(x[:, :, :, None], (C // 8, 8, 4, BD // 4)), (C // 8, 8, 4, BD // 8, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (C, BD))


@triton.jit
def _rank(i, C: tl.constexpr):
    """The place at which numbers of the queries of a tile are stored: those that a lane needs are neighbors."""
    return i % 8 * (C // 8) + i // 8


@triton.jit
def _of_queries(ptr, tile, FORM: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Load a number for each query of a tile, (C, BD)."""
    ptr, lane, column = ptr + tile * C, tl.arange(0, 4), tl.arange(0, 8)[:, None]
    if FORM > 0:  # (2, C / 8, 8, 4)
        u = C // 8 * (tl.arange(0, 2)[:, None, None, None] + 2 * lane[None, None, None, :]) + 0 * column[None, None]
        x = tl.load(ptr + (u + tl.arange(0, C // 8)[None, :, None, None]))
        x = tl.reshape(x, (2, C // 16, 2, 8, 4, 1))
        return _block(tl.broadcast_to(x, (2, C // 16, 2, 8, 4, BD // 8)), FORM, C, BD)
    x = tl.load(ptr + ((C // 8 * column + 0 * lane[None, :])[:, :, None] + tl.arange(0, C // 8)[None, None, :]))
    return _rows(tl.permute(x, (2, 0, 1)), C, BD)


@triton.jit
def _load_keys(k_ptr, t, T, kt, feature, FORM: tl.constexpr, KEY_PER_HEAD: tl.constexpr, HEAD: tl.constexpr,
               C: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Load keys, (C, BD)."""
    if KEY_PER_HEAD and FORM > 0:  # each lane loads what it needs
        u = _tokens(t, C) + 0 * tl.arange(0, 8)[None, None, None, :, None, None]
        k = tl.load(k_ptr + (_clamped(u, T) * kt + feature // HEAD))
        return _block(tl.broadcast_to(k, (2, C // 16, 2, 8, 4, BD // 8)), FORM, C, BD)
    elif KEY_PER_HEAD:
        u = t + (8 * tl.arange(0, C // 8)[:, None] + tl.arange(0, 8)[None, :])
        u = _clamped(u, T)[:, :, None] + 0 * tl.arange(0, 4)[None, None, :]
        return _rows(tl.load(k_ptr + (u * kt + feature // HEAD)).to(tl.float32), C, BD)
    else:
        return _load(k_ptr, t, T, kt, feature, HEAD, FORM, C, BD)


@triton.jit
def _keys(k_ptr, v_ptr, t, T, kt, vt, feature, start, center, FORM: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
          HEAD: tl.constexpr, DOCUMENTS: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Load keys, and values relative to a center: -inf and 0 for hidden tokens, whose values may be NaN. Without
    DOCUMENTS, copies of the last token are not hidden: no query sees them.
    """
    k = _load_keys(k_ptr, t, T, kt, feature, FORM, KEY_PER_HEAD, HEAD, C, BD)
    v = _load(v_ptr, t, T, vt, feature, HEAD, FORM, C, BD)
    if DOCUMENTS:
        k = tl.where((start > t + tl.arange(0, C))[:, None], -float("inf"), k)
    return k, tl.where(k > -float("inf"), v - center, 0.0)


@triton.jit
def _center(k_ptr, v_ptr, t, T, kt, vt, feature, seen, FORM: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
            HEAD: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The number nearest to 0 between the smallest and the largest value of the tokens that are seen, of those that
    are finite and not hidden by a key of -inf. An outlier as a center would cost all other values digits.
    """
    k = _load_keys(k_ptr, t, T, kt, feature, FORM, KEY_PER_HEAD, HEAD, C, BD)
    v = _load(v_ptr, t, T, vt, feature, HEAD, FORM, C, BD)
    counts = seen[:, None] & (tl.abs(v) < float("inf")) & (k > -float("inf"))
    low, high = tl.min(tl.where(counts, v, float("inf")), 0), tl.max(tl.where(counts, v, -float("inf")), 0)
    return tl.where(low <= high, tl.minimum(tl.maximum(low, 0.0), high), 0.0)


@triton.jit
def _carried(k_ptr, v_ptr, t, T, kt, vt, feature, start, center, M, FORM: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
             HEAD: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The largest key so far, M or one of a chunk, and the sums and factors of the chunk relative to it."""
    k, v = _keys(
        k_ptr, v_ptr, t, T, kt, vt, feature, start, center, FORM, KEY_PER_HEAD, HEAD, True, C, BD)  # fmt: skip
    M = tl.maximum(M, tl.max(k, 0))
    p = tl.exp2((k - M[None, :]) * LOG2E)
    pv = p * v
    return M, tl.sum(p, 0), tl.sum(pv, 0), p, pv


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


@triton.jit
def _flag(flag_ptr, r_ptr, chunk, D, bad, features, exists, KEEP: tl.constexpr):
    """Store which features of a chunk need care."""
    tl.store(flag_ptr + chunk * D + features, bad.to(tl.int8), exists)
    if KEEP:
        tl.store(r_ptr + (chunk * 3 + 2) * D + features, bad.to(tl.float32), exists)


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
    tl.store(top_ptr + pid.to(tl.int64) * C + _rank(i, C), top)
    tl.store(far_ptr + pid.to(tl.int64) * C + _rank(i, C), tl.where(outside, tl.exp2(-top * LOG2E), -1.0))
    tl.store(spread_ptr + pid, tl.maximum(tl.max(top - low), 0.0))
    for j in range(NEAR + 1):
        u = (n - NEAR + j) * C + i
        w = _biases(w_ptr, t[:, None], u[None, :], start[:, None], positions, past, size, w_position, w_base, GLOBAL)
        a = tl.exp2((w - top[:, None]) * LOG2E).to(a_ptr.dtype.element_ty)
        _store_matrix(a_ptr, pid.to(tl.int64), j, a, None, NEAR, C)
        if BACKWARD:
            of_keys = (b * HEADS + head) * NT + n - NEAR + j
            _store_matrix(b_ptr, of_keys, NEAR - j, tl.trans(a), n - NEAR + j >= 0, NEAR, C)


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
    FACTOR: tl.constexpr = 1 if CARRY and not DOCUMENTS and v_ptr.dtype.element_ty == tl.float32 else 2
    b, s, head, feature, features, exists = _program(S, HEADS, BLOCKS, HEAD, BD)
    keys = features * 0 + head if KEY_PER_HEAD else features
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
        seen = t >= 0  # copies of the last token change nothing
        if DOCUMENTS:  # only a document that began before has a center here
            seen = _starts(first_ptr, b, t, T, DOCUMENTS) < first_chunk * C
        center = _center(k_ptr, v_ptr, first_chunk * C, T, kt, vt, feature, seen, FACTOR, KEY_PER_HEAD, HEAD, C, BD)
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
            k_ptr, v_ptr, (first_chunk - 1) * C, T, kt, vt, feature, start, center, far_top, FACTOR, KEY_PER_HEAD,
            HEAD, C, BD)  # fmt: skip
        a = _matrix(a_ptr, tiles + tl.minimum(first_chunk, NT - 1), 0, None, FACTOR, NEAR, C)
        of_last_num, of_last_den = _dot(a, last_pv, PRECISION), _dot(a, last_p, PRECISION)
    elif not CHECK:  # the largest key that all queries of the first chunk see
        for j in tl.range(NEAR):
            u = (first_chunk - NEAR + j) * C
            k = _load_keys(k_ptr, u, T, kt, feature, FACTOR, KEY_PER_HEAD, HEAD, C, BD)
            M = tl.maximum(M, tl.max(tl.where((u + i >= 0)[:, None], k, -float("inf")), 0))
    if not CHECK:
        M = tl.where(M > EMPTY, M, tl.maximum(known, EMPTY))
    for n in tl.range(first_chunk, end, disable_licm=True):  # hoisted addresses would take too many registers
        t = n * C + i
        start = _starts(first_ptr, b, t, T, DOCUMENTS)
        oldest, begin, kept, begins = (n - NEAR) * C, 0, True, False
        if CARRY and DOCUMENTS:
            begin = tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1).to(tl.int32)
            begins, kept = begin >= n * C, tl.load(first_ptr + b * T + n * C) < n * C
            # A document may not change the rounding of another one
            moved = tl.where(begins, center, 0.0)
            center, M, far_top = center - moved, tl.where(kept, M, EMPTY), tl.where(kept, far_top, EMPTY)
            N0, D0 = tl.where(kept, N0 + moved * D0, 0.0), tl.where(kept, D0, 0.0)
        elif DOCUMENTS or not GLOBAL:
            seen = (start <= t) & (t < T)
            mine = _center(k_ptr, v_ptr, n * C, T, kt, vt, feature, seen, FACTOR, KEY_PER_HEAD, HEAD, C, BD)
            if DOCUMENTS:  # the tokens that join the sums before the window: those of the document of the last one
                begin = tl.load(first_ptr + b * T + tl.minimum(oldest + C, T) - 1, n >= NEAR, T).to(tl.int32)
                kept = begin < oldest
                # A document may not change the rounding of another one
                whole = tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1) <= tl.maximum(oldest, 0)
                mine = tl.where(whole, mine, 0.0)
            N0, center = N0 + (center - mine) * D0, mine
        k, v = _keys(
            k_ptr, v_ptr, n * C, T, kt, vt, feature, start, center, FACTOR, KEY_PER_HEAD, HEAD, DOCUMENTS, C,
            BD)  # fmt: skip
        own = tl.max(k, 0) if CARRY else _largest(k + v * 0.0)
        m = tl.maximum(M, own)
        if CHECK:
            m = tl.maximum(far_top, tl.max(k, 0))
            if not GLOBAL:
                m = tl.maximum(tl.max(k, 0), EMPTY)
            for j in tl.range(NEAR):
                near = _starts(first_ptr, b, oldest + j * C + i, T, DOCUMENTS)
                x, _ = _keys(
                    k_ptr, v_ptr, oldest + j * C, T, kt, vt, feature, near, center, FACTOR, KEY_PER_HEAD, HEAD,
                    DOCUMENTS, C, BD)  # fmt: skip
                m = tl.maximum(m, tl.max(x, 0))
        tile = tiles + tl.minimum(n, NT - 1)
        num, den = tl.zeros((C, BD), tl.float32), tl.zeros((C, BD), tl.float32)
        top0, num0, den0 = far_top, N0, D0
        if CARRY:
            r, far = tl.exp2((M - m) * LOG2E), _of_queries(far_ptr, tile, RESULT, C, BD)
            if DOCUMENTS:
                far = tl.maximum(far, 0.0)
            fade = tl.exp2((far_top - M) * LOG2E)
            N0, D0, far_top = N0 * fade, D0 * fade, M
            num, den = far * N0[None, :] + of_last_num, far * D0[None, :] + of_last_den
            if DOCUMENTS:
                num += of_last_den * moved[None, :]
            num, den = num * r[None, :], den * r[None, :]
        elif GLOBAL:
            r, far = tl.exp2((far_top - m) * LOG2E), _of_queries(far_ptr, tile, RESULT, C, BD)
            num, den = far * (N0 * r)[None, :], far * (D0 * r)[None, :]
            if CHECK:  # the sums may be NaN, which rows of another document do not see
                num, den = tl.where(far >= 0.0, num, 0.0), tl.where(far >= 0.0, den, 0.0)
        p = tl.exp2((k - m[None, :]) * LOG2E)
        pv, k2, v2, u = p * v, k, v, t
        if not CHECK:
            # All queries see a key of M, if there is one, so the largest term of each is at least exp(M - m - spread);
            # without CARRY, `own` is NaN if a key or value is
            bad = ~((M > EMPTY) & (own - M <= SAFE) & (m - M + tl.load(spread_ptr + tile) <= SAFE))
        if CARRY:
            N0, D0 = N0 + joining_pv, D0 + joining_p
            joining_p, joining_pv = tl.sum(p, 0), tl.sum(pv, 0)
            bad |= joining_pv * 0.0 != 0.0  # a value or key that is not finite, which earlier queries do not see
        if not CHECK and not DOCUMENTS:
            _flag(flag_ptr, r_ptr, b * N + n, D, bad, features, exists, KEEP)
        if CHECK or (begins | (tl.max((bad & exists).to(tl.int32)) > 0)):  # for the repair
            state_at = state_ptr + (b * N + n) * 4 * D + features
            tl.store(state_at, top0, exists)
            tl.store(state_at + D, num0, exists)
            tl.store(state_at + 2 * D, den0, exists)
            tl.store(state_at + 3 * D, center, exists)
        if NEAR > 0:
            own_p, own_pv = p, pv
        if not CARRY and NEAR > 0:
            u = oldest + i
            k2, v2 = _keys(
                k_ptr, v_ptr, oldest, T, kt, vt, feature, _starts(first_ptr, b, u, T, DOCUMENTS), center, FACTOR,
                KEY_PER_HEAD, HEAD, DOCUMENTS, C, BD)  # fmt: skip
            p = tl.exp2((k2 - m[None, :]) * LOG2E)
            pv = p * v2
        if GLOBAL and not CARRY:
            k2 = tl.where((u >= begin)[:, None], k2, -float("inf"))
            far_top = tl.maximum(tl.where(kept, far_top, EMPTY), tl.max(k2, 0))
            fade, joining = tl.exp2((top0 - far_top) * LOG2E), tl.exp2((k2 - far_top[None, :]) * LOG2E)
            N0 = tl.where(kept, N0 * fade, 0.0) + tl.sum(tl.where((u >= begin)[:, None], joining * v2, 0.0), 0)
            D0 = tl.where(kept, D0 * fade, 0.0) + tl.sum(joining, 0)
        if not CARRY:
            a = _matrix(a_ptr, tile, 0, None, FACTOR, NEAR, C)
            num += _dot(a, pv, PRECISION)
            den += _dot(a, p, PRECISION)
        for j in tl.range(1, NEAR):
            near = _starts(first_ptr, b, oldest + j * C + i, T, DOCUMENTS)
            k2, v2 = _keys(
                k_ptr, v_ptr, oldest + j * C, T, kt, vt, feature, near, center, FACTOR, KEY_PER_HEAD, HEAD, DOCUMENTS,
                C, BD)  # fmt: skip
            p = tl.exp2((k2 - m[None, :]) * LOG2E)
            a = _matrix(a_ptr, tile, j, None, FACTOR, NEAR, C)
            num += _dot(a, p * v2, PRECISION)
            den += _dot(a, p, PRECISION)
        if NEAR > 0:
            a = _matrix(a_ptr, tile, NEAR, None, FACTOR, NEAR, C)
            num += _dot(a, own_pv, PRECISION)
            den += _dot(a, own_p, PRECISION)
        hidden, largest, next_top, next_center = ((start > t) | (t >= T))[:, None], m, m, center
        if CHECK:
            bad = _lost(num, den, hidden)
        if begins:  # a document begins in the chunk, and only the last one counts later
            bad = _lost(num, den, hidden)
            num, den = tl.where(hidden, 0.0, num), tl.where(hidden, 1.0, den)
            seen = (t >= begin) & (t < T)
            next_center = _center(k_ptr, v_ptr, n * C, T, kt, vt, feature, seen, FACTOR, KEY_PER_HEAD, HEAD, C, BD)
            next_top, joining_p, joining_pv, own_p, own_pv = _carried(
                k_ptr, v_ptr, n * C, T, kt, vt, feature, tl.where(t >= begin, start, T), next_center,
                tl.zeros((BD,), tl.float32) + EMPTY, FACTOR, KEY_PER_HEAD, HEAD, C, BD)  # fmt: skip
            largest, far_top = tl.where(next_top > EMPTY, next_top, m), next_top
            N0, D0 = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        if CHECK or DOCUMENTS:
            _flag(flag_ptr, r_ptr, b * N + n, D, bad, features, exists, KEEP)
        gate = 1.0
        some = den != 0.0
        if CHECK:  # without it, chunks with visible queries that see no key are bad
            some &= ~hidden
            num, den = tl.where(some, num, 0.0), tl.where(some, den, 1.0)
        if GATED:
            gate = 1.0 + tl.exp2(_load(q_ptr, n * C, T, qt, feature, HEAD, RESULT, C, BD) * -LOG2E)
        if KEEP:
            average, log_den = _divide(num, den), _log2(den)
            # Finite, since not all queries may see an infinite key
            largest = tl.where(tl.abs(largest) < -EMPTY, largest, 0.0)
            if CHECK:
                log_den = tl.where(some, log_den, float("inf"))
            elif DOCUMENTS:  # relative to a key that all later queries of the last document see
                log_den = tl.where(hidden, float("inf"), log_den + ((m - largest) * LOG2E)[None, :])
            _store(c_ptr, average, n * C, T, D, feature, HEAD, RESULT, C, BD)
            _store(l_ptr, log_den, n * C, T, D, feature, HEAD, RESULT, C, BD)
            to = r_ptr + (b * N + n) * 3 * D + features
            tl.store(to, largest, exists)
            tl.store(to + D, _once(center), exists)  # otherwise all chunks would hold it in another layout
            y = _divide(average + _once(center)[None, :], gate)
        else:
            y = _divide(num + _once(center)[None, :] * den, den * gate)
        if CHECK:
            y = tl.where(some, y, 0.0)
        elif DOCUMENTS:  # the query of a hidden token may be NaN
            y = tl.where(hidden, 0.0, y)
        _store(y_ptr, y, n * C, T, D, feature, HEAD, RESULT, C, BD)
        if CARRY:
            a = _matrix(a_ptr, tiles + tl.minimum(n + 1, NT - 1), 0, None, FACTOR, NEAR, C)
            of_last_num, of_last_den = _dot(a, own_pv, PRECISION), _dot(a, own_p, PRECISION)
        M, center = next_top, next_center


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
    b, group, head, _, features, exists = _program(tl.cdiv(N, each), HEADS, BLOCKS, HEAD, BD)
    keys = features * 0 + head if KEY_PER_HEAD else features
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
                q = tl.load(q_ptr + b * qb + (t[:, None] * qt + features[None, :]), inside, 0.0).to(tl.float32)
                y = tl.where(some, y * tl.sigmoid(q), 0.0)
            tl.store(y_ptr + b * T * D + at, y.to(y_ptr.dtype.element_ty), inside)
            if KEEP:
                tile = (b * rows * HEADS + head) * NT + tl.minimum(n, NT - 1)
                largest = tl.load(r_ptr + (b * N + n) * 3 * D + features, bad, 0.0)
                if not GLOBAL or (DOCUMENTS and NEAR != 1):
                    largest = tl.max(tl.where(some & inside, top, EMPTY), 0)
                    largest = tl.where(tl.abs(largest) < -EMPTY, largest, 0.0)
                    tl.store(r_ptr + (b * N + n) * 3 * D + features, largest, bad)
                log_den = (top - largest[None, :]) - tl.load(top_ptr + tile * C + _rank(i, C))[:, None]
                log_den = log_den * LOG2E + tl.log2(den)
                tl.store(c_ptr + b * T * D + at, c, inside)
                tl.store(l_ptr + b * T * D + at, tl.where(some, log_den, float("inf")), inside)


# ------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def _queries(
    g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, dq_ptr, n, T, D, gt, qt, feature, features, exists, center,
    GATED: tl.constexpr, CHECK: tl.constexpr, QUERY: tl.constexpr, HEAD: tl.constexpr, FORM: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Load, of the queries of a chunk: the gradient of the averages; the averages, relative to the given center;
    log-denominators; and the reference of these. With QUERY, store the gradient of the queries (the gate). Without a
    center, the averages stay relative to that of the chunk, and no reference is loaded.
    """
    reference, own_center = center, center
    if center is not None:
        known = exists & (n * C < T)
        reference = tl.load(r_ptr + n * 3 * D + features, known, -EMPTY)
        own_center = tl.load(r_ptr + n * 3 * D + D + features, known, 0.0)
    g = _load(g_ptr, n * C, T, gt, feature, HEAD, FORM, C, BD)
    c = _load(c_ptr, n * C, T, D, feature, HEAD, FORM, C, BD)
    log_den = _load(l_ptr, n * C, T, D, feature, HEAD, FORM, C, BD)
    log_den = tl.where((n * C + _order(FORM, C) < T)[:, None], log_den, float("inf"))
    if GATED:
        gate = _divide(1.0, 1.0 + tl.exp2(_load(q_ptr, n * C, T, qt, feature, HEAD, FORM, C, BD) * -LOG2E))
        g *= gate
    if CHECK:  # a hidden token may have a gradient that is NaN
        g = tl.where(log_den != float("inf"), g, 0.0)
    if QUERY and GATED:
        dq = (c + own_center[None, :]) * (g - g * gate)
        if CHECK:
            dq = tl.where(log_den != float("inf"), dq, 0.0)
        _store(dq_ptr, dq, n * C, T, D, feature, HEAD, FORM, C, BD)
    if not QUERY and center is not None:
        c += (own_center - center)[None, :]
    return g, c, log_den, reference


@triton.jit
def _far_queries(
    R, X, Z, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, top_ptr, far_ptr, tile, n, T, D, gt, qt, feature, features, exists,
    reference, center, GATED: tl.constexpr, CHECK: tl.constexpr, HEAD: tl.constexpr, FORM: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the queries of a chunk to the sums over those that see all keys before the near chunks."""
    g, c, log_den, of_queries = _queries(
        g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, n, T, D, gt, qt, feature, features, exists, center, GATED, CHECK,
        False, HEAD, FORM, C, BD)  # fmt: skip
    log_den += _of_queries(top_ptr, tile, FORM, C, BD) * LOG2E
    shift = (reference - of_queries) * LOG2E
    if CHECK:
        seen = _of_queries(far_ptr, tile, FORM, C, BD) >= 0.0
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
def _far_sums(g, c, log_den, of_queries, below, top_ptr, far_ptr, tile, DOCUMENTS: tl.constexpr, FORM: tl.constexpr,
              C: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Sum the queries of a chunk, loaded before, for the keys up to a chunk with the reference `below`. They see the
    key of this reference, so no exponential exceeds 1, and the sums are finite unless a query is not. DOCUMENTS: only
    those that see it.
    """
    shift = (below - of_queries) * LOG2E
    x = tl.exp2(shift[None, :] - (log_den + _of_queries(top_ptr, tile, FORM, C, BD) * LOG2E)) * g
    if DOCUMENTS:
        seen = _of_queries(far_ptr, tile, FORM, C, BD) >= 0.0
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
    FACTOR: tl.constexpr = 1 if ONE_CENTER and v_ptr.dtype.element_ty == tl.float32 else 2
    b, s, head, feature, features, exists = _program(S, HEADS, BLOCKS, HEAD, BD)
    if TOTALS:
        s += 1
    row = b * T * D
    g_ptr, k_ptr, v_ptr, c_ptr, l_ptr = g_ptr + b * gb, k_ptr + b * kb, v_ptr + b * vb, c_ptr + row, l_ptr + row
    dk_ptr, dv_ptr, r_ptr = dk_ptr + row, dv_ptr + row, r_ptr + b * N * 3 * D
    if GATED:
        q_ptr, dq_ptr = q_ptr + b * qb, dq_ptr + row
    tiles, i = (b * rows * HEADS + head) * NT, tl.arange(0, C)
    # Sums over later queries of g / denominator (X), times the average relative to `center` (Z); relative to
    # exp2(R) / exp(reference)
    R, X, Z = tl.zeros((BD,), tl.float32) + EMPTY, tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    first_chunk, end, length = s * each, tl.minimum(s * each + each, N), 0.0
    last_tile = tl.where(NT < N, NT - 1 - NEAR, N)
    reference = tl.load(r_ptr + (end - 1) * 3 * D + features, exists, 0.0)
    below = tl.load(r_ptr + (end - 2) * 3 * D + features, exists & (end > 1), EMPTY)
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
            g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, end, T, D, gt, qt, feature, features, exists, center, GATED,
            MASK, False, HEAD, FACTOR, C, BD)  # fmt: skip
        g, c = tl.where(end < N, g, 0.0), tl.where(end < N, c, 0.0)  # a copy of the last query may be NaN
        x_next = tl.exp2(-log_den) * g
        center_next = center
        flag_next = tl.load(r_ptr + end * 3 * D + 2 * D + features, exists & (end < N), 0.0)
        far_x, far_xc = _far_sums(
            g, c, log_den, of_next, below, top_ptr, far_ptr, tiles + tl.minimum(end, NT - 1), DOCUMENTS, FACTOR, C,
            BD)  # fmt: skip
        a = _matrix(b_ptr, tiles + tl.minimum(end - 1, last_tile), 1, end < N, FACTOR, NEAR, C)
        later, later_c = _dot(a, x_next, PRECISION), _dot(a, x_next * c, PRECISION)
    for back in range(0, end - first_chunk):
        n = end - 1 - back
        u = n * C + i
        lower = tl.load(r_ptr + (n - 2) * 3 * D + features, exists & (n > 1), EMPTY)
        if not ONE_CENTER:
            old_center, center = center, tl.load(r_ptr + n * 3 * D + D + features, exists, 0.0)
            Z += (old_center - center) * X
            if CARRY:
                far_xc += (old_center - center) * far_x
        begin = 0  # the document of the last key, which the queries after the window see
        if DOCUMENTS:
            begin = tl.load(first_ptr + b * T + tl.minimum(n * C + C, T) - 1).to(tl.int32)
        if not TOTALS:
            tile = tiles + tl.minimum(n, last_tile)
            g, c, log_den, _ = _queries(
                g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, dq_ptr, n, T, D, gt, qt, feature, features, exists, center,
                GATED, MASK, True, HEAD, FACTOR, C, BD)  # fmt: skip
            lowest, bad = tl.zeros((BD,), tl.float32), features < 0
            if CHECK:
                rho = _largest(-log_den + (g + c) * 0.0)
                lowest = tl.maximum(rho, EMPTY)
            else:
                flag = tl.load(r_ptr + n * 3 * D + 2 * D + features, exists, 0.0)
                bad = flag > 0.0
            x = tl.exp2((-log_den - lowest[None, :]) if CHECK else -log_den) * g
            if CARRY:
                far_own, far_own_c = _far_sums(
                    g, c, log_den, reference, lower, top_ptr, far_ptr, tiles + tl.minimum(n, NT - 1), DOCUMENTS,
                    FACTOR, C, BD)  # fmt: skip
                bad |= (flag_next > 0.0) | ((far_own + far_own_c) * 0.0 != 0.0)  # a query that is not finite
            of_num, of_den = tl.zeros((C, BD), tl.float32), tl.zeros((C, BD), tl.float32)
            if CARRY:  # the queries of the chunk after this one, whose products were computed with it
                fade = tl.exp2(_shift(reference, of_next))
                of_num, of_den = later * fade[None, :], later_c * fade[None, :]
                if not ONE_CENTER:
                    of_den += later * (fade * (center_next - center))[None, :]
            if CARRY and DOCUMENTS:  # later queries see the last document of the chunk
                seen = (u >= begin)[:, None]
                of_num += tl.where(seen, X[None, :], 0.0)
                of_den += tl.where(seen, Z[None, :], 0.0)
            elif not CHECK:
                of_num, of_den = of_num + X[None, :], of_den + Z[None, :]
            xc = x * c
            a = _matrix(b_ptr, tile, 0, None, FACTOR, NEAR, C)
            of_num, of_den = of_num + _dot(a, x, PRECISION), of_den + _dot(a, xc, PRECISION)
            k, v = _keys(
                k_ptr, v_ptr, n * C, T, kt, vt, feature, _starts(first_ptr, b, u, T, DOCUMENTS), center, RESULT,
                KEY_PER_HEAD, HEAD, DOCUMENTS, C, BD)  # fmt: skip
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
                for j in tl.range(1, tl.minimum(NEAR, N - 1 - n) + 1):
                    g, c, log_den, of_queries = _queries(
                        g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, None, n + j, T, D, gt, qt, feature, features, exists,
                        center, GATED, CHECK, False, HEAD, FACTOR, C, BD)  # fmt: skip
                    a = _matrix(b_ptr, tile, j, None, FACTOR, NEAR, C)
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
                        bad |= tl.load(r_ptr + (n + j) * 3 * D + 2 * D + features, exists, 0.0) > 0.0
            if not CHECK:
                e = tl.exp2(k)
                of_num, of_den = of_num * e, of_den * e
            if not CHECK and (DOCUMENTS or not CARRY):
                bad |= tl.max(((of_num + of_den) * 0.0 != 0.0).to(tl.int32), 0) > 0
            _store(dv_ptr, of_num, n * C, T, D, feature, HEAD, RESULT, C, BD)
            _store(dk_ptr, v * of_num - of_den, n * C, T, D, feature, HEAD, RESULT, C, BD)
            tl.store(flag_ptr + (b * N + n) * D + features, bad.to(tl.int8), exists)
            if tl.max((bad & exists).to(tl.int32)) > 0:
                state_at = state_ptr + (b * N + n) * 4 * D + features
                if CHECK:
                    tl.store(state_at, top0, exists)
                elif DOCUMENTS:
                    tl.store(state_at, tl.zeros((BD,), tl.float32), exists)
                tl.store(state_at + D, num0, exists)
                tl.store(state_at + 2 * D, den0, exists)
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
        elif GLOBAL:  # noqa: SIM102
            if n + NEAR < N:
                R, X, Z = _far_queries(
                    R, X, Z, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, top_ptr, far_ptr, tiles + tl.minimum(n + NEAR, NT - 1),
                    n + NEAR, T, D, gt, qt, feature, features, exists, below, center, GATED, CHECK, HEAD, FACTOR, C,
                    BD)  # fmt: skip
        if CARRY:
            a = _matrix(b_ptr, tiles + tl.maximum(tl.minimum(n - 1, last_tile), 0), 1, None, FACTOR, NEAR, C)
            later, later_c, of_next = _dot(a, x, PRECISION), _dot(a, xc, PRECISION), reference
            if not ONE_CENTER:
                center_next = center
            flag_next = flag
        reference, below = below, lower
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
    b, group, head, feature, features, exists = _program(tl.cdiv(N, each), HEADS, BLOCKS, HEAD, BD)
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
                k_ptr + b * kb, v_ptr + b * vb, n * C, T, kt, vt, feature, _starts(first_ptr, b, u, T, DOCUMENTS),
                center, RESULT, KEY_PER_HEAD, HEAD, DOCUMENTS, C, BD)  # fmt: skip
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
                w = (w - tl.load(top_ptr + tile * C + _rank(t % C, C)))[:, None]
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
def _of_pairs(
    b, n, first_key, head, block, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, first_ptr, B, T, N, D, gb, gt, qb,
    qt, kb, kt, vb, vt, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, CHECK: tl.constexpr, DOCUMENTS: tl.constexpr,
    GATED: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Load what some features of a row add to the gradient of w between a chunk of queries and KEYS chunks of keys, in
    the form of results; the largest exponent of a query's factor; and which products may overflow.
    """
    feature, own = head * HEAD + block * BD, block * BD + _columns(BD)
    features, exists, b = head * HEAD + own, (own < HEAD) & (b < B), tl.minimum(b, B - 1)
    row, k_ptr, v_ptr, r_ptr = b * T * D, k_ptr + b * kb, v_ptr + b * vb, r_ptr + (b * N + n) * 3 * D
    if GATED:
        q_ptr += b * qb
    g, c, log_den, _ = _queries(
        g_ptr + b * gb, q_ptr, c_ptr + row, l_ptr + row, r_ptr, None, n, T, D, gt, qt, feature, features, exists,
        None, GATED, True, False, HEAD, RESULT, C, BD)  # fmt: skip
    reference = _of_features(r_ptr, feature, HEAD, C, BD)
    center, i = _of_features(r_ptr + D, feature, HEAD, C, BD), tl.arange(0, C)
    k, v = _keys(
        k_ptr, v_ptr, first_key, T, kt, vt, feature, _starts(first_ptr, b, first_key + i, T, DOCUMENTS), center,
        RESULT, KEY_PER_HEAD, HEAD, DOCUMENTS, C, BD)  # fmt: skip
    k2, v2 = k, v
    if KEYS == 2:
        k2, v2 = _keys(
            k_ptr, v_ptr, first_key + C, T, kt, vt, feature, _starts(first_ptr, b, first_key + C + i, T, DOCUMENTS),
            center, RESULT, KEY_PER_HEAD, HEAD, DOCUMENTS, C, BD)  # fmt: skip
    k, k2, lowest = (k - reference) * LOG2E, (k2 - reference) * LOG2E, -0.0
    if CHECK:
        rho = _largest(-log_den + (g + c) * 0.0)
        lowest = tl.maximum(rho, EMPTY)[None, :]
        good = (_largest(k + v * 0.0) + rho <= SAFE * LOG2E) & (_largest(k2 + v2 * 0.0) + rho <= SAFE * LOG2E)
        bad = (exists & ~good)[None, :]
    else:  # the forward pass has flagged features whose products overflow for gradients up to 1e12
        bad = exists[None, :] & (_of_features(r_ptr + 2 * D, feature, HEAD, C, BD) != 0.0)
    return b, features, exists, center, reference, g, c, log_den, k, v, k2, v2, lowest, bad


@triton.jit
def _add_products(total, x, xc, k, v, lowest, good, PRECISION: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    e = tl.where(good, tl.exp2(k + lowest), 0.0)
    ev = tl.where(good, e * v, 0.0)
    return total + _dot(x, _transposed(ev, C, BD), PRECISION) + _dot(-xc, _transposed(e, C, BD), PRECISION)


@triton.jit
def _store_by_lag(dw_ptr, a_ptr, tile, j, total, t, u, T, size, w_base, dw_token, NEAR: tl.constexpr, C: tl.constexpr):
    """Store exp(w) times the sums of products, by query and lag."""
    a, lag = _matrix(a_ptr, tile, j, j <= NEAR, 2, NEAR, C), t[:, None] - u[None, :]
    there = (lag >= 0) & (lag < size) & (t < T)[:, None] & (u >= 0)[None, :]
    to = dw_ptr + (t[:, None].to(tl.int64) * dw_token + (w_base - lag))
    tl.store(to, tl.where(a != 0.0, a * total, 0.0), there)


@kernel
def window_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, a_ptr, top_ptr, first_ptr, dw_ptr,
    B, T, N, NT, D, each, positions, past, size, w_row, w_position, w_head, w_base, rows, dw_part, dw_token, dw_head,
    gb, gt, qb, qt, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, NEAR: tl.constexpr,
    GLOBAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of w between a chunk of queries and KEYS (1 or 2) chunks of keys, summed over the
    features of a head and `each` rows. Entries are stored by query and lag.
    """
    CHECK: tl.constexpr = not GLOBAL or (DOCUMENTS and NEAR != 1)
    TILES: tl.constexpr = NEAR // KEYS + 1
    pid = tl.program_id(0)
    j, n, head = pid % TILES * KEYS, pid // TILES % N, pid // TILES // N % HEADS
    part = (pid // TILES // N // HEADS).to(tl.int64)
    begin, i = (n - NEAR + j) * C, tl.arange(0, C)
    t, total, total2, careful = n * C + i, tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32), 0
    for step in tl.range(each * BLOCKS, disable_licm=True):
        _, _, exists, _, _, g, c, log_den, k, v, k2, v2, lowest, bad = _of_pairs(
            part * each + step // BLOCKS, n, begin, head, step % BLOCKS, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr,
            r_ptr, first_ptr, B, T, N, D, gb, gt, qb, qt, kb, kt, vb, vt, HEAD, KEY_PER_HEAD, CHECK, DOCUMENTS, GATED,
            KEYS, C, BD)  # fmt: skip
        good = exists[None, :] & ~bad
        x = tl.where(good, tl.exp2(-(log_den + lowest)) * g, 0.0)
        xc = tl.where(good, x * c, 0.0)
        total = _add_products(total, x, xc, k, v, lowest, good, PRECISION, C, BD)
        if KEYS == 2:
            total2 = _add_products(total2, x, xc, k2, v2, lowest, good, PRECISION, C, BD)
        careful += tl.max(tl.max(bad.to(tl.int32), 1), 0)
    # Where rows have a w of their own, `each` is 1
    b = part * each
    tile, w_ptr = (b * rows * HEADS + head) * NT + tl.minimum(n, NT - 1), w_ptr + b * w_row + head * w_head
    dw_ptr += part * dw_part + head * dw_head
    _store_by_lag(dw_ptr, a_ptr, tile, j, total, t, begin + i, T, size, w_base, dw_token, NEAR, C)
    if KEYS == 2:
        _store_by_lag(dw_ptr, a_ptr, tile, j + 1, total2, t, begin + C + i, T, size, w_base, dw_token, NEAR, C)
    if careful > 0:  # key by key, the features whose products may overflow
        start = _starts(first_ptr, b, t, T, DOCUMENTS)
        top = tl.load(top_ptr + tile * C + _rank(i, C))
        for step in range(each * BLOCKS):
            row, features, _, center, reference, g, c, log_den, _, _, _, _, _, bad = _of_pairs(
                part * each + step // BLOCKS, n, begin, head, step % BLOCKS, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr,
                r_ptr, first_ptr, B, T, N, D, gb, gt, qb, qt, kb, kt, vb, vt, HEAD, KEY_PER_HEAD, CHECK, DOCUMENTS,
                GATED, KEYS, C, BD)  # fmt: skip
            keys = features * 0 + head if KEY_PER_HEAD else features
            of_bad = tl.max(bad.to(tl.int32), 0) > 0
            tl.debug_barrier()  # other threads have stored what is loaded
            for u in range(tl.maximum(begin, 0), tl.minimum(begin + KEYS * C, T)):
                there = of_bad
                if DOCUMENTS:
                    there = there & (tl.load(first_ptr + row * T + u) <= u)
                key = tl.load(k_ptr + row * kb + (u * kt + keys), there, -float("inf")).to(tl.float32)
                value = tl.load(v_ptr + row * vb + (u * vt + features), there, 0.0).to(tl.float32)
                w = _biases(w_ptr, t, u, start, positions, past, size, w_position, w_base, GLOBAL)
                seen = (w != -float("inf"))[:, None] & (key != -float("inf"))[None, :] & (log_den != float("inf"))
                exponent = ((key[None, :] - reference) + (w - top)[:, None]) * LOG2E - log_den
                of_key = tl.exp2(tl.where(seen, exponent, EMPTY)) * g
                of_key = tl.sum(tl.where(seen, of_key * ((value[None, :] - center) - c), 0.0), 1)
                to = dw_ptr + (t.to(tl.int64) * dw_token + (w_base - (t - u)))
                inside = (t >= u) & (t - u < size) & (t < T)
                before = tl.load(to, inside, 0.0)
                tl.debug_barrier()  # other threads may load it, too
                tl.store(to, before + of_key, inside)
