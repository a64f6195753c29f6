"""PyTorch AFT models: embeddings, blocks, the backbone and the heads.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103): pre-norm Transformer blocks with an AFT mixer in
place of self-attention, causal over tokens or bidirectional over patches of an image.
"""

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
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
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_torchdynamo_compiling, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .activations_aft import is_untouched, perceptron
from .caching_aft import AFTCache, AFTLayerState
from .configuration_aft import AFTConfig, pair
from .documents_aft import PACKING_INPUTS, Documents, packed_documents
from .mixers_aft import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTMixer, AFTSimple
from .sequence_shards_aft import (
    SequenceShard,
    active_group,
    average_over,
    following_labels,
    shard_of_inputs,
    total_over,
)


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.get_logger(__name__)

# `generate` of earlier versions does not tell later chunks of a prompt (`prefill_chunk_size`) from generated tokens.
CHUNKS_ARE_NAMED = tuple(map(int, transformers_version.split(".")[:2])) >= (5, 23)


class AFTTextEmbeddings(nn.Module):
    """Token embeddings, and learned embeddings of the positions where the config asks for them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = None
        if config.use_position_embeddings:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        state: AFTLayerState | None = None,
        documents: Documents | None = None,
        shard: SequenceShard | None = None,
    ) -> torch.Tensor:
        if self.position_embeddings is not None:
            positions = self._positions(inputs_embeds, padding_mask, state, documents, shard)
            inputs_embeds = inputs_embeds + self.position_embeddings(positions)
        return self.dropout(inputs_embeds)

    def _positions(self, inputs_embeds, padding_mask, state, documents, shard) -> torch.Tensor:
        """(B or 1, T). Padding does not count, so a padded row equals the row alone."""
        length, limit = inputs_embeds.shape[1], self.position_embeddings.num_embeddings
        if shard is not None:
            if shard.longest > limit:
                raise ValueError(f"a text of {shard.longest} tokens is longer than max_position_embeddings={limit}")
            return shard.positions().clamp_max(limit - 1)
        if documents is not None:
            longest = documents.longest()
            if longest is not None and longest > limit:
                raise ValueError(f"a document of {longest} tokens is longer than max_position_embeddings={limit}")
            return documents.positions(padding_mask)
        start, longest = 0, length
        if state is not None and state.is_initialized:
            start, longest = state.seen[:, None], state.tokens_after(length, limit)
        if longest > limit:
            raise ValueError(f"a text of {longest} tokens is longer than max_position_embeddings={limit}")
        if padding_mask is None:
            return start + torch.arange(length, device=inputs_embeds.device).unsqueeze(0)
        return (start + padding_mask.long().cumsum(-1) - 1).clamp_min(0)


class AFTImageEmbeddings(nn.Module):
    """Patches to tokens; a class token and learned position embeddings where the config asks for them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.patch_size, self.num_channels = pair(config.patch_size), config.num_channels
        self.image_size = pair(config.image_size)
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.patch_size
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.position_embeddings = None
        if config.use_position_embeddings:
            self.position_embeddings = nn.Parameter(torch.zeros(1, config.max_positions, config.hidden_size))
        # Mixers and embeddings with tables know one grid; AFT-conv alone takes any.
        self.fixed_size = set(config.layer_aft_types) != {"conv"} or config.use_position_embeddings
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, pixel_values: torch.Tensor, shard: SequenceShard | None = None
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        self._check_size(pixel_values, shard)
        patches = self.patch_embeddings(pixel_values)  # (B, d, rows, columns)
        grid_size = (patches.shape[2], patches.shape[3])
        # A residual stream in another order of memory would slow down every layer.
        embeddings = patches.flatten(2).transpose(1, 2).contiguous()
        if self.cls_token is not None:
            embeddings = torch.cat([self.cls_token.expand(embeddings.shape[0], -1, -1), embeddings], 1)
        if self.position_embeddings is not None:
            positions = self.position_embeddings
            if shard is not None:
                positions = positions.narrow(1, shard.first_row * shard.columns, shard.length)
            embeddings = embeddings + positions
        return self.dropout(embeddings), grid_size

    def shard(self, group: "ProcessGroup", pixel_values: torch.Tensor) -> SequenceShard:
        """Which piece of images that a group of processes shares these pixels are."""
        self._check_patches(pixel_values)
        rows, columns = (side // patch for side, patch in zip(pixel_values.shape[2:], self.patch_size))
        return SequenceShard(group, len(pixel_values), rows * columns, pixel_values.device, columns=columns)

    def _check_patches(self, pixel_values: torch.Tensor) -> None:
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values must be (batch, {self.num_channels}, height, width), got {tuple(pixel_values.shape)}"
            )
        size = tuple(pixel_values.shape[2:])
        if size[0] % self.patch_size[0] or size[1] % self.patch_size[1] or 0 in size:
            raise ValueError(
                f"images of {size[0]} x {size[1]} pixels cannot be cut into patches of {self.patch_size[0]} x "
                f"{self.patch_size[1]}: both sides must be multiples of the patch size"
            )

    def _check_size(self, pixel_values: torch.Tensor, shard: SequenceShard | None) -> None:
        self._check_patches(pixel_values)
        height, width = pixel_values.shape[2:]
        if shard is not None:
            height = shard.total_length // shard.columns * self.patch_size[0]
        if self.fixed_size and (height, width) != self.image_size:
            raise ValueError(
                f"images of {height} x {width} pixels do not match image_size={self.image_size[0]} x "
                f"{self.image_size[1]}, for which this model has learned positions"
            )


def build_mixer(config: AFTConfig, layer_idx: int) -> AFTMixer:
    """The mixer of one layer as the config describes it."""
    aft_type = config.layer_aft_types[layer_idx]
    options = {
        "causal": config.modality == "text",
        "qkv_bias": config.qkv_bias,
        "use_query": config.use_query,
        "query_activation": config.query_activation,
        "use_output_projection": config.use_output_projection,
        "global_connectivity": config.global_connectivity,
        "implementation": config.mixing_implementation,
        "num_heads": config.num_heads,
    }
    table = {
        "max_positions": config.max_positions,
        "position_bias_dim": config.position_bias_dim,
        "position_bias_init_std": config.position_bias_init_std,
        "position_bias_multiplier": config.position_bias_multiplier,
    }
    if aft_type == "full":
        return AFTFull(config.hidden_size, **table, **options)
    if aft_type == "local":
        return AFTLocal(config.hidden_size, window_size=config.local_window_size, **table, **options)
    if aft_type == "conv":
        return AFTConv(
            config.hidden_size,
            kernel_size=config.conv_kernel_size,
            spatial_dims=2 if config.modality == "image" else 1,
            reparameterized=config.position_bias_reparameterized,
            selection=config.position_bias_selection,
            gumbel_temperature=config.gumbel_temperature,
            position_bias_init_std=config.position_bias_init_std,
            position_bias_multiplier=config.position_bias_multiplier,
            **options,
        )
    return {"simple": AFTSimple, "alibi": AFTAlibi}[aft_type](config.hidden_size, **options)


class AFTMLP(nn.Module):
    def __init__(self, config: AFTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return perceptron(self.fc1, self.activation, self.fc2, hidden_states)


class AFTDropPath(nn.Module):
    """Stochastic depth: drops the residual branch of whole samples, and scales up what stays."""

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
    """A pre-norm block: x + mixer(norm(x)), then x + MLP(norm(x))."""

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
        past_key_values: AFTCache | None = None,
        documents: Documents | None = None,
        shard: SequenceShard | None = None,
        output_attentions: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        branch = self.mixer(
            self.layernorm_before(hidden_states),
            attention_mask=attention_mask,
            documents=documents,
            shard=shard,
            grid_size=grid_size,
            state=None if past_key_values is None else past_key_values.layers[self.layer_idx],
            output_attentions=output_attentions,
        )
        branch = branch[0] if output_attentions else branch
        hidden_states = self._add(hidden_states, branch)
        del branch  # not to be kept while the MLP takes the most memory
        return self._add(hidden_states, self.mlp(self.layernorm_after(hidden_states)))

    def _add(self, hidden_states: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """The residual connection. What changes nothing is not called: calls are what a step of decoding waits for."""
        for module, kind in ((self.dropout, nn.Dropout), (self.drop_path, AFTDropPath)):
            if module.training or type(module) is not kind or not is_untouched(module):
                branch = module(branch)
        return hidden_states + branch


class AFTPreTrainedModel(PreTrainedModel):
    """Initialization, and what an AFT offers the library: checkpointing, splitting, recorded outputs."""

    config: AFTConfig
    config_class = AFTConfig
    base_model_prefix = "aft"
    input_modalities = ("text", "image")
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


class AFTModel(AFTPreTrainedModel):
    """The backbone: embeddings of tokens or patches, the blocks, a final layer norm."""

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
        patches = hidden_states[:, int(self.config.use_cls_token) :]
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else patches.mean(1)
        if shard is not None:
            pooled = average_over(group, pooled * shard.share)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _forward_text(
        self, input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, **kwargs
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError('a model with modality="text" needs either input_ids or inputs_embeds, and not both')
        if inputs_embeds is None:
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
        if active_group() is not None:
            shard = shard_of_inputs(active_group(), inputs_embeds, attention_mask, packing)
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
        limits = [layer.mixer.max_positions for layer in self.layers]
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
        return AFTCache([layer.mixer.state_window for layer in self.layers], max_length)

    def _check_tokens(self, input_ids: torch.Tensor) -> None:
        # On an accelerator this look at the values would wait for it in every step; there, the kernel itself asserts.
        if input_ids.device.type != "cpu" or is_torchdynamo_compiling() or input_ids.numel() == 0:
            return
        lowest, highest = (int(x) for x in input_ids.aminmax())
        size = self.embeddings.word_embeddings.num_embeddings
        if lowest < 0 or highest >= size:
            raise ValueError(f"token ids must be in 0 .. {size - 1} (vocab_size={size}), got {lowest} .. {highest}")

    def _run_layers(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return self.layernorm(hidden_states)

    def position_bias_entropy(self) -> torch.Tensor | None:
        """Eq. 9 summed over layers (nats); None unless `position_bias_entropy_weight` asks for it."""
        if self.config.position_bias_entropy_weight == 0:
            return None
        device = self.layernorm.weight.device
        entropy = sum(mixer.position_bias_entropy().to(device) for mixer in self._regularized_mixers())
        self._note_when_reached(entropy, "entropy")
        return entropy

    def _regularized_mixers(self) -> list[AFTConv]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AFTConv)]

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

    input_modalities = ("text",)
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
        self, logits: torch.Tensor, labels: torch.Tensor, entropy: torch.Tensor | None, **kwargs
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

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args
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
            super()._prepare_cache_for_generation(*arguments, *args)
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
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs,
    ) -> torch.Tensor | None:
        """With a static cache, the padding of the new tokens, which only a prompt has."""
        if attention_mask is None or (CHUNKS_ARE_NAMED and not is_first_iteration):
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :]

    def init_continuous_batching(self, *args, **kwargs):
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
    input_modalities = ("image",)

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


def _of_whole_rows(forward):
    """`forward` of a model that cannot work on pieces of rows."""

    @wraps(forward)
    def checked(self, *args, **kwargs):
        if active_group() is not None:
            raise ValueError(
                f"{type(self).__name__} needs whole rows, and context_parallel gives each process a piece of them: "
                "use AFTModel or AFTForCausalLM"
            )
        return forward(self, *args, **kwargs)

    return checked


class _TextClassifier(AFTPreTrainedModel):
    """What the generic heads of transformers do not know of AFT: its modality, and the entropy in its loss."""

    input_modalities = ("text",)
    # The loss of the generic heads is a mean over the batch that they get: Trainer scales it where it accumulates.
    accepts_loss_kwargs = False

    def __init__(self, config: AFTConfig):
        _require_modality(self, config, "text")
        super().__init__(config)
        self.num_labels = config.num_labels
        # Not by AutoModel, as in the generic heads, which does not know the class of a config of remote code.
        self.aft = AFTModel(config)

    @property
    def loss_function(self):
        """The loss of the task, and the entropy of the position biases (Eq. 9) where the config asks for it."""
        loss_of_task = super().loss_function

        def loss_with_entropy(*args, **kwargs) -> torch.Tensor:
            loss = loss_of_task(*args, **kwargs)
            return _with_entropy(loss, self.aft.position_bias_entropy(), self.config, 1, None)

        return loss_with_entropy

    @loss_function.setter
    def loss_function(self, value):
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
    input_modalities = ("image",)

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
            patches = hidden_states[:, int(self.config.use_cls_token) :]
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
