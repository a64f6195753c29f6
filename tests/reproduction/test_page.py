"""Tests of the page, from made-up records whose verdicts are known, and of the page in docs/."""

import re
from pathlib import Path

import pytest

from scripts.benchmark.page import read_records
from scripts.reproduction.arms import PAIRS, recall_arm
from scripts.reproduction.claims import CLAIMS, Claim, Comparison
from scripts.reproduction.judging import HOLDS, NOT_RUN, Records
from scripts.reproduction.page import _sides, counted, render, write_page


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# scipy warns of differences that are equal, which made-up numbers are.
pytestmark = pytest.mark.filterwarnings("ignore:Precision loss")


def runs(arm, *tests, identity="known", rate=1e-3, **metrics):
    """A record for each seed."""
    losses = [[10, 2.0], [20, 1.5]]
    return [
        {"arm": arm, "seed": seed, "rate": rate, "identity": identity, "losses": losses}
        | {"device": "a computer, 1 threads", "versions": {"torch": "2.13.0"}}
        | {"metrics": {"test": test, "train": test, "test_error": 0.004, "parameters": 700_000} | metrics}
        for seed, test in enumerate(tests)
    ]


@pytest.fixture
def records():
    """Records with which claim 10 holds, and claim 12 would not if its runs were not earlier ones."""
    actual = runs("conv-7", 0.50, 0.51, 0.52) + runs("conv-7-naive", 0.40, 0.41, 0.42)
    for rate, loss in ((5e-4, 0.4), (1e-3, 0.3), (2e-3, 0.4)):
        actual += [x | {"arm": f"conv-7@{rate:g}", "rate": rate} for x in runs("conv-7", loss)]
    return Records(
        actual + runs("conv-3", 0.4, 0.4, 0.4, identity=None) + runs("conv-3-no-global", 0.5, 0.5, 0.5, identity=None)
    )


def test_the_tables_have_the_papers_numbers_beside_ours_intervals_and_verdicts(records):
    page = render(records, "images")
    assert f"| 10. {CLAIMS['10'].says} (Table 10) | **holds** | - |" in page
    cells = "0.808/0.794 | 0.510/0.410‡ | 0.70 | 3 | +0.100<br>[+0.100, +0.100] | 1.5e-31 | holds |"
    assert re.search(re.escape(cells).replace(re.escape("1.5e-31"), r"\S+"), page)
    assert "![Claim 10](images/claim-10.svg)" in page and "0.004 accuracy" in page
    assert page.count("**incomplete** |") == len(CLAIMS) - 1


def test_earlier_runs_decide_nothing_and_are_in_the_appendix(records):
    page, _, appendix = render(records, "images").partition("## Appendix")
    assert "| 12 | kernel 3 | 0.808/0.799 | 0.400/0.500 | -0.100 |" in appendix and "| 12 | kernel" not in page
    both = Records([*records.all(), *runs("conv-3", 0.6, 0.6, 0.6), *runs("conv-3-no-global", 0.5, 0.5, 0.5)])
    assert "## Appendix" not in render(both, "images")
    assert both.verdict(CLAIMS["12"]) == HOLDS and records.verdict(CLAIMS["12"]) == NOT_RUN


def test_runs_that_chose_a_learning_rate_are_not_counted_as_confirmed(records):
    page = render(records, "images")
    assert "6 runs are confirmed, 3 chose a learning rate, and 6 are earlier ones. Seeds: 3 (2 arms)." in page


def test_rates_at_the_edge_of_their_grid_are_counted_and_marked(records):
    page = render(records, "images")
    row = next(line for line in page.splitlines() if line.startswith("| 10 | kernel 7 |"))
    assert "For 1 of 2 arms (‡), the best rate" in page and re.search(r"\d/[\d.]+‡ ", row)
    inside = [x | {"arm": x["arm"].replace("conv-7@", "conv-7-naive@")} for x in records.all() if "@" in x["arm"]]
    page = render(Records([*records.all(), *inside]), "images")
    assert "For 0 of 2 arms (‡), the best rate" in page and page.count("‡") == 1


def test_a_control_is_beside_the_verdict_and_not_in_it():
    actual = runs("characters", 2.5, 2.5, 2.5) + runs("characters-transformer", 3.0, 3.0, 3.0)
    page = render(Records(actual + runs("characters-transformer-alibi", 2.4, 2.4, 2.4)), "images")
    assert "(Table 4) | **holds** | 2 does not hold |" in page
    assert page.count("| 1 | control: ") == 2


def test_the_counts_are_those_of_the_claims_of_the_paper(records):
    assert counted(records) == f"Of {len(CLAIMS)} claims, 1 holds and {len(CLAIMS) - 1} are incomplete."


def test_associative_recall_and_longer_texts_have_tables():
    actual = [x for pairs in PAIRS for x in runs(recall_arm("AFT-conv", pairs), 1 / pairs, 2 / pairs)]
    lengths = {f"test_at_{factor}x": 2.0 + factor / 100 for factor in (1, 2, 4, 8)}
    page = render(Records(actual + runs("lengths-aft-conv", 2.0, 2.0, **lengths)), "images")
    assert "| AFT-conv | 0.75 | 0.38 | 0.19 | 0.09 |" in page and "seeds: 2;" in page
    assert "| AFT-conv | 2.010 | 2.020 | 2.040 | 2.080 | 2 |" in page


def test_the_page_comes_again_from_its_own_records(records, tmp_path):
    page, pictures = tmp_path / "page.md", tmp_path / "images"
    records = Records([*records.all(), *runs("recall-aft-conv-4", 0.5)])
    pictures.mkdir()
    (pictures / "claim-12.svg").touch()  # of earlier runs
    write_page(records, page, pictures)
    first = [page.read_bytes(), page.with_suffix(".json").read_bytes()]
    assert {path.name for path in pictures.iterdir()} == {"claim-10.svg", "recall.svg"}
    assert len(first[1].splitlines()) == 2 + len(records.all())  # one record per line
    write_page(Records(read_records(page.with_suffix(".json"))), page, pictures)
    assert [page.read_bytes(), page.with_suffix(".json").read_bytes()] == first


def test_the_page_in_docs_is_that_of_its_records_and_short_and_the_readme_has_its_counts():
    text, records = (DOCS / "reproduction.md").read_text(), Records(read_records(DOCS / "reproduction.json"))
    assert text == render(records, "images/reproduction")
    assert len(re.findall(r"\S*[a-zA-Z]\S*", text.replace("<br>", " "))) <= 1200
    counts = counted(records)
    assert counts[0].lower() + counts[1:-1] in " ".join((ROOT / "README.md").read_text().split())
    shown = {f"claim-{claim.name}.svg" for claim in CLAIMS.values() if _sides(claim, records)}
    assert {path.name for path in (DOCS / "images" / "reproduction").glob("claim-*")} == shown


def test_a_picture_shows_confirmed_runs_of_comparisons_that_are_run(records):
    assert _sides(CLAIMS["12"], records) == {}
    assert {arm for arm, _ in _sides(CLAIMS["10"], records)} == {"conv-7", "conv-7-naive"}
    alone = Claim("1", "", comparisons=(Comparison("", ("conv-7", "test"), ("conv-3", "test")),))
    assert _sides(alone, records) == {}
