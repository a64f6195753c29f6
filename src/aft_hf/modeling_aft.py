"""PyTorch AFT models: the backbone and the heads.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103): pre-norm Transformer blocks with an AFT mixer in
place of self-attention, causal over tokens or bidirectional over patches of an image.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.activations import ACT2FN, GELUActivation
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_torchdynamo_compiling, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .caching_aft import AFTCache, AFTLayerState
from .configuration_aft import AFTConfig, pair
from .mixers_aft import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTMixer, AFTSimple
from .mixing_aft import PACKING_INPUTS, Documents, packed_documents
from .portable_aft import are_plain_tensors, autocast_dtype, full_precision, has_no_hooks


logger = logging.get_logger(__name__)

# The oldest and the newest minor release of transformers on which these models are tested. Requirements of a package
# do not reach a checkpoint that is loaded as remote code, so the code checks the release itself.
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = (5, 24), (5, 24)


def _check_transformers(version: str) -> None:
    """Refuse a release of transformers that is too old, and warn about one that is newer than the tested ones."""
    release = tuple(int(part) for part in version.split(".")[:2])
    oldest, newest = ("{}.{}".format(*known) for known in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
    if release < OLDEST_TRANSFORMERS:
        raise ImportError(
            f"AFT needs transformers {oldest} or newer, which renamed past_key_values to cache: {version}"
        )
    if release > NEWEST_TRANSFORMERS:
        logger.warning_once(
            f"AFT is tested with transformers up to {newest}, and this is {version}. If an interface has changed, "
            "generate can give wrong text: compare it with use_cache=False, or install a newer aft-hf"
        )


_check_transformers(transformers_version)

# `aft_hf.parallel.context_parallel` sets this while the inputs of models are shards of longer sequences. It makes the
# shard that goes with a batch through all layers, and computes what concerns the whole sequences: means and losses. A
# plain global variable, because `torch.compile` can read it and guard on it.
context_parallelism: Any = None

# The library's own schedule for the old name.
_renames_cache = deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")


class AFTTextEmbeddings(nn.Module):
    """Token embeddings, with learned position embeddings if `config.use_position_embeddings` is set."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings, self.max_positions = None, config.max_position_embeddings
        if config.use_position_embeddings:
            self.position_embeddings = nn.Embedding(self.max_positions, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        state: AFTLayerState | None = None,
        documents: Documents | None = None,
        shard: Any = None,
    ) -> torch.Tensor:
        if self.position_embeddings is not None:
            positions = self._positions(inputs_embeds, self.max_positions, padding_mask, state, documents, shard)
            inputs_embeds = inputs_embeds + self.position_embeddings(positions)
        return self.dropout(inputs_embeds)

    def _positions(
        self,
        inputs_embeds: torch.Tensor,
        limit: int,
        padding_mask: torch.Tensor | None,
        state: AFTLayerState | None,
        documents: Documents | None,
        shard: Any,
    ) -> torch.Tensor:
        """Return the position of each token, (B or 1, T), within a table of `limit` positions.

        Padding is not counted, so it does not change the positions of the real tokens.

        Raises:
            ValueError: a sequence or a document is longer than the table.
        """
        length = inputs_embeds.shape[1]
        if shard is not None:
            self._check_length("sequence", shard.longest, limit)
            return shard.positions().clamp_max(limit - 1)
        if documents is not None:
            self._check_length("document", documents.longest(), limit)
            return documents.positions(padding_mask)
        start: torch.Tensor | int = 0
        longest = length
        if state is not None and state.is_initialized:
            start, longest = state.seen[:, None], state.tokens_after(length, limit)
        self._check_length("sequence", longest, limit)
        if padding_mask is None:
            return start + torch.arange(length, device=inputs_embeds.device).unsqueeze(0)
        return (start + padding_mask.long().cumsum(-1) - 1).clamp_min(0)

    @staticmethod
    def _check_length(kind: str, length: int | None, limit: int) -> None:
        if length is not None and length > limit:
            raise ValueError(f"a {kind} of {length} tokens is longer than max_position_embeddings={limit}")


class AFTImageEmbeddings(nn.Module):
    """Patch embeddings, with a class token and learned position embeddings if the config has them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.patch_size, self.grid_stride = pair(config.patch_size), config.grid_stride
        self.num_channels, self.image_size = config.num_channels, pair(config.image_size)
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.grid_stride
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.position_embeddings = None
        if config.use_position_embeddings:
            self.position_embeddings = nn.Parameter(torch.zeros(1, config.max_positions, config.hidden_size))
        # Learned tables cover one grid size. Only AFT-conv without position embeddings accepts other sizes.
        self.fixed_size = set(config.layer_aft_types) != {"conv"} or config.use_position_embeddings
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: torch.Tensor, shard: Any = None) -> tuple[torch.Tensor, tuple[int, int]]:
        self._check_size(pixel_values, shard)
        if self.patch_size != self.grid_stride:
            pixel_values = nn.functional.pad(pixel_values, self._margins(), mode="replicate")
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))  # (B, d, rows, columns)
        grid_size = (patches.shape[2], patches.shape[3])
        # A residual stream that is not contiguous would slow down every layer.
        embeddings = patches.flatten(2).transpose(1, 2).contiguous()
        if self.cls_token is not None:
            embeddings = torch.cat([self.cls_token.expand(embeddings.shape[0], -1, -1), embeddings], 1)
        if self.position_embeddings is not None:
            positions: torch.Tensor = self.position_embeddings
            if shard is not None:
                positions = positions.narrow(1, shard.first_row * shard.columns, shard.length)
            embeddings = embeddings + positions
        return self.dropout(embeddings), grid_size

    def _margins(self) -> list[int]:
        """Pixels by which overlapping patches extend beyond the image: left, right, top and bottom, as `pad` does."""
        beyond = [size - stride for size, stride in zip(self.patch_size, self.grid_stride)]
        return [margin for pixels in reversed(beyond) for margin in (pixels // 2, pixels - pixels // 2)]

    def check_patches(self, pixel_values: torch.Tensor) -> None:
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values must be (batch, {self.num_channels}, height, width), got {tuple(pixel_values.shape)}"
            )
        size = tuple(pixel_values.shape[2:])
        if size[0] % self.grid_stride[0] or size[1] % self.grid_stride[1] or 0 in size:
            unit = "patch_stride" if self.patch_size != self.grid_stride else "the patch size"
            raise ValueError(
                f"images of {size[0]} x {size[1]} pixels cannot be divided into a grid of {self.grid_stride[0]} x "
                f"{self.grid_stride[1]} pixels: height and width must be multiples of {unit}"
            )

    def _check_size(self, pixel_values: torch.Tensor, shard: Any) -> None:
        self.check_patches(pixel_values)
        height, width = pixel_values.shape[2:]
        if shard is not None:
            height = shard.total_length // shard.columns * self.grid_stride[0]
        if self.fixed_size and (height, width) != self.image_size:
            raise ValueError(
                f"images of {height} x {width} pixels do not match image_size={self.image_size[0]} x "
                f'{self.image_size[1]}: only models with aft_type="conv" in all layers and without position '
                "embeddings accept images of other sizes"
            )


def build_mixer(config: AFTConfig, layer_idx: int) -> AFTMixer:
    """Build the mixer of a layer from the config."""
    aft_type = config.layer_aft_types[layer_idx]
    options: dict[str, Any] = {
        "causal": config.modality == "text",
        "qkv_bias": config.qkv_bias,
        "use_query": config.use_query,
        "query_activation": config.query_activation,
        "use_output_projection": config.use_output_projection,
        "global_connectivity": config.global_connectivity,
        "implementation": config.mixing_implementation,
        "num_heads": config.num_heads,
    }
    table: dict[str, Any] = {
        "max_positions": config.max_positions,
        "position_bias_dim": config.position_bias_dim,
        "position_bias_init_std": config.position_bias_init_std,
        "position_bias_multiplier": config.position_bias_multiplier,
    }
    if aft_type == "full":
        return AFTFull(config.hidden_size, **table, **options)
    if aft_type == "local":
        return AFTLocal(config.hidden_size, window_size=config.window_size, **table, **options)
    if aft_type == "conv":
        return AFTConv(
            config.hidden_size,
            kernel_size=config.kernel_size,
            spatial_dims=2 if config.modality == "image" else 1,
            reparameterized=config.position_bias_reparameterized,
            selection=config.position_bias_selection,
            gumbel_temperature=config.gumbel_temperature,
            position_bias_init_std=config.position_bias_init_std,
            position_bias_multiplier=config.position_bias_multiplier,
            **options,
        )
    return {"simple": AFTSimple, "alibi": AFTAlibi}[aft_type](config.hidden_size, **options)


class _LinearOfGelu(torch.autograd.Function):
    """weight @ gelu(x) + bias. The backward pass computes GELU again, so only one of the two wide tensors is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return nn.functional.linear(nn.functional.gelu(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients will be differentiated again
            wanted = [y for y, needed in zip((x, weight, bias), ctx.needs_input_grad) if needed]
            output = nn.functional.linear(nn.functional.gelu(x), weight, bias)
            found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
            return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
        rows, of_x, of_weight, of_bias = gradient.reshape(-1, gradient.shape[-1]), None, None, None
        if ctx.needs_input_grad[0]:
            of_x = torch.ops.aten.gelu_backward(gradient @ weight, x)
        if ctx.needs_input_grad[1]:
            of_weight = rows.mT @ nn.functional.gelu(x).reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


class AFTMLP(nn.Module):
    """MLP of two linear layers with an activation function between them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        assert config.intermediate_size is not None  # the config has filled it in
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        is_plain = self._has_plain_modules() and are_plain_tensors(hidden_states)
        if is_plain and self._fuses_gelu(hidden_states):
            weight, bias = self.fc1.weight, self.fc1.bias
            return self.fc2(torch.ops.mkldnn._linear_pointwise(hidden_states, weight, bias, "gelu", [], "none"))
        projected = self.fc1(hidden_states)
        if not is_plain:
            return self.fc2(self.activation(projected))
        if not torch.is_grad_enabled():
            return self.fc2(torch._C._nn.gelu_(projected))  # type: ignore[attr-defined]  # in place
        tensors: tuple[Any, ...] = (projected, self.fc2.weight, self.fc2.bias)
        dtype = autocast_dtype(projected.device.type)
        if dtype is not None:
            tensors = tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
        with full_precision(projected.device.type):
            return _LinearOfGelu.apply(*tensors)

    def _fuses_gelu(self, x: torch.Tensor) -> bool:
        """Whether oneDNN computes the first product and GELU in one pass: 8 to 10 % less time of an image model."""
        if x.dtype != torch.bfloat16 or not x.is_cpu or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        tensors = [y for y in (x, self.fc1.weight, self.fc1.bias) if y is not None]
        if any(y.dtype != x.dtype or not y.is_contiguous() for y in tensors) or x.shape[-1] != self.fc1.in_features:
            return False
        onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        return bool(onednn) and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def _has_plain_modules(self) -> bool:
        """Whether the modules are linear layers and GELU without hooks or other changes, which need not be called."""
        gelu = type(self.activation) is GELUActivation and self.activation.act is nn.functional.gelu
        linear = (self.fc1, self.fc2)
        if not (gelu and all(type(x) is nn.Linear and type(x.weight) is nn.Parameter for x in linear)):
            return False
        return all(has_no_hooks(x) for x in (*linear, self.activation)) and self.fc2.weight.layout == torch.strided


class AFTDropPath(nn.Module):
    """Stochastic depth: drops the residual branch of random samples, and scales up the remaining ones."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * keep.to(branch.dtype) / (1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class AFTLayer(GradientCheckpointingLayer):
    """One layer, a pre-norm Transformer block: x + mixer(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: AFTConfig, layer_idx: int):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layer_idx = layer_idx
        self.mixer = build_mixer(config, layer_idx)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = AFTMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = AFTDropPath(config.drop_path_rate * layer_idx / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
        cache: AFTCache | None = None,
        documents: Documents | None = None,
        shard: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        branch = self.mixer(
            self.layernorm_before(hidden_states),
            attention_mask=attention_mask,
            documents=documents,
            shard=shard,
            grid_size=grid_size,
            state=None if cache is None else cache.layers[self.layer_idx],
            output_attentions=output_attentions,
        )
        branch = branch[0] if output_attentions else branch
        regularizers = self._regularizers()
        hidden_states = _add(hidden_states, branch, regularizers)
        del branch  # frees its memory before the MLP, where memory use peaks
        return _add(hidden_states, self.mlp(self.layernorm_after(hidden_states)), regularizers)

    def _regularizers(self) -> list[nn.Module]:
        """Return dropout and stochastic depth if they have an effect.

        Modules without effect are not called, because the time of a decoding step is mostly the overhead of calls.
        """
        modules = (self.dropout, nn.Dropout), (self.drop_path, AFTDropPath)
        return [x for x, kind in modules if x.training or type(x) is not kind or not has_no_hooks(x)]


def _add(hidden_states: torch.Tensor, branch: torch.Tensor, regularizers: list[nn.Module]) -> torch.Tensor:
    """Add a branch to the residual stream, after its regularizers."""
    for module in regularizers:
        branch = module(branch)
    return hidden_states + branch


class AFTPreTrainedModel(PreTrainedModel):
    """Base class of all AFT models: weight initialization, and declarations such as gradient checkpointing support,
    the modules that are never split across devices, and the outputs that can be recorded.
    """

    config: AFTConfig
    config_class = AFTConfig
    base_model_prefix = "aft"
    input_modalities: list[str] = ["text", "image"]
    supports_gradient_checkpointing = True
    _is_stateful = True
    _can_compile_fullgraph = True
    _no_split_modules = ["AFTLayer"]  # `AFTModel` adds its embeddings
    _can_record_outputs = {
        "hidden_states": AFTLayer,
        "attentions": OutputRecorder(AFTMixer, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AFTMixer):
            module.reset_position_bias()
        elif isinstance(module, AFTImageEmbeddings):
            for parameter in (module.cls_token, module.position_embeddings):
                if parameter is not None:
                    init.trunc_normal_(parameter, mean=0.0, std=self.config.initializer_range)


class AFTModel(AFTPreTrainedModel):
    """The bare AFT model: embeddings of tokens or patches, the layers, and a final layer norm, without a head.

    Args:
        config (`AFTConfig`): Configuration of the model. `config.modality` selects a text or an image model.
    """

    embeddings: Any  # `AFTTextEmbeddings` or `AFTImageEmbeddings`, which FSDP may wrap in a module

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.is_text = config.modality == "text"
        self.main_input_name = "input_ids" if self.is_text else "pixel_values"
        self.embeddings = AFTTextEmbeddings(config) if self.is_text else AFTImageEmbeddings(config)
        # Only the embeddings that exist: FSDP of Accelerate refuses names of absent modules.
        self._no_split_modules = [*self._no_split_modules, type(self.embeddings).__name__]
        self.layers = nn.ModuleList([AFTLayer(config, i) for i in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        # The tensors that the backward pass has reached since the last forward pass: see `_watch_entropy`.
        self._reached: set[str] = set()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings if self.is_text else self.embeddings.patch_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        setattr(self.embeddings, "word_embeddings" if self.is_text else "patch_embeddings", value)

    @merge_with_config_defaults
    @capture_outputs
    @_renames_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        cache: AFTCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast | BaseModelOutputWithPooling:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                Token ids, the input of a text model.
            attention_mask (`torch.Tensor` of shape `(batch_size, sequence_length)`):
                Padding mask: 1 for tokens, 0 for padding. Padding may be anywhere in a row and does not change the
                results of the tokens. Alternatively a boolean mask of shape
                `(batch_size or 1, sequence_length, sequence_length)`, False where a query must not see a key. The
                boolean mask cannot be combined with a cache.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                Embedded tokens, in place of `input_ids`.
            position_ids (`torch.LongTensor` of shape `(batch_size or 1, sequence_length)`):
                Positions of packed documents, as `DataCollatorWithFlattening` makes them: they start again at 0 with
                each document. No document sees another one. Packed documents have no cache. In a compiled program,
                any `position_ids` count as packed documents.
            cu_seq_lens_q (`torch.IntTensor` of shape `(number of documents + 1,)`):
                Cumulative lengths of the packed documents, in place of `position_ids`: their boundaries in the
                flattened batch, starting with 0.
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Images, the input of an image model. If all layers are `conv` and there are no position embeddings
                (the default for `conv`), height and width may be any multiples of the stride of the patches, which is
                the patch size by default; otherwise they must match `config.image_size`.
            cache (`AFTCache`):
                Cache that an earlier call returned. The input continues the sequences of that call.
            use_cache (`bool`):
                Whether a text model returns its cache. In training mode, no new cache is created.

        Returns:
            `BaseModelOutputWithPast` for text. `BaseModelOutputWithPooling` for images, whose `pooler_output` is the
            class token or the mean of the patches. With `output_attentions=True`, `attentions` contains for each layer
            the implicit attention of Eq. 3, `(batch_size, hidden_size, sequence_length, sequence_length)`: each
            feature has its own weights, so the second dimension is `hidden_size` and not `num_heads`. With a
            cache, the last dimension counts the cached tokens too. The weights include the gate, so a row sums to
            `act(query)` of its feature and not to 1.

        Raises:
            ValueError: the inputs are of another modality, have a wrong shape, or are longer than the learned
                positions.
        """
        asked = kwargs.get("output_attentions")
        kwargs["output_attentions"] = bool(self.config.output_attentions if asked is None else asked)
        if self.is_text and pixel_values is not None:
            raise ValueError('pixel_values needs a model with modality="image", got modality="text"')
        if not self.is_text and (input_ids is not None or inputs_embeds is not None):
            raise ValueError('input_ids or inputs_embeds needs a model with modality="text", got modality="image"')
        if self.is_text:
            use_cache = use_cache and not self.training
            return self._forward_text(input_ids, attention_mask, inputs_embeds, cache, use_cache, **kwargs)
        if pixel_values is None:
            raise ValueError('a model with modality="image" needs pixel_values')
        shard = None
        if context_parallelism is not None:
            shard = context_parallelism.shard_images(self, pixel_values, attention_mask)
        hidden_states, grid_size = self.embeddings(pixel_values, shard)
        hidden_states = self._run_layers(hidden_states, attention_mask, grid_size=grid_size, shard=shard, **kwargs)
        self._watch_entropy(hidden_states)
        patches = hidden_states[:, int(bool(self.config.use_cls_token)) :]
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else patches.mean(1)
        if shard is not None:
            pooled = shard.mean(pooled)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _forward_text(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        cache: AFTCache | None,
        use_cache: bool | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError('a model with modality="text" needs either input_ids or inputs_embeds, not both')
        if inputs_embeds is None:
            assert input_ids is not None
            self._check_tokens(input_ids)
            inputs_embeds = self.embeddings.word_embeddings(input_ids)
        if inputs_embeds.shape[1] == 0:
            raise ValueError("the input is empty: give at least one token")
        pairwise = attention_mask is not None and attention_mask.dim() == 3  # running sums cannot represent it
        if kwargs.get("encoder_hidden_states") is not None or isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                "AFT has no cross-attention, so it cannot be the decoder of an encoder-decoder model, which passes "
                "encoder_hidden_states and an EncoderDecoderCache"
            )
        if cache is not None and not isinstance(cache, AFTCache):
            given = f"cache must be an AFTCache, which holds sums over the past, got {type(cache).__name__}"
            if isinstance(cache, Cache) and not cache.is_initialized:
                raise ValueError(
                    f"{given}: a model that contains this one, such as LLaVA, creates it. Call it with "
                    "use_cache=False, or with the cache that new_cache() of the AFTModel returns"
                )
            raise ValueError(f"{given}. Prefix tuning, which learns keys and values, is not supported: use LoRA")
        packing = {name: kwargs.pop(name, None) for name in PACKING_INPUTS}
        if context_parallelism is not None:
            shard = context_parallelism.shard_text(inputs_embeds, attention_mask, packing)
            if use_cache and cache is None and shard.documents is None:
                cache = self.new_cache()
            hidden_states = self.embeddings(inputs_embeds, shard=shard)
            hidden_states = self._run_layers(hidden_states, None, cache=cache, shard=shard, **kwargs)
            return BaseModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)
        continues = cache is not None and cache.layers[0].is_initialized
        documents = None
        if not continues:  # training needs no cache, so it need not wait to learn whether the rows are packed
            size = inputs_embeds.shape[:2]
            documents = packed_documents(packing, attention_mask, *size, may_wait=not self.training)
        if documents is not None and cache is not None:
            raise ValueError(
                "a cache holds one sequence per row, but position_ids or cu_seq_lens_q pack several documents into "
                "one row"
            )
        if use_cache and cache is None and not pairwise and documents is None:
            cache = self.new_cache()
        state, past = None, 0
        if cache is not None:
            state, past = cache.layers[0], cache.get_seq_length()
            state.check_batch_size(inputs_embeds.shape[0])
        if not pairwise:
            fixed = cache is not None and cache.is_compileable
            attention_mask = _mask_of_new_tokens(attention_mask, inputs_embeds, None if fixed else past)
        hidden_states = self.embeddings(inputs_embeds, None if pairwise else attention_mask, state, documents)
        kwargs |= {"cache": cache, "documents": documents}
        hidden_states = self._run_layers(hidden_states, attention_mask, **kwargs)
        self._watch_entropy(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length, given by the learned positions; None without learned positions."""
        limits: list[int | None] = [mixer.max_positions for mixer in self._mixers]
        if self.config.use_position_embeddings:
            limits.append(self.config.max_position_embeddings)
        return min((limit for limit in limits if limit is not None), default=None)

    def new_cache(self, max_length: int | None = None) -> AFTCache:
        """Return an empty cache for this model.

        Args:
            max_length: maximum sequence length of a static cache. Default: None, for a dynamic cache.

        Raises:
            ValueError: `max_length` exceeds the learned positions, or a layer does not support a static cache.
        """
        limit = self.max_length
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"a static cache of {max_length} tokens is longer than max_position_embeddings={limit}")
        return AFTCache([mixer.state_window for mixer in self._mixers], max_length)

    @property
    def _mixers(self) -> list[Any]:
        """The mixer of each layer: an `AFTMixer`, or a module that replaces it.

        peft wraps a mixer in a module without its attributes if a LoRA adapts one of its parameters.
        """
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        return [mixer.get_base_layer() if hasattr(mixer, "get_base_layer") else mixer for mixer in mixers]

    def _check_tokens(self, input_ids: torch.Tensor) -> None:
        # On an accelerator, reading the values would synchronize in every step; the embedding kernel asserts there.
        if input_ids.device.type != "cpu" or is_torchdynamo_compiling() or input_ids.numel() == 0:
            return
        lowest, highest = (int(x) for x in input_ids.aminmax())
        size = self.config.vocab_size
        if lowest < 0 or highest >= size:
            raise ValueError(f"token ids must be in 0 .. {size - 1} (vocab_size={size}), got {lowest} .. {highest}")

    def _run_layers(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return self.layernorm(hidden_states)

    def position_bias_entropy(self) -> torch.Tensor | None:
        """Return the entropy of the position biases (Eq. 9, nats), summed over the layers of type "conv"; None if
        `position_bias_entropy_weight` is 0.
        """
        if self.config.position_bias_entropy_weight == 0:
            return None
        device = self.layernorm.weight.device
        first, *others = [mixer.position_bias_entropy().to(device) for mixer in self._regularized_mixers()]
        entropy = sum(others, first)
        self._note_when_reached(entropy, "entropy")
        return entropy

    def _regularized_mixers(self) -> list[Any]:
        return [layer.mixer for layer, kind in zip(self.layers, self.config.layer_aft_types) if kind == "conv"]

    def _watch_entropy(self, hidden_states: torch.Tensor) -> None:
        """Warn if the last backward pass reached the output of the model but not the entropy of Eq. 9.

        A loss that is computed from the logits outside the model does not include the entropy. The model cannot add
        the gradient of the entropy by itself, because it does not know the factor by which the loss is scaled for
        half precision or gradient accumulation.
        """
        if self.config.position_bias_entropy_weight == 0 or not self.training or torch.compiler.is_compiling():
            return
        learned = [x for mixer in self._regularized_mixers() for x in mixer.parameters(recurse=False)]
        if self._reached == {"output"} and any(parameter.requires_grad for parameter in learned):
            logger.warning_once(
                f"position_bias_entropy_weight={self.config.position_bias_entropy_weight} has no effect: the loss of "
                "the last step was computed outside the model and does not include the entropy of the position biases "
                "(Eq. 9). Add position_bias_entropy_weight * model.base_model.position_bias_entropy() to the loss, or "
                "pass labels to the model"
            )
        self._reached.clear()
        self._note_when_reached(hidden_states, "output")

    def _note_when_reached(self, tensor: torch.Tensor, name: str) -> None:
        """Register a hook that adds the name to `_reached` when a backward pass of training reaches the tensor."""
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if self.training and tensor.requires_grad and not traced:
            tensor.register_hook(lambda _: self._reached.add(name))


def _mask_of_new_tokens(
    mask: torch.Tensor | None, inputs_embeds: torch.Tensor, past: int | None
) -> torch.Tensor | None:
    """Cut the part of the new tokens from a mask over past and new tokens.

    Args:
        past: the number of past tokens; None if the host does not know it, as with a static cache.
    """
    if mask is None:
        return None
    batch, length = inputs_embeds.shape[:2]
    if past is None:
        return mask[:, -length:]
    if tuple(mask.shape) != (batch, past + length):
        raise ValueError(
            f"attention_mask must cover {past} past and {length} new tokens of {batch} rows: expected shape "
            f"({batch}, {past + length}), got {tuple(mask.shape)}"
        )
    return mask[:, past:]


@dataclass
class AFTCausalLMOutput(CausalLMOutputWithPast):
    r"""
    position_bias_entropy (`torch.Tensor` of shape `()`, *optional*):
        Entropy of the position biases (Eq. 9, nats). `loss` includes it, times `position_bias_entropy_weight`.
    """

    position_bias_entropy: torch.Tensor | None = None


@dataclass
class AFTImageClassifierOutput(ImageClassifierOutput):
    r"""
    position_bias_entropy (`torch.Tensor` of shape `()`, *optional*):
        Entropy of the position biases (Eq. 9, nats). `loss` includes it, times `position_bias_entropy_weight`.
    """

    position_bias_entropy: torch.Tensor | None = None


class AFTForCausalLM(AFTPreTrainedModel, GenerationMixin):
    """AFT with a language modeling head: a linear layer on the hidden states.

    Args:
        config (`AFTConfig`): Configuration of the model, with `modality="text"`.
    """

    input_modalities = ["text"]
    _tied_weights_keys = {"lm_head.weight": "aft.embeddings.word_embeddings.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output", "aft.embeddings.word_embeddings": "embedding_rowwise"}

    def __init__(self, config: AFTConfig):
        _require_modality(self, config, "text")
        super().__init__(config)
        self.aft = AFTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @_renames_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: AFTCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AFTCausalLMOutput:
        r"""
        Args:
            input_ids, attention_mask, inputs_embeds, cache, use_cache: As for `AFTModel`.
            labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                Labels of the language modeling loss. They are shifted inside the model, so `labels = input_ids`
                trains next-token prediction. Labels of -100 are ignored.
            logits_to_keep (`int` or `torch.Tensor`):
                Positions whose logits are computed: the last `logits_to_keep` positions (0 for all), or a tensor of
                indices.
        """
        outputs: BaseModelOutputWithPast = self.aft(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        assert outputs.last_hidden_state is not None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        entropy, loss = self.aft.position_bias_entropy(), None
        if labels is not None:
            loss = self._loss(logits, labels, entropy, **kwargs)
        return AFTCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            position_bias_entropy=entropy,
        )

    def _loss(
        self, logits: torch.Tensor, labels: torch.Tensor, entropy: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """The loss of next-token prediction. Within `context_parallel`, that of the whole sequences."""
        if context_parallelism is not None:
            return context_parallelism.loss(self, logits, labels, entropy, **kwargs)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        targets = (labels[..., 1:] != -100).sum()
        return with_entropy(loss, entropy, self.config, targets, kwargs.get("num_items_in_batch"))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: `generate` must not create a cache of its own, since the model creates an `AFTCache`."""
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]  # transformers declares a bool and returns None
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
    ) -> None:
        """Create the cache for `generate`: a static one for `cache_implementation="static"`, else a dynamic one.

        If the sequence would exceed the learned positions, `max_length` is lowered to the longest input that the model
        supports plus one: the last generated token is not an input.
        """
        excess = self._tokens_beyond_limit(max_cache_length, model_kwargs.get("attention_mask"))
        if excess > 0:
            logger.warning(
                f"generation stops {excess} tokens earlier than requested: this model supports sequences of up to "
                f"max_position_embeddings={self.aft.max_length} tokens"
            )
            generation_config.max_length -= excess
            max_cache_length -= excess
        asked = generation_config.cache_implementation
        given = model_kwargs.get("cache") is not None
        if given or generation_config.use_cache is False or asked not in (None, "dynamic", "static"):
            arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            super()._prepare_cache_for_generation(*arguments, *args)  # type: ignore[misc]  # the type of `self` there
        else:
            model_kwargs["cache"] = self.aft.new_cache(max_cache_length if asked == "static" else None)

    def _tokens_beyond_limit(self, length: int, attention_mask: torch.Tensor | None) -> int:
        """By how many tokens a sequence of `length` tokens, padding included, exceeds the limit of the model; 0 or
        less if it does not.
        """
        if self.aft.max_length is None:
            return 0
        # Padding takes no positions: the row with the most real tokens decides.
        padding = 0 if attention_mask is None else attention_mask.shape[1] - int(attention_mask.sum(-1).max())
        return length - padding - self.aft.max_length

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Create the mask for a step with a static cache: the padding mask of the new tokens, which only a prompt
        needs.
        """
        if attention_mask is None or not is_first_iteration:
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Continuous batching is not supported, and neither is `generate_batch`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "generate_batch needs pages of keys and values, but an AFT caches sums over the past: call generate with "
            "a padded batch instead, whose cache has a constant size"
        )


class AFTForImageClassification(AFTPreTrainedModel):
    """AFT with an image classification head: a linear layer on the class token or on the mean of the patches.

    Args:
        config (`AFTConfig`): Configuration of the model, with `modality="image"`.
    """

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    def __init__(self, config: AFTConfig):
        _require_modality(self, config, "image")
        super().__init__(config)
        self.aft = AFTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AFTImageClassifierOutput:
        r"""
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`): As for `AFTModel`.
            labels (`torch.Tensor`):
                Labels of the classification loss: class indices `(batch_size,)`, or floats as `config.problem_type`
                requires: `(batch_size,)` or `(batch_size, num_labels)` for a regression, `(batch_size, num_labels)`
                for multi-label classification.
        """
        outputs: BaseModelOutputWithPooling = self.aft(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        entropy, loss = self.aft.position_bias_entropy(), None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
            loss = with_entropy(loss, entropy, self.config, len(labels), kwargs.get("num_items_in_batch"))
        return AFTImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            position_bias_entropy=entropy,
        )


def _of_whole_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of a model that needs whole sequences: it raises a ValueError within `context_parallel`."""

    @wraps(forward)
    def checked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if context_parallelism is not None:
            raise ValueError(
                f"{type(self).__name__} needs whole sequences and does not support context_parallel: use AFTModel or "
                "AFTForCausalLM"
            )
        return forward(self, *args, **kwargs)

    return checked


class _TextClassifier(AFTPreTrainedModel):
    """Base class of text classifiers: adds the check of the modality and the entropy in the loss to the generic heads
    of transformers.
    """

    input_modalities = ["text"]
    # The generic heads average the loss over their batch, so Trainer must scale it for gradient accumulation.
    accepts_loss_kwargs = False

    def __init__(self, config: AFTConfig):
        _require_modality(self, config, "text")
        super().__init__(config)
        self.num_labels = config.num_labels
        # Not AutoModel, which the generic heads use: it does not know a config class loaded as remote code.
        self.aft = AFTModel(config)

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """The loss of the task plus the weighted entropy of the position biases (Eq. 9), if its weight is not 0."""
        loss_of_task = super().loss_function

        def loss_with_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = loss_of_task(*args, **kwargs)
            return with_entropy(loss, self.aft.position_bias_entropy(), self.config, 1, None)

        return loss_with_entropy

    @loss_function.setter
    def loss_function(self, value: Callable[..., torch.Tensor]) -> None:
        self._loss_function = value


class AFTForSequenceClassification(_TextClassifier, GenericForSequenceClassification):
    """AFT with a sequence classification head: a linear layer on the last token that is not `config.pad_token_id`.

    Padding may be on either side. Without `config.pad_token_id`, the batch size must be 1. `forward` takes the
    arguments of `AFTModel`, and `labels`: class indices `(batch_size,)`, or floats as `config.problem_type` requires.

    Args:
        config (`AFTConfig`): Configuration of the model, with `modality="text"`.
    """

    forward = _of_whole_rows(GenericForSequenceClassification.forward)

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class AFTForTokenClassification(_TextClassifier, GenericForTokenClassification):
    """AFT with a token classification head: a linear layer on each token. The model is causal, so each token sees
    only itself and the tokens before it.

    `forward` takes the arguments of `AFTModel`, and `labels`: class indices `(batch_size, sequence_length)`; labels
    of -100 are ignored.

    Args:
        config (`AFTConfig`): Configuration of the model, with `modality="text"`.
    """

    forward = _of_whole_rows(GenericForTokenClassification.forward)

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class AFTBackbone(BackboneMixin, AFTModel):
    """AFT backbone for detection and segmentation models (`AutoBackbone`): returns feature maps of chosen stages.

    The stages are the embeddings ("stem") and the layers ("stage1", "stage2", ...). `config.out_features` or
    `config.out_indices` chooses stages; the default is the last stage. Images may have the same sizes as for
    `AFTModel`.

    Args:
        config (`AFTConfig`): Configuration of the model, with `modality="image"`.
    """

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    def __init__(self, config: AFTConfig):
        _require_modality(self, config, "image")
        super().__init__(config)
        config.set_output_features_output_indices(config.out_features, config.out_indices)
        self.num_features = [config.hidden_size] * len(self.stage_names)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        r"""
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`): As for `AFTModel`.

        Returns:
            `BackboneOutput`, whose `feature_maps` has one tensor `(batch_size, hidden_size, rows, columns)` for each
            chosen stage, after the final layer norm. The mean of the last stage over its positions is the input of
            an image classifier that pools by mean. With `config.reshape_hidden_states=False`, as DPT needs it, the
            tensors are the sequences `(batch_size, sequence_length, hidden_size)` with the class token.
        """
        outputs = AFTModel.forward(self, pixel_values=pixel_values, **kwargs)
        grid_size = self.config.grid_of(pixel_values.shape[2:])
        feature_maps = []
        for index in sorted(self.stage_names.index(name) for name in self.out_features):
            hidden_states = outputs.hidden_states[index]
            if index < len(self.layers):  # the last hidden states are already normalized
                hidden_states = self.layernorm(hidden_states)
            if self.config.reshape_hidden_states:
                patches = hidden_states[:, int(bool(self.config.use_cls_token)) :]
                hidden_states = patches.transpose(1, 2).unflatten(2, grid_size).contiguous()
            feature_maps.append(hidden_states)
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _require_modality(model: PreTrainedModel, config: AFTConfig, modality: str) -> None:
    if config.modality != modality:
        raise ValueError(f'{type(model).__name__} needs a config with modality="{modality}", got "{config.modality}"')


def with_entropy(
    loss: torch.Tensor,
    entropy: torch.Tensor | None,
    config: AFTConfig,
    targets: int | torch.Tensor,
    targets_of_step: int | torch.Tensor | None,
) -> torch.Tensor:
    """Return the loss of the task plus the weighted entropy of the position biases (Eq. 9).

    Args:
        targets: the number of targets in this batch.
        targets_of_step: the number of targets in the whole optimizer step, if the step adds up the losses of several
            batches (gradient accumulation). The entropy is then scaled by `targets / targets_of_step`, so that the
            step counts it once.
    """
    if entropy is None:
        return loss
    share = 1.0 if targets_of_step is None else targets / targets_of_step
    return loss + config.position_bias_entropy_weight * share * entropy.to(loss.device)


# All models with a head, for code that treats them alike: model cards, figures, and the registration of class names.
HEADS = (AFTForCausalLM, AFTForImageClassification, AFTForSequenceClassification, AFTForTokenClassification)

# transformers finds the task of a model by its class name: in Trainer (which shifts the labels for label smoothing),
# pipelines, model cards and `transformers serve`.
modeling_auto.MODEL_MAPPING_NAMES[AFTConfig.model_type] = AFTModel.__name__
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AFTConfig.model_type] = AFTForCausalLM.__name__
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[AFTConfig.model_type] = AFTForImageClassification.__name__
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[AFTConfig.model_type] = (
    AFTForSequenceClassification.__name__
)
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[AFTConfig.model_type] = AFTForTokenClassification.__name__

# With this, `save_pretrained` and `push_to_hub` save this file and its siblings with the weights, wherever the code
# was loaded from.
AFTModel.register_for_auto_class("AutoModel")
AFTBackbone.register_for_auto_class("AutoBackbone")
AFTForCausalLM.register_for_auto_class("AutoModelForCausalLM")
AFTForImageClassification.register_for_auto_class("AutoModelForImageClassification")
AFTForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
AFTForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "HEADS",
    "AFTBackbone",
    "AFTForCausalLM",
    "AFTForImageClassification",
    "AFTForSequenceClassification",
    "AFTForTokenClassification",
    "AFTModel",
    "AFTPreTrainedModel",
]
