"""Paths given by users and paths in data files: each is the path of a local file, never a pattern or an address."""

import io
import os
import socket

import pyarrow
import pytest
from datasets import Audio, ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from pyarrow import parquet

from aft_hf.conversion import ConversionError, read_images
from aft_hf.data.fingerprint import sum_rows
from aft_hf.data.image_files import ImageError
from aft_hf.data.loading import HubImageColumn, ImageColumn, load_local, load_named, local_files


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


def picture(value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------ names of users

# Each name, and another file that it would match as a pattern.
NAMES = {
    "data[1]": "data1",
    "data*": "data_old",
    "da?a": "data",
    "[!x]": "y",
    "a::b": "a",
    "zip:::b": "zip:",
    "{a,b}": "a",
    ".hidden": "hidden",
    "__special": "special",
    "~": "home",
    "a b#c%20": "a b#c ",
    "-x": "x",
    "train-x": "test-x",
}


def write_file(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = Dataset.from_dict({"text": [text]})
    if path.suffix == ".parquet":
        parquet.write_table(rows.data.table, path)
    else:
        path.write_text({".csv": f"text\n{text}\n", ".jsonl": f'{{"text": "{text}"}}\n', ".txt": text}[path.suffix])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".txt"])
@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_is_no_pattern(tmp_path, name, suffix, streaming):
    write_file(tmp_path / f"{NAMES[name]}{suffix}", "another file")
    write_file(tmp_path / f"{name}{suffix}", "this file")
    rows = load_local(tmp_path / f"{name}{suffix}", streaming=streaming)
    assert [row["text"] for row in rows] == ["this file"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_folder_is_no_pattern(tmp_path, name):
    for folder, value in ((NAMES[name], 100), (name, 7)):
        (tmp_path / folder / "class").mkdir(parents=True)
        (tmp_path / folder / "class" / "1.png").write_bytes(picture(value))
        write_file(tmp_path / folder / "text.csv", f"text {value}")
    for images in ([row["image"] for row in load_local(tmp_path / name)], read_images(tmp_path / name, 5)):
        assert [image.getpixel((0, 0))[0] for image in images] == [7]
    assert load_local(tmp_path / name / "text.csv")["text"] == ["text 7"]


def test_a_file_that_changes_under_a_name_with_colons_is_read_again(tmp_path):
    for text in ("before", "thereafter"):
        write_file(tmp_path / "a::b.csv", text)
        assert load_local(tmp_path / "a::b.csv")["text"] == [text]


def test_images_to_convert_with_are_in_parquet_files_of_any_name(tmp_path):
    features = Features(image=ImageFeature())
    for name, value in (("data[1]", 7), ("data1", 100), ("a::b", 9)):
        rows = Dataset.from_dict({"image": [{"bytes": picture(value), "path": None}]}, features=features)
        rows.to_parquet(tmp_path / "rows.parquet")
        (tmp_path / "rows.parquet").rename(tmp_path / f"{name}.parquet")
    for name, value in (("data[1]", 7), ("a::b", 9)):
        (image,) = read_images(tmp_path / f"{name}.parquet", 5)
        assert image.getpixel((0, 0))[0] == value


@pytest.mark.parametrize("name", ["ds[1]", "d*", "d?", "a::b"])
def test_a_named_dataset_whose_path_would_be_a_pattern_is_refused(tmp_path, name):
    write_file(tmp_path / name / "train.csv", "text")
    with pytest.raises(ValueError, match="rename the directory"):
        load_named(str(tmp_path / name))


@pytest.mark.parametrize("key", ["data_files", "data_dir"])
@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x.csv", "zip://x.csv::http://127.0.0.1:9/x.zip"])
@pytest.mark.parametrize(("name", "end"), [("README.md", "---\n"), (".huggingface.yaml", "")])
def test_a_local_dataset_that_names_addresses_is_refused(tmp_path, name, end, key, address):
    write_file(tmp_path / "train.csv", "text")
    (tmp_path / name).write_text(f"---\nconfigs:\n- config_name: default\n  {key}: '{address}'\n{end}")
    for read in (load_named, local_files):
        with pytest.raises(ValueError, match=f"{name}: its configs name addresses"):
            read(str(tmp_path))


@pytest.mark.parametrize("name", ["http://127.0.0.1:9/x.csv", "file:///dev/zero", "zip://a.csv::http://127.0.0.1/a"])
def test_an_address_is_no_file(name):
    with pytest.raises(ValueError, match="no such file or folder"):
        load_local(name)
    with pytest.raises(ConversionError, match="no such file or folder"):
        read_images(name, 5)


# --------------------------------------------------------------------------------------------------- paths in the rows

PATHS = [
    "file:///dev/zero",
    "local:///dev/zero",
    "/dev/zero",
    "/proc/kmsg",
    "http://127.0.0.1:9/x.png",
    "https://example.com/x.png",
    "hf://datasets/a/b/x.png",
    "s3://a/x.png",
    "zip://x.png::http://127.0.0.1:9/x.zip",
    "zip://x.png::/dev/zero",
    "simplecache::http://127.0.0.1:9/x.png",
    "data:image/png;base64,AAAA",
    "",
    "a\0b",
    "a\nb",
    "x" * 5000,
    "PIPE",
    "LINK",
    "SPARSE",
    "FOLDER",
]


def file_of(tmp_path, path: str) -> str:
    """Return a path, after creating the file that it stands for."""
    made = tmp_path / "made.png"
    if path == "PIPE":
        os.mkfifo(made)
    elif path == "LINK":
        made.symlink_to("/dev/zero")
    elif path == "SPARSE":
        made.write_bytes(picture())
        os.truncate(made, 2**40)
    elif path == "FOLDER":
        made.mkdir()
    else:
        return path
    return str(made)


def write_rows(file, path: str):
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
    file = write_rows(tmp_path / "rows.parquet", file_of(tmp_path, path))
    rows = load_local(file)
    assert rows[0]["image"].size == (4, 4)
    for read in (
        lambda: rows[1],
        lambda: sum_rows(rows, "image", "label"),
        lambda: list(load_local(file, streaming=True)),
        lambda: load_named(str(file))["train"][1],
    ):
        with pytest.raises(ImageError) as error:
            read()
        assert "\n" not in str(error.value)
    with pytest.raises(ConversionError, match=r"rows\.parquet, row 1"):
        list(read_images(file, 5))


def test_a_regular_file_may_be_named_like_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "x.png").write_bytes(picture(7))
    file = write_rows(tmp_path / "rows.parquet", "http://x.png")
    assert load_local(file)[1]["image"].getpixel((0, 0))[0] == 7


@pytest.mark.parametrize("path", ["hf://datasets/a/b@main/x.png", "zip://x.png::hf://datasets/a/b@main/x.zip"])
def test_a_stream_from_the_hub_reads_files_there(path, monkeypatch):
    opened = []
    monkeypatch.setattr("fsspec.open", lambda name, mode: opened.append(name) or io.BytesIO(picture()))
    assert HubImageColumn().decode_example({"bytes": None, "path": path}).size == (4, 4)
    assert opened == [path]
    with pytest.raises(ImageError, match="no such file"):
        ImageColumn().decode_example({"bytes": None, "path": path})


@pytest.mark.parametrize(
    "path",
    ["http://127.0.0.1:9/x.png", "zip://x::http://127.0.0.1:9/hf://datasets/x", "file:///dev/zero", "/dev/zero"],
)
def test_a_stream_from_the_hub_reads_no_other_addresses(path):
    with pytest.raises(ImageError):
        HubImageColumn().decode_example({"bytes": None, "path": path})


@pytest.mark.parametrize("content", [None, b""])
@pytest.mark.parametrize("kind", ["binary", "large_binary", "null"])
def test_structs_of_bytes_and_path_are_images_for_all_readers(content, kind, tmp_path):
    (tmp_path / "x.png").write_bytes(picture(7))
    rows = [{"bytes": content, "path": str(tmp_path / "x.png")}]
    if kind == "null":
        rows[0]["bytes"] = None
    else:
        rows.append({"bytes": picture(7), "path": None})
    bytes_type = getattr(pyarrow, kind)()
    struct = pyarrow.struct([("bytes", bytes_type), ("path", pyarrow.string())])
    parquet.write_table(pyarrow.table({"image": pyarrow.array(rows, struct)}), tmp_path / "rows.parquet")
    for images in (
        load_local(tmp_path / "rows.parquet")["image"],
        [row["image"] for row in load_local(tmp_path / "rows.parquet", streaming=True)],
        read_images(tmp_path / "rows.parquet", 5),
    ):
        assert [image.getpixel((0, 0))[0] for image in images] == [7] * len(rows)
    assert sum_rows(load_local(tmp_path / "rows.parquet"), "image", "image")
