"""Fixture: a clock that the tests set, so that no assertion depends on the load of the machine."""

from types import SimpleNamespace

import pytest

from aft_hf.benchmarking import measuring


@pytest.fixture
def spend(monkeypatch):
    """Replace the clock of the benchmark. `spend(seconds)` advances it, and each reading by a nanosecond."""
    now = 0.0

    def spend(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: spend(1e-9)))
    return spend
