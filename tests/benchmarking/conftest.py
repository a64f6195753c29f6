"""A clock that the tests set, so that no assertion depends on how busy the machine is."""

from types import SimpleNamespace

import pytest

from aft_hf.benchmarking import measuring


@pytest.fixture
def spend(monkeypatch):
    """Replaces the clock of the benchmark. `spend(seconds)` moves it on; a reading takes a nanosecond, not none."""
    now = 0.0

    def spend(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: spend(1e-9)))
    return spend
