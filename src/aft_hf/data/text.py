"""Text datasets for language models: blocks of tokens, or a file of bytes."""

from itertools import chain
from pathlib import Path

import datasets
from datasets import Dataset, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from .whole_files import write_whole


def group_into_blocks(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    column: str = "text",
    mark_ends: bool = True,
) -> Dataset:
    """Tokenize texts, concatenate them and split them into blocks of `block_size` tokens.

    A thousand rows are concatenated at a time; their last tokens that do not fill a block are dropped.

    Args:
        dataset: dataset with a column of texts.
        tokenizer: the model's tokenizer.
        block_size: tokens per block, at least 2, since each token predicts the next.
        column: name of the column of texts.
        mark_ends: whether to append the tokenizer's `eos_token`, if it has one, to each text.

    Returns:
        Rows of `input_ids` and `labels`, each of `block_size` tokens.

    Raises:
        ValueError: `block_size` is less than 2.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    end = [tokenizer.eos_token_id] if mark_ends and tokenizer.eos_token_id is not None else []

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # `verbose=False`: texts are split into blocks, so one that is longer than the model's limit needs no warning.
        texts = tokenizer(rows[column], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable([*ids, *end] for ids in texts))
        stop = len(tokens) // block_size * block_size
        blocks = [tokens[i : i + block_size] for i in range(0, stop, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, desc="Tokenizing")


def join_texts(dataset: Dataset, column: str, separator: str) -> Path:
    """Write all texts to one file in UTF-8 and return its path.

    The file lies in the cache of `datasets` and is written only if it does not exist yet.

    Args:
        dataset: dataset with a column of texts; None counts as an empty text.
        column: name of the column of texts.
        separator: the text between two rows.

    Raises:
        ValueError: the column does not hold texts.
    """
    feature = dataset.features[column]
    if not isinstance(feature, Value) or feature.dtype not in ("string", "large_string"):
        raise ValueError(f"column {column!r} must hold texts, it holds {feature}")
    name = Hasher.hash((dataset._fingerprint, column, separator))
    path = Path(datasets.config.HF_DATASETS_CACHE) / "aft_hf" / f"{name}.txt"
    if not path.exists():
        with write_whole(path) as file:
            between = b""
            for rows in dataset.select_columns(column).iter(1000):
                texts = [text or "" for text in rows[column]]
                file.write(between + separator.join(texts).encode())
                between = separator.encode()
    return path
