"""Extract the commands and Python snippets of the documentation pages, as a reader would copy them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "configs/README.md", "spaces/demo/README.md"]
for folder in ("model_cards", "docs"):
    PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("**/*.md"))
PAGES = [page for page in PAGES if page not in ("docs/integrations.md", "docs/serving.md")]  # tests/clients runs them

FENCE = re.compile(r'^```(bash|python|\w+ title="(?P<file>.*)")\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One command of a bash block, a whole Python block, or a file whose name is the title of its block."""

    page: str
    line: int
    language: str
    code: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: str) -> Iterator[Snippet]:
    """Yield all snippets of a page, in the order of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("code")) + 1
        if fence["file"]:
            yield Snippet(page, line, "file", fence["code"], fence["file"])
        elif fence[1] == "python":
            yield Snippet(page, line, "python", fence["code"])
        else:
            yield from (Snippet(page, line + number, "bash", code) for number, code in commands(fence["code"]))


def commands(block: str) -> Iterator[tuple[int, str]]:
    """Yield (line, command) for a bash block: continued lines are joined, comments and blank lines left out."""
    start, command = 0, ""
    for number, line in enumerate(block.splitlines()):
        if not command:
            start = number
        command += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        words = shlex.split(command, comments=True)
        if words:
            yield start, shlex.join(words)
        command = ""
