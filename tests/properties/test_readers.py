"""Property tests of the command line: whatever a file holds, the command succeeds or reports the error in one line."""

import contextlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import datasets
import pytest
import transformers
from hostile import JSON, NO_JSON, READERS, VALUES, arguments, places, with_value
from hypothesis import given
from hypothesis import strategies as st
from saved_models import save_models

from aft_hf import cli
from aft_hf.console import TRACEBACK


@pytest.fixture(scope="module")
def root(tmp_path_factory, datasets_cache):
    """Directory of saved models and data, which tests must not change."""
    root = tmp_path_factory.mktemp("hostile")
    with quiet():
        save_models(root)
        yield root


@contextlib.contextmanager
def quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    transformers.logging.set_verbosity(level)


def command(reader: str, root: Path, directory: Path) -> tuple[int, str]:
    """Run the command; return its exit code and the last line of its error output."""
    errors = io.StringIO()
    before, sys.argv = sys.argv, ["aft-hf", *arguments(reader, root, directory)]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
        return 0, ""
    except SystemExit as exited:
        return exited.code or 0, (errors.getvalue().strip().splitlines() or [""])[-1]
    finally:
        sys.argv = before


def read_with(reader: str, root: Path, change) -> tuple[int, str]:
    """Run the command on a copy of its directory that `change` has damaged; return exit code and error line."""
    name = READERS[reader][0]
    with tempfile.TemporaryDirectory() as aside:
        directory = Path(aside, "copy")
        if name == ".":
            directory.mkdir()
        else:
            shutil.copytree(root / name, directory)
        change(directory)
        return command(reader, root, directory)


def assert_said(code: int, message: str, must_fail: bool = False) -> None:
    assert code in ((1, 2) if must_fail else (0, 1, 2))
    if code == 1:
        assert message.startswith("aft-hf: ") and message.isprintable() and len(message) < 2000
        assert TRACEBACK not in message  # the line of an error that no reader expects


FILES = [(reader, file) for reader, (_, files) in READERS.items() for file in files]


def content(root: Path, reader: str, file: str):
    path = root / READERS[reader][0] / file
    return json.loads(path.read_text())


def examine(root: Path, where: tuple[str, str], pick: float, value) -> None:
    """Check the command with one value of one file replaced; `pick` in [0, 1) selects the place of the value."""
    reader, file = where
    there = content(root, reader, file)
    all_places = list(places(there, 2 if file == "tokenizer.json" else 3))
    place = all_places[int(pick * len(all_places))]

    def change(directory: Path) -> None:
        (directory / file).write_text(json.dumps(with_value(there, place, value)))

    assert_said(*read_with(reader, root, change))


PLACES = st.floats(0, 1, exclude_max=True)
ANYTHING = st.sampled_from(VALUES) | JSON


@given(st.sampled_from(FILES), PLACES, ANYTHING)
def test_any_value_at_any_place_of_any_file_is_read_or_refused(root, where, pick, value):
    examine(root, where, pick, value)


# The files that a command must refuse if malformed: all but generation_config.json, which `evaluate` does not use.
STRICT = [each for each in FILES if each != ("evaluate text", "generation_config.json")]


@given(st.sampled_from(STRICT), st.sampled_from(sorted(NO_JSON)))
def test_a_file_that_is_not_json_is_refused_in_one_line(root, where, text):
    reader, file = where
    assert_said(
        *read_with(reader, root, lambda directory: (directory / file).write_bytes(NO_JSON[text])), must_fail=True
    )


INDEX, TOKENIZER, PROCESSOR = "model.safetensors.index.json", "tokenizer_config.json", "preprocessor_config.json"
PANICS = {"type": "Split", "pattern": {"Regex": r"(?:.|.)+\d"}, "behavior": "Isolated", "invert": False}
# Values that once gave a traceback, a hang, a panic or no error: (command, file, place, value, part of the error).
FOUND = [
    ("evaluate text", "config.json", ("model_type",), [], "model_type=[]"),
    ("publish text", "config.json", ("architectures",), 5, "architectures=5"),
    ("publish text", "config.json", ("auto_map",), ["a"], "auto_map=['a']"),
    ("evaluate text", "config.json", ("num_hidden_layers",), 10**9, "num_hidden_layers"),
    ("evaluate image", "config.json", ("num_labels",), 10**9, "num_labels"),
    ("evaluate text", "config.json", ("num_hidden_layers",), 3, "weights are missing for"),
    ("evaluate text", "config.json", ("layer_norm_eps",), float("nan"), "layer_norm_eps"),
    ("evaluate shards", INDEX, (), [], "cannot be loaded"),
    ("convert shards", INDEX, ("weight_map",), {"a": 1}, "a=1"),
    ("convert shards", INDEX, ("weight_map",), {"a": "../vit/model.safetensors"}, "must name a file beside"),
    ("publish text", "generation_config.json", (), None, "cannot be loaded"),
    ("publish text", TOKENIZER, ("tokenizer_class",), [1], "tokenizer_class=[1]"),
    ("evaluate text", TOKENIZER, ("model_max_length",), "long", "model_max_length='long': must be a valid number"),
    ("visualize text", TOKENIZER, ("model_max_length",), 0, "model_max_length=0: must be greater than or equal to 1"),
    ("evaluate text", "tokenizer.json", ("pre_tokenizer",), PANICS, "retry-limit"),
    ("evaluate vit", PROCESSOR, ("size",), 10**9, "size="),
    ("convert vit", PROCESSOR, ("image_std",), "text", "image_std='text'"),
    ("visualize image", PROCESSOR, ("rescale_factor",), "x", "rescale_factor='x'"),
    ("evaluate vit", PROCESSOR, ("rescale_factor",), math.inf, "finite number"),
    ("evaluate vit", PROCESSOR, ("image_std",), [0, 0, 0], "not finite"),
    ("publish converted", "conversion_report.json", ("tensors",), 5, "tensors=5"),
    ("train", "recipe.yaml", ("task",), [1], "task=[1]"),
    ("train", "recipe.yaml", ("base",), ["a"], "base=['a']"),
    ("train", "recipe.yaml", ("base",), "recipe.yaml", "leads back"),
]


@pytest.mark.parametrize(("reader", "file", "place", "value", "named"), FOUND, ids=[each[-1] for each in FOUND])
def test_a_value_that_once_failed_is_named_in_the_error(root, reader, file, place, value, named):
    there = content(root, reader, file)
    if place == ("base",):
        there = {"base": None, **there}
    code, message = read_with(
        reader, root, lambda directory: (directory / file).write_text(json.dumps(with_value(there, place, value)))
    )
    assert_said(code, message, must_fail=True)
    assert named in message


BROKEN = ["a pipe as config", "pipe", "folder", "empty header", "2**63 bytes", "100,000 levels", "a shape of text"]


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("reader", ["evaluate text", "convert vit", "publish text"])
def test_a_malformed_weights_file_or_a_pipe_is_refused_in_one_line(root, reader, case):
    name = "config.json" if "config" in case else "model.safetensors"

    def change(directory: Path) -> None:
        path = directory / name
        path.unlink()
        if "pipe" in case:
            os.mkfifo(path)
        elif case == "folder":
            path.mkdir()
        else:
            header = {"empty header": b"", "100,000 levels": b'{"a":' * 100_000}.get(
                case, b'{"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}'
            )
            length = 2**63 if case == "2**63 bytes" else len(header)
            path.write_bytes(length.to_bytes(8, "little") + header)

    code, message = read_with(reader, root, change)
    assert_said(code, message, must_fail=True)
    assert name in message or name != "config.json"
