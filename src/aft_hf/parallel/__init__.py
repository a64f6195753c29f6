"""Context parallelism: one sequence or image on several processes."""

from .context import SequenceShard, average_over, context_parallel, total_over
from .shards import local_shard


__all__ = ["SequenceShard", "average_over", "context_parallel", "local_shard", "total_over"]
