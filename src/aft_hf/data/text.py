"""Text for language models: as blocks of tokens, or as a file of bytes."""

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
    """Texts joined, a thousand rows at a time, and cut into blocks; the rest that fills no block is left out.

    Args:
        dataset: with a column of texts.
        tokenizer: of the model.
        block_size: tokens per block, at least 2: each is to predict the next.
        column: name of that column.
        mark_ends: whether each text ends with the tokenizer's `eos_token`, if it has one.

    Returns:
        Rows of `input_ids` and `labels`, each of `block_size` tokens.

    Raises:
        ValueError: smaller blocks.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    end = [tokenizer.eos_token_id] if mark_ends and tokenizer.eos_token_id is not None else []

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # Joining is the aim here: a text longer than the model's limit is none to warn about.
        texts = tokenizer(rows[column], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable([*ids, *end] for ids in texts))
        stop = len(tokens) // block_size * block_size
        blocks = [tokens[i : i + block_size] for i in range(0, stop, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, desc="Tokenizing")


def join_texts(dataset: Dataset, column: str, separator: str) -> Path:
    """A file with all texts in UTF-8. It lies in the cache of `datasets`, and is written only if it is not there yet.

    Args:
        dataset: with a column of texts; a missing text is an empty one.
        column: its name.
        separator: between two texts.

    Raises:
        ValueError: a column of something else.
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
