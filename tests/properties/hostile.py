"""Unexpected JSON values and malformed files, and the commands that read them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


MISSING = object()
VALUES = [None, True, 0, -1, 7, 0.5, math.nan, math.inf, 10**9, 10**400, "text", "", MISSING]
VALUES += [[1], [], [[["text"]]], {"a": 1}, {}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
NO_JSON = {
    "an empty file": b"",
    "half an object": b'{"a": [1, ',
    "invalid UTF-8": b'{"a": "\xff\xfe"}',
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94K\x01a.",
    "100,000 lists": b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    "an integer of 5,000 digits": b'{"a": ' + b"1" * 5_000 + b"}",
}


# For each command, the directory that it reads a copy of, and the files that the tests damage in this copy.
READERS = {
    "evaluate text": ("text", ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")),
    "evaluate image": ("image", ("config.json", "preprocessor_config.json")),
    "evaluate vit": ("vit", ("config.json", "preprocessor_config.json")),
    "evaluate shards": ("shards", ("model.safetensors.index.json",)),
    "convert vit": ("vit", ("config.json", "preprocessor_config.json")),
    "convert shards": ("shards", ("model.safetensors.index.json",)),
    "publish text": ("text", ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")),
    "publish image": ("image", ("config.json", "results.json", "all_results.json", "preprocessor_config.json")),
    "publish converted": ("converted", ("conversion_report.json",)),
    "train": (".", ("recipe.yaml",)),
    "visualize text": ("text", ("config.json", "tokenizer_config.json", "tokenizer.json")),
    "visualize image": ("image", ("config.json", "preprocessor_config.json")),
}


def arguments(reader: str, root: Path, directory: Path) -> list[str]:
    """Return the arguments of `aft-hf` for a command that reads `directory` and the data in `root`."""
    command, _, name = reader.partition(" ")
    if command == "evaluate":
        data = [str(root / "text.txt"), "--block-size", "8"] if name == "text" else [str(root / "images")]
        return ["evaluate", str(directory), *data]
    if command == "convert":
        return ["convert", str(directory), str(directory.parent / "out"), "--kernel-size", "3", "--num-heads", "2"]
    if command == "publish":
        return ["publish", str(directory), "me/tiny", "--dry-run"]
    if command == "visualize":
        inputs = ["--text", "abc"] if name == "text" else ["--images", str(root / "images")]
        return ["visualize", str(directory), "keys", *inputs, "--out", str(directory / "keys.png")]
    return ["train", str(directory / "recipe.yaml"), "--print-config", "--smoke"]


def with_value(content: Any, path: tuple, value: Any) -> Any:
    """Return a copy of nested content with `value` at `path`; the value MISSING removes the entry."""
    if not path:
        return None if value is MISSING else value
    copy = dict(content) if isinstance(content, dict) else list(content)
    if len(path) == 1 and value is MISSING:
        del copy[path[0]]
    else:
        inside = copy.get(path[0]) if isinstance(copy, dict) else copy[path[0]]
        copy[path[0]] = with_value(inside, path[1:], value)
    return copy


def places(content: Any, depth: int = 3, prefix: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each value in nested content, down to `depth` levels; of a list, only of the first value."""
    yield prefix
    if depth and isinstance(content, (dict, list)):
        keys = list(content) if isinstance(content, dict) else list(range(min(1, len(content))))
        for key in keys:
            yield from places(content[key], depth - 1, (*prefix, key))
