"""A tokenizer whose tokens are bytes."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


# The roles that transformers knows, in the order in which their tokens follow the bytes.
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


NUM_BYTES = 256

# What clients need: batches are padded, and texts end. Padding is a token of its own, as collators give it no loss.
DEFAULT_SPECIAL_TOKENS = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}


def build_byte_tokenizer(
    *, additional_special_tokens: Sequence[str] = (), model_max_length: int | None = None, **special_tokens: str | None
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with ids 0-255 = bytes of UTF-8, and special tokens after them.

    It is lossless for any text that does not have a special token in it. A model needs `vocab_size=len(tokenizer)`.
    It is an ordinary `PreTrainedTokenizerFast` (byte-level BPE without merges): AutoTokenizer loads it once saved, and
    no code of this package is needed. A text is its bytes: no special token is added to it.

    Args:
        additional_special_tokens: tokens with the ids after those of `special_tokens`.
        model_max_length: the longest input of the model, if there is a limit.
        **special_tokens: `bos_token="<s>"` and the like; ids 256 and up, in the order of `SPECIAL_TOKENS`. By default
            there are `eos_token="<|endoftext|>"` (256) and `pad_token="<|pad|>"` (257); None leaves one out.

    Raises:
        ValueError: a special token of a role that transformers does not know.
    """
    unknown = special_tokens.keys() - set(SPECIAL_TOKENS)
    if unknown:
        raise ValueError(f"unknown special tokens {sorted(unknown)}; use {', '.join(SPECIAL_TOKENS)}")
    given = DEFAULT_SPECIAL_TOKENS | special_tokens
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ordered = {role: given[role] for role in SPECIAL_TOKENS if given.get(role) is not None}
    tokenizer.add_special_tokens([*ordered.values(), *additional_special_tokens])
    limits = {} if model_max_length is None else {"model_max_length": model_max_length}
    extra = {"additional_special_tokens": list(additional_special_tokens)} if additional_special_tokens else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ordered, **extra, **limits
    )
