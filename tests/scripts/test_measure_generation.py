"""Tests of measure_generation.py: what it measures, and that the page has the numbers of its records."""

from scripts import measure_generation
from scripts.benchmark.page import read_records


def test_the_page_has_the_table_of_its_records():
    records = read_records(measure_generation.PAGE.with_suffix(".json"))
    assert measure_generation.table(records) in measure_generation.PAGE.read_text(encoding="utf-8")


def test_the_sizes_of_models_are_measured_and_the_table_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_generation, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(measure_generation, "CONTEXTS", (48, 96))
    monkeypatch.setattr(measure_generation, "SIZES", {"layers": 1, "width": 16})
    (tmp_path / "page.md").write_text(f"Before.\n{measure_generation.BEGIN}\nold\n{measure_generation.END}\nAfter.\n")
    measure_generation.main()
    text, records = (tmp_path / "page.md").read_text(), read_records(tmp_path / "page.json")
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    sizes = {(x["model"], x["context"]): x["bytes"] for x in records}
    assert set(sizes) == {(x, n) for x in (*measure_generation.TYPES, "GPT-2") for n in (48, 96)}
    for name in ("simple", "alibi", "local", "conv"):
        assert sizes[name, 48]["cache"] == sizes[name, 96]["cache"]  # constant
    assert sizes["GPT-2", 96]["cache"] == 2 * sizes["GPT-2", 48]["cache"] == 2 * 96 * 16 * 4
    assert sizes["local", 96]["weights"] > sizes["local", 48]["weights"]
    assert sizes["alibi", 96]["weights"] == sizes["alibi", 48]["weights"]
