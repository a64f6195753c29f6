"""Validation of untrusted files: each gives a value of the declared types, or a one-line error."""

import json
import os
import signal
import threading
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch.utils.data import DataLoader

from aft_hf.console import TRACEBACK, reported
from aft_hf.errors import LONGEST_MESSAGE, InputError, explained
from aft_hf.reading import (
    LARGEST_JSON,
    Document,
    ImageProcessorConfig,
    ModelConfig,
    WeightsIndex,
    parse_header,
    parse_json,
    read_json,
)


class Example(Document):
    count: int
    pair: Annotated[list[int], Field(min_length=2, max_length=2)] = [1, 2]
    names: list[str] | None = None
    share: float = 0.5


UNREADABLE = {
    "half of an object": (b'{"count":', "is not JSON"),
    "no UTF-8": (b'{"count": "\xff"}', "is not JSON"),
    "100,000 levels of lists": (b"[" * 100_000, "recursion limit"),
    "an integer of 5,000 digits": (b'{"count": ' + b"1" * 5_000 + b"}", "number out of range"),
    "a list": (b"[1]", "[1]: must be an object"),
    "a key that is missing": (b"{}", "count is missing"),
    "a string for a number": (b'{"count": "1"}', "count='1': must be a valid integer"),
    "infinity for an integer": (b'{"count": 1e999}', "count=inf: must be a valid integer"),
    "a number in a list of strings": (b'{"count": 1, "names": ["a", 2]}', "names.1=2: must be a valid string"),
    "a long string for a number": (b'{"count": "' + b"x" * 10_000_000 + b'"}', "count='xxx"),
    "a list that is too short": (b'{"count": 1, "pair": [1]}', "pair=[1]: must have at least 2 items, not 1"),
    "many wrong keys": (b'{"count": 1, "names": [1, 2, 3, 4, 5, 6]}', "; and 3 more"),
    "colours of a terminal": (b'{"count": "\\u001b[31mred"}', r"count='\x1b[31mred'"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_invalid_documents_are_refused_in_one_line_with_the_file_and_the_key(tmp_path, case):
    content, said = UNREADABLE[case]
    path = tmp_path / "example.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(path, Example)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and said in message
    assert message.isprintable() and len(message) < len(str(path)) + 4 * LONGEST_MESSAGE


def test_a_document_has_its_keys_and_keeps_the_others(tmp_path):
    path = tmp_path / "example.json"
    path.write_text('{"count": 1, "names": ["a"], "more": {"x": [1, NaN]}}')
    document = read_json(path, Example)
    assert (document.count, document.names, document.share) == (1, ["a"], 0.5)
    assert document.model_extra["more"]["x"][0] == 1
    assert parse_json("[1, 2]", list[int], "answer") == [1, 2]


def test_a_pipe_a_directory_a_missing_and_an_endless_file_are_no_documents(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match=r"pipe\.json: is not a regular file"):
        read_json(tmp_path / "pipe.json", Example)
    with pytest.raises(InputError, match="is not a regular file"):
        read_json(tmp_path, Example)
    with pytest.raises(InputError, match=r"no\.json: no such file"):
        read_json(tmp_path / "no.json", Example)
    with (tmp_path / "endless.json").open("wb") as file:
        file.truncate(2**40)  # a sparse file, which takes no disk space
    with pytest.raises(InputError, match=f"larger than {LARGEST_JSON >> 20} MiB"):
        read_json(tmp_path / "endless.json", Example)


@pytest.mark.parametrize(
    ("name", "largest"),
    [("num_hidden_layers", 2**12), ("num_labels", 2**22)],
)
def test_a_size_that_no_model_has_is_refused_by_name(name, largest):
    assert getattr(parse_json(f'{{"{name}": {largest}}}', ModelConfig, "config.json"), name) == largest
    for value in (largest + 1, 10**9, -(10**9)):
        with pytest.raises(InputError, match=f"config.json: {name}={value}: must be at most {largest}"):
            parse_json(f'{{"{name}": {value}}}', ModelConfig, "config.json")


SIZES = [10**9, 4097.0, {"height": 10**5, "width": 10**5}, {"shortest_edge": 10**10}, {"a": {"b": [5000]}}, [[5000]]]


@pytest.mark.parametrize("size", SIZES, ids=repr)
@pytest.mark.parametrize("key", ["size", "crop_size", "pad_size"])
def test_a_size_of_images_is_limited_in_any_form(key, size):
    with pytest.raises(InputError, match=rf"^x\.json: {key}=.*: must be at most 4096$"):
        parse_json(json.dumps({key: size}), ImageProcessorConfig, "x.json")
    assert parse_json(json.dumps({key: {"height": 4096, "shortest_edge": None}}), ImageProcessorConfig, "x.json")


BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi"))
HEADERS = {
    "aliases": BOMB,
    "merged aliases": "a: &a {x: 1}\nb: {<<: [*a, *a]}",
    "a list that does not end": "a: [",
    "a tag": "a: !!python/object/apply:os.getcwd []",
    "3,000 lists": "a: " + "[" * 3000,
    "a list": "- a",
    "a text": "a",
    "two million characters": f"a: {'x' * 2**21}",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_no_mapping_in_yaml_without_aliases_is_one_line(case):
    for start, end in (("", "\n"), ("\ufeff", "\r\n"), (" \n", "\r\n")) if "aliases" in case else (("", "\n"),):
        text = f"{start}---\n{HEADERS[case]}\n---\n# Title\n".replace("\n", end)
        with pytest.raises(InputError, match=r"^README\.md: ") as caught:
            parse_header(text, "README.md")
        assert str(caught.value).isprintable()
        assert ("aliases (*) are not supported" in str(caught.value)) == ("aliases" in case)


def test_a_header_is_read_as_by_all_libraries_or_not_at_all():
    assert parse_header("---\na: 1\n---\n# Title", "README.md") == {"a": 1}
    assert parse_header("# Title", "README.md") == parse_header("---\n\n---\n", "README.md") == {}
    for text in (f"---\r{BOMB}\r---\r# Title", f"---\na: 1\r---\r{BOMB}\n---\n"):
        with pytest.raises(InputError, match="line breaks of several kinds"):
            parse_header(text, "README.md")


@pytest.mark.parametrize("name", ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "", r"..\x"])
def test_an_index_cannot_name_files_elsewhere(name):
    with pytest.raises(InputError, match="must name a file beside this one"):
        parse_json(WeightsIndex.model_construct(weight_map={"a": name}).model_dump_json(), WeightsIndex, "index")
    assert parse_json('{"weight_map": {"a": "x-1.safetensors"}}', WeightsIndex, "index").weight_map


@pytest.mark.parametrize(
    "problem",
    [
        KeyError("a"),
        TypeError("'int' object is not iterable"),
        RecursionError("deep"),
        OSError("first\nsecond"),
        BaseException("a panic of a library in Rust"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_any_exception_of_a_library_becomes_a_one_line_error(problem):
    with (
        pytest.raises(InputError, match=r"^model: no readable config.json \(") as caught,
        explained("model: no readable config.json"),
    ):
        raise problem
    assert str(caught.value).isprintable() and caught.value.__cause__ is problem


@pytest.mark.parametrize("passes", [KeyboardInterrupt, SystemExit, MemoryError, ModuleNotFoundError, InputError])
def test_interrupts_lack_of_memory_and_missing_packages_pass_unchanged(passes):
    contexts = [explained("model")]
    if issubclass(passes, (KeyboardInterrupt, SystemExit)):
        contexts.append(reported("program"))
    for context in contexts:
        with pytest.raises(passes, match="as it is"), context:
            fails(passes("as it is"))


def fails(error: BaseException) -> Any:
    raise error


class Broken(torch.utils.data.Dataset[int]):
    """Dataset whose rows raise an error, or kill the process that reads them."""

    def __init__(self, error: Exception | None):
        self.error = error

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return fails(self.error) if self.error else os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[func-returns-value]


FAILURES = {
    "an error of the user": (lambda: fails(ValueError("x.json: is no\nrecipe")), "x.json: is no recipe"),
    "an error of the system": (lambda: os.stat("/no/such/file"), "No such file"),
    "an error without a message": (lambda: fails(ValueError()), "ValueError"),
    "a file name in the colors of a terminal": (lambda: fails(ValueError("\x1b[31mx\ud800")), "program: [31mx"),
    "a package that is not installed": (lambda: __import__("no_such_package"), "install '.[train]' in a clone"),
    "no memory": (lambda: fails(MemoryError()), "out of memory: use a smaller model"),
    "no memory for a tensor": (lambda: torch.empty(2**56), "out of memory: use a smaller model"),
    "a bug": (lambda: {}["a"], "KeyError: 'a' in <lambda>"),
    "a failed assertion": (lambda: fails(AssertionError()), "AssertionError:"),
    "a long message": (lambda: fails(TypeError("x " * 10_000)), "..."),
    "a panic of a library in Rust": (lambda: fails(BaseException("panicked")), "BaseException: panicked in fails"),
    "a group": (lambda: fails(BaseExceptionGroup("some", [KeyError("a")])), "some (1 sub-exception)"),
    "a killed worker": (lambda: list(DataLoader(Broken(None), num_workers=1)), "give fewer workers"),
    "an error in a worker": (
        lambda: list(DataLoader(Broken(OSError("x.png: is no image\nat all")), num_workers=1)),
        "program: x.png: is no image",
    ),
    "a bug in a worker": (lambda: list(DataLoader(Broken(KeyError("a")), num_workers=1)), "KeyError: 'a'"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_command_that_fails_says_why_in_one_line(case, capsys):
    raises, said = FAILURES[case]
    with pytest.raises(SystemExit) as ended, reported("program"):
        raises()
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1
    assert line.startswith("program: ") and said in line and line.isprintable() and len(line) < 1000
    assert "Traceback" not in line


class Dying:
    """Object in whose destructor the process is told that a worker of a data loader was killed."""

    def __del__(self) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")


@pytest.mark.parametrize("place", ["a destructor", "a thread"])
def test_errors_in_destructors_and_threads_are_one_line(place, capsys):
    with reported("program"):
        if place == "a thread":
            thread = threading.Thread(target=fails, args=(ValueError("x.json: is\nno recipe"),))
            thread.start()
            thread.join()
        else:
            Dying()
    line = capsys.readouterr().err
    assert line.startswith("program: ") and line.count("\n") == 1 and "Traceback" not in line
    assert ("is no recipe" if place == "a thread" else "give fewer workers") in line


def test_the_traceback_of_a_command_is_shown_on_request(monkeypatch, capsys):
    with pytest.raises(SystemExit), reported("program"):
        fails(KeyError("a"))
    assert f"{TRACEBACK}=1 shows the traceback" in capsys.readouterr().err
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(KeyError), reported("program"):
        fails(KeyError("a"))
