"""Every Python example of docs/integrations.md runs, unchanged but for the address and the model of the server."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest


PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
CODE = {section.splitlines()[0]: re.findall(r"^```python\n(.*?)^```", section, re.M | re.S) for section in SECTIONS}
EXAMPLES = {title: "\n".join(blocks) for title, blocks in CODE.items() if blocks}


def test_there_is_an_example_for_each_client():
    assert {"TRL", "peft", "lm-evaluation-harness", "torchao", "Lightning", "Serving", "Chat", "ONNX"} <= {
        title.split(":")[0] for title in EXAMPLES
    }


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs(title, saved, tmp_path, monkeypatch, request):
    code = EXAMPLES[title]
    for name in sorted(_imported(code)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: run `make clients`")
    if "localhost:8000" in code:
        code = code.replace("localhost:8000", f"127.0.0.1:{request.getfixturevalue('server_port')}")
        code = code.replace("outputs/quickstart-text", str(saved))  # the name of the served model
    (tmp_path / "outputs").mkdir()
    (tmp_path / "text.txt").write_text("Friends, Romans, countrymen, lend me your ears; \n" * 8)
    (tmp_path / "outputs" / "quickstart-text").symlink_to(saved)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{PAGE.name}: {title}", "exec"), {"__name__": "example"})


def _imported(code: str) -> set[str]:
    nodes = ast.walk(ast.parse(code))
    names = [x.name for node in nodes if isinstance(node, ast.Import) for x in node.names]
    names += [node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}
