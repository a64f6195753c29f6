"""Setup of a run from its recipe: accelerator, data, model, optimizer, schedule, and resuming from a checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer

from ..data.order import GlobalBatches, steps_per_epoch
from ..data.streaming import StreamedBatches, StreamedSamples
from ..reading import explained
from .adamw import build_adamw
from .checkpoints import Checkpoints
from .context_parallelism import ContextParallelGroup
from .manifest import Manifest, find_changes, read_manifest
from .recipe import ImageRowsData, Recipe, build_recipe
from .records import Record, portable, remove_unfinished
from .tasks import TASKS, Samples, Task


# Keys of a recipe that may differ between a checkpoint and the run that resumes from it.
FREE_TO_CHANGE = {
    "notes",
    "paper",
    "paper.rows",
    "paper.score",
    "epochs",
    "steps",
    "micro_batch_size",
    "context_parallel",
    "gradient_checkpointing",
    "compile",
    "evaluate_every",
}
FREE_TO_CHANGE |= {"save_every", "keep_checkpoints", "resume", "tracker", "output_dir", "mixed_precision"}
FREE_TO_CHANGE |= {
    f"data.{name}" for name in ("train", "validation", "test", "dataset", "workers", "max_eval_samples")
}


@dataclass
class Run:
    """A run that is ready to train, with `start` of its `total` steps done."""

    recipe: Recipe
    accelerator: Accelerator
    context_group: ContextParallelGroup
    task: Task
    data: str  # the fingerprint of the training data
    model: nn.Module
    optimizer: AcceleratedOptimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    order: GlobalBatches | StreamedBatches
    batches: DataLoader[Any]  # micro-batches of this process after step `start`, from `order`
    evaluated: dict[str, DataLoader[Any]]
    checkpoints: Checkpoints
    record: Record
    accumulation: int  # micro-batches of this process per step
    start: int
    total: int
    evaluate_every: int  # steps
    save_every: int  # steps
    parameters: int


def set_up(recipe: Recipe) -> Run:
    """Build a run, and load the checkpoint from which it resumes.

    Raises:
        ValueError: the recipe does not fit the data, the checkpoint, the device or the number of processes.
        OSError: the data cannot be read.
    """
    context_group = ContextParallelGroup.of(recipe, join_processes())
    micro_batch_size, accumulation = recipe.accumulation(context_group.groups)
    task = TASKS[recipe.task](recipe)
    # The length of a stream is unknown; its recipe counts in steps, never in epochs.
    count = None if isinstance(task.train, StreamedSamples) else len(task.train)
    epoch = 0 if count is None else steps_per_epoch(count, recipe.global_batch_size)
    total = recipe.steps or max(1, round((recipe.epochs or 0) * epoch))
    accelerator = build_accelerator(recipe, micro_batch_size, accumulation)

    torch.manual_seed(recipe.seed)
    model = task.build_model()
    context_group.check(model)
    parameters = model.num_parameters()
    if recipe.gradient_checkpointing:
        # New releases of transformers deprecate the old name of this method; old releases lack the new name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    optimizer = build_adamw(model, recipe.optimizer, recipe.ema_decay)
    scheduler = build_scheduler(recipe, optimizer, epoch, total)
    _shard_by_blocks(accelerator, model)
    if recipe.compile:
        model.compile()  # in place: the weights keep their names
    model, optimizer = accelerator.prepare(model, optimizer)

    checkpoints = Checkpoints(accelerator, checkpoint_directory(recipe), keep=recipe.keep_checkpoints)
    record = Record(accelerator, recipe.log_every)
    data = task.train.fingerprint()
    start, position = resume(recipe, data, checkpoints, scheduler, record)
    if start > total:
        raise ValueError(
            f"the checkpoint has {start} steps, the recipe only {total}: give more steps, or another output_dir"
        )
    if start == total:
        accelerator.print(f"already complete: all {total:,} steps are done; the model is evaluated and saved again")
    order = build_order(
        task.train,
        recipe,
        position,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=recipe.seed,
        start=start,
        stop=total,
        process=context_group.index,
        processes=context_group.groups,
        repetitions=task.repetitions,
    )
    loading: dict[str, Any] = {"num_workers": recipe.data.workers, "pin_memory": accelerator.device.type == "cuda"}
    samples = "a stream" if count is None else f"{count:,} samples, {epoch:,} steps in an epoch"
    accelerator.print(
        f"{recipe.task}: {samples}, {total:,} steps; "
        f"{parameters / 1e6:.2f} M parameters; a step is {context_group.groups} x {accumulation} x "
        f"{micro_batch_size} (processes x micro-batches x samples)"
        + (
            f", where {context_group.size} processes that share each sample count as one"
            if context_group.size > 1
            else ""
        )
    )
    return Run(
        recipe=recipe,
        accelerator=accelerator,
        context_group=context_group,
        task=task,
        data=data,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        order=order,
        batches=DataLoader(task.train, batch_sampler=order, **loading),
        evaluated={
            split: accelerator.prepare_data_loader(DataLoader(dataset, micro_batch_size, **loading))
            for split, dataset in task.evaluated.items()
        },
        checkpoints=checkpoints,
        record=record,
        accumulation=accumulation,
        start=start,
        total=total,
        evaluate_every=recipe.evaluate_every or epoch,
        save_every=recipe.save_every or epoch,
        parameters=parameters,
    )


def build_order(
    samples: Samples, recipe: Recipe, position: tuple[Any, ...], **counts: int
) -> GlobalBatches | StreamedBatches:
    """Build the sampler of a run's micro-batches.

    Args:
        samples: the training dataset.
        position: the position from which the sampler of a stream resumes.
        **counts: the arguments that both samplers share.
    """
    if not isinstance(samples, StreamedSamples):
        return GlobalBatches(len(samples), **counts)
    assert isinstance(recipe.data, ImageRowsData)  # only datasets of images are streamed
    return StreamedBatches(samples.rows, shuffle_buffer=recipe.data.shuffle_buffer, position=position, **counts)


def checkpoint_directory(recipe: Recipe) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(recipe.output_dir) / "checkpoints"


def join_processes() -> PartialState:
    """Join the group of the processes of this launch, and return its state."""
    # Accelerate creates a group of CPU processes only with an explicit `cpu=True`.
    return PartialState(cpu=not torch.accelerator.is_available())


def build_accelerator(recipe: Recipe, micro_batch_size: int, accumulation: int) -> Accelerator:
    """Build the accelerator of a recipe, with its tracker; the distributed strategy is that of `accelerate launch`."""
    tracker = available_tracker(recipe.tracker)
    if recipe.mixed_precision == "fp16" and join_processes().device.type == "cpu":
        raise ValueError("mixed_precision='fp16' needs a GPU, and there is none: give 'bf16', or 'no'")
    accelerator = Accelerator(
        mixed_precision=recipe.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        step_scheduler_with_optimizer=False,
        log_with=tracker,
        project_dir=recipe.output_dir,
    )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", recipe.mixed_precision):
        accelerator.print(
            f"mixed_precision={recipe.mixed_precision!r} of the recipe is used; {launched!r} of the launch has "
            "no effect"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if recipe.ema_decay is not None:
            raise ValueError("ema_decay does not work with DeepSpeed, whose optimizers keep a state of their own")
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = micro_batch_size
        config["gradient_accumulation_steps"] = accumulation
        config["gradient_clipping"] = recipe.max_grad_norm or 0.0  # DeepSpeed clips in its own step
        # Otherwise transformers would build the model in shards, from other random numbers, and one process could not
        # save it. `prepare` makes the shards.
        unset_hf_deepspeed_config()
    if tracker is not None:
        # Trackers write files beside the model, which may be published: paths are reduced to file names.
        values = _flat(portable(recipe.model_dump()))
        accelerator.init_trackers("aft-hf", config={key: str(value) for key, value in values.items()})
    elif recipe.tracker is not None:
        accelerator.print(
            f"{recipe.tracker} is not installed: no tracker is used; results.json will contain the losses"
        )
    return accelerator


def available_tracker(name: str | None) -> str | None:
    """Return the name of a tracker that is installed, or None for tensorboard, the default, if it is not.

    Raises:
        ValueError: the tracker is not installed, and is not the default.
    """
    available = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    if name is None or name in available:
        return name
    if name == "tensorboard":
        return None
    raise ValueError(
        f"tracker={name!r} is not installed; available: {', '.join(available) or 'none'}; null: no tracker"
    )


def build_scheduler(
    recipe: Recipe, optimizer: torch.optim.Optimizer, epoch: int, total: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the schedule of a recipe, for `epoch` steps per epoch and `total` steps in all."""
    schedule = recipe.schedule
    warmup = schedule.warmup_steps or round((schedule.warmup_epochs or 0) * epoch)
    options = schedule.options or None
    try:
        return get_scheduler(schedule.name, optimizer, warmup, total, scheduler_specific_kwargs=options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule: {error}") from error


def resume(
    recipe: Recipe,
    data: str,
    checkpoints: Checkpoints,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    record: Record,
) -> tuple[int, tuple[Any, ...]]:
    """Load the checkpoint that the recipe asks for, after removing partial files of a killed process.

    Returns:
        The number of completed steps, and the position of the sampler.

    Raises:
        ValueError: the checkpoint is damaged, or comes from another recipe, other data or an earlier version of
            aft-hf; or there is a checkpoint and the recipe has resume="never".
    """
    checkpoints.remove_partial()
    if checkpoints.accelerator.is_main_process:
        remove_unfinished(Path(recipe.output_dir))
    if recipe.resume == "never":
        if earlier := checkpoints.steps():
            raise ValueError(
                f"{earlier[0][1]} is from an earlier run, and resume=never: remove it, or give another output_dir"
            )
        return 0, ()
    path = checkpoints.newest() if recipe.resume == "auto" else checkpoints.complete(recipe.resume)
    if path is None:
        checkpoints.set_aside(0)
        return 0, ()
    manifest = read_manifest(path)
    check_same_run(recipe, manifest.recipe, path)
    if manifest.data != data:
        raise ValueError(
            f"{path} was made with other training data: give the same data, or another output_dir for a new run"
        )
    checkpoints.load(path)
    restore_schedule(scheduler, manifest, path)
    checkpoints.set_aside(manifest.step)
    record.restore(manifest.record)
    checkpoints.accelerator.print(f"resuming from {path}")
    return manifest.step, manifest.position


def restore_schedule(scheduler: torch.optim.lr_scheduler.LRScheduler, manifest: Manifest, path: Path) -> None:
    """Set a schedule to the step of a checkpoint.

    Raises:
        ValueError: the checkpoint has another number of parameter groups.
    """
    state = scheduler.state_dict()
    if len(manifest.rates) != len(state["_last_lr"]):
        raise ValueError(
            f"{path} does not fit the model: it has another number of learning rates, {len(manifest.rates)}"
        )
    # A schedule counts its first step when it is created.
    done = {"last_epoch": manifest.step, "_step_count": manifest.step + 1, "_last_lr": manifest.rates}
    scheduler.load_state_dict(state | done)


def check_same_run(recipe: Recipe, earlier: dict[str, Any], path: Path) -> None:
    """Raise a ValueError if the recipe of a checkpoint differs in a key that is not in `FREE_TO_CHANGE`."""
    with explained(f"{path}: its recipe cannot be read"):
        then = build_recipe(earlier)  # keys that are newer than the checkpoint take their defaults
    for key, (old, new) in find_changes(then.model_dump(), recipe.model_dump()).items():
        if key not in FREE_TO_CHANGE:
            raise ValueError(
                f"{path} was made with {key}={old!r}, and the recipe has {new!r}: "
                "give the same value, or another output_dir for a new run"
            )


def _shard_by_blocks(accelerator: Accelerator, model: nn.Module) -> None:
    """Make FSDP shard the model by its blocks.

    By default it wraps all classes in `_no_split_modules`. These include the embeddings, which Accelerate wraps
    separately, and classes that this model may not have.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and not plugin.transformer_cls_names_to_wrap:
        blocks = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested keys to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
