"""The results of the benchmark: kept between runs, in tables with what is required, and in a picture."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from aft_hf.benchmarking import rows as rows_module
from aft_hf.benchmarking.cases import FULL, Case
from aft_hf.benchmarking.growth import line_slopes, slopes
from aft_hf.benchmarking.rows import measure_cases, read_rows
from aft_hf.benchmarking.tables import comparisons, write_markdown


CPU = torch.device("cpu")


def case(name, builds, **options):
    """A case that does nothing, and notes when it is built."""

    def builder(candidate):
        def build(device):
            builds.append((name, candidate))
            return lambda: None

        return build

    builders = {candidate: builder(candidate) for candidate in ("ours", "peer")}
    return Case(name, "mixer", "inference", "fp32", 1, "tokens", builders, peer="another", peaks=(), **options)


def measure(cases, path, *, repeats=1, fresh=False):
    return measure_cases(cases, path, device=CPU, repeats=repeats, with_memory=True, sizes=FULL, fresh=fresh)


def growth_row(length, seconds, **options):
    peaks = {name: round(2**20 * value) for name, value in seconds.items()}
    row = {"case": f"T={length} {options}", "suite": "growth", "sizes": "full", "machine": {"device": "a CPU"}}
    row |= {"task": "training", "unit": "tokens", "size": length, "seconds": seconds, "peak_bytes": peaks}
    row |= {"versions": {"torch": "2"}, "repeats": 5, "required": {}, "required_memory": {}}
    return row | options


def measured_row(**options):
    row = {"case": "AFT beside it", "suite": "mixer", "sizes": "full", "machine": {"device": "a CPU"}, "repeats": 5}
    row |= {"versions": {"torch": "2"}, "task": "training", "unit": "tokens", "peer": "another", "size": None}
    row |= {"seconds": {"ours": 1.0, "peer": 6.0}, "items_per_second": {"ours": 1200.0, "peer": 200.0}}
    row |= {"ratio": {"peer": 6.0}, "peak_bytes": {"ours": 2**20, "peer": 2**23}}
    return row | {"required": {"peer": 5.0}, "required_memory": {"peer": 0.1}} | options


def test_a_run_goes_on_with_what_is_not_there_yet(tmp_path):
    builds, path = [], tmp_path / "benchmark.json"
    first, second = case("first", builds), case("second", builds)
    assert [row["case"] for row in measure([first], path)] == ["first"]
    assert [row["case"] for row in measure([first, second], path)] == ["first", "second"]
    assert builds == [(name, candidate) for name in ("first", "second") for candidate in ("ours", "peer")]
    assert [row["case"] for row in read_rows(path)] == ["first", "second"]
    measure([second], path, fresh=True)
    measure([second], path, repeats=2)
    assert len(builds) == 8 and [row["repeats"] for row in read_rows(path)] == [1, 2]


def test_neighbours_that_share_a_peer_take_turns_together(tmp_path, spend):
    calls = []

    def builder(name, seconds):
        def build(device):
            calls.append(f"build {name}")
            return lambda: (calls.append(name), spend(seconds))

        return build

    peer, path = builder("peer", 0.02), tmp_path / "benchmark.json"

    def beside_it(name, seconds):
        builders = {"ours": builder(name, seconds), "peer": peer}
        return Case(name, "mixer", "inference", "fp32", 1, "tokens", builders, peer="it", peaks=())

    both = [beside_it("first", 0.002), beside_it("second", 0.1)]
    first, second = measure([*both, case("other", [])], path)[:2]
    assert calls == ["build first", "build peer", "build second", *["first", "peer", "second"] * 3]
    assert first["seconds"]["peer"] == second["seconds"]["peer"]
    assert (first["ratio"]["peer"], second["ratio"]["peer"]) == (pytest.approx(10), pytest.approx(0.2))
    del calls[:]
    measure([both[0], beside_it("third", 0.0)], path)  # the first is there already
    assert calls == ["build third", "build peer", *["third", "peer"] * 3]


def test_rows_of_other_code_are_measured_again_and_those_of_another_machine_stay(tmp_path, monkeypatch):
    builds, path = [], tmp_path / "benchmark.json"
    only = case("only", builds)
    measure([only], path)
    monkeypatch.setattr(rows_module, "versions", lambda package=None: {"aft-hf": "another"})
    measure([only], path)
    assert len(builds) == 4 and [row["versions"] for row in read_rows(path)] == [{"aft-hf": "another"}]
    monkeypatch.setattr(rows_module, "machine", lambda device: {"device": "another"})
    measure([only], path)
    assert len(builds) == 6 and len(read_rows(path)) == 2


def test_what_is_asked_of_a_kept_row_is_what_is_asked_now(tmp_path):
    builds, path = [], tmp_path / "benchmark.json"
    measure([case("only", builds)], path)
    measure([case("only", builds, required={"peer": 2.0})], path)
    assert len(builds) == 2 and read_rows(path)[0]["required"] == {"peer": 2.0}


def test_a_case_whose_peer_is_not_installed_is_skipped_and_one_that_fails_does_not_end_the_run(tmp_path):
    def fails(device):
        raise RuntimeError("no room")

    builds, path = [], tmp_path / "benchmark.json"
    absent = case("absent", builds, package="no-such-package")
    failing = Case("failing", "mixer", "inference", "fp32", 1, "tokens", {"ours": fails, "peer": fails})
    rows = measure([absent, failing, case("last", builds)], path)
    assert rows[0]["skipped"] == "no-such-package is not installed" and rows[1]["failed"] == "no room"
    assert builds == [("last", "ours"), ("last", "peer")]
    assert next(comparisons(rows[0]))[:2] == ("absent", "no-such-package is not installed")
    assert next(comparisons(rows[1]))[:2] == ("failing", "failed: no room")


def test_one_that_fails_does_not_take_those_with_it_that_share_its_peer(tmp_path):
    def fails(device):
        raise RuntimeError("no room")

    first, last = case("first", []), case("last", [])
    failing = replace(first, name="failing", builders={"ours": fails, "peer": first.builders["peer"]})
    last = replace(last, builders={"ours": last.builders["ours"], "peer": first.builders["peer"]})
    rows = measure([first, failing, last], tmp_path / "benchmark.json")
    assert ["seconds" in row for row in rows] == [True, False, True] and rows[1]["failed"] == "no room"


def test_a_file_that_is_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a result of the benchmark"):
        measure([case("only", [])], path)
    assert path.read_text() == "[1]"


@pytest.mark.parametrize(("faster", "bytes_of_ours", "marks"), [(5.0, 838860, "✓✓"), (4.99, 838861, "✗✗")])
def test_a_requirement_is_marked_as_met_or_missed(faster, bytes_of_ours, marks):
    row = measured_row(ratio={"peer": faster}, peak_bytes={"ours": bytes_of_ours, "peer": 2**23})
    ((_, ours, peer, theirs, ratio, required, _, share, required_memory),) = comparisons(row)
    assert (ours, peer, theirs) == ("1,200 tokens/s", "another", "200 tokens/s")
    assert (ratio[-1] + share[-1], required, required_memory) == (marks, "5.00", "0.10")


def test_the_markdown_has_what_is_required_what_is_not_slopes_and_what_was_not_measured(tmp_path):
    rows = [measured_row(), measured_row(case="free", required={}, required_memory={})]
    rows += [growth_row(length, {"AFT-local": length / 100}) for length in (100, 1000, 10000)]
    rows += [growth_row(1, {}, case="lambda layer", skipped="lambda-networks is not installed")]
    del rows[-1]["seconds"]
    write_markdown(tmp_path / "table.md", rows)
    text = (tmp_path / "table.md").read_text()
    required, _, rest = text.partition("### Beside these")
    assert (
        "| AFT beside it | 1,200 tokens/s | another | 200 tokens/s | 6.00 ✓ | 5.00 | 1 / 8 MiB | 0.12 ✗ | 0.10 |"
        in required
    )
    assert "| free |" in rest and "| free |" not in required
    assert "| AFT-local | training, time against length | 1.00 | 1.00 | 1.00 |" in rest
    assert "- lambda layer: lambda-networks is not installed" in rest
    assert text.startswith("## a CPU\n") and "Medians of 5 turns; torch 2" in text


def test_slopes_are_those_of_the_powers():
    found = line_slopes([(x, 3e-4 * x**2) for x in (1024, 2048, 4096, 8192, 16384, 32768)])
    assert found == pytest.approx({"all": 2, "first_decade": 2, "last_decade": 2})
    bent = line_slopes([(x, 100 + x) for x in (1, 10, 100, 1000, 10**5, 10**6)])
    assert bent["first_decade"] < 0.1 < 0.9 < bent["last_decade"]
    assert set(line_slopes([(224, 1.0), (1024, 20.0)])) == {"all"}


def test_lines_of_other_machines_tasks_and_sizes_are_apart():
    rows = [growth_row(length, {"AFT-local": length}) for length in (10, 20)]
    for options in ({"task": "inference"}, {"machine": {"device": "a GPU"}}, {"sizes": "smoke"}):
        rows += [growth_row(length, {"AFT-local": length**2}, **options) for length in (10, 20)]
    found = slopes(rows)
    assert len(found) == 8 and [round(line["all"]) for line in found] == [1, 1, 2, 2, 2, 2, 2, 2]


def test_the_picture_shows_lines_where_there_are_any(tmp_path):
    pytest.importorskip("matplotlib")
    from aft_hf.benchmarking.picture import plot_growth

    path = tmp_path / "benchmark.png"
    assert not plot_growth(path, [measured_row()]) and not path.exists()
    rows = [growth_row(x, {"AFT-local": x / 1e3, "GPT-2": x**2 / 1e6}) for x in (1024, 2048, 4096)]
    assert plot_growth(path, rows)  # without images
    without = Image.open(path).convert("L").getextrema(), path.read_bytes()
    pictures = copy.deepcopy(rows)
    for row in pictures:
        row |= {"unit": "images", "task": "inference", "size": row["size"] // 8}
    assert plot_growth(path, rows + pictures)
    assert without[0] == (0, 255) and path.read_bytes() != without[1]


def test_the_command_shows_draws_and_writes_what_the_json_has_without_measuring(tmp_path, run_command):
    pytest.importorskip("matplotlib")
    path = tmp_path / "benchmark.json"
    rows = [measured_row(), *(growth_row(x, {"AFT-local": x / 1e3}) for x in (1024, 2048))]
    path.write_text(json.dumps({"rows": rows}))
    done = run_command("aft-hf", "benchmark", "--no-measure", "--json", path, "--markdown", tmp_path / "table.md")
    assert done.returncode == 0, done.stderr
    assert "6.00 ✓" in done.stdout and "training, time against length" in done.stdout
    assert "6.00 ✓" in (tmp_path / "table.md").read_text() and (tmp_path / "benchmark.png").exists()


@pytest.mark.slow
def test_the_command_measures_in_small_and_says_what_is_wrong(tmp_path, run_command):
    path = tmp_path / "benchmark.json"
    options = ["--smoke", "--no-memory", "--repeats", 1, "--device", "cpu", "--json", path]
    done = run_command(
        "aft-hf", "benchmark", "--suite", "mixer", "--only", "AFT-full layer beside SDPA inference fp32", *options
    )
    assert done.returncode == 0, done.stderr
    (row,) = read_rows(path)
    assert row["sizes"] == "smoke" and set(row["seconds"]) == {"ours", "peer"} and row["ratio"]["peer"] > 0
    done = run_command("aft-hf", "benchmark", "--suite", "sound", *options)
    assert done.returncode == 1 and done.stderr.strip().startswith(
        "aft-hf: no suite 'sound': there are vision, causal"
    )
