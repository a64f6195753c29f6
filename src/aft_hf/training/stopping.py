"""Graceful stop on SIGTERM or Ctrl-C: the run completes its step and saves a checkpoint."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Context that records the first SIGTERM or SIGINT for the training loop; a second has its usual effect."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.received = accelerator, 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self.__exit__()

    def agreed(self) -> int:
        """Return a signal that any process has received, 0 for none; in a step, all processes get the same value."""
        if self.accelerator.num_processes == 1:
            return self.received
        received = torch.tensor([self.received], device=self.accelerator.device)
        return int(self.accelerator.gather(received).max())
