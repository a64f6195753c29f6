"""AFT model configuration."""

import dataclasses
import math
import operator
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from reprlib import repr as shown  # shortens any value to one line
from typing import Any, cast

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig


AFT_TYPES = ("full", "local", "simple", "conv", "alibi")

# The `auto_map` of config.json for each modality: where the Auto classes find the code saved with a checkpoint.
AUTO_MAPS = {
    "text": {
        "AutoModel": "modeling_aft.AFTModel",
        "AutoModelForCausalLM": "modeling_aft.AFTForCausalLM",
        "AutoModelForSequenceClassification": "modeling_aft.AFTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_aft.AFTForTokenClassification",
    },
    "image": {
        "AutoModel": "modeling_aft.AFTModel",
        "AutoBackbone": "modeling_aft.AFTBackbone",
        "AutoModelForImageClassification": "modeling_aft.AFTForImageClassification",
    },
}

# The values of `mixing_implementation`: "auto" takes the first registered backend that supports the problem.
MIXING_IMPLEMENTATIONS = ("auto", "reference", "portable", "triton")

# The largest value of each field. No real model reaches them. A damaged config.json may exceed them, and is refused
# before any memory is allocated.
LARGEST = {
    "hidden_size": 2**17,
    "num_hidden_layers": 2**12,
    "intermediate_size": 2**20,
    "num_heads": 2**17,
    "position_bias_dim": 2**17,
    "window_size": 2**27,
    "kernel_size": 2**20,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**27,
    "num_channels": 2**12,
    "num_labels": 2**22,
    "image_size": 2**17,
    "patch_size": 2**12,
    "patch_stride": 2**12,
    "position_bias_init_std": 1e3,
    "position_bias_entropy_weight": 1e6,
}
LARGEST_NUM_PARAMETERS = 2**43  # of a whole model: 9e12
# The smallest and largest value of fields that serve as divisors in float32.
DIVISORS = {"layer_norm_eps": (1e-30, 1.0), "gumbel_temperature": (1e-4, 1e4), "initializer_range": (1e-12, 1e3)}
DIVISORS["position_bias_multiplier"] = (1e-6, 1e6)

# Features per position-bias head of `conv` and `alibi`: those of the paper's AFT-conv small 11/16 and base 25/32.
HEAD_WIDTH = 24

# Names that transformers accepts and that are not fields.
OTHER_NAMES = {"attn_implementation", "experts_implementation", "name_or_path", "per_layer_config", "torch_dtype"}
OTHER_NAMES |= {"is_decoder"} | {f"{token}_token_id" for token in ("cls", "decoder_start", "mask", "sep", "unk")}


def raise_value_errors(cls: Any) -> Any:
    """Make the constructor raise a plain ValueError for an invalid field, instead of the errors of `@strict`."""
    init = cls.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"{type(self).__name__}: {error.__cause__ or error}") from error
        except ValueError as error:  # from `__post_init__`
            raise ValueError(f"{type(self).__name__}: {error}") from error

    cls.__init__ = __init__
    return cls


@raise_value_errors
@strict
class AFTConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""
    Configuration of an Attention Free Transformer (Zhai et al., 2021, arXiv 2105.14103). It defines the architecture
    of the models `AFTModel`, `AFTForCausalLM`, `AFTForImageClassification` and the others. The defaults give the
    paper's best character-level AFT for sequences of 1024 bytes (Table 4): AFT-local-32 with 24 layers of width 256.

    Args:
        modality (`str`, defaults to `"text"`):
            Input of the model: `"text"` (tokens, causal) or `"image"` (image patches, bidirectional).
        aft_type (`str` or `list[str]`, defaults to `"local"`):
            Type of the AFT layers: `"full"`, `"local"`, `"simple"`, `"conv"` or `"alibi"` (text only), or a list
            with one type per layer.
        hidden_size (`int`, defaults to 256): Dimension d of the hidden states.
        num_hidden_layers (`int`, defaults to 24): Number of layers.
        intermediate_size (`int`, *optional*): Hidden dimension of the MLPs. Default: 4 times `hidden_size`.
        hidden_act (`str`, defaults to `"gelu"`): Activation function of the MLPs.
        layer_norm_eps (`float`, defaults to 1e-5): Epsilon of the layer norms.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial weight matrices.
        hidden_dropout_prob (`float`, defaults to 0.0):
            Dropout probability of the embeddings and of each residual branch.
        drop_path_rate (`float`, defaults to 0.0):
            Stochastic depth rate of the last layer. The rates increase linearly from 0 in the first layer.
        qkv_bias (`bool`, defaults to `True`): Whether the query, key and value projections have biases.
        use_output_projection (`bool`, defaults to `True`): Whether each mixer ends in an output projection.
        num_heads (`int`, *optional*):
            Number h of position-bias heads. All features of a head share the position biases: head i has the features
            [i d/h, (i+1) d/h). Default: 1 if all layers are `full`, `local` or `simple`; otherwise the largest
            divisor of `hidden_size` with at least 24 features per head, as in the paper's AFT-conv 11/16 and 25/32.
        position_bias_dim (`int`, *optional*, defaults to 256):
            Rank d' of the factorized position biases of `full` and `local` (Eq. 7). `None` learns the unfactorized
            table.
        position_bias_init_std (`float`, defaults to 0.1):
            Standard deviation of the initial position biases, or of their factors if they are factorized. The default
            reads the paper's N(0, 10^-2) as a variance of 10^-2.
        position_bias_multiplier (`float`, defaults to 1.0):
            Constant m by which the learned position biases are multiplied: w = m (gamma (k - mean) / std + beta) for
            `conv`, w = m u . v for `full` and `local`. The initial w has the same distribution for every m. But Adam
            moves each parameter by about the learning rate per step, so w changes m times as fast (sqrt(m) times if
            it is factorized). The paper has m = 1. Short training runs need a larger m: converted models have
            m = 1000.
        window_size (`int`, defaults to 32):
            Window size s of `local` (Eq. 4): position biases are learned for |t - t'| < s.
        kernel_size (`int`, defaults to 11):
            Kernel size s of `conv` (Eq. 6): s x s patches for images, where s is odd; the lags 0 .. s - 1 for text.
        position_bias_reparameterized (`bool`, defaults to `True`):
            Whether the kernels of `conv` are standardized and rescaled (Eq. 8).
        global_connectivity (`bool`, defaults to `True`):
            Whether positions outside the window or kernel are visible, with w = 0. `False` hides them (w = -inf).
        query_activation (`str`, defaults to `"sigmoid"`): Activation function of the query.
        use_query (`bool`, defaults to `True`): Whether the query gates the output of each mixer.
        position_bias_entropy_weight (`float`, defaults to 0.0):
            Weight of the entropy of the `conv` kernels (Eq. 9) in the loss. The paper uses 0.001.
        position_bias_selection (`str`, *optional*):
            `"gumbel"` makes each head of `conv` select one position of its kernel (Eq. 10): by a Gumbel softmax in
            training, by the arg-max at inference.
        gumbel_temperature (`float`, defaults to 0.5): Temperature of the Gumbel softmax.
        mixing_implementation (`str`, defaults to `"auto"`):
            Form that computes Eq. 2: `"auto"` (the fastest one for the device), `"reference"` (Eq. 2 as printed,
            slow), `"portable"` (PyTorch operations), or `"triton"` (fused GPU kernels, which need the package
            triton). The portable form computes what the chosen one does not support.
        vocab_size (`int`, defaults to 256): Size of the vocabulary of a text model.
        max_position_embeddings (`int`, defaults to 1024):
            Maximum sequence length of a text model with position embeddings or with learned tables of position biases
            (`full` and `local`). Other text models have no maximum.
        tie_word_embeddings (`bool`, defaults to `False`):
            Whether the language modeling head shares its weights with the token embeddings.
        use_cache (`bool`, defaults to `True`): Whether a text model returns its cache for generation.
        bos_token_id (`int`, *optional*): Id of the token that begins a sequence.
        eos_token_id (`int` or `list[int]`, *optional*): Id of the token, or tokens, that end a sequence.
        pad_token_id (`int`, *optional*): Id of the padding token.
        use_position_embeddings (`bool`, *optional*):
            Whether to add learned position embeddings to the input. Default: `True` if any layer is `full`, `local`
            or `simple`.
        use_cls_token (`bool`, *optional*):
            Whether an image model prepends a class token. Default: `True` if no layer is `conv`.
        pooling (`str`, *optional*):
            Pooled output of an image model: `"cls"` (the class token) or `"mean"` (the mean of the patches). Default:
            `"cls"` if there is a class token, else `"mean"`.
        image_size (`int` or `(int, int)`, defaults to 224): Image size in pixels, or (rows, columns).
        patch_size (`int` or `(int, int)`, defaults to 16): Patch size in pixels, or (rows, columns).
        patch_stride (`int` or `(int, int)`, *optional*):
            Distance between neighboring patches in pixels, or (rows, columns). Default: `patch_size`. With a smaller
            stride, patches overlap, and those at the border of the image extend beyond it, where the pixels of the
            border are repeated.
        num_channels (`int`, defaults to 3): Number of image channels.
        out_features (`list[str]`, *optional*):
            Names of the stages whose feature maps `AFTBackbone` returns: `"stem"`, `"stage1"`, `"stage2"`, ...
            Default: the last stage.
        out_indices (`list[int]`, *optional*): Indices of these stages, in place of their names; 0 is the stem.
        reshape_hidden_states (`bool`, defaults to `True`):
            Whether `AFTBackbone` returns feature maps. `False` returns sequences with the class token, as DPT and
            Depth Anything need them.

    Raises:
        ValueError: a field has a wrong type or value, or two fields contradict each other. The message names the
            field, the given value and the allowed values.

    Example:

    ```python
    >>> from aft_hf import AFTConfig, AFTForImageClassification

    >>> config = AFTConfig(
    ...     modality="image", aft_type="conv", hidden_size=384, num_hidden_layers=12, num_heads=16, num_labels=1000
    ... )
    >>> model = AFTForImageClassification(config)  # AFT-conv small 11/16 of the paper
    ```
    """

    model_type = "aft"
    keys_to_ignore_at_inference = ["cache", "position_bias_entropy"]

    modality: str = "text"
    aft_type: str | list[str] = "local"
    hidden_size: int = 256
    num_hidden_layers: int = 24
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    hidden_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    qkv_bias: bool = True
    use_output_projection: bool = True
    num_heads: int | None = None
    position_bias_dim: int | None = 256
    position_bias_init_std: float | int = 0.1
    position_bias_multiplier: float | int = 1.0
    window_size: int = 32
    kernel_size: int = 11
    position_bias_reparameterized: bool = True
    global_connectivity: bool = True
    query_activation: str = "sigmoid"
    use_query: bool = True
    position_bias_entropy_weight: float | int = 0.0
    position_bias_selection: str | None = None
    gumbel_temperature: float | int = 0.5
    mixing_implementation: str = "auto"
    vocab_size: int = 256
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_position_embeddings: bool | None = None
    use_cls_token: bool | None = None
    pooling: str | None = None
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    patch_stride: int | list[int] | tuple[int, int] | None = None
    num_channels: int = 3
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.validate_sizes()  # before memory is allocated by any of them
        self._check_names(kwargs)
        self._check_inherited(kwargs)
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
        self.base_model_tp_plan = self._tensor_parallel_plan()  # type: ignore[misc]  # as transformers itself sets it
        stages = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        if any(value is not None for value in stages.values()):
            self.set_output_features_output_indices(**stages)
        super().__post_init__(**kwargs)

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        """Refuse a name that is close to a field: it is mistyped, and the field would silently keep its default."""
        known = {field.name for field in dataclasses.fields(cls)} | {"num_labels", "out_features", "out_indices"}
        others = known | OTHER_NAMES | GenerationConfig._get_default_generation_params().keys()
        for name in names:
            if name in others or hasattr(cls, name):
                continue
            if near := get_close_matches(name, sorted(known), cutoff=0.7):
                raise ValueError(f"unknown field {shown(name)}; did you mean {' or '.join(near)}?")

    def _check_inherited(self, kwargs: dict[str, Any]) -> None:
        """Check the fields that transformers uses without checks; in a damaged config.json they can be any JSON."""
        for name in ("dtype", "torch_dtype"):
            dtype = self.dtype if name == "dtype" else kwargs.get(name)
            known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if dtype is not None and not (isinstance(known, torch.dtype) and known.is_floating_point):
                raise ValueError(f"{name} must be a floating point dtype such as 'float32', got {shown(dtype)}")
        names = self.architectures
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"architectures must be a list of names, got {shown(names)}")
        places = kwargs.get("auto_map")
        if places is not None and not isinstance(places, dict):
            raise ValueError(f"auto_map must map names of Auto classes to classes, got {shown(places)}")
        kinds = (None, "regression", "single_label_classification", "multi_label_classification")
        _require_one_of("problem_type", self.problem_type, kinds)
        labels = self.id2label
        if labels is not None and not (
            isinstance(labels, dict)
            and all(isinstance(label, str) for label in labels.values())
            and {str(number) for number in labels} == {str(number) for number in range(len(labels))}
        ):
            raise ValueError("id2label must map each label 0 .. num_labels - 1 to its name")

    @PreTrainedConfig.num_labels.setter  # type: ignore[attr-defined]  # a property under a decorator of transformers
    def num_labels(self, num_labels: int) -> None:
        """Name the labels LABEL_0, LABEL_1, ...: the config stores the names, and `num_labels` is their count."""
        is_integer = hasattr(num_labels, "__index__") and not isinstance(num_labels, bool)
        if not is_integer or not 0 <= num_labels <= LARGEST["num_labels"]:
            raise ValueError(f"num_labels must be in 0 .. {LARGEST['num_labels']}, got {shown(num_labels)}")
        count = operator.index(num_labels)
        PreTrainedConfig.num_labels.fset(self, count)  # type: ignore[attr-defined]  # as above

    @property
    def layer_aft_types(self) -> list[str]:
        """The AFT type of each layer."""
        return [self.aft_type] * self.num_hidden_layers if isinstance(self.aft_type, str) else list(self.aft_type)

    @property
    def stage_names(self) -> list[str]:
        """The stages of a backbone: the embeddings, then each layer."""
        return ["stem", *(f"stage{i}" for i in range(1, self.num_hidden_layers + 1))]

    @property
    def grid_stride(self) -> tuple[int, int]:
        """Distance between neighboring patches in pixels, for rows and columns: `patch_stride`, or `patch_size`."""
        return pair(self.patch_size if self.patch_stride is None else self.patch_stride)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Number of rows and columns of patches in an image of `image_size`."""
        return self.grid_of(pair(self.image_size))

    def grid_of(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the number of rows and columns of patches in an image of `size`, (height, width) in pixels."""
        return size[0] // self.grid_stride[0], size[1] // self.grid_stride[1]

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """The tensor-parallel plan (`tp_plan="auto"`).

        The AFT operation is element-wise in the features. If all features share one position bias, each process
        computes a part of the features, and the parts are combined only in the output projection. If each head has
        its own position biases, or its own key (`conv`), every process has the whole mixer, and only the MLPs are
        split.
        """
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
    def approximate_num_parameters(self) -> int:
        """Number of parameters of a model with its head, without vectors (biases, layer norms, the class token)."""
        width, heads, text = self.hidden_size, cast(int, self.num_heads), self.modality == "text"
        positions, rank = self.max_positions, self.position_bias_dim
        table = heads * positions * (positions if rank is None else 2 * rank)
        kernel = heads * self.kernel_size ** (1 if text else 2)
        projections = 1 + self.use_query + self.use_output_projection  # value, query and output projection
        total = 0
        for aft_type in self.layer_aft_types:
            key = heads if aft_type == "conv" else width
            bias = {"full": table, "local": table, "conv": kernel}.get(aft_type, 0)
            total += width * (projections * width + key + 2 * (self.intermediate_size or 0)) + bias
        if text:
            total += width * self.vocab_size * (1 if self.tie_word_embeddings else 2)
        else:
            total += width * (math.prod(pair(self.patch_size)) * self.num_channels + self.num_labels)
        return total + (width * positions if self.use_position_embeddings else 0)

    @property
    def max_positions(self) -> int:
        """Number of positions in the learned tables: `max_position_embeddings`, or the patches and the class token."""
        if self.modality == "text":
            return self.max_position_embeddings
        rows, columns = self.grid_size
        return rows * columns + bool(self.use_cls_token)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config from a dictionary of fields, and more fields that replace them."""
        cls._check_names(kwargs)  # the base class ignores unknown names
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dictionary, without `out_features` and `out_indices` if they are not set."""
        fields = super().to_dict()
        for name in ("out_features", "out_indices"):
            if fields[name] is None:
                del fields[name]
        return fields

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save config.json with an `auto_map` for all model classes of the modality, not only for the saved one.

        So the code saved with the weights also serves `AutoModel` for a checkpoint with a head, and an Auto class
        with a head for a checkpoint without. References to another repository ("name--module.Class") are dropped.
        """
        own = {name: place for name, place in (getattr(self, "auto_map", None) or {}).items() if "--" not in place}
        self.auto_map = AUTO_MAPS[self.modality] | own
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    # `@strict` runs each method `validate_*` after construction and again before saving.

    def validate_choices(self) -> None:
        _require_one_of("modality", self.modality, ("text", "image"))
        for aft_type in [self.aft_type] if isinstance(self.aft_type, str) else self.aft_type:
            _require_one_of("aft_type", aft_type, AFT_TYPES)
        _require_one_of("hidden_act", self.hidden_act, ACT2FN)
        _require_one_of("query_activation", self.query_activation, ACT2FN)
        _require_one_of("position_bias_selection", self.position_bias_selection, (None, "gumbel"))
        _require_one_of("mixing_implementation", self.mixing_implementation, MIXING_IMPLEMENTATIONS)
        _require_one_of("pooling", self.pooling, ("cls", "mean") if self.modality == "image" else (None,))

    def validate_sizes(self) -> None:
        # The comparisons are negated so that NaN is refused too.
        counts = ["hidden_size", "num_hidden_layers", "window_size", "kernel_size"]
        counts += ["vocab_size", "max_position_embeddings", "num_channels"]
        optional = ("intermediate_size", "num_heads", "position_bias_dim")
        counts += [name for name in optional if getattr(self, name) is not None]
        for name in counts:
            if not 0 < getattr(self, name) <= LARGEST[name]:
                raise ValueError(f"{name} must be in 1 .. {LARGEST[name]}, got {shown(getattr(self, name))}")
        for name, (smallest, largest) in DIVISORS.items():
            if not smallest <= getattr(self, name) <= largest:
                raise ValueError(f"{name} must be in [{smallest}, {largest}], got {shown(getattr(self, name))}")
        for name in ("position_bias_init_std", "position_bias_entropy_weight"):
            if not 0 <= getattr(self, name) <= LARGEST[name]:
                raise ValueError(f"{name} must be in [0, {LARGEST[name]}], got {shown(getattr(self, name))}")
        for name in ("hidden_dropout_prob", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {shown(getattr(self, name))}")

    def validate_layers(self) -> None:
        self.validate_sizes()  # first: validators run in the order of their names, and this one divides by sizes
        types = self.layer_aft_types
        if len(types) != self.num_hidden_layers:
            raise ValueError(
                f"aft_type lists {len(types)} types for num_hidden_layers={self.num_hidden_layers}: "
                "give one type per layer, or one name for all of them"
            )
        if self.hidden_size % cast(int, self.num_heads):
            raise ValueError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}: "
                "each head has hidden_size / num_heads features"
            )
        if not self.global_connectivity and not set(types) <= {"local", "conv"}:
            raise ValueError(
                'global_connectivity=False hides positions outside a window and needs aft_type "local" or "conv" in '
                f"all layers, got {self.aft_type!r}"
            )
        if self.position_bias_selection == "gumbel" and set(types) != {"conv"}:
            raise ValueError(
                f'position_bias_selection="gumbel" selects one position of a kernel and needs aft_type="conv" in all '
                f"layers, got {self.aft_type!r}"
            )
        if self.position_bias_entropy_weight > 0 and "conv" not in types:
            raise ValueError(
                f"position_bias_entropy_weight={self.position_bias_entropy_weight} regularizes the kernels of "
                f'aft_type="conv", got aft_type={self.aft_type!r}; set it to 0'
            )

    def validate_total(self) -> None:
        # Validators run in the order of their names, so all sizes have been checked here.
        if self.approximate_num_parameters > LARGEST_NUM_PARAMETERS:
            raise ValueError(
                f"hidden_size={self.hidden_size}, num_hidden_layers={self.num_hidden_layers} and the other sizes give "
                f"{self.approximate_num_parameters:.1e} parameters; at most {LARGEST_NUM_PARAMETERS:.1e} are allowed"
            )

    def validate_text(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(self, name)
            for token in ids if isinstance(ids, list) else [ids]:
                if token is not None and self.modality == "text" and not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{name}={token} is not in 0 .. vocab_size - 1 with vocab_size={self.vocab_size}; "
                        "set vocab_size=len(tokenizer) to include the tokenizer's special tokens"
                    )
        if self.modality == "text" and self.use_cls_token:
            raise ValueError('use_cls_token=True needs modality="image"')

    def validate_image(self) -> None:
        if self.modality != "image":
            return
        self.validate_sizes()
        for name in ("image_size", "patch_size", "patch_stride"):
            if name == "patch_stride" and self.patch_stride is None:
                continue
            sides = pair(getattr(self, name))
            if len(sides) != 2 or not 0 < min(sides) <= max(sides) <= LARGEST[name]:
                raise ValueError(
                    f"{name} must be an integer or (rows, columns), each in 1 .. {LARGEST[name]}, got "
                    f"{shown(getattr(self, name))}"
                )
        for size, patch, stride in zip(pair(self.image_size), pair(self.patch_size), self.grid_stride):
            if stride > patch:
                raise ValueError(
                    f"patch_stride={self.patch_stride} is larger than patch_size={self.patch_size}: pixels between "
                    "the patches would be left out"
                )
            if size % stride:
                unit = f"patch_size={self.patch_size}" if stride == patch else f"patch_stride={self.patch_stride}"
                raise ValueError(
                    f"image_size={self.image_size} is not a multiple of {unit}: the grid covers the whole image"
                )
        types = self.layer_aft_types
        if "alibi" in types:
            raise ValueError('aft_type="alibi" is causal and needs modality="text", got modality="image"')
        if self.pooling == "cls" and not self.use_cls_token:
            raise ValueError('pooling="cls" needs use_cls_token=True; without a class token use pooling="mean"')
        if "conv" in types:
            self._validate_image_kernel()

    def _validate_image_kernel(self) -> None:
        if self.use_cls_token:
            raise ValueError(
                'use_cls_token=True is not supported with aft_type="conv": a class token has no position on the grid'
            )
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} must be odd for images, so that the kernel has a center")
        largest = 2 * max(self.grid_size) - 1
        if self.kernel_size > largest:
            raise ValueError(
                f"kernel_size={self.kernel_size} is too large: on a grid of {self.grid_size[0]} x "
                f"{self.grid_size[1]} patches, a kernel of {largest} already covers every offset between two patches"
            )


def pair(size: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    """Return a size as (rows, columns): an integer stands for both."""
    return (size, size) if isinstance(size, int) else cast(tuple[int, int], tuple(size))


def one_or_pair(size: tuple[int, int]) -> int | tuple[int, int]:
    """Return (rows, columns) as one integer if they are equal: the inverse of `pair`."""
    return size[0] if size[0] == size[1] else size


def _require_one_of(field: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{field}={shown(value)} is not known; use one of {', '.join(map(repr, allowed))}")


# With this, saving a config or a model saves this file and its siblings with it.
AFTConfig.register_for_auto_class("AutoConfig")

__all__ = ["AFTConfig"]
