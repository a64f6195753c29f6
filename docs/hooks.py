"""Pages of the site that are made from other files (the command line, the guide for contributors, the changelog and
the notebooks), and the types in docstrings."""

import json
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]


def on_files(files, config):
    """Add the generated pages."""
    pages = {"reference/cli.md": _command_line(), "contributing.md": _page("CONTRIBUTING.md")}
    pages["changelog.md"] = _page("CHANGELOG.md")
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = _notebook(path)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_content(html, page, config, files):
    """Render the types in docstrings, which are Markdown as in transformers: `int`, *optional*, defaults to 1."""
    return re.sub(r"(?<=\()<code>([^<]*`[^<]*)</code>", lambda match: _markdown(match[1]), html)


def _markdown(text: str) -> str:
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    return re.sub(r"\*(\w+)\*", r"<em>\1</em>", text)


def _page(name: str) -> str:
    """A page of the repository's root, with its links as seen from the folder docs."""
    return re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))


def _notebook(path: Path) -> str:
    """The cells of a notebook, one after the other, and a link to the file. It has no outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    title, *rest = parts
    return "\n\n".join([title, f"[Download this notebook]({path.name})", *rest])


def _command_line() -> str:
    """The help of `aft-hf` and all its commands, as typer writes it."""
    command = [sys.executable, "-m", "typer", "aft_hf.cli", "utils", "docs", "--name", "aft-hf"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
