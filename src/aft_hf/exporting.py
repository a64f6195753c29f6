"""ONNX export of a decoding step: a program for one token, with the cache as its inputs and outputs."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from .caching_aft import SUMS_AND_WINDOW, AFTCache, AFTLayerState
from .modeling_aft import AFTForCausalLM


def empty_state(model: AFTForCausalLM, batch_size: int = 1) -> dict[str, torch.Tensor]:
    """Return the state before the first token: the inputs of the program besides `input_ids`.

    `seen`, (B,) int64, counts the tokens of each row; `I.keys` and the other names of `SUMS_AND_WINDOW` are the
    float32 tensors of layer I. The batch is the first dimension of all tensors, and their size is constant.

    Raises:
        ValueError: the model has a `full` layer, whose cache grows with the text.
    """
    state = {"seen": torch.zeros(batch_size, dtype=torch.long)}
    for index, mixer in enumerate(model.aft._mixers):
        if mixer.state_window is None:
            raise ValueError('aft_type "full" keeps all keys and values: its cache has no constant size')
        empty = AFTLayerState(mixer.state_window)
        widths = mixer.k_proj.out_features, mixer.v_proj.out_features
        empty.lazy_initialization(*(torch.zeros(batch_size, mixer.num_heads, 1, w // mixer.num_heads) for w in widths))
        # Sums in float32 here: few programs that run ONNX have kernels for float64.
        state |= {f"{index}.{name}": getattr(empty, name).float() for name in SUMS_AND_WINDOW}
    # Layers without a window have no keys and values.
    return {name: tensor for name, tensor in state.items() if tensor.numel() > 0}


def export_step(model: AFTForCausalLM, path: str | Path, **options: Any) -> None:
    """Export one decoding step as an ONNX program for any batch size.

    Its inputs are `input_ids` (B, 1) and the tensors of `empty_state`. Its outputs are `logits` (B, 1, vocabulary) and
    `next.NAME` for each tensor NAME of the state. A prompt is fed token by token. The program checks nothing: if the
    model has learned positions, a text must not exceed `max_position_embeddings`.

    Args:
        model: model in evaluation mode and float32, with layers of any type but `full`.
        path: the ONNX file to write.
        **options: further arguments of `torch.onnx.export`.
    """
    state = empty_state(model, 2)
    inputs = {"input_ids": torch.zeros(2, 1, dtype=torch.long), "state": state}
    batch = {0: Dim("batch", min=1, max=4096)}
    program = torch.onnx.export(
        _Step(model).train(model.training),
        (),
        kwargs=inputs,
        dynamic_shapes={"input_ids": batch, "state": dict.fromkeys(state, batch)},
        input_names=["input_ids", *state],
        output_names=["logits", *(f"next.{name}" for name in state)],
        dynamo=True,
        # onnxruntime optimizes a program that it loads; the exporter takes quadratic time in the layers.
        **{"optimize": False, "verbose": False, **options},
    )
    assert program is not None  # with dynamo=True
    program.save(path)


class _Step(nn.Module):
    """A language model as a function from a token and a state to the logits and the next state."""

    def __init__(self, model: AFTForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cache = AFTCache([])
        for index, mixer in enumerate(self.model.aft._mixers):
            cache.layers.append(_StepState(mixer.state_window, index, state))
        logits = self.model(input_ids=input_ids, cache=cache, use_cache=True).logits
        following = {"seen": state["seen"] + 1}
        for index, after in enumerate(cache.layers):
            following |= {f"{index}.{name}": getattr(after, name) for name in SUMS_AND_WINDOW}
        return logits, *(following[name] for name in state)


class _StepState(AFTLayerState):
    """State of a layer whose tensors are inputs of the program; they are replaced and not changed in place."""

    def __init__(self, window: int, index: int, state: dict[str, torch.Tensor]):
        super().__init__(window)
        for name in SUMS_AND_WINDOW[2:]:
            setattr(self, name, state[f"{index}.{name}"])
        self.keys, self.values = (
            state.get(f"{index}.{name}", like[:, :, :0].to(self.maximum.dtype))
            for name, like in (("keys", self.maximum), ("values", self.numerator))
        )
        # `seen` is `cumulative_length - padding`, and the program does not depend on the length.
        self.padding, self.device = -state["seen"], state["seen"].device
        self.padded, self.is_initialized, self.is_empty = True, True, False

    def store(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def tokens_after(self, length: int, limit: int) -> int:
        return length  # the program checks nothing
