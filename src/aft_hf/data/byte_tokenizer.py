"""A tokenizer whose tokens are bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


NUM_BYTES = 256

# Padding has a token of its own and not the end token, since collators exclude it from the loss.
DEFAULT_SPECIAL_TOKENS = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}


def build_byte_tokenizer(
    *, model_max_length: int | None = None, **special_tokens: str | None
) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: ids 0-255 are the bytes of UTF-8, and special tokens follow from id 256 on.

    It is lossless for any text without special tokens, and adds none. A model needs `vocab_size=len(tokenizer)`.
    AutoTokenizer loads a saved one without any code of this package: it is a byte-level BPE without merges.

    Args:
        model_max_length: the maximum input length of the model in tokens. Default: no limit.
        **special_tokens: a token for each role in transformers, such as `bos_token="<s>"`.
            Default: `eos_token="<|endoftext|>"` (256) and `pad_token="<|pad|>"` (257); None omits a token. A role
            that is unknown to transformers is a ValueError.
    """
    roles = PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    if unknown := special_tokens.keys() - set(roles):
        raise ValueError(f"unknown special tokens {sorted(unknown)}; use {', '.join(roles)}")
    given = {role: token for role, token in (DEFAULT_SPECIAL_TOKENS | special_tokens).items() if token is not None}
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(given.values()))
    options = {"clean_up_tokenization_spaces": False, "model_max_length": model_max_length}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given, **options)
