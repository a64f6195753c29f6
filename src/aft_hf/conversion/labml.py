"""Conversion of AFT-local of labml's annotated implementations (labml_nn.transformers.aft) to this package.

labml's layer stores its position biases as one table, `pos_bias`, and its window as a matrix, `local_mask`. labml's
models are the pre-norm blocks of labml_nn.transformers between an embedding (`src_embed`) and a linear head
(`generator`).
"""

import math
import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from ..configuration_aft import AFTConfig
from ..mixers_aft import AFTLocal
from ..modeling_aft import AFTForCausalLM
from ..reading import explained, shortened
from .errors import ConversionError


Module = TypeVar("Module", bound=nn.Module)

# Modules of a layer and of a block in labml, and their names in this package.
LAYER = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
BLOCK = {
    "norm_self_attn": "layernorm_before",
    "norm_ff": "layernorm_after",
    "feed_forward.layer1": "mlp.fc1",
    "feed_forward.layer2": "mlp.fc2",
}
# labml multiplies the token embeddings by sqrt(d) before it adds the positional encodings, learned or fixed.
EMBEDDINGS = ("src_embed.linear.weight", "src_embed.positional_encodings")


def convert_labml(
    state_dict: Mapping[str, torch.Tensor], *, causal: bool = True, hidden_act: str = "relu"
) -> AFTLocal | AFTForCausalLM:
    """Convert a trained AFT-local layer of labml, or a model of such layers, to the equivalent class of this package.

    Args:
        state_dict: state dict of an `AFTLocal` of labml_nn, or of the autoregressive model of labml's experiment.
        causal: for a layer: whether it was used with a causal mask. Models are always causal.
        hidden_act: for a model: the activation of its feed-forward layers, which the weights do not determine.

    Returns:
        An `AFTLocal` for a layer, an `AFTForCausalLM` for a model, in the dtype of the weights and in evaluation mode.
        Dropout, which the weights do not determine either, is 0. The bias of a head is merged into the bias of the
        last layer norm.

    Raises:
        ConversionError: a tensor is missing, has no counterpart in AFT, or does not have a fitting shape.
    """
    state = dict(state_dict)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ConversionError(f"{shortened(str(name))} is a {type(value).__name__}, but must name a dense tensor")
    dtypes = {str(value.dtype) for name, value in state.items() if not name.endswith("local_mask")}
    if len(dtypes) > 1:
        raise ConversionError(f"weights of different dtypes: {', '.join(sorted(dtypes))}; convert them to one")
    with explained("these are not the weights of labml's AFT-local", ConversionError):
        return _layer(state, causal) if "pos_bias" in state else _model(state, hidden_act)


def _layer(state: dict[str, torch.Tensor], causal: bool) -> AFTLocal:
    length, window = _table_size(state, "")
    mixer = AFTLocal(
        _take(state, "output.bias", peek=True).shape[0],
        max_positions=length,
        window_size=window,
        position_bias_dim=None,
        causal=causal,
        qkv_bias="query.bias" in state,
    )
    return _loaded(mixer, _layer_tensors(state, ""), state)


def _model(state: dict[str, torch.Tensor], hidden_act: str) -> AFTForCausalLM:
    count = len({match[1] for name in state if (match := re.match(r"encoder\.layers\.(\d+)\.", name))})
    if count == 0:
        raise ConversionError("neither a layer (pos_bias) nor a model (encoder.layers.0 ...) of labml's AFT-local")
    sizes = {_table_size(state, f"encoder.layers.{i}.self_attn.") for i in range(count)}
    if len(sizes) > 1:
        raise ConversionError(f"layers of different (length, window): {sorted(sizes)}; AFT has the same for all")
    ((length, window),) = sizes
    embeddings = _embeddings(state, length)
    tensors = {f"aft.embeddings.{name}.weight": value for name, value in embeddings.items()}
    qkv_bias = "encoder.layers.0.self_attn.query.bias" in state
    for i in range(count):
        layer, ours = f"encoder.layers.{i}.", f"aft.layers.{i}."
        attention = _layer_tensors(state, f"{layer}self_attn.")
        tensors |= {f"{ours}mixer.{name}": value for name, value in attention.items()}
        for theirs, name in BLOCK.items():
            weight = tensors[f"{ours}{name}.weight"] = _take(state, f"{layer}{theirs}.weight")
            bias = state.pop(f"{layer}{theirs}.bias", None)  # optional in labml's feed-forward layers
            tensors[f"{ours}{name}.bias"] = weight.new_zeros(weight.shape[0]) if bias is None else bias
    head = tensors["lm_head.weight"] = _take(state, "generator.projection.weight")
    tensors["aft.layernorm.weight"] = _take(state, "encoder.norm.weight")
    shift = _shift_of_head(head, state.pop("generator.projection.bias", None))
    tensors["aft.layernorm.bias"] = torch.stack([_take(state, "encoder.norm.bias"), shift]).sum(0)
    vocabulary, width = embeddings["word_embeddings"].shape
    config = AFTConfig(
        aft_type="local",
        hidden_size=width,
        num_hidden_layers=count,
        intermediate_size=tensors["aft.layers.0.mlp.fc1.weight"].shape[0],
        hidden_act=hidden_act,
        position_bias_dim=None,
        window_size=window,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        qkv_bias=qkv_bias,
        use_position_embeddings="position_embeddings" in embeddings,
    )
    return _loaded(AFTForCausalLM(config), tensors, state)


def _layer_tensors(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Remove the tensors of one mixer from `state`, and return them by their names in this package."""
    tensors = {"position_bias_table": _take(state, f"{prefix}pos_bias").unsqueeze(0)}
    _take(state, f"{prefix}local_mask")
    for theirs, ours in LAYER.items():
        tensors[f"{ours}.weight"] = _take(state, f"{prefix}{theirs}.weight")
        if theirs == "output" or f"{prefix}{theirs}.bias" in state:
            tensors[f"{ours}.bias"] = _take(state, f"{prefix}{theirs}.bias")
    return tensors


def _table_size(state: dict[str, torch.Tensor], prefix: str) -> tuple[int, int]:
    """Return the longest sequence length and the window size s; the mask must be True exactly where |t - t'| < s."""
    table, mask = (_take(state, f"{prefix}{name}", peek=True) for name in ("pos_bias", "local_mask"))
    length = len(table)
    window = int(mask[0].sum()) if mask.dim() == 2 else 0
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    if table.shape != (length, length) or mask.shape != table.shape or not torch.equal(mask.cpu(), distance < window):
        raise ConversionError(f"{prefix}local_mask is no window around the diagonal of {prefix}pos_bias")
    return length, window


def _embeddings(state: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Return the token embeddings and, if there are any, the embeddings of the `length` positions of the biases."""
    if "src_embed.weight" in state:  # without positional encodings; these embeddings are not scaled
        return {"word_embeddings": state.pop("src_embed.weight")}
    tokens, positions = (_take(state, name) for name in EMBEDDINGS)
    if len(positions) < length:
        raise ConversionError(f"{EMBEDDINGS[1]} has {len(positions)} positions, but pos_bias has {length}")
    scaled = tokens * math.sqrt(tokens.shape[1])
    return {"word_embeddings": scaled, "position_embeddings": positions[:length].squeeze(1)}


def _shift_of_head(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the shift x of the head's input that replaces the bias of the head: weight x = bias.

    Raises:
        ConversionError: there is no such shift, which can happen if there are more tokens than features.
    """
    if bias is None:
        return weight.new_zeros(weight.shape[1])
    exact, wanted = weight.double(), bias.double()
    shift = (torch.linalg.pinv(exact) @ wanted).to(weight.dtype)
    error = (exact @ shift.double() - wanted).abs()
    # A bound of the error from rounding x to the dtype of the weights, with a margin.
    rounding = 4 * torch.finfo(weight.dtype).eps * (exact.abs() @ shift.double().abs() + wanted.abs())
    if (error > rounding).any():
        raise ConversionError(
            "generator.projection.bias: an AFT has no bias in its head, and no bias of its last norm can replace "
            f"this one of {len(bias)} tokens with {weight.shape[1]} features; set it to 0, convert, and fine-tune"
        )
    return shift


def _take(state: dict[str, torch.Tensor], name: str, *, peek: bool = False) -> torch.Tensor:
    if name not in state:
        raise ConversionError(f"{name} is missing: these are not the weights of labml's AFT-local")
    return state[name] if peek else state.pop(name)


def _loaded(module: Module, tensors: dict[str, torch.Tensor], left: dict[str, torch.Tensor]) -> Module:
    """Return a module with these weights in its dtype, if no tensor is left over."""
    if left:
        raise ConversionError(f"AFT has no place for {shortened(', '.join(sorted(left)))}")
    module = module.to(tensors[next(name for name in tensors if name.endswith("position_bias_table"))].dtype)
    with explained("the weights do not fit each other", ConversionError):
        module.load_state_dict(tensors)
    return module.eval()
