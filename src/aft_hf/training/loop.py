"""The training loop, built on Accelerate, for all tasks and any number of processes.

Each step takes a global batch, which is cut into micro-batches. Micro-batch k of step t holds the same samples and
uses the same random numbers, regardless of the process that computes it and of earlier interruptions. A run therefore
gives the same result for any number of processes (with the same `micro_batch_size`), and a resumed run the same result
as an uninterrupted run.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..analysis import draw_losses, save
from ..data.atomic_files import move_into
from ..data.order import GlobalBatches, steps_per_epoch
from ..reading import first_line
from .checkpoints import Checkpoints
from .context_parallelism import ContextParallelGroup
from .optimization import averaged
from .ownership import owned
from .recipe import Recipe
from .records import Record, peak_memory, write_results
from .setup import (
    build_accelerator,
    build_adamw,
    build_scheduler,
    checkpoint_directory,
    join_processes,
    prepare_model,
    resume,
)
from .steps import Training, take_steps
from .tasks import TASKS


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
        run = Run(recipe)
        take_steps(run)
        return run.finish()


class Run(Training):
    """A run of a recipe, which resumes from its newest checkpoint. For the errors, see `train`."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.context_group = group = ContextParallelGroup.of(recipe, join_processes())
        micro_batch_size, self.accumulation = recipe.accumulation(group.groups)
        self.task = task = TASKS[recipe.task](recipe)
        epoch = steps_per_epoch(len(task.train), recipe.global_batch_size)
        self.total = recipe.steps or max(1, round((recipe.epochs or 0) * epoch))
        self.evaluate_every, self.save_every = recipe.evaluate_every or epoch, recipe.save_every or epoch
        self.accelerator = build_accelerator(recipe, self.accumulation)

        torch.manual_seed(recipe.seed)
        model = task.build_model()
        group.check(model)
        self.parameters = model.num_parameters()
        prepare_model(model, recipe, self.accelerator)
        optimizer = build_adamw(model, recipe)
        self.scheduler = build_scheduler(recipe, optimizer, epoch, self.total)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.checkpoints = Checkpoints(self.accelerator, checkpoint_directory(recipe), keep=recipe.keep_checkpoints)
        self.record = Record(self.accelerator, recipe.log_every)
        self.data = task.train.fingerprint()
        self.step = resume(recipe, self.data, self.checkpoints, self.record)
        if self.step > self.total:
            raise ValueError(
                f"the checkpoint has {self.step} steps, the recipe only {self.total}: give more steps, or another "
                "output_dir"
            )

        order = GlobalBatches(
            len(task.train),
            recipe.global_batch_size,
            micro_batch_size,
            seed=recipe.seed,
            start=self.step,
            stop=self.total,
            process=group.index,
            processes=group.groups,
            repetitions=task.repetitions,
        )
        on_gpu = self.accelerator.device.type == "cuda"
        loading: dict[str, Any] = {"num_workers": recipe.data.workers, "pin_memory": on_gpu}
        self.batches = iter(DataLoader(task.train, batch_sampler=order, **loading))
        self.evaluated = {
            split: self.accelerator.prepare_data_loader(DataLoader(dataset, micro_batch_size, **loading))
            for split, dataset in task.evaluated.items()
        }
        self.accelerator.print(
            f"{recipe.task}: {len(task.train):,} samples, {epoch:,} steps in an epoch, {self.total:,} steps; "
            f"{self.parameters / 1e6:.2f} M parameters; a step is "
            f"{group.groups} x {self.accumulation} x {micro_batch_size} (processes x micro-batches x samples)"
        )
        self.model.train()
        self.record.lap()

    def is_done(self) -> bool:
        return self.step == self.total

    def progress_bar(self) -> tqdm:
        disable = None if self.accelerator.is_main_process else True
        return tqdm(total=self.total, initial=self.step, unit="step", dynamic_ncols=True, disable=disable)

    def update(self) -> None:
        self.step += 1
        rate = self.learning_rate = float(self.scheduler.get_last_lr()[0])
        losses = [self.training_pass(i) for i in range(self.accumulation)]
        self.scheduler.step()
        self.record.add(self.step, torch.stack(losses).mean(), rate)

    def training_pass(self, index: int) -> torch.Tensor:
        """Run the forward and backward pass of the micro-batch `index` of the step, and the update after the last."""
        accelerator, clip, group = self.accelerator, self.recipe.max_grad_norm, self.context_group
        batch = next(self.batches)
        place = (group.rank,) if group.size > 1 else ()  # each shard of a sample has its own dropout
        seed_random(self.recipe.seed, self.step, index * group.groups + group.index, *place)
        with accelerator.accumulate(self.model):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            loss = group.loss(self.task, self.model, batch)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()  # skipped by Accelerate before the last micro-batch
            self.optimizer.zero_grad()
        return loss.detach()

    def after_step(self, bar: tqdm, stops: bool) -> Path | None:
        bar.update()
        evaluates = self.step % self.evaluate_every == 0
        saves = self.step % self.save_every == 0 or self.is_done() or stops
        if self.step % self.recipe.log_every == 0 or evaluates or saves:
            self.record.collect()
            self.report(bar)
        if evaluates:
            split = next(iter(self.evaluated))
            self.record.evaluations.append({"step": self.step, **self.evaluate(split)})
            self.accelerator.log(self.record.evaluations[-1], step=self.step)
            self.record.lap()
        if not saves:
            return None
        self.check_weights()
        checkpoint = self.checkpoints.save(self.step, self.state())
        self.record.lap()
        return checkpoint

    def report(self, bar: tqdm) -> None:
        """Report the latest loss, learning rate and throughput: on the bar or in a log line, and to trackers."""
        _, loss, rate = self.record.curve()[-1]
        unit = self.task.unit
        per_second = self.record.steps_per_second * self.recipe.global_batch_size * self.task.units_per_sample
        memory = peak_memory(self.accelerator.device)
        line = f"loss {loss:.4f}, lr {rate:.2e}, {per_second:,.0f} {unit}/s, {memory:.2f} GiB"
        if bar.disable:
            self.accelerator.print(f"step {self.step}/{self.total}: {line}", flush=True)
        bar.set_postfix_str(line)
        values = {"loss": loss, "learning_rate": rate, f"{unit}_per_second": per_second, "peak_memory_gib": memory}
        self.accelerator.log(values, step=self.step)

    def state(self) -> dict[str, Any]:
        """Return the state for the manifest of a checkpoint, from which a run resumes (see `Manifest`)."""
        return {
            "record": self.record.state(),
            "recipe": self.recipe.model_dump(),
            "data": self.data,
        }

    def check_weights(self) -> None:
        """Raise a ValueError before saving weights that are not finite: gradients can overflow when no loss does."""
        # With FSDP, each process checks its own shard.
        shards = [getattr(weight, "_local_tensor", weight).detach() for weight in self.model.parameters()]
        if not torch.stack([shard.isfinite().all() for shard in shards]).all():
            raise ValueError(
                f"weights are not finite after step {self.step}, with learning rate {self.learning_rate:.3g}: "
                "training stops"
            )

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Return the metrics of a split, each sample counted once; with averaged weights if the run has them."""
        self.model.eval()
        found = []
        bar = {"desc": split, "leave": False, "disable": None if self.accelerator.is_main_process else True}
        with self.averaged_weights():
            for batch in tqdm(self.evaluated[split], unit="batch", **bar):
                scores = self.context_group.scores(self.task, self.model, batch)
                found.append([x.cpu() for x in self.accelerator.gather_for_metrics(scores)])
        self.model.train()
        return self.task.metrics(split, *map(torch.cat, zip(*found)))

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give the model its averaged weights within the context, if the recipe asks for an average."""
        if self.recipe.ema_decay is None:
            return nullcontext()
        return averaged(self.optimizer.optimizer, self.model)

    def finish(self) -> dict[str, Any]:
        """Evaluate all splits, and save the model and the results."""
        accelerator = self.accelerator
        metrics = {split: self.evaluate(split) for split in self.evaluated}
        with self.averaged_weights():
            weights = accelerator.get_state_dict(self.model)
            results = self.write_outcome(weights, metrics) if accelerator.is_main_process else {}
        for split, values in metrics.items():
            accelerator.print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        accelerator.print(f"the model is in {self.recipe.output_dir}")
        accelerator.wait_for_everyone()  # no process leaves the group while the main process writes
        self.close()
        return results

    def write_outcome(self, weights: dict[str, torch.Tensor], metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Write the model, the results and the plot of the losses; return the results.

        If a file of the model cannot be written, an earlier model stays unchanged.
        """
        directory, device = Path(self.recipe.output_dir), self.accelerator.device
        try:
            self.save_model(weights, directory)
            results = write_results(
                directory,
                self.recipe,
                self.record,
                metrics=metrics,
                steps=self.total,
                parameters=self.parameters,
                processes=self.accelerator.num_processes,
                device=str(device.type),
                peak_memory_gib=round(peak_memory(device), 3),
            )
            save(draw_losses([(self.recipe.task, results)]), directory / "losses.png")
        except Exception as error:  # on a full disk, safetensors and matplotlib raise their own types of errors
            raise OSError(
                f"cannot write the model and its results to {directory} ({first_line(error)}); all steps are done "
                f"and saved in {self.checkpoints.directory}: free disk space and run the same command again to write "
                "them"
            ) from error
        return results

    def save_model(self, weights: dict[str, torch.Tensor], directory: Path) -> None:
        """Save the model for `from_pretrained`, without the wrappers of training, and its tokenizer or processor."""
        model = self.task.auto_model.from_config(self.accelerator.unwrap_model(self.model).config)
        model.load_state_dict(weights)
        with move_into(directory) as aside:
            model.save_pretrained(aside)
            if self.task.processor is not None:
                self.task.processor.save_pretrained(aside)

    def close(self) -> None:
        """End the trackers and leave the process group, after everything that belongs to the group is freed.

        Otherwise the last owner of the group is DDP's reducer. Its destructor waits for the thread of the group and
        holds the GIL, which that thread may be waiting for.
        """
        accelerator = self.accelerator
        vars(self).clear()
        accelerator.free_memory()
        accelerator.end_training()


def seed_random(*numbers: int) -> None:
    """Seed the random numbers of dropout, drop path and augmentation from several numbers."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
