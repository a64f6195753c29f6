"""Fixtures of several test files: fixed seeds, and the variants of the AFT mixers as `mixer`, `grid_mixer` and others.

A test that takes `mixer` runs once per variant of `build_mixers`; a test that takes `grid_mixer`, `typical_mixer` or
`typical_sequence_mixer` runs once per variant of that subset. All mixers have 8 features and are in evaluation
mode. Their position biases are random, because the kernels of a new AFT-conv (gamma = beta = 0) have no effect.
"""

import os
import runpy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch


if not torch.cuda.is_available():  # Triton reads the variable at import, and then interprets kernels on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import datasets

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.cli import main
from aft_hf.mixers_aft import AFTMixer


# Threads do not speed up operations on tensors this small, and slow them down when other processes use the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

WIDTH = 8
LONGEST = 130  # number of positions of the learned position biases


ROOT = Path(__file__).parents[1]


@pytest.fixture
def run_command(monkeypatch, capfd) -> Callable[..., CompletedProcess]:
    """Function that runs `aft-hf`, or a script or module of scripts/, and returns its exit code and output.

    The command runs in this process, which saves the seconds that a new process takes to import its libraries. The
    root of the repository is the current directory.
    """

    def run(name: str, *arguments: object) -> CompletedProcess:
        words = [str(ROOT / "scripts" / name) if name.endswith(".py") else name, *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        code: int | str | None = 0
        capfd.readouterr()
        try:
            if name == "aft-hf":
                main()
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


@pytest.fixture(scope="module")
def datasets_cache(tmp_path_factory):
    """Keep the cache of `datasets` in a temporary directory during the tests of one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def build_mixers() -> dict[str, Callable[[], AFTMixer]]:
    """Return a factory per variant, by name: the AFT type, then its options; "2-D" marks mixers on a grid."""
    full = partial(AFTFull, WIDTH, LONGEST, position_bias_dim=4)
    table = partial(AFTFull, WIDTH, LONGEST, position_bias_dim=None)
    local = partial(AFTLocal, WIDTH, LONGEST, 3, position_bias_dim=4)
    wide = partial(AFTLocal, WIDTH, LONGEST, 40, position_bias_dim=4)  # wider than a chunk
    simple = partial(AFTSimple, WIDTH)
    sequence = partial(AFTConv, WIDTH, num_heads=2, kernel_size=5, spatial_dims=1)
    grid = partial(AFTConv, WIDTH, num_heads=2, kernel_size=3)
    alibi = partial(AFTAlibi, WIDTH, num_heads=2)
    mixers = {}
    for suffix, causal in (("", False), (" causal", True)):
        reference = {"causal": causal, "implementation": "reference"}
        mixers |= {
            f"full{suffix}": partial(full, causal=causal),
            f"full{suffix} 2 heads": partial(full, causal=causal, num_heads=2),
            f"full{suffix} table": partial(table, causal=causal),
            f"full{suffix} table 4 heads": partial(table, causal=causal, num_heads=4),
            f"full{suffix} no query": partial(full, causal=causal, use_query=False),
            f"full{suffix} reference": partial(full, **reference),
            f"local{suffix}": partial(local, causal=causal),
            f"local{suffix} 2 heads": partial(local, causal=causal, num_heads=2),
            f"local{suffix} table": partial(local, causal=causal, position_bias_dim=None),
            f"local{suffix} wide": partial(wide, causal=causal),
            f"local{suffix} window alone": partial(local, causal=causal, global_connectivity=False),
            f"local{suffix} reference": partial(local, **reference),
            f"simple{suffix}": partial(simple, causal=causal),
            f"simple{suffix} 2 heads": partial(simple, causal=causal, num_heads=2),
            f"simple{suffix} no query": partial(simple, causal=causal, use_query=False),
            f"simple{suffix} no output projection": partial(simple, causal=causal, use_output_projection=False),
            f"simple{suffix} relu, no biases": partial(simple, causal=causal, query_activation="relu", qkv_bias=False),
            f"simple{suffix} reference": partial(simple, **reference),
            f"conv{suffix}": partial(sequence, causal=causal),
            f"conv{suffix} naive": partial(sequence, causal=causal, reparameterized=False),
            f"conv{suffix} wide": partial(sequence, kernel_size=41, causal=causal),
            f"conv{suffix} window alone": partial(sequence, causal=causal, global_connectivity=False),
            f"conv{suffix} gumbel": partial(sequence, causal=causal, selection="gumbel"),
            f"conv{suffix} no output projection": partial(sequence, causal=causal, use_output_projection=False),
            f"conv{suffix} reference": partial(sequence, **reference),
        }
    mixers |= {
        "local causal wide window alone": partial(wide, causal=True, global_connectivity=False),
        "conv causal even kernel": partial(sequence, kernel_size=4, causal=True),
        "conv 2-D": grid,
        "conv 2-D 1 head": partial(grid, num_heads=1),
        "conv 2-D one key per feature": partial(grid, num_heads=WIDTH),
        "conv 2-D naive": partial(grid, reparameterized=False),
        "conv 2-D larger than the grid": partial(grid, kernel_size=25),
        "conv 2-D window alone": partial(grid, global_connectivity=False),
        "conv 2-D gumbel": partial(grid, selection="gumbel"),
        "conv 2-D gumbel window alone": partial(grid, selection="gumbel", global_connectivity=False),
        "conv 2-D no query": partial(grid, use_query=False),
        "conv 2-D reference": partial(grid, implementation="reference"),
        "alibi causal": alibi,
        "alibi causal 1 head": partial(alibi, num_heads=1),
        "alibi causal 8 heads": partial(alibi, num_heads=8),
        "alibi causal no query": partial(alibi, use_query=False),
        "alibi causal reference": partial(alibi, implementation="reference"),
    }
    return mixers


MIXERS = build_mixers()
SEQUENCE = [name for name in MIXERS if "2-D" not in name]
# One variant of each type and kind of position bias, for tests that do not depend on how the sums are computed.
TYPICAL = ["full", "full causal", "full causal table", "local", "local causal", "local causal window alone", "simple"]
TYPICAL += ["simple causal", "conv", "conv causal", "conv causal naive", "conv causal gumbel", "conv 2-D"]
TYPICAL += ["conv 2-D window alone", "conv 2-D gumbel", "alibi causal", "conv causal reference"]


def build_mixer(name: str) -> AFTMixer:
    """Build the variant with this name, with random position biases, in evaluation mode."""
    torch.manual_seed(0)
    mixer = MIXERS[name]().eval()
    for parameter_name, parameter in mixer.named_parameters():
        if parameter_name.startswith(("position_bias", "kernel")):
            torch.nn.init.normal_(parameter)
    return mixer


@pytest.fixture(autouse=True)
def fixed_seed():
    """Seed the random numbers of each test, so that they do not depend on the tests before it."""
    torch.manual_seed(0)


def fixture_of(names: Iterable[str]) -> Callable:
    """Return a fixture that runs a test once per name, with the mixer of that name."""

    @pytest.fixture(params=names)
    def one_of_them(request) -> AFTMixer:
        return build_mixer(request.param)

    return one_of_them


mixer = fixture_of(MIXERS)
grid_mixer = fixture_of(name for name in MIXERS if "2-D" in name)
typical_mixer = fixture_of(TYPICAL)
typical_sequence_mixer = fixture_of(name for name in TYPICAL if name in SEQUENCE)
