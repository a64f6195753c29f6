"""The training loop, built on Accelerate, for all tasks and any number of processes.

Micro-batch k of step t holds the same samples and uses the same random numbers in whichever process computes it, and
after interruptions. So the result depends neither on these nor, given `micro_batch_size`, on the number of processes.
"""

import math
import os
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, DynamoBackend, GradientAccumulationPlugin, send_to_device
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import flatten_dict

from ..analysis import draw_losses, save
from ..atomic_files import move_into, write_json
from ..data.samples import GlobalBatches, steps_per_epoch
from ..errors import explained
from ..loading import weights_digest
from ..running.checkpoints import DATA, Checkpoints, Record, find_damage, read_manifest, refuse_changes
from ..running.ownership import join_processes, owned
from ..running.steps import Training, take_steps
from .context_parallelism import ContextParallelGroup
from .optimization import averaged, build_optimizer, keep_average
from .recipe import Recipe, build_recipe
from .tasks import TASKS


# Their versions affect results.
PACKAGES = ("aft-hf", "torch", "transformers", "accelerate", "datasets", "kornia", "numpy")

# Keys of a recipe that may differ between a checkpoint and the run that resumes from it; the content of data may not.
FREE = ["notes", "paper", "epochs", "steps", "output_dir", "resume", "tracker", "micro_batch_size", "context_parallel"]
FREE += ["mixed_precision", "gradient_checkpointing", "compile", "evaluate_every", "save_every", "keep_checkpoints"]
FREE_DATA = {"max_eval_samples", "workers", "train", "validation", "test", "dataset", "tokenizer"}


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe to its end, from its newest checkpoint if it has any; return the content of `results.json`.

    Raises:
        ValueError: the recipe does not fit the data, checkpoint or processes, or the loss or weights are not finite.
        OSError: data cannot be read, files cannot be written, or another process trains in the output directory.
        SystemExit: after SIGTERM or Ctrl-C, when a checkpoint is saved; the code is 128 + the number of the signal.
    """
    join_processes()
    directory = Path(recipe.output_dir)
    with owned(directory, directory / "checkpoints"):
        run = Run(recipe)
        try:
            take_steps(run)
        except SystemExit:
            run.close()
            raise
        return run.finish()


class Run(Training):
    """A run of a recipe, which resumes from its newest checkpoint. For the errors, see `train`."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        if recipe.resume is not None:
            self.advice = "leave out resume to continue from it"
        self.context_group = group = ContextParallelGroup(recipe, join_processes())
        micro_batch_size, self.accumulation = recipe.accumulation(group.groups)
        self.task = task = TASKS[recipe.task](recipe)
        epoch = steps_per_epoch(len(task.train), recipe.global_batch_size)
        self.total = recipe.steps or max(1, round((recipe.epochs or 0) * epoch))
        self.evaluate_every, self.save_every = recipe.evaluate_every or epoch, recipe.save_every or epoch
        self.accelerator = build_accelerator(recipe, self.accumulation)

        torch.manual_seed(recipe.seed)
        model: Any = task.build_model()
        model.adds_entropy = True  # `Task.loss` adds the entropy
        group.check(model)
        self.parameters = model.num_parameters()
        prepare_model(model, recipe, self.accelerator)
        optimizer = build_optimizer(model, **recipe.optimizer.model_dump(exclude={"name"}))
        if recipe.ema_decay is not None:
            keep_average(optimizer, recipe.ema_decay)
        schedule = recipe.schedule
        warmup = schedule.warmup_steps or round((schedule.warmup_epochs or 0) * epoch)
        with explained("schedule: cannot be built"):
            self.scheduler = get_scheduler(schedule.name, optimizer, warmup, self.total, schedule.options)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_for_checkpointing(self.scheduler)
        directory = Path(recipe.output_dir, "checkpoints")
        self.checkpoints = Checkpoints(self.accelerator, directory, keep=recipe.keep_checkpoints)
        self.record = Record()
        self.on_device: list[tuple[int, torch.Tensor, float]] = []  # latest steps: step, loss here, learning rate
        self.data = task.train.fingerprint()
        self.step = self.resume()
        self.checkpoints.set_aside(self.step)
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
            f"{group.groups} x {self.accumulation} x {micro_batch_size} (data-parallel size x micro-batches x samples)"
        )
        self.bar = {"total": self.total, "initial": self.step, "unit": "step", "dynamic_ncols": True}
        self.model.train()
        self.since = time.perf_counter()

    def resume(self) -> int:
        """Load the checkpoint that the recipe asks for, if there is any, and return the number of completed steps."""
        if self.recipe.resume is None:
            path = self.checkpoints.newest()
        elif damage := find_damage(path := Path(self.recipe.resume)):
            raise ValueError(f"{path} is not a complete checkpoint: {damage}")
        if path is None:
            return 0
        manifest = read_manifest(path)
        with explained(f"{path}: its recipe cannot be read"):
            earlier = build_recipe(manifest.recipe)  # keys that are newer than the checkpoint take their defaults
        free: Any = dict.fromkeys(FREE, True) | {"data": FREE_DATA}
        then, now = (recipe.model_dump(exclude=free) for recipe in (earlier, self.recipe))
        then[DATA], now[DATA] = manifest.data, self.data
        refuse_changes(path, then, now, "another output_dir for a new run")
        self.checkpoints.load(path)
        self.record = manifest.record
        return manifest.step

    def is_done(self) -> bool:
        return self.step == self.total

    def update(self) -> None:
        self.step += 1
        rate = self.learning_rate = float(self.scheduler.get_last_lr()[0])
        losses = [self.training_pass(i) for i in range(self.accumulation)]
        self.scheduler.step()
        self.on_device.append((self.step, torch.stack(losses).mean(), rate))

    def training_pass(self, index: int) -> torch.Tensor:
        """Run the forward and backward pass of the micro-batch `index` of the step, and the update after the last."""
        accelerator, clip, group = self.accelerator, self.recipe.max_grad_norm, self.context_group
        batch = next(self.batches)
        place = (group.rank,) if group.size > 1 else ()  # each shard of a sample has its own dropout
        numbers = self.recipe.seed, self.step, index * group.groups + group.index, *place
        torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
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
            self.record_losses()
            self.report(bar)
        if evaluates:
            split = next(iter(self.evaluated))
            try:
                scores = self.evaluate(split)
            except Exception:  # such as a damaged image; the other processes of several wait in the evaluation
                if self.accelerator.num_processes == 1:
                    self.save()
                raise
            self.record.evaluations.append({"step": self.step, **scores})
            self.accelerator.log(self.record.evaluations[-1], step=self.step)
            self.since = time.perf_counter()
        return self.save() if saves else None

    def save(self) -> Path:
        """Save a checkpoint, if the weights are finite: gradients can overflow when no loss does."""
        # With FSDP, each process checks its own shard.
        shards = [getattr(weight, "_local_tensor", weight).detach() for weight in self.model.parameters()]
        if not torch.stack([shard.isfinite().all() for shard in shards]).all():
            done = f"after step {self.step}, with learning rate {self.learning_rate:.3g}"
            raise ValueError(f"weights are not finite {done}: training stops")
        state = {"record": self.record, "recipe": self.recipe.model_dump(), "data": self.data}
        checkpoint = self.checkpoints.save(self.step, state)
        self.since = time.perf_counter()
        return checkpoint

    def record_losses(self) -> None:
        """Fetch the latest losses from the device, and record their means over all processes, which must be finite."""
        steps, on_device, rates = zip(*self.on_device)
        losses = self.accelerator.reduce(torch.stack(on_device), "mean").tolist()  # waits for a GPU
        now, record = time.perf_counter(), self.record
        seconds, self.since = now - self.since, now
        record.seconds, self.steps_per_second = record.seconds + seconds, len(losses) / seconds
        for step, loss, rate in zip(steps, losses, rates):
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} at step {step}, with learning rate {rate:.3g}: training stops; "
                    "a smaller learning rate, a longer warm-up or max_grad_norm may help"
                )
            record.pending.append((step, loss, rate))
            if step % self.recipe.log_every == 0:
                record.losses, record.pending = record.curve(), []
        self.on_device.clear()

    def report(self, bar: tqdm) -> None:
        """Report the latest loss, learning rate and throughput: on the bar or in a log line, and to trackers."""
        _, loss, rate = self.record.curve()[-1]
        unit = self.task.unit
        per_second = self.steps_per_second * self.recipe.global_batch_size * self.task.units_per_sample
        memory = peak_memory(self.accelerator.device)
        line = f"loss {loss:.4f}, lr {rate:.2e}, {per_second:,.0f} {unit}/s, {memory:.2f} GiB"
        if bar.disable:
            self.accelerator.print(f"step {self.step}/{self.total}: {line}", flush=True)
        bar.set_postfix_str(line)
        values = {"loss": loss, "learning_rate": rate, f"{unit}_per_second": per_second, "peak_memory_gib": memory}
        self.accelerator.log(values, step=self.step)

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Return the metrics of a split, each sample counted once; with averaged weights if the run has them."""
        self.model.eval()
        scores_of_batches = []
        bar = {"desc": split, "leave": False, "disable": None if self.accelerator.is_main_process else True}
        with averaged(self.optimizer.optimizer, self.model):
            for batch in tqdm(self.evaluated[split], unit="batch", **bar):
                scores = self.context_group.scores(self.task, self.model, batch)
                scores_of_batches.append([x.cpu() for x in self.accelerator.gather_for_metrics(scores)])
        self.model.train()
        return self.task.metrics(split, *map(torch.cat, zip(*scores_of_batches)))

    def finish(self) -> dict[str, Any]:
        """Evaluate all splits, and save the model and the results."""
        accelerator = self.accelerator
        metrics = {split: self.evaluate(split) for split in self.evaluated}
        with averaged(self.optimizer.optimizer, self.model):
            weights = accelerator.get_state_dict(self.model)
            results = self.write(weights, metrics) if accelerator.is_main_process else {}
        for split, values in metrics.items():
            accelerator.print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        accelerator.print(f"the model is in {self.recipe.output_dir}")
        accelerator.wait_for_everyone()  # no process leaves the group while the main process writes
        self.close()
        return results

    def write(self, weights: dict[str, torch.Tensor], metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Write the model, the results and the plot of the losses, all or none of them; return the results."""
        directory, device, curve = Path(self.recipe.output_dir), self.accelerator.device, self.record.curve()
        results = {
            "metrics": metrics,
            "steps": self.total,
            "parameters": self.parameters,
            "processes": self.accelerator.num_processes,
            "device": str(device.type),
            "peak_memory_gib": round(peak_memory(device), 3),
            "seconds": round(self.record.seconds, 1),
            "losses": [{"step": step, "loss": loss, "learning_rate": rate} for step, loss, rate in curve],
            "evaluations": self.record.evaluations,
            "recipe": portable(self.recipe.model_dump()),  # since it is published with the model
            "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        }
        done = f"all steps are done and saved in {self.checkpoints.directory}"
        with move_into(directory, f"{done}: free disk space and run the same command again to write them") as aside:
            # For `from_pretrained`, without the wrappers of training.
            model = self.task.auto_model.from_config(self.accelerator.unwrap_model(self.model).config)
            model.load_state_dict(weights)
            model.save_pretrained(aside)
            if self.task.processor is not None:
                self.task.processor.save_pretrained(aside)
            results["weights"] = weights_digest(aside)
            write_json(aside / "results.json", results)
            save(draw_losses(results), aside / "losses.png")
        return results

    def close(self) -> None:
        """End the trackers and leave the process group, after everything that belongs to the group is freed."""
        accelerator = self.accelerator
        vars(self).clear()  # DDP's reducer as the last owner would wait for a thread that may wait for the GIL
        accelerator.free_memory()
        accelerator.end_training()


def build_accelerator(recipe: Recipe, accumulation: int) -> Accelerator:
    """Build the accelerator of a recipe, with its tracker; the distributed strategy is that of `accelerate launch`."""
    trackers = [*map(str, get_available_trackers())]
    if recipe.tracker not in (None, *trackers):
        known = ", ".join(trackers) or "none"
        raise ValueError(f"tracker={recipe.tracker!r} is not installed; available: {known}; null: no tracker")
    if recipe.mixed_precision == "fp16" and join_processes().device.type == "cpu":
        raise ValueError("mixed_precision='fp16' needs a GPU, and there is none: give 'bf16', or 'no'")
    accelerator = Accelerator(
        mixed_precision=recipe.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        step_scheduler_with_optimizer=False,
        log_with=recipe.tracker,
        project_dir=recipe.output_dir,
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("recipes do not train with DeepSpeed: use FSDP2 (configs/accelerate/fsdp2.yaml)")
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:  # it would wrap the model
        raise ValueError("recipes are compiled by compile=true: leave out the dynamo backend of accelerate launch")
    # Trackers write files beside the model, which may be published: paths are reduced to file names.
    values = flatten_dict(portable(recipe.model_dump()))
    accelerator.init_trackers("aft-hf", config={key: str(value) for key, value in values.items()})
    return accelerator


def prepare_model(model: PreTrainedModel, recipe: Recipe, accelerator: Accelerator) -> None:
    """Apply the settings of a recipe to its model: gradient checkpointing, compilation, and shards by blocks."""
    if recipe.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and not plugin.transformer_cls_names_to_wrap:
        # By default, these are `_no_split_modules`: also embeddings, and classes that this model does not have.
        blocks = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})
    if recipe.compile:
        model.compile()  # in place: the weights keep their names


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: on the GPU if it computes there, else its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def portable(values: Any) -> Any:
    """Replace paths in nested values by file names, because directories of this machine mean nothing elsewhere."""
    if isinstance(values, dict):
        return {key: portable(value) for key, value in values.items()}
    # A relative path must exist: `name/model` may also be an id on the Hub.
    if isinstance(values, str) and (Path(values).is_absolute() or ("/" in values and os.path.exists(values))):
        return Path(values).name
    return values
