"""Splitting texts into blocks of tokens."""

from datetime import date
from functools import partial

import pytest
from datasets import Dataset

from aft_hf import build_byte_tokenizer
from aft_hf.data.text import group_into_blocks, join_texts


pytestmark = pytest.mark.usefixtures("datasets_cache")


def test_texts_are_joined_and_lose_nothing_but_the_rest():
    texts = ["a first text", "", "é", "and the last one"]
    joined = "".join(texts).encode()
    blocks = group_into_blocks(Dataset.from_dict({"text": texts}), build_byte_tokenizer(eos_token=None), 8)
    assert blocks.column_names == ["input_ids", "labels"] and blocks["labels"][:] == blocks["input_ids"][:]
    assert all(len(block) == 8 for block in blocks["input_ids"])
    tokens = [token for block in blocks["input_ids"] for token in block]
    assert bytes(tokens) == joined[: len(joined) // 8 * 8]


def test_texts_end_where_the_tokenizer_has_a_token_for_that():
    tokenizer = build_byte_tokenizer(eos_token="</s>", bos_token="<s>")
    blocks = group_into_blocks(Dataset.from_dict({"story": ["ab", "c"]}), tokenizer, 5, column="story")
    assert blocks["input_ids"][:] == [[*b"ab", tokenizer.eos_token_id, *b"c", tokenizer.eos_token_id]]


def test_a_text_longer_than_the_model_takes_is_nothing_to_warn_about_and_a_short_one_gives_no_block(caplog, capsys):
    tokenizer = build_byte_tokenizer(model_max_length=4, eos_token=None)
    assert len(group_into_blocks(Dataset.from_dict({"text": ["abcdefgh"]}), tokenizer, 4)) == 2
    assert "longer than" not in caplog.text + capsys.readouterr().err
    assert len(group_into_blocks(Dataset.from_dict({"text": ["abc"]}), build_byte_tokenizer(), 5)) == 0


def test_the_separator_is_between_all_texts_of_a_file_which_is_written_again_when_they_change():
    texts = [str(i) for i in range(2001)]  # they are written a thousand at a time
    path = join_texts(Dataset.from_dict({"text": texts}), "text", "|é|")
    assert path.read_text(encoding="utf-8") == "|é|".join(texts)
    written = path.stat().st_mtime_ns
    assert join_texts(Dataset.from_dict({"text": texts}), "text", "|é|") == path  # it is written once
    assert path.stat().st_mtime_ns == written
    assert join_texts(Dataset.from_dict({"text": texts[:-1]}), "text", "|é|") != path


@pytest.mark.parametrize("block_size", [1, 0, -4])
def test_a_block_has_a_token_to_predict(block_size):
    with pytest.raises(ValueError, match=f"block_size must be at least 2, got {block_size}"):
        group_into_blocks(Dataset.from_dict({"text": ["abc"]}), build_byte_tokenizer(), block_size)


def test_blocks_of_rows_in_memory_lie_on_the_disk_and_are_made_once():
    first, second = (
        group_into_blocks(Dataset.from_dict({"text": ["abcdef"]}), build_byte_tokenizer(), 2) for _ in "ab"
    )
    assert first.cache_files and first.cache_files == second.cache_files
    other = group_into_blocks(Dataset.from_dict({"text": ["abcdeg"]}), build_byte_tokenizer(), 2)
    assert other.cache_files != first.cache_files and other[:] != first[:]


READERS = {
    "blocks": partial(group_into_blocks, tokenizer=build_byte_tokenizer(), block_size=2),
    "a joined file": partial(join_texts, separator=" "),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("value", [None, 5, 1.5, True, b"bytes", ["list"], {"a": "dict"}, date(2020, 1, 1)], ids=repr)
def test_a_value_that_is_no_text_is_named_with_its_row_and_column(value, read):
    told = r"column 'story' holds .*, not a text: correct the row or remove it"
    with pytest.raises(ValueError, match=f"^row 0: {told}"):
        read(Dataset.from_dict({"story": [value]}), column="story")
    if value is None:  # in any row, and an empty text is one
        with pytest.raises(ValueError, match=f"^row 1400: {told}"):
            read(Dataset.from_dict({"story": [*(["some text", ""] * 700), None]}), column="story")
