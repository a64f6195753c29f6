"""Triton kernels for the operator `band`: w of a window from its factors, w = u v^T, and the gradients of the factors.

A program computes a tile of C tokens by the near chunks of keys. `causal_launch.py` launches these kernels.
"""

from .device import kernel, tl, triton


@triton.jit
def _rows(ptr, positions, P, F, column, head):
    """Load some columns of the rows of a factor, (h, P, F), as float32: 0 for positions that do not exist."""
    inside = ((positions >= 0) & (positions < P))[:, None] & (column < F)[None, :]
    return tl.load(ptr + (head * P + positions[:, None]) * F + column[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _at(t, lag, length, size, head, HEADS: tl.constexpr):
    """The places of tokens and lags in w, (length, h, s), and which of them exist."""
    return (t * HEADS + head) * size + (size - 1 - lag), (t >= 0) & (t < length) & (lag >= 0) & (lag < size)


@kernel
def band_kernel(
    u_ptr, v_ptr, w_ptr, starts_ptr, start, length, P, F, size, N,
    HEADS: tl.constexpr, NEAR: tl.constexpr, C: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    pid, i = tl.program_id(0), tl.arange(0, C)
    n, head, row = pid % N, (pid // N % HEADS).to(tl.int64), (pid // N // HEADS).to(tl.int64)
    w_ptr += row * length * HEADS * size
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    for j in range(NEAR + 1):
        product = tl.zeros((C, C), tl.float32)
        t, key = n * C + i, (n - j) * C + i
        for f in range(0, F, BF):
            column = f + tl.arange(0, BF)
            u, v = _rows(u_ptr, start + t, P, F, column, head), _rows(v_ptr, start + key, P, F, column, head)
            product += tl.dot(u, tl.trans(v), input_precision="tf32x3")
        place, exists = _at(t[:, None], t[:, None] - key[None, :], length, size, head, HEADS)
        tl.store(w_ptr + place, product, exists)


@kernel
def band_backward_kernel(
    g_ptr, x_ptr, to_ptr, start, length, P, F, size, N,
    HEADS: tl.constexpr, NEAR: tl.constexpr, OF_KEYS: tl.constexpr, C: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of u by v or, OF_KEYS, that of v by u, for a chunk of positions and BF columns."""
    pid, blocks = tl.program_id(0), tl.cdiv(F, BF)
    column, n, head = pid % blocks * BF + tl.arange(0, BF), pid // blocks % N, (pid // blocks // N).to(tl.int64)
    i, total = tl.arange(0, C), tl.zeros((C, BF), tl.float32)
    if OF_KEYS:
        n -= NEAR  # keys before the first token
    for j in range(NEAR + 1):
        if OF_KEYS:
            t, key = (n + j) * C + i, n * C + i
            place, exists = _at(t[None, :], t[None, :] - key[:, None], length, size, head, HEADS)
            x = _rows(x_ptr, start + t, P, F, column, head)
            exists &= (start + key >= 0)[:, None]
        else:
            t, key = n * C + i, (n - j) * C + i
            place, exists = _at(t[:, None], t[:, None] - key[None, :], length, size, head, HEADS)
            x = _rows(x_ptr, start + key, P, F, column, head)
            exists &= (start + key >= 0)[None, :]
        total += tl.dot(tl.load(g_ptr + place, exists, 0.0), x, input_precision="tf32x3")
    position = start + n * C + i
    inside = ((position >= 0) & (position < P) & (n * C + i < length))[:, None] & (column < F)[None, :]
    to = to_ptr + (head * P + position[:, None]) * F + column[None, :]
    tl.store(to, total.to(to_ptr.dtype.element_ty), inside)
