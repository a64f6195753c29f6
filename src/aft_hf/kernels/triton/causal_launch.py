"""Launches of the kernels for causal problems: sizes, memory for results, and the kernels of each pass.

The arguments are those of the operators, on the current device. Nothing here waits for the device.
"""

from typing import Any, NamedTuple

import torch

from ...portable_aft import join_heads, power_of_two_from
from .band_kernels import band_backward_kernel, band_kernel
from .decoding_kernels import state_kernel, step_kernel
from .kept import kept_like
from .options import CHUNK, PROGRAMS, options
from .sweep_kernels import (
    GROUP,
    repair_backward_kernel,
    repair_kernel,
    sweep_backward_kernel,
    sweep_kernel,
    tiles_kernel,
    window_gradient_kernel,
)
from .walk_kernels import walk_backward_kernel, walk_kernel


def _strides(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of each tensor between rows and between tokens."""
    return tuple(s for x in tensors for s in ((0, 0) if x is None else x.stride()[:2]))


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return x with contiguous features, and rows that 32 bits address."""
    if x is None or ((x.stride(-1) == 1 or x.shape[-1] == 1) and x.shape[1] * x.stride(1) < 2**31):
        return x
    return x.contiguous()


# Programs to aim at: of the gradient of w, and of the repair kernels
ENOUGH_PROGRAMS, ENOUGH_REPAIRS = 1024, 4096


def segments(value: torch.Tensor, block: int, warps: int, most: int = 64) -> tuple[int, int]:
    """Return into how many segments to cut the rows, and their length, a multiple of CHUNK."""
    batch, length, width = value.shape
    processors = torch.cuda.get_device_properties(value.device).multi_processor_count if value.is_cuda else 1
    programs = batch * -(-width // block)
    count = min(most, max(1, -(-PROGRAMS * processors // (programs * warps))))
    size = -(-length // (count * CHUNK)) * CHUNK
    return -(-length // size), size


# ------------------------------------------------------------------------------------------------------ w = 0 or alibi


def walk(query, key, value, slopes, first, kept, state=None):  # type: ignore[no-untyped-def]
    """Compute Eq. 2 times the gate where w = 0 or -slope * distance.

    Args:
        query, key, value, slopes, first: arguments of `causal`.
        kept: memory for what the backward pass needs, or None.
        state: maximum, numerator and denominator of the tokens before the first one, which are updated; or None.
    """
    query, key, value = _dense(query), _dense(key), _dense(value)
    batch, length, width = value.shape
    chosen = options("walk_kernel", value, "" if first is None else "documents")
    count, size = segments(value, chosen["BD"], chosen["num_warps"])
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    before = (None,) * 3 if state is None else [x.clone() for x in state]
    programs = batch * -(-width // chosen["BD"])
    sums = torch.empty((batch, count, 5, width), dtype=torch.float32, device=value.device) if count > 1 else None
    heads = 1 if slopes is None else len(slopes)
    common: dict[str, Any] = {"ALIBI": slopes is not None, "KEY_PER_HEAD": key.shape[2] != width, "C": CHUNK, **chosen}
    common |= {"DOCUMENTS": first is not None, "SEGMENTS": count > 1, "INITIAL": state is not None}
    given = query, key, value, slopes, first, sums, *before, output, *(kept or (None,) * 3), *(state or (None,) * 3)
    of_head, strides = width // (heads if key.shape[2] == width else key.shape[2]), _strides(query, key, value)
    sizes = size, 0, of_head, key.shape[2], *strides
    if count > 1:
        options_of_totals = common | {"GATED": False, "KEEP": False, "TOTALS": True}
        walk_kernel[(programs * (count - 1),)](*given, length, width, count - 1, *sizes, **options_of_totals)
    common |= {"GATED": query is not None, "KEEP": kept is not None, "TOTALS": False}
    walk_kernel[(programs * count,)](*given, length, width, count, *sizes, **common)
    return output


def walk_backward(gradient, query, key, value, slopes, first, kept):  # type: ignore[no-untyped-def]
    """Compute the gradients of query, key and value of `walk`."""
    gradient, query, key, value = _dense(gradient), _dense(query), _dense(key), _dense(value)
    batch, length, width = value.shape
    chosen = options("walk_backward_kernel", value, "" if first is None else "documents")
    count, size = segments(value, chosen["BD"], chosen["num_warps"])
    shared = key.shape[2] != width
    grad_query = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=value.device)
    grad_key = torch.empty(value.shape, dtype=torch.float32 if shared else key.dtype, device=value.device)
    grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    programs = batch * -(-width // chosen["BD"])
    sums = torch.empty((batch, count, 5, width), dtype=torch.float32, device=value.device) if count > 1 else None
    heads = 1 if slopes is None else len(slopes)
    common: dict[str, Any] = {"ALIBI": slopes is not None, "KEY_PER_HEAD": shared, "C": CHUNK, **chosen}
    common |= {"DOCUMENTS": first is not None, "SEGMENTS": count > 1, "GATED": query is not None}
    given = gradient, query, key, value, *kept, slopes, first, sums, grad_query, grad_key, grad_value
    sizes = size, width // (key.shape[2] if shared else heads), *_strides(gradient, query, key, value)
    if count > 1:
        totals = programs * (count - 1)
        walk_backward_kernel[(totals,)](*given, length, width, count - 1, *sizes, TOTALS=True, **common)
    walk_backward_kernel[(programs * count,)](*given, length, width, count, *sizes, TOTALS=False, **common)
    if shared:
        grad_key = grad_key.unflatten(2, (key.shape[2], -1)).sum(3).to(key.dtype)
    return grad_query, grad_key, grad_value


# ------------------------------------------------------------------------------------------------------------- windows


class Window(NamedTuple):
    """w between a query at position p of its document and a key `lag` tokens before it: where 0 <= lag < size, entry
    row * w_row + min(max(p - past, 0), positions - 1) * w_position + head * w_head + w_base - lag of a tensor.
    """

    tensor: torch.Tensor
    heads: int
    global_connectivity: bool
    positions: int
    past: int
    size: int
    w_row: int
    w_position: int
    w_head: int
    w_base: int

    @classmethod
    def by_lag(cls, bias: torch.Tensor, global_connectivity: bool, past: int = 0) -> "Window":
        """w of `causal`, (B or 1, P or 1, h, s)."""
        rows, positions, heads, size = bias.shape
        w_row = positions * heads * size if rows > 1 else 0
        return cls(
            bias.contiguous(), heads, global_connectivity, positions, past, size, w_row, heads * size, size, size - 1
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        return self[3:]


class Tiles(NamedTuple):
    """exp(w - a_t) by chunks of queries and, for a backward pass, of keys; a_t; exp(-a_t); and the spread of w."""

    of_queries: torch.Tensor
    of_keys: torch.Tensor | None
    top: torch.Tensor
    far: torch.Tensor
    spread: torch.Tensor


class Sweep:
    """Sizes and constants that the kernels of one problem share, and its tiles."""

    def __init__(self, query, key, value, window: Window, first, *, backward: bool, initial: bool = False):  # type: ignore[no-untyped-def]
        self.batch, self.length, self.width = value.shape
        self.chunks, head = -(-self.length // CHUNK), self.width // window.heads
        self.near = min(-(-(window.size - 1) // CHUNK), self.chunks - 1)
        self.case = "documents" if first is not None else "wide" if self.near > 1 else ""
        if not window.global_connectivity:
            self.case = "window alone"
        self.forward = options("sweep_kernel", value, self.case)
        self.chosen = options("sweep_backward_kernel", value, self.case) if backward else self.forward
        self.rows = int(first is not None or window.w_row > 0)
        same = window.positions == 1 and first is None
        # All chunks that do not begin near the first token have the same tiles, if w does not depend on the position
        self.tiles_per_row = (
            min(self.chunks, 2 * self.near + 2 if backward else self.near + 2) if same else self.chunks
        )
        self.blocks, self.device = -(-head // self.chosen["BD"]), value.device
        shape: dict[str, Any] = {
            "HEADS": window.heads,
            "NEAR": self.near,
            "GLOBAL": window.global_connectivity,
            "C": CHUNK,
        }
        self.common = shape | {"DOCUMENTS": first is not None, "BLOCKS": self.blocks, "HEAD": head}
        self.common |= {"KEY_PER_HEAD": key.shape[2] != self.width, "GATED": query is not None}
        self.repair = self.common | {"BD": self.chosen["BD"]} | options("repair_kernel", value)
        self.programs = self.batch * window.heads * self.blocks
        # Chunks per program of the repair kernels: most programs find no flag
        self.each = min(GROUP.value, max(1, self.programs * self.chunks // ENOUGH_REPAIRS))
        self.repairs = self.programs * -(-self.chunks // self.each)
        self.tiles = self._tiles(window, first, shape | {"INITIAL": initial}, backward)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _tiles(self, window: Window, first: Any, shape: dict[str, Any], backward: bool) -> Tiles:
        count = (self.batch if self.rows else 1) * window.heads * self.tiles_per_row
        of_queries = self.empty(count, CHUNK, (self.near + 1) * CHUNK)
        of_keys = self.empty(*of_queries.shape) if backward else None
        made = Tiles(of_queries, of_keys, self.empty(count, CHUNK), self.empty(count, CHUNK), self.empty(count))
        sizes = self.length, self.chunks, self.tiles_per_row, *window.numbers
        shape = shape | {"DOCUMENTS": first is not None, "BACKWARD": backward}
        tiles_kernel[(count,)](window.tensor, first, *made, *sizes, **shape)
        return made

    def segments(self, value: torch.Tensor) -> tuple[int, int]:
        """Into how many segments to cut the rows, and their length: single chunks if no sums connect them."""
        if not self.common["GLOBAL"]:
            return self.chunks, CHUNK
        # Those of the forward pass in the backward pass, too: each has its center of the values
        return segments(value, self.forward["BD"], self.forward["num_warps"])

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the flags of chunks that need care, and for the sums before them."""
        flags = self.empty(self.batch, self.chunks, self.width, dtype=torch.int8)
        return flags, self.empty(self.batch, self.chunks, 4, self.width)


def sweep(query, key, value, window, first, kept, state=None):  # type: ignore[no-untyped-def]
    """Compute Eq. 2 times the gate with a window of position biases; the arguments are those of `walk`.

    The sums of `state` are not updated.
    """
    query, key, value = _dense(query), _dense(key), _dense(value)
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    at = Sweep(query, key, value, window, first, backward=False, initial=state is not None)
    count, size = at.segments(value)
    far, strides, tiles = window.global_connectivity, _strides(query, key, value), at.tiles
    sums = at.empty(at.batch, count, 5, at.width) if far and count > 1 else None
    before, nothing = state or (None,) * 3, (None,) * 3
    if sums is not None:
        sums_of_segments(key, value, first, sums, count - 1, size, at.near * CHUNK)
    of_kept, flags = kept or nothing, at.state()
    given = query, key, value, tiles.of_queries, tiles.far, tiles.spread, first, sums, output, *of_kept, *flags
    sizes = at.length, at.chunks, at.tiles_per_row, at.width, count, size // CHUNK, at.rows, key.shape[2]
    constants = at.common | at.chosen | {"KEEP": kept is not None, "SEGMENTS": sums is not None}
    constants |= {"INITIAL": state is not None and far}
    sweep_kernel[(at.programs * count,)](*given, *before, *sizes, *strides, **constants)
    given = query, key, value, window.tensor, tiles.top, first, output, *of_kept, *flags
    sizes = at.length, at.chunks, at.tiles_per_row, at.width, *window.numbers, at.rows, at.each
    constants = at.repair | {"KEEP": kept is not None, "INITIAL": state is not None}
    repair_kernel[(at.repairs,)](*given, *sizes, *strides, **constants)
    return output


def sums_of_segments(key, value, first, sums, count, size, shift):  # type: ignore[no-untyped-def]
    """Compute the sums of the first `count` segments of `size` tokens, which begin `shift` tokens earlier, in memory
    for one segment more.
    """
    (batch, length, width), chosen = value.shape, options("walk_kernel", value, "" if first is None else "documents")
    nothing = (None,) * 3
    constants: dict[str, Any] = {"ALIBI": False, "KEY_PER_HEAD": key.shape[2] != width, "C": CHUNK, **chosen}
    constants |= {"DOCUMENTS": first is not None, "SEGMENTS": True, "INITIAL": False, "GATED": False, "KEEP": False}
    given = None, key, value, None, first, sums, *nothing, None, *nothing, *nothing
    sizes = length, width, count, size, shift, width // key.shape[2], key.shape[2], *_strides(None, key, value)
    programs = batch * -(-width // chosen["BD"]) * count
    walk_kernel[(programs,)](*given, *sizes, TOTALS=True, **constants)


def sweep_backward(gradient, query, key, value, window, first, kept, bias_needed):  # type: ignore[no-untyped-def]
    """Compute the gradients of query, key, value and, if needed, of w: (parts, T, h, s)."""
    gradient, query, key, value = _dense(gradient), _dense(query), _dense(key), _dense(value)
    shared, of_window = key.shape[2] != value.shape[2], None
    grad_query = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=value.device)
    grad_key = torch.empty(value.shape, dtype=torch.float32 if shared else key.dtype, device=value.device)
    grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    at = Sweep(query, key, value, window, first, backward=True)
    count, size = at.segments(value)
    strides, tiles, flags = _strides(gradient, query, key, value), at.tiles, at.state()
    sums = at.empty(at.batch, count, 6, at.width) if window.global_connectivity and count > 1 else None
    tensors = gradient, query, key, value, *kept
    given = *tensors, tiles.of_keys, tiles.top, tiles.far, first, sums, grad_query, grad_key, grad_value, *flags
    sizes, others = (at.length, at.chunks, at.tiles_per_row, at.width), (size // CHUNK, at.rows, *strides)
    constants = at.common | at.chosen | {"SEGMENTS": sums is not None}
    if sums is not None:
        totals = at.programs * (count - 1)
        sweep_backward_kernel[(totals,)](*given, *sizes, count - 1, *others, TOTALS=True, **constants)
    sweep_backward_kernel[(at.programs * count,)](*given, *sizes, count, *others, TOTALS=False, **constants)
    given = *tensors, window.tensor, tiles.top, first, grad_key, grad_value, *flags
    numbers = *window.numbers, at.rows, at.each
    repair_backward_kernel[(at.repairs,)](*given, *sizes, *numbers, *strides, **at.repair)
    if bias_needed:
        of_window = _window_gradient(at, tensors, window, first, strides)
    if shared:
        grad_key = grad_key.unflatten(2, (key.shape[2], -1)).sum(3).to(key.dtype)
    return grad_query, grad_key, grad_value, of_window


def _window_gradient(at: Sweep, tensors: Any, window: Window, first: Any, strides: Any) -> torch.Tensor:
    """Compute parts of the gradient of w by row, query, head and lag."""
    chosen = options("window_gradient_kernel", tensors[3], at.case)
    head = at.width // window.heads
    chosen["KEYS"] = min(chosen["KEYS"], at.near + 1)
    blocks, tiles = -(-head // chosen["BD"]), window.heads * at.chunks * (at.near // chosen["KEYS"] + 1)
    each = 1 if at.rows else -(-at.batch // min(at.batch, max(1, ENOUGH_PROGRAMS // tiles)))
    parts = -(-at.batch // each)
    grad_window = torch.zeros((parts, at.length, window.heads, window.size), dtype=torch.float32, device=at.device)
    constants = at.common | chosen | {"BLOCKS": blocks}
    sizes = at.batch, at.length, at.chunks, at.tiles_per_row, at.width, each, *window.numbers, at.rows
    given = *tensors, window.tensor, at.tiles.of_queries, at.tiles.top, first, grad_window
    to = grad_window.stride()[:3]
    window_gradient_kernel[(tiles * parts,)](*given, *sizes, *to, *strides, **constants)
    return grad_window


# ----------------------------------------------------------------------------------------------------------- operators


def causal(query, key, value, bias, slopes, first, global_connectivity, keep):  # type: ignore[no-untyped-def]
    """Compute `causal` and, with `keep`, what its gradient needs; empty tensors otherwise."""
    kept = kept_like("causal", key, value, bias) if keep else None
    slopes, first = (x if x is None else x.contiguous() for x in (slopes, first))
    if value.numel() == 0:
        output = torch.empty_like(value)
    elif bias is None:
        output = walk(query, key, value, slopes, first, kept)
    else:
        output = sweep(query, key, value, Window.by_lag(bias, global_connectivity), first, kept)
    return output, *(kept or (value.new_empty(0) for _ in range(3)))


def causal_backward(  # type: ignore[no-untyped-def]
    gradient, query, key, value, bias, slopes, first, global_connectivity, average, logsumexp, center, bias_needed
):
    kept = average, logsumexp, center
    slopes, first = (x if x is None else x.contiguous() for x in (slopes, first))
    if value.numel() == 0:
        empty = query, key, value, bias if bias_needed else None
        gradients = tuple(None if x is None else torch.zeros_like(x) for x in empty)
    elif bias is None:
        gradients = *walk_backward(gradient, query, key, value, slopes, first, kept), None
    else:
        window = Window.by_lag(bias, global_connectivity)
        *gradients, of_window = sweep_backward(gradient, query, key, value, window, first, kept, bias_needed)
        gradients = *gradients, None if of_window is None else _by_position(of_window, bias, first)
    return tuple(value.new_empty(0) if x is None else x for x in gradients)


def _by_position(of_window: torch.Tensor, bias: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Sum the gradient of w by row and query to that by position, (B or 1, P or 1, h, s)."""
    rows, positions, *shape = bias.shape
    if len(of_window) > 1 and rows == 1 and (positions == 1 or first is None):
        of_window = of_window.sum(0, keepdim=True)
    if positions == 1:
        return of_window.sum(1, keepdim=True)
    length = of_window.shape[1]
    if first is None:
        summed = of_window[:, :positions].clone() if length > positions else of_window
        if length > positions:
            summed[:, -1] = of_window[:, positions - 1 :].sum(1)
        return torch.nn.functional.pad(summed, (0, 0, 0, 0, 0, max(positions - length, 0)))
    tokens = torch.arange(length, device=first.device)
    place = (tokens - first).clamp(0, positions - 1)
    if rows > 1:
        place = place + positions * torch.arange(rows, device=first.device)[:, None]
    summed = of_window.new_zeros((rows * positions, *shape))
    # Sorted, so the order of a sum does not vary
    return summed.index_put_((place.flatten(),), of_window.flatten(0, 1), accumulate=True).view(bias.shape)


# --------------------------------------------------------------------------------------------------------- generation


def causal_state(query, key, value, bias, slopes, first, global_connectivity, *state):  # type: ignore[no-untyped-def]
    """Compute `causal_state`, which updates the state in place."""
    slopes = slopes if slopes is None else slopes.contiguous()
    if value.shape[1] == 1 and first is None:
        return decode(query, key, value, bias, slopes, state, global_connectivity=global_connectivity)
    return prefill(query, key, value, bias, slopes, first, global_connectivity, state)


def prefill(query, key, value, bias, slopes, first, global_connectivity, state):  # type: ignore[no-untyped-def]
    """Compute Eq. 2 times the gate for new tokens, and add them to the state."""
    numerator, denominator, maximum = state[2:]
    padding = None if first is None else first > torch.arange(value.shape[1], device=value.device)
    if bias is None:
        # No token begins a document, since the state precedes it
        first = None if padding is None else torch.where(padding, value.shape[1], -1)
        output = walk(query, key, value, slopes, first, None, (maximum, numerator, denominator))
    else:
        output = _window_prefill(query, key, value, bias, global_connectivity, padding, state)
    return output if padding is None else output.masked_fill(padding.unsqueeze(2), 0.0)


def _window_prefill(query, key, value, bias, global_connectivity, padding, state):  # type: ignore[no-untyped-def]
    """Compute new tokens together with those of the window, whose outputs are dropped; padding comes last."""
    keys, values, numerator, denominator, maximum = state
    past = keys.shape[2]
    key, value = (torch.cat([join_heads(x).to(y.dtype), y], 1) for x, y in ((keys, key), (values, value)))
    query = query if query is None else torch.nn.functional.pad(query, (0, 0, past, 0))
    window = Window.by_lag(bias, global_connectivity, past)
    output = sweep(query, key, value, window, None, None, (maximum, numerator, denominator))[:, past:].contiguous()
    _store_state(key, value, state, padding, window)
    return output


def _store_state(key, value, state, padding, window) -> None:  # type: ignore[no-untyped-def]
    """Store the state after tokens that follow its window."""
    keys, _, numerator, denominator, maximum = state
    (batch, length, width), past, (heads, head) = value.shape, keys.shape[2], (keys.shape[1], state[1].shape[3])
    counts, sums, count = None, None, 0
    if window.global_connectivity:
        chosen, limit = options("walk_kernel", value), None
        count, size = segments(value[:, past:], chosen["BD"], chosen["num_warps"])
        sums = torch.empty((batch, count + 1, 5, width), dtype=torch.float32, device=value.device)
        if padding is not None:
            counts = (~padding).sum(1)
            tokens = torch.arange(length - past, device=value.device)
            limit = torch.where(tokens < counts[:, None], -1, length)
        sums_of_segments(key[:, : length - past], value[:, : length - past], limit, sums, count, size, 0)
    elif padding is not None:
        counts = (~padding).sum(1)
    block = min(64, power_of_two_from(head))
    options_of_kernel: dict[str, Any] = {"HEADS": heads, "BLOCKS": -(-head // block), "HEAD": head, "BD": block}
    options_of_kernel |= {"KEY_PER_HEAD": key.shape[2] != width, "GLOBAL": window.global_connectivity, "C": CHUNK}
    old = maximum.clone(), numerator.clone(), denominator.clone()
    given = key, value, sums, counts, *old, *state
    sizes = length, width, count, past, past, *_strides(key, value)
    programs = batch * heads * options_of_kernel["BLOCKS"]
    state_kernel[(programs,)](*given, *sizes, COUNTED=counts is not None, **options_of_kernel)


def decode(query, key, value, bias, slopes, state, *, global_connectivity):  # type: ignore[no-untyped-def]
    """Compute Eq. 2 of one new token times the gate, (B, 1, d), and add it to the state, by one kernel."""
    query, key, value = _dense(query), _dense(key), _dense(value)
    batch, _, width = value.shape
    (heads, window, _), head = state[0].shape[1:], state[1].shape[3]
    bias = bias if bias is None else bias[:, 0].contiguous()  # (B or 1, h, s)
    chosen = options("step_kernel", value)
    features, block = min(chosen["BD"], power_of_two_from(head)), min(chosen["BW"], power_of_two_from(max(window, 1)))
    blocks, shared = -(-head // features), key.shape[-1] != width
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    strides = [0 if x is None or len(x) == 1 else x.stride(0) for x in (query, key, value, bias)]
    constants: dict[str, Any] = {"HEADS": heads, "BLOCKS": blocks, "HEAD": head, "KEY_PER_HEAD": shared}
    constants |= {
        "ALIBI": slopes is not None,
        "BIASED": bias is not None,
        "GLOBAL": global_connectivity,
        "GATED": query is not None,
    }
    constants |= chosen | {"BW": block, "BD": features}
    programs = batch * heads * (1 if shared else blocks)
    step_kernel[(programs,)](query, key, value, bias, slopes, *state, output, window, width, *strides, **constants)
    return output


# ------------------------------------------------------------------------------------------------- w from its factors


def band(query, key, start, length, window, starts):  # type: ignore[no-untyped-def]
    """Compute `band`."""
    heads, positions, features = query.shape
    rows = 1 if starts is None else len(starts)
    bias = torch.empty((rows, length, heads, window), dtype=torch.float32, device=query.device)
    sizes = start, length, positions, features, window, -(-length // CHUNK)
    if bias.numel():
        given = query.contiguous(), key.contiguous(), bias, starts if starts is None else starts.contiguous()
        band_kernel[(sizes[-1] * heads * rows,)](*given, *sizes, **_band_constants(heads, query, window))
    return bias


def band_backward(gradient, query, key, start, length, window, starts):  # type: ignore[no-untyped-def]
    """Compute the gradients of the factors of `band`."""
    heads, positions, features = query.shape
    constants, gradient, gradients = _band_constants(heads, query, window), gradient.contiguous(), []
    blocks, chunks = -(-features // constants["BF"]), -(-length // CHUNK)
    for factor, of_keys in ((key, False), (query, True)):
        of_factor = torch.zeros(factor.shape, dtype=factor.dtype, device=factor.device)
        count = chunks + constants["NEAR"] if of_keys else chunks
        if gradient.numel():
            sizes = start, length, positions, features, window, count
            given = gradient, factor.contiguous(), of_factor
            band_backward_kernel[(count * blocks * heads,)](*given, *sizes, OF_KEYS=of_keys, **constants)
        gradients.append(of_factor)
    return tuple(gradients)


def _band_constants(heads: int, query: torch.Tensor, window: int) -> dict[str, Any]:
    of_band = options("band", query)
    block = min(of_band["BF"], max(16, power_of_two_from(query.shape[-1])))
    return of_band | {"HEADS": heads, "NEAR": -(-(window - 1) // CHUNK), "C": CHUNK, "BF": block}
