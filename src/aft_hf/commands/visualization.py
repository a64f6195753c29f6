"""The command `aft-hf visualize`: the paper's figures for any checkpoint."""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, AutoTokenizer, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor

from ..analysis.maps import bias_maps, key_features, mean_attention, on_patches, patch_grid, relative_attention
from ..analysis.pictures import BIASES, check_path, draw_maps, save
from ..configuration_aft import AFTConfig
from ..console import refuse_unused
from ..conversion.images import read_images
from ..conversion.source import read_source
from ..data.image_size import pixel_values
from ..limits import limited
from ..loading import load, read_config
from ..modeling_aft import HEADS, AFTModel, AFTPreTrainedModel


KINDS = "biases: position biases. keys: of an image or a text. attention: of a ViT, by offset, mean over --images."
# Options, and the kinds that use them.
OF_KINDS = {"values": ("biases",), "num_images": ("attention",), "images": ("attention", "keys"), "text": ("keys",)}


def visualize_command(
    context: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="Directory or Hub id of the checkpoint.")],
    kind: Annotated[Literal["biases", "attention", "keys"], typer.Argument(help=KINDS)],
    out: Annotated[list[Path] | None, typer.Option(help="Output .png or .svg; repeatable. Default: KIND.png.")] = None,
    values: Annotated[str, typer.Option(help="For biases: w, exp for exp(w), or expm1 for exp(w) - 1.")] = "w",
    layers: Annotated[str | None, typer.Option(help="Layers to draw, such as 1,3,5; by default all.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Maximum number of heads or features to draw per layer.")] = 16,
    images: Annotated[Path | None, typer.Option(help="An image, a folder of images, or parquet files.")] = None,
    num_images: Annotated[int, typer.Option(min=1, help="For attention: number of images.")] = 256,
    text: Annotated[str | None, typer.Option(help="For keys of a text model: the text.")] = None,
) -> None:
    """Draw what a checkpoint has learned, as pictures that are readable on light and dark backgrounds."""
    paths = out or [Path(f"{kind}.png")]
    for path in paths:
        check_path(path)
    unused = {name: kinds for name, kinds in OF_KINDS.items() if kind not in kinds}
    refuse_unused(context, {name: f"the kind {' or '.join(kinds)}" for name, kinds in unused.items()})
    if kind == "attention":
        model, processor = _load_transformer(checkpoint)
        batches = (pixel_values(processor, [image]) for image in _images(images, num_images))
        attention, _ = mean_attention(model, batches)
        maps = [relative_attention(each, patch_grid(model.config)) for each in attention]
        figure = _draw(maps, layers, scale="own", label="attention by offset", most=heads)
    elif kind == "biases":
        label, scale = BIASES.get(values, ("", ""))
        figure = _draw(bias_maps(_load(checkpoint), values), layers, scale=scale, label=label, most=heads)
    else:
        figure = _keys(context, checkpoint, layers, heads, images, text)
    for path in paths:
        save(figure, path)
        print(path)


def _draw(maps: list[torch.Tensor], layers: str | None, **options: Any) -> Any:
    """Return a figure of the maps of the layers that --layers lists, counted from 1."""
    chosen = [*map(str, range(1, len(maps) + 1))] if layers is None else [each.strip() for each in layers.split(",")]
    if not all(each.isdecimal() and 1 <= int(each) <= len(maps) for each in chosen):
        raise ValueError(f"--layers {layers}: give numbers from 1 to {len(maps)}, separated by commas")
    return draw_maps([maps[int(each) - 1] for each in chosen], names=[f"layer {each}" for each in chosen], **options)


def _keys(
    context: typer.Context, checkpoint: str, layers: str | None, heads: int, images: Path | None, text: str | None
) -> Any:
    """Return a figure of the keys of each layer: a map of patches for each head or feature, or one map for a text."""
    model = _load(checkpoint)
    of_text = model.config.modality == "text"
    refuse_unused(context, {"images": "a model of images"} if of_text else {"text": "a model of text"})
    if of_text:
        if text is None:
            raise ValueError('the model reads text; give --text "..."')
        tokenizer = load(AutoTokenizer, checkpoint)
        tokens = limited(lambda: dict(tokenizer([text])), checkpoint, len(text))
        inputs = {name: torch.tensor(values, dtype=torch.long) for name, values in tokens.items()}
        features = key_features(model, **inputs)
        maps, axes = [each[None] for each in features], ("position", "feature")
        return _draw(maps, layers, scale="signed", axes_labels=axes, label="key K", most=heads)
    (image,) = _images(images, 1)
    pixels = pixel_values(load(AutoImageProcessor, checkpoint), [image])
    features = key_features(model, pixel_values=pixels)
    column = "head" if all(len(each) == model.config.num_heads for each in features) else "feature"
    maps = [on_patches(each, model.config.grid_of(pixels.shape[-2:])) for each in features]
    return _draw(maps, layers, scale="own", column=column, picture=image, label="key K", most=heads)


def _load(checkpoint: str) -> AFTPreTrainedModel:
    """Load an AFT with the head that it was saved with, in evaluation mode."""
    architecture = (load(AFTConfig, checkpoint).architectures or [""])[0]
    return load({each.__name__: each for each in HEADS}.get(architecture, AFTModel), checkpoint).eval()


def _load_transformer(checkpoint: str) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Load a ViT or DeiT in any format, or a BEiT, as which the recipes train DeiT, and its image processor."""
    if not Path(checkpoint).is_file() and read_config(checkpoint).model_type == "beit":
        model = load(AutoModelForImageClassification, checkpoint, dtype="float32").eval()
        return model, load(AutoImageProcessor, checkpoint)
    source = read_source(checkpoint)
    return source.to_transformers().float(), source.image_processor


def _images(path: Path | None, count: int) -> list[Image.Image]:
    if path is None:
        raise ValueError("this kind needs images; give --images FILE_OR_FOLDER")
    return list(read_images(path, count))
