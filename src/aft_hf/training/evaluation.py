"""Evaluation of saved models, AFT and others: image classifiers and language models."""

import copy
import inspect
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.utils import logging

from ..data.bytes import IGNORED
from ..data.classes import are_names, order_by_class_number, shortened
from ..data.image_size import produces_size, resized_processor
from ..data.images import ImagePipeline, ImageRows, class_names, class_numbers
from ..data.text import group_into_blocks
from ..modeling_aft import AFTPreTrainedModel
from ..reading import first_line
from .metrics import AccuracyAndLoss, BitsPerToken, token_losses


logger = logging.get_logger(__name__)

# Tokens per block where the config of a language model has no max_position_embeddings.
USUAL_BLOCK_SIZE = 1024


def usable_device(name: str | None) -> torch.device:
    """Return the device `name`, checked by creating a tensor on it; by default the accelerator, else the CPU.

    Raises:
        ValueError: PyTorch does not know the device, the machine does not have it, or it is the meta device.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} cannot be used here: {first_line(error)}") from error
    if device.type == "meta":
        raise ValueError("--device meta computes nothing: give cpu, or an accelerator")
    return device


def own_block_size(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the maximum length of a language model: the lesser of its config's (default 1024) and its tokenizer's."""
    longest = getattr(config, "max_position_embeddings", None) or USUAL_BLOCK_SIZE
    return min(longest, tokenizer.model_max_length)  # a huge number if the tokenizer sets none


def is_image_classifier(config: PreTrainedConfig) -> bool:
    """Return whether a config is of an image classifier, by the Auto classes or by the `auto_map` of its own code."""
    if getattr(config, "modality", None) == "text":
        return False
    remote = getattr(config, "auto_map", None) or {}
    return type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING or "AutoModelForImageClassification" in remote


@torch.inference_mode()
def evaluate_classifier(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    dataset: Dataset,
    *,
    image_size: tuple[int, int] | None = None,
    stretch_kernels: bool = True,
    enlarge_patches: bool = True,
    batch_size: int = 64,
    image_column: str = "image",
    label_column: str = "label",
) -> dict[str, float]:
    """Return top-1 accuracy, top-5 accuracy if there are more than five classes, and the loss in nats.

    Args:
        model: an image classifier, on the device to run on.
        processor: the image processor of the model.
        dataset: rows with an image and a label. Classes are matched by name, or by number (with a warning) if the
            data or the model has no class names.
        image_size: (height, width) in pixels instead of the processor's size. The model resizes its position
            embeddings if it can (ViT, DeiT), and an AFT-conv its kernels and patches.
        stretch_kernels, enlarge_patches: False keeps the kernels or the patch size of an AFT-conv as trained. They
            then cover another part of the image.
        batch_size: images per forward pass.
        image_column, label_column: names of the columns in the dataset.

    Raises:
        ValueError: the data has classes that the model does not have.
    """
    if image_size is not None:
        if (stretch_kernels or enlarge_patches) and not produces_size(processor, image_size):
            model = _adapted(model, image_size, stretch_kernels=stretch_kernels, enlarge_patches=enlarge_patches)
        processor = resized_processor(processor, image_size)
    labels: Any = model.config.id2label
    names, numbers = [labels[number] for number in range(len(labels))], None
    given = class_names(dataset, label_column)
    if set(given) <= set(names):
        numbers = class_numbers(dataset, label_column, names)
    elif are_names(given) and are_names(names):
        raise ValueError(
            f"the data has the classes {shortened(given)}, the model {shortened(names)}: give data with the model's "
            "classes, or, if only the names differ, set id2label of the model to those of the data"
        )
    elif len(given) > len(names):
        raise ValueError(f"the data has {len(given)} classes, the model {len(names)}: {shortened(given)}")
    else:
        logger.warning(f"classes are matched by number: the data has {shortened(given)}, the model {shortened(names)}")
        numbers = class_numbers(dataset, label_column, order_by_class_number(given, len(names)))
    columns = {"image_column": image_column, "label_column": label_column}
    pipeline = ImagePipeline(processor, numbers=numbers, **columns)
    options = {}
    if image_size is not None and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        options["interpolate_pos_encoding"] = True
    metric = AccuracyAndLoss(keep_in_memory=True)
    model.eval()
    loader = DataLoader(ImageRows(dataset.with_transform(pipeline)), batch_size, collate_fn=default_data_collator)
    for batch in tqdm(loader, desc="images", unit="batch", disable=None):
        pixels = batch["pixel_values"].to(model.device, model.dtype)
        logits = model(pixel_values=pixels, **options).logits
        metric.add_batch(predictions=logits.float().cpu().numpy(), references=batch["labels"])
    return metric.compute(top_k=(1, 5) if len(names) > 5 else (1,))


def _adapted(model: PreTrainedModel, image_size: tuple[int, int], **options: bool) -> PreTrainedModel:
    """Return a copy of an AFT-conv that is adapted to an image size, or the model itself if it cannot be adapted."""
    if not isinstance(model, AFTPreTrainedModel) or set(model.config.layer_aft_types) != {"conv"}:
        return model
    adapted = copy.deepcopy(model)
    try:
        adapted.adapt_to_image_size(image_size, **options)
    except ValueError as error:
        logger.warning(f"the model is not adapted to images of {image_size} pixels: {first_line(error)}")
        return model
    return adapted


@torch.inference_mode()
def evaluate_language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    *,
    block_size: int,
    stride: int | None = None,
    batch_size: int = 16,
    text_column: str = "text",
) -> dict[str, float]:
    """Return bits per token and perplexity over blocks of a text.

    No end-of-text tokens are added, so the bits of a byte model are bits per byte.

    By default blocks do not overlap, and the first token of each block, which has no context, is not scored. With a
    stride, every token in a block except the first of the text is scored once, with at least `block_size - stride`
    tokens of context where the text has as many before it. The end of the text that fills no block is dropped, and so
    are the tokens at the end of each thousand rows that `group_into_blocks` drops.

    Args:
        model: a language model, on the device to run on.
        tokenizer: the tokenizer of the model.
        dataset: rows of text.
        block_size: tokens per block.
        stride: tokens from the start of one block to the start of the next; None for blocks without overlap.
        batch_size: blocks per forward pass.
        text_column: name of the text column in the dataset.

    Raises:
        ValueError: the text is shorter than a block, or the stride would leave tokens out.
    """
    piece = block_size if stride is None else max(stride, 2)
    blocks = group_into_blocks(dataset, tokenizer, piece, column=text_column, mark_ends=False)
    if len(blocks) * piece < block_size:
        raise ValueError(
            f"the text is shorter than one block of {block_size} tokens: give a longer text or a smaller block_size"
        )
    if stride is not None:
        blocks = overlapping_blocks(blocks, block_size, stride)
    metric = BitsPerToken(keep_in_memory=True)
    model.eval()
    loader = DataLoader(blocks, batch_size, collate_fn=default_data_collator)
    for batch in tqdm(loader, desc="text", unit="batch", disable=None):
        tokens = batch["input_ids"].to(model.device)
        losses = token_losses(model(input_ids=tokens, use_cache=False).logits, tokens)
        metric.add_batch(predictions=losses.flatten().cpu(), references=batch["labels"][:, 1:].flatten())
    return metric.compute()


def overlapping_blocks(pieces: Dataset, block_size: int, stride: int) -> list[dict[str, torch.Tensor]]:
    """Cut the joined `input_ids` of `pieces` into a block every `stride` tokens; labels scored before are -100.

    Raises:
        ValueError: `stride` is not in 1 .. block_size - 1 (the first token of a block is never scored).
    """
    if not 0 < stride < block_size:
        raise ValueError(f"stride must be in 1 .. block_size - 1 = {block_size - 1}, got {stride}")
    tokens = torch.cat([torch.tensor(ids) for ids in pieces["input_ids"]])
    blocks = []
    for start in range(0, len(tokens) - block_size + 1, stride):
        labels = tokens[start : start + block_size].clone()
        labels[: block_size - stride if start else 0] = IGNORED
        blocks.append({"input_ids": tokens[start : start + block_size], "labels": labels})
    return blocks
