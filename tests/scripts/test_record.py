"""Tests of record.py, and of the records of the pages."""

import re
from pathlib import Path

import pytest

from scripts import record as recording
from scripts.benchmark.page import read_records
from scripts.record import RECORDS, ROOT, record


PAGE = "docs/scale.md"


@pytest.fixture
def unchanged(monkeypatch):
    """As if no file of the code was changed since the last commit."""
    monkeypatch.setattr(recording, "git", lambda name, *_: b"1234567" if name == "rev-parse" else b"")


@pytest.mark.usefixtures("unchanged")
def test_the_last_output_of_a_command_is_kept_with_its_status(tmp_path):
    records, counting = tmp_path / "records.json", f"echo run >> {tmp_path / 'runs'}; wc -l < {tmp_path / 'runs'}"
    for command in (counting, "false | echo piped; exit $?", counting):
        record(PAGE, command, records)
    actual = read_records(records)
    assert [(each["output"], each["status"]) for each in actual] == [(["piped"], 1), (["2"], 0)]
    assert all(each["commit"] == "1234567" and each["machine"] and each["versions"] for each in actual)


def test_no_command_runs_for_a_page_that_is_missing_or_with_code_that_was_not_committed(tmp_path, monkeypatch):
    marker = tmp_path / "it-ran"
    with pytest.raises(ValueError, match="no page docs"):
        record("docs/none.md", f"touch {marker}")
    monkeypatch.setattr(recording, "git", lambda name, *_: b"1234567" if name == "rev-parse" else b"src/a.py\n")
    with pytest.raises(ValueError, match="commit first: src"):
        record(PAGE, f"touch {marker}")
    assert not marker.exists()


def test_pages_link_to_their_records_which_say_where_they_are_from():
    actual = read_records(RECORDS)
    assert actual and all(each["versions"] and each["machine"] and each["date"] for each in actual)
    assert all("status" in each or each["excerpt"] for each in actual)
    for page in {each["page"] for each in actual}:
        assert re.search(r"\((docs/|\.\./)?outputs\.json\)", Path(ROOT, page).read_text(encoding="utf-8")), page
