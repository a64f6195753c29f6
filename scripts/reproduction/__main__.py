"""Test claims of the paper by small runs, and write docs/reproduction.md.

python -m scripts.reproduction all --text tinyshakespeare.txt --images cifar10 --hours 10
python -m scripts.reproduction all --text tinyshakespeare.txt --images cifar10 --device cuda --minutes 8
python -m scripts.reproduction 4 recall --text tinyshakespeare.txt --plan
python -m scripts.reproduction report
"""

import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from aft_hf.benchmarking import keep_freed_memory
from aft_hf.console import reported

from .arms import ARMS
from .claims import ORDER, SECTIONS
from .judging import SEEDS, Records
from .page import write_page
from .running import Run, Runner, read_records, share_cores


# Data whose arms a GPU runs first: those that a CPU cannot train to convergence, then texts and associative recall.
GPU_ORDER = ("images-100", "characters", "recall")
GPU_PROCESSES = 8  # small models are bound by the launches of their kernels


def main(
    what: Annotated[list[str], typer.Argument(help=f"{', '.join(SECTIONS)}, or all, or report: only write the page.")],
    text: Annotated[str | None, typer.Option(help="Plain text file, or generated.")] = None,
    images: Annotated[str | None, typer.Option(help="Folder with train and validation.parquet, or generated.")] = None,
    image_column: Annotated[str, typer.Option(help="Column of the images.")] = "image",
    label_column: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each model, with seeds 0, 1, ...")] = SEEDS,
    hours: Annotated[float, typer.Option(help="Begin no run after this time.")] = float("inf"),
    minutes: Annotated[float, typer.Option(help="The same in minutes.")] = float("inf"),
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda if there is a GPU.")] = "auto",
    processes: Annotated[
        int, typer.Option(min=0, help=f"Runs at the same time. Default: {GPU_PROCESSES} on a GPU, else 1.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Directory of the runs.")] = Path("outputs/reproduction"),
    page: Annotated[Path, typer.Option(help="Page; its records are beside it.")] = Path("docs/reproduction.md"),
    plan: Annotated[bool, typer.Option("--plan", help="List the runs that are left, and exit.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Train tiny models for a few steps, as a test.")] = False,
) -> None:
    """Run what the claims need. A finished run is not repeated; an interrupted one resumes from its last checkpoint.

    On a GPU, runs that are not finished at the end of the time are interrupted; on a CPU, the last one is finished.
    """
    earlier = read_records(page.with_suffix(".json"))
    if what == ["report"]:
        write_page(Records([*earlier, *read_records(out / "records.json")]), page, page.parent / "images" / page.stem)
        return
    on_gpu = uses_gpu(device)
    keep_freed_memory()
    end = time.monotonic() + min(3600 * hours, 60 * minutes)
    runner = Runner(out, text, images, image_column, label_column, smoke, earlier)
    arms = arms_of(what)
    if on_gpu:
        arms.sort(key=lambda arm: GPU_ORDER.index(data) if (data := ARMS[arm].data) in GPU_ORDER else len(GPU_ORDER))
    for arm in arms:
        runner.digest(Run(arm))  # raises for wrong options before hours of runs
    if plan:
        for run in runner.left(arms, seeds):
            print(f"{run.name}, seed {run.seed}")
        return
    processes = processes or (GPU_PROCESSES if on_gpu else 1)
    failed = run_all(runner, arms, seeds, end, processes)
    if failed:
        raise ValueError(f"{len(failed)} runs failed: {', '.join(failed)}")


def uses_gpu(device: str) -> bool:
    """Whether the runs use a GPU; also hides it from them if `device` is "cpu".

    Raises:
        ValueError: there is no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {device!r}")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return False
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU; leave --device out to run on the CPU")
    return torch.cuda.is_available()


class InThisProcess(Executor):
    """Makes a call at once, in this process."""

    def submit(self, call: Any, /, *arguments: Any, **options: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(call(*arguments, **options))
        except Exception as error:  # as any executor does
            future.set_exception(error)
        return future


def run_all(runner: Runner, arms: list[str], seeds: int, end: float, processes: int = 1) -> list[str]:
    """Run what is left until the time `end`. A failed run is reported, and the others continue.

    Several processes run the models of several arms. At the end of the time they are terminated, and save checkpoints.

    Returns:
        The failed runs, each with its error.
    """
    tried: set[Run] = set()
    failed = []
    running: dict[Future, Run] = {}
    options: dict[str, Any] = {"mp_context": multiprocessing.get_context("spawn"), "initializer": share_cores}
    pool = InThisProcess() if processes == 1 else ProcessPoolExecutor(processes, **options, initargs=(processes,))
    with pool:
        while True:
            ready = [run for run in runner.left(arms, seeds) if run not in tried and runner.can_start(run)]
            for run in ready[: processes - len(running)] if time.monotonic() < end else []:
                print(f"{run.name}, seed {run.seed}", flush=True)
                tried.add(run)
                running[pool.submit(Runner.run, runner, run)] = run
            if not running:
                break
            rest = end - time.monotonic()
            done, _ = wait(running, None if processes == 1 or rest == float("inf") else max(0, rest), FIRST_COMPLETED)
            if not done:  # the time is over
                for child in multiprocessing.active_children():
                    child.terminate()
                wait(running)
                done = set(running)
            for future in done:
                run = running.pop(future)
                try:
                    runner.add(future.result())
                except (BrokenExecutor, SystemExit):  # SystemExit: the run has saved a checkpoint
                    print(f"{run.name}, seed {run.seed}: interrupted")
                except (ValueError, OSError, RuntimeError) as error:
                    traceback.print_exception(error, file=sys.stderr)
                    failed.append(f"{run.name} with seed {run.seed} ({error})")
    if time.monotonic() >= end:
        print("the time is over: the same command continues")
    else:
        failed += [f"{arm} (no learning rate was chosen)" for arm in arms if not runner.has_rate(arm)]
    return failed


def arms_of(what: list[str]) -> list[str]:
    """The arms of the claims and sections that a user names, each once and after the arm that it starts from.

    Raises:
        ValueError: a claim does not exist.
    """
    for word in what:
        if what != ["all"] and word not in SECTIONS:
            raise ValueError(f"{word!r} is not a claim: give some of {', '.join(SECTIONS)}, or all, or report")
    arms: dict[str, None] = {}
    for name in ORDER if what == ["all"] else what:
        for arm in SECTIONS[name].arms:
            arms |= dict.fromkeys(filter(None, (getattr(ARMS[arm], "start", None), arm)))
    return list(arms)


if __name__ == "__main__":
    with reported("scripts.reproduction"):
        typer.run(main)
