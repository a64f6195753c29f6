"""Texts of a dataset as one file."""

from datetime import date

import pytest
from datasets import Dataset

from aft_hf.data.text import join_texts


pytestmark = pytest.mark.usefixtures("datasets_cache")


def test_a_line_break_is_between_all_texts_of_a_file_which_is_written_again_when_they_change():
    texts = [f"é{i}" for i in range(2001)]  # they are written a thousand at a time
    path = join_texts(Dataset.from_dict({"text": texts}), "text")
    assert path.read_text(encoding="utf-8") == "\n".join(texts)
    written = path.stat().st_mtime_ns
    assert join_texts(Dataset.from_dict({"text": texts}), "text") == path  # it is written once
    assert path.stat().st_mtime_ns == written
    assert join_texts(Dataset.from_dict({"text": texts[:-1]}), "text") != path


@pytest.mark.parametrize("value", [None, 5, 1.5, True, b"bytes", ["list"], {"a": "dict"}, date(2020, 1, 1)], ids=repr)
def test_a_value_that_is_no_text_is_named_with_its_row_and_column(value):
    told = r"column 'story' holds .*, not a text: correct the row or remove it"
    with pytest.raises(ValueError, match=f"^row 0: {told}"):
        join_texts(Dataset.from_dict({"story": [value]}), "story")
    if value is None:  # in any row, and an empty text is one
        with pytest.raises(ValueError, match=f"^row 1400: {told}"):
            join_texts(Dataset.from_dict({"story": [*(["some text", ""] * 700), None]}), "story")
