"""Tests of the page, from made-up records whose verdicts are known."""

import json

import pytest

from aft_hf.reproduction.claims import CLAIMS
from aft_hf.reproduction.records import Records, read_records
from aft_hf.reproduction.report import number, render, write_report


def made_up(arm: str, seed: int, *, scale: int = 1, smoke: bool = False, losses=((10, 2.0), (20, 1.5)), **metrics):
    """A record in the form that a run writes."""
    return {
        "arm": arm,
        "seed": seed,
        "scale": scale,
        "smoke": smoke,
        "device": "CPU, 2 threads",
        "versions": {"torch": "2.13.0"},
        "metrics": {"seconds": 60.0, **metrics},
        "losses": [list(point) for point in losses],
    }


def runs(arm: str, *tests: float):
    """A record for each seed."""
    return [made_up(arm, seed, test=test, train=test) for seed, test in enumerate(tests)]


@pytest.fixture
def records():
    """Records with which claim 11 holds, claim 12 does not hold, and the runs of claim 4 are incomplete."""
    tests = {"conv": (0.50, 0.51, 0.52), "conv-no-query": (0.40, 0.41, 0.42), "characters": (2.0, 2.0, 2.0)}
    tests |= {"conv-3": (0.40, 0.41, 0.42), "conv-3-no-global": (0.50, 0.51, 0.52)}
    return Records(record for arm, values in tests.items() for record in runs(arm, *values))


def section(page: str, number: int) -> str:
    return page.split(f"\n## {number}. ")[1].split("\n## ")[0]


def test_the_page_has_the_papers_numbers_beside_ours_and_the_verdicts(records):
    page = render(records, "images")
    assert f"| 11 | {CLAIMS[11].says} | Table 12 | **holds** |" in page
    assert "| 12 |" in page and "| Section 5.3 | **does not hold** |" in page
    assert "| Table 6 | **not run** |" in page
    eleventh = section(page, 11)
    assert "| with query | accuracy | 0.808 | 0.510 | 0.010 | 3 |" in eleventh
    assert "| accuracy | +0.015 | +0.100 | 0.008 | - | holds |" in eleventh  # sqrt(2 (0.01)^2 / 3)
    assert "![Losses and results of claim 11](images/claim-11.svg)" in eleventh
    assert "| T = 256 (2048) | bits per character | 1.135 | 2.000 | 0.000 | 3 |" in section(page, 4)
    assert "15 runs at scale 1 on CPU, 2 threads, with PyTorch 2.13.0: 0.2 hours" in page


def test_a_page_without_runs_says_so(tmp_path):
    page = render(read_records(tmp_path / "nothing", tmp_path / "nothing.json"), "images")
    assert page.count("**not run**") == 2 * len(CLAIMS)
    assert "claim-1.svg" not in page


def test_a_smoke_test_is_no_result():
    page = render(Records([made_up("conv", 0, smoke=True, test=0.1, train=2.0)]), "images")
    assert "**These are smoke tests of a few steps: the numbers say nothing.**" in page


@pytest.mark.slow
def test_the_report_comes_again_from_its_own_records(records, tmp_path):
    page, pictures = tmp_path / "docs" / "page.md", tmp_path / "docs" / "images" / "page"
    write_report(records, page, pictures)
    first = page.read_bytes(), page.with_suffix(".json").read_bytes()
    drawn = {path.name: path.read_bytes() for path in pictures.iterdir()}
    assert {"claim-11.svg", "claim-12.svg"} <= drawn.keys()
    assert "claim-16.svg" not in drawn
    write_report(read_records(page.with_suffix(".json"), tmp_path / "no results"), page, pictures)
    assert (page.read_bytes(), page.with_suffix(".json").read_bytes()) == first
    assert {path.name: path.read_bytes() for path in pictures.iterdir()} == drawn


def test_newer_runs_replace_those_that_the_page_has(tmp_path):
    (tmp_path / "page.json").write_text(json.dumps(runs("conv", 0.1, 0.2)))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "conv-1.json").write_text(json.dumps(made_up("conv", 1, test=0.9)))
    assert read_records(tmp_path / "page.json", tmp_path / "results").values("conv", "test") == {0: 0.1, 1: 0.9}


def test_runs_of_several_scales_do_not_share_a_page():
    with pytest.raises(ValueError, match=r"do not compare.*\(1, False\), \(4, False\)"):
        Records([made_up("conv", 0, test=0.5), made_up("vit", 0, scale=4, test=0.5)])


def test_numbers_are_short():
    assert [number(x) for x in (0.7981, 1.1544, 98304.0, 79.7e6)] == ["0.798", "1.154", "98304", "79.70 M"]
    assert number(-0.0151, signed=True) == "-0.015" and number(7.2e6, signed=True) == "+7.20 M"
