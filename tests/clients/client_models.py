"""Small models for the tests of clients, the libraries that use AFT models."""

import torch
from transformers import PreTrainedModel

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer


AFT_TYPES = ["full", "local", "simple", "conv", "alibi"]
LONGEST = 64


def language_model(aft_type: str = "local", **options) -> AFTForCausalLM:
    """Build a byte-level language model of two layers with the special tokens of the byte tokenizer."""
    torch.manual_seed(0)
    tokenizer = build_byte_tokenizer()
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "position_bias_dim": 4,
        "window_size": 4,
        "kernel_size": 4,
        "initializer_range": 0.2,
        "max_position_embeddings": LONGEST,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return _with_biases(AFTForCausalLM(AFTConfig(aft_type=aft_type, **(settings | options))))


def image_classifier() -> AFTForImageClassification:
    """Build an AFT-conv classifier of images of 16 x 16 pixels into three classes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_heads": 3, "image_size": 16, "patch_size": 4}
    config = AFTConfig(modality="image", aft_type="conv", kernel_size=3, num_labels=3, **sizes)
    return _with_biases(AFTForImageClassification(config))


def _with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Draw the kernels at random, because new kernels are 0 and have no effect; set evaluation mode."""
    for name, parameter in model.named_parameters():
        if "kernel" in name:
            torch.nn.init.normal_(parameter)
    return model.eval()
