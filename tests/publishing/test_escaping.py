"""Strings from the files beside a model appear on its card as plain text, also if they look like markup or code."""

import json
import re
import shutil

import pytest
import yaml
from hub import metadata_errors
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from aft_hf.errors import printable
from aft_hf.publishing import build_card
from aft_hf.publishing.card import MARKER, card_problems


HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table><h1>Owned</h1>",
    "<!-- ",
    "![x](https://evil.example/x.png)",
    "[click](https://evil.example)",
    "[x]: https://evil.example",
    "https://evil.example/login",
    "www.evil.example",
    "me@evil.example",
    "<https://evil.example>",
    "\n# Owned\n",
    "\r\n\r\n## Owned",
    "x\n===\n",
    "\u2028# Owned\u2029",
    "\n---\nlicense: mit\n---\n",
    "`code` ``` x",
    "\n```\n# Owned\n```",
    "a | b | c",
    "\\| a \\<b\\>",
    "**bold** _slanted_ ~~gone~~ snake_case",
    "&lt;script&gt; &#60;b&#62;",
    "1 < 2 & 3 > 2",
    "{{ 7 * 7 }} {% include 'x' %}",
    "$$x$$ \\(y\\)",
    "\x1b[31mred \x00\u202egnp.exe",
    '"; import os; "',
]
LINKS = re.compile(r"https://(arxiv\.org/abs/2105\.14103|huggingface\.co/)")


def rendered(markdown: str):
    """Parse the body of a card as CommonMark with tables, links and strikethrough, and return the tokens."""
    body = ModelCard(markdown).text.replace(MARKER, "")
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tokens = parser.parse(body)
    return [each for token in tokens for each in [token, *(token.children or [])]]


def shape(markdown: str) -> list[tuple[str, str]]:
    """Return the types of all tokens that are not text."""
    return [(token.type, token.tag) for token in rendered(markdown) if token.type not in ("text", "fence")]


def texts(markdown: str) -> str:
    return " ".join(token.content for token in rendered(markdown) if token.type in ("text", "code_inline"))


@pytest.fixture(scope="module")
def usual(saved, tmp_path_factory):
    """The card with plain strings."""
    shutil.copytree(saved / "image", directory := tmp_path_factory.mktemp("usual") / "tiny")
    write(directory, "plain")
    return str(build_card(directory, repo_id="me/tiny"))


def write(directory, text):
    """Put `text` into every string that results and reports may hold, including keys."""
    results = {
        "metrics": {"validation": {f"{text}accuracy": 0.5, "loss": 1.0}},
        "versions": {text: text},
        "hardware": {text: text, "list": [text, 1.5], "name": "NVIDIA H100"},
        f"energy_{text}": text,
        "recipe": {
            "task": text,
            "notes": text,
            "paper": {"rows": [text], "score": 0.5},
            "data": {"dataset": text, "train": text},
            "model": {"pretrained": text},
            text: text,
        },
    }
    trainer = {f"eval_{text}_accuracy": 0.25, f"{text}cost": 3.5, text: 7}
    tensors = [{"status": "copied", "target": "a", "shape": [2, 3]}, {"status": "new", "target": "b", "shape": [5]}]
    (directory / "results.json").write_text(json.dumps(results))
    (directory / "all_results.json").write_text(json.dumps(trainer))
    (directory / "conversion_report.json").write_text(json.dumps({"source": text, "tensors": tensors}))


@pytest.mark.parametrize("text", HOSTILE)
def test_strings_of_files_are_text_on_the_card_and_harmless_in_its_metadata(directory, usual, text):
    write(directory, text)
    path = directory / "README.md"
    built = build_card(directory, repo_id="me/tiny")
    built.save(path)
    card = str(built)
    assert shape(card) == shape(usual)
    assert not [token for token in rendered(card) if token.type in ("html_block", "html_inline", "image")]
    links = [token.attrs["href"] for token in rendered(card) if token.type == "link_open"]
    assert all(LINKS.match(link) for link in links)
    assert printable(text) in texts(card) and "NVIDIA H100" in card  # what is plain stays readable
    assert not re.search(r"(https?://|\bwww\.|\w@)evil", without_code(card))  # these would become links
    metadata = ModelCard.load(path).data.to_dict()
    assert metadata_errors(metadata) == [] and card_problems(card, directory) == []
    assert "license" not in metadata and metadata["library_name"] == "transformers"
    header = path.read_text().split("\n---\n")[0]
    assert yaml.safe_load(header.removeprefix("---\n")) == metadata
    assert not set("<>\x1b\x00\u202e\u2028") & set(header) and "](" not in header


def without_code(card: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]+`|^---\n.*?\n---\n", "", card, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["a | b", "x` <b>y `z", "\\| a", "<img src=x>", "*b* _c_"])
def test_the_name_of_a_file_of_results_is_text_in_its_cell(directory, name):
    (directory / f"{name}.json").write_text('{"as trained": {"accuracy": 0.5}}')
    card = str(build_card(directory))
    assert f"{name}.json" in texts(card) and not {"html_inline", "image"} & {token.type for token in rendered(card)}
    assert sum(token.type == "td_open" for token in rendered(card.split("## Results")[1])) == 4


@pytest.mark.parametrize("name", ['x"; import os #', "# Owned", "<b>x", "x\n```\n# Owned"])
def test_the_name_of_a_directory_is_text_too(directory, name):
    plain = str(build_card(directory))
    card = str(build_card(directory.rename(directory.with_name(name))))
    assert shape(card) == shape(plain)
    (line,) = {line for line in card.splitlines() if line.startswith("name = ")}
    scope = {}
    exec(line, {"__builtins__": {}}, scope)  # the code on the card
    assert scope == {"name": printable(name)}
