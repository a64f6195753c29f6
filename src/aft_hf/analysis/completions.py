"""Image completion: a model of sub-pixels generates the lower part of an image (Figure 4)."""

import math

import torch

from ..modeling_aft import AFTForCausalLM


# Tokens 0 .. 255 are the values of sub-pixels, in raster order with the channels of a pixel side by side. Token 256
# begins a sequence.
VALUES = 256


def image_side(model: AFTForCausalLM) -> int:
    """Return the side in pixels of the images that a model of sub-pixels generates.

    Raises:
        ValueError: the model is not a model of sub-pixels.
    """
    config = model.config
    side = math.isqrt(config.max_position_embeddings // 3)
    if config.modality != "text" or config.vocab_size != VALUES + 1 or config.bos_token_id != VALUES:
        raise ValueError("completions are drawn by a model of sub-pixels, such as those of configs/cifar10")
    return side


@torch.no_grad()
def complete_images(
    model: AFTForCausalLM, images: torch.Tensor, *, rows: int | None = None, temperature: float = 1.0, seed: int = 0
) -> torch.Tensor:
    """Complete images of which the first rows are given.

    Args:
        model: a model of sub-pixels, in evaluation mode.
        images: images of dtype uint8, (N, side, side, 3).
        rows: number of given rows. Default: half of the rows.
        temperature: temperature of the softmax that sub-pixels are sampled from.
        seed: seed of PyTorch's global generator, whose previous state is restored.

    Returns:
        The completed images of dtype uint8, (N, side, side, 3); the given rows are unchanged.

    Raises:
        ValueError: the model is not a model of sub-pixels, or the size of the images or `rows` does not fit it.
    """
    side = image_side(model)
    rows = side // 2 if rows is None else rows
    if images.shape[1:] != (side, side, 3):
        raise ValueError(f"the model draws {side} x {side} pixels: images must be (N, {side}, {side}, 3)")
    if not 0 <= rows < side:
        raise ValueError(f"rows must be 0 .. {side - 1}, got {rows}")
    given = images[:, :rows].flatten(1).long().to(model.device)
    start = torch.full((len(images), 1), VALUES, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        tokens = model.generate(
            torch.cat([start, given], 1),
            max_new_tokens=3 * side * (side - rows),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            suppress_tokens=[VALUES],
        )
    return tokens[:, 1:].to(torch.uint8).unflatten(1, (side, side, 3)).cpu()
