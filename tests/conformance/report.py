"""Run the common model tests on AFT, GPT-2 and ViT, and write the counts into docs/conformance.md.

    make conformance-report

The text between the two marker lines of the page is replaced. The command then fails if a test of an AFT model failed.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from platform import python_version

import pytest
import torch
import transformers
from fetch import fetch

from aft_hf.benchmarking import machine


HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
PEERS = {"Text": "GPT2Test", "Image": "ViTTest"}
NAMES = {"Text": ("text", "GPT-2"), "Image": ("images", "ViT")}


class Outcomes:
    """Pytest plugin that records the outcome of each test of each class, and the reason of each skip."""

    def __init__(self):
        self.tests: dict[str, dict[str, str]] = defaultdict(dict)  # class: {test: outcome}
        self.reasons: dict[tuple[str, str], str] = {}
        self._subtests: dict[str, list] = defaultdict(list)

    def pytest_runtest_logreport(self, report) -> None:
        if type(report) is not pytest.TestReport:
            self._subtests[report.nodeid].append(report)
            return
        if report.when != "call" and report.passed:
            return
        _, name, test = report.nodeid.split("::")
        outcome, skipped = report.outcome, report
        parts = self._subtests.pop(report.nodeid, [])
        if report.passed and parts and all(part.skipped for part in parts):
            outcome, skipped = "skipped", parts[0]  # pytest counts such a test as passed
        self.tests[name][test] = outcome
        if outcome == "skipped":
            self.reasons[name, test] = skipped.longrepr[2].removeprefix("Skipped: ")

    def skipped(self, name: str) -> set[str]:
        return {test for test, outcome in self.tests[name].items() if outcome == "skipped"}

    def passed(self, name: str) -> set[str]:
        return {test for test, outcome in self.tests[name].items() if outcome == "passed"}


def run_tests() -> Outcomes:
    outcomes = Outcomes()
    files = [str(HERE / name) for name in ("test_conformance.py", "test_peers.py")]
    options = ["-q", "--no-header", "-r", "f", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    status = pytest.main([*options, *files], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {status!r}: nothing was written")
    return outcomes


def group(outcomes: Outcomes, kind: str) -> list[str]:
    """Return the names of the AFT test classes of one kind, "Text" or "Image"."""
    return [name for name in outcomes.tests if name.startswith(kind)]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def listed(tests: set[str]) -> str:
    """Join test names as Markdown code; the cases of a parameterized test become one name with their number."""
    counts: dict[str, int] = defaultdict(int)
    for test in sorted(tests):
        counts[re.sub(r"_\d+_.*|_\d+$", "", test)] += 1
    return ", ".join(f"`{name}`" + (f" ({count})" if count > 1 else "") for name, count in counts.items())


def by_reason(outcomes: Outcomes, name: str, tests: set[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for test in sorted(tests):
        reason = re.sub(r"<class '[\w.]+\.(\w+)'>", r"\1", outcomes.reasons[name, test])
        # A reason may name the model class, which depends on the order of the tests.
        found[re.sub(r"\b(AFT|GPT2|ViT)\w+\b", "the model", reason).strip(" .").replace("|", "\\|")].add(test)
    return dict(sorted(found.items(), key=lambda each: (-len(each[1]), each[0])))


def counts(outcomes: Outcomes) -> str:
    rows = [
        [f"`{name}`", *(str(list(tests.values()).count(each)) for each in ("passed", "skipped", "failed"))]
        for name, tests in outcomes.tests.items()
    ]
    return table(["Class", "Passed", "Skipped", "Failed"], rows)


def comparison(outcomes: Outcomes, kind: str) -> str:
    """Return a section on the tests that only the AFT classes of a kind skip, or only they pass."""
    ours, peer = group(outcomes, kind), PEERS[kind]
    first, (what, library) = ours[0], NAMES[kind]
    differing = {name for name in ours if outcomes.tests[name] != outcomes.tests[first]}
    if differing:
        return f"### AFT for {what}\n\nThese classes have other outcomes than {first}: {sorted(differing)}\n"
    skipped, passed = outcomes.skipped(first), outcomes.passed(first)
    only_ours = by_reason(outcomes, first, skipped & outcomes.passed(peer))
    both = skipped & outcomes.skipped(peer)
    only_peer = passed - outcomes.passed(peer)
    text = f"### AFT for {what} and {library}\n\nSkipped for AFT and passed by {library}:\n\n"
    text += table(["Tests", "Reason"], [[listed(tests), reason] for reason, tests in only_ours.items()])
    text += f"\nPassed by AFT and not by {library}: {listed(only_peer) or 'none'}.\n"
    return text + f"\nSkipped for both: {len(both)} tests.\n"


def measured(outcomes: Outcomes) -> str:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, Python {python_version()}"
    processor = machine().rpartition(",")[0]  # without the number of threads
    parts = [f"Measured with {versions}, on {processor}.\n", counts(outcomes)]
    return "\n".join([*parts, *(comparison(outcomes, kind) for kind in PEERS)])


def write(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} does not have the lines {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    fetch()
    outcomes = run_tests()
    write(PAGE, measured(outcomes))
    ours = [name for kind in PEERS for name in group(outcomes, kind)]
    failed = [
        f"{name}::{test}" for name in ours for test, outcome in outcomes.tests[name].items() if outcome == "failed"
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
