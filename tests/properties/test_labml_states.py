"""Property test of `convert_labml`: any mapping is converted as it is, or refused in one line."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_labml import layer_state, model_state

from aft_hf.conversion import ConversionError, convert_labml


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


def converted(state: dict[Any, Any], named: str = "") -> bool:
    """Whether a state is converted; otherwise it is refused in one line, which names a tensor."""
    try:
        module = convert_labml(state)
    except ConversionError as error:
        assert str(error).isprintable() and len(str(error)) < 1000 and named in str(error)
        return False
    assert all(value.device.type == "cpu" for value in module.state_dict().values())
    return True


@pytest.mark.parametrize("state", STATES, ids=["layer", "model"])
def test_a_state_is_converted_as_it_is_and_refused_by_the_name_of_a_value_that_is_no_tensor(state):
    assert converted(state)
    name = next(name for name in state if "query" in name)
    for value in NO_TENSORS:
        assert not converted(state | {name: value}, named=name)


@given(st.sampled_from(STATES), st.data())
def test_a_tensor_of_another_shape_or_kind_is_refused(state, data):
    name = data.draw(st.sampled_from(sorted(state)))
    change = data.draw(st.sampled_from([*RESHAPED, *OF_ANOTHER_KIND]))
    changed = (RESHAPED | OF_ANOTHER_KIND)[change](state[name])
    longer = name == "src_embed.positional_encodings" and change == "a row more"  # positions beyond the biases' remain
    is_mask = name.endswith("local_mask") and change in OF_ANOTHER_KIND  # another dtype can hold the same window
    assert not converted(state | {name: changed}) or longer or is_mask


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
