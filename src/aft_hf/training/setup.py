"""Parts of a run that follow from its recipe: accelerator, optimizer and schedule; resuming from a checkpoint."""

from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from transformers import PreTrainedModel, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import flatten_dict

from ..reading import explained
from .checkpoints import Checkpoints, find_damage
from .manifest import find_changes, read_manifest
from .optimization import build_optimizer, keep_average
from .recipe import Recipe, build_recipe
from .records import Record, portable


# Keys of a recipe that may differ between a checkpoint and the run that resumes from it.
FREE_TO_CHANGE = {"notes", "paper", "paper.rows", "paper.score", "epochs", "steps", "output_dir", "resume", "tracker"}
FREE_TO_CHANGE |= {"micro_batch_size", "context_parallel", "mixed_precision", "gradient_checkpointing", "compile"}
FREE_TO_CHANGE |= {"evaluate_every", "save_every", "keep_checkpoints", "data.max_eval_samples", "data.workers"}
# Of the training data and its tokens, the content is compared.
FREE_TO_CHANGE |= {"data.train", "data.validation", "data.test", "data.dataset", "data.tokenizer"}


def checkpoint_directory(recipe: Recipe) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(recipe.output_dir) / "checkpoints"


def join_processes() -> PartialState:
    """Join the group of the processes of this launch, and return its state."""
    # Accelerate creates a group of CPU processes only with an explicit `cpu=True`.
    return PartialState(cpu=not torch.accelerator.is_available())


def build_accelerator(recipe: Recipe, accumulation: int) -> Accelerator:
    """Build the accelerator of a recipe, with its tracker; the distributed strategy is that of `accelerate launch`."""
    trackers = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
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
    if recipe.tracker is not None:
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
        # By default FSDP wraps all classes in `_no_split_modules`. These include the embeddings, which Accelerate
        # wraps separately, and classes that this model may not have.
        blocks = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})
    if recipe.compile:
        model.compile()  # in place: the weights keep their names


def build_adamw(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Build the optimizer of a recipe; with `ema_decay`, it also keeps an average of the weights (`keep_average`)."""
    options = recipe.optimizer.model_dump(exclude={"name"})
    optimizer = build_optimizer(model, **options | {"betas": tuple(options["betas"])})
    if recipe.ema_decay is not None:
        keep_average(optimizer, recipe.ema_decay)
    return optimizer


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


def resume(recipe: Recipe, data: str, checkpoints: Checkpoints, record: Record) -> int:
    """Load the checkpoint that the recipe asks for, if there is any, and return the number of completed steps.

    Raises:
        ValueError: the checkpoint is damaged, or comes from other data or from a recipe that differs in a key that is
            not in `FREE_TO_CHANGE`.
    """
    if recipe.resume is None:
        path = checkpoints.newest()
    elif damage := find_damage(path := Path(recipe.resume)):
        raise ValueError(f"{path} is not a complete checkpoint: {damage}")
    if path is None:
        checkpoints.set_aside(0)
        return 0
    manifest = read_manifest(path)
    with explained(f"{path}: its recipe cannot be read"):
        earlier = build_recipe(manifest.recipe)  # keys that are newer than the checkpoint take their defaults
    for key, (old, new) in find_changes(earlier.model_dump(), recipe.model_dump()).items():
        if key not in FREE_TO_CHANGE:
            raise ValueError(
                f"{path} was made with {key}={old!r}, and the recipe has {new!r}: "
                "give the same value, or another output_dir for a new run"
            )
    if manifest.data != data:
        raise ValueError(
            f"{path} was made with other training data: give the same data, or another output_dir for a new run"
        )
    checkpoints.load(path)
    checkpoints.set_aside(manifest.step)
    record.restore(manifest.record)
    checkpoints.accelerator.print(f"resuming from {path}")
    return manifest.step
