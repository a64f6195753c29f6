"""Recipes: the typed schema of a training run, and loading from YAML files with overrides."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Annotated, Any, Generic, Literal, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import CONFIG_MAPPING
from typing_extensions import TypeVar

from ..errors import complete_message, explain, shortened
from ..reading import PlainLoader, parse_yaml, read_text


# Pairs of keys of which a recipe has only one: an override of one key removes the other.
ALTERNATIVES = {"epochs": "steps", "warmup_epochs": "warmup_steps", "architecture": "pretrained", "dataset": "train"}
ALTERNATIVES |= {other: one for one, other in ALTERNATIVES.items()}
OF_DATASET = {"dataset_config", "text_column"}  # keys of `data` that only `dataset` uses
OF_PRETRAINED = {"image_size", "image_mean", "image_std"}  # keys of which `model.pretrained` has values of its own
DEEPEST = 20  # dots in a key
NOT_IN_NAMES = re.compile(r"[\0\ud800-\udfff]")  # of files, which can be neither NUL nor half of a surrogate pair

Count = Annotated[int, Field(gt=0, lt=2**63)]
Natural = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Three = Field(min_length=3, max_length=3)
Place = Annotated[str, AfterValidator(os.path.expanduser)]  # a shell does not expand the ~ of `output_dir=~/run`
Pair = Annotated[list[Probability], Field(min_length=2, max_length=2)]


class Section(BaseModel):
    """A section of a recipe. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Data(Section):
    """Data settings of all tasks. A recipe needs `train` or `dataset`, usually given on the command line."""

    train: Place | None = Field(None, description="Training data: a file, of images also a folder, or `generated`.")
    validation: Place | None = Field(None, description="Validation data, as for train.")
    dataset: Place | None = Field(None, description="In place of files: an id on the Hub, or a local dataset.")
    dataset_config: str | None = Field(None, description="Configuration of the dataset.")
    workers: Natural = Field(0, description="Processes that load data. 0: the training process.")
    max_train_samples: Count | None = Field(None, description="First samples, or random labeled images. null: all.")
    max_eval_samples: Count | None = Field(None, description="As max_train_samples, for each evaluated split.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        if self.dataset is not None and (files := given & {"train", "validation", "test"}):
            raise complete_message(f"give either data.dataset or data.{min(files)}")
        if self.train is not None and (unused := given & OF_DATASET):
            raise complete_message(f"data.{min(unused)}={shown(getattr(self, min(unused)))} needs data.dataset")
        return self


class BytesData(Data):
    """Files that are read as bytes, or a dataset whose texts are joined; one file is split (see `split_bytes`)."""

    test: Place | None = Field(None, description="Test data: a file.")
    text_column: str = Field("text", description="Column of the dataset with the texts.")
    seq_len: Count = Field(1024, description="Predicted tokens (bytes) per sample.")
    eval_stride: Count | None = Field(None, description="New tokens per evaluated sample. null: seq_len, no overlap.")


class TokensData(BytesData):
    """As `BytesData`, for texts in UTF-8 that a tokenizer splits into tokens."""

    tokenizer: Place = Field(description="Tokenizer of a saved model or tokenizer: a directory, or an id on the Hub.")


class PixelsData(Data):
    """Images as sequences of sub-pixel values."""

    image_column: str = Field("image", description="Column of the images.")
    image_size: Count = Field(32, description="Side in pixels; images of another size are resized.")
    flip: bool = Field(True, description="Flip half of the training images.")
    brightness_shift: Annotated[int, Field(ge=0, le=255)] = Field(10, description="Largest shift of the values.")


class Augmentation(Section):
    """Augmentation of training images. The defaults only flip; configs/imagenet has the augmentation of DeiT."""

    crop_scale: Pair | None = Field(None, description="Smallest and largest share of the area of crops. null: none.")
    flip: bool = Field(True, description="Flip half of the images.")
    rand_augment_operations: Natural = Field(0, description="RandAugment: operations per image.")
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=10)] = Field(9.0, description="RandAugment: magnitude.")
    rand_augment_noise: NonNegative = Field(0.0, description="RandAugment: deviation of the magnitude.")
    erasing: Probability = Field(0.0, description="Probability that noise replaces a part of an image.")
    mixup: NonNegative = Field(0.0, description="Alpha of the Beta distribution of mixup. 0: off.")
    cutmix: NonNegative = Field(0.0, description="Alpha of the Beta distribution of CutMix. 0: off.")
    repetitions: Count = Field(1, description="Copies of an image in each batch (repeated augmentation).")


class ImagesData(Data):
    """Images with class labels."""

    image_column: str = Field("image", description="Column of the images.")
    label_column: str = Field("label", description="Column of the labels.")
    image_size: Count = Field(224, description="Side in pixels. Of model.pretrained: its own, as are mean and std.")
    eval_crop_ratio: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Center crop / image in evaluation.")
    image_mean: Annotated[list[Finite], Three] = Field([0.485, 0.456, 0.406], description="Mean of each channel.")
    image_std: Annotated[list[Positive], Three] = Field([0.229, 0.224, 0.225], description="Standard deviations.")
    augmentation: Augmentation = Augmentation()


class Optimizer(Section):
    """AdamW; weight decay acts on the weights of linear layers and convolutions only."""

    name: Literal["adamw"] = Field("adamw", description="The optimizer.")
    learning_rate: Positive = Field(description="Maximum learning rate.")
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field([0.9, 0.999], description="Both betas.")
    eps: Positive = Field(1e-8, description="Term of AdamW that prevents a division by 0.")
    weight_decay: NonNegative = Field(0.0, description="Weight decay of linear layers and convolutions.")
    position_bias_scale: Positive = Field(1.0, description="Factor on the learning rate of AFT's position biases.")


# The schedules of transformers whose learning rate depends on the step alone.
ScheduleName = Literal[
    "constant", "constant_with_warmup", "cosine", "cosine_warmup_with_min_lr", "cosine_with_min_lr",
    "cosine_with_restarts", "inverse_sqrt", "linear", "polynomial", "warmup_stable_decay",
]  # fmt: skip


class Schedule(Section):
    """A schedule of `transformers.get_scheduler`, such as "inverse_sqrt" of "Attention is all you need"."""

    name: ScheduleName = Field("constant", description="A schedule of transformers.")
    warmup_steps: Natural | None = Field(None, description="Length of the warm-up in steps.")
    warmup_epochs: NonNegative | None = Field(None, description="Length of the warm-up in epochs.")
    options: dict[str, Any] = Field({}, description="Additional arguments of the schedule.")

    @model_validator(mode="after")
    def _one_warmup(self) -> "Schedule":
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise complete_message("schedule: give warmup_steps or warmup_epochs, not both")
        if self.name == "constant" and (self.warmup_steps or self.warmup_epochs):
            raise complete_message("schedule.name='constant' has no warm-up; give constant_with_warmup")
        return self


DataType = TypeVar("DataType", bound=Data, covariant=True, default=Data)


class Paper(Section):
    """The result of the paper that a recipe reproduces. Without it, the recipe is not from the paper."""

    rows: Annotated[list[str], Field(min_length=1)] = Field(description="Rows of the paper's tables.")
    score: Positive = Field(description="Score on the test data: bits per byte or dimension, or accuracy in 0 .. 1.")


class Recipe(Section, Generic[DataType]):
    """The configuration of one training run."""

    task: Literal["bytes", "tokens", "pixels", "images"] = Field(description="What is predicted.")
    notes: str = Field("", description="Values that the paper does not give, and reasons for the choice.")
    paper: Paper | None = None
    model: dict[str, Any] = Field(
        description="Either `architecture`, a model type of transformers such as aft, or `pretrained`, a directory or "
        "Hub id; and fields of the model's config, except those that follow from the data (sizes, lengths, labels)."
    )
    data: DataType = Field(default_factory=dict, validate_default=True)
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    epochs: Positive | None = Field(None, description="Length of the training in epochs.")
    steps: Count | None = Field(None, description="Length of the training in steps, in place of epochs.")
    global_batch_size: Count = Field(description="Samples per optimizer step, over all processes.")
    micro_batch_size: Count | None = Field(None, description="Samples per forward pass. null: all of a process.")
    context_parallel: Count = Field(1, description="Processes that share each sequence, one shard per process.")
    mixed_precision: Literal["no", "bf16", "fp16"] = Field("no", description="Precision of forward and backward pass.")
    max_grad_norm: Positive | None = Field(None, description="Norm to which gradients are clipped. null: no clipping.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    compile: bool = Field(False, description="Compile the model by torch.compile.")
    ema_decay: Decay | None = Field(None, description="Decay of the average of the weights that is saved. null: none.")
    label_smoothing: Share = Field(0.0, description="Label smoothing of the cross entropy.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Seed of weights, order and augmentation.")
    log_every: Count = Field(10, description="Steps between reports of the loss.")
    evaluate_every: Count | None = Field(None, description="Steps between evaluations. null: an epoch.")
    save_every: Count | None = Field(None, description="Steps between checkpoints. null: an epoch.")
    keep_checkpoints: Count = Field(2, description="How many of the newest checkpoints to keep.")
    resume: Place | None = Field(None, description="Checkpoint to resume from. null: the newest in output_dir.")
    tracker: str | None = Field("tensorboard", description="Name of a tracker of Accelerate. null: no tracker.")
    output_dir: Place = Field(description="Directory of the run. Default: outputs/FOLDER/NAME of the recipe's file.")

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: dict[str, Any]) -> dict[str, Any]:
        if ("architecture" in model) == ("pretrained" in model):
            raise complete_message("give either model.architecture (a model_type) or model.pretrained")
        if "pretrained" in model:
            return model | {"pretrained": os.path.expanduser(str(model["pretrained"]))}
        architecture = model["architecture"]
        if not isinstance(architecture, str) or architecture not in CONFIG_MAPPING:
            near = _suggestion(str(architecture), CONFIG_MAPPING.keys())
            raise complete_message(f"model.architecture={shown(architecture)} is not known to transformers{near}")
        config = CONFIG_MAPPING[architecture]
        known = {*config.__dataclass_fields__, *config.attribute_map, "num_labels"}
        for name in model.keys() - known - {"architecture"}:
            near = _suggestion(f"model.{name}", [f"model.{each}" for each in known])
            raise complete_message(f"unknown key model.{shortened(name)} for architecture {architecture!r}{near}")
        return model

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise complete_message("give either epochs or steps")
        return self

    def accumulation(self, processes: int) -> tuple[int, int]:
        """Return the micro-batch size, and the number of micro-batches that each process accumulates per step."""
        size = self.micro_batch_size or self.global_batch_size // processes
        if size == 0 or self.global_batch_size % (processes * size):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of processes x micro_batch_size, "
                f"{processes} x {size or 1}: change one of them"
            )
        return size, self.global_batch_size // (processes * size)

    def to_yaml(self) -> str:
        # What is not set, a pretrained model may replace.
        replaced = OF_PRETRAINED - self.data.model_fields_set if self.task == "images" else set()
        return yaml.dump(self.model_dump(exclude={"data": replaced}), Dumper=_Dumper, sort_keys=False, width=100)


BytesRecipe = Recipe[BytesData]
TokensRecipe = Recipe[TokensData]
PixelsRecipe = Recipe[PixelsData]
ImagesRecipe = Recipe[ImagesData]
RECIPES: dict[str, type[Recipe]] = {
    "bytes": BytesRecipe,
    "tokens": TokensRecipe,
    "pixels": PixelsRecipe,
    "images": ImagesRecipe,
}


def _keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the keys of a section, and those of the sections in it."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(f"{prefix}{name}")
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                keys += _keys(kind, f"{prefix}{name}.")
    return keys


def load_recipe(path: str | Path, overrides: Iterable[str] = (), *, smoke: bool = False) -> Recipe:
    """Load a recipe from a YAML file; if it is invalid, a ValueError names the key, its value and what is allowed.

    The file may name another recipe as `base`, relative to its folder, whose values it overrides. With `smoke`, those
    of its section `smoke` are applied, for a run of a few seconds. The overrides, "dotted.key=value" with a value in
    YAML, come last. By default `output_dir` is outputs/FOLDER/NAME, after the folder and the name of the file; with
    `smoke`, outputs/smoke/..., unless the section `smoke` or an override names it.
    """
    path = Path(path)
    values = _read(path, ())
    small = values.pop("smoke", None)
    place = Path(path.resolve().parent.name, path.stem)
    if smoke:
        if not isinstance(small, dict):
            raise ValueError(f"{path}: --smoke needs a section `smoke` with overrides")
        values.pop("output_dir", None)
        values, place = _merge(values, small), "smoke" / place
    values.setdefault("output_dir", str("outputs" / place))
    given: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"{shown(override)} is not an override: write key=value, such as data.seq_len=64")
        given = _merge(given, {key: parse_yaml(value, shortened(override), loader=_Loader)})
    of_file, of_given = (each["model"] if isinstance(each.get("model"), dict) else {} for each in (values, given))
    if "architecture" in of_file and of_given.get("pretrained"):
        values["model"] = {}  # the fields in the file describe another model
    return build_recipe(_merge(values, given))


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the nested values of a file, merged with those of its bases; `above` are the files based on it."""
    values = parse_yaml(read_text(path), str(path), loader=_Loader)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe must be a mapping of keys to values")
    base = values.pop("base", None)
    if base is None:
        return _merge({}, values)
    above = (*above, path.resolve())
    if not isinstance(base, str) or not base:
        raise ValueError(f"{path}: base={shown(base)} must be the path of a recipe, relative to this one")
    if (path.parent / base).resolve() in above:
        raise ValueError(f"{path}: base={base!r} leads back to the same recipe: bases must not be circular")
    return _merge(_read(path.parent / base, above), values)


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested mappings; errors are those of `load_recipe`."""
    task = values.get("task")
    if not isinstance(task, str) or task not in RECIPES:
        raise ValueError(f"task={shown(task)}: must be one of {', '.join(RECIPES)}")
    kind = RECIPES[task]
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        keys, others = _keys(kind), "; the page Keys of recipes of the documentation lists all"
        raise ValueError(explain(error, lambda key: _suggestion(key, keys) or others)) from None


class _Loader(PlainLoader):
    """YAML loader with the types of YAML 1.2, without integers in base 8 and 16, and with underscores in numbers.

    By YAML 1.1, which PyYAML follows, `no` is a boolean, 010 is in base 8, 1:30 in base 60, and 3e-4 is a text.
    """

    yaml_implicit_resolvers: dict[str | None, Any] = {}

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        value = super().construct_scalar(node)
        if match := NOT_IN_NAMES.search(value):
            line = node.start_mark.line + 1
            raise ValueError(f"line {line}: a text must not contain {match[0]!r}, got {shown(value)}")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise ValueError(f"line {key.start_mark.line + 1}: {shown(key.value)} is given twice")
            known.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper for `_Loader`: it quotes strings that `_Loader` would read as another type."""


DIGITS = r"\d+(_\d+)*"
TYPES = {"null": r"~|null|", "bool": r"true|false", "int": rf"[-+]?{DIGITS}"}
TYPES["float"] = rf"[-+]?({DIGITS}\.(\d+)?|\.\d+|{DIGITS}(?=e))(e[-+]?\d+)?|[-+]?\.inf|\.nan"
for _type, _pattern in TYPES.items():
    for _class in (_Loader, _Dumper):
        _expression = re.compile(f"({_pattern})$", re.ASCII | re.IGNORECASE)
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", _expression, None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))  # not in base 8 after a 0


def _merge(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` updated by `more`, recursively in nested mappings; keys of `more` may be dotted."""
    merged = dict(values)
    for one, other in ALTERNATIVES.items():
        if more.get(one) is not None and other not in more:
            merged.pop(other, None)
    for key, value in more.items():
        first, *rest = str(key).split(".")
        if len(rest) > DEEPEST:
            raise ValueError(f"{shown(key)}: a key must have at most {DEEPEST} dots")
        for part in reversed(rest):
            value = {part: value}
        if isinstance(value, Mapping):
            there = merged.get(first)
            value = _merge(there if isinstance(there, Mapping) else {}, value)
        merged[first] = value
    if values.get("dataset") and not merged.get("dataset"):
        merged = {key: value for key, value in merged.items() if key in more or key not in OF_DATASET}
    return merged


def _suggestion(key: str, keys: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the key that is closest to `key`, or nothing if none is close."""
    near = difflib.get_close_matches(key, sorted(keys), n=1)
    return f"; did you mean {near[0]}?" if near else ""
