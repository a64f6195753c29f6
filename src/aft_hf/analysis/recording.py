"""Recording the inputs of the mixers of a model, from which keys and implicit attention are computed."""

from typing import Any

import torch

from ..modeling_aft import AFTPreTrainedModel


@torch.no_grad()
def mixer_inputs(model: AFTPreTrainedModel, **inputs: Any) -> list[torch.Tensor]:
    """Run a model, and return the input of the mixer of each layer.

    Args:
        model: any AFT model, in evaluation mode if it has dropout.
        **inputs: inputs of the model, such as `pixel_values` or `input_ids`.

    Returns:
        The input of the mixer of each layer, (B, T, d).
    """
    kept: dict[int, torch.Tensor] = {}

    def keep(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[index] = args[0] if args else kwargs["query"]

    layers: Any = getattr(model, model.base_model_prefix, model).layers
    hooks = [
        layer.mixer.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: keep(index, args, kwargs), with_kwargs=True
        )
        for index, layer in enumerate(layers)
    ]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [kept[index] for index in range(len(layers))]
