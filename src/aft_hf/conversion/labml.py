"""Conversion of AFT-local of labml's annotated implementations (labml_nn.transformers.aft) to this package.

labml's layer stores its position biases as one table, `pos_bias`, and its window as a matrix, `local_mask`. labml's
models are the pre-norm blocks of labml_nn.transformers between an embedding (`src_embed`) and a linear head
(`generator`).
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from ..configuration_aft import AFTConfig
from ..errors import explained
from ..mixers_aft import AFTLocal
from ..modeling_aft import AFTForCausalLM
from .names import renamed
from .report import ConversionError


# Parts of labml's names, and those in this package.
NAMES = {
    r"^encoder\.layers\.(\d+)\.": r"aft.layers.\1.",
    r"\.norm_self_attn\.": ".layernorm_before.",
    r"\.norm_ff\.": ".layernorm_after.",
    r"\.feed_forward\.layer([12])\.": r".mlp.fc\1.",
    r"\.self_attn\.": ".mixer.",
    r"\b(q)uery\.|\b(k)ey\.|\b(v)alue\.|\b(o)utput\.": r"\1\2\3\4_proj.",
    r"\bpos_bias$": "position_bias_table",
    r"^encoder\.norm\.": "aft.layernorm.",
    r"^generator\.projection\.": "lm_head.",
    r"^src_embed\.(linear\.)?weight$": "aft.embeddings.word_embeddings.weight",
    r"^src_embed\.positional_encodings$": "aft.embeddings.position_embeddings.weight",
}
SCALED = "src_embed.linear.weight"  # by sqrt(d) before the positional encodings, learned or fixed, are added
WORDS, POSITIONS = "aft.embeddings.word_embeddings.weight", "aft.embeddings.position_embeddings.weight"
MASK, TABLE = "local_mask", "position_bias_table"


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
        ValueError: `hidden_act` is unknown.
    """
    AFTConfig(hidden_act=hidden_act)  # an unknown one is not a fault of the weights
    with explained("the weights are not those of labml's AFT-local", ConversionError):
        has_masks = any(re.fullmatch(rf"(encoder\..+\.)?{MASK}", str(name)) for name in state_dict)
        if not has_masks or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
            raise ConversionError(
                "these are not the weights of labml's AFT-local; give model.state_dict(), whose names have no prefix "
                "(module., _orig_mod.) before local_mask or encoder, and whose values are tensors"
            )
        tensors = {renamed(name, NAMES): value for name, value in state_dict.items()}
        if len(tensors) < len(state_dict):
            raise ConversionError("two names in the state dict stand for the same tensor; remove one of them")
        masks = {name.replace(MASK, TABLE): tensors.pop(name) for name in list(tensors) if name.endswith(MASK)}
        sizes = {(len(mask), int(mask[0].sum())) for mask in masks.values()}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(sizes) != 1 or len(dtypes) != 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ConversionError(
                f"its layers must have one (length, window) and dtype, got {sorted(sizes)} and {names}"
            )
        ((length, window),) = sizes
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        if not all(torch.equal(mask.cpu(), distance < window) for mask in masks.values()):
            raise ConversionError("each local_mask must be a window around the diagonal")
        tensors |= {name: tensors[name].unsqueeze(0) for name in masks}
        if masks.keys() == {TABLE}:
            options: dict[str, Any] = {"position_bias_dim": None, "qkv_bias": "q_proj.bias" in tensors}
            module: Any = AFTLocal(len(tensors["o_proj.bias"]), length, window, causal=causal, **options)
        else:
            if SCALED in state_dict:
                tensors[WORDS] = tensors[WORDS] * math.sqrt(tensors[WORDS].shape[1])
            module = _empty_model(tensors, length, window, hidden_act)
        module.to(*dtypes).load_state_dict(tensors)
        return module.eval()


def _empty_model(tensors: dict[str, torch.Tensor], length: int, window: int, hidden_act: str) -> AFTForCausalLM:
    """Return a new model for `tensors`, and change what it stores in another way: positions and the head's bias."""
    vocabulary, width = tensors[WORDS].shape
    if POSITIONS in tensors:
        tensors[POSITIONS] = tensors[POSITIONS][:length].squeeze(1)
    layers = [len(value) for name, value in tensors.items() if name.endswith(".mlp.fc1.weight")]
    if (bias := tensors.pop("lm_head.bias", None)) is not None:
        # A shift x of the head's input, by the bias of the last norm, replaces the bias of the head: weight x = bias.
        weight = tensors["lm_head.weight"].double()
        shift = torch.linalg.pinv(weight) @ bias.double()
        if not torch.allclose(weight @ shift, bias.double(), atol=1e-6):
            raise ConversionError(
                "generator.projection.bias: an AFT has no bias in its head, and no bias of its last norm can replace "
                f"this one of {len(bias)} tokens with {width} features; set it to 0, convert, and fine-tune"
            )
        if tensors["aft.layernorm.bias"].shape != shift.shape:
            raise ConversionError("encoder.norm.bias and generator.projection.bias must have one dimension each")
        tensors["aft.layernorm.bias"] = tensors["aft.layernorm.bias"] + shift.to(bias.dtype)
    return AFTForCausalLM(
        AFTConfig(
            aft_type="local",
            hidden_size=width,
            num_hidden_layers=len(layers),
            intermediate_size=layers[0],
            hidden_act=hidden_act,
            position_bias_dim=None,
            window_size=window,
            max_position_embeddings=length,
            vocab_size=vocabulary,
            qkv_bias="aft.layers.0.mixer.q_proj.bias" in tensors,
            use_position_embeddings=POSITIONS in tensors,
        )
    )
