"""Byte-level datasets: texts as one file, the windows of a file, the labels that count, and memory use."""

import json
import os
import tracemalloc
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import CTRLTokenizer

from aft_hf import build_byte_tokenizer
from aft_hf.data import text
from aft_hf.data.samples import SampleKey
from aft_hf.data.text import Windows, join_texts, split_bytes


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(i * 7 % 256 for i in range(100)))
    return path


def test_enwik8_is_split_as_usual_and_other_files_by_the_same_shares():
    million = 10**6
    assert split_bytes(100 * million) == {
        "train": (0, 90 * million),
        "validation": (90 * million, 95 * million),
        "test": (95 * million, 100 * million),
    }
    assert split_bytes(1001) == {"train": (0, 900), "validation": (900, 950), "test": (950, 1001)}


@given(st.integers(0, 90), st.integers(2, 100), st.integers(1, 40), st.data())
def test_evaluated_windows_predict_each_byte_but_the_first_once_with_the_longest_context(
    tmp_path_factory, start, length, seq_len, data
):
    file = tmp_path_factory.mktemp("windows") / "file"
    content = bytes(i * 7 % 256 for i in range(start + length))
    file.write_bytes(content + b"xx")
    stride, span = data.draw(st.integers(1, seq_len)), (start, start + length)
    windows, position = Windows(file, span, seq_len=seq_len, stride=stride), start
    for i in range(len(windows)):
        ids, labels = windows[i]["input_ids"], windows[i]["labels"]
        assert ids.shape == labels.shape == (seq_len,)
        for t in range(seq_len):
            if labels[t] != -100:
                position += 1
                assert labels[t] == content[position]
                context = min(t + 1, position - start)
                assert context == position - start or context > seq_len - stride
                assert bytes(ids[t + 1 - context : t + 1].tolist()) == content[position - context : position]
    assert position == span[1] - 1


@pytest.mark.parametrize("size", (17, 18, 32, 33, 49))
def test_training_windows_of_a_file_of_any_size_are_full_and_reach_its_first_and_last_bytes(tmp_path, size):
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    windows, reached = Windows(tmp_path / "file", seq_len=16, seed=3), set()
    for epoch in range(100):
        for i in range(len(windows)):
            window = windows[SampleKey(epoch, i)]
            assert torch.equal(window["labels"], window["input_ids"] + 1)
            reached |= {int(window["input_ids"][0]), int(window["labels"][-1])}
    assert min(reached) == 0 and size - 16 <= max(reached) < size  # no window would fit behind the last one


def test_too_few_bytes_and_strides_that_leave_some_out_are_errors(file):
    with pytest.raises(ValueError, match="1 bytes are too few"):
        Windows(file, (5, 6), seq_len=16)
    with pytest.raises(ValueError, match="16 bytes are too few for windows of seq_len=16"):
        Windows(file, (0, 16), seq_len=16, seed=0)
    for stride in (0, 17):
        with pytest.raises(ValueError, match=rf"must be in 1 \.\. 16, got {stride}"):
            Windows(file, seq_len=16, stride=stride)


def test_little_of_two_gigabytes_is_in_memory_at_a_time(tmp_path):
    size, length = 2**31, 2**14
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)  # a sparse file: it takes no disk space and reads as zeros
    windows = Windows(tmp_path / "large", seq_len=length)
    assert len(windows) == size // length
    tracemalloc.start()
    for i in range(0, len(windows), len(windows) // 8):
        windows[i]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20


def test_a_text_of_one_line_is_tokenized_in_parts_that_end_with_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PART", 40)
    (tmp_path / "line").write_text(line := "naïve 文字 " * 99)
    parts = [part.decode() for part in text._read_parts(tmp_path / "line", 0, len(line.encode()))]
    assert "".join(parts) == line and max(map(len, parts)) <= 40
    assert all(part[0] == " " for part in parts[1:])


def test_a_text_of_which_only_the_content_changes_is_tokenized_again(tmp_path):
    for line in ("one line", "one more"):
        (tmp_path / "line").write_text(line)
        os.utime(tmp_path / "line", (0, 0))
        path, _ = text.tokenize_file(tmp_path / "line", (0, 8), build_byte_tokenizer())
        assert np.fromfile(path, text.TOKEN_DTYPE).tolist() == list(line.encode())


def test_a_text_is_tokenized_again_by_a_tokenizer_of_the_same_vocabulary_with_other_rules(tmp_path):
    (tmp_path / "line").write_text("abc abc")
    (tmp_path / "vocab").write_text(
        json.dumps({word: i for i, word in enumerate(("a@@", "b@@", "c", "ab@@", "bc", "<unk>"))})
    )
    for merges, expected in (("a b", [3, 2]), ("b c</w>", [0, 4])):
        (tmp_path / "merges").write_text(f"#version\n{merges}\n")
        tokenizer = CTRLTokenizer(tmp_path / "vocab", tmp_path / "merges")
        path, _ = text.tokenize_file(tmp_path / "line", (0, 7), tokenizer)
        assert np.fromfile(path, text.TOKEN_DTYPE).tolist() == 2 * expected


def test_a_line_break_is_between_all_texts_of_a_file_which_is_written_again_when_they_change():
    texts = [f"é{i}" for i in range(2001)]  # they are written a thousand at a time
    path = join_texts(Dataset.from_dict({"text": texts}), "text")
    assert path.read_text(encoding="utf-8") == "\n".join(texts)
    written = path.stat().st_mtime_ns
    assert join_texts(Dataset.from_dict({"text": texts}), "text") == path  # it is written once
    assert path.stat().st_mtime_ns == written
    assert join_texts(Dataset.from_dict({"text": texts[:-1]}), "text") != path


@pytest.mark.parametrize("value", [None, 5, 1.5, True, b"bytes", ["list"], {"a": "dict"}, date(2020, 1, 1)], ids=repr)
def test_a_value_that_is_no_text_is_named_with_its_row_and_column(value):
    told = r"column 'story' holds .*, not a text: correct the row or remove it"
    with pytest.raises(ValueError, match=f"^row 0: {told}"):
        join_texts(Dataset.from_dict({"story": [value]}), "story")
    if value is None:  # in any row, and an empty text is one
        with pytest.raises(ValueError, match=f"^row 1400: {told}"):
            join_texts(Dataset.from_dict({"story": [*(["some text", ""] * 700), None]}), "story")
