"""Sample tokens one after the other from a causal language model."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def sample_tokens(
    model: PreTrainedModel, prompt: torch.Tensor, count: int, *, temperature: float, seed: int, num_tokens: int
) -> Iterator[torch.Tensor]:
    """Continue (B, T) tokens by `count` tokens, and yield each step as it is sampled, (B,).

    Args:
        model: the model, in evaluation mode.
        prompt: the tokens to continue, (B, T).
        count: number of new tokens.
        temperature: sampling temperature; 0 takes the most probable token.
        seed: seed of a separate generator, so that the same call gives the same tokens whatever else runs.
        num_tokens: only the tokens 0 .. num_tokens - 1 are sampled.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    cache, tokens = None, prompt
    for _ in range(count):
        outputs = model(input_ids=tokens, cache=cache, use_cache=True)
        cache, logits = outputs.cache, outputs.logits[:, -1, :num_tokens].float()
        if temperature == 0:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        yield tokens[:, 0]
