"""Position biases that begin where a teacher looks: w of each AFT layer fitted to the attention of its ViT.

Of Eq. 2, exp(w_tt') is what an AFT layer with equal keys gives position t' before it is normalized. So w is a log of
the teacher's mean attention, up to a constant for each row, which the sums of Eq. 2 divide out. AFT head i owns
features [i d/h, (i+1) d/h), teacher head j its own: head i is fitted to the mean of the teacher's maps weighted by the
features that they share.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from PIL import Image
from torch import nn

from ..analysis.relative_attention import mean_attention, num_offsets, relative_attention
from ..mixers_aft import AFTConv, AFTFull, AFTLocal, AFTMixer
from ..modeling_aft import AFTForImageClassification
from .images import pixel_batches
from .source import VisionTransformerSource


# Where a teacher (nearly) never looks, a log has no end. Beyond e^10 = 22026 the training could not come back.
LARGEST_BIAS = 10.0

# Of the factors of AFT-local. Less of a ridge fits w a little better by factors so large that training could not move
# them: at 1e-6 some are 1000, at 1e-2 ten.
ALTERNATIONS, RIDGE = 5, 1e-2


@torch.no_grad()
def fit_position_biases(
    model: AFTForImageClassification, source: VisionTransformerSource, images: Iterable[torch.Tensor | Image.Image]
) -> dict[str, str]:
    """Set the position biases of every layer to what the attention of the teacher on images says.

    Args:
        model: converted from `source`, at its image size unless all position biases are relative.
        source: the teacher.
        images: pictures, or pixel values of one image or a batch.

    Returns:
        The names of the parameters that were set, and in words to what.

    Raises:
        ValueError: there is no image.
    """
    teacher = source.to_transformers().float()
    batches = pixel_batches(images, source.image_processor)
    maps, num_images = mean_attention(teacher, batches, keep_class_token=bool(model.config.use_cls_token))
    fitted = {}
    for i, (layer, attention) in enumerate(zip(model.aft.layers, maps)):
        mixer: Any = layer.mixer
        weights = head_weights(mixer.num_heads, len(attention), source.config.hidden_size)
        attention = torch.einsum("ij,jts->its", weights.double(), attention.double())
        for name, value in _fit(mixer, attention, source.grid_size).items():
            getattr(mixer, name).copy_(value)
            fitted[f"aft.layers.{i}.mixer.{name}"] = f"to the attention of the source on {num_images} images"
    return fitted


def head_weights(num_heads: int, num_teacher_heads: int, width: int) -> torch.Tensor:
    """(h, H): the share of the features of AFT head i that belong to teacher head j; rows sum to 1."""
    feature = torch.arange(width)
    mine = nn.functional.one_hot(feature * num_heads // width, num_heads).float()
    theirs = nn.functional.one_hot(feature * num_teacher_heads // width, num_teacher_heads).float()
    return mine.mT @ theirs * num_heads / width


def _fit(mixer: AFTMixer, attention: torch.Tensor, grid_size: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The parameters of a mixer by name, fitted to (h, T, T)."""
    if isinstance(mixer, AFTConv):
        bias = conv_bias(attention, grid_size, mixer.window)
        return _as_reparameterized(bias / mixer.position_bias_multiplier)
    if isinstance(mixer, AFTLocal):
        inside = band(attention.shape[-1], mixer.window)
        return _as_factors(local_bias(attention, inside), inside, mixer)
    if isinstance(mixer, AFTFull):
        return _as_factors(full_bias(attention), torch.ones_like(attention[0], dtype=torch.bool), mixer)
    return {}


def conv_bias(attention: torch.Tensor, grid_size: tuple[int, int], kernel_size: int) -> torch.Tensor:
    """w(offset) = log(M(offset) / M_outside), of AFT-conv.

    M is the attention by offset, the mean over all queries; M_outside its mean per position outside the window, where
    Eq. 6 has w = 0. Where the window covers the grid the constant is free, and w is centred. Offsets that no two
    patches have get 0.

    Args:
        attention: (h, T, T), T = rows * columns.
        grid_size: rows and columns.
        kernel_size: s, odd.

    Returns:
        (h, s, s).
    """
    relative, counts = relative_attention(attention, grid_size), num_offsets(grid_size)
    centre = kernel_size // 2
    # Of the grid of offsets the window, cut or padded on each side: from centre n - 1 to centre s // 2.
    margins = [centre - (n - 1) for n in reversed(grid_size) for _ in range(2)]
    window, window_counts = (nn.functional.pad(x, margins) for x in (relative, counts))
    mass = (relative * counts).sum((1, 2)) - (window * window_counts).sum((1, 2))
    pairs = int(counts.sum() - window_counts.sum())
    bias = _log(window)
    inside = window_counts > 0
    constant = _log(mass / pairs) if pairs else bias[:, inside].mean(-1)
    # Where nothing is left outside, the constant has no end: the largest w is then what there is room for.
    constant = constant.maximum(bias[:, inside].amax(-1) - LARGEST_BIAS)
    return (bias - constant[:, None, None]).clamp(-LARGEST_BIAS, LARGEST_BIAS) * inside


def full_bias(attention: torch.Tensor) -> torch.Tensor:
    """w_tt' = log A_tt' of AFT-full, each row centred: (h, T, T) to (h, T, T)."""
    bias = _log(attention)
    return (bias - bias.mean(-1, keepdim=True)).clamp(-LARGEST_BIAS, LARGEST_BIAS)


def band(length: int, window_size: int) -> torch.Tensor:
    """(T, T), the pairs with |t - t'| < s (Eq. 4)."""
    positions = torch.arange(length)
    return (positions[:, None] - positions).abs() < window_size


def local_bias(attention: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """w_tt' = log(A_tt' / the row's mean outside the window) of AFT-local inside the window, else 0.

    A row without an outside is centred.

    Args:
        attention: (h, T, T).
        inside: (T, T), the window of each row.

    Returns:
        (h, T, T).
    """
    bias, outside = _log(attention), (~inside).sum(-1)
    mean_outside = (attention * ~inside).sum(-1) / outside.clamp_min(1)
    constant = torch.where(outside > 0, _log(mean_outside), bias.mean(-1))
    return (bias - constant[..., None]).clamp(-LARGEST_BIAS, LARGEST_BIAS) * inside


def _log(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def _as_reparameterized(bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Kernel, gamma and beta with which Eq. 8 gives this w: its own deviation and mean undo the standardization."""
    variance, mean = torch.var_mean(bias.flatten(1), -1, correction=0)
    # As Eq. 8 is computed, 1e-12 included.
    return {"kernel": bias, "kernel_scale": (variance + 1e-12).sqrt(), "kernel_shift": mean}


def _as_factors(bias: torch.Tensor, inside: torch.Tensor, mixer: AFTFull) -> dict[str, torch.Tensor]:
    """The table, or the factors of Eq. 7 with the least squared error over the pairs inside."""
    if not mixer.factorized:
        return {"position_bias_table": bias / mixer.position_bias_multiplier}
    rank = min(mixer.position_bias_query.shape[-1], bias.shape[-1])
    factors = [factorize(head, rank, inside) for head in bias]
    query, key = (torch.stack(matrices) / math.sqrt(mixer.position_bias_multiplier) for matrices in zip(*factors))
    # Columns beyond the rank add nothing to w, but learn: with both factors 0 they never would.
    padding = mixer.position_bias_key[..., rank:]
    return {
        "position_bias_query": torch.cat([query, torch.zeros_like(padding)], -1),
        "position_bias_key": torch.cat([key, padding], -1),
    }


def factorize(bias: torch.Tensor, rank: int, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """u and v, (T, rank) each, with u v^T near to a (T, T) `bias` for the pairs inside, (T, T).

    The largest singular values are the best for all pairs. Where not all of them count, alternating least squares go
    on from there.
    """
    u, singular, v = torch.linalg.svd(bias)
    root = singular[:rank].sqrt()
    query, key = u[:, :rank] * root, v.mT[:, :rank] * root
    if not inside.all():
        for _ in range(ALTERNATIONS):
            query = _least_squares(bias, key, inside)
            key = _least_squares(bias.mT, query, inside.mT)
    return query, key


def _least_squares(bias: torch.Tensor, key: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The u_t that minimize the sum over the pairs inside of (u_t . v_t' - w_tt')^2, (T, rank)."""
    products = (key[:, :, None] * key[:, None, :]).flatten(1)  # (T, rank * rank)
    gram = (inside.to(key.dtype) @ products).unflatten(1, (key.shape[1], key.shape[1]))
    return torch.linalg.solve(gram + RIDGE * torch.eye(key.shape[1], dtype=key.dtype), (bias * inside) @ key)
