"""Context parallelism in training: the processes of a group share a batch, and each computes a shard of its sequences.

The loss and the metrics are those of whole sequences, in every process.
"""

import torch
from accelerate import PartialState
from torch import distributed, nn
from transformers import PreTrainedModel

from ..parallel import average_over, context_parallel, local_shard, total_over
from .recipe import Recipe
from .tasks import Batch, Task


class ContextParallelGroup:
    """The context-parallel group of this process: `context_parallel` consecutive processes. `group` is None for one.

    Raises:
        ValueError: the recipe, or the number of processes, does not allow such groups.
    """

    def __init__(self, recipe: Recipe, state: PartialState):
        size, processes = recipe.context_parallel, state.num_processes
        if processes % size:
            raise ValueError(f"context_parallel={size} does not divide the {processes} processes: change one of them")
        if size > 1 and (recipe.task == "images" or recipe.compile):
            raise ValueError(f"context_parallel={size} needs compile=False and a task of sequences, not images")
        self.size, self.groups = size, processes // size
        self.index, self.rank = divmod(state.process_index, size)  # of this group, and of this process in it
        self.group = distributed.new_subgroups(size)[0] if size > 1 else None

    def check(self, model: PreTrainedModel) -> None:
        """Raise a ValueError if the model does not support context parallelism."""
        types = getattr(model.config, "layer_aft_types", ["no AFT"])
        if self.size > 1 and not set(types) <= {"simple", "alibi", "local", "conv"}:
            raise ValueError(
                f"context_parallel={self.size} needs a model whose layers are of the aft_type simple, alibi, local or "
                f"conv, got {model.config.model_type} with {', '.join(sorted(set(types)))}"
            )

    def loss(self, task: Task, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of whole sequences; DDP and FSDP average its gradient over the processes."""
        if self.group is None:
            return task.loss(model, batch)
        shard = {name: local_shard(x, self.group) for name, x in batch.items()}
        counted = (shard["labels"] != -100).sum()
        share = counted * self.size / total_over(self.group, counted)
        with context_parallel(model, self.group):
            loss = task.loss(model, shard) * share
        return average_over(self.group, loss)

    def scores(self, task: Task, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions and references of this process's own batch.

        The group computes the batches of its processes in turn, each process a shard of every batch. The scores of the
        shards are added, so a task's scores of a row must be sums over its tokens.
        """
        if self.group is None:
            return task.scores(model, batch)
        for source in range(self.size):
            whole = {name: x.clone() for name, x in batch.items()}
            for x in whole.values():
                distributed.broadcast(x, group_src=source, group=self.group)
            shard = {name: local_shard(x, self.group) for name, x in whole.items()}
            with context_parallel(model, self.group):
                scores = [total_over(self.group, x) for x in task.scores(model, shard)]
            if source == self.rank:
                own = scores
        return own[0], own[1]
