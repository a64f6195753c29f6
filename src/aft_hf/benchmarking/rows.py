"""Rows of the benchmark: each is written as soon as it is measured, and kept when the run resumes."""

import hashlib
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import torch
from rich.progress import track

from ..data.json_files import write_json
from ..reading import Document, UnreadableError, explained, read_json
from .cases import Case, Sizes
from .growth import Row, slopes
from .measuring import ratio, release_freed_memory, seconds_in_turns, state_bytes
from .peak import SIZES, measure_peak
from .tables import comparisons


class SavedRow(Document):
    """Schema of the keys that describe the measurement in a row."""

    case: str
    suite: str
    sizes: str
    machine: dict[str, str]
    versions: dict[str, str]
    repeats: int


class SavedRows(Document):
    """The file that `measure_cases` writes."""

    rows: list[SavedRow]


def read_rows(path: Path) -> list[Row]:
    """The rows in a JSON file of the benchmark.

    Raises:
        ValueError: the file is not a result of the benchmark.
    """
    try:
        rows = [row.model_dump(exclude_unset=True) for row in read_json(path, SavedRows).rows]
        with explained(f"{path}: has rows that cannot be compared"):
            slopes(rows)
            for row in rows:
                _identity(row), list(comparisons(row))
        return rows
    except UnreadableError as error:
        raise ValueError(f"{error}; it is not a result of the benchmark: give another --json") from error


def measure_cases(
    cases: list[Case],
    path: Path,
    *,
    device: torch.device,
    repeats: int,
    with_memory: bool,
    sizes: Sizes,
    fresh: bool,
    show: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure cases and update a file of rows; rows of other cases, machines and sizes stay in the file.

    Consecutive cases that share a peer are measured together, and the file is written after each such group.

    Args:
        cases: the cases to measure.
        path: JSON file of the rows.
        device: the device to measure on.
        repeats: timed turns of each case.
        with_memory: whether to measure peak memory, too.
        sizes: the sizes that the cases were made with.
        fresh: whether to measure again the rows that the file has for the same code, versions and number of turns.
        show: called with each new row.

    Returns:
        The rows of these cases.
    """
    rows = {_identity(row): row for row in (read_rows(path) if path.exists() else [])}
    own = []
    sizes_name = next(name for name, known in SIZES.items() if known == sizes)
    # A case without a peer is a group of its own.
    groups = [list(group) for _, group in groupby(cases, lambda case: case.builders.get("peer", case.name))]
    for group in track(groups, "cases", transient=True, disable=not os.isatty(2)):
        pending = []
        for case in group:
            header = {
                "case": case.name,
                "suite": case.suite,
                "sizes": sizes_name,
                "machine": machine(device),
                "versions": versions(case.package),
                "repeats": repeats,
            }
            own.append(_identity(header))
            old = rows.get(own[-1])
            if old and not fresh and _is_done(old, header, with_memory and bool(case.peaks)):
                # The requirements may have changed since.
                rows[own[-1]] = old | {"required": case.required, "required_memory": case.required_memory}
            else:
                pending.append((case, header))
        if pending:
            for row in _measured(pending, device, with_memory=with_memory, sizes=sizes):
                rows[_identity(row)] = row
                show(row)
            _write(path, list(rows.values()))
    _write(path, list(rows.values()))  # with the current requirements
    return [rows[identity] for identity in own]


def _measured(pending: list[tuple[Case, Row]], device: torch.device, *, with_memory: bool, sizes: Sizes) -> list[Row]:
    """The rows of cases that take turns together; a case that cannot be measured gets a row with the reason."""
    cases, headers = zip(*pending)
    results = None
    try:
        results = measure(cases, device, repeats=headers[0]["repeats"], with_memory=with_memory, sizes=sizes)
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        results = [{"skipped": f"{error.name or case.package} is not installed"} for case in cases]
    except RuntimeError as error:  # such as out of memory, which need not affect other cases
        if len(cases) == 1:
            results = [{"failed": " ".join(str(error).split())[:300]}]
    if results is None:  # one by one, after the models of the group are freed
        return [row for one in pending for row in _measured([one], device, with_memory=with_memory, sizes=sizes)]
    return [header | result for header, result in zip(headers, results)]


def _write(path: Path, rows: list[Row]) -> None:
    write_json(path, {"slopes": slopes(rows), "rows": rows})


def measure(
    cases: Sequence[Case], device: torch.device, *, repeats: int, with_memory: bool, sizes: Sizes
) -> list[Row]:
    """Measure seconds, ratios and memory of the candidates of some cases, all in turns.

    A builder that several cases share is one candidate.
    """
    for case in cases:
        if case.package is not None:
            importlib.metadata.version(case.package)  # raises if it is not installed
    builders = dict.fromkeys(build for case in cases for build in case.builders.values())
    calls = {build: build(device) for build in builders}
    timed = seconds_in_turns(calls, device, repeats=repeats)
    rows = [_row(case, {name: timed[build] for name, build in case.builders.items()}) for case in cases]
    if any(case.task == "decode" for case in cases):
        states = {build: state_bytes(call()) for build, call in calls.items()}
        for case, row in zip(cases, rows):
            row["state_bytes"] = {name: states[build] for name, build in case.builders.items()}
    if with_memory:
        del calls  # the new processes need the memory: GPT-2 at 16,384 tokens takes 11 GiB
        release_freed_memory()
        candidates = {case.builders[name]: (case, name) for case in cases for name in case.peaks}
        peaks = {build: measure_peak(*candidate, device, sizes) for build, candidate in candidates.items()}
        for case, row in zip(cases, rows):
            row["peak_bytes"] = {name: peaks[case.builders[name]] for name in case.peaks}
    return rows


def _row(case: Case, seconds: dict[str, list[float]]) -> Row:
    """The row of a case: its description, the speeds of its candidates, and the requirements on ours."""
    row: Row = {"task": case.task, "dtype": case.dtype, "unit": case.unit, "size": case.size, "peer": case.peer}
    row["seconds"] = {name: statistics.median(values) for name, values in seconds.items()}
    row["items_per_second"] = {name: case.items / value for name, value in row["seconds"].items()}
    if "ours" in seconds:
        row["ratio"] = {name: ratio(seconds, "ours", name) for name in seconds if name != "ours"}
    return row | {"required": case.required, "required_memory": case.required_memory}


def machine(device: torch.device) -> dict[str, str]:
    """The device, and on a CPU the number of threads, which times depend on."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    models = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return {"device": f"{name}, {threads} thread{'s' if threads > 1 else ''}"}


def versions(package: str | None = None) -> dict[str, str]:
    """Versions of the packages. That of aft-hf includes a hash of its code, which changes more often."""
    found = {name: importlib.metadata.version(name) for name in ("aft-hf", "torch", "transformers")}
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("*_aft.py")))
    found["aft-hf"] += f", code {hashlib.sha256(code).hexdigest()[:8]}"
    if package is not None:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _identity(row: Row) -> tuple[str, str, str]:
    """The key of a row, which is unique within a file."""
    return row["case"], row["machine"]["device"], row["sizes"]


def _is_done(row: Row, header: Row, with_memory: bool) -> bool:
    """Whether a row has the same versions and repeats and all measurements."""
    same = all(row[key] == header[key] for key in ("versions", "repeats"))
    return same and "seconds" in row and (not with_memory or "peak_bytes" in row)
