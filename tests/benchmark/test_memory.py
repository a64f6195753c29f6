"""Tests of scripts/benchmark/memory.py: the peak memory of a call, and the process that measures it."""

import multiprocessing
import signal
import sys

import pytest
import torch

from scripts.benchmark.memory import in_new_process, peak_bytes


def test_an_interrupt_ends_the_measuring_process_without_a_traceback_of_its_own(capfd):
    interrupt = "os.kill(os.getpid(), 2); time.sleep(0.1); print('still there', flush=True); os.kill(os.getppid(), 2)"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            in_new_process(exec, f"import os, time; {interrupt}; time.sleep(60); print('finished')")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not multiprocessing.active_children()
    assert capfd.readouterr() == ("still there\n", "")  # ended before it was finished


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_what_a_call_needs_beyond_what_was_there():
    held = torch.ones(2**24)  # 64 MiB allocated before
    peak = peak_bytes(lambda: torch.ones(2**25).sum())
    assert 120 * 2**20 < peak < 160 * 2**20 and held[0] == 1
