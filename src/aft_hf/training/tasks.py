"""The training tasks (bytes, tokens, pixels and images): their data, models, losses and metrics."""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset as Rows
from datasets import DatasetDict
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import logging

from ..configuration_aft import pair
from ..data.byte_tokenizer import DEFAULT_SPECIAL_TOKENS, NUM_BYTES, build_byte_tokenizer
from ..data.classes import model_classes, require_a_class
from ..data.loading import (
    GENERATED,
    draw_images,
    hold_out,
    load_named,
    load_splits,
    refuse_inside,
    require_column,
    write_text,
)
from ..data.samples import START_TOKEN, Maker, PixelSequences, RowSamples
from ..data.text import IGNORED, TOKEN_DTYPE, Windows, join_texts, split_bytes, tokenize_file
from ..errors import explained
from ..limits import limited
from ..loading import load, read_image_processor
from .metrics import accuracy_and_loss, code_length
from .recipe import BytesData, BytesRecipe, ImagesData, ImagesRecipe, PixelsRecipe, Recipe, TokensRecipe


logger = logging.get_logger(__name__)

Batch = dict[str, torch.Tensor]
OF_DATA = {"image_size", "num_labels", "label2id"}  # fields of a model's config that a recipe cannot change
VALIDATION_SHARE = 0.05  # of the training rows that are held out if there is no validation data


class Task:
    """Base class of the tasks: the data, which the constructor reads, model, loss and metric for the training loop.

    Here, these are for the prediction of the next token: of `labels`, (B, T), from `input_ids`, (B, T).
    """

    auto_model: type[Any] = AutoModelForCausalLM
    units: tuple[str, ...]  # units of the code length
    unit: str = "tokens"  # of the throughput
    units_per_sample: int = 1
    repetitions: int = 1  # consecutive copies of each sample
    train: Windows | RowSamples
    evaluated: Mapping[str, Dataset[Any]]  # by split: the first during training, all of them at the end
    config_values: dict[str, Any]  # fields of the model's config that follow from the data
    processor: Any = None  # tokenizer or image processor, saved with the model

    def __init__(self, recipe: Recipe):
        given = recipe.data.train, recipe.data.validation, recipe.data.dataset
        refuse_inside(recipe.output_dir, *(path for path in given if path != GENERATED))
        self.recipe = recipe
        source = recipe.model.get("pretrained")
        self.pretrained: Any = None if source is None else load(AutoConfig, source)

    def build_model(self) -> PreTrainedModel:
        """Build the model of the recipe, new or pretrained."""
        fields = dict(self.recipe.model)
        if "id2label" in self.config_values:  # where those of the recipe are checked and converted
            fields.pop("id2label", None)
        for name, value in self.config_values.items():
            if name in OF_DATA and (given := fields.get(name, value)) not in (value, [value, value]):
                raise ValueError(f"model.{name}={shown(given)}: the data determines {shown(value)}; leave it out")
        if "pretrained" in fields:
            source = fields.pop("pretrained")
            values = self._fitting(type(self.pretrained)) | fields
            # Train in float32 whatever dtype was saved: half precision would lose small updates.
            values["dtype"] = torch.float32
            model, info = load(
                self.auto_model, source, ignore_mismatched_sizes=True, output_loading_info=True, **values
            )
            # Embeddings, position biases and classifiers depend on the data; the other weights of layers do not.
            of_layer, of_data = re.compile(r"\.\d+\."), re.compile(r"position|attention_bias|classifier|head|score")
            differing = sorted(name for name, *_ in info["mismatched_keys"])
            wrong = [name for name in differing if of_layer.search(name) and not of_data.search(name)]
            if fields and wrong:
                raise ValueError(
                    f"model.pretrained={source}: {wrong[0]} has another size there than by the other fields of model: "
                    "leave them out"
                )
            return model
        architecture = fields.pop("architecture")
        with explained("model: cannot be built"):
            values = self._fitting(CONFIG_MAPPING[architecture]) | fields

            def build(device: str) -> PreTrainedModel:
                with torch.device(device):
                    return self.auto_model.from_config(AutoConfig.for_model(architecture, **values))

            limited(lambda: build("meta"), "model", again=False)
            return build("cpu")

    def _fitting(self, config: type[Any]) -> dict[str, Any]:
        """Return the `config_values` that are fields of the config class."""
        known = {*config.__dataclass_fields__, *config.attribute_map, "num_labels"}
        return {name: value for name, value in self.config_values.items() if name in known}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the training loss, a mean over the batch. The model may be wrapped, for example by DDP."""
        outputs = model(input_ids=batch["input_ids"], use_cache=False)
        return self.regularized(model, outputs, outputs.logits.flatten(0, 1), batch["labels"].flatten())

    def regularized(self, model: nn.Module, outputs: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy, plus the regularization of an AFT-conv's position biases (Eq. 9)."""
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=self.recipe.label_smoothing)
        entropy = getattr(outputs, "position_bias_entropy", None)
        if entropy is None:
            return loss
        config: Any = getattr(model, "module", model).config
        return loss + config.position_bias_entropy_weight * entropy

    def scores(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions, (B, ...), and references for the metric: here losses in nats and numbers of units."""
        logits, labels = model(input_ids=batch["input_ids"], use_cache=False).logits.float(), batch["labels"]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
        counted = labels != IGNORED
        counts = [counted.sum(1)]
        if "character" in self.units:  # each begins at a byte that is no continuation byte of UTF-8
            counts.append((counted & ((labels & 0xC0) != 0x80)).sum(1))
        return losses.double().sum(1), torch.stack(counts, 1)

    def metrics(self, split: str, predictions: torch.Tensor, references: torch.Tensor) -> dict[str, float]:
        """Return the metrics of a split by name, from the `scores` of all its samples."""
        return code_length(predictions, references, self.units)


class BytesTask(Task):
    """Prediction of the next byte of a file, or of the texts of a dataset."""

    recipe: BytesRecipe
    units: tuple[str, ...] = ("byte", "character")

    def __init__(self, recipe: BytesRecipe):
        super().__init__(recipe)
        data = recipe.data
        files = text_files(data, recipe.output_dir)
        parts = {split: (file, (0, Path(file).stat().st_size)) for split, file in files.items()}
        if len(parts) == 1:
            ((file, (_, size)),) = parts.values()
            parts = {split: (file, span) for split, span in split_bytes(size).items()}
        self.processor = self.build_tokenizer()
        self.train = self.read("train", *parts.pop("train"), seed=recipe.seed, limit=data.max_train_samples)
        sizes: dict[str, Any] = {"stride": data.eval_stride, "limit": data.max_eval_samples}
        self.evaluated = {split: self.read(split, *part, **sizes) for split, part in parts.items()}
        self.units_per_sample = data.seq_len
        self.config_values = {
            "modality": "text",
            "vocab_size": max(self.processor.get_vocab().values()) + 1,  # ids may have gaps
            "max_position_embeddings": data.seq_len,
            "is_decoder": True,  # BERT sees all tokens without it
            "bos_token_id": None,
            "eos_token_id": self.processor.eos_token_id,
            "pad_token_id": self.processor.pad_token_id,
        }
        for name in ("vocab_size", "max_position_embeddings"):
            # Embeddings of a pretrained model that are large enough keep their size, and so their weights.
            if (getattr(self.pretrained, name, None) or 0) >= self.config_values[name]:
                del self.config_values[name]

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        # Clients cut texts at this length.
        is_limited = getattr(model.config, "max_position_embeddings", None) is not None
        self.processor.model_max_length = self.recipe.data.seq_len if is_limited else VERY_LARGE_INTEGER
        return model

    def read(self, split: str, file: str | Path, span: tuple[int, int], **options: Any) -> Windows:
        """Return the windows of a part of a file."""
        return Windows(file, span, seq_len=self.recipe.data.seq_len, **options)

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        """Build the byte tokenizer, with special tokens unless a pretrained model has embeddings of bytes only."""
        is_of_bytes = getattr(self.pretrained, "vocab_size", None) == NUM_BYTES
        return build_byte_tokenizer(**(dict.fromkeys(DEFAULT_SPECIAL_TOKENS) if is_of_bytes else {}))


class TokensTask(BytesTask):
    """Prediction of the next token of a text, by any tokenizer."""

    recipe: TokensRecipe
    units = ("token",)
    tokens_per_byte: Mapping[str, float] = {}  # by split

    def read(self, split: str, file: str | Path, span: tuple[int, int], **options: Any) -> Windows:
        with PartialState().local_main_process_first():
            path, num_bytes = tokenize_file(Path(file), span, self.processor)
        windows = Windows(path, seq_len=self.recipe.data.seq_len, dtype=TOKEN_DTYPE, **options)
        self.tokens_per_byte = {**self.tokens_per_byte, split: (windows.stop - windows.start) / num_bytes}
        return windows

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        return load(AutoTokenizer, self.recipe.data.tokenizer)

    def metrics(self, split: str, predictions: torch.Tensor, references: torch.Tensor) -> dict[str, float]:
        metrics = super().metrics(split, predictions, references)
        # This compares models with different tokenizers.
        return metrics | {"bits_per_byte": metrics["bits_per_token"] * self.tokens_per_byte[split]}


class PixelsTask(Task):
    """Prediction of the next sub-pixel of an image."""

    units = ("dim",)

    def __init__(self, recipe: PixelsRecipe):
        super().__init__(recipe)
        data = recipe.data
        rows = some_rows(hold_out(read_rows(recipe), VALIDATION_SHARE), data, shuffled=False)
        make = PixelSequences(data, recipe.seed)
        samples = {split: RowSamples(rows[split], make, [data.image_column]) for split in rows}
        self.train, self.evaluated = samples.pop("train"), samples
        self.units_per_sample = 3 * data.image_size**2
        self.config_values = {
            "modality": "text",
            "vocab_size": START_TOKEN + 1,
            "is_decoder": True,
            "max_position_embeddings": self.units_per_sample,
            "image_size": data.image_size,  # an AFT without a length limit has no other trace of it
            "bos_token_id": START_TOKEN,
            "eos_token_id": None,
        }


class ImagesTask(Task):
    """Image classification."""

    recipe: ImagesRecipe
    auto_model = AutoModelForImageClassification
    unit = "images"

    def __init__(self, recipe: ImagesRecipe):
        # kornia takes seconds to import, and the other tasks do not need it.
        from ..data.classification import BatchAugmentation, TrainingImages
        from ..data.images import ImagePipeline, class_names, class_numbers, ordered_classes, trained_classes

        super().__init__(recipe)
        data, augmentation = recipe.data, recipe.data.augmentation
        splits, of_model = read_rows(recipe), []
        if self.pretrained is not None:
            of_model, source = model_classes(self.pretrained), recipe.model["pretrained"]
            processor = load(AutoImageProcessor, source).to_dict() if read_image_processor(source) else {}
            keep_image_format(data, self.pretrained, processor)
        require_column(splits, data.label_column, "data.label_column")
        names, labels = trained_classes(splits["train"], data.label_column, of_model)
        if given := recipe.model.get("id2label"):
            names = labels = ordered_classes(given, labels)
        is_usual = labels == class_names(splits["train"], data.label_column)
        order = "" if is_usual else sha256(str(labels).encode()).hexdigest()
        self.config_values = {
            "modality": "image",
            "image_size": data.image_size,
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "num_labels": len(names),
        }
        # Resize, crop the center if `eval_crop_ratio` is below 1, and normalize.
        crops, size = data.eval_crop_ratio < 1, {"height": data.image_size, "width": data.image_size}
        self.processor = ViTImageProcessorPil(
            size={"shortest_edge": round(data.image_size / data.eval_crop_ratio)} if crops else size,
            resample=3,
            do_center_crop=crops,
            crop_size=size,
            image_mean=data.image_mean,
            image_std=data.image_std,
        )
        columns = {"image_column": data.image_column, "label_column": data.label_column}
        samples: dict[str, RowSamples] = {}
        for split, rows in some_rows(hold_out(splits, VALIDATION_SHARE), data, shuffled=True).items():
            with explained(f"the {split} data"):
                options: dict[str, Any] = columns | {"numbers": class_numbers(rows, data.label_column, labels)}
            make: Maker = ImagePipeline(self.processor, **options)
            if split == "train":
                make = TrainingImages(data.image_size, augmentation.crop_scale, recipe.seed, **options)
            samples[split] = RowSamples(rows, make, [*columns.values()], order)
        self.train, self.evaluated = samples.pop("train"), samples
        self.augment = BatchAugmentation(len(names), data.image_mean, data.image_std, augmentation)
        self.repetitions = augmentation.repetitions

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        require_a_class("model", model.config)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        pixels, targets = self.augment(batch["pixel_values"], batch["labels"])
        outputs = model(pixel_values=pixels)
        return self.regularized(model, outputs, outputs.logits, targets)

    def scores(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return model(pixel_values=batch["pixel_values"]).logits.float(), batch["labels"]

    def metrics(self, split: str, predictions: torch.Tensor, references: torch.Tensor) -> dict[str, float]:
        return accuracy_and_loss(predictions, references)


TASKS: dict[str, type[Task]] = {"bytes": BytesTask, "tokens": TokensTask, "pixels": PixelsTask, "images": ImagesTask}


def text_files(data: BytesData, output_dir: str) -> dict[str, str | Path]:
    """Return the file of each split, "train" first."""
    files: dict[str, str | Path] = data.model_dump(include={"train", "validation", "test"}, exclude_none=True)
    if data.dataset is not None:
        splits = load_named(data.dataset, data.dataset_config)
        require_train(splits, data.dataset)
        require_column(splits, data.text_column, "data.text_column")
        with PartialState().local_main_process_first():
            for split, rows in splits.items():
                with explained(f"data.dataset={data.dataset}: the {split} data cannot be used"):
                    files[split] = join_texts(rows, data.text_column)
            return files
    if data.train is None:
        raise ValueError("no data: give data.train=FILE (of any type) or generated, or data.dataset=ID of the Hub")
    if data.train == GENERATED:
        files["train"] = write_text(output_dir)
    for split, file in files.items():
        if not Path(file).is_file():
            reason = "is a folder; give a file" if Path(file).is_dir() else "no such file"
            raise ValueError(f"data.{split}={file}: {reason}")
    return files


def read_rows(recipe: PixelsRecipe | ImagesRecipe) -> DatasetDict:
    """Return the splits of the recipe's dataset."""
    data = recipe.data
    if data.train == GENERATED:
        if data.validation is not None:
            raise ValueError("data.train=generated has validation data of its own; leave out data.validation")
        label_column = getattr(data, "label_column", "label")
        splits = ("train", "validation")
        return DatasetDict({split: draw_images(split, data.image_column, label_column) for split in splits})
    labeled = recipe.task == "images"
    splits = load_splits(data.dataset, data.dataset_config, data.train, data.validation, labeled=labeled)
    require_train(splits, data.dataset)
    require_column(splits, data.image_column, "data.image_column")
    return splits


def keep_image_format(data: ImagesData, config: PreTrainedConfig, processor: dict[str, Any]) -> None:
    """Set the image size and the normalization that a recipe does not give to those of a pretrained model."""
    side = processor.get("crop_size" if processor.get("do_center_crop") else "size") or {}
    usual = side.get("height") or side.get("shortest_edge") or data.image_size
    height, width = pair(getattr(config, "image_size", None) or usual)
    own: dict[str, Any] = {"image_size": height}
    if processor:
        # A recipe normalizes pixel values in 0 .. 1.
        scale = 255 * (processor["rescale_factor"] or 1 / 255) if processor.get("do_rescale") else 255
        for name, default in (("image_mean", 0.0), ("image_std", 1.0)):
            value: Any = processor.get(name) if processor.get("do_normalize") else default
            own[name] = [each / scale for each in (value if isinstance(value, (list, tuple)) else [value] * 3)]
    for name in own.keys() - data.model_fields_set:
        setattr(data, name, own[name])
    if (data.image_size, data.image_size) != (height, width):
        logger.warning(
            f"the pretrained model has images of {height} x {width} pixels, and is trained with "
            f"data.image_size={data.image_size}"
        )


def some_rows(splits: DatasetDict, limits: Any, *, shuffled: bool) -> dict[str, Rows]:
    """Return the first rows of each split or, if `shuffled`, random ones, as many as the `limits` allow."""
    kept: dict[str, Rows] = {}
    for split, rows in splits.items():
        most = limits.max_train_samples if split == "train" else limits.max_eval_samples
        if most is not None and most < len(rows):
            rows = (rows.shuffle(seed=0) if shuffled else rows).take(most)
        kept[split] = rows
    return kept


def require_train(splits: DatasetDict, dataset: str | None) -> None:
    """Raise a ValueError if there is no training split."""
    if "train" not in splits:
        raise ValueError(f"there is nothing to train on: data.dataset={dataset} has no split 'train'")
