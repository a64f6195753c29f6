"""The training loop, built on Accelerate, for all tasks and any number of processes.

Each step takes a global batch, which is cut into micro-batches. Micro-batch k of step t holds the same samples and
uses the same random numbers, regardless of the process that computes it and of earlier interruptions. A run therefore
gives the same result for any number of processes (with the same `micro_batch_size`), and a resumed run the same result
as an uninterrupted run.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from tqdm import tqdm

from ..reading import first_line
from .averaging import averaged
from .ownership import owned
from .recipe import Recipe
from .records import move_into, peak_memory, plot_losses, write_results
from .setup import Run, checkpoint_directory, join_processes, set_up
from .stopping import StopSignal
from .tasks import Batch


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe to its end, from its newest checkpoint if it has any; return the content of `results.json`.

    Raises:
        ValueError: the recipe does not fit the data, the checkpoint or the processes, or the loss or the weights are
            not finite.
        OSError: the data cannot be read, a checkpoint or the model cannot be written, or another process is training
            in the same output directory.
        SystemExit: after SIGTERM or Ctrl-C, when a checkpoint is saved; the code is 128 + the number of the signal.
    """
    join_processes()
    with owned(Path(recipe.output_dir), checkpoint_directory(recipe)):
        run = set_up(recipe)
        take_steps(run)
        return finish(run)


def take_steps(run: Run) -> None:
    """Take the remaining steps of a run, with evaluations and checkpoints in between."""
    recipe, batches, record = run.recipe, iter(run.batches), run.record
    run.model.train()
    record.lap()
    with StopSignal(run.accelerator) as stop, progress_bar(run) as progress:
        for step in range(run.start + 1, run.total + 1):
            rate = float(run.scheduler.get_last_lr()[0])
            losses = [training_pass(run, next(batches), step, i) for i in range(run.accumulation)]
            run.scheduler.step()
            record.add(step, torch.stack(losses).mean(), rate)
            progress.update()

            stopped = stop.agreed()
            evaluates = step % run.evaluate_every == 0
            saves = step % run.save_every == 0 or step == run.total or stopped
            if step % recipe.log_every == 0 or evaluates or saves:
                record.collect()
                show(run, progress)
            if evaluates:
                split = next(iter(run.evaluated))
                record.evaluations.append({"step": step, **evaluate(run, split)})
                run.accelerator.log(record.evaluations[-1], step=step)
                record.lap()
            if saves:
                check_weights(run, step, rate)
                path = run.checkpoints.save(step, state(run, step))
                record.lap()
            if stopped and step < run.total:
                run.accelerator.print(
                    f"{signal.Signals(stopped).name}: saved {path}; the same command resumes from it"
                )
                leave(run)
                raise SystemExit(128 + stopped)


def state(run: Run, step: int) -> dict[str, Any]:
    """Return the state for the manifest of a checkpoint, from which a run resumes (see `Manifest`)."""
    return {
        "record": run.record.state(),
        "recipe": run.recipe.model_dump(),
        "data": run.data,
        "rates": run.scheduler.get_last_lr(),
        "position": tuple(run.order.position(step)),
    }


def training_pass(run: Run, batch: Batch, step: int, index: int) -> torch.Tensor:
    """Run the forward and backward pass of a micro-batch, and the update after the last of a step; return the loss."""
    accelerator, clip, context_group = run.accelerator, run.recipe.max_grad_norm, run.context_group
    place = (context_group.rank,) if context_group.size > 1 else ()  # each shard of a sample has its own dropout
    seed_random(run.recipe.seed, step, index * context_group.groups + context_group.index, *place)
    with accelerator.accumulate(run.model):
        batch = send_to_device(batch, accelerator.device, non_blocking=True)
        loss = context_group.loss(run.task, run.model, batch)
        accelerator.backward(loss)
        if clip is not None and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(run.model.parameters(), clip)
        run.optimizer.step()  # skipped by Accelerate before the last micro-batch
        run.optimizer.zero_grad()
    return loss.detach()


def seed_random(*numbers: int) -> None:
    """Seed the random numbers of dropout, drop path and augmentation from several numbers."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))


@torch.no_grad()
def evaluate(run: Run, split: str) -> dict[str, float]:
    """Return the metrics of a split, each sample counted once; with averaged weights if the run has them."""
    metric, options = run.task.metric()
    show = run.accelerator.is_main_process
    run.model.eval()
    with averaged_weights(run):
        bar = {"desc": split, "unit": "batch", "leave": False, "disable": None if show else True}
        for batch in tqdm(run.evaluated[split], **bar):
            predictions, references = run.accelerator.gather_for_metrics(
                run.context_group.scores(run.task, run.model, batch)
            )
            metric.add_batch(predictions=predictions.cpu().numpy(), references=references.cpu().numpy())
    run.model.train()
    return metric.compute(**options)


@contextmanager
def averaged_weights(run: Run) -> Iterator[None]:
    """Give the model its averaged weights within the context, if the recipe asks for an average."""
    if run.recipe.ema_decay is None:
        yield
        return
    with averaged(run.optimizer.optimizer, run.model):
        yield


def check_weights(run: Run, step: int, rate: float) -> None:
    """Raise a ValueError before saving weights that are not finite: gradients can overflow when no loss does."""
    names = ("_local_tensor", "ds_tensor")  # attributes of FSDP and DeepSpeed with the shard of this process
    shards = [next((getattr(w, n) for n in names if hasattr(w, n)), w).detach() for w in run.model.parameters()]
    if not torch.stack([shard.isfinite().all() for shard in shards]).all():
        raise ValueError(f"weights are not finite after step {step}, with learning rate {rate:.3g}: training stops")


def progress_bar(run: Run) -> tqdm:
    """Return a progress bar over the steps, shown in a terminal and by the main process only."""
    disable = None if run.accelerator.is_main_process else True
    return tqdm(total=run.total, initial=run.start, unit="step", dynamic_ncols=True, disable=disable)


def show(run: Run, progress: tqdm) -> None:
    """Report the latest loss, learning rate and throughput: on the progress bar or in a log line, and to trackers."""
    step, loss, rate = run.record.curve()[-1]
    per_second = run.record.steps_per_second * run.recipe.global_batch_size * run.task.units_per_sample
    memory = peak_memory(run.accelerator.device)
    unit = f"{run.task.unit}/s"
    line = f"loss {loss:.4f}, lr {rate:.2e}, {per_second:,.0f} {unit}, {memory:.2f} GiB"
    if progress.disable:
        run.accelerator.print(f"step {step}/{run.total}: {line}", flush=True)
    progress.set_postfix_str(line)
    values = {
        "loss": loss,
        "learning_rate": rate,
        f"{run.task.unit}_per_second": per_second,
        "peak_memory_gib": memory,
    }
    run.accelerator.log(values, step=step)


def finish(run: Run) -> dict[str, Any]:
    """Evaluate all splits, and save the model and the results."""
    accelerator = run.accelerator
    metrics = {split: evaluate(run, split) for split in run.evaluated}
    with averaged_weights(run):
        weights = accelerator.get_state_dict(run.model)
        results = write_outcome(run, weights, metrics) if accelerator.is_main_process else {}
    for split, values in metrics.items():
        accelerator.print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
    accelerator.print(f"the model is in {run.recipe.output_dir}")
    accelerator.wait_for_everyone()  # no process leaves the group while the main process writes
    leave(run)
    return results


def leave(run: Run) -> None:
    """End the trackers and leave the process group, after everything that belongs to the group is freed.

    Otherwise the last owner of the group is DDP's reducer. Its destructor waits for the thread of the group and holds
    the GIL, which that thread may be waiting for.
    """
    accelerator = run.accelerator
    vars(run).clear()
    accelerator.free_memory()
    accelerator.end_training()


def write_outcome(run: Run, weights: dict[str, torch.Tensor], metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Write the model, the results and the plot of the losses; return the results.

    Raises:
        OSError: a file cannot be written. If it is one of the model, an earlier model stays unchanged.
    """
    accelerator, directory = run.accelerator, Path(run.recipe.output_dir)
    try:
        save_model(run, weights, directory)
        results = write_results(
            directory,
            run.recipe,
            run.record,
            metrics=metrics,
            steps=run.total,
            parameters=run.parameters,
            processes=accelerator.num_processes,
            device=str(accelerator.device.type),
            peak_memory_gib=round(peak_memory(accelerator.device), 3),
        )
        plot_losses(directory / "losses.png", run.record)
    except Exception as error:  # on a full disk, safetensors and matplotlib raise their own types of errors
        raise OSError(
            f"cannot write the model and its results to {directory} ({first_line(error)}); all steps are done "
            f"and saved in {run.checkpoints.directory}: free disk space and run the same command again to write them"
        ) from error
    return results


def save_model(run: Run, weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Save the model for `from_pretrained`, without the wrappers of training, and its tokenizer or image processor."""
    model = run.task.auto_model.from_config(run.accelerator.unwrap_model(run.model).config)
    model.load_state_dict(weights)
    with move_into(directory) as aside:
        model.save_pretrained(aside)
        if run.task.processor is not None:
            run.task.processor.save_pretrained(aside)
