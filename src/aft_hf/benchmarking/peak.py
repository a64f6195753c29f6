"""Measure peak memory in a new process: `python -m aft_hf.benchmarking.peak SUITE CASE CANDIDATE DEVICE SIZES`."""

import ctypes
import subprocess
import sys

import torch

from .cases import FULL, SMOKE, Builder, Case, Sizes
from .measuring import peak_bytes
from .suites import SUITES


SIZES = {"full": FULL, "smoke": SMOKE}

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def measure_peak(case: Case, candidate: str, device: torch.device, sizes: Sizes) -> int:
    """Peak bytes of one call of a candidate, in a new process.

    Raises:
        RuntimeError: the process failed.
    """
    name = next(name for name, known in SIZES.items() if known == sizes)
    command = [sys.executable, "-m", __spec__.name, case.suite, case.name, candidate, str(device), name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process for the peak memory of {candidate} ended with {done.returncode}: {reason}")
    return int(done.stdout.split()[-1])


def main(suite: str, name: str, candidate: str, device: str, sizes: str) -> None:
    """Print the peak bytes of a candidate."""
    case = next(case for case in SUITES[suite](SIZES[sizes]) if case.name == name)
    print(peak_of_process(case.builders[candidate], torch.device(device)))


def peak_of_process(build: Builder, device: torch.device) -> int:
    """Peak bytes of one call, in a process that does nothing else."""
    call = build(device)
    if device.type == "cpu":
        # Freed tensors return to the system at once, so that the peak counts only memory in use.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    return peak_bytes(call, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
