"""Every Python example of docs/integrations.md and serving.md runs, but with another address and served model."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("integrations.md", "serving.md")]
SECTIONS = [part for page in PAGES for part in re.split(r"^## ", page.read_text(), flags=re.M)[1:]]
CODE = {section.splitlines()[0]: re.findall(r"^```python\n(.*?)^```", section, re.M | re.S) for section in SECTIONS}
EXAMPLES = {title: "\n".join(blocks) for title, blocks in CODE.items() if blocks}


def test_there_is_an_example_for_each_client():
    assert {"TRL", "peft", "lm-evaluation-harness", "torchao", "Lightning", "A server", "Chat", "ONNX"} <= {
        title.split(":")[0] for title in EXAMPLES
    }


def test_the_page_names_the_versions_that_the_tests_install():
    files = ("constraints.txt", "tests/clients/constraints.txt", "tests/clients/requirements.txt")
    pins = "\n".join((ROOT / file).read_text() for file in files)
    installed = dict(re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE))
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \|", PAGES[0].read_text(), re.MULTILINE)
    versions = {name.lower(): version for name, version in rows}
    assert {"trl", "peft", "lm_eval", "lightning", "sentence-transformers", "onnxruntime"} <= versions.keys()
    assert {name for name, version in versions.items() if not installed[name].startswith(version)} == set()


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs(title, saved, tmp_path, monkeypatch, request):
    code = EXAMPLES[title]
    for name in sorted(_imported(code)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: run `make clients`")
    if "localhost:8000" in code:
        code = code.replace("localhost:8000", f"127.0.0.1:{request.getfixturevalue('server_port')}")
        code = code.replace("model_cards/shakespeare-bytes", str(saved))  # the name of the served model
    (tmp_path / "outputs").mkdir()
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, title, "exec"), {"__name__": "example"})


def _imported(code: str) -> set[str]:
    nodes = ast.walk(ast.parse(code))
    names = [x.name for node in nodes if isinstance(node, ast.Import) for x in node.names]
    names += [node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}
