"""Triton kernels for Eq. 2 with w of all pairs as matrix products: w of a table, or of kernels on a grid.

With A = exp(w - largest w of the query), the sums of Eq. 2 are A X, where the columns of X are p v and p, with
p = exp(key - largest key of the row of the batch). All rows of a batch share w, so they are columns of one product per
head. A *unit* is a group of features of one row that share a key: its WIDTH columns are PART features, then p. The
gradients of keys and values come from A^T Z, where Z has the same columns, with the gradient of the averages divided
by the denominator; the gradient of w is Z X^T times A. X and Z are stored first, (h, T, columns), so that the loops of
the products only load, and A of a grid is loaded by the offset from query to key, so that it has no table.

The references are the largest key of a row and the largest w of a query, which no pair may have. A query whose
denominator is then less than `SMALLEST` may have lost terms, and a hidden NaN reaches every query through products
(0 * NaN is NaN). The kernels find both in their results, and compute such tiles again pair by pair.

`product_launch.py` launches these kernels and explains their sizes. Only the first axis of programs may be longer than
65,535, so it holds what grows with the batch.
"""

from .device import EMPTY, kernel, tl, triton


SMALLEST = tl.constexpr(1e-26)  # terms that underflow (below 1e-38) are negligible in larger denominators
ROWS = tl.constexpr(64)  # positions per program that stores operands, and per sum for positions outside the kernel
CAREFUL = tl.constexpr(16)  # positions that are computed pair by pair at once


# ------------------------------------------------------------------------------------------------------ columns and w


@triton.jit
def _units(tile, head, B, HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr,
           LARGE: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The rows of the batch, parts and keys of the units of a tile, (UNITS, 1), the features of their columns, (UNITS,
    WIDTH); which units and features exist; and which columns are those of p, (1, WIDTH).
    """
    unit, i = (tile * UNITS + tl.arange(0, UNITS))[:, None], tl.arange(0, WIDTH)[None, :]
    part = unit % PARTS
    key = head + 0 * part
    if not KEY_PER_HEAD:
        key = head * HEAD + part
    exists = unit < B * PARTS
    is_feature = exists & (i < PART) & (part * PART + i < HEAD)
    b = unit // PARTS
    if LARGE:  # offsets exceed 32 bits
        b, key, head = b.to(tl.int64), key.to(tl.int64), head.to(tl.int64)
    return b, part, key, head * HEAD + part * PART + i, exists, is_feature, i == PART


@triton.jit
def _relative_w(w_ptr, a_ptr, code_ptr, head, t, u, T, S, GRID: tl.constexpr, CAUSAL: tl.constexpr):
    """w between queries t and keys u, which are broadcast, minus the largest w of the query; -inf if hidden."""
    inside = (t < T) & (u < T)
    if GRID:
        offset = tl.load(code_ptr + u, u < T, 0) - tl.load(code_ptr + t, t < T, 0) + S // 2
        return tl.load(w_ptr + head.to(tl.int64) * S + offset, inside, -float("inf"))
    w = tl.load(w_ptr + (head * T + t).to(tl.int64) * T + u, inside, -float("inf"))
    if CAUSAL:
        w = tl.where(u <= t, w, -float("inf"))
    return w - tl.load(a_ptr + head * T + t, t < T, 0.0)


@triton.jit
def _is_finite(x):
    return x * 0.0 == 0.0


@triton.jit
def _kernel_w(kernels_ptr, head, offset, rows, columns, height, width, OUTSIDE: tl.constexpr):
    """w by offset, numbered as the codes of positions differ; -inf after the last offset."""
    down = offset // (2 * columns - 1) - (rows - 1) + height // 2
    right = offset % (2 * columns - 1) - (columns - 1) + width // 2
    inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    exists = offset < (2 * rows - 1) * (2 * columns - 1)
    w = tl.load(kernels_ptr + (head * height + down) * width + right, inside & exists, OUTSIDE)
    return tl.where(exists, w, -float("inf"))


@triton.jit
def grid_weights_kernel(
    kernels_ptr, e_ptr, w_ptr, a_ptr, code_ptr, flag_ptr, rows, columns, height, width, S, T, tiles,
    OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store w by offset, relative to the largest of its head, and its exponential; also the codes of positions."""
    head, block = tl.program_id(0), tl.program_id(1)
    top = EMPTY
    for start in range(0, S, BLOCK):
        w = _kernel_w(kernels_ptr, head, start + tl.arange(0, BLOCK), rows, columns, height, width, OUTSIDE)
        top = tl.maximum(top, tl.max(w, 0))
    offset = block * BLOCK + tl.arange(0, BLOCK)
    w = _kernel_w(kernels_ptr, head, offset, rows, columns, height, width, OUTSIDE) - top
    place = head.to(tl.int64) * S + offset
    tl.store(w_ptr + place, w, offset < S)
    tl.store(e_ptr + place, tl.exp(w).to(e_ptr.dtype.element_ty), offset < S)
    if block == 0:
        tl.store(a_ptr + head, top)
        for start in range(0, tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(flag_ptr + head * tiles + tile, tile * 0, tile < tiles)
    if head == 0:
        for start in range(block * BLOCK, T, tl.num_programs(1) * BLOCK):
            t = start + tl.arange(0, BLOCK)
            tl.store(code_ptr + t, t // columns * (2 * columns - 1) + t % columns, t < T)


@triton.jit
def table_weights_kernel(
    w_ptr, e_ptr, a_ptr, flag_ptr, T, TP, tiles, CAUSAL: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store A, padded by zeros to (h, TP, TP), and the largest w of each query."""
    head, block = tl.program_id(0), tl.program_id(1)
    t = block * BM + tl.arange(0, BM)
    top = tl.zeros((BM,), tl.float32) - float("inf")
    rows = (head * T + t).to(tl.int64)
    for start in range(0, T, BLOCK):
        u = start + tl.arange(0, BLOCK)
        seen = (t < T)[:, None] & (u < T)[None, :]
        if CAUSAL:
            seen &= u[None, :] <= t[:, None]
        top = tl.maximum(top, tl.max(tl.load(w_ptr + rows[:, None] * T + u[None, :], seen, -float("inf")), 1))
    top = tl.maximum(top, EMPTY)
    tl.store(a_ptr + rows, top, t < T)
    padded = (head * TP + t).to(tl.int64)
    for start in range(0, TP, BLOCK):
        u = start + tl.arange(0, BLOCK)
        seen = (t < T)[:, None] & (u < T)[None, :]
        if CAUSAL:
            seen &= u[None, :] <= t[:, None]
        w = tl.load(w_ptr + rows[:, None] * T + u[None, :], seen, -float("inf"))
        place = padded[:, None] * TP + u[None, :]
        tl.store(e_ptr + place, tl.exp(w - top[:, None]).to(e_ptr.dtype.element_ty), (u < TP)[None, :])
    if block == 0:
        for start in range(0, tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(flag_ptr + head * tiles + tile, tile * 0, tile < tiles)


# ------------------------------------------------------------------------------------------------ operands of products


@triton.jit
def transpose_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, to_a_ptr, to_b_ptr, to_c_ptr, to_d_ptr, N, T, M, BLOCK: tl.constexpr
):  # fmt: skip
    """Convert up to four tensors (N, T, M) to (M, T, N)."""
    across, blocks = tl.cdiv(M, BLOCK), tl.cdiv(M, BLOCK) * tl.cdiv(N, BLOCK)
    block = tl.program_id(0) % blocks
    n = (block // across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    m = (block % across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    t, inside = tl.program_id(0) // blocks, (n < N) & (m < M)
    place, to = (n * T + t) * M + m, (m * T + t) * N + n
    if a_ptr is not None:
        tl.store(to_a_ptr + to, tl.load(a_ptr + place, inside), inside)
    if b_ptr is not None:
        tl.store(to_b_ptr + to, tl.load(b_ptr + place, inside), inside)
    if c_ptr is not None:
        tl.store(to_c_ptr + to, tl.load(c_ptr + place, inside), inside)
    if d_ptr is not None:
        tl.store(to_d_ptr + to, tl.load(d_ptr + place, inside), inside)


@kernel
def reference_kernel(
    k_ptr, v_ptr, m_ptr, center_ptr, T, D, KD, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, COUNT: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Store the largest finite key, and the center from which averages are stored as offsets: the value of smallest
    magnitude between those of the first COUNT tokens. A large value that is hidden from a query does not move it.
    """
    blocks = tl.cdiv(D, BF)
    b, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    f = block * BF + tl.arange(0, BF)
    if block * BF < KD:
        top = tl.zeros((BF,), tl.float32) + EMPTY
        for start in range(0, T, BT):
            t = start + tl.arange(0, BT)
            inside = (t < T)[:, None] & (f < KD)[None, :]
            k = tl.load(k_ptr + (b * T + t[:, None]) * KD + f[None, :], inside, -float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(tl.where(k < float("inf"), k, EMPTY), 0))
        tl.store(m_ptr + b * KD + f, top, f < KD)
    key = f
    if KEY_PER_HEAD:
        key = f // HEAD
    t = tl.arange(0, BT)
    inside = (t < tl.minimum(T, COUNT))[:, None] & (f < D)[None, :]
    k = tl.load(k_ptr + (b * T + t[:, None]) * KD + key[None, :], inside, -float("inf")).to(tl.float32)
    v = tl.load(v_ptr + (b * T + t[:, None]) * D + f[None, :], inside, 0.0).to(tl.float32)
    seen = inside & (k > -float("inf")) & _is_finite(v)
    low, high = tl.min(tl.where(seen, v, float("inf")), 0), tl.max(tl.where(seen, v, -float("inf")), 0)
    center = tl.where(low <= high, tl.minimum(tl.maximum(low, 0.0), high), 0.0)
    tl.store(center_ptr + b * D + f, center, f < D)


@triton.jit
def _store_operand(x, x_ptr, sum_ptr, tile, n, head, TP, J, FAR: tl.constexpr, UNITS: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    t, column = n * ROWS + tl.arange(0, ROWS), tile * UNITS * WIDTH + tl.arange(0, UNITS * WIDTH)
    x = tl.reshape(x, (ROWS, UNITS * WIDTH))
    place = (head * TP + t).to(tl.int64)[:, None] * J + column[None, :]
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty))
    if FAR:
        tl.store(sum_ptr + (head * (TP // ROWS) + n).to(tl.int64) * J + column, tl.sum(x, 0))


@kernel
def key_operand_kernel(
    x_ptr, sum_ptr, k_ptr, v_ptr, m_ptr, center_ptr, B, T, TP, D, KD, J, vb, vt, vf, kb, kt, kf,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Store X: p (v - center) and p of ROWS keys; with FAR, also its sum over these keys."""
    n, tile, head = tl.program_id(0) % (TP // ROWS), tl.program_id(0) // (TP // ROWS), tl.program_id(1)
    b, _, key, feature, exists, is_feature, is_p = _units(
        tile, head, B, HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH)  # fmt: skip
    t = (n * ROWS + tl.arange(0, ROWS))[:, None, None]
    k = tl.load(k_ptr + (b * kb + key * kf) + t * kt, exists & (t < T), -float("inf")).to(tl.float32)
    v = tl.load(v_ptr + (b * vb + feature * vf) + t * vt, is_feature & (t < T), 0.0).to(tl.float32)
    p = tl.exp(k - tl.load(m_ptr + b * KD + key, exists, 0.0))
    v = tl.where(k > -float("inf"), v - tl.load(center_ptr + b * D + feature, is_feature, 0.0), 0.0)
    x = tl.where(is_feature, p * v, tl.where(is_p, p, 0.0))
    _store_operand(x, x_ptr, sum_ptr, tile, n, head, TP, J, FAR, UNITS, WIDTH)


@kernel
def query_operand_kernel(
    z_ptr, sum_ptr, g_ptr, q_ptr, c_ptr, l_ptr, center_ptr, flag_ptr, dq_ptr, B, T, TP, D, KD, J,
    vb, vt, vf, kb, kt, kf,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, FAR: tl.constexpr, GATED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store Z of ROWS queries and the gradient of the query, and flag tiles of BN columns that need care.

    Z is the gradient of the averages divided by the denominator, and, for each unit, minus its sum with the averages.
    """
    n, tile, head = tl.program_id(0) % (TP // ROWS), tl.program_id(0) // (TP // ROWS), tl.program_id(1)
    b, _, key, feature, exists, is_feature, is_p = _units(
        tile, head, B, HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH)  # fmt: skip
    t = (n * ROWS + tl.arange(0, ROWS))[:, None, None]
    inside = is_feature & (t < T)
    place = (b * vb + feature * vf) + t * vt
    x = tl.load(g_ptr + place, inside, 0.0).to(tl.float32)
    l_ptrs, has_query = l_ptr + (b * kb + key * kf) + t * kt, exists & (t < T)
    if GATED:
        gate = tl.sigmoid(tl.load(q_ptr + place, inside, 0.0).to(tl.float32))
        x *= gate
        # Both are read again below, which saves registers
        c, sees = tl.load(c_ptr + place, inside, 0.0), tl.load(l_ptrs, has_query, float("inf")) != float("inf")
        average = tl.where(sees, c + tl.load(center_ptr + b * D + feature, is_feature, 0.0), 0.0)
        tl.store(dq_ptr + place, (x * average * (1.0 - gate)).to(dq_ptr.dtype.element_ty), inside)
    log_den = tl.load(l_ptrs, has_query, float("inf"))
    x = tl.where(log_den != float("inf"), x * tl.exp(-log_den), 0.0)
    z = tl.sum(x * tl.load(c_ptr + place, inside, 0.0), 2)[:, :, None]
    # A sum that is not finite has a term that is not
    careful = ((t < T) & exists & ~((log_den >= -59.0) & _is_finite(z))).to(tl.int32)
    bad = tl.max(tl.max(tl.max(careful, 2), 1), 0)
    tl.store(flag_ptr + head * (J // BN) + tile * UNITS * WIDTH // BN, bad, bad > 0)
    _store_operand(tl.where(is_p, -z, x), z_ptr, sum_ptr, tile, n, head, TP, J, FAR, UNITS, WIDTH)


# ------------------------------------------------------------------------------------------------------------ products


@triton.jit
def _product(
    e_ptr, x_ptr, sum_ptr, a_ptr, code_ptr, head, block, tile, T, TP, J, S, reach,
    GRID: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr, GLOBAL: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A, or A^T if TRANSPOSED, times a tile of columns of X, for a block of rows: (BM, BN)."""
    row, column = block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    begin, end = 0, tl.cdiv(T, BK) * BK
    if FAR or not GLOBAL:  # outside the range of the kernel, w is 0 or -inf for all pairs
        begin = tl.maximum(block * BM - reach, 0) // ROWS * ROWS
        end = tl.minimum(end, tl.cdiv(block * BM + BM + reach, ROWS) * ROWS)
    if CAUSAL:
        if TRANSPOSED:
            begin = block * BM // BK * BK
        else:
            end = tl.minimum(end, block * BM + BM)
    k = begin + tl.arange(0, BK)
    x_ptrs = x_ptr + (head * TP + k).to(tl.int64)[:, None] * J + column[None, :]
    if GRID:
        own = tl.load(code_ptr + tl.minimum(row, T - 1))
        e_ptr += head.to(tl.int64) * S + S // 2
    elif TRANSPOSED:
        a_ptrs = e_ptr + (head * TP + k).to(tl.int64)[None, :] * TP + row[:, None]
    else:
        a_ptrs = e_ptr + (head * TP + row).to(tl.int64)[:, None] * TP + k[None, :]
    for start in range(begin, end, BK):
        if GRID:
            other = tl.load(code_ptr + tl.minimum(start + tl.arange(0, BK), T - 1))
            if TRANSPOSED:
                a = tl.load(e_ptr + (own[:, None] - other[None, :]))
            else:
                a = tl.load(e_ptr + (other[None, :] - own[:, None]))
        else:
            a = tl.load(a_ptrs)
            if TRANSPOSED:
                a_ptrs += BK * TP
            else:
                a_ptrs += BK
        acc = tl.dot(a, tl.load(x_ptrs), acc, input_precision=PRECISION)
        x_ptrs += BK * J
    if FAR:
        far = tl.zeros((BN,), tl.float32)
        for start in range(0, tl.cdiv(T, ROWS), 16):
            n = start + tl.arange(0, 16)
            outside = (n < tl.cdiv(T, ROWS)) & ((n * ROWS < begin) | (n * ROWS >= end))
            place = (head * (TP // ROWS) + n).to(tl.int64)[:, None] * J + column[None, :]
            far += tl.sum(tl.load(sum_ptr + place, outside[:, None], 0.0), 0)
        acc += far[None, :] * tl.exp(-tl.load(a_ptr + head))
    return acc


@kernel
def average_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, center_ptr, e_ptr, w_ptr, a_ptr, code_ptr, x_ptr, sum_ptr, y_ptr, c_ptr, l_ptr,
    B, T, TP, D, KD, J, vb, vt, vf, kb, kt, kf, S, reach,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
    GLOBAL: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the averages of a block of queries, times sigmoid(query) if GATED; with KEEP, also store them as offsets
    from `center`, and the log-denominators relative to the largest key and the largest w.
    """
    blocks, head = tl.cdiv(T, BM), tl.program_id(1)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    acc = _product(e_ptr, x_ptr, sum_ptr, a_ptr, code_ptr, head, block, tile, T, TP, J, S, reach,
                   GRID, CAUSAL, FAR, GLOBAL, False, BM, BN, BK, PRECISION)  # fmt: skip
    num = tl.reshape(acc, (BM, UNITS, WIDTH))
    b, part, key, f, exists, is_feature, is_p = _units(
        tile, head, B, HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH)  # fmt: skip
    den = tl.sum(tl.where(is_p, num, 0.0), 2)[:, :, None]
    t = (block * BM + tl.arange(0, BM))[:, None, None]
    top = tl.load(m_ptr + b * KD + key, exists, EMPTY)
    # A query without keys has the average 0, and a log-denominator of infinity
    inverse = tl.where(den == 0.0, 0.0, 1.0 / den)
    _store_averages(num * inverse, tl.where(den == 0.0, float("inf"), tl.log(den)), center_ptr, q_ptr, y_ptr, c_ptr,
                    l_ptr, t, b, part, key, f, exists, is_feature, T, D, vb, vt, vf, kb, kt, kf,
                    KEY_PER_HEAD, GATED, KEEP)  # fmt: skip
    sums = tl.sum(tl.where(is_feature, num, 0.0), 2)[:, :, None]
    # Without a finite key, there may be infinite ones, or NaN
    careful = (t < T) & exists & ((top > EMPTY) | (den != 0.0)) & ~((den >= SMALLEST) & _is_finite(sums))
    if tl.max(tl.max(tl.max(careful.to(tl.int32), 2), 1), 0) > 0:
        tl.debug_barrier()  # other threads stored these averages before
        for start in range(block * BM, tl.minimum(block * BM + BM, T), CAREFUL):
            _add_pairwise(
                q_ptr, k_ptr, v_ptr, m_ptr, center_ptr, w_ptr, a_ptr, code_ptr, y_ptr, c_ptr, l_ptr, start, tile, head,
                B, T, D, KD, S, reach, vb, vt, vf, kb, kt, kf,
                HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH, GRID, CAUSAL, GLOBAL, GATED, KEEP)  # fmt: skip


@triton.jit
def _store_averages(
    offset, log_den, center_ptr, q_ptr, y_ptr, c_ptr, l_ptr, t, b, part, key, f, exists, is_feature, T, D,
    vb, vt, vf, kb, kt, kf, KEY_PER_HEAD: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    inside = (t < T) & is_feature
    place = (b * vb + f * vf) + t * vt
    center = tl.load(center_ptr + b * D + f, is_feature, 0.0)
    y = tl.where(log_den == float("inf"), 0.0, offset + center)
    if GATED:
        y *= tl.sigmoid(tl.load(q_ptr + place, inside, 0.0).to(tl.float32))
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), inside)
    if KEEP:
        tl.store(c_ptr + place, offset, inside)
        stored = (t < T) & exists
        if KEY_PER_HEAD:
            stored &= part == 0
        tl.store(l_ptr + (b * kb + key * kf) + t * kt, log_den, stored)


@triton.jit
def _add_pairwise(
    q_ptr, k_ptr, v_ptr, m_ptr, center_ptr, w_ptr, a_ptr, code_ptr, y_ptr, c_ptr, l_ptr, start, tile, head,
    B, T, D, KD, S, reach, vb, vt, vf, kb, kt, kf,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr, CAUSAL: tl.constexpr, GLOBAL: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute the averages of CAREFUL queries key by key, relative to the largest term so far."""
    b, part, key, f, exists, is_feature, _ = _units(
        tile, head, B, HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH)  # fmt: skip
    center = tl.load(center_ptr + b * D + f, is_feature, 0.0)
    t = (start + tl.arange(0, CAREFUL))[:, None, None]
    largest = tl.zeros((CAREFUL, UNITS, 1), tl.float32) + EMPTY
    den = tl.zeros((CAREFUL, UNITS, 1), tl.float32)
    num = tl.zeros((CAREFUL, UNITS, WIDTH), tl.float32)
    begin, end = 0, T
    if not GLOBAL:  # outside the range of the kernel
        begin = tl.maximum(start - reach, 0)
        end = tl.minimum(start + reach + CAREFUL, T)
    for u in range(begin, end):
        w = _relative_w(w_ptr, a_ptr, code_ptr, head, t, u, T, S, GRID, CAUSAL)
        k = tl.load(k_ptr + (b * kb + key * kf) + u * kt, exists, -float("inf")).to(tl.float32)
        v = tl.load(v_ptr + (b * vb + f * vf) + u * vt, is_feature, 0.0).to(tl.float32)
        seen = (w != -float("inf")) & (k != -float("inf"))
        new = tl.maximum(largest, tl.where(seen, k + w, EMPTY))
        old, p = tl.exp(largest - new), tl.where(seen, tl.exp((k - new) + w), 0.0)
        num = num * old + tl.where(seen, p * (v - center), 0.0)
        den = den * old + p
        largest = new
    top = tl.load(m_ptr + b * KD + key, exists, EMPTY)
    inverse = tl.where(den == 0.0, 0.0, 1.0 / den)
    log_den = tl.where(den == 0.0, float("inf"), (largest - top) + tl.log(den))
    _store_averages(num * inverse, log_den, center_ptr, q_ptr, y_ptr, c_ptr, l_ptr, t, b, part, key, f, exists,
                    is_feature, T, D, vb, vt, vf, kb, kt, kf,
                    KEY_PER_HEAD, GATED, KEEP)  # fmt: skip


@kernel
def key_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, m_ptr, center_ptr, e_ptr, w_ptr, a_ptr, code_ptr, x_ptr, z_ptr,
    sum_ptr, flag_ptr, dk_ptr, dv_ptr, B, T, TP, D, KD, J, vb, vt, vf, kb, kt, kf, S, reach,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
    GLOBAL: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values; that of the keys for each unit, (B, T, h PARTS)."""
    blocks, head = tl.cdiv(T, BM), tl.program_id(1)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if tl.load(flag_ptr + head * (J // BN) + tile) > 0:
        for start in range(block * BM, tl.minimum(block * BM + BM, T), CAREFUL):
            _add_pairwise_to_keys(
                g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, m_ptr, center_ptr, w_ptr, a_ptr, code_ptr, dk_ptr, dv_ptr,
                start, tile, head, B, T, D, KD, S, vb, vt, vf, kb, kt, kf,
                HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH, GRID, CAUSAL, GATED)  # fmt: skip
    else:
        acc = _product(e_ptr, z_ptr, sum_ptr, a_ptr, code_ptr, head, block, tile, T, TP, J, S, reach,
                       GRID, CAUSAL, FAR, GLOBAL, True, BM, BN, BK, PRECISION)  # fmt: skip
        acc = tl.reshape(acc, (BM, UNITS, WIDTH))
        b, part, key, f, exists, is_feature, _ = _units(
            tile, head, B, HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH)  # fmt: skip
        u = block * BM + tl.arange(0, BM)
        x_place = (head * TP + u).to(tl.int64)[:, None] * J + tile * BN + tl.arange(0, BN)[None, :]
        x = tl.reshape(tl.load(x_ptr + x_place, (u < T)[:, None], 0.0).to(tl.float32), (BM, UNITS, WIDTH))
        dk, u = tl.sum(x * acc, 2)[:, :, None], u[:, None, None]
        k = tl.load(k_ptr + (b * kb + key * kf) + u * kt, (u < T) & exists, -float("inf")).to(tl.float32)
        p = tl.exp(k - tl.load(m_ptr + b * KD + key, exists, 0.0))
        _store_key_gradients(dk, p * acc, dk_ptr, dv_ptr, u, b, part, f, head, exists, is_feature, T, vb, vt, vf, HEAD,
                             PARTS)  # fmt: skip


@triton.jit
def _store_key_gradients(dk, dv, dk_ptr, dv_ptr, u, b, part, f, head, exists, is_feature, T, vb, vt, vf,
                         HEAD: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    tl.store(dv_ptr + (b * vb + f * vf) + u * vt, dv.to(dv_ptr.dtype.element_ty), (u < T) & is_feature)
    units = tl.num_programs(1) * PARTS
    place = (b * T * units + head * PARTS + part) + u * units
    if HEAD == 1:  # the gradient has the shape of the values, which may be transposed
        place = (b * vb + head.to(b.dtype) * vf) + u * vt
    tl.store(dk_ptr + place, dk.to(dk_ptr.dtype.element_ty), (u < T) & exists)


@triton.jit
def _query(g_ptr, q_ptr, c_ptr, l_ptr, t, b, key, f, exists, is_feature, vb, vt, vf, kb, kt, kf,
           GATED: tl.constexpr):  # fmt: skip
    """Load the gradient of the averages of queries t, the offsets of their averages, and their log-denominators."""
    place = b * vb + f * vf + t * vt
    g = tl.load(g_ptr + place, is_feature, 0.0).to(tl.float32)
    if GATED:
        g *= tl.sigmoid(tl.load(q_ptr + place, is_feature, 0.0).to(tl.float32))
    c = tl.load(c_ptr + place, is_feature, 0.0)
    return g, c, tl.load(l_ptr + b * kb + key * kf + t * kt, exists, float("inf"))


@triton.jit
def _add_pairwise_to_keys(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, m_ptr, center_ptr, w_ptr, a_ptr, code_ptr, dk_ptr, dv_ptr, start, tile,
    head, B, T, D, KD, S, vb, vt, vf, kb, kt, kf,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr, CAUSAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of CAREFUL keys and values query by query."""
    b, part, key, f, exists, is_feature, _ = _units(
        tile, head, B, HEAD, PARTS, PART, KEY_PER_HEAD, LARGE, UNITS, WIDTH)  # fmt: skip
    u = (start + tl.arange(0, CAREFUL))[:, None, None]
    k = tl.load(k_ptr + (b * kb + key * kf) + u * kt, (u < T) & exists, -float("inf")).to(tl.float32)
    k -= tl.load(m_ptr + b * KD + key, exists, 0.0)
    v = tl.load(v_ptr + (b * vb + f * vf) + u * vt, (u < T) & is_feature, 0.0).to(tl.float32)
    v -= tl.load(center_ptr + b * D + f, is_feature, 0.0)
    dv = tl.zeros((CAREFUL, UNITS, WIDTH), tl.float32)
    dk = tl.zeros((CAREFUL, UNITS, WIDTH), tl.float32)
    for t in range(0, T):
        w = _relative_w(w_ptr, a_ptr, code_ptr, head, t, u, T, S, GRID, CAUSAL)
        g, c, log_den = _query(g_ptr, q_ptr, c_ptr, l_ptr, t, b, key, f, exists, is_feature,
                               vb, vt, vf, kb, kt, kf, GATED)  # fmt: skip
        seen = (w != -float("inf")) & (k != -float("inf")) & (log_den != float("inf"))
        a = tl.where(seen, tl.exp(k + w - log_den) * g, 0.0)
        dv += a
        dk += tl.where(seen, a * (v - c), 0.0)
    dk = tl.sum(tl.where(is_feature, dk, 0.0), 2)[:, :, None]
    _store_key_gradients(dk, dv, dk_ptr, dv_ptr, u, b, part, f, head, exists, is_feature, T, vb, vt, vf, HEAD, PARTS)


# ------------------------------------------------------------------------------------------------------- gradient of w


@triton.jit
def _positions(pair, down, right, rows, columns, T, GRID: tl.constexpr, GC: tl.constexpr, BM: tl.constexpr):
    """The queries and keys of a pair of blocks, T where there is none: of a table, or of a grid in blocks of GC
    columns, with the key's block `down` and `right` of the query's.
    """
    m = tl.arange(0, BM)
    if not GRID:
        return tl.minimum(down * BM + m, T), tl.minimum(right * BM + m, T)
    across = tl.cdiv(columns, GC) - tl.abs(right)
    row = (pair // across + tl.maximum(-down, 0)) * (BM // GC) + m // GC
    column = (pair % across + tl.maximum(-right, 0)) * GC + m % GC
    below, beside = row + down * (BM // GC), column + right * GC
    t = tl.where((row < rows) & (column < columns), row * columns + column, T)
    return t, tl.where((below < rows) & (beside < columns), below * columns + beside, T)


@triton.jit
def weight_gradient_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, c_ptr, l_ptr, m_ptr, center_ptr, e_ptr, w_ptr, a_ptr, code_ptr, x_ptr, z_ptr, flag_ptr,
    dw_ptr, B, T, TP, D, KD, J, vb, vt, vf, kb, kt, kf, S, rows, columns, down_span, right_span, parts,
    HEAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEY_PER_HEAD: tl.constexpr, LARGE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr, CAUSAL: tl.constexpr, GATED: tl.constexpr,
    GC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one part of the gradient of w: of a tile of a table, or, summed over all pairs of blocks of a grid that
    are as far from each other, of a tile of offsets.
    """
    place, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, BM)
    if GRID:
        down, right = place // (2 * right_span + 1) - down_span, place % (2 * right_span + 1) - right_span
        pairs = (tl.cdiv(rows, BM // GC) - tl.abs(down)) * (tl.cdiv(columns, GC) - tl.abs(right))
        below = down * (BM // GC) + (m // GC)[None, :] - (m // GC)[:, None]
        beside = right * GC + (m % GC)[None, :] - (m % GC)[:, None]
        exists = (tl.abs(below) < rows) & (tl.abs(beside) < columns)
        e_ptr += head.to(tl.int64) * S + S // 2
        a = tl.load(e_ptr + (below * (2 * columns - 1) + beside), exists, 0.0).to(tl.float32)
        to = (part * tl.num_programs(2) + head).to(tl.int64) * tl.num_programs(0) + place
        to = to * BM * BM + m[:, None] * BM + m[None, :]
    else:
        down, right, pairs = place // tl.cdiv(T, BM), place % tl.cdiv(T, BM), 1
        t, u = down * BM + m, right * BM + m
        if CAUSAL:
            pairs = (right <= down).to(tl.int32)
        exists = (t < T)[:, None] & (u < T)[None, :]
        a = tl.load(e_ptr + (head * TP + t).to(tl.int64)[:, None] * TP + u[None, :]).to(tl.float32)
        to = ((part * tl.num_programs(2) + head).to(tl.int64) * T + t[:, None]) * T + u[None, :]
    acc = tl.zeros((BM, BM), tl.float32)
    each = tl.cdiv(J // BK, parts) * BK
    begin, end = part * each, tl.minimum(part * each + each, J)
    for pair in range(0, pairs):
        t, u = _positions(pair, down, right, rows, columns, T, GRID, GC, BM)
        column = begin + tl.arange(0, BK)
        z_ptrs = z_ptr + (head * TP + t).to(tl.int64)[:, None] * J + column[None, :]
        x_ptrs = x_ptr + (head * TP + u).to(tl.int64)[:, None] * J + column[None, :]
        for start in range(begin, end, BK):
            usable = tl.load(flag_ptr + head * (J // BN) + start // BN) == 0
            z = tl.load(z_ptrs, ((t < T) & usable)[:, None], 0.0)
            x = tl.load(x_ptrs, ((u < T) & usable)[:, None], 0.0)
            acc = tl.dot(z, tl.trans(x), acc, input_precision=PRECISION)
            z_ptrs += BK
            x_ptrs += BK
    acc = tl.where(a == 0.0, 0.0, acc * a)
    if part == 0:
        for tile in range(0, J // BN):
            if tl.load(flag_ptr + head * (J // BN) + tile) > 0:
                for pair in range(0, pairs):
                    t, u = _positions(pair, down, right, rows, columns, T, GRID, GC, BM)
                    w = _relative_w(w_ptr, a_ptr, code_ptr, head, t[:, None], u[None, :], T, S, GRID, CAUSAL)
                    for step in range(0, UNITS * PART):
                        unit = tile * UNITS + step // PART
                        of_head = unit % PARTS * PART + step % PART
                        b, key, f = (unit // PARTS).to(tl.int64), head, (head * HEAD + of_head).to(tl.int64)
                        if not KEY_PER_HEAD:
                            key = f
                        there = (unit < B * PARTS) & (of_head < HEAD)
                        of_query, known = there & (t < T), there & (u < T)
                        g, c, log_den = _query(g_ptr, q_ptr, c_ptr, l_ptr, t, b, key, f, of_query, of_query,
                                               vb, vt, vf, kb, kt, kf, GATED)  # fmt: skip
                        k = tl.load(k_ptr + b * kb + key * kf + u * kt, known, -float("inf")).to(tl.float32)
                        v = tl.load(v_ptr + b * vb + f * vf + u * vt, known, 0.0).to(tl.float32)
                        k -= tl.load(m_ptr + b * KD + key, there, 0.0)
                        v -= tl.load(center_ptr + b * D + f, there, 0.0)
                        seen = (w != -float("inf")) & (k != -float("inf"))[None, :]
                        seen &= (log_den != float("inf"))[:, None]
                        logit = tl.where(seen, k[None, :] + w - log_den[:, None], -float("inf"))
                        of_pair = tl.exp(logit) * g[:, None] * (v[None, :] - c[:, None])
                        acc += tl.where(seen, of_pair, 0.0)
    tl.store(dw_ptr + to, acc, exists)


@triton.jit
def kernel_gradient_kernel(
    dw_ptr, of_kernels_ptr, rows, columns, height, width, down_span, right_span, parts,
    GC: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of w over all pairs of positions with the same offset."""
    head, entry = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_row, of_column = entry // width - height // 2, entry % width - width // 2
    used = (entry < height * width) & (tl.abs(of_row) < rows) & (tl.abs(of_column) < columns)
    m = tl.arange(0, BM)[None, :]
    below, beside = m // GC + of_row[:, None], m % GC + of_column[:, None]
    # Sizes are added before a division, which would round a negative number up
    down = (below + rows * (BM // GC)) // (BM // GC) - rows
    right = (beside + columns * GC) // GC - columns
    other = (below - down * (BM // GC)) * GC + beside - right * GC
    counted = used[:, None] & (tl.abs(down) <= down_span) & (tl.abs(right) <= right_span)
    places = (2 * down_span + 1) * (2 * right_span + 1)
    place = (down + down_span) * (2 * right_span + 1) + right + right_span
    total = tl.zeros((BLOCK, BM), tl.float32)
    for part in range(0, parts):
        tile = (part * tl.num_programs(1) + head).to(tl.int64) * places + place
        total += tl.load(dw_ptr + tile * BM * BM + m * BM + other, counted, 0.0)
    tl.store(of_kernels_ptr + head * height * width + entry, tl.sum(total, 1), entry < height * width)
