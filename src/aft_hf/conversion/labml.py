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
from ..errors import InputError, explained
from ..mixers_aft import AFTLocal
from ..modeling_aft import AFTForCausalLM
from .names import renamed


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
WORDS, POSITIONS = "aft.embeddings.word_embeddings.weight", "aft.embeddings.position_embeddings.weight"


@torch.no_grad()
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
        InputError: a tensor is missing, has no counterpart in AFT, or does not have a fitting shape.
        ValueError: `hidden_act` is unknown.
    """
    AFTConfig(hidden_act=hidden_act)  # an unknown one is not a fault of the weights
    with explained("the weights are not those of labml's AFT-local"):
        has_masks = any(re.fullmatch(r"(encoder\..+\.)?local_mask", str(name)) for name in state_dict)
        if not has_masks or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
            raise InputError(
                "these are not the weights of labml's AFT-local; give model.state_dict(), whose names have no prefix "
                "(module., _orig_mod.) before local_mask or encoder, and whose values are tensors"
            )
        tensors = {renamed(name, NAMES): value for name, value in state_dict.items()}
        if len(tensors) < len(state_dict):
            raise InputError("two names in the state dict stand for the same tensor; remove one of them")
        masks = [tensors.pop(name).cpu() for name in list(tensors) if name.endswith("local_mask")]
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise InputError(f"the weights must have one dtype, got {', '.join(sorted(map(str, dtypes))) or 'none'}")
        length, window = len(masks[0]), int(masks[0][0].sum())
        inside = (torch.arange(length)[:, None] - torch.arange(length)).abs() < window
        if not all(torch.equal(mask, inside) for mask in masks):
            raise InputError("each local_mask must be the same window around the diagonal")
        for name in tensors:
            if name.endswith("position_bias_table"):
                tensors[name] = tensors[name].unsqueeze(0)
        (dtype,) = dtypes
        if "o_proj.bias" in tensors:  # a layer
            options: dict[str, Any] = {"position_bias_dim": None, "qkv_bias": "q_proj.bias" in tensors}
            layer = AFTLocal(len(tensors["o_proj.bias"]), length, window, causal=causal, **options).to(dtype)
            layer.load_state_dict(tensors)
            return layer.eval()
        if POSITIONS in tensors:
            tensors[POSITIONS] = tensors[POSITIONS][:length].squeeze(1)
        bias = tensors.pop("lm_head.bias", None)
        config = AFTConfig(
            aft_type="local",
            hidden_size=tensors[WORDS].shape[1],
            num_hidden_layers=len(masks),
            intermediate_size=len(tensors["aft.layers.0.mlp.fc1.weight"]),
            hidden_act=hidden_act,
            position_bias_dim=None,
            window_size=window,
            max_position_embeddings=length,
            vocab_size=len(tensors[WORDS]),
            qkv_bias="aft.layers.0.mixer.q_proj.bias" in tensors,
            use_position_embeddings=POSITIONS in tensors,
        )
        model: Any = AFTForCausalLM(config).to(dtype)  # type: ignore[arg-type]  # the wrapper of transformers
        model.load_state_dict(tensors)
        if "src_embed.linear.weight" in state_dict:  # labml scales it before it adds the positional encodings
            model.aft.embeddings.word_embeddings.weight.mul_(math.sqrt(config.hidden_size))
        if bias is not None:
            # A shift x of the head's input, by the bias of the last norm, replaces the bias of the head: W x = bias.
            weight = model.lm_head.weight.double()
            shift = torch.linalg.pinv(weight) @ bias.double()
            if not torch.allclose(weight @ shift, bias.double(), atol=1e-6):
                raise InputError(
                    "generator.projection.bias: an AFT has no bias in its head, and no bias of its last norm can "
                    f"replace this one of {len(bias)} tokens with {len(shift)} features; set it to 0 and fine-tune"
                )
            model.aft.layernorm.bias.add_(shift)
        return model.eval()
