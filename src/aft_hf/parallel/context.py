"""Context parallelism: the models and the AFT operation on sequences that are divided among several processes.

`context_parallel` tells a model that its inputs are shards. The methods of this model that need whole sequences are
then replaced by those of `ContextParallelism`, and a `SequenceShard` goes through all layers as the `visibility`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling
from transformers.modeling_utils import PreTrainedModel

from .. import modeling_aft
from ..caching_aft import SUMS_AND_WINDOW, AFTCache, AFTLayerState
from ..mixers_aft import AFTMixer
from ..mixing_aft import PACKING_INPUTS, Mixing, mix, mix_causal, without_padding
from ..portable_aft import read, split_heads
from ..position_biases_aft import GridKernel, widen
from .exchange import state_at_end, with_past
from .shards import Shard, gather_shards, group_of


@contextmanager
def context_parallel(model: nn.Module, group: "distributed.ProcessGroup | distributed.DeviceMesh") -> Iterator[None]:
    """Context manager for context parallelism: the inputs of a model are this process's shards of the sequences.

    Process r of the group holds the r-th shard of `input_ids`, `attention_mask`, `position_ids` and `labels`, all cut
    at the same positions, or of `pixel_values`, cut between rows of patches. `local_shard` cuts the shards. All
    processes of the group have the same weights and call the model together.

    Hidden states, logits of tokens and feature maps are those of the shard. The pooled output and the logits of an
    image are those of the whole image. The loss is that of the whole sequences and has the same value in every
    process. The gradients in a process are the contribution of its shard times the number of processes. So their
    average over the processes, which DDP and FSDP compute, is the gradient of a single process with the whole
    sequences.

    The backward pass may run outside of the context.

    Args:
        model: an `AFTModel`, `AFTForCausalLM`, `AFTForImageClassification` or `AFTBackbone`, also wrapped by DDP, FSDP
            or `torch.compile`.
        group: the process group that shares each sequence, or a one-dimensional device mesh.

    Raises:
        ValueError: the model is another one, such as a text classifier, or has the code of a checkpoint instead of the
            classes of this package.
    """
    parallel = ContextParallelism(group_of(group))
    models: list[nn.Module] = [x for x in model.modules() if isinstance(x, PreTrainedModel)]
    for module in models or [model]:
        if not isinstance(module, MODELS):
            raise ValueError(
                f"context_parallel supports {', '.join(x.__name__ for x in MODELS)} of the package aft_hf, got "
                f"{type(module).__module__}.{type(module).__name__}: use one of these; if it is the code of a "
                "checkpoint, import aft_hf and load the checkpoint without trust_remote_code"
            )
    replaced = [(part, name) for part in model.modules() for kind, name in REPLACED if isinstance(part, kind)]
    surrounding = [vars(part).get(name) for part, name in replaced]
    for part, name in replaced:
        vars(part)[name] = partial(getattr(parallel, name), part)
    try:
        yield
    finally:
        for (part, name), method in zip(replaced, surrounding):
            del vars(part)[name]
            if method is not None:
                vars(part)[name] = method


# The models that compute on shards. Other heads need whole sequences.
MODELS = (
    modeling_aft.AFTModel,
    modeling_aft.AFTForCausalLM,
    modeling_aft.AFTForImageClassification,
    modeling_aft.AFTBackbone,
)

# The methods of models for which `ContextParallelism` has one of the same name.
REPLACED = (
    (modeling_aft.AFTModel, "_forward_text"),
    (modeling_aft.AFTModel, "_forward_image"),
    (modeling_aft.AFTImageEmbeddings, "positions"),
    (modeling_aft.AFTForCausalLM, "_loss"),
    (modeling_aft.AFTForCausalLM, "generate"),
)


def following_labels(labels: Tensor, group: "distributed.ProcessGroup") -> Tensor:
    """The label of the next token for each token of a shard, (B, T).

    For the last token this is the first label of the next shard, and -100 at the end of the sequence.
    """
    first = gather_shards(labels[:, 0], group)
    first = torch.cat([first, torch.full_like(first[:1], -100)])[distributed.get_rank(group) + 1]
    return torch.cat([labels[:, 1:], first[:, None]], 1)


def total_over(group: "distributed.ProcessGroup", x: Tensor) -> Tensor:
    """Sum a tensor over the processes, without gradients."""
    x = x.detach().clone()
    distributed.all_reduce(x, group=group)
    return x


def average_over(group: "distributed.ProcessGroup", x: Tensor) -> Tensor:
    """Average a tensor over the processes, which all get the same value. Gradients flow to the tensor of this process
    with factor 1.
    """
    average = total_over(group, widen(x)) / distributed.get_world_size(group)
    return average.to(x.dtype) + (x - x.detach())


class ContextParallelism:
    """What models compute within `context_parallel`.

    Args:
        group: the process group that shares each sequence.
    """

    def __init__(self, group: "distributed.ProcessGroup"):
        self.group = group
        self.images: SequenceShard | None = None

    def _forward_text(
        self,
        model: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: AFTCache | None,
        use_cache: bool | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of a shard; a cache is left in the state at the end of the whole sequences."""
        inputs_embeds = model._embed(input_ids, inputs_embeds)
        packing = {name: kwargs.pop(name, None) for name in PACKING_INPUTS}
        shard = self.shard_text(inputs_embeds, attention_mask, packing)
        if use_cache and cache is None and shard.begins_documents is None:
            cache = model.new_cache()
        hidden_states = model.embeddings(inputs_embeds, visibility=shard)
        states = [None] * len(model.layers) if cache is None else cache.layers
        for layer, state in zip(model.layers, states, strict=True):
            hidden_states = layer(hidden_states, state=state, visibility=shard, **kwargs)
        if attention_mask is not None:
            hidden_states = hidden_states.masked_fill((attention_mask == 0).unsqueeze(-1), 0.0)
        return BaseModelOutputWithPast(last_hidden_state=model.layernorm(hidden_states), cache=cache)

    def _forward_image(
        self, model: Any, pixel_values: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Compute the hidden states of rows of images, and the mean over the whole images."""
        self.images = shard = self.shard_images(model, pixel_values, attention_mask)
        hidden_states, grid_size = model.embeddings(pixel_values)
        for layer in model.layers:
            hidden_states = layer(hidden_states, grid_size=grid_size, visibility=shard, **kwargs)
        hidden_states = model.layernorm(hidden_states)
        weight = shard.length * shard.size / max(shard.total_length, 1)  # of the mean of this shard in the average
        pooled = average_over(self.group, hidden_states.mean(1) * weight)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def positions(self, embeddings: Any, height: int, width: int) -> Tensor | None:
        """Return the position embeddings of this process's rows of images."""
        shard = self.images
        assert shard is not None
        rows, first = shard.total_length // shard.columns, int(shard.starts[shard.rank, :1].sum())
        positions = type(embeddings).positions(embeddings, rows * embeddings.grid_stride[0], width)
        return None if positions is None else positions.narrow(1, first, shard.length)

    def shard_text(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, packing: dict[str, Tensor | None]
    ) -> "SequenceShard":
        """Return the shard of the inputs of a text model.

        Args:
            inputs_embeds: the embedded tokens of the shard, (B, T, d).
            attention_mask: the padding mask of the shard, (B, T), 0 for padding.
            packing: the model's inputs in `PACKING_INPUTS`; `position_ids` start again at 0 with each document.

        Raises:
            ValueError: the mask is not the padding mask of the shard, `cu_seq_lens_q` is given, or `position_ids` are
                not those of packed documents.
        """
        (batch, length), position_ids = inputs_embeds.shape[:2], packing["position_ids"]
        if attention_mask is not None and attention_mask.shape != (batch, length):
            raise ValueError(
                f"within context_parallel, attention_mask must be the padding mask of the shard, ({batch}, {length}), "
                f"got {tuple(attention_mask.shape)}"
            )
        if packing["cu_seq_lens_q"] is not None:
            raise ValueError(
                "within context_parallel, cu_seq_lens_q is not supported: give packed documents as the position_ids "
                "of the shard"
            )
        if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
            raise ValueError(f"position_ids must be ({batch} or 1, {length}), got {tuple(position_ids.shape)}")
        starts = None if position_ids is None else (position_ids == 0).expand(batch, -1)
        device = inputs_embeds.device
        shard = SequenceShard(self.group, batch, length, device, attention_mask, starts, position_ids=position_ids)
        given = position_ids if attention_mask is None else None
        if given is not None and given.device.type == "cpu" and read((shard.position != given).any()):
            raise ValueError(
                "position_ids of a shard must continue those of the shard before it, and start again at 0 with each "
                "packed document: other position_ids are not supported, the attention_mask determines positions"
            )
        single = shard.single_documents
        if single.any():  # in these rows, a position of 0 at padding starts no document
            kept = None if starts is None or single.all() else starts & ~single.to(starts.device)[:, None]
            return replace(shard, begins_documents=kept, position_ids=None)
        return shard

    def shard_images(self, model: Any, pixel_values: Tensor, attention_mask: Tensor | None) -> "SequenceShard":
        """Return the shard for `pixel_values`, this process's rows of images.

        Raises:
            ValueError: the model has a class token, a mask is given, or the patches overlap, so that they extend to
                the pixels of other processes.
        """
        if attention_mask is not None or model.config.use_cls_token:
            given = "a class token" if model.config.use_cls_token else "an attention_mask"
            raise ValueError(
                f"within context_parallel, images must have no class token and no attention_mask, got {given}"
            )
        patches = model.embeddings
        patches.check_patches(pixel_values)
        if patches.patch_size != patches.grid_stride:
            raise ValueError(
                "within context_parallel, patches must not overlap, got patches of "
                f"{patches.patch_size[0]} x {patches.patch_size[1]} pixels with patch_stride={patches.grid_stride}"
            )
        rows, columns = (side // stride for side, stride in zip(pixel_values.shape[2:], patches.grid_stride))
        return SequenceShard(self.group, len(pixel_values), rows * columns, pixel_values.device, columns=columns)

    def _loss(
        self,
        model: Any,
        logits: Tensor,
        labels: Tensor,
        entropy: Tensor | None,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss of next-token prediction of the whole sequences."""
        following = following_labels(labels, self.group) if shift_labels is None else shift_labels.contiguous()
        targets = total_over(self.group, (following != -100).sum())
        # Gradients are averaged over the processes, so each process counts its sum `group.size()` times.
        kwargs["num_items_in_batch"] = (
            targets if num_items_in_batch is None else num_items_in_batch
        ) / self.group.size()
        vocab_size = model.config.vocab_size
        loss = model.loss_function(logits=logits, labels=None, shift_labels=following, vocab_size=vocab_size, **kwargs)
        loss = average_over(self.group, loss)
        return modeling_aft.share_of_step(loss, entropy, model.config, targets, num_items_in_batch)

    def generate(self, model: Any, *arguments: Any, **options: Any) -> NoReturn:
        """Raise a ValueError: no process knows the last token."""
        raise ValueError(
            "generate does not run within context_parallel: read all but the last token of the prompt in it, with "
            "use_cache=True, then leave it and give generate the whole prompt and this cache"
        )


class SequenceShard(Shard):
    """A shard that a mixer takes in place of a `Visibility`: `mixer(x, visibility=shard)`."""

    is_shard = True
    is_packed = True  # the positions of a shard are not 0 .. T - 1

    def check(self, mixer: AFTMixer, problem: Mixing, state: AFTLayerState | None) -> None:
        """Raise a ValueError if a mixer cannot take this shard, or gets other inputs that do not go with it."""
        known, kind = isinstance(mixer, AFTMixer), "causal" if mixer.causal else "bidirectional"
        if not known or mixer.state_window is None or not (mixer.causal or mixer.max_positions is None):
            raise ValueError(
                f"a {kind} {type(mixer).__name__} cannot take a shard of a sequence (context parallelism): use a "
                "causal AFTSimple, AFTAlibi, AFTLocal or AFTConv, or a bidirectional AFTSimple or AFTConv, of the "
                "package aft_hf"
            )
        if not mixer.causal and (self.padding_mask is not None or self.begins_documents is not None):
            raise ValueError(f"a shard for a bidirectional {type(mixer).__name__} has no padding and no documents")
        if problem.pair_mask is not None:
            raise ValueError("a shard needs inputs without attention_mask: pass padding in the SequenceShard")
        if state is not None and (state.is_initialized or self.begins_documents is not None):
            raise ValueError("shards can start a state, with one document per row, but do not continue one")

    def mix(self, mixer: AFTMixer, problem: Mixing, state: AFTLayerState | None) -> Tensor:
        """Compute Eq. 2 for the queries of this shard, (B, T, d), and set the state to that at the end of the rows."""
        self.check(mixer, problem, state)
        problem, moved = replace(problem, visibility=self.visibility), None
        if self.visibility is not None:  # the exchange takes rows whose real tokens come first
            problem, moved = without_padding(problem)
        query, problem = problem.query, replace(problem, query=None)
        if state is not None:
            self.take_in(state, problem)
        context = (_mix_causal if problem.causal else _mix_rows)(self, problem, mixer.mixing_implementation)
        context = context if query is None else torch.sigmoid(query) * context
        return context if moved is None else moved.restored(context)

    def take_in(self, state: AFTLayerState, problem: Mixing) -> None:
        """Set a state to that at the end of the whole rows."""
        assert problem.biases.reach is not None
        *window, sums = state_at_end(self, problem, problem.biases.reach)
        keys, values = (split_heads(x, problem.num_heads) for x in window)
        state.lazy_initialization(keys, values)
        state.store(keys=keys, values=values)
        if sums is not None:
            state.store(**{name: x.unsqueeze(2) for name, x in zip(SUMS_AND_WINDOW[2:], sums)})
        real = self.starts[-1].to(state.device)
        state.padded = state.is_compileable or bool((real < self.total_length).any())
        state.count(self.total_length, real if state.padded else None)


def _mix_causal(shard: "SequenceShard", problem: Mixing, implementation: str) -> Tensor:
    """Compute a causal shard: prepend tokens that stand for everything before it, and mix the result as usual."""
    biases = problem.biases
    assert biases.reach is not None
    key, value = with_past(shard, problem, biases.reach)
    past = key.shape[1] - problem.length
    whole = replace(problem, key=key, value=value, num_queries=None)
    # Tokens in front belong to the document that the shard continues. If it continues none, they are hidden.
    document, first = shard.ordered_documents, None
    if document is not None:
        document = nn.functional.pad(document, (past, 0))
        places = torch.arange(past + shard.length, device=key.device)
        begins = torch.diff(document, dim=1, prepend=document[:, :1]) > 0
        first = torch.where(begins, places, 0).cummax(1).values
    starts = shard.before - past  # positions of the first tokens of the rows
    if biases.relative or bool((starts == 0).all()):
        context = mix_causal(whole, implementation, first)
    else:
        start: Any = int(starts[0]) if bool((starts == starts[0]).all()) else starts.to(key.device)
        context = mix_causal(whole, implementation, first, start)
        if document is not None:  # documents that start in this shard count their positions from 0
            others = mix_causal(whole, implementation, first)
            context = torch.where((document == 0).unsqueeze(-1), context, others)
    return context[:, past:].to(problem.value.dtype)


def _mix_rows(shard: "SequenceShard", problem: Mixing, implementation: str) -> Tensor:
    """Compute a bidirectional shard, of images or of sequences: prepend and append the grid rows within reach of the
    kernels and one sum for all rows farther away, and mix the result as an image with more rows.
    """
    biases: Any = problem.biases
    on_grid = isinstance(biases, GridKernel)
    rows, columns = biases.grid_size if on_grid else (0, 1)
    reach = columns * (biases.kernels.shape[-1] // 2 if on_grid else biases.reach)
    key, value = with_past(shard, problem, reach)
    backwards = replace(problem, key=problem.key.flip(1), value=problem.value.flip(1))
    following = with_past(shard.from_the_end, backwards, reach)
    past = key.shape[1] - problem.length
    filling = -past % columns  # hidden tokens that complete the rows of the summary tokens
    key, value = (
        nn.functional.pad(torch.cat([x, after[:, :past].flip(1)], 1), (0, 0, filling, filling), value=hidden)
        for x, after, hidden in zip((key, value), following, (-math.inf, 0.0))
    )
    if on_grid:
        biases = replace(biases, grid_size=(rows + 2 * (past + filling) // columns, columns))
    whole = replace(problem, key=key, value=value, biases=biases, num_queries=None)
    context = mix(whole, implementation).narrow(1, past + filling, problem.length)
    return context.to(problem.value.dtype)


__all__ = ["SequenceShard", "average_over", "context_parallel", "total_over"]
