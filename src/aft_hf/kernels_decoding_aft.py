"""Triton kernels for the state of generation: one decoded token, and the state that a prompt leaves.

The state of a layer is that of `caching_aft.py`: the window of the last W keys and values, (B, h, W, k) and
(B, h, W, c), and sums over what lies before it, (B, h, 1, c) and (B, h, 1, k), all contiguous and in float32. k is 1
where heads have one key, else c.

`mixing_triton_decoding_aft.py` launches these. The file can be imported without Triton.
"""

from .kernels_aft import ALIBI, EMPTY, _key_features, _tile, tl, triton


@triton.jit
def _key_places(of_head, own, exists, first, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr):
    """Where the state has the keys of features: the first one's place, the way to the next token's, what to store."""
    if KEY_PER_HEAD:
        return of_head + own * 0, 1, exists & (own == first)
    return of_head * HEAD + own, HEAD, exists


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, slope_ptr, keys_ptr, values_ptr, n_ptr, d_ptr, m_ptr, length_ptr, y_ptr,
    W, D, qb, kb, vb, wb,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, MODE: tl.constexpr,
    BIASED: tl.constexpr, ALONE: tl.constexpr, GATED: tl.constexpr, COUNTED: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The average of one new token in each row, times the sigmoid of its query; the state takes the token in.

    The window moves by one place. Programs share no memory that changes: where a head has one key, one program takes
    all its features, and changes the key after the last of them. Within a program, a barrier stands between the loads
    and the stores of the same places.
    """
    pid = tl.program_id(0)
    row, block, blocks = pid, 0, BLOCKS
    if not KEY_PER_HEAD:
        row, block, blocks = pid // BLOCKS, pid % BLOCKS, 1
    b, head = (row // HEADS).to(tl.int64), row % HEADS
    of_head = b * HEADS + head
    slope = 0.0
    if MODE == ALIBI:
        slope = tl.load(slope_ptr + head)
    for step in range(blocks):
        own = (block + step) * BD + tl.arange(0, BD)
        features, exists = head * HEAD + own, own < HEAD
        key_place, key_step, key_kept = _key_places(of_head, own, exists, (BLOCKS - 1) * BD, HEAD, KEY_PER_HEAD)
        key = tl.load(k_ptr + b * kb + _key_features(features, head, KEY_PER_HEAD), exists, 0.0).to(tl.float32)
        value = tl.load(v_ptr + b * vb + features, exists, 0.0).to(tl.float32)
        far = tl.load(m_ptr + key_place, exists, EMPTY)
        far_num = tl.load(n_ptr + of_head * HEAD + own, exists, 0.0)
        far_den = tl.load(d_ptr + key_place, exists, 0.0)
        leaving, leaving_value = key, value
        if BIASED:
            # What the window and the token itself give to the sums
            own_w = tl.load(w_ptr + b * wb + head * (W + 1) + W)
            top = key + own_w
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
            if not ALONE:
                new = tl.maximum(top, far)
                old, here = tl.exp(top - new), tl.exp(far - new)
                num, den = num * old + far_num * here, den * old + far_den * here
        if not ALONE:
            # What leaves the window goes into the sums; where there is none, that is the token itself
            new = tl.maximum(far - slope, leaving)
            old, here = tl.exp((far - new) - slope), tl.exp(leaving - new)  # far - slope may be rounded
            far_num, far_den = far_num * old + leaving_value * here, far_den * old + here
            tl.debug_barrier()
            tl.store(n_ptr + of_head * HEAD + own, far_num, exists)
            tl.store(d_ptr + key_place, far_den, key_kept)
            tl.store(m_ptr + key_place, new, key_kept)
        if not BIASED:
            num, den = far_num, far_den
        y = num / tl.where(den == 0.0, 1.0, den)
        if GATED:
            y *= tl.sigmoid(tl.load(q_ptr + b * qb + features, exists, 0.0).to(tl.float32))
        tl.store(y_ptr + b * D + features, y.to(y_ptr.dtype.element_ty), exists)
    if COUNTED and pid == 0:
        tl.store(length_ptr, tl.load(length_ptr) + 1)


@triton.jit
def state_kernel(
    k_ptr, v_ptr, slope_ptr, count_ptr, sum_m_ptr, sum_n_ptr, sum_d_ptr, keys_ptr, values_ptr, n_ptr, d_ptr, m_ptr,
    T, N, D, W, past, kb, kt, vb, vt,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, KEY_PER_HEAD: tl.constexpr, MODE: tl.constexpr,
    ALONE: tl.constexpr, COUNTED: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The state after T tokens, of which the first `past` are the window of the state before, and, where rows differ,
    only `count` of the others are real: these stand first.

    Takes the sums of chunks as they are after their scan, with those before the sequence as entry 0.
    """
    pid = tl.program_id(0)
    block, head, b = pid % BLOCKS, (pid // BLOCKS) % HEADS, (pid // BLOCKS // HEADS).to(tl.int64)
    of_head, own = b * HEADS + head, block * BD + tl.arange(0, BD)
    features, exists = head * HEAD + own, own < HEAD
    of_key = _key_features(features, head, KEY_PER_HEAD)
    key_place, key_step, key_kept = _key_places(of_head, own, exists, 0, HEAD, KEY_PER_HEAD)
    end = T
    if COUNTED:
        end = past + tl.load(count_ptr + b).to(tl.int32)
    k_ptr += b * kb
    v_ptr += b * vb
    for start in range(0, W, C):
        i = start + tl.arange(0, C)
        u = end - W + i
        there = (i < W)[:, None] & exists[None, :]
        keys = _tile(k_ptr, u, kt, of_key, there & (u >= 0)[:, None], -float("inf"))
        values = _tile(v_ptr, u, vt, features, there & (u >= 0)[:, None], 0.0)
        to = keys_ptr + (key_place + of_head * (W - 1) * key_step)[None, :] + i[:, None] * key_step
        tl.store(to, keys, there & key_kept[None, :])
        tl.store(values_ptr + (of_head * W + i[:, None]) * HEAD + own[None, :], values, there)
    m = tl.zeros((BD,), tl.float32) + EMPTY
    num, den = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if not ALONE:
        before = tl.maximum(end - W, 0)  # tokens that are not in the window
        chunk = before // C
        u = chunk * C + tl.arange(0, C)
        inside = (u < before)[:, None] & exists[None, :]
        k = _tile(k_ptr, u, kt, of_key, inside, -float("inf"))
        v = _tile(v_ptr, u, vt, features, inside, 0.0)
        place = (b * (N + 1) + chunk) * D + features
        far = tl.load(sum_m_ptr + place, exists, EMPTY)
        fade, age = (before - 1 - u).to(tl.float32) * 0.0, 0.0
        if MODE == ALIBI:
            slope = tl.load(slope_ptr + head)
            fade, age = (before - 1 - u).to(tl.float32) * slope, (before - chunk * C).to(tl.float32) * slope
        m = tl.maximum(tl.maximum(far - age, tl.max(k - fade[:, None], 0)), EMPTY)
        old, p = tl.exp((far - m) - age), tl.exp((k - m[None, :]) - fade[:, None])
        num = tl.load(sum_n_ptr + place, exists, 0.0) * old + tl.sum(p * v, 0)
        den = tl.load(sum_d_ptr + place, exists, 0.0) * old + tl.sum(p, 0)
    tl.store(n_ptr + of_head * HEAD + own, num, exists)
    tl.store(d_ptr + key_place, den, key_kept)
    tl.store(m_ptr + key_place, m, key_kept)
