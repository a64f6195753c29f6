"""Triton kernels for bidirectional Eq. 2 with a table of all pairs: matrix products with exp(w), fused with the gate
and the quotient.

All rows of a batch share w, so each head is one product of a (T, T) table with (T, B d / h) columns: the features of
the head in all rows of the batch. A program computes C queries (or keys) for one block of columns. Tiles are computed
as in `tiles.py`: relative to their largest key, or key by key where that would lose terms.

Tensors are contiguous: query, value and gradient (B, T, d), key (B, T, d) or (B, T, h), w (h, T, T).
`bidirectional_launch.py` launches these kernels.
"""

from .tiles import (
    EMPTY,
    FULL,
    NOTHING,
    _add_queries,
    _add_tile,
    _add_to_table,
    _tile,
    tl,
    triton,
)


@triton.jit
def _columns(head, block, B, T, D, rows_of_row, HEADS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
             BD: tl.constexpr):  # fmt: skip
    """Offsets of the columns of a head in (B, T, d), in the keys and in (B, rows_of_row, d); which columns exist."""
    column = block * BD + tl.arange(0, BD)
    b, f = (column // HEAD).to(tl.int64), head * HEAD + column % HEAD
    features = b * T * D + f
    key_features = features
    if KEY_PER_HEAD:
        key_features = b * T * HEADS + head
    return features, key_features, b * rows_of_row * D + f, b < B


@triton.jit
def bidirectional_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, y_ptr, c_ptr, l_ptr, r_ptr,
    B, T, N, D, KD, columns,
    HEADS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the averages of C queries, times sigmoid(query) if GATED.

    With KEEP, also store what the backward pass needs: averages, log-denominators and their maxima.
    """
    pid = tl.program_id(0)
    head, n = pid // columns // N, pid // columns % N
    features, key_features, of_chunks, exists = _columns(
        head, pid % columns, B, T, D, N, HEADS, HEAD, KEY_PER_HEAD, BD)  # fmt: skip
    t = n * C + tl.arange(0, C)
    # Queries that exist see all keys
    last, nothing = tl.where(t < T, T - 1, T), t * 0
    rows = t.to(tl.int64) * T
    w_ptr += head.to(tl.int64) * T * T
    top = tl.zeros((C, BD), tl.float32) + EMPTY
    num = tl.zeros((C, BD), tl.float32)
    den = tl.zeros((C, BD), tl.float32)
    for tile in range(0, N):
        top, num, den = _add_tile(
            top, num, den, k_ptr, v_ptr, w_ptr, rows, nothing, 0.0, last, nothing, tile * C, key_features, features,
            exists, T, KD, D, T, FULL, C, False, False, PRECISION)  # fmt: skip
    empty = den == 0.0
    context = tl.where(empty, 0.0, num / tl.where(empty, 1.0, den))
    inside = (t < T)[:, None] & exists[None, :]
    y = context
    if GATED:
        y = context * tl.sigmoid(_tile(q_ptr, t, D, features, inside, 0.0))
    place = t[:, None].to(tl.int64) * D + features[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), inside)
    if KEEP:
        largest = tl.maximum(tl.max(tl.where(empty, -float("inf"), top), 0), EMPTY)
        log_den = top - largest[None, :] + tl.log(tl.where(empty, 1.0, den))
        tl.store(c_ptr + place, context, inside)
        tl.store(l_ptr + place, tl.where(empty, NOTHING, log_den), inside)
        tl.store(r_ptr + n * D + of_chunks, largest, exists)


@triton.jit
def bidirectional_key_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, dk_ptr, dv_ptr,
    B, T, N, D, KD, columns,
    HEADS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of C keys and values. The gradient of the keys has one entry per feature, (B, T, d); with
    one key per head, the caller sums it over the features.
    """
    pid = tl.program_id(0)
    head, n = pid // columns // N, pid // columns % N
    features, key_features, of_chunks, exists = _columns(
        head, pid % columns, B, T, D, N, HEADS, HEAD, KEY_PER_HEAD, BD)  # fmt: skip
    u = n * C + tl.arange(0, C)
    inside = (u < T)[:, None] & exists[None, :]
    k = _tile(k_ptr, u, KD, key_features, inside, -float("inf"))
    v = _tile(v_ptr, u, D, features, inside, 0.0)
    centre = tl.sum(v, 0) / tl.minimum(T - n * C, C)
    centre = tl.where(centre * 0.0 == 0.0, centre, 0.0)
    of_num = tl.zeros((C, BD), tl.float32)
    of_den = tl.zeros((C, BD), tl.float32)
    w_ptr += head.to(tl.int64) * T * T
    row = pid.to(tl.int64) * 0  # 0, because the columns already include the rows of the batch
    for tile in range(0, N):
        of_num, of_den = _add_queries(
            of_num, of_den, k, centre, g_ptr, q_ptr, c_ptr, l_ptr, r_ptr, w_ptr, 0.0, None, row, u, tile, features,
            tile * D + of_chunks, exists, T, D, 0, 0, T, T, C * T, 0, D, 0, D,
            FULL, C, False, False, GATED, False, False, PRECISION)  # fmt: skip
    place = u[:, None].to(tl.int64) * D + features[None, :]
    tl.store(dv_ptr + place, of_num.to(dv_ptr.dtype.element_ty), inside)
    tl.store(dk_ptr + place, ((v - centre[None, :]) * of_num - of_den).to(dk_ptr.dtype.element_ty), inside)


@triton.jit
def bidirectional_table_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, w_ptr, dw_ptr,
    B, T, N, D, KD, columns, each,
    HEADS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a part of the gradient of w for one tile of queries and keys: the sum over `each` blocks of columns."""
    pid = tl.program_id(0)
    head, n, back, part = pid // N // N % HEADS, pid // N % N, pid % N, pid // N // N // HEADS
    t, u = n * C + tl.arange(0, C), back * C + tl.arange(0, C)
    visible = (t < T)[:, None] & (u < T)[None, :]
    pairs = head.to(tl.int64) * T * T + t[:, None].to(tl.int64) * T + u[None, :]
    w = tl.load(w_ptr + pairs, visible, 0.0)
    total = tl.zeros((C, C), tl.float32)
    row = pid.to(tl.int64) * 0  # 0, because the columns already include the rows of the batch
    for step in range(each):
        features, key_features, of_chunks, exists = _columns(
            head, part * each + step, B, T, D, N, HEADS, HEAD, KEY_PER_HEAD, BD)  # fmt: skip
        total = _add_to_table(
            total, g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, r_ptr, row, t, back * C, w, visible, features,
            key_features, n * D + of_chunks, exists, T, D, 0, D, 0, D, 0, KD, 0, D,
            C, GATED, False, PRECISION)  # fmt: skip
    tl.store(dw_ptr + part.to(tl.int64) * HEADS * T * T + pairs, total, visible)
