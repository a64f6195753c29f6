"""AFT-local of labml's annotated implementations (labml_nn.transformers.aft) -> AFT-local of this package.

Its layer keeps one table of position biases in `pos_bias` and its window as a matrix, `local_mask`; its models are the
pre-norm blocks of labml_nn.transformers between an embedding (`src_embed`) and a linear head (`generator`).
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
from .errors import ConversionError


Module = TypeVar("Module", bound=nn.Module)

# Modules of a layer, and of a block and a model around it, by what they become.
LAYER = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
BLOCK = {
    "norm_self_attn": "layernorm_before",
    "norm_ff": "layernorm_after",
    "feed_forward.layer1": "mlp.fc1",
    "feed_forward.layer2": "mlp.fc2",
}
# Embeddings are multiplied by sqrt(d) before the encodings of positions, learned or not, are added.
EMBEDDINGS = ("src_embed.linear.weight", "src_embed.positional_encodings")


def convert_labml(
    state_dict: Mapping[str, torch.Tensor], *, causal: bool = True, hidden_act: str = "relu"
) -> AFTLocal | AFTForCausalLM:
    """Load the weights of a trained AFT-local layer, or of a model of such layers, into ours, which computes the same.

    Args:
        state_dict: of an `AFTLocal` of labml_nn, or of the autoregressive model of its experiment.
        causal: of a layer alone: whether it was used with a mask that hides the future. Models always are.
        hidden_act: of a model: the activation of its feed-forward layers, which the weights do not tell.

    Returns:
        An `AFTLocal` for a layer, an `AFTForCausalLM` for a model, in the dtype of the weights and in evaluation mode.
        Dropout, which the weights do not tell either, is 0. A bias of the head becomes part of the bias of the last
        layer norm.

    Raises:
        ConversionError: tensors that are missing, that AFT has no place for, or whose shapes do not fit.
    """
    state = dict(state_dict)
    if "pos_bias" in state:
        return _layer(state, causal)
    return _model(state, hidden_act)


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
        raise ConversionError(f"layers of different (length, window): {sorted(sizes)}; AFT has one for all")
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
            bias = state.pop(f"{layer}{theirs}.bias", None)  # of the feed-forward layers, labml makes it optional
            tensors[f"{ours}{name}.bias"] = weight.new_zeros(weight.shape[0]) if bias is None else bias
    head = tensors["lm_head.weight"] = _take(state, "generator.projection.weight")
    tensors["aft.layernorm.weight"] = _take(state, "encoder.norm.weight")
    shift = _shift_of_head(head, state.pop("generator.projection.bias", None))
    tensors["aft.layernorm.bias"] = _take(state, "encoder.norm.bias") + shift
    vocabulary, width = embeddings["word_embeddings"].shape
    config = AFTConfig(
        aft_type="local",
        hidden_size=width,
        num_hidden_layers=count,
        intermediate_size=tensors["aft.layers.0.mlp.fc1.weight"].shape[0],
        hidden_act=hidden_act,
        position_bias_dim=None,
        local_window_size=window,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        qkv_bias=qkv_bias,
        use_position_embeddings="position_embeddings" in embeddings,
    )
    return _loaded(AFTForCausalLM(config), tensors, state)


def _layer_tensors(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those of one mixer by our names, taken out of `state`."""
    tensors = {"position_bias_table": _take(state, f"{prefix}pos_bias").unsqueeze(0)}
    _take(state, f"{prefix}local_mask")
    for theirs, ours in LAYER.items():
        tensors[f"{ours}.weight"] = _take(state, f"{prefix}{theirs}.weight")
        if theirs == "output" or f"{prefix}{theirs}.bias" in state:
            tensors[f"{ours}.bias"] = _take(state, f"{prefix}{theirs}.bias")
    return tensors


def _table_size(state: dict[str, torch.Tensor], prefix: str) -> tuple[int, int]:
    """(longest sequence, window s): the mask is True where |t - t'| < s."""
    table, mask = (_take(state, f"{prefix}{name}", peek=True) for name in ("pos_bias", "local_mask"))
    length = len(table)
    window = int(mask[0].sum()) if mask.dim() == 2 else 0
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    if table.shape != (length, length) or mask.shape != table.shape or not torch.equal(mask.cpu(), distance < window):
        raise ConversionError(f"{prefix}local_mask is no window around the diagonal of {prefix}pos_bias")
    return length, window


def _embeddings(state: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Of tokens, and of as many positions as the biases cover, if there are any."""
    if "src_embed.weight" in state:  # without positions, and then not scaled
        return {"word_embeddings": state.pop("src_embed.weight")}
    tokens, positions = (_take(state, name) for name in EMBEDDINGS)
    if len(positions) < length:
        raise ConversionError(f"{EMBEDDINGS[1]} has {len(positions)} positions, and pos_bias {length}")
    scaled = tokens * math.sqrt(tokens.shape[1])
    return {"word_embeddings": scaled, "position_embeddings": positions[:length, 0].to(tokens.dtype)}


def _shift_of_head(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the input of a head needs in place of the head's bias: x with weight x = bias.

    Raises:
        ConversionError: there is none, as may be with more tokens than features.
    """
    if bias is None:
        return weight.new_zeros(weight.shape[1])
    exact, wanted = weight.double(), bias.double()
    shift = (torch.linalg.pinv(exact) @ wanted).to(weight.dtype)
    error = (exact @ shift.double() - wanted).abs()
    # What rounding x to the dtype of the weights accounts for, with a little room.
    rounding = 4 * torch.finfo(weight.dtype).eps * (exact.abs() @ shift.double().abs() + wanted.abs())
    if (error > rounding).any():
        raise ConversionError(
            "generator.projection.bias: the head of an AFT has no bias, and no bias of the last layer norm can stand "
            f"for one of {len(bias)} tokens with {weight.shape[1]} features; set it to 0 before, and fine-tune"
        )
    return shift


def _take(state: dict[str, torch.Tensor], name: str, *, peek: bool = False) -> torch.Tensor:
    if name not in state:
        raise ConversionError(f"{name} is missing: these are not the weights of labml's AFT-local")
    return state[name] if peek else state.pop(name)


def _loaded(module: Module, tensors: dict[str, torch.Tensor], left: dict[str, torch.Tensor]) -> Module:
    """A module with these weights, if there is nothing left over."""
    if left:
        raise ConversionError(f"AFT has no place for {', '.join(sorted(left))}")
    module = module.to(tensors[next(name for name in tensors if name.endswith("position_bias_table"))].dtype)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConversionError(f"the weights do not fit each other: {error}") from error
    return module.eval()
