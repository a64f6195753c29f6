"""Triton kernels for generation: one decoding step, and the cached state after a prompt.

The state of a layer is that of `caching_aft.py`: a window of the last W keys and values, (B, h, W, k) and
(B, h, W, c), and the sums over the tokens before it, (B, h, 1, c) and (B, h, 1, k). All tensors are contiguous and in
float32 (sums: or float64). k is 1 for one key per head, else c.

The sums may be float64, in which a step then adds to them: so they do not drift where tokens repeat.
`causal_launch.py` launches these kernels.
"""

from .device import EMPTY, LOG2E, kernel, tl, triton
from .walk_kernels import _join, _load_sums


@triton.jit
def _key_places(of_head, own, exists, first, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr):
    """Offsets of the keys of the features in the state, the stride between tokens, and a mask of the keys to store."""
    if KEY_PER_HEAD:
        return of_head + own * 0, 1, exists & (own == first)
    return of_head * HEAD + own, HEAD, exists


@kernel
def step_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, slope_ptr, keys_ptr, values_ptr, n_ptr, d_ptr, m_ptr, y_ptr,
    W, D, qb, kb, vb, wb,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, ALIBI: tl.constexpr,
    BIASED: tl.constexpr, GLOBAL: tl.constexpr, GATED: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute the average of one new token in each row, times sigmoid(query) if GATED, and add the token to the state.

    The window moves by one position. No program writes memory that another one reads: with one key per head, a single
    program processes all features of the head, and updates the key after the last of them. Within a program, a
    barrier separates loads and stores of the same addresses.
    """
    pid = tl.program_id(0)
    row, block, blocks = pid, 0, BLOCKS
    if not KEY_PER_HEAD:
        row, block, blocks = pid // BLOCKS, pid % BLOCKS, 1
    b, head = (row // HEADS).to(tl.int64), row % HEADS
    of_head = b * HEADS + head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slope_ptr + head)
    for step in range(blocks):
        own = (block + step) * BD + tl.arange(0, BD)
        features, exists = head * HEAD + own, own < HEAD
        key_place, key_step, key_kept = _key_places(of_head, own, exists, (BLOCKS - 1) * BD, HEAD, KEY_PER_HEAD)
        key_features = features
        if KEY_PER_HEAD:
            key_features = features * 0 + head
        key = tl.load(k_ptr + b * kb + key_features, exists, 0.0).to(tl.float32)
        value = tl.load(v_ptr + b * vb + features, exists, 0.0).to(tl.float32)
        value = tl.where(key > -float("inf"), value, 0.0)  # that of a hidden token may be NaN
        far = tl.load(m_ptr + key_place, exists, EMPTY).to(tl.float32)
        far_num = tl.load(n_ptr + of_head * HEAD + own, exists, 0.0)
        far_den = tl.load(d_ptr + key_place, exists, 0.0)
        leaving, leaving_value = key, value
        if BIASED:
            # The contributions of the window and of the token itself
            own_w = tl.load(w_ptr + b * wb + head * (W + 1) + W)
            top = tl.maximum(key + own_w, EMPTY)
            den = tl.exp((key - top) + own_w)  # top may be rounded
            num = den * value
            key_start, value_start = key_place + of_head * (W - 1) * key_step, (of_head * W) * HEAD + own
            leaving = tl.where(W > 0, tl.load(keys_ptr + key_start, exists & (W > 0), 0.0), key)
            leaving_value = tl.where(W > 0, tl.load(values_ptr + value_start, exists & (W > 0), 0.0), value)
            for start in range(0, W, BW):
                i = start + tl.arange(0, BW)
                inside = (i < W)[:, None] & exists[None, :]
                key_places = keys_ptr + key_start[None, :] + i[:, None] * key_step
                value_places = values_ptr + value_start[None, :] + i[:, None] * HEAD
                keys, values = tl.load(key_places, inside, -float("inf")), tl.load(value_places, inside, 0.0)
                w = tl.load(w_ptr + b * wb + head * (W + 1) + i, i < W, 0.0)
                new = tl.maximum(top, tl.max(keys + w[:, None], 0))
                old, p = tl.exp(top - new), tl.exp((keys - new[None, :]) + w[:, None])
                num = num * old + tl.sum(p * values, 0)
                den = den * old + tl.sum(p, 0)
                top = new
                tl.debug_barrier()
                moved = (i >= 1)[:, None]
                tl.store(key_places - key_step, keys, inside & moved & key_kept[None, :])
                tl.store(value_places - HEAD, values, inside & moved)
            tl.store(keys_ptr + key_start + (W - 1) * key_step, key, key_kept & (W > 0))
            tl.store(values_ptr + value_start + (W - 1) * HEAD, value, exists & (W > 0))
            if GLOBAL:
                new = tl.maximum(top, far)
                old, here = tl.exp(top - new), tl.exp(far - new)
                num = num * old + far_num.to(tl.float32) * here
                den = den * old + far_den.to(tl.float32) * here
        if GLOBAL:
            # The token that leaves the window is added to the sums; without a window, this is the new token itself
            new = tl.maximum(far - slope, leaving)
            old, here = tl.exp((far - new) - slope), tl.exp(leaving - new)  # far - slope may be rounded
            far_num, far_den = far_num * old + leaving_value * here, far_den * old + here
            tl.debug_barrier()
            tl.store(n_ptr + of_head * HEAD + own, far_num, exists)
            tl.store(d_ptr + key_place, far_den, key_kept)
            tl.store(m_ptr + key_place, new, key_kept)
        if not BIASED:
            num, den = far_num.to(tl.float32), far_den.to(tl.float32)
        y = num / tl.where(den == 0.0, 1.0, den)
        if GATED:
            y *= tl.sigmoid(tl.load(q_ptr + b * qb + features, exists, 0.0).to(tl.float32))
        tl.store(y_ptr + b * D + features, y.to(y_ptr.dtype.element_ty), exists)


@kernel
def state_kernel(
    k_ptr, v_ptr, sums_ptr, count_ptr, old_m_ptr, old_n_ptr, old_d_ptr, keys_ptr, values_ptr, n_ptr, d_ptr, m_ptr,
    T, D, S, W, past, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, GLOBAL: tl.constexpr,
    COUNTED: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store the state after T tokens: the last W keys and values, and the sums before them, which are those of the old
    state and of S segments.

    The first `past` tokens are the window of the old state. If COUNTED, only the first `count` of the other tokens of
    each row are real.
    """
    pid = tl.program_id(0)
    block, head, b = pid % BLOCKS, (pid // BLOCKS) % HEADS, (pid // BLOCKS // HEADS).to(tl.int64)
    of_head, own = b * HEADS + head, block * BD + tl.arange(0, BD)
    features, exists = head * HEAD + own, own < HEAD
    key_features = features
    if KEY_PER_HEAD:
        key_features = features * 0 + head
    key_place, key_step, key_kept = _key_places(of_head, own, exists, 0, HEAD, KEY_PER_HEAD)
    end = T
    if COUNTED:
        end = past + tl.load(count_ptr + b).to(tl.int32)
    for start in range(0, W, C):
        i = start + tl.arange(0, C)
        u = end - W + i
        there = (i < W)[:, None] & exists[None, :]
        keys = tl.load(
            k_ptr + b * kb + (u[:, None] * kt + key_features[None, :]), there & (u >= 0)[:, None], -float("inf")
        ).to(tl.float32)
        values = tl.load(v_ptr + b * vb + (u[:, None] * vt + features[None, :]), there & (u >= 0)[:, None], 0.0)
        values = tl.where(keys > -float("inf"), values, 0.0)
        to = keys_ptr + (key_place + of_head * (W - 1) * key_step)[None, :] + i[:, None] * key_step
        tl.store(to, keys, there & key_kept[None, :])
        tl.store(values_ptr + (of_head * W + i[:, None]) * HEAD + own[None, :], values.to(tl.float32), there)
    if GLOBAL:
        M, num = tl.load(old_m_ptr + key_place, exists, EMPTY), tl.load(old_n_ptr + of_head * HEAD + own, exists, 0.0)
        den = tl.load(old_d_ptr + key_place, exists, 0.0)
        for s in range(S):
            m, n, d, _, _ = _load_sums(sums_ptr + (b * (S + 1) + s) * 5 * D, features, D, exists)
            M, _, num, den = _join(M, 0.0, num, den, m, n, d, 0.0, 0.0, 0.0, LOG2E)
        tl.store(m_ptr + key_place, M, key_kept)
        tl.store(n_ptr + of_head * HEAD + own, num, exists)
        tl.store(d_ptr + key_place, den, key_kept)
