"""Images whose lower part a model of sub-pixels draws (Figure 4)."""

import math

import torch

from ..modeling_aft import AFTForCausalLM


# Tokens are the values of a sub-pixel, in raster order with the channels of a pixel side by side, after one more token
# that begins a sequence.
VALUES = 256


def image_side(model: AFTForCausalLM) -> int:
    """The side in pixels of the images that a model of sub-pixels draws.

    Raises:
        ValueError: it is a model of something else.
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
    """Draw the rest of images of which the first rows are given.

    Args:
        model: of sub-pixels, in evaluation mode.
        images: (N, side, side, 3) bytes.
        rows: how many rows are given; half by default.
        temperature: of the softmax that sub-pixels are drawn from.
        seed: of PyTorch's global generator, whose state is left as it was.

    Returns:
        (N, side, side, 3) bytes; the given rows are unchanged.

    Raises:
        ValueError: not a model of sub-pixels, or images or rows of another size.
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
        tokens = model.generate(  # type: ignore[misc]  # transformers gives its `self` a type that no model has
            torch.cat([start, given], 1),
            max_new_tokens=3 * side * (side - rows),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            suppress_tokens=[VALUES],
        )
    return tokens[:, 1:].to(torch.uint8).unflatten(1, (side, side, 3)).cpu()
