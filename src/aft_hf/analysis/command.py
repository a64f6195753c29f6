"""The command `aft-hf visualize`: the paper's figures for any checkpoint."""

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
import typer
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.image_processing_utils import BaseImageProcessor

from ..configuration_aft import AFTConfig
from ..conversion.images import pixel_batches, read_images
from ..conversion.source import read_source
from ..data.image_size import pixel_values
from ..loading import find_file, load
from ..modeling_aft import HEADS, AFTModel, AFTPreTrainedModel
from ..reading import explained, read_json
from .completions import complete_images, image_side
from .maps import bias_maps, implicit_attention, key_features, on_patches
from .pictures import BIASES, check_path, draw_images, draw_losses, draw_maps, save
from .relative_attention import mean_attention, patch_grid, relative_attention


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Kind(StrEnum):
    """Kinds of pictures."""

    biases = "biases"
    attention = "attention"
    keys = "keys"
    implicit = "implicit"
    completions = "completions"
    losses = "losses"


KINDS = (
    "biases: position biases w of all layers (Figures 1, 3, 6, 7, 8 of the paper). attention: attention of a ViT or "
    "DeiT by relative position, averaged over --images (Figures 1, 5). keys: keys of all layers for an image "
    "(Figures 9 to 12) or a text. implicit: implicit attention of one position (Eq. 3). completions: images completed "
    "by a model of sub-pixels (Figure 4). losses: losses of a training run."
)


def visualize_command(
    context: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="Directory or Hub id of the checkpoint.")],
    kind: Annotated[Kind, typer.Argument(help=KINDS)],
    out: Annotated[
        list[Path] | None, typer.Option(help="Output file, .png or .svg; repeat for several. By default KIND.png.")
    ] = None,
    values: Annotated[str, typer.Option(help="For biases: w, exp for exp(w), or expm1 for exp(w) - 1.")] = "w",
    layers: Annotated[str | None, typer.Option(help="Layers to draw, such as 1,3,5; by default all.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Maximum number of heads or features to draw per layer.")] = 16,
    images: Annotated[Path | None, typer.Option(help="An image, a folder of images, or parquet files.")] = None,
    num_images: Annotated[
        int | None, typer.Option(min=1, help="Number of images; by default 256 for attention, 8 for completions.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="For keys and implicit of a text model: the text.")] = None,
    position: Annotated[
        str | None,
        typer.Option(
            help="For implicit: ROW,COLUMN of a patch (default: center), or index of a token (default: last)."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="For completions: number of given rows; by default half.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For completions: random seed.")] = 0,
) -> None:
    """Draw what a checkpoint has learned, as pictures that are readable on light and dark backgrounds."""
    paths = out or [Path(f"{kind.value}.png")]
    for path in paths:
        check_path(path)
    figure = DRAW[kind](**context.params)
    for path in paths:
        save(figure, path)
        print(path)


def _biases(checkpoint: str, values: str, layers: str | None, heads: int, **_: Any) -> "Figure":
    maps, names = _chosen(bias_maps(_load(checkpoint), values), layers)
    label, scale = BIASES[values]
    return draw_maps(maps, names=names, scale=scale, label=label, most=heads)


def _attention(
    checkpoint: str, images: Path | None, num_images: int | None, layers: str | None, heads: int, **_: Any
) -> "Figure":
    pictures = _images(images, num_images or 256)
    model, processor = _load_transformer(checkpoint)
    attention, _count = mean_attention(model, pixel_batches(pictures, processor))
    maps, names = _chosen([relative_attention(each, patch_grid(model)) for each in attention], layers)
    return draw_maps(maps, names=names, scale="own", label="attention by offset", most=heads)


def _keys(checkpoint: str, **given: Any) -> "Figure":
    model = _load(checkpoint)
    inputs, image = _inputs(model, checkpoint, **given)
    return _draw_features(model, key_features(model, **inputs), inputs, image, "key K", "signed", **given)


def _implicit(checkpoint: str, position: str | None, **given: Any) -> "Figure":
    model = _load(checkpoint)
    inputs, image = _inputs(model, checkpoint, **given)
    attention = implicit_attention(model, _position(model, inputs, position), **inputs)
    if set(model.config.layer_aft_types) == {"conv"}:  # the features of a head differ only in their gates
        attention = [each[:: len(each) // cast(int, model.config.num_heads)] for each in attention]
    return _draw_features(model, attention, inputs, image, "weight (Eq. 3)", "positive", **given)


def _completions(
    checkpoint: str, images: Path | None, num_images: int | None, rows: int | None, seed: int, **_: Any
) -> "Figure":
    model: Any = _load(checkpoint)  # `image_side` refuses other models
    side = image_side(model)
    pictures = [image.resize((side, side), Image.Resampling.BOX) for image in _images(images, num_images or 8)]
    originals = torch.from_numpy(np.stack([np.asarray(image) for image in pictures]))
    given = originals.clone()
    given[:, side // 2 if rows is None else rows :] = 0
    completed = complete_images(model, originals, rows=rows, seed=seed)
    return draw_images({"given": given, "completed": completed, "original": originals})


def _losses(checkpoint: str, **_: Any) -> "Figure":
    path = find_file(checkpoint, "results.json")
    results = {} if path is None else read_json(path, dict[str, Any])
    if not results.get("losses"):
        raise ValueError(f"{checkpoint}: no results.json with losses; give the output of a training run")
    with explained(f"{path}: is not the results.json of a training run"):
        return draw_losses([(Path(checkpoint).name, results)])


DRAW: dict[Kind, Callable[..., "Figure"]] = {
    Kind.biases: _biases,
    Kind.attention: _attention,
    Kind.keys: _keys,
    Kind.implicit: _implicit,
    Kind.completions: _completions,
    Kind.losses: _losses,
}


def _load(checkpoint: str) -> AFTPreTrainedModel:
    """Load an AFT with the head that it was saved with, in evaluation mode."""
    config = load(AutoConfig, checkpoint)
    if not isinstance(config, AFTConfig):
        raise ValueError(
            f"{checkpoint} is no AFT but a {config.model_type}; for a ViT or DeiT, give the kind attention"
        )
    classes = {each.__name__: each for each in HEADS}
    return load(classes.get((config.architectures or [""])[0], AFTModel), checkpoint).eval()


def _load_transformer(checkpoint: str) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Load a ViT or DeiT in any format, or a BEiT, as which the recipes train DeiT, and its image processor."""
    try:
        is_beit = load(AutoConfig, checkpoint).model_type == "beit"
    except (ValueError, OSError):  # formats without a config of transformers
        is_beit = False
    if is_beit:
        model = load(AutoModelForImageClassification, checkpoint, dtype="float32").eval()
        return model, load(AutoImageProcessor, checkpoint)
    source = read_source(checkpoint)
    return source.to_transformers().float(), source.image_processor


def _images(path: Path | None, count: int) -> list[Image.Image]:
    if path is None:
        raise ValueError("this kind needs images; give --images FILE_OR_FOLDER")
    return list(read_images(path, count))


def _inputs(
    model: AFTPreTrainedModel, checkpoint: str, *, images: Path | None, text: str | None, **_: Any
) -> tuple[dict[str, Any], Image.Image | None]:
    """Return the inputs of the model, and the image if the model reads images."""
    if model.config.modality == "image":
        image = _images(images, 1)[0]
        return {"pixel_values": pixel_values(load(AutoImageProcessor, checkpoint), [image])}, image
    if text is None:
        raise ValueError('the model reads text; give --text "..."')
    return {"input_ids": load(AutoTokenizer, checkpoint)(text, return_tensors="pt")["input_ids"]}, None


def _position(model: AFTPreTrainedModel, inputs: dict[str, Any], text: str | None) -> int:
    """Return the index of the query that --position names."""
    if "input_ids" in inputs:
        if text is not None and not re.fullmatch(r"\d+", text):
            raise ValueError(f"--position {text!r}: give the index of a token, from 0")
        return inputs["input_ids"].shape[1] - 1 if text is None else int(text)
    rows, columns = model.config.grid_of(inputs["pixel_values"].shape[-2:])
    patch = re.fullmatch(r"(\d+),(\d+)", text or f"{rows // 2},{columns // 2}")
    if patch is None or int(patch[1]) >= rows or int(patch[2]) >= columns:
        raise ValueError(f"--position {text!r}: give ROW,COLUMN of one of the {rows} x {columns} patches, from 0")
    return int(bool(model.config.use_cls_token)) + int(patch[1]) * columns + int(patch[2])


def _draw_features(
    model: AFTPreTrainedModel,
    features: list[torch.Tensor],
    inputs: dict[str, Any],
    image: Image.Image | None,
    label: str,
    scale: str,
    *,
    layers: str | None,
    heads: int,
    **_: Any,
) -> "Figure":
    """Draw features (n, T) of each layer: for an image a map of the patches for each, for a text one map of all."""
    features, names = _chosen(features, layers)
    if image is None:
        maps, axes = [each[None] for each in features], ("position", "feature")
        return draw_maps(maps, names=names, scale=scale, label=label, most=heads, axes_labels=axes)
    column = "head" if all(len(each) == model.config.num_heads for each in features) else "feature"
    maps = [on_patches(each, model.config.grid_of(inputs["pixel_values"].shape[-2:])) for each in features]
    return draw_maps(maps, names=names, scale="own", label=label, most=heads, column=column, picture=image)


def _chosen(layers: list[torch.Tensor], numbers: str | None) -> tuple[list[torch.Tensor], list[str]]:
    """Return the layers that --layers lists, counted from 1, and their names."""
    if numbers is None:
        chosen = list(range(1, len(layers) + 1))
    else:
        chosen = [int(number) if number.strip().isdigit() else 0 for number in numbers.split(",")]
    if not all(1 <= number <= len(layers) for number in chosen):
        raise ValueError(f"--layers {numbers}: give numbers from 1 to {len(layers)}, separated by commas")
    return [layers[number - 1] for number in chosen], [f"layer {number}" for number in chosen]
