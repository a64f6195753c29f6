"""Tests of the page, from made-up records whose verdicts are known, and of the page in docs/."""

import re
from pathlib import Path

import pytest

from scripts.benchmark.page import read_records
from scripts.reproduction.claims import CLAIMS
from scripts.reproduction.judging import Records
from scripts.reproduction.page import _sides, render, write_page


DOCS = Path(__file__).parents[2] / "docs"


def runs(arm, *tests, identity="known"):
    """A record for each seed."""
    losses = [[10, 2.0], [20, 1.5]]
    return [
        {"arm": arm, "seed": seed, "rate": 1e-3, "identity": identity, "losses": losses}
        | {"metrics": {"test": test, "train": test, "test_error": 0.004}}
        for seed, test in enumerate(tests)
    ]


@pytest.fixture
def records():
    """Records with which claim 10 holds and claim 12, of earlier runs, does not."""
    found = runs("conv-7", 0.50, 0.51, 0.52) + runs("conv-7-naive", 0.40, 0.41, 0.42)
    return Records(
        found + runs("conv-3", 0.4, 0.4, 0.4, identity=None) + runs("conv-3-no-global", 0.5, 0.5, 0.5, identity=None)
    )


def test_the_tables_have_the_papers_numbers_beside_ours_intervals_and_verdicts(records):
    page = render(records, "images")
    cells = "| 0.808/0.794 | 0.510/0.410 | +0.100<br>[+0.100, +0.100] |"
    assert f"| 10. **{CLAIMS[10].says}** (Table 10) {cells} **holds** | - |" in page
    assert f"| kernel 7 {cells} holds |" in page and "![Claim 10](images/claim-10.svg)" in page
    assert "| -0.100 | **does not hold** † | not run |" in page and "| -0.100 | does not hold † |" in page
    assert "6 runs are confirmed, 6 are earlier ones" in page and "0.004 accuracy" in page
    assert page.count("**not run** |") == len(CLAIMS) - 2


def test_the_page_comes_again_from_its_own_records(records, tmp_path):
    page, pictures = tmp_path / "page.md", tmp_path / "images"
    write_page(records, page, pictures)
    first = [page.read_bytes(), page.with_suffix(".json").read_bytes()]
    assert {"claim-10.svg", "claim-12.svg"} <= {path.name for path in pictures.iterdir()}
    assert len(first[1].splitlines()) == 2 + len(records.all())  # one record per line
    write_page(Records(read_records(page.with_suffix(".json"))), page, pictures)
    assert [page.read_bytes(), page.with_suffix(".json").read_bytes()] == first


def test_the_page_in_docs_is_that_of_its_records_and_short():
    text = (DOCS / "reproduction.md").read_text()
    assert text == render(Records(read_records(DOCS / "reproduction.json")), "images/reproduction")
    assert len(re.findall(r"\S*[a-zA-Z]\S*", text.replace("<br>", " "))) <= 1500


def test_a_picture_does_not_mix_runs_of_this_rule_with_earlier_ones(records):
    mixed = Records([*records.all(), *runs("conv-3", 0.6, 0.6, 0.6)])  # the other arm has earlier runs only
    for known in (records, mixed):
        shown = _sides(CLAIMS[12], known)
        assert {x["identity"] for runs_of_arm in shown.values() for x in runs_of_arm} == {None}
        assert {arm for arm, _ in shown} == {"conv-3", "conv-3-no-global"}
    assert len(_sides(CLAIMS[10], mixed)) == 2
    trained = [run for arm in ("conv", "conv-entropy", "conv-one-position") for run in runs(arm, 0.4, 0.5, 0.6)]
    shown = _sides(CLAIMS[15], Records([*trained, *runs("speed-one-position", 0.9, identity=None)]))
    assert {arm: runs_of_arm[0]["identity"] for (arm, _), runs_of_arm in shown.items()} == {
        **dict.fromkeys(("conv", "conv-entropy", "conv-one-position"), "known"),
        "speed-one-position": None,
    }
