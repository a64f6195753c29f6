"""Property test of `convert_labml`: any mapping is converted as it is, or refused in one line."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aft_hf.conversion import convert_labml
from aft_hf.errors import InputError


WIDTH, LENGTH, WINDOW, TOKENS = 4, 6, 3, 5


def layer_state(prefix: str = "") -> dict[str, Any]:
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    state = {f"{name}.weight": torch.randn(WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
    state |= {f"{name}.bias": torch.randn(WIDTH) for name in ("query", "key", "value", "output")}
    state |= {"pos_bias": torch.randn(LENGTH, LENGTH), "local_mask": distance < WINDOW}
    return {prefix + name: value for name, value in state.items()}


def model_state() -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "src_embed.linear.weight": (TOKENS, WIDTH),
        "src_embed.positional_encodings": (9, 1, WIDTH),
        "encoder.norm.weight": (WIDTH,),
        "encoder.norm.bias": (WIDTH,),
        "generator.projection.weight": (TOKENS, WIDTH),
    }
    state = {"generator.projection.bias": torch.zeros(TOKENS)}
    for layer in ("encoder.layers.0.", "encoder.layers.1."):
        state |= layer_state(f"{layer}self_attn.")
        for name in ("norm_self_attn", "norm_ff"):
            shapes |= {f"{layer}{name}.weight": (WIDTH,), f"{layer}{name}.bias": (WIDTH,)}
        for name, shape in (("layer1", (8, WIDTH)), ("layer2", (WIDTH, 8))):
            shapes |= {f"{layer}feed_forward.{name}.weight": shape, f"{layer}feed_forward.{name}.bias": shape[:1]}
    return state | {name: torch.randn(shape) for name, shape in shapes.items()}


torch.manual_seed(0)
STATES = [layer_state(), model_state()]
NO_TENSORS: list[Any] = [None, True, 10**5000, math.nan, "text", [1.0], {}, torch.float32, torch.nn.Linear(1, 1)]
NAMES: list[Any] = ["", "x", "pos_bias", "src_embed.weight", "encoder.layers.7.self_attn.query.bias", 5, None]
NAMES += [f"encoder.layers.{10**30}.self_attn.pos_bias", "encoder.layers.0.self_attn.pos_bias", "\n", b"pos_bias"]
RESHAPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a scalar": lambda x: torch.tensor(1.0).to(x.dtype),
    "empty": lambda x: x[:0],
    "a first row": lambda x: x[:1],
    "a first column": lambda x: x[..., :1],
    "one more dimension": lambda x: x[None],
    "three copies": lambda x: torch.stack([x] * 3, 1),
    "flat": lambda x: x.flatten() if x.dim() > 1 else x[None],
    "a row more": lambda x: torch.cat([x, x[:1]]),
}
OF_ANOTHER_KIND: dict[str, Callable[[torch.Tensor], Any]] = {
    **{str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.int64, torch.float16, torch.float64)},
    "complex": lambda x: x.to(torch.complex64),
    "8 bits": lambda x: x.float().to(torch.float8_e4m3fn),
    "sparse": lambda x: x.to_sparse(),
    "on the meta device": lambda x: x.to("meta"),
}


def converted(state: dict[Any, Any]) -> bool:
    """Whether a state is converted; otherwise it is refused in one line."""
    try:
        module = convert_labml(state)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        return False
    assert all(value.device.type == "cpu" for value in module.state_dict().values())
    return True


@pytest.mark.parametrize("change", [*RESHAPED, *OF_ANOTHER_KIND])
def test_a_tensor_of_another_shape_or_kind_is_refused(change):
    for state in STATES:
        for name in state:
            changed = (RESHAPED | OF_ANOTHER_KIND)[change](state[name])
            # Positions beyond those of the biases remain.
            longer = name == "src_embed.positional_encodings" and change == "a row more"
            # Another dtype can hold the same window.
            is_mask = name.endswith("local_mask") and change in OF_ANOTHER_KIND
            assert not converted(state | {name: changed}) or longer or is_mask, name


@given(st.sampled_from(STATES), st.data())
def test_any_names_and_values_are_converted_or_refused(state, data):
    state = copy.copy(state)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(state)))
        match data.draw(st.sampled_from(["value", "missing", "name", "copy"])):
            case "value":
                state[name] = data.draw(st.sampled_from(NO_TENSORS))
            case "missing":
                del state[name]
            case "name":
                state[data.draw(st.sampled_from(NAMES))] = state.pop(name)
            case "copy":
                state[data.draw(st.sampled_from([*NAMES, *state]))] = state[name]
        if not state:
            break
    converted(state)
