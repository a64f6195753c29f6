"""Loading datasets from folders and files, and holding out validation data."""

import json
import os

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from PIL import Image
from transformers.testing_utils import CaptureLogger

from aft_hf.data.loading import hold_out, load_local, load_splits, logger, require_column


pytestmark = pytest.mark.usefixtures("datasets_cache")


def save_images(root, names):
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (i, 0, 0)).save(root / name)
    return root


def test_a_folder_of_images_has_a_class_per_folder(tmp_path):
    rows = load_local(save_images(tmp_path / "images", ["cat/1.png", "cat/2.png", "dog/1.png"]))
    assert rows.features["label"] == ClassLabel(names=["cat", "dog"])
    assert sorted(zip(rows["label"], (image.getpixel((0, 0))[0] for image in rows["image"]))) == [
        (0, 0),
        (0, 1),
        (1, 2),
    ]


def test_names_of_files_and_folders_that_sound_like_splits_are_only_names(tmp_path):
    rows = load_local(save_images(tmp_path / "train", ["test/train_1.png", "test/test_2.png", "validation/dev.png"]))
    assert len(rows) == 3 and rows.features["label"].names == ["test", "validation"]


def test_files_are_read_by_their_ending(tmp_path):
    rows = {"text": ["one", "two"], "label": [1, 0]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict(rows).to_csv(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in Dataset.from_dict(rows)))
    for ending in ("parquet", "csv", "jsonl"):
        assert load_local(tmp_path / f"a.{ending}")[:] == rows


def test_a_text_file_is_one_text_with_its_line_breaks(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \nthree\n")
    assert load_local(tmp_path / "a.txt")[:] == {"text": ["one\n\n two \nthree\n"]}


def test_splits_come_from_files_or_from_a_dataset_whose_test_split_serves_to_validate(tmp_path):
    for split, count in (("train", 3), ("test", 2), ("other", 1)):
        Dataset.from_dict({"text": ["a"] * count}).to_json(tmp_path / f"{split}.jsonl")
    files = load_splits(train=str(tmp_path / "train.jsonl"), validation=str(tmp_path / "test.jsonl"))
    assert files.num_rows == {"train": 3, "validation": 2}
    assert load_splits(train=str(tmp_path / "train.jsonl")).num_rows == {"train": 3}
    assert load_splits(validation=str(tmp_path / "test.jsonl")).num_rows == {"validation": 2}
    (tmp_path / "other.jsonl").unlink()
    assert load_splits(str(tmp_path)).num_rows == {"train": 3, "validation": 2}


@pytest.mark.parametrize(
    "arguments", [{}, {"dataset_name": "x", "train": "y"}, {"dataset_name": "x", "validation": "y"}]
)
def test_data_comes_from_one_place(arguments):
    with pytest.raises(ValueError, match="either dataset_name, or train and validation"):
        load_splits(**arguments)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.csv", None, "missing.csv: no such file or folder"),
        ("a.tar", b"", "ends in one of .parquet, .csv, .json, .jsonl, .txt"),
        ("a.parquet", b"no parquet", "a.parquet: cannot be read as a file of type parquet"),
        ("a.json", b"{no json", "a.json: cannot be read as a file of type json"),
        ("a.txt", b"caf\xe9", "a.txt: cannot be read as a file of type txt"),
        ("a.jsonl", b"", r"a.jsonl: cannot be read as a file of type jsonl \(it has no rows\)"),
        ("a.csv", b"text\n", r"a.csv: cannot be read as a file of type csv \(it has no rows\)"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_local(tmp_path / name)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "text", ["one\r\ntwo\r\n", "one\rtwo", "\r\n\r\r\n\n", "\ufeff\x85\u2028\0é 🙂\r", ""], ids=repr
)
def test_a_text_file_is_one_row_with_all_its_bytes(text, streaming, tmp_path):
    (tmp_path / "a.txt").write_bytes(text.encode())
    rows = load_local(tmp_path / "a.txt", streaming=streaming)
    assert rows.column_names == ["text"] and [row["text"] for row in rows] == [text]


def test_a_text_file_that_was_changed_is_read_again(tmp_path):
    path = tmp_path / "a.txt"
    for number, text in enumerate(["one", "two"]):
        path.write_text(text)
        os.utime(path, (number, number))
        assert load_local(path)["text"][:] == [text]


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(ValueError, match="no images in it; give a folder of"):
        load_local(tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", ["text\nhello, world\n", "text\na, b, c\nd\n", "text,n\none, two,1\n"])
def test_a_csv_with_more_cells_than_its_header_is_refused(content, streaming, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=r"a\.csv: .*rows have more cells than the header: put texts with commas in"):
        load_local(tmp_path / "a.csv", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("texts", [("007", "abc"), ("abc", "007"), ("1.50", "abc"), ("true", "007"), ("1", "1.50x")])
@pytest.mark.parametrize("count", [10_000, 550_000])
def test_texts_of_a_csv_are_kept_however_many_rows_look_like_numbers(texts, count, streaming, tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "".join(f"{text}\n" * count for text in texts))
    rows = load_local(tmp_path / "a.csv", streaming=streaming)
    if streaming:
        assert next(iter(rows)) == {"text": texts[0]}
    else:
        assert [rows[0]["text"], rows[-1]["text"]] == list(texts) and len(rows) == 2 * count


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("value", [5, ["two"], {"a": "x"}, None], ids=repr)
@pytest.mark.parametrize("first", ["one", {"a": 1}])
def test_a_column_of_mixed_values_is_kept(first, value, streaming, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (first, value)))
    rows = load_local(tmp_path / "a.jsonl", streaming=streaming)
    assert [row["text"] for row in rows] == [first, value]


# Held-out validation data


def numbers(count: int) -> DatasetDict:
    return DatasetDict(train=Dataset.from_dict({"x": list(range(count))}))


def test_a_share_of_the_rows_is_held_out_the_same_ones_each_time():
    splits = hold_out(numbers(20), 0.25)
    assert splits.num_rows == {"train": 15, "validation": 5}
    assert sorted([*splits["train"]["x"], *splits["validation"]["x"]]) == list(range(20))
    assert hold_out(numbers(20), 0.25)["validation"][:] == splits["validation"][:] != {"x": [15, 16, 17, 18, 19]}
    assert hold_out(splits, 0.5) is splits
    assert hold_out(numbers(20), 0).num_rows == {"train": 20}


def test_rows_that_are_held_out_are_told():
    with CaptureLogger(logger) as log:
        hold_out(numbers(20), 0.25)
    assert "no validation data: 5 of the 20 training samples are held out" in log.out
    with CaptureLogger(logger) as log:
        hold_out(DatasetDict(numbers(20), validation=numbers(3)["train"]), 0.25)
    assert log.out == ""


def test_without_shuffling_the_last_rows_are_held_out():
    splits = hold_out(numbers(20), 0.25, shuffle=False)
    assert splits["validation"]["x"][:] == [15, 16, 17, 18, 19] and splits["train"]["x"][:] == list(range(15))


@pytest.mark.parametrize("share", [1, -0.5, 7, float("nan")])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match=f"validation_share must be between 0 and 1, got {share}"):
        hold_out(numbers(20), share)


def test_a_single_row_cannot_be_divided():
    with pytest.raises(ValueError, match="give validation data"):
        hold_out(numbers(1), 0.5)


def test_a_column_that_is_not_there_is_told_with_those_that_are():
    require_column(numbers(1), "x", "--text_column")
    with pytest.raises(ValueError, match="--text_column: the train data has no column 'y', it has 'x'"):
        require_column(numbers(1), "y", "--text_column")
