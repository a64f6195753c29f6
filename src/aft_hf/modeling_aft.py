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
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
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

from .blocks_aft import AFTLayer
from .caching_aft import AFTCache
from .configuration_aft import AFTConfig
from .documents_aft import PACKING_INPUTS, packed_documents
from .embeddings_aft import AFTImageEmbeddings, AFTTextEmbeddings
from .mixers_aft import AFTMixer
from .resizing_aft import adapt_to_image_size
from .sequence_shards_aft import active_group, average_over, following_labels, shard_of_inputs, total_over


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

# The library's own schedule for the old name.
_renames_cache = deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")


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

    def adapt_to_image_size(
        self, image_size: int | tuple[int, int], *, stretch_kernels: bool = True, enlarge_patches: bool = True
    ) -> None:
        """Adapt an AFT-conv model to images of another size with the same content, in place, and update `config`.

        Without this call, AFT-conv also accepts images of other sizes, but then each kernel and patch covers a
        different part of the image than in training. The kernels are interpolated to the new grid of patches, as the
        position embeddings of a ViT are. Patches become larger with the image and then overlap, since their stride is
        unchanged; they become smaller at most until they no longer overlap (`resizing_aft.py`).

        The resized kernels and patches are new parameters: create the optimizer after the call. Set the new size in
        the image processor too. Resizing loses information: a call with the old size does not undo it, and repeated
        calls flatten the kernels and round the patch size again. Adapt a copy of the original model each time.

        Args:
            image_size: the new image size in pixels, or (height, width).
            stretch_kernels: False keeps the kernels as trained.
            enlarge_patches: False keeps the patch size. This can be better for models that were trained with crops
                of a small part of the image (`RandomResizedCrop`), in which objects appear larger.

        Raises:
            ValueError: the model is not an image model with only "conv" layers and without position embeddings; the
                size is not a multiple of the stride of the patches, or too small for kernels that are kept; kernels
                or patches cannot be resized (`position_bias_selection` is set, the aspect ratio changes without
                `global_connectivity`, or their parameters are offloaded or have adapters); or they do not match the
                config. The model is then unchanged.
        """
        adapt_to_image_size(self, image_size, stretch_kernels=stretch_kernels, enlarge_patches=enlarge_patches)


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
        group = active_group()
        if group is not None and (attention_mask is not None or self.config.use_cls_token):
            given = "a class token" if self.config.use_cls_token else "an attention_mask"
            raise ValueError(
                f"within context_parallel, images must have no class token and no attention_mask, got {given}"
            )
        shard = None if group is None else self.embeddings.shard(group, pixel_values)
        hidden_states, grid_size = self.embeddings(pixel_values, shard)
        hidden_states = self._run_layers(hidden_states, attention_mask, grid_size=grid_size, shard=shard, **kwargs)
        self._watch_entropy(hidden_states)
        patches = hidden_states[:, int(bool(self.config.use_cls_token)) :]
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else patches.mean(1)
        if shard is not None:
            pooled = average_over(shard.group, pooled * shard.share)
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
        group = active_group()
        if group is not None:
            shard = shard_of_inputs(group, inputs_embeds, attention_mask, packing)
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
        asked, group = kwargs.get("num_items_in_batch"), active_group()
        if group is None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return _with_entropy(loss, entropy, self.config, (labels[..., 1:] != -100).sum(), asked)
        following = following_labels(labels, group)
        targets = total_over(group, (following != -100).sum())
        # Gradients are averaged over the processes, so each process counts its sum `group.size()` times.
        kwargs["num_items_in_batch"] = (targets if asked is None else asked) / group.size()
        vocab_size = self.config.vocab_size
        loss = self.loss_function(logits=logits, labels=None, shift_labels=following, vocab_size=vocab_size, **kwargs)
        return _with_entropy(average_over(group, loss), entropy, self.config, targets, asked)

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
            loss = _with_entropy(loss, entropy, self.config, len(labels), kwargs.get("num_items_in_batch"))
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
        if active_group() is not None:
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
            return _with_entropy(loss, self.aft.position_bias_entropy(), self.config, 1, None)

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


def _with_entropy(
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
