"""A small language model for the tests of clients, the libraries that use AFT models."""

import tiny_models

from aft_hf import AFTForCausalLM, build_byte_tokenizer


AFT_TYPES = ["full", "local", "simple", "conv", "alibi"]
LONGEST = 64


def language_model(aft_type: str = "local", **options) -> AFTForCausalLM:
    """Build a byte-level language model of two layers with the special tokens of the byte tokenizer."""
    tokenizer = build_byte_tokenizer()
    sizes = {"hidden_size": 16, "num_heads": 2, "window_size": 4, "kernel_size": 4, "initializer_range": 0.2}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tokens |= {"vocab_size": len(tokenizer), "max_position_embeddings": LONGEST}
    return tiny_models.language_model(aft_type, **(sizes | tokens | options))
