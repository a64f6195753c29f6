"""Evaluation of saved models, AFT and others: image classifiers and language models."""

import copy
import inspect
from array import array
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from rich.table import Table
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.utils import logging

from ..atomic_files import write_json
from ..console import plain_console, refuse_unused
from ..conversion.resizing import adapt_to_image_size
from ..conversion.source import load_image_processor
from ..data.classes import model_classes, require_a_class
from ..data.image_size import resized_processor
from ..data.images import ImagePipeline, match_classes
from ..data.loading import load_local, require_column
from ..data.samples import RowSamples
from ..data.text import IGNORED, LOSSY, TOKEN_DTYPE, Windows, count_changed, read_texts, token_ids
from ..errors import described, explained
from ..loading import load, load_trained, weights_digest
from ..modeling_aft import AFTPreTrainedModel
from ..publishing.facts import Evaluations
from ..reading import read_json
from ..training.metrics import accuracy_and_loss, code_length


logger = logging.get_logger(__name__)

OF_IMAGES = ("image_size", "enlarge_patches", "image_column", "label_column")
OF_TEXT = ("block_size", "stride", "text_column")


def evaluate(options: SimpleNamespace) -> None:
    """Evaluate a saved model with the options of `evaluate_command`, and print the metrics."""
    source = options.model
    place = options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    dataset = load_local(options.data)
    config = load(AutoConfig, source)
    if options.out is not None and options.out.exists() and options.out.stat().st_size:
        try:
            read_json(options.out, Evaluations)
        except ValueError as error:
            raise ValueError(f"{options.out}: is no evaluation, so it is not replaced; give another file") from error
    is_of_images = is_image_classifier(config)
    needs, wanted = (OF_TEXT, "a language model") if is_of_images else (OF_IMAGES, "an image classifier")
    refuse_unused(options.context, dict.fromkeys(needs, wanted))
    of_samples = ""  # the end of the names of settings
    if options.max_samples is not None:  # a folder is sorted by class
        dataset = (dataset.shuffle(seed=0) if is_of_images else dataset).take(options.max_samples)
        of_samples = f", {len(dataset)} samples"
    auto_class = AutoModelForImageClassification if is_of_images else AutoModelForCausalLM
    columns = ("image_column", "label_column") if is_of_images else ("text_column",)
    given = {name: vars(options)[name] for name in (*columns, "batch_size")}
    results: dict[str, dict[str, float]] = {}
    with explained(f"{source}: cannot be evaluated on {options.data}"):
        model = load_trained(auto_class, source, config=config).to(place)
        for option in columns:
            require_column(DatasetDict(given=dataset), given[option], f"--{option.replace('_', '-')}")
        if is_of_images:
            processor, given["enlarge_patches"] = load_image_processor(source, config), options.enlarge_patches
            for side in options.image_size or [None]:
                name, size = ("as trained", None) if side is None else (f"{side} px", (side, side))
                results[name + of_samples] = evaluate_classifier(model, processor, dataset, image_size=size, **given)
        else:
            tokenizer = load(AutoTokenizer, source)
            longest = getattr(config, "max_position_embeddings", None) or 1024
            longest = min(longest, tokenizer.model_max_length)  # a huge number if the tokenizer sets none
            given |= {"block_size": options.block_size or int(longest), "stride": options.stride}
            name = f"blocks of {given['block_size']}" + (f", stride {options.stride}" if options.stride else "")
            results[name + of_samples] = evaluate_language_model(model, tokenizer, dataset, **given)
    metrics = list(next(iter(results.values())))
    table = Table("", *metrics, title=f"{source} on {options.data}")
    for name, values in results.items():
        table.add_row(name, *(f"{values[metric]:.4f}" for metric in metrics))
    plain_console().print(table)
    if options.out is not None:
        write_json(options.out, {"weights": weights_digest(source)} | results)


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
    enlarge_patches: bool = True,
    batch_size: int = 64,
    image_column: str = "image",
    label_column: str = "label",
) -> dict[str, float]:
    """Return top-1 accuracy, top-5 accuracy if there are more than five classes, and the loss in nats.

    Classes are matched as by `match_classes`. The model is on the device to run on. For an `image_size`, (height,
    width) in pixels instead of the processor's size, it resizes its position embeddings if it can (ViT, DeiT), and an
    AFT-conv its kernels and, with `enlarge_patches`, its patches, which otherwise cover another part of the image.
    """
    require_a_class("the model", model.config)
    if image_size is not None:
        resized = resized_processor(processor, image_size)
        is_conv = isinstance(model, AFTPreTrainedModel) and set(model.config.layer_aft_types) == {"conv"}
        if is_conv and resized.to_dict() != processor.to_dict():
            model = copy.deepcopy(model)
            try:
                adapt_to_image_size(model, image_size, enlarge_patches=enlarge_patches)
            except ValueError as error:
                logger.warning(f"the model is not adapted to images of {image_size} pixels: {described(error)}")
        processor = resized
    numbers = match_classes(dataset, label_column, model_classes(model.config))
    pipeline = ImagePipeline(processor, image_column=image_column, label_column=label_column, numbers=numbers)
    resizes = image_size is not None and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    options = {"interpolate_pos_encoding": True} if resizes else {}
    outputs = []
    model.eval()
    loader = DataLoader(RowSamples(dataset, pipeline), batch_size)
    for batch in tqdm(loader, desc="images", unit="batch", disable=None):
        pixels = batch["pixel_values"].to(model.device, model.dtype)
        outputs.append((model(pixel_values=pixels, **options).logits.float().cpu(), batch["labels"]))
    return accuracy_and_loss(*map(torch.cat, zip(*outputs)))


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
    """Return bits per byte, bits per token and perplexity of a text.

    The text is that of all rows, each tokenized alone, without separators. The tokenizer adds no special tokens; one
    that is written in the text is a single token. Every token but the first of the text, which has no context, is
    scored once, as by `Windows`: each block predicts the next token at all its positions, and the last block ends
    with the text, as in `aft-hf train`. `bits_per_byte` compares models with different tokenizers: it is
    `bits_per_token` x tokens / bytes of UTF-8, so the first token counts as the mean of the others.

    The model is on the device to run on. `stride` is the number of tokens from the start of one block to the start of
    the next; the others, `block_size - stride`, are only context. Default: `block_size`. A ValueError is raised if the
    text has less than two tokens, a row holds no text, or the stride would leave tokens out.
    """
    tokens, num_bytes, changed = array("I"), 0, 0
    for texts in read_texts(dataset, text_column):
        tokens.extend(chain.from_iterable(rows := token_ids(texts, tokenizer)))
        num_bytes += sum(len(text.encode()) for text in texts)
        changed += count_changed(texts, rows, tokenizer)
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens: give at least 2, since the first is not predicted")
    if changed:
        logger.warning(f"the tokenizer changes {changed} of {len(dataset)} texts, {LOSSY}")
    scores = []
    model.eval()
    with TemporaryDirectory() as folder:
        np.asarray(tokens, dtype=TOKEN_DTYPE).tofile(path := Path(folder, "tokens"))
        windows = Windows(path, seq_len=block_size, stride=stride, dtype=TOKEN_DTYPE)
        for batch in tqdm(DataLoader(windows, batch_size), desc="text", unit="batch", disable=None):
            inputs, labels = batch["input_ids"].to(model.device), batch["labels"].to(model.device)
            logits = model(input_ids=inputs, use_cache=False).logits.float().transpose(1, 2)
            losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
            scores.append((losses.double().sum(1).cpu(), (batch["labels"] != IGNORED).sum(1, keepdim=True)))
    nats, counts = map(torch.cat, zip(*scores))
    bits = code_length(nats, counts, ["token"])["bits_per_token"]
    perplexity = torch.tensor(bits).exp2().item()  # infinite for a diverged model
    return {"bits_per_byte": bits * len(tokens) / num_bytes, "bits_per_token": bits, "perplexity": perplexity}
