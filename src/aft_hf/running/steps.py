"""The loop over optimizer steps, for every kind of training, with a graceful stop on SIGTERM or Ctrl-C."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from tqdm import tqdm


class Training(Protocol):
    """One training: its steps, and what happens in between. `take_steps` runs it."""

    accelerator: Accelerator
    step: int  # optimizer steps that are done
    bar: dict[str, Any]  # options of the progress bar, which only the main process shows, and only in a terminal
    advice: str = "the same command resumes from it"  # on a checkpoint that is saved when the training is stopped

    def is_done(self) -> bool: ...  # whether no step is left, the same in all processes

    def update(self) -> None: ...  # takes one optimizer step, and increases `step`

    # Reports, evaluates and saves what is due (a checkpoint if it `stops`); returns a checkpoint of this step, if any.
    def after_step(self, bar: tqdm, stops: bool) -> Path | None: ...


def take_steps(training: Training) -> None:
    """Take the steps of a training until it is done; after SIGTERM or Ctrl-C, save and exit with 128 + its number."""
    accelerator = training.accelerator
    hidden = None if accelerator.is_main_process else True  # None: shown in a terminal
    with StopSignal(accelerator) as stop, tqdm(**training.bar, disable=hidden) as bar:
        while not training.is_done():
            training.update()
            stopped = stop.agreed()
            checkpoint = training.after_step(bar, stops=bool(stopped))
            if stopped and not training.is_done():
                saved = f"saved {checkpoint}; {training.advice}" if checkpoint else "nothing is saved"
                accelerator.print(f"{signal.Signals(stopped).name}: stopped after {training.step} steps; {saved}")
                raise SystemExit(128 + stopped)


class StopSignal:
    """Context that records the first SIGTERM or SIGINT for the training loop; a second has its usual effect."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.received = accelerator, 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
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
