"""Fixtures of several test files: fixed seeds, commands that run in this process, and a browser."""

import gc
import multiprocessing
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import torch


if not torch.cuda.is_available():  # Triton reads the variable at import, and then interprets kernels on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tests of the kernels need none of the extras, so others are imported where they are used.

from aft_hf import benchmarking, cli


# Threads do not speed up operations on tensors this small, and slow them down when other processes use the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
# Commands run in the process of the tests, some of which measure memory.
benchmarking.keep_freed_memory = cli.keep_freed_memory = lambda: None

# `make test` tries 25 examples of each property, the same ones in every run, and `make soak` 2,000 random ones.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # No test measures time, and building a model is slow by the standards of hypothesis.
    common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
    settings.register_profile("test", max_examples=25, derandomize=True, database=None, **common)
    settings.register_profile("soak", max_examples=2000, print_blob=True, **common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

ROOT = Path(__file__).parents[1]
pytest.register_assert_rewrite("runs")  # to report the values in its assertions


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker of pytest-xdist start with slow tests: workers then end at about the same time."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    slow = [item for item in items if "slow" in item.keywords]
    others = [item for item in items if "slow" not in item.keywords]

    def part(kind: list[pytest.Item], worker: int) -> list[pytest.Item]:
        return kind[len(kind) * worker // workers : len(kind) * (worker + 1) // workers]

    items[:] = [item for worker in range(workers) for kind in (slow, others) for item in part(kind, worker)]


@pytest.fixture
def run_command(monkeypatch, capfd) -> Callable[..., CompletedProcess]:
    """Function that runs `aft-hf`, or a script or module of scripts/, and returns its exit code and output.

    The command runs in this process, which saves the seconds that a new process takes to import its libraries. The
    root of the repository is the current directory, unless the test changes it.
    """

    from accelerate.state import AcceleratorState, GradientState

    def run(name: str, *arguments: object) -> CompletedProcess:
        words = [str(ROOT / "scripts" / name) if name.endswith(".py") else name, *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        code: int | str | None = 0
        capfd.readouterr()
        try:
            if name == "aft-hf":
                cli.main()
            elif name.endswith(".py"):
                runpy.run_path(words[0], run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        if isinstance(code, str):  # which Python prints as it exits with 1
            print(code, file=sys.stderr)
            code = 1
        return CompletedProcess(words, code or 0, *capfd.readouterr())

    monkeypatch.chdir(ROOT)
    for library in ("DATASETS", "HUB"):  # `no_bars_in_logs` would set them for all later tests
        monkeypatch.setenv(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    return run


@pytest.fixture
def forks_for_spawned_processes(monkeypatch) -> None:
    """Fork the processes that a program spawns from a server that has imported the libraries, which saves seconds."""
    from tests.runs import CONTEXT

    get_context = multiprocessing.get_context
    forks = {"spawn": CONTEXT}
    monkeypatch.setattr(multiprocessing, "get_context", lambda name=None: forks.get(name) or get_context(name))


@pytest.fixture
def without_limits(monkeypatch) -> None:
    """Read untrusted files without limits of memory and time, as on macOS: a fork of this process takes 0.1 s."""
    monkeypatch.setattr("aft_hf.limits.sys", SimpleNamespace(platform="other"))


@pytest.fixture(scope="module")
def datasets_cache(tmp_path_factory):
    """Keep the cache of `datasets` in a temporary directory during the tests of one file."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")  # until it is closed, an event loop runs in this thread
def browser():
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install -e '.[demo-test]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        # The sandbox of Chromium does not work for root, which CI runs as.
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> None:
    """Exclude the objects of the libraries from later garbage collections. Accelerate makes one at the end of each
    training run, which takes half a second with these objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    """Seed the random numbers of each test, so that they do not depend on the tests before it."""
    torch.manual_seed(0)
