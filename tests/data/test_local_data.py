"""Local data: folders of images and files of rows, which all commands read alike. A path is never a pattern or an
address."""

import json
import os
import shutil
import socket
from pathlib import Path

import pyarrow
import pytest
from datasets import Audio, ClassLabel, Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from hypothesis import given
from hypothesis import strategies as st
from image_contents import encoded, picture, write_rows
from PIL import Image
from pyarrow import parquet
from transformers.testing_utils import CaptureLogger

from aft_hf.atomic_files import sha256
from aft_hf.conversion import ImagesOnDisk, read_images
from aft_hf.data.image_files import ImageError, list_images
from aft_hf.data.loading import hold_out, load_local, load_named, load_splits, logger, write_text
from aft_hf.data.samples import RowSamples, image_of, sum_rows
from aft_hf.data.text import join_texts


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(autouse=True)
def no_requests(monkeypatch):
    """Count the requests to other machines, and refuse them."""
    requests = []

    def refuse(*arguments, **options):
        requests.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not requests


# Folders of images

ALL = ["cat/1.png", "cat/2.jpg", "dog/1.png", "dog/3.PNG"]


@pytest.fixture
def folder(tmp_path):
    """Two classes with two images each."""
    for i, name in enumerate(ALL):
        save(tmp_path / "images" / name, i)
    return tmp_path / "images"


def save(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (40 * value, 0, 0)).save(path, path.suffix[1:].lower().replace("jpg", "jpeg"))


def names(folder):
    """Return the names of the images that all readers find, and check that they agree."""
    actual = list_images(folder)
    assert len(ImagesOnDisk(folder)) == len(actual)
    paths = load_splits(train=str(folder))["train"].cast_column("image", ImageFeature(decode=False))
    assert [row["image"]["path"] for row in paths] == [str(path) for path in actual]
    return [path.relative_to(folder).as_posix() for path in actual]


LEFT_OUT = ["._1.png", "cat/.hidden.png", ".DS_Store", "Thumbs.db", "cat/.ipynb_checkpoints/1.png", ".git/1.png"]
LEFT_OUT += ["__MACOSX/cat/1.png", ".cache/train.parquet", "cat/@eaDir/1.png/thumbnail.png", "$RECYCLE.BIN/1.png"]
LEFT_OUT += ["notes.txt", "cat/figure.eps", "metadata.csv"]


def test_hidden_files_system_files_and_documents_are_left_out(folder):
    for name in LEFT_OUT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"no image")
    assert names(folder) == ALL
    assert names(folder.rename(folder.parent / ".images")) == ALL  # a folder that is itself hidden


@pytest.mark.parametrize("depth", [1, 5])
def test_the_class_is_the_folder_of_an_image_at_any_depth(folder, depth):
    outer = folder.parent / "train"  # a name that sounds like a split is only a name
    shutil.move(folder, outer.joinpath(*map(str, range(depth - 1)), "images"))
    rows = load_local(outer)
    assert rows.features["label"].names == ["cat", "dog"] and rows["label"] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["4.png", "dog/more/4.png"])
def test_where_the_class_is_unclear_an_image_is_named_and_labels_are_refused(folder, name):
    save(folder / name)
    with pytest.raises(ValueError, match=r"the classes are unclear: .*/CLASS/IMAGE, unlike .*4\.png") as error:
        load_local(folder)
    assert "\n" not in str(error.value)
    rows = load_local(folder, labeled=False)
    assert list(rows.features) == ["image"] and len(list(rows)) == 5


def test_linked_folders_are_read_under_each_name_but_not_inside_themselves(folder, tmp_path):
    save(tmp_path / "elsewhere" / "7.png")
    for name in ("bird", "fowl"):
        (folder / name).symlink_to(tmp_path / "elsewhere")
    (folder / "cat" / "loop").symlink_to(folder)
    assert names(folder) == ["bird/7.png", *ALL, "fowl/7.png"]


@pytest.mark.parametrize("kind", ["pipe", "device", "missing"])
@pytest.mark.parametrize("suffix", [".png", ".parquet"])
def test_pipes_and_broken_links_among_images_are_refused_by_name(folder, kind, suffix):
    path = folder / "cat" / f"odd{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else folder / "nowhere")
    told = rf"odd\{suffix}: {'no such file' if kind == 'missing' else 'is not a regular file'}"
    for read in (load_local, ImagesOnDisk):
        with pytest.raises(ImageError, match=told):
            read(folder)


def test_parquet_files_in_a_folder_are_read_in_order_and_not_beside_images(tmp_path, tmp_path_factory):
    for name, label in (("b.parquet", 2), ("a.PARQUET", 1), (".c.parquet", 3), ("deep/er/d.parquet", 4)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict({"label": [label]}).to_parquet(tmp_path / name)
    assert load_local(tmp_path)["label"] == [1, 2, 4]
    for read in (load_local, ImagesOnDisk):
        with pytest.raises(ValueError, match="no images in it; give a folder of"):
            read(tmp_path_factory.mktemp("empty"))
    save(tmp_path / "cat/1.png")
    for read in (load_local, ImagesOnDisk):
        with pytest.raises(ValueError, match=r"has both images .*cat/1.png\) and parquet files .*a.PARQUET\)"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("names", "of_splits"),
    [
        (["train-00000-of-00001", "test-00000-of-00001"], True),
        (["train/0", "Test/0"], True),
        (["train-00000-of-00002", "train-00001-of-00002"], False),
        (["data/trained", "data/tested"], False),
        (["digits_train", "digits_test"], True),
        (["training0/a", "dev0/a"], True),
        (["train/a", "train/test_site"], False),
    ],
    ids=str,
)
def test_parquet_files_of_several_splits_are_not_joined(tmp_path, names, of_splits):
    for name in names:
        Dataset.from_dict({"text": [name]}).to_parquet(tmp_path / f"{name}.parquet")
    if of_splits:
        with pytest.raises(ValueError, match=r"its files are of several splits .*: give a folder or file of one"):
            load_local(tmp_path)
    assert {*load_local(tmp_path, joined=of_splits)["text"]} == {*names}


@pytest.mark.parametrize("split", ["train", "val", "Test"])
@pytest.mark.parametrize("outer", ["", "deep/"])
def test_a_folder_of_splits_is_refused(folder, outer, split):
    shutil.copytree(folder, folder.parent / "ds" / outer / "other")
    shutil.copytree(folder, folder.parent / "ds" / outer / split)
    message = f"ds: its folders are splits, not classes: give one of .*/ds/{outer}{split}, with a folder for"
    with pytest.raises(ValueError, match=message):
        load_local(folder.parent / "ds")
    assert len(load_local(folder.parent / "ds" / outer / split)) == 4


@pytest.mark.parametrize("labeled", [True, False])
def test_a_folder_of_splits_without_classes_is_refused(tmp_path, labeled):
    for name in ("train/0.png", "Test/1.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"its folders are splits, not classes: give one of .*Test, .*train, with"):
        load_local(tmp_path, labeled=labeled)
    assert len(load_local(tmp_path / "train", labeled=False)) == 1
    (tmp_path / "Test").rename(tmp_path / "bus")  # a class beside the class train
    assert len(load_local(tmp_path, labeled=labeled)) == 2


def test_folders_without_images_are_named_since_they_are_no_classes(folder):
    with CaptureLogger(logger) as log:
        load_local(folder)
        assert not log.out
        (folder / "fox").mkdir()
        (folder / ".cache").mkdir()
        (folder / "fox" / "0.heic").touch()
        rows = load_local(folder)
    assert "fox: no images in it, so it is no class" in log.out and ".cache" not in log.out
    assert "fox" not in rows.features["label"].names


def test_a_dataset_of_save_to_disk_is_refused_with_advice(tmp_path):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved: is a dataset of save_to_disk; save it as a file"):
        load_named(str(tmp_path / "saved"))


@pytest.mark.parametrize(("limit", "expected"), [(3, [0, 3, 6]), (5, [0, 2, 4, 6, 8]), (256, list(range(10)))])
@pytest.mark.parametrize("kind", ["files", "table"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_to_convert_with_are_read_evenly_in_rgb(tmp_path, kind, limit, expected, mode):
    contents = [encoded("PNG", Image.new("RGB", (4, 4), (i, i, i)).convert(mode)) for i in range(10)]
    if kind == "table":
        write_rows(tmp_path / "a.parquet", contents)
    else:
        for i, content in enumerate(contents):
            (tmp_path / f"{i}.png").write_bytes(content)
    images = list(read_images(tmp_path, limit))
    assert [image.getpixel((0, 0)) for image in images] == [(i, i, i) for i in expected]


# Files of rows


def write_file(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = Dataset.from_dict({"text": [text]})
    if path.suffix == ".parquet":
        parquet.write_table(rows.data.table, path)
    else:
        path.write_text({".csv": f"text\n{text}\n", ".jsonl": f'{{"text": "{text}"}}\n', ".txt": text}[path.suffix])


@pytest.mark.parametrize("how", ["file", "named file", "named directory"])
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".txt"])
def test_files_are_read_by_their_ending_and_again_when_only_their_content_changes(suffix, how, tmp_path):
    file = tmp_path / f"train{suffix}"
    for text in ("the one", "another"):  # of equal length
        write_file(file, text)
        os.utime(file, (0, 0))
        name = str(tmp_path if how == "named directory" else file)
        rows = load_local(file) if how == "file" else load_named(name)["train"]
        assert rows.column_names == ["text"] and [row["text"] for row in rows] == [text]
        assert join_texts(rows, "text").read_text() == text


@pytest.mark.parametrize("packed", [False, True])
def test_labels_of_a_named_folder_of_images_are_read_again_when_only_their_content_changes(packed, folder, tmp_path):
    changed = [folder / "metadata.csv", *([tmp_path / "packed" / "images.zip"] if packed else [])]
    for label in (1, 2):
        changed[0].write_text("file_name,label\n" + "".join(f"{name},{label}\n" for name in ALL))
        if packed:
            shutil.make_archive(str(changed[1].with_suffix("")), "zip", folder)
        for file in changed:
            os.utime(file, (0, 0))
        assert set(load_named(str(changed[-1].parent))["train"]["label"]) == {label}


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
        ("a.csv", b"text\nhello, world\n", r"a\.csv: .*rows have more cells than the header: put texts with commas"),
        ("a.csv", b"text,n\none, two,1\n", r"a\.csv: .*rows have more cells than the header"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_local(tmp_path / name)


@given(text=st.text())
def test_a_text_file_is_one_row_with_all_its_bytes(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    assert load_local(path)["text"][:] == [text]


@pytest.mark.parametrize("texts", [("007", "abc"), ("abc", "007"), ("1", "1.50x")])
def test_texts_of_a_csv_are_kept_however_many_rows_look_like_numbers(texts, tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "".join(f"{text}\n" * 550_000 for text in texts))
    rows = load_local(tmp_path / "a.csv")
    assert [rows[0]["text"], rows[-1]["text"]] == list(texts) and len(rows) == 2 * 550_000


@pytest.mark.parametrize("value", [5, ["two"], {"a": "x"}, None], ids=repr)
def test_a_column_of_mixed_values_is_kept(value, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", value)))
    rows = load_local(tmp_path / "a.jsonl")
    assert [row["text"] for row in rows] == ["one", value]


# Splits


def numbers(count: int) -> DatasetDict:
    return DatasetDict(train=Dataset.from_dict({"x": list(range(count))}))


def test_splits_come_from_files_or_from_a_dataset_whose_test_split_serves_to_validate(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        Dataset.from_dict({"text": ["a"] * count}).to_json(tmp_path / f"{split}.jsonl")
    train, test = str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")
    assert load_splits(train=train, validation=test).num_rows == {"train": 3, "validation": 2}
    assert load_splits(validation=test).num_rows == {"validation": 2}
    assert load_splits(str(tmp_path)).num_rows == {"train": 3, "validation": 2}
    for path in ({"train": test}, {"dataset_name": test}):
        with pytest.raises(ValueError, match="has no configuration 'x'; leave it out"):
            load_splits(**path, dataset_config_name="x")
    for arguments in ({}, {"dataset_name": "x", "train": "y"}):
        with pytest.raises(ValueError, match=r"give either a dataset \(data.dataset, --dataset-name\), or a file"):
            load_splits(**arguments)


def test_a_share_of_the_rows_is_held_out_and_told_the_same_ones_each_time():
    with CaptureLogger(logger) as log:
        splits = hold_out(numbers(20), 0.25)
    assert "no validation data: 5 of the 20 training samples are held out" in log.out
    assert splits.num_rows == {"train": 15, "validation": 5}
    assert sorted([*splits["train"]["x"], *splits["validation"]["x"]]) == list(range(20))
    assert hold_out(numbers(20), 0.25)["validation"][:] == splits["validation"][:] != {"x": [15, 16, 17, 18, 19]}
    assert hold_out(splits, 0.5) is splits and hold_out(numbers(20), 0).num_rows == {"train": 20}
    with pytest.raises(ValueError, match="validation data cannot be held out, so give some"):
        hold_out(numbers(1), 0.25)


# Names given by users

# Each name, and another file that it would match as a pattern.
NAMES = {"data[1]": "data1", "data*": "data_old", "da?a": "data", "{a,b}": "a", ".hidden": "hidden"}
NAMES |= {"__special": "special", "~": "home", "a b#c%20": "a b#c ", "-x": "x", "train-x": "test-x"}


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".txt"])
@pytest.mark.parametrize("name", NAMES)
def test_file_names_with_wildcards_are_read_as_they_are(tmp_path, name, suffix):
    for each, text, value in ((NAMES[name], "another file", 100), (name, "this file", 7)):
        write_file(tmp_path / f"{each}{suffix}", text)
        (tmp_path / each / "class").mkdir(parents=True)
        (tmp_path / each / "class" / "1.png").write_bytes(picture(value))
    assert load_local(tmp_path / f"{name}{suffix}")["text"][:] == ["this file"]
    if suffix == ".parquet":
        for file, value in ((NAMES[name], 100), (name, 7)):
            write_rows(tmp_path / "rows", [picture(value)]).rename(tmp_path / f"{file}.parquet")
        folder, file = tmp_path / name, tmp_path / f"{name}.parquet"
        opened = [image_of(row, "image") for row in load_local(folder)]
        for images in (opened, read_images(folder, 5), read_images(file, 5)):
            assert [image.getpixel((0, 0))[0] for image in images] == [7]


@pytest.mark.parametrize("name", ["ds[1]", "d*", "d?", "a::b"])
def test_a_named_dataset_whose_path_would_be_a_pattern_is_refused(tmp_path, name):
    write_file(tmp_path / name / "train.csv", "text")
    with pytest.raises(ValueError, match="rename the directory"):
        load_named(str(tmp_path / name))
    if "::" in name:
        write_file(tmp_path / name / "train.parquet", "text")
        with pytest.raises(
            ValueError, match=r"a::b/train.parquet contains '::', which datasets reads as a chained URL; rename"
        ):
            load_local(tmp_path / name / "train.parquet")


@pytest.mark.parametrize("key", ["data_files", "data_dir"])
@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x.csv", "zip://x.csv::http://127.0.0.1:9/x.zip"])
@pytest.mark.parametrize(("name", "end"), [("README.md", "---\n"), (".huggingface.yaml", "")])
def test_a_local_dataset_that_names_addresses_is_refused(tmp_path, name, end, key, address):
    write_file(tmp_path / "train.csv", "text")
    (tmp_path / name).write_text(f"---\nconfigs:\n- config_name: default\n  {key}: '{address}'\n{end}")
    with pytest.raises(ValueError, match=f"{name}: its configs name addresses"):
        load_named(str(tmp_path))


@pytest.mark.parametrize(("name", "end"), [("README.md", "---\n"), (".huggingface.yaml", "")])
def test_a_local_dataset_whose_yaml_expands_is_refused(tmp_path, name, end):
    write_file(tmp_path / "train.csv", "text")
    lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefghij", "bcdefghijk")]
    (tmp_path / name).write_text("\n".join(["---", "a: &a [x]", *lines, "configs: *k", end]))
    with pytest.raises(ValueError, match=rf"{name}: not YAML that can be read: aliases \(\*\) are not supported"):
        load_named(str(tmp_path))


@pytest.mark.parametrize("name", ["http://127.0.0.1:9/x.csv", "file:///dev/zero", "zip://a.csv::http://127.0.0.1/a"])
def test_addresses_in_place_of_a_file_are_refused(name):
    for read in (load_local, lambda name: read_images(name, 5)):
        with pytest.raises(ValueError, match="no such file or folder"):
            read(name)


# Paths in rows

PATHS = ["file:///dev/zero", "/dev/zero", "/proc/kmsg", "http://127.0.0.1:9/x.png", "hf://datasets/a/b/x.png"]
PATHS += ["zip://x.png::http://127.0.0.1:9/x.zip", "zip://x.png::/dev/zero", "data:image/png;base64,AAAA", ""]
PATHS += ["a\0b", "a\nb", "x" * 5000, "PIPE", "LINK", "SPARSE", "FOLDER"]


def file_of(tmp_path, path: str) -> str:
    """Return a path, after creating the file that it stands for."""
    made = tmp_path / "made.png"
    make = {
        "PIPE": lambda: os.mkfifo(made),
        "LINK": lambda: made.symlink_to("/dev/zero"),
        "SPARSE": lambda: (made.write_bytes(picture()), os.truncate(made, 2**40)),
        "FOLDER": made.mkdir,
    }
    if path not in make:
        return path
    make[path]()
    return str(made)


def write_paths(file, path: str):
    """Write rows of a good image and one by its path, and the path in columns of other media, too."""
    storage = {"bytes": Value("binary"), "path": Value("string")}
    stored = Features(image=storage, label=ClassLabel(names=["a"]), sound=storage, more=List(storage))
    by_path = {"bytes": None, "path": path}
    rows = {"image": [{"bytes": picture(), "path": None}, by_path], "label": [0, 0]}
    rows |= {"sound": [by_path] * 2, "more": [[by_path]] * 2}
    declared = Features(image=ImageFeature(), label=stored["label"], sound=Audio(), more=List(ImageFeature()))
    table: pyarrow.Table = Dataset.from_dict(rows, features=stored).data.table
    parquet.write_table(table.replace_schema_metadata(declared.arrow_schema.metadata), file)
    return file


@pytest.mark.parametrize("path", PATHS, ids=[repr(path[:40]) for path in PATHS])
def test_the_path_of_an_image_in_a_row_is_that_of_a_regular_file(tmp_path, path):
    file = write_paths(tmp_path / "rows.parquet", file_of(tmp_path, path))
    rows = load_local(file)
    assert image_of(rows[0], "image").size == (4, 4)
    named = load_named(str(file))["train"]
    reads = [lambda: image_of(rows[1], "image"), lambda: image_of(named[1], "image")]
    for read in (*reads, lambda: sum_rows(rows, "image", "label")):
        with pytest.raises(ImageError) as error:
            read()
        assert "\n" not in str(error.value)
    with pytest.raises(ImageError, match=r"rows\.parquet, row 1"):
        list(read_images(file, 5))


@pytest.mark.parametrize("kind", ["binary", "large_binary", "null"])
def test_structs_of_bytes_and_path_are_images_for_all_readers(kind, tmp_path):
    path = tmp_path / "rows.parquet"
    (tmp_path / "x.png").write_bytes(picture(7))
    rows = [{"bytes": None, "path": str(tmp_path / "x.png")}]
    rows += [] if kind == "null" else [{"bytes": picture(7), "path": None}]
    struct = pyarrow.struct([("bytes", getattr(pyarrow, kind)()), ("path", pyarrow.string())])
    parquet.write_table(pyarrow.table({"image": pyarrow.array(rows, struct)}), path)
    for images in ([image_of(row, "image") for row in load_local(path)], read_images(path, 5)):
        assert [image.getpixel((0, 0))[0] for image in images] == [7] * len(rows)


def test_of_several_columns_of_images_the_one_named_image_is_read_or_none(tmp_path):
    images = {name: [{"bytes": picture(value), "path": None}] for name, value in (("mask", 1), ("image", 7))}
    rows = Dataset.from_dict(images, Features(mask=ImageFeature(), image=ImageFeature()))
    rows.to_parquet(path := tmp_path / "rows.parquet")
    assert ImagesOnDisk(path)[0].getpixel((0, 0))[0] == 7
    rows.rename_column("image", "photo").to_parquet(path)
    with pytest.raises(ValueError, match=r"rows\.parquet: several columns hold images: mask, photo; name the one"):
        ImagesOnDisk(path)
    rows.remove_columns("image").to_parquet(path)
    assert ImagesOnDisk(path)[0].getpixel((0, 0))[0] == 1


# Columns of files and of paths


def write_column(file, values, kind="string"):
    table = pyarrow.table({"image": pyarrow.array(values, getattr(pyarrow, kind)()), "label": [0] * len(values)})
    if file.suffix == ".parquet":
        parquet.write_table(table, file)
    else:
        write = Dataset.to_csv if file.suffix == ".csv" else Dataset.to_json
        write(Dataset(table), file)
    return load_local(file)


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".parquet", kind) for kind in ("binary", "large_binary", "string", "large_string")]
    + [(".csv", "string"), (".jsonl", "string")],
)
def test_columns_of_whole_files_or_of_their_paths_are_images(suffix, kind, tmp_path, monkeypatch):
    (tmp_path / "1.png").write_bytes(picture(7))
    (tmp_path / "2.png").write_bytes(picture(9))
    monkeypatch.chdir(tmp_path)
    stored = [picture(7), picture(9)] if "binary" in kind else [str(tmp_path / "1.png"), "2.png"]
    rows = write_column(tmp_path / f"rows{suffix}", stored, kind)
    samples = RowSamples(rows, lambda row, key: image_of(row, "image"), ["image", "label"])
    assert [image.getpixel((0, 0))[0] for image in samples] == [7, 9]
    if suffix == ".parquet":
        for images in (ImagesOnDisk(tmp_path / "rows.parquet"), read_images(tmp_path / "rows.parquet", 5)):
            assert [image.getpixel((0, 0))[0] for image in images] == [7, 9]
    before = samples.fingerprint()
    contents = [{"bytes": content, "path": None} for content in (picture(7), picture(9))]
    decoded = Dataset.from_dict(
        {"image": contents, "label": [0, 0]}, Features(image=ImageFeature(), label=Value("int64"))
    )
    assert before == sum_rows(decoded, "image", "label")
    (tmp_path / "2.png").write_bytes(picture(8))
    assert (samples.fingerprint() == before) == ("binary" in kind)


@pytest.mark.parametrize("path", PATHS, ids=[repr(path[:40]) for path in PATHS])
def test_a_path_in_a_column_of_texts_is_that_of_a_regular_file(tmp_path, path):
    rows = write_column(tmp_path / "rows.parquet", [file_of(tmp_path, path)])
    samples = RowSamples(rows, lambda row, key: image_of(row, "image"), ["image"])
    for read in (lambda: samples[0], samples.fingerprint, lambda: list(read_images(tmp_path / "rows.parquet", 5))):
        with pytest.raises(ImageError) as error:
            read()
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("value", [5, [1, 2], {"x": 1}, True, b"no image", "no file", None], ids=repr)
def test_a_cell_that_holds_no_image_is_refused_with_its_row_and_column(tmp_path, value):
    rows = Dataset.from_dict({"image": [value]})
    samples = RowSamples(rows, lambda row, key: image_of(row, "image"), ["image"])
    told = {bytes: "cannot be read as an image", str: "no file: no such file in the working directory"}
    other = "has no image in column 'image'" + ("" if value is None else " but .*: give a column of images, of image")
    parquet.write_table(rows.data.table, path := tmp_path / "rows.parquet")
    for images, place in ((samples, "^row 0"), (ImagesOnDisk(path), f"^{path}, row 0")):
        with pytest.raises(ImageError, match=f"{place}: .*{told.get(type(value), other)}"):
            images[0]
    parquet.write_table(rows.rename_column("image", "picture").data.table, path)
    with pytest.raises(ValueError, match=r"rows\.parquet: no column holds images: picture"):
        ImagesOnDisk(path)


def test_the_generated_text_is_that_of_earlier_versions_so_that_their_runs_resume(tmp_path):
    digest = "e2c08afe5acf9154ef280df6fcdab6d8fd1f221ed0387fd2e96d6b34947927f1"
    assert sha256(Path(write_text(tmp_path))) == digest
