"""Extract the commands and Python snippets of the documentation pages, as a reader would copy them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "model_cards/README.md", "spaces/demo/README.md"]
PAGES = [page for page in PAGES if (ROOT / page).is_file()]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md"))
PAGES.remove("docs/integrations.md")  # tests/clients runs the examples of this page

FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One command of a bash block, or a whole Python block."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: str) -> Iterator[Snippet]:
    """Yield all snippets of a page, in the order of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start(2)) + 1
        if fence[1] == "python":
            yield Snippet(page, line, "python", fence[2])
        else:
            yield from (Snippet(page, line + number, "bash", code) for number, code in commands(fence[2]))


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
