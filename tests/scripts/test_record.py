"""Tests of record.py, and of the records of the pages."""

import re
import subprocess
from pathlib import Path

import pytest

from scripts.benchmark.page import read_records
from scripts.record import RECORDS, ROOT, record


def test_the_last_output_of_a_command_is_kept_and_none_of_one_that_fails(tmp_path):
    records, counting = tmp_path / "records.json", f"echo run >> {tmp_path / 'runs'}; wc -l < {tmp_path / 'runs'}"
    for command in (counting, "echo other", counting):
        record("docs/scale.md", command, records)
    with pytest.raises(subprocess.CalledProcessError):
        record("docs/scale.md", "echo wrong; exit 3", records)
    assert [each["output"] for each in read_records(records)] == [["other"], ["2"]]
    assert all(len(each["commit"]) >= 7 and each["machine"] and each["versions"] for each in read_records(records))


def test_pages_link_to_their_records():
    pages = {each["page"] for each in read_records(RECORDS)}
    assert pages and all(
        re.search(r"\((docs/)?outputs\.json\)", Path(ROOT, page).read_text(encoding="utf-8")) for page in pages
    )
