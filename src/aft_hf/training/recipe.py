"""Recipes: the typed schema of a training run, and loading from YAML files with overrides."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import CONFIG_MAPPING, SchedulerType

from .. import baselines  # noqa: F401  (registers their architecture)
from ..reading import described, read_text, shortened, shown


# Pairs of keys of which a recipe has only one: an override of one key removes the other.
ALTERNATIVES = (
    ("epochs", "steps"),
    ("warmup_epochs", "warmup_steps"),
    ("architecture", "pretrained"),
    ("dataset", "train"),
)

# Schedules of transformers whose learning rate depends on more than the step.
UNUSABLE_SCHEDULES = {"reduce_lr_on_plateau", "greedy"}

# Limits of a YAML text (a file, or the value of an override): levels of nesting, and number of values.
DEEPEST, LARGEST = 20, 10_000

Count = Annotated[int, Field(gt=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section of a recipe. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Data(Section):
    """Data settings of all tasks. A recipe needs `train` or `dataset`, usually given on the command line."""

    train: str | None = None  # a file or a folder
    validation: str | None = None
    dataset: str | None = None  # instead of files: an id on the Hub, or a local dataset
    dataset_config: str | None = None
    workers: Annotated[int, Field(ge=0)] = 0  # worker processes of the data loader; 0: load in the training process
    max_train_samples: Count | None = None  # None: all; otherwise the first ones
    max_eval_samples: Count | None = None


class BytesData(Data):
    """Files that are read as bytes, or a dataset whose texts are joined to a file for each split. A single file is
    split by position (see `aft_hf.data.bytes.split_bytes`)."""

    test: str | None = None
    text_column: str = "text"  # column of the dataset
    text_separator: str = "\n"  # between the texts of a dataset
    seq_len: Count = 1024  # bytes predicted per sample
    eval_stride: Count | None = None  # new bytes per evaluated window; None: seq_len, no overlap


class ImageRowsData(Data):
    """Datasets with an image in each row."""

    image_column: str = "image"
    streaming: bool = False  # read rows during training, without a copy on the disk
    shuffle_buffer: Count = 1000  # rows per shuffled block of a stream


class PixelsData(ImageRowsData):
    """Images as sequences of sub-pixel values."""

    image_size: Count = 32  # side in pixels; images of another size are resized
    flip: bool = True
    brightness_shift: Annotated[int, Field(ge=0, le=255)] = 10  # shift drawn from [-x, x]; values are clipped


class Augmentation(Section):
    """Augmentation of training images. The defaults only flip; configs/imagenet has the augmentation of DeiT."""

    # Range of the share of the area that is cropped; None: no random crop.
    crop_scale: Annotated[list[Probability], Field(min_length=2, max_length=2)] | None = None
    flip: bool = True
    rand_augment_operations: Annotated[int, Field(ge=0)] = 0
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0  # mean magnitude of the operations
    rand_augment_noise: NonNegative = 0.0  # standard deviation of the magnitude
    erasing: Probability = 0.0  # probability that noise replaces a part of an image
    mixup: NonNegative = 0.0  # alpha of its Beta distribution; 0: off
    cutmix: NonNegative = 0.0  # as for mixup
    repetitions: Count = 1  # repeated augmentation: copies of an image in each batch


class ImagesData(ImageRowsData):
    """Images with class labels."""

    label_column: str = "label"
    image_size: Count = 224  # side in pixels
    eval_crop_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0  # side of the center crop / side of the resized image
    image_mean: list[float] = [0.485, 0.456, 0.406]
    image_std: list[Positive] = [0.229, 0.224, 0.225]
    augmentation: Augmentation = Augmentation()


class Optimizer(Section):
    """AdamW; weight decay acts on the weights of linear layers and convolutions only."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Positive
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    position_bias_scale: Positive = 1.0  # factor on the learning rate of AFT's position biases


class Schedule(Section):
    """A schedule of `transformers.get_scheduler`, such as "inverse_sqrt" of "Attention is all you need"."""

    name: str = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    warmup_epochs: NonNegative | None = None
    options: dict[str, Any] = {}  # additional arguments of the schedule

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        names = {kind.value for kind in SchedulerType} - UNUSABLE_SCHEDULES
        if name not in names:
            raise ValueError(f"not a known schedule{_suggestion(name, names)}")
        return name

    @model_validator(mode="after")
    def _one_warmup(self) -> "Schedule":
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("give warmup_steps or warmup_epochs, not both")
        return self


class Paper(Section):
    """The result of the paper that a recipe reproduces."""

    rows: Annotated[list[str], Field(min_length=1)]  # "Table 4: AFT-local-32, L = 24, d = 256"
    # Score on the test data: bits per byte or per dimension, or top-1 accuracy in 0 .. 1.
    score: Positive


class Recipe(Section):
    """The configuration of one training run.

    `model` holds fields of the model's config and either `architecture`, a `model_type` of transformers such as "aft",
    or `pretrained`, a directory or Hub id to start from. Fields that follow from the data (vocabulary size, lengths,
    labels) are filled in unless `model` sets them.
    """

    task: Literal["bytes", "pixels", "images"]
    notes: str = ""  # values that the paper does not give, and reasons for the choice
    paper: Paper | None = None  # None: the recipe is not from the paper
    model: dict[str, Any]
    data: Data
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    epochs: Positive | None = None
    steps: Count | None = None
    global_batch_size: Count  # samples per optimizer step, over all processes
    micro_batch_size: Count | None = None  # samples per forward pass of a process; None: its whole share
    context_parallel: Count = 1  # processes that share each sequence, one shard per process
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    max_grad_norm: Positive | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None  # if set, the average is evaluated and saved
    label_smoothing: Share = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: Count = 10  # steps
    evaluate_every: Count | None = None  # steps; None: once per epoch
    save_every: Count | None = None  # steps; None: once per epoch
    keep_checkpoints: Count = 2
    resume: str = "auto"  # or "never", or the path of a checkpoint
    tracker: str | None = "tensorboard"  # name of a tracker of Accelerate; None: no tracker
    output_dir: str

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: dict[str, Any]) -> dict[str, Any]:
        if ("architecture" in model) == ("pretrained" in model):
            raise ValueError("give either architecture (a model_type) or pretrained (a directory or Hub id)")
        if "architecture" in model:
            check_architecture(**model)
        return model

    @model_validator(mode="after")
    def _one_length(self) -> "Recipe":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self

    def accumulation(self, processes: int) -> tuple[int, int]:
        """Return the micro-batch size, and the number of micro-batches that each process accumulates per step.

        Raises:
            ValueError: `global_batch_size` is not a multiple of processes x micro-batch size.
        """
        size = self.micro_batch_size or self.global_batch_size // processes
        if size == 0 or self.global_batch_size % (processes * size):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of processes x micro_batch_size, "
                f"{processes} x {size or 1}: change one of them"
            )
        return size, self.global_batch_size // (processes * size)

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class BytesRecipe(Recipe):
    data: BytesData = BytesData()


class ImageRowsRecipe(Recipe):
    """A recipe whose data may be streamed."""

    data: ImageRowsData

    @model_validator(mode="after")
    def _no_epochs_of_a_stream(self) -> "ImageRowsRecipe":
        warms_up_by_epochs = self.schedule.warmup_epochs is not None
        if self.data.streaming and (warms_up_by_epochs or None in (self.steps, self.evaluate_every, self.save_every)):
            raise ValueError(
                "the length of an epoch is unknown with data.streaming: give steps, evaluate_every and save_every, "
                "and the schedule's warmup_steps in place of warmup_epochs"
            )
        return self


class PixelsRecipe(ImageRowsRecipe):
    data: PixelsData = PixelsData()


class ImagesRecipe(ImageRowsRecipe):
    data: ImagesData = ImagesData()


RECIPES: dict[str, type[Recipe]] = {"bytes": BytesRecipe, "pixels": PixelsRecipe, "images": ImagesRecipe}


def load_recipe(path: str | Path, overrides: Iterable[str] = (), *, smoke: bool = False) -> Recipe:
    """Load a recipe from a YAML file.

    The file may name another recipe as `base`, relative to its folder, whose values it overrides; its own
    `output_dir` also overrides that in the section `smoke` of the base. By default
    `output_dir` is outputs/FOLDER/NAME, after the folder and the name of the file (outputs/smoke/... with `smoke`).

    Args:
        path: the YAML file.
        overrides: "dotted.key=value", where the value is YAML; applied last.
        smoke: whether to apply the overrides in the recipe's section `smoke`, for a run of a few seconds.

    Raises:
        ValueError: the file does not exist or cannot be read, or the recipe is invalid; the message then names the
            key, its value and what is allowed.
    """
    path = Path(path)
    values = _read(path, ())
    small = values.pop("smoke", None)
    place = Path("outputs", path.resolve().parent.name, path.stem)
    if smoke:
        if not isinstance(small, dict):
            raise ValueError(f"{path}: --smoke needs a section `smoke` with overrides")
        values = _merge(values, small)
        place = Path("outputs", "smoke", path.resolve().parent.name, path.stem)
    values.setdefault("output_dir", str(place))
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.split(".")
        if not equals or not all(parts) or len(parts) > DEEPEST:
            raise ValueError(
                f"{shown(override)} is not an override: write key=value, such as optimizer.learning_rate=1e-3"
            )
        values = _merge(values, {key: _parse(value, shortened(override))})
    return build_recipe(values)


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the nested values of a file, merged with those of its bases; `above` are the files based on it."""
    values = _parse(read_text(path), str(path))
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
    inherited = _read(path.parent / base, above)
    small = inherited.get("smoke")
    if "output_dir" in values and isinstance(small, dict):
        small.pop("output_dir", None)  # the directory of the base
    return _merge(inherited, values)


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested mappings.

    Raises:
        ValueError: as for `load_recipe`.
    """
    task = values.get("task")
    if not isinstance(task, str) or task not in RECIPES:
        raise ValueError(f"task={shown(task)}: must be one of {', '.join(RECIPES)}")
    kind = RECIPES[task]
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(item, kind) for item in error.errors())) from None


def check_architecture(architecture: Any, **fields: Any) -> None:
    """Raise a ValueError unless transformers knows the architecture and its config has the fields."""
    if not isinstance(architecture, str) or architecture not in CONFIG_MAPPING:
        near = _suggestion(str(shown(architecture)), CONFIG_MAPPING.keys())
        raise ValueError(f"model.architecture={shown(architecture)} is not known to transformers{near}")
    config = CONFIG_MAPPING[architecture]
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map) | {"num_labels"}
    for name in fields.keys() - known:
        raise ValueError(
            f"unknown key model.{shortened(name)} for architecture {architecture!r}"
            f"{_suggestion(name, known, ['model'])}"
        )


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 3e-4 as a number; PyYAML follows YAML 1.1, which requires 3.0e-4."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper for `_Loader`: it quotes strings that `_Loader` would read as another type."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def _write_string(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    """Escape Unicode line breaks in double quotes; PyYAML would write them in a form that is read as a space."""
    style = '"' if re.search("[\x85\u2028\u2029]", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _write_string)


def _parse(text: str, source: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: the text is not YAML, is nested deeper than `DEEPEST`, or holds more than `LARGEST` values, where
            an alias counts as all values that it stands for: nine lines of aliases can expand to a billion values.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, 0)
        return loader.construct_document(node)
    except Exception as error:  # YAML's constructors pass on Python's errors for invalid dates and numbers
        raise ValueError(f"{source}: not YAML that can be read: {described(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _count(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """Return the number of values in a node, including itself."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    if id(node) not in counted:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        counted[id(node)] = 1 + sum(_count(child, counted, depth + 1) for child in flat)
    if counted[id(node)] > LARGEST:
        raise ValueError(f"it holds more than {LARGEST} values")
    return counted[id(node)]


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` updated by `more`, recursively in nested mappings; keys of `more` may be dotted."""
    merged = dict(values)
    for one, other in (*ALTERNATIVES, *(pair[::-1] for pair in ALTERNATIVES)):
        if more.get(one) is not None and other not in more:
            merged.pop(other, None)
    for key, value in more.items():
        first, *rest = str(key).split(".")
        value, there = _nested(rest, value), merged.get(first)
        if isinstance(value, Mapping):
            value = _merge(there if isinstance(there, Mapping) else {}, value)
        merged[first] = value
    return merged


def _explain(error: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """Describe an error of pydantic in one line."""
    *above, last = error["loc"] or ("",)
    # Names of types in unions are part of pydantic's location, but not of the key.
    path = [str(part) for part in above if not isinstance(part, str) or re.fullmatch(r"\w+", part)]
    if error["type"] == "extra_forbidden":
        return f"unknown key {shortened('.'.join([*path, last]))}{_suggestion(last, _fields(kind, path), path)}"
    key = ".".join([*path, *([str(last)] if not isinstance(last, str) or re.fullmatch(r"\w+", last) else [])])
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "model_type":
        return f"{key}={shown(error['input'])}: must be a mapping of keys to values"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    # An error about several keys, which the message names.
    if error["type"] == "value_error" and isinstance(error["input"], dict):
        return f"{key}: {message}" if key and f"{key}." not in message else message
    return f"{key}={shown(error['input'])}: {message}"


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    for name in path:
        kind = cast(type[BaseModel], kind.model_fields[name].annotation)  # a section
    return list(kind.model_fields)


def _suggestion(name: str, known: Iterable[str], path: Iterable[str] = ()) -> str:
    """Return '; did you mean ...?' with the known name closest to `name`, or up to 40 known names if none is close."""
    known = sorted(known)  # among equally close names, always suggest the same one
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {'.'.join([*path, near[0]])}?"
    return f"; known: {', '.join(known)}" if len(known) <= 40 else ""
