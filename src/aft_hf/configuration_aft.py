"""AFT model configuration."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from reprlib import repr as shown  # shortens any value to one line
from typing import Any, cast

import torch
from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig


AFT_TYPES = ("full", "local", "simple", "conv", "alibi")

_HEADS = {"text": ("CausalLM", "SequenceClassification", "TokenClassification"), "image": ("ImageClassification",)}
# The `auto_map` of config.json for each modality: where the Auto classes find the code saved with a checkpoint.
AUTO_MAPS = {
    modality: {"AutoModel": "modeling_aft.AFTModel"} | {f"AutoModelFor{x}": f"modeling_aft.AFTFor{x}" for x in heads}
    for modality, heads in _HEADS.items()
}
AUTO_MAPS["image"]["AutoBackbone"] = "modeling_aft.AFTBackbone"

# The values of `mixing_implementation`: "auto" takes an operator if one supports the problem.
MIXING_IMPLEMENTATIONS = ("auto", "reference", "portable")

MOST_LABELS = 2**22
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# Features per position-bias head of `conv` and `alibi`: those of the paper's AFT-conv small 11/16 and base 25/32.
HEAD_WIDTH = 24

# Names that transformers accepts and that are not fields.
OTHER_NAMES = {"attn_implementation", "experts_implementation", "name_or_path", "per_layer_config", "torch_dtype"}
OTHER_NAMES |= {"is_decoder"} | {f"{token}_token_id" for token in ("cls", "decoder_start", "mask", "sep", "unk")}


def raise_value_errors(cls: Any) -> Any:
    """Make the constructor and assignments raise a ValueError of one line in place of errors of `@strict`."""

    def wrapped(method: Any) -> Any:
        @wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                method(self, *args, **kwargs)
            except (StrictDataclassError, ValueError) as error:
                cause = error.__cause__ if isinstance(error, StrictDataclassClassValidationError) else error
                name = type(self).__name__
                raise ValueError(f"{name}: {' '.join(str(cause).split()).removeprefix(f'{name}: ')}") from error

        return wrapper

    cls.__init__, cls.__setattr__, cls.validate = map(wrapped, (cls.__init__, cls.__setattr__, cls.validate))
    return cls


def within(smallest: float, largest: float, default: Any) -> Any:
    """Declare a field with the range of its value, or of both values of a pair; None is not checked.

    The largest sizes, which no model reaches, refuse a damaged config.json before memory is allocated.
    """

    def check(value: Any) -> None:
        values = value if isinstance(value, (list, tuple)) else (value, value)
        # Negated, so that NaN is refused, too.
        if value is not None and not (len(values) == 2 and all(smallest <= x <= largest for x in values)):
            raise ValueError(f"must be in {smallest} .. {largest}, got {shown(value)}")

    return validated_field(check, default=default, metadata={"range": (smallest, largest)})


def one_of(allowed: Any, default: Any) -> Any:
    """Declare a field whose value, or each value of a list, must be one of `allowed`."""

    def check(value: Any) -> None:
        for each in value if isinstance(value, list) else [value]:
            if each not in allowed:
                raise ValueError(f"{shown(each)} is not known; use one of {', '.join(map(repr, allowed))}")

    return validated_field(check, default=default)


def _check_dtype(dtype: str | torch.dtype | None) -> None:
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise ValueError(f"must be a floating point dtype such as 'float32', got {shown(dtype)}")


def _check_labels(labels: dict[Any, str] | None) -> None:
    if labels is not None and {str(number) for number in labels} != {str(i) for i in range(len(labels))}:
        raise ValueError("must map each label 0 .. num_labels - 1 to its name")


@raise_value_errors
@strict
class AFTConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""
    Configuration of an Attention Free Transformer (Zhai et al., 2021, arXiv 2105.14103). The defaults give the paper's
    best character-level AFT for sequences of 1024 bytes (Table 4): AFT-local-32 with 24 layers of width 256.

    Args:
        modality: `"text"` (causal) or `"image"` (bidirectional over patches).
        aft_type: Type of the AFT layers, or a list with one type per layer: `"full"`, `"local"`, `"simple"`, `"conv"`
            or `"alibi"` (text only).
        hidden_size: Dimension d of the hidden states.
        num_hidden_layers: Number of layers.
        intermediate_size: Hidden dimension of the MLPs. Default: 4 times `hidden_size`.
        hidden_act: Activation function of the MLPs.
        layer_norm_eps: Epsilon of the layer norms.
        initializer_range: Standard deviation of the initial weight matrices.
        hidden_dropout_prob: Dropout probability of the embeddings and of each residual branch.
        drop_path_rate: Stochastic depth rate of the last layer; the rates increase linearly from 0.
        qkv_bias: Whether the query, key and value projections have biases.
        use_output_projection: Whether each mixer ends in an output projection.
        num_heads: Number h of position-bias heads, each of d/h features. Default: 1 if all layers are `full`, `local`
            or `simple`; otherwise the largest divisor of `hidden_size` with at least 24 features per head.
        position_bias_dim: Rank d' of the factors of the position biases of `full` and `local` (Eq. 7); `None` for a
            table without factors.
        position_bias_init_std: Standard deviation of the initial position biases, or of their factors: the paper's
            N(0, 10^-2), read as a variance.
        position_bias_multiplier: Constant m by which the learned position biases are multiplied, 1 in the paper and
            2000 in converted models. The initial w does not depend on it, but under Adam, w changes m times as fast
            (sqrt(m) times if it is factorized).
        window_size: Window size s of `local` (Eq. 4): position biases are learned for |t - t'| < s.
        kernel_size: Kernel size s of `conv` (Eq. 6): s x s patches of images, s odd; lags 0 .. s - 1 of text.
        position_bias_reparameterized: Whether the kernels of `conv` are standardized and rescaled (Eq. 8).
        global_connectivity: Whether positions outside the window or kernel are visible, with w = 0.
        query_activation: Activation function of the query.
        use_query: Whether the query gates the output of each mixer.
        position_bias_entropy_weight: Weight of the entropy of the `conv` kernels (Eq. 9) in the loss; 0.001 in the
            paper.
        position_bias_selection: `"gumbel"` makes each head of `conv` select one position of its kernel (Eq. 10): w is
            multiplied by a Gumbel-softmax sample of itself in training, and by the one-hot vector of its maximum at
            inference.
        gumbel_temperature: Temperature of the Gumbel softmax.
        mixing_implementation: Form that computes Eq. 2: `"auto"` (the fastest), `"reference"` (Eq. 2 as printed), or
            `"portable"` (PyTorch operations).
        vocab_size: Size of the vocabulary of a text model.
        max_position_embeddings: Maximum sequence length of a text model with position embeddings, or with learned
            tables (`full` and `local`). Configs of other models have no such attribute: tools cut texts at its value.
        tie_word_embeddings: Whether the language modeling head shares its weights with the token embeddings.
        use_cache: Whether a text model returns its cache for generation.
        bos_token_id: Id of the token that begins a sequence.
        eos_token_id: Id of the token, or tokens, that end a sequence.
        pad_token_id: Id of the padding token.
        use_position_embeddings: Whether to add learned position embeddings to the input. Default: `True` if any layer
            is `full`, `local` or `simple`.
        use_cls_token: Whether an image model prepends a class token. Default: `True` if no layer is `conv`.
        pooling: Pooled output of an image model: `"cls"` (the class token, the default if there is one) or `"mean"`
            (of the patches).
        image_size: Image size in pixels, or (rows, columns).
        patch_size: Patch size in pixels, or (rows, columns).
        patch_stride: Distance between neighboring patches in pixels, or (rows, columns). Default: `patch_size`;
            patches overlap with a smaller one.
        num_channels: Number of image channels.
        out_features: Stages that `AFTBackbone` returns: `"stem"` (the embeddings), `"stage1"` (the first layer), ...
            Default: the last stage.
        out_indices: Indices of these stages, in place of their names; 0 is the stem.
        reshape_hidden_states: Whether `AFTBackbone` returns feature maps. `False` returns sequences with the class
            token, as DPT and Depth Anything need them.

    Raises:
        ValueError: a field has a wrong type or value, or two fields contradict each other.
    """

    model_type = "aft"
    keys_to_ignore_at_inference = ["cache", "position_bias_entropy"]

    modality: str = one_of(("text", "image"), "text")
    aft_type: str | list[str] = one_of(AFT_TYPES, "local")
    hidden_size: int = within(1, 2**17, 256)
    num_hidden_layers: int = within(1, 2**12, 24)
    intermediate_size: int | None = within(1, 2**20, None)
    hidden_act: str = one_of(ACT2FN, "gelu")
    layer_norm_eps: float = within(1e-30, 1.0, 1e-5)
    initializer_range: float = within(1e-12, 1e3, 0.02)
    hidden_dropout_prob: float | int = within(0, 0.999, 0.0)
    drop_path_rate: float | int = within(0, 0.999, 0.0)
    qkv_bias: bool = True
    use_output_projection: bool = True
    num_heads: int | None = within(1, 2**17, None)
    position_bias_dim: int | None = within(1, 2**17, 256)
    position_bias_init_std: float | int = within(0, 1e3, 0.1)
    position_bias_multiplier: float | int = within(1e-6, 1e6, 1.0)
    window_size: int = within(1, 2**27, 32)
    kernel_size: int = within(1, 2**20, 11)
    position_bias_reparameterized: bool = True
    global_connectivity: bool = True
    query_activation: str = one_of(ACT2FN, "sigmoid")
    use_query: bool = True
    position_bias_entropy_weight: float | int = within(0, 1e6, 0.0)
    position_bias_selection: str | None = one_of((None, "gumbel"), None)
    gumbel_temperature: float | int = within(1e-4, 1e4, 0.5)
    mixing_implementation: str = one_of(MIXING_IMPLEMENTATIONS, "auto")
    vocab_size: int = within(1, 2**24, 256)
    max_position_embeddings: int = within(1, 2**27, 1024)
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_position_embeddings: bool | None = None
    use_cls_token: bool | None = None
    pooling: str | None = one_of((None, "cls", "mean"), None)
    image_size: int | list[int] | tuple[int, int] = within(1, 2**17, 224)
    patch_size: int | list[int] | tuple[int, int] = within(1, 2**12, 16)
    patch_stride: int | list[int] | tuple[int, int] | None = within(1, 2**12, None)
    num_channels: int = within(1, 2**12, 3)
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    # Fields of every config, with checks that transformers leaves out.
    dtype: str | torch.dtype | None = validated_field(_check_dtype, default=None)
    id2label: dict[int, str] | dict[str, str] | None = validated_field(_check_labels, default=None)
    problem_type: str | None = one_of((None, *PROBLEM_TYPES), None)  # type: ignore[assignment]  # wider than there

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_names(kwargs)
        types = set(self.layer_aft_types)
        if self.num_heads is None:
            most = self.hidden_size // HEAD_WIDTH if types & {"conv", "alibi"} else 1
            self.num_heads = next(count for count in range(max(most, 1), 0, -1) if self.hidden_size % count == 0)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.use_position_embeddings is None:
            self.use_position_embeddings = bool(types & {"full", "local", "simple"})
        if self.use_cls_token is None:
            self.use_cls_token = self.modality == "image" and "conv" not in types
        if self.pooling is None and self.modality == "image":
            self.pooling = "cls" if self.use_cls_token else "mean"
        if not (self.modality == "text" and (self.use_position_embeddings or types & {"full", "local"})):
            del self.max_position_embeddings
        self.base_model_tp_plan = self._tensor_parallel_plan()  # type: ignore[misc]  # as transformers itself sets it
        stages = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        if any(value is not None for value in stages.values()):
            self.set_output_features_output_indices(**stages)
        super().__post_init__(**kwargs)

    def __eq__(self, other: object) -> bool:  # that of dataclasses needs all fields
        same = (getattr(self, name, None) == getattr(other, name, None) for name in self.__dataclass_fields__)
        return type(other) is type(self) and all(same)

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        """Refuse a name that is close to a field, which would silently keep its default."""
        known = {field.name for field in dataclasses.fields(cls)} | {"num_labels", "out_features", "out_indices"}
        others = known | OTHER_NAMES | GenerationConfig._get_default_generation_params().keys()
        for name in names:
            if name in others or hasattr(cls, name):
                continue
            if near := get_close_matches(name, sorted(known), cutoff=0.7):
                raise ValueError(f"unknown field {shown(name)}; did you mean {' or '.join(near)}?")

    @PreTrainedConfig.num_labels.setter  # type: ignore[attr-defined]  # a property under a decorator of transformers
    def num_labels(self, num_labels: int) -> None:
        """Name the labels LABEL_0, LABEL_1, ...: the config stores only names."""
        if type(num_labels) is not int or not 0 <= num_labels <= MOST_LABELS:
            raise ValueError(f"num_labels must be an integer in 0 .. {MOST_LABELS}, got {shown(num_labels)}")
        PreTrainedConfig.num_labels.fset(self, num_labels)  # type: ignore[attr-defined]  # as above

    @property
    def layer_aft_types(self) -> list[str]:
        """The AFT type of each layer."""
        return [self.aft_type] * self.num_hidden_layers if isinstance(self.aft_type, str) else list(self.aft_type)

    @property
    def stage_names(self) -> list[str]:
        """The stages of a backbone."""
        return ["stem", *(f"stage{i}" for i in range(1, self.num_hidden_layers + 1))]

    @property
    def grid_stride(self) -> tuple[int, int]:
        """Distance between neighboring patches in pixels, for rows and columns."""
        return pair(self.patch_size if self.patch_stride is None else self.patch_stride)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Number of rows and columns of patches in an image of `image_size`."""
        return self.grid_of(pair(self.image_size))

    def grid_of(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the number of rows and columns of patches in an image of `size`, (height, width) in pixels."""
        return size[0] // self.grid_stride[0], size[1] // self.grid_stride[1]

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """The plan for `tp_plan="auto"`: mixers are split by features if all features share one position bias."""
        plan = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
        types = set(self.layer_aft_types)
        one_bias = types == {"simple"} or (self.num_heads == 1 and "conv" not in types)
        if one_bias and self.use_output_projection:
            plan |= {f"layers.*.mixer.{name}_proj": "colwise" for name in "qkv"}
            plan["layers.*.mixer.o_proj"] = "rowwise"
            # All features share the position biases, so their gradient is the sum over the processes.
            plan["layers.*.mixer"] = "replicated_with_grad_allreduce"
        return plan

    @property
    def max_positions(self) -> int:
        """Positions of the learned tables: `max_position_embeddings`, or the patches and the class token."""
        if self.modality == "text":
            return self.max_position_embeddings
        rows, columns = self.grid_size
        return rows * columns + bool(self.use_cls_token)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config from a dictionary; keyword arguments replace fields."""
        cls._check_names(kwargs)  # the base class ignores unknown names
        # The base class would take a field that the saved config lacks for an argument of the model.
        given = {name: kwargs.pop(name) for name in cls.__dataclass_fields__.keys() & kwargs.keys() - {"dtype"}}
        return super().from_dict(config_dict | given, **kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save config.json with an `auto_map` for all model classes of the modality, not only for the saved one.

        References to the code of another repository ("name--module.Class") are dropped.
        """
        own = {name: place for name, place in (getattr(self, "auto_map", None) or {}).items() if "--" not in place}
        self.auto_map = AUTO_MAPS[self.modality] | own
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    # `@strict` runs each method `validate_*` after construction and again before saving.

    def validate_layers(self) -> None:
        types, given = self.layer_aft_types, f"got {self.aft_type!r}"
        if len(types) != self.num_hidden_layers:
            raise ValueError(f"aft_type lists {len(types)} types for num_hidden_layers={self.num_hidden_layers}")
        if self.hidden_size % cast(int, self.num_heads):
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}")
        if not self.global_connectivity and not set(types) <= {"local", "conv"}:
            raise ValueError(f'global_connectivity=False needs aft_type "local" or "conv" in all layers, {given}')
        if self.position_bias_selection == "gumbel" and set(types) != {"conv"}:
            raise ValueError(f'position_bias_selection="gumbel" needs aft_type="conv" in all layers, {given}')
        if self.position_bias_entropy_weight > 0 and "conv" not in types:
            weight = self.position_bias_entropy_weight
            raise ValueError(f'position_bias_entropy_weight={weight} needs layers of aft_type="conv", {given}')

    def validate_text(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(self, name)
            for token in ids if isinstance(ids, list) else [ids]:
                if token is not None and self.modality == "text" and not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{name}={token} is not in 0 .. {self.vocab_size - 1}: set vocab_size=len(tokenizer), or "
                        f"another {name}"
                    )
        if self.modality == "text" and (self.use_cls_token or self.pooling):
            given = f"use_cls_token={self.use_cls_token}, pooling={self.pooling!r}"
            raise ValueError(f'use_cls_token and pooling need modality="image", got {given}')

    def validate_image(self) -> None:
        if self.modality != "image":
            return
        for size, patch, stride in zip(pair(self.image_size), pair(self.patch_size), self.grid_stride):
            if stride > patch:
                raise ValueError(f"patch_stride={self.patch_stride} is larger than patch_size={self.patch_size}")
            if size % stride:
                unit = f"patch_size={self.patch_size}" if stride == patch else f"patch_stride={self.patch_stride}"
                raise ValueError(f"image_size={self.image_size} is not a multiple of {unit}")
        types = self.layer_aft_types
        if "alibi" in types:
            raise ValueError('aft_type="alibi" is causal and needs modality="text", got modality="image"')
        if self.pooling == "cls" and not self.use_cls_token:
            raise ValueError('pooling="cls" needs use_cls_token=True; without a class token use pooling="mean"')
        if "conv" not in types:
            return
        if self.use_cls_token:
            raise ValueError('use_cls_token=True is not supported with aft_type="conv"')
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} must be odd for images")
        rows, columns = self.grid_size
        largest = 2 * max(rows, columns) - 1
        if self.kernel_size > largest:
            covered = f"a kernel of {largest} covers a grid of {rows} x {columns} patches"
            raise ValueError(f"kernel_size={self.kernel_size} is too large: {covered}")


def pair(size: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else cast(tuple[int, int], tuple(size))


del AFTConfig.max_position_embeddings  # the default of the field, which `hasattr` would find in any config
AFTConfig.register_for_auto_class("AutoConfig")

__all__ = ["AFTConfig"]
