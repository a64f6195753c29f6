"""PyTorch AFT models: the backbone and the heads.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103): pre-norm Transformer blocks with an AFT mixer in
place of self-attention, causal over tokens or bidirectional over patches of an image.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
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
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .blocks_aft import AFTLayer
from .caching_aft import AFTCache
from .configuration_aft import AFTConfig, pair
from .documents_aft import PACKING_INPUTS, packed_documents
from .embeddings_aft import AFTImageEmbeddings, AFTTextEmbeddings
from .mixers_aft import AFTConv, AFTMixer
from .resizing_aft import resized_kernels
from .sequence_shards_aft import active_group, average_over, following_labels, shard_of_inputs, total_over


logger = logging.get_logger(__name__)

# `generate` of earlier versions does not tell later chunks of a prompt (`prefill_chunk_size`) from generated tokens.
CHUNKS_ARE_NAMED = tuple(map(int, transformers_version.split(".")[:2])) >= (5, 23)


class AFTPreTrainedModel(PreTrainedModel):
    """Initialization, and what an AFT offers the library: checkpointing, splitting, recorded outputs."""

    config: AFTConfig
    config_class = AFTConfig
    base_model_prefix = "aft"
    input_modalities: list[str] = ["text", "image"]
    supports_gradient_checkpointing = True
    _is_stateful = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = ["past_key_values"]
    _no_split_modules = ["AFTLayer"]  # and the embeddings of the modality
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

    def resize_position_biases(self, image_size: int | tuple[int, int]) -> None:
        """Stretch the kernels of an AFT-conv for images of another size, in place; `config` is changed accordingly.

        Kernels stretch with the grid of patches, as the position embeddings of a ViT do when they are interpolated
        (`resizing_aft.py`). Without this call AFT-conv takes images of any size, too, with the kernels as they are,
        which then cover another part of the image.

        Kernels are new parameters afterwards: make an optimizer after the call. The image processor needs the new
        size, too. A call with the old size does not undo it, and several calls make kernels flat: resize copies.

        Args:
            image_size: the new one in pixels, or (height, width).

        Raises:
            ValueError: the model is not one of images with layers of type "conv" alone; the size is no multiple of the
                patch size; kernels cannot be stretched (`position_bias_selection`; other proportions without
                `global_connectivity`; offloaded parameters) or are not those of the config. Nothing is changed then.
        """
        config = self.config
        if config.modality != "image" or set(config.layer_aft_types) != {"conv"} or config.use_position_embeddings:
            raise ValueError('only image models of aft_type "conv" without position embeddings can be resized')
        target = copy.deepcopy(config)
        target.image_size, target.conv_kernel_size = image_size, 1
        target.validate_image()
        rows, columns = target.grid_size
        ratios = rows / config.grid_size[0], columns / config.grid_size[1]
        mixers = [module for module in self.modules() if isinstance(module, AFTConv)]
        if any(mixer.window != config.conv_kernel_size for mixer in mixers):
            raise ValueError(
                f"the kernels are not of conv_kernel_size={config.conv_kernel_size}: was the config changed, or "
                "resized with another model that shares it?"
            )
        if ratios == (1.0, 1.0):
            return
        resized = [resized_kernels(mixer, ratios, max(rows, columns)) for mixer in mixers]
        for mixer, kernels in zip(mixers, resized):
            kernels.put_into(mixer)
            config.conv_kernel_size = mixer.window
        config.image_size = image_size


class AFTModel(AFTPreTrainedModel):
    """The backbone: embeddings of tokens or patches, the blocks, a final layer norm."""

    embeddings: Any  # `AFTTextEmbeddings` or `AFTImageEmbeddings`; FSDP puts a module around them

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.is_text = config.modality == "text"
        self.main_input_name = "input_ids" if self.is_text else "pixel_values"
        self.embeddings = AFTTextEmbeddings(config) if self.is_text else AFTImageEmbeddings(config)
        # FSDP of Accelerate refuses a name that no module has.
        self._no_split_modules = [*self._no_split_modules, type(self.embeddings).__name__]
        self.layers = nn.ModuleList([AFTLayer(config, i) for i in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        # What the backward pass since the last forward pass has reached: see `_watch_entropy`.
        self._reached: set[str] = set()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings if self.is_text else self.embeddings.patch_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        setattr(self.embeddings, "word_embeddings" if self.is_text else "patch_embeddings", value)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        past_key_values: AFTCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast | BaseModelOutputWithPooling:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): Tokens of a text model.
            attention_mask (`torch.Tensor` of shape `(batch_size, sequence_length)`):
                0 for padding, on any side: a padded row equals the row alone. Or boolean of shape
                `(batch_size or 1, sequence_length, sequence_length)`, False where a position must not look.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                Embedded tokens, in place of `input_ids`.
            position_ids (`torch.LongTensor` of shape `(batch_size or 1, sequence_length)`):
                Documents that are packed into a row: positions start again at 0 with each of them, as
                `DataCollatorWithFlattening` makes them. None sees another one. There is no cache then, and in a
                compiled program none for any `position_ids`.
            cu_seq_lens_q (`torch.IntTensor` of shape `(number of documents + 1,)`):
                The same as the boundaries of the documents in all rows one after the other, from 0 on.
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Images of an image model. With `conv` layers alone, any sides that are multiples of the patch size.
            past_key_values (`AFTCache`): The state that an earlier call returned; the input continues its text.
            use_cache (`bool`): Whether to return the state of a text model; not in training.

        Returns:
            For text `BaseModelOutputWithPast`. For images `BaseModelOutputWithPooling`, `pooler_output` being the
            class token or the mean of the patches. `attentions`, on request, are the implicit attention of the
            paper's Eq. 3, `(batch_size, hidden_size, sequence_length, sequence_length)` per layer. Each feature is a
            head of its own, whose one value is weighed: so there are `hidden_size` heads, not `num_heads`. The weights
            include the gate of the query, so a row sums to `act(query)` of that feature and not to 1.

        Raises:
            ValueError: inputs of another modality or shape, or longer than the learned positions.
        """
        asked = kwargs.get("output_attentions")
        kwargs["output_attentions"] = bool(self.config.output_attentions if asked is None else asked)
        if self.is_text and pixel_values is not None:
            raise ValueError('pixel_values need a model with modality="image", got modality="text"')
        if not self.is_text and (input_ids is not None or inputs_embeds is not None):
            raise ValueError('input_ids and inputs_embeds need a model with modality="text", got modality="image"')
        if self.is_text:
            use_cache = use_cache and not self.training
            return self._forward_text(input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, **kwargs)
        if pixel_values is None:
            raise ValueError('a model with modality="image" needs pixel_values')
        group = active_group()
        if group is not None and (attention_mask is not None or self.config.use_cls_token):
            given = "a class token" if self.config.use_cls_token else "an attention_mask"
            raise ValueError(f"within context_parallel, images go without class token and attention_mask, got {given}")
        shard = None if group is None else self.embeddings.shard(group, pixel_values)
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.weight.dtype)
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
        past_key_values: AFTCache | None,
        use_cache: bool | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError('a model with modality="text" needs either input_ids or inputs_embeds, and not both')
        if inputs_embeds is None:
            assert input_ids is not None
            self._check_tokens(input_ids)
            inputs_embeds = self.embeddings.word_embeddings(input_ids)
        if inputs_embeds.shape[1] == 0:
            raise ValueError("the text is empty: give at least one token")
        pairwise = attention_mask is not None and attention_mask.dim() == 3  # no state can keep to that
        if past_key_values is not None and not isinstance(past_key_values, AFTCache):
            raise ValueError(
                f"past_key_values must be an AFTCache, got {type(past_key_values).__name__}: an AFT keeps sums over "
                "the past, not the keys and values of attention. Prefix tuning, which learns those, does not go with "
                "it: use prompt tuning or LoRA"
            )
        packing = {name: kwargs.pop(name, None) for name in PACKING_INPUTS}
        group = active_group()
        if group is not None:
            shard = shard_of_inputs(group, inputs_embeds, attention_mask, packing)
            if use_cache and past_key_values is None and shard.documents is None:
                past_key_values = self.new_cache()
            hidden_states = self.embeddings(inputs_embeds, shard=shard)
            hidden_states = self._run_layers(
                hidden_states, None, past_key_values=past_key_values, shard=shard, **kwargs
            )
            return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)
        continues = past_key_values is not None and past_key_values.layers[0].is_initialized
        documents = None
        if not continues:  # a training step needs no cache, and so need not know whether it could have one
            size = inputs_embeds.shape[:2]
            documents = packed_documents(packing, attention_mask, *size, may_wait=not self.training)
        if documents is not None and past_key_values is not None:
            raise ValueError("a cache is of one text in each row, and position_ids or cu_seq_lens_q pack several")
        if use_cache and past_key_values is None and not pairwise and documents is None:
            past_key_values = self.new_cache()
        state, past = None, 0
        if past_key_values is not None:
            state, past = past_key_values.layers[0], past_key_values.get_seq_length()
            state.check_batch_size(inputs_embeds.shape[0])
        if not pairwise:
            fixed = past_key_values is not None and past_key_values.is_compileable
            attention_mask = _mask_of_new_tokens(attention_mask, inputs_embeds, None if fixed else past)
        hidden_states = self.embeddings(inputs_embeds, None if pairwise else attention_mask, state, documents)
        kwargs |= {"past_key_values": past_key_values, "documents": documents}
        hidden_states = self._run_layers(hidden_states, attention_mask, **kwargs)
        self._watch_entropy(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    @property
    def max_length(self) -> int | None:
        """The longest text that the model reads, by its learned positions; None where there are none."""
        limits: list[int | None] = [mixer.max_positions for mixer in self._mixers]
        if self.embeddings.position_embeddings is not None:
            limits.append(self.embeddings.position_embeddings.num_embeddings)
        return min((limit for limit in limits if limit is not None), default=None)

    def new_cache(self, max_length: int | None = None) -> AFTCache:
        """An empty cache for this model; a static one for texts of up to `max_length` tokens.

        Raises:
            ValueError: a static cache that the model cannot have, or that is longer than its learned positions.
        """
        limit = self.max_length
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"a static cache of {max_length} tokens is longer than max_position_embeddings={limit}")
        return AFTCache([mixer.state_window for mixer in self._mixers], max_length)

    @property
    def _mixers(self) -> list[Any]:
        """Those of the layers: each an `AFTMixer`, or what takes its place."""
        return [layer.mixer for layer in self.layers]

    def _check_tokens(self, input_ids: torch.Tensor) -> None:
        # On an accelerator this look at the values would wait for it in every step; there, the kernel itself asserts.
        if input_ids.device.type != "cpu" or is_torchdynamo_compiling() or input_ids.numel() == 0:
            return
        lowest, highest = (int(x) for x in input_ids.aminmax())
        size = self.embeddings.word_embeddings.num_embeddings
        if lowest < 0 or highest >= size:
            raise ValueError(f"token ids must be in 0 .. {size - 1} (vocab_size={size}), got {lowest} .. {highest}")

    def _run_layers(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return self.layernorm(hidden_states)

    def position_bias_entropy(self) -> torch.Tensor | None:
        """Eq. 9 summed over layers (nats); None unless `position_bias_entropy_weight` asks for it."""
        if self.config.position_bias_entropy_weight == 0:
            return None
        device = self.layernorm.weight.device
        first, *others = [mixer.position_bias_entropy().to(device) for mixer in self._regularized_mixers()]
        entropy = sum(others, first)
        self._note_when_reached(entropy, "entropy")
        return entropy

    def _regularized_mixers(self) -> list[AFTConv]:
        return [mixer for mixer in self._mixers if isinstance(mixer, AFTConv)]

    def _watch_entropy(self, hidden_states: torch.Tensor) -> None:
        """Warn where the last backward pass went through the model and not through the entropy of Eq. 9.

        A loss that a client makes of the logits leaves the entropy out. Its gradient cannot be added here: what the
        loss is scaled by, for half precision or gradient accumulation, is not to be seen from inside the model.
        """
        if self.config.position_bias_entropy_weight == 0 or not self.training or torch.compiler.is_compiling():
            return
        learned = [x for mixer in self._regularized_mixers() for x in mixer.parameters(recurse=False)]
        if self._reached == {"output"} and any(parameter.requires_grad for parameter in learned):
            logger.warning_once(
                f"position_bias_entropy_weight={self.config.position_bias_entropy_weight} has no effect: the loss of "
                "the last step was not computed by the model and leaves the entropy of the position biases (Eq. 9) "
                "out. Add position_bias_entropy_weight * model.base_model.position_bias_entropy() to the loss, or "
                "pass labels to the model"
            )
        self._reached.clear()
        self._note_when_reached(hidden_states, "output")

    def _note_when_reached(self, tensor: torch.Tensor, name: str) -> None:
        """Have a backward pass of training add the name to `_reached` when it comes to the tensor."""
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if self.training and tensor.requires_grad and not traced:
            tensor.register_hook(lambda _: self._reached.add(name))


def _mask_of_new_tokens(
    mask: torch.Tensor | None, inputs_embeds: torch.Tensor, past: int | None
) -> torch.Tensor | None:
    """The part of a mask over past and new tokens that is about the new ones; `past` is None if not known."""
    if mask is None:
        return None
    batch, length = inputs_embeds.shape[:2]
    if past is None:
        return mask[:, -length:]
    if tuple(mask.shape) != (batch, past + length):
        raise ValueError(
            f"attention_mask must cover {past} past and {length} new tokens of {batch} rows, "
            f"({batch}, {past + length}), got {tuple(mask.shape)}"
        )
    return mask[:, past:]


@dataclass
class AFTCausalLMOutput(CausalLMOutputWithPast):
    r"""
    position_bias_entropy (`torch.Tensor` of shape `()`, *optional*):
        Entropy of the position biases (Eq. 9, nats), which `loss` includes with `position_bias_entropy_weight`.
    """

    position_bias_entropy: torch.Tensor | None = None


@dataclass
class AFTImageClassifierOutput(ImageClassifierOutput):
    r"""
    position_bias_entropy (`torch.Tensor` of shape `()`, *optional*):
        Entropy of the position biases (Eq. 9, nats), which `loss` includes with `position_bias_entropy_weight`.
    """

    position_bias_entropy: torch.Tensor | None = None


class AFTForCausalLM(AFTPreTrainedModel, GenerationMixin):
    """AFT with a language modeling head."""

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
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: AFTCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AFTCausalLMOutput:
        r"""
        Args:
            input_ids, attention_mask, inputs_embeds, past_key_values, use_cache: As for `AFTModel`.
            labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                The tokens themselves, shifted inside the model; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`): The last positions (0: all) or the indices to compute logits of.
        """
        outputs: BaseModelOutputWithPast = self.aft(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
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
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            position_bias_entropy=entropy,
        )

    def _loss(
        self, logits: torch.Tensor, labels: torch.Tensor, entropy: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """The loss of next tokens; of whole rows, where these are pieces of them."""
        asked, group = kwargs.get("num_items_in_batch"), active_group()
        if group is None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return _with_entropy(loss, entropy, self.config, (labels[..., 1:] != -100).sum(), asked)
        following = following_labels(labels, group)
        targets = total_over(group, (following != -100).sum())
        # The sum here counts as many times as there are pieces, since gradients are averaged over them.
        kwargs["num_items_in_batch"] = (targets if asked is None else asked) / group.size()
        vocab_size = self.config.vocab_size
        loss = self.loss_function(logits=logits, labels=None, shift_labels=following, vocab_size=vocab_size, **kwargs)
        return _with_entropy(average_over(group, loss), entropy, self.config, targets, asked)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """`generate` leaves the cache to the model, which knows what its layers keep."""
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]  # the library declares a bool, and returns nothing
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
    ) -> None:
        """Give `generate` the cache of this model: a static one for `cache_implementation="static"`.

        Where learned positions end, so does the text: `max_length` is lowered to what the model can write.
        """
        excess = self._tokens_beyond_limit(max_cache_length, model_kwargs.get("attention_mask"))
        if excess > 0:
            logger.warning(
                f"generation stops {excess} tokens earlier than asked for: this model reads texts of up to "
                f"max_position_embeddings={self.aft.max_length} tokens"
            )
            generation_config.max_length -= excess
            max_cache_length -= excess
        asked = generation_config.cache_implementation
        given = model_kwargs.get("past_key_values") is not None
        if given or generation_config.use_cache is False or asked not in (None, "dynamic", "static"):
            arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            super()._prepare_cache_for_generation(*arguments, *args)  # type: ignore[misc]  # the type of `self` there
        else:
            model_kwargs["past_key_values"] = self.aft.new_cache(max_cache_length if asked == "static" else None)

    def _tokens_beyond_limit(self, length: int, attention_mask: torch.Tensor | None) -> int:
        """How many of `length` tokens, padding included, the model cannot read; not more than 0 if it reads all."""
        if self.aft.max_length is None:
            return 0
        # Padding that all rows have takes no room.
        padding = 0 if attention_mask is None else attention_mask.shape[1] - int(attention_mask.sum(-1).max())
        return length - padding - self.aft.max_length

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """With a static cache, the padding of the new tokens, which only a prompt has."""
        if attention_mask is None or (CHUNKS_ARE_NAMED and not is_first_iteration):
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported, and so neither is `generate_batch`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "generate_batch pages the keys and values of attention, and the cache of an AFT is a sum over the past: "
            "call generate with a padded batch, whose cache has a constant size"
        )


class AFTForImageClassification(AFTPreTrainedModel):
    """AFT with a linear classifier on the pooled patches or class token."""

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
                `(batch_size,)` classes, or what `config.problem_type` takes: floats for a regression,
                `(batch_size, num_labels)` floats for several labels per image.
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
    """`forward` of a model that cannot work on pieces of rows."""

    @wraps(forward)
    def checked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if active_group() is not None:
            raise ValueError(
                f"{type(self).__name__} needs whole rows, and context_parallel gives each process a piece of them: "
                "use AFTModel or AFTForCausalLM"
            )
        return forward(self, *args, **kwargs)

    return checked


class _TextClassifier(AFTPreTrainedModel):
    """What the generic heads of transformers do not know of AFT: its modality, and the entropy in its loss."""

    input_modalities = ["text"]
    # The loss of the generic heads is a mean over the batch that they get: Trainer scales it where it accumulates.
    accepts_loss_kwargs = False

    def __init__(self, config: AFTConfig):
        _require_modality(self, config, "text")
        super().__init__(config)
        self.num_labels = config.num_labels
        # Not by AutoModel, as in the generic heads, which does not know the class of a config of remote code.
        self.aft = AFTModel(config)

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """The loss of the task, and the entropy of the position biases (Eq. 9) where the config asks for it."""
        loss_of_task = super().loss_function

        def loss_with_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = loss_of_task(*args, **kwargs)
            return _with_entropy(loss, self.aft.position_bias_entropy(), self.config, 1, None)

        return loss_with_entropy

    @loss_function.setter
    def loss_function(self, value: Callable[..., torch.Tensor]) -> None:
        self._loss_function = value


class AFTForSequenceClassification(_TextClassifier, GenericForSequenceClassification):
    """AFT with a linear classifier on the last token of a text that is not `config.pad_token_id`.

    Padding may be on either side. Without a `pad_token_id`, a batch has one text. Arguments are those of `AFTModel`,
    and `labels`: `(batch_size,)` classes, or what `config.problem_type` takes.
    """

    forward = _of_whole_rows(GenericForSequenceClassification.forward)

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class AFTForTokenClassification(_TextClassifier, GenericForTokenClassification):
    """AFT with a linear classifier on every token of a text, of which each sees itself and those before it.

    Arguments are those of `AFTModel`, and `labels`: `(batch_size, sequence_length)` classes; -100 is ignored.
    """

    forward = _of_whole_rows(GenericForTokenClassification.forward)

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class AFTBackbone(BackboneMixin, AFTModel):
    """The feature maps of chosen stages, for detectors and segmenters (`AutoBackbone`).

    The stages are the embeddings ("stem") and the blocks ("stage1" ...); `out_features` or `out_indices` chooses
    them, by default the last one. With `conv` layers alone, images may have any sides that are multiples of the patch
    size.
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
            `feature_maps`, `(batch_size, hidden_size, rows, columns)` of patches for each chosen stage, after the
            final layer norm: the mean of the last one over its positions is what a classifier on patches sees.
        """
        outputs = AFTModel.forward(self, pixel_values=pixel_values, **kwargs)
        patch_size = pair(self.config.patch_size)
        grid_size = tuple(side // patch for side, patch in zip(pixel_values.shape[2:], patch_size))
        feature_maps = []
        for index in sorted(self.stage_names.index(name) for name in self.out_features):
            hidden_states = outputs.hidden_states[index]
            if index < len(self.layers):  # the last ones are normalized already
                hidden_states = self.layernorm(hidden_states)
            patches = hidden_states[:, int(bool(self.config.use_cls_token)) :]
            feature_maps.append(patches.transpose(1, 2).unflatten(2, grid_size).contiguous())
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
    """Eq. 9: the entropy of the position biases added to the loss of the task.

    Where the loss is one of several that a step adds up, as in gradient accumulation, so is the entropy: by its share
    `targets` / `targets_of_step`.
    """
    if entropy is None:
        return loss
    share = 1.0 if targets_of_step is None else targets / targets_of_step
    return loss + config.position_bias_entropy_weight * share * entropy.to(loss.device)


# All models with a head, for what treats them alike: cards, pictures, and the names that the library looks up.
HEADS = (AFTForCausalLM, AFTForImageClassification, AFTForSequenceClassification, AFTForTokenClassification)

# The library goes by the names of classes where it has to know the task of a model: Trainer, to shift the labels for
# label smoothing; pipelines and model cards; `transformers serve`.
modeling_auto.MODEL_MAPPING_NAMES[AFTConfig.model_type] = AFTModel.__name__
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AFTConfig.model_type] = AFTForCausalLM.__name__
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[AFTConfig.model_type] = AFTForImageClassification.__name__
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[AFTConfig.model_type] = (
    AFTForSequenceClassification.__name__
)
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[AFTConfig.model_type] = AFTForTokenClassification.__name__

# `save_pretrained` and `push_to_hub` put this file and its siblings beside the weights, wherever it was loaded from.
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
