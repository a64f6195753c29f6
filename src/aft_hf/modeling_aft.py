"""PyTorch AFT models: the backbone and the heads.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103): pre-norm Transformer blocks with an AFT mixer in
place of self-attention, causal over tokens or bidirectional over patches of an image.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin
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
from transformers.models.vit.modeling_vit import ViTMLP
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_torchdynamo_compiling, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .caching_aft import AFTCache, AFTLayerState, longest_row
from .configuration_aft import AFTConfig, pair
from .mixers_aft import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTMixer, AFTSimple, hooks_of
from .mixing_aft import PACKING_INPUTS, Visibility, visibility_of
from .portable_aft import read


logger = logging.get_logger(__name__)

# The minor releases of transformers that are tested: requirements of a package do not reach remote code.
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = (5, 24), (5, 24)


def _check_transformers(version: str) -> None:
    release = tuple(map(int, version.split(".")[:2]))
    oldest, newest = ("{}.{}".format(*known) for known in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
    if release < OLDEST_TRANSFORMERS:
        raise ImportError(f"AFT needs transformers {oldest} or newer, got {version}")
    if release > NEWEST_TRANSFORMERS:
        logger.warning_once(
            f"AFT is tested with transformers up to {newest}, and this is {version}: update the clone of aft-hf"
        )


_check_transformers(transformers_version)

# The library's own schedule for the old name.
_renames_cache = deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")


class AFTTextEmbeddings(nn.Module):
    """Token embeddings, with learned position embeddings if `config.use_position_embeddings` is set."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = None
        # CODEPATH: the default for `full`, `local` and `simple`; `conv` and `alibi` need none.
        if config.use_position_embeddings:
            self.max_positions = config.max_position_embeddings
            self.position_embeddings = nn.Embedding(self.max_positions, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, inputs_embeds: Tensor, visibility: Visibility | None = None, state: AFTLayerState | None = None
    ) -> Tensor:
        if self.position_embeddings is None:
            return self.dropout(inputs_embeds)
        length, limit = inputs_embeds.shape[1], self.max_positions
        start = state.seen[:, None] if state is not None and state.is_initialized else 0
        longest = longest_row(length, limit, visibility, state)
        if longest is not None and longest > limit:
            kind = "document" if visibility is not None and visibility.is_packed else "sequence"
            raise ValueError(f"a {kind} of {longest} tokens is longer than max_position_embeddings={limit}")
        # Positions in the sequence or document, (B or 1, T), do not count padding.
        if visibility is None:
            positions = start + torch.arange(length, device=inputs_embeds.device).unsqueeze(0)
        else:  # padding has the position of the token after it, which may not exist
            positions = (start + visibility.position).clamp_max(limit - 1)
        return self.dropout(inputs_embeds + self.position_embeddings(positions).to(inputs_embeds.device))


class AFTImageEmbeddings(nn.Module):
    """Patch embeddings, with a class token and learned position embeddings if the config has them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.patch_size, self.grid_stride = pair(config.patch_size), config.grid_stride
        self.num_channels, self.image_size = config.num_channels, pair(config.image_size)
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.grid_stride
        )
        self.cls_token = self.position_embeddings = None
        # CODEPATH: the default for `full`, `local` and `simple`, as in a ViT; `conv` has neither.
        if config.use_cls_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        # CODEPATH: as above.
        if config.use_position_embeddings:
            self.position_embeddings = nn.Parameter(torch.zeros(1, config.max_positions, config.hidden_size))
        # Learned tables cover one grid size. Only AFT-conv without position embeddings accepts other sizes.
        self.fixed_size = set(config.layer_aft_types) != {"conv"} or config.use_position_embeddings
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, tuple[int, int]]:
        self.check_patches(pixel_values)
        positions = self.positions(*pixel_values.shape[2:])
        if self.patch_size != self.grid_stride:  # overlapping patches extend beyond the image
            beyond = [size - stride for size, stride in zip(self.patch_size, self.grid_stride)]
            margins = [margin for pixels in reversed(beyond) for margin in (pixels // 2, pixels - pixels // 2)]
            pixel_values = nn.functional.pad(pixel_values, margins, mode="replicate")
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))  # (B, d, rows, columns)
        embeddings = patches.flatten(2).transpose(1, 2).contiguous()
        if self.cls_token is not None:
            embeddings = torch.cat([self.cls_token.expand(embeddings.shape[0], -1, -1), embeddings], 1)
        if positions is not None:
            embeddings = embeddings + positions
        return self.dropout(embeddings), (patches.shape[2], patches.shape[3])

    def positions(self, height: int, width: int) -> Tensor | None:
        """Return the position embeddings of images, if there are any; raise a ValueError for an unsupported size."""
        if self.fixed_size and (height, width) != self.image_size:
            raise ValueError(
                f"images of {height} x {width} pixels do not match image_size={self.image_size[0]} x "
                f'{self.image_size[1]}: only aft_type="conv" without position embeddings accepts other sizes'
            )
        return self.position_embeddings

    def check_patches(self, pixel_values: Tensor) -> None:
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values must be (batch, {self.num_channels}, height, width), got {tuple(pixel_values.shape)}"
            )
        height, width = pixel_values.shape[2:]
        if height % self.grid_stride[0] or width % self.grid_stride[1] or 0 in (height, width):
            stride = "{} x {}".format(*self.grid_stride)
            raise ValueError(f"images must be multiples of patch_stride, {stride}, got {height} x {width} pixels")


MIXERS = {"full": AFTFull, "local": AFTLocal, "simple": AFTSimple, "conv": AFTConv, "alibi": AFTAlibi}


def build_mixer(config: AFTConfig, layer_idx: int) -> AFTMixer:
    """Build the mixer of a layer from the config."""
    aft_type, is_text = config.layer_aft_types[layer_idx], config.modality == "text"
    names = ["num_heads", "qkv_bias", "use_query", "query_activation", "use_output_projection", "global_connectivity"]
    names += ["position_bias_init_std", "position_bias_multiplier", "mixing_implementation"]
    options: dict[str, Any] = {"causal": is_text}
    if aft_type in ("full", "local"):
        names += ["max_positions", "position_bias_dim"]
    if aft_type == "local":
        names += ["window_size"]
    if aft_type == "conv":
        names += ["kernel_size", "position_bias_reparameterized", "position_bias_selection", "gumbel_temperature"]
        options["spatial_dims"] = 1 if is_text else 2
    options |= {name: getattr(config, name) for name in names}
    mixer: type[AFTMixer] = MIXERS[aft_type]
    return mixer(config.hidden_size, **options)


class AFTLayer(GradientCheckpointingLayer):
    """One layer, a pre-norm Transformer block: x + mixer(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: AFTConfig, layer_idx: int):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = build_mixer(config, layer_idx)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ViTMLP(config)  # type: ignore[arg-type]  # it needs any config with these sizes
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        # Stochastic depth: drops the branch of random samples.
        self.drop_path = nn.Dropout1d(config.drop_path_rate * layer_idx / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
        state: AFTLayerState | None = None,
        visibility: Visibility | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if hidden_states is None:
            return self.mixer(None)
        branch = self.mixer(
            self.layernorm_before(hidden_states),
            attention_mask=attention_mask,
            visibility=visibility,
            grid_size=grid_size,
            state=state,
            output_attentions=bool(kwargs.get("output_attentions")),
        )
        hidden_states = self._add(hidden_states, branch[0] if isinstance(branch, tuple) else branch)
        del branch  # before the MLP, where memory use peaks
        return self._add(hidden_states, self.mlp(self.layernorm_after(hidden_states)))

    def _add(self, hidden_states: Tensor, branch: Tensor) -> Tensor:
        # A decoding step is mostly calls, so modules without effect are not called.
        if self.dropout.training or self.drop_path.training:
            # `Dropout1d` drops whole rows of (B, T d).
            branch = self.drop_path(self.dropout(branch).flatten(1)).view_as(branch)
        return hidden_states + branch


class AFTPreTrainedModel(PreTrainedModel):
    """Base class of all AFT models."""

    config: AFTConfig
    base_model_prefix = "aft"
    input_modalities: list[str] = ["text", "image"]
    adds_entropy = False  # True if the caller adds the entropy (Eq. 9) to a loss of its own
    supports_gradient_checkpointing = True
    _is_stateful = True
    _can_compile_fullgraph = True
    _no_split_modules = ["AFTLayer"]
    _can_record_outputs = {"hidden_states": AFTLayer, "attentions": OutputRecorder(AFTMixer, index=1)}

    def post_init(self) -> None:
        """Initialize the weights; raise a ValueError if the config is of another modality than the model."""
        if self.config.modality not in self.input_modalities:
            raise ValueError(
                f'{type(self).__name__} needs a config with modality="{self.input_modalities[0]}", '
                f'got "{self.config.modality}"'
            )
        super().post_init()

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
    """The bare AFT model: embeddings of tokens or patches, layers, and a layer norm."""

    embeddings: Any  # `AFTTextEmbeddings` or `AFTImageEmbeddings`, which FSDP may wrap in a module

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.is_text = config.modality == "text"
        self.pools_cls_token, self.num_cls_tokens = config.pooling == "cls", int(bool(config.use_cls_token))
        self.main_input_name = "input_ids" if self.is_text else "pixel_values"
        self._input_embed_layer = "word_embeddings" if self.is_text else "patch_embeddings"
        self.embeddings = AFTTextEmbeddings(config) if self.is_text else AFTImageEmbeddings(config)
        if not self.is_text:  # FSDP refuses names of absent modules
            self._no_split_modules = [*self._no_split_modules, "AFTImageEmbeddings"]
        self.layers = nn.ModuleList([AFTLayer(config, i) for i in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @_renames_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        cache: AFTCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast | BaseModelOutputWithPooling:
        r"""
        Args:
            input_ids: Token ids, (B, T).
            attention_mask: Padding mask, (B, T): 1 for tokens, 0 for padding, anywhere in a row. Without a cache also
                a boolean mask, (B or 1, T, T), False where a query must not see a key.
            inputs_embeds: Embedded tokens, (B, T, hidden_size), in place of `input_ids`.
            position_ids: Positions of packed documents, (B or 1, T), which start again at 0 with each, as those of
                `DataCollatorWithFlattening`. No document sees another one, and there is no cache. In a compiled
                program, any `position_ids` count as packed documents.
            cu_seq_lens_q: Boundaries of the packed documents in the flattened batch, (number of documents + 1,), from
                0 on, in place of `position_ids`.
            pixel_values: Images, (B, num_channels, height, width), of `config.image_size`. If all layers are `conv`
                and there are no position embeddings, height and width may be any multiples of the patches' stride.
            cache: Cache that an earlier call returned, whose sequences the input continues.
            use_cache: Whether a text model returns its cache. In training mode, no new cache is created.

        Returns:
            `BaseModelOutputWithPast` for text, `BaseModelOutputWithPooling` for images. With `output_attentions=True`,
            `attentions` contains for each layer the implicit attention of Eq. 3, (B, hidden_size, T, T'), where T'
            counts cached keys, too. The weights include the gate, so a row sums to `act(query)`.

        Raises:
            ValueError: the inputs are of another modality, have a wrong shape, or are longer than the learned
                positions.
        """
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        if self.is_text:
            if pixel_values is not None:
                raise ValueError('pixel_values needs a model with modality="image", got modality="text"')
            if kwargs.get("encoder_hidden_states") is not None or isinstance(cache, EncoderDecoderCache):
                raise ValueError("AFT has no cross-attention, so it cannot be the decoder of an encoder-decoder model")
            if cache is not None and not (isinstance(cache, AFTCache) and len(cache) == len(self.layers)):
                raise ValueError(
                    f"cache must be this model's AFTCache, got {type(cache).__name__}: in a model that contains this "
                    "one, give use_cache=False or the cache of AFTModel.new_cache(); prefix tuning is not supported: "
                    "use LoRA"
                )
            if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                raise ValueError("gradient checkpointing takes no cache: omit it, or call model.eval()")
            use_cache = use_cache and not self.training
            return self._forward_text(input_ids, attention_mask, inputs_embeds, cache, use_cache, **kwargs)
        if pixel_values is None and input_ids is not None and input_ids.is_floating_point():
            pixel_values, input_ids = input_ids, None  # given by position, as to a ViT
        if input_ids is not None or inputs_embeds is not None:
            raise ValueError('input_ids or inputs_embeds needs a model with modality="text", got modality="image"')
        if pixel_values is None:
            raise ValueError('a model with modality="image" needs pixel_values')
        return self._forward_image(pixel_values, attention_mask, **kwargs)

    def _forward_image(
        self, pixel_values: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        hidden_states, grid_size = self.embeddings(pixel_values)
        kwargs["grid_size"] = grid_size
        if attention_mask is not None and attention_mask.shape == hidden_states.shape[:2]:
            attention_mask, kwargs["visibility"] = None, Visibility.of(attention_mask)
        for layer in self.layers:  # not in a function: its caller would keep the embeddings
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        pooled = hidden_states[:, 0] if self.pools_cls_token else hidden_states[:, self.num_cls_tokens :].mean(1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _forward_text(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: AFTCache | None,
        use_cache: bool | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        hidden_states = self._embed(input_ids, inputs_embeds)
        size = hidden_states.shape[:2]
        packing = {name: kwargs.pop(name, None) for name in PACKING_INPUTS}
        if cache is not None and cache.layers[0].is_initialized:
            packing = dict.fromkeys(PACKING_INPUTS)
        of_pairs = attention_mask is not None and attention_mask.dim() == 3  # which running sums cannot represent
        mask = None if of_pairs else _mask_of_new_tokens(attention_mask, size[0], size[1], cache)
        attention_mask, visibility = attention_mask if of_pairs else None, visibility_of(packing, mask, *size)
        is_packed = visibility is not None and visibility.is_packed
        if is_packed and of_pairs:
            raise ValueError("pass packed documents as position_ids or as a 3-D attention_mask, not both")
        if use_cache and cache is None and not (of_pairs or is_packed):
            cache = self.new_cache()
        if cache is not None:
            cache.layers[0].check_batch_size(size[0])
        hidden_states = self.embeddings(hidden_states, visibility, None if cache is None else cache.layers[0])
        padded = visibility if visibility is None else visibility.to(hidden_states.device)
        if padded is not None and not is_packed and self._may_move(**kwargs):
            hidden_states = padded.moved(hidden_states.masked_fill(~padded.real.unsqueeze(-1), 0.0))
            visibility = None if cache is None else padded.padding_last()
        elif padded is not None:
            padded = replace(padded, order=None)
        for layer, state in zip(self.layers, [None] * len(self.layers) if cache is None else cache.layers):
            hidden_states = layer(hidden_states, attention_mask, state=state, visibility=visibility, **kwargs)
        if padded is not None:
            hidden_states = padded.to(hidden_states.device).restored(hidden_states)
        hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)

    def _may_move(self, **kwargs: Any) -> bool:
        """Whether all mixers are causal, and outputs of layers are neither recorded nor seen by hooks."""
        records = kwargs["output_attentions"] or kwargs.get("output_hidden_states", self.config.output_hidden_states)
        if records or not all(getattr(x, "causal", False) for x in self._mixers):
            return False
        hooks = (hook for module in self.layers.modules() for hook in hooks_of(module))
        # Those that record outputs stay
        return all(getattr(hook, "__module__", None) == capture_outputs.__module__ for hook in hooks)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return the embedded tokens, of which there must be at least one."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError('a model with modality="text" needs either input_ids or inputs_embeds, not both')
        if input_ids is not None:
            size = max(self.config.vocab_size, getattr(self.embeddings.word_embeddings, "num_embeddings", 0))
            # On an accelerator, the kernel asserts, and reading would wait.
            if input_ids.device.type == "cpu" and not is_torchdynamo_compiling() and input_ids.numel() > 0:
                lowest, highest = read(torch.stack(input_ids.aminmax())) or (0, 0)
                if lowest < 0 or highest >= size:
                    raise ValueError(f"token ids must be in 0 .. {size - 1}, got {lowest} .. {highest}")
            inputs_embeds = self.embeddings.word_embeddings(input_ids)
        embedded = cast(Tensor, inputs_embeds)
        if embedded.shape[1] == 0:
            raise ValueError("the input is empty: give at least one token")
        return embedded

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length, given by the learned positions; None without learned positions."""
        limits: list[int] = [mixer.max_positions for mixer in self._mixers if mixer.max_positions is not None]
        # CODEPATH: as in `AFTTextEmbeddings`.
        if self.config.use_position_embeddings:
            limits.append(self.config.max_position_embeddings)
        return min(limits) if limits else None

    def new_cache(self, max_length: int | None = None) -> AFTCache:
        """Return an empty cache: a static one for up to `max_length` tokens, or a dynamic one."""
        limit = self.max_length
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"a static cache of {max_length} tokens is longer than max_position_embeddings={limit}")
        return AFTCache([mixer.state_window for mixer in self._mixers], max_length)

    @property
    def _mixers(self) -> list[Any]:
        """The mixer of each layer, without the wrapper of peft if a LoRA adapts one of its parameters."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        return [mixer.get_base_layer() if hasattr(mixer, "get_base_layer") else mixer for mixer in mixers]

    def position_bias_entropy(self) -> Tensor | None:
        """Return the sum of the entropies of `conv` layers (Eq. 9, nats); None if its weight in the loss is 0."""
        # CODEPATH: models that are trained with Eq. 9 have a weight.
        if self.config.position_bias_entropy_weight == 0:
            return None
        device, layers = self.layernorm.weight.device, cast(Any, zip(self.layers, self._mixers))
        layers = [layer for layer, mixer in layers if hasattr(mixer, "kernel")]
        # A call runs the hooks that load parameters: FSDP has them on layers, offloading on mixers.
        parts = [(x.mixer if type(x) is AFTLayer else x)(None).to(device) for x in layers]
        return torch.stack(parts).sum() if parts else None


def _mask_of_new_tokens(mask: Tensor | None, batch: int, length: int, cache: AFTCache | None) -> Tensor | None:
    if mask is None:
        return None
    past = 0
    if cache is not None and not cache.layers[0].is_empty:  # the host knows no static length
        past = max(mask.shape[-1] - length, 0) if cache.is_compileable else cache.get_seq_length()
    if mask.shape != (batch, past + length):
        raise ValueError(
            f"attention_mask must be ({batch}, {past + length}), for {past} past and {length} new tokens, got "
            f"{tuple(mask.shape)}"
        )
    return mask[:, past:]


@dataclass
class AFTCausalLMOutput(CausalLMOutputWithPast):
    """Output of `AFTForCausalLM`, with the entropy of the position biases (Eq. 9, nats), which `loss` includes."""

    position_bias_entropy: Tensor | None = None


@dataclass
class AFTImageClassifierOutput(ImageClassifierOutput):
    """Output of `AFTForImageClassification`, with the same entropy."""

    position_bias_entropy: Tensor | None = None


class AFTForCausalLM(AFTPreTrainedModel, GenerationMixin):
    """AFT with a language modeling head, for a config with `modality="text"`."""

    input_modalities = ["text"]
    _tied_weights_keys = {"lm_head.weight": "aft.embeddings.word_embeddings.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output", "aft.embeddings.word_embeddings": "embedding_rowwise"}

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.aft = AFTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @_renames_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: AFTCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AFTCausalLMOutput:
        r"""
        Args:
            input_ids, attention_mask, inputs_embeds, cache, use_cache: As for `AFTModel`.
            labels: Labels, (B, T), which the model shifts: `labels = input_ids` trains next-token prediction. Labels
                of -100 are ignored.
            logits_to_keep: Compute the logits of the last `logits_to_keep` positions (0 for all), or of a tensor of
                indices.
        """
        outputs: Any = self.aft(input_ids, attention_mask, inputs_embeds, cache=cache, use_cache=use_cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        entropy, loss = entropy_for_loss(self, labels), None
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

    def _loss(self, logits: Tensor, labels: Tensor, entropy: Tensor | None, **kwargs: Any) -> Tensor:
        """Return the loss of next-token prediction, with the entropy."""
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        targets = (labels[..., 1:] != -100).sum()
        return share_of_step(loss, entropy, self.config, targets, kwargs.get("num_items_in_batch"))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: the model creates an `AFTCache`."""
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]  # transformers declares a bool and returns None
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """Create the cache for `generate`, and lower `max_length` to the learned positions."""
        padding = 0
        if (limit := self.aft.max_length) is not None:
            # Padding takes no positions in a cache: the longest row decides.
            mask = model_kwargs.get("attention_mask")
            if mask is not None and generation_config.use_cache is not False:
                padding = mask.shape[1] - int(mask.sum(1).max())
            excess = max_cache_length - padding - limit
            if excess > 0:
                logger.warning(
                    f"generation stops {excess} tokens earlier than requested, at max_position_embeddings={limit}"
                )
                generation_config.max_length -= excess
                max_cache_length -= excess
        kind = generation_config.cache_implementation
        given = model_kwargs.get("cache") is not None
        if given or generation_config.use_cache is False or kind not in (None, "dynamic", "static"):
            arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            super()._prepare_cache_for_generation(*arguments)  # type: ignore[misc]  # the type of `self` there
        else:
            model_kwargs["cache"] = self.aft.new_cache(max_cache_length - padding if kind == "static" else None)

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None, inputs_embeds: Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> Tensor | None:
        """Return the padding mask, which only a prompt needs, for a static cache."""
        if attention_mask is None or not is_first_iteration:
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported."""
        raise NotImplementedError(
            "generate_batch needs pages of keys and values, which AFT does not have: call generate with a padded batch"
        )


class AFTForImageClassification(AFTPreTrainedModel):
    """AFT with a linear layer on the class token or the mean of the patches, for a config with `modality="image"`."""

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.aft = AFTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> AFTImageClassifierOutput:
        r"""
        Args:
            pixel_values: As for `AFTModel`.
            labels: Class indices, (B,), or floats as `config.problem_type` requires: (B,) or (B, num_labels) for a
                regression, (B, num_labels) for multi-label classification.
        """
        outputs: BaseModelOutputWithPooling = self.aft(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        entropy, loss = entropy_for_loss(self, labels), None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
            given = (labels != -100).sum(), kwargs.get("num_items_in_batch"), self.config.problem_type
            loss = share_of_step(loss, entropy, self.config, *given)
        return AFTImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            position_bias_entropy=entropy,
        )


class TextClassifier(AFTPreTrainedModel):
    """Base class of text classifiers: `forward` of a generic head, with the loss of `share_of_step`."""

    input_modalities = ["text"]
    score_bias = False
    generic_forward: Callable[..., Any]

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        # The AutoModel of the generic heads does not know the config class of remote code.
        self.aft = AFTModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=self.score_bias)
        self.post_init()

    @can_return_tuple
    @_renames_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: AFTCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds, None, use_cache)
        outputs = self.generic_forward(*inputs, **(kwargs | {"return_dict": True}))
        entropy = entropy_for_loss(self, labels)
        if labels is None:
            return outputs
        logits, options = outputs.logits, {"config": self.config, "num_items_in_batch": num_items_in_batch}
        loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, **options)
        # A new object, since the loss comes first in a tuple.
        given = (labels != -100).sum(), num_items_in_batch, self.config.problem_type
        return type(outputs)(share_of_step(loss, entropy, self.config, *given), **outputs)


class AFTForSequenceClassification(TextClassifier, GenericForSequenceClassification):
    """AFT with a sequence classification head: a linear layer on the last token that is not `config.pad_token_id`.

    Without `config.pad_token_id`, the batch size must be 1. `forward` takes the arguments of `AFTModel`, and `labels`
    as `AFTForImageClassification`. The config has `modality="text"`.
    """

    generic_forward = GenericForSequenceClassification.forward


class AFTForTokenClassification(TextClassifier, GenericForTokenClassification):
    """AFT with a token classification head: a linear layer on each token, which sees only the tokens before it.

    `forward` takes the arguments of `AFTModel`, and `labels`: class indices (B, T); -100 is ignored. The config has
    `modality="text"`.
    """

    generic_forward = GenericForTokenClassification.forward
    score_bias = True

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)  # has no parameters for `post_init`


class AFTBackbone(BackboneMixin, AFTModel):
    """AFT backbone of detection and segmentation models, for a config with `modality="image"`."""

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        config.set_output_features_output_indices(config.out_features, config.out_indices)
        self.num_features = [config.hidden_size] * len(self.stage_names)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        r"""
        Args:
            pixel_values: As for `AFTModel`.

        Returns:
            `BackboneOutput`, whose `feature_maps` has one tensor (B, hidden_size, rows, columns) for each stage of
            `config.out_features`, after the final layer norm; with `config.reshape_hidden_states=False` the sequences
            (B, T, hidden_size).
        """
        outputs = AFTModel.forward(self, pixel_values=pixel_values, **kwargs)
        grid_size = self.config.grid_of(pixel_values.shape[2:])
        feature_maps = []
        for index in sorted(self.stage_names.index(name) for name in self.out_features):
            hidden_states = outputs.hidden_states[index]
            if index < len(self.layers):  # the last hidden states are already normalized
                hidden_states = self.layernorm(hidden_states)
            # CODEPATH: DPT and Depth Anything set it to False.
            if self.config.reshape_hidden_states:
                patches = hidden_states[:, self.num_cls_tokens :]
                hidden_states = patches.transpose(1, 2).unflatten(2, grid_size).contiguous()
            feature_maps.append(hidden_states)
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def entropy_for_loss(model: Any, labels: Tensor | None) -> Tensor | None:
    """Return the entropy of the position biases, and warn once if training does not add it to the loss."""
    entropy, is_added = model.aft.position_bias_entropy(), labels is not None or model.adds_entropy
    if not is_added and entropy is not None and entropy.requires_grad and model.training:
        logger.warning_once(
            f"position_bias_entropy_weight={model.config.position_bias_entropy_weight} has no effect without labels: "
            "add this weight * outputs.position_bias_entropy (Eq. 9) to your loss"
        )
    return entropy


def share_of_step(
    loss: Tensor,
    entropy: Tensor | None,
    config: AFTConfig,
    targets: int | Tensor,
    targets_of_step: int | Tensor | None,
    problem_type: str | None = None,
) -> Tensor:
    """Return the share of a batch in the loss of a step over several batches, with the weighted entropy (Eq. 9).

    The shares add up to the mean over the targets of the step, labels other than -100. transformers divides losses of
    classes by their number; those of float labels are means of the batch. None: a step of one batch.
    """
    is_mean = problem_type in ("regression", "multi_label_classification")
    if entropy is None and not (is_mean and targets_of_step is not None):
        return loss
    # On the device of the loss: layers may lie on several.
    counts: Any = (targets, 1 if targets_of_step is None else targets_of_step)
    count, of_step = (x.to(loss.device) if isinstance(x, Tensor) else x for x in counts)
    share = 1.0 if targets_of_step is None else count / of_step
    loss = loss * share if is_mean else loss
    weight = config.position_bias_entropy_weight
    return loss if entropy is None else loss + weight * share * entropy.to(loss.device)


HEADS = (AFTForCausalLM, AFTForImageClassification, AFTForSequenceClassification, AFTForTokenClassification)

# Trainer, pipelines and `transformers serve` find the task of a model by its class name.
modeling_auto.MODEL_MAPPING_NAMES["aft"] = "AFTModel"
_TASKS = "CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"
for _task, _model in zip(_TASKS, HEADS):
    getattr(modeling_auto, f"MODEL_FOR_{_task}_MAPPING_NAMES")["aft"] = _model.__name__

# Saving a model saves this file and its siblings, wherever the code was loaded from.
for _model in (AFTModel, AFTBackbone, *HEADS):
    _model.register_for_auto_class(_model.__name__.replace("AFT", "Auto").replace("AutoFor", "AutoModelFor"))

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
