"""Distillation without labels: a converted model learns the outputs of its teacher from images alone.

It is fitted to the teacher's logits and, with a weight that decays to 0, to its hidden states. Teacher and student see
the same images, a random subset of which is augmented.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from PIL import Image
from pydantic import ConfigDict, Field, ValidationError
from torch import nn
from torch.nn.functional import kl_div, log_softmax, mse_loss
from tqdm import tqdm

from ..configuration_aft import pair
from ..data.classes import require_a_class, teacher_classes
from ..data.image_size import pixel_values, resized_processor
from ..data.images import build_augmentation
from ..data.samples import GlobalBatches, sum_arrays, sum_images
from ..errors import explain
from ..modeling_aft import AFTForImageClassification
from ..reading import Document
from ..running.checkpoints import Checkpoints, read_manifest, refuse_changes
from ..running.ownership import join_processes
from ..running.steps import Training, take_steps
from .source import VisionTransformerSource


WARMUP = 0.1  # share of the budget
MAX_GRAD_NORM = 1.0
SAVE_EVERY = 300.0  # seconds
WINDOW = 0.95  # decay of the running means of the losses

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DistillationOptions(Document):
    """Options of a distillation: the budget, in `steps` or in `minutes`, and the hyperparameters.

    Attributes:
        steps: number of updates. Runs with the same steps and seed are reproducible.
        minutes: duration of the whole distillation, including interrupted runs.
        batch_size: images per update, summed over all processes.
        learning_rate: peak learning rate; it rises over the first tenth of the budget and then decays by a cosine.
        hidden_states: initial weight of the hidden states in the loss, where the logits have weight 1. It falls with
            the square of the remaining budget, since an AFT cannot reproduce all hidden states, and need not.
        augmentation, augmentation_probability: as for `build_augmentation`, and the share of the images that it
            changes. A teacher that was trained without this augmentation is less accurate with it.
        seed: seed of the order of the images and of their augmentation.
    """

    model_config = ConfigDict(extra="forbid")

    steps: Annotated[int, Field(gt=0)] | None = None
    minutes: Positive | None = None
    batch_size: Annotated[int, Field(gt=0)] = 32
    learning_rate: Positive = 1e-3
    hidden_states: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    augmentation: Literal["none", "shift", "crop", "resized_crop"] = "shift"
    augmentation_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


def distill(
    model: AFTForImageClassification,
    source: VisionTransformerSource,
    images: Sequence[Image.Image],
    *,
    checkpoints: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a converted model in place on the outputs of its source, on images without labels.

    It runs in all processes of an `accelerate launch`.

    Args:
        model: the model that `convert_deit` returned for `source`. For AFT-conv, `init="attention"` measured best.
        source: the teacher.
        images: sequence of PIL images, each loaded when it is accessed: a few thousand images of the model's domain.
        checkpoints: directory to save a checkpoint to every five minutes, at the end, and when the run is stopped
            (SIGTERM, Ctrl-C), and to resume from. Only one distillation at a time may use it: `save_converted` locks
            it. Default: no checkpoints.
        **options: fields of `DistillationOptions`; `steps` or `minutes` is required.

    Returns:
        The record of the distillation for the report: the options, the numbers of images, steps and minutes, the last
        running means of the losses, and the share of images on which model and teacher agreed in the last steps.

    Raises:
        ValueError: the source does not choose one of the classes of the model; there are no images; an option is
            invalid; the checkpoints belong to other options or another conversion; or the loss is not finite.
        OSError: a checkpoint cannot be written.
        SystemExit: the run was stopped by a signal; the code is 128 + its number.
    """
    settings = check_distillable(source, images, **options)
    dtype, mode = model.dtype, model.training
    try:
        run = _Run(model.float().train(), source, images, settings, checkpoints)
        take_steps(run)
    finally:
        model.train(mode).to(device="cpu", dtype=dtype)
    return run.record()


def check_distillable(source: VisionTransformerSource, images: Sequence[Any], **options: Any) -> DistillationOptions:
    """Return the checked options of `distill`; raise its errors that need no model."""
    try:
        settings = DistillationOptions(**options)
    except ValidationError as problems:
        raise ValueError(f"distillation: {explain(problems)}") from problems
    if (settings.steps is None) == (settings.minutes is None):
        raise ValueError(f"distillation: give either steps or minutes, got {settings.steps} and {settings.minutes}")
    if not source.heads:
        raise ValueError(f"{source.name}: has no classifier to distill; fine-tune the converted model instead")
    require_a_class(source.name, source.config)
    if not len(images):
        raise ValueError("there are no images to distill on; give at least one")
    return settings


def student_losses(
    student: nn.Module, pixels: torch.Tensor, states: Sequence[torch.Tensor], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the losses of a student by the logits and the hidden states before each block of the teacher.

    Returns:
        The divergence KL(teacher || student) of the classes in nats; the squared errors of the hidden states, relative
        to the variance of the teacher's, (layers,); and the share of images for which the student predicts the class
        of the teacher. A ViT does not use the hidden states of the patches after its last block, so there are none.
    """
    outputs = student(pixel_values=pixels, output_hidden_states=True)
    pairs = zip(outputs.hidden_states, states)
    errors = [mse_loss(y.float(), x.float()) / x.float().var().clamp_min(1e-12) for y, x in pairs]
    log_p, log_q = (log_softmax(each.float(), -1) for each in (logits, outputs.logits))
    divergence = kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    agreement = (outputs.logits.argmax(-1) == logits.argmax(-1)).float().mean()
    return divergence, torch.stack(errors), agreement


class _Run(Training):
    """One distillation run, which resumes from its newest checkpoint: its components and its progress."""

    bar = {"total": 100, "desc": "Distillation", "bar_format": "{l_bar}{bar}| {postfix}"}

    def __init__(
        self,
        model: AFTForImageClassification,
        source: VisionTransformerSource,
        images: Sequence[Image.Image],
        settings: DistillationOptions,
        checkpoints: Path | None,
    ):
        self.classes = teacher_classes(source.config, model.config)
        join_processes()
        self.accelerator = accelerator = Accelerator()
        self.settings, self.images, self.step, self.seconds = settings, images, 0, 0.0
        self.config, size = model.config, pair(model.config.image_size)
        self.batch_size = min(settings.batch_size, len(images))
        if self.batch_size % accelerator.num_processes:
            raise ValueError(f"batch_size={self.batch_size}: not a multiple of {accelerator.num_processes} processes")
        teacher = source.resized(size).to_transformers()
        self.teacher = teacher.float().requires_grad_(False).to(accelerator.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
        self.student, self.optimizer = accelerator.prepare(model, optimizer)
        self.augment = build_augmentation(settings.augmentation, size)
        # Running means of divergence, agreement and errors.
        self.means = torch.zeros(2 + model.config.num_hidden_layers, device=accelerator.device)
        set_seed(settings.seed, device_specific=True)
        self.checkpoints: Checkpoints | None = None
        if checkpoints is not None:
            self._resume(checkpoints, source)
        processor, processes = resized_processor(source.image_processor, size), accelerator.num_processes
        sizes = len(images), self.batch_size, self.batch_size // processes
        place = {"process": accelerator.process_index, "processes": processes}
        stop = settings.steps or 2**31  # a budget in minutes has no number of steps
        batches = GlobalBatches(*sizes, seed=settings.seed, start=self.step, stop=stop, **place)
        self.batches = (pixel_values(processor, [images[key.index] for key in keys]) for keys in batches)
        self.progress = self._progress()
        self.reported = 100 * self.progress
        self.saved = self.since = time.monotonic()

    def _resume(self, directory: Path, source: VisionTransformerSource) -> None:
        """Save checkpoints in a directory from now on, and resume from the newest one, if there is one."""
        tensors = [part.tensor.reshape(-1).view(torch.uint8) for _, part in sorted(source.parts.items())]
        model = self.config.to_dict()
        # How it was made: the name of the source may change, and earlier versions did not record the number of images.
        conversion = (model.pop("conversion", None) or {}).get("options", {})
        # What determines the result, except the initial weights of the student.
        recipe = self.settings.model_dump() | {
            "images": sum_images(self.images),
            "image_processor": source.image_processor.to_dict(),
            "source_tensors": sum_arrays(tensors),
            "conversion": {name: value for name, value in conversion.items() if name != "images"},
            "model": {**model, "transformers_version": None},
        }
        self.recipe = json.loads(json.dumps(recipe, default=str))
        self.checkpoints = Checkpoints(self.accelerator, directory, keep=1)
        if path := self.checkpoints.newest():
            manifest = read_manifest(path)
            refuse_changes(path, manifest.recipe, self.recipe, f"remove {directory}")
            self.checkpoints.load(path)
            self.step, self.seconds = manifest.step, manifest.record.seconds
            (means,) = manifest.record.evaluations
            self.means = torch.tensor(list(means.values()), device=self.accelerator.device)
        self.checkpoints.set_aside(self.step)

    def is_done(self) -> bool:
        return self.progress >= 1

    def after_step(self, bar: tqdm, stops: bool) -> Path | None:
        now = time.monotonic()
        self.seconds, self.since = self.seconds + now - self.since, now
        self.progress = self._progress()
        done = 100 * self.progress
        bar.update(done - bar.n)
        saves = stops or self.is_done() or self._agreed(now - self.saved) > SAVE_EVERY
        if self.step % 10 == 0 or saves:  # in all processes, since the losses are reduced over them
            divergence, agreement, *errors = self.losses()
            line = f"KL {divergence:.3f}, hidden states {mean(errors):.3f}, agreement {agreement:.1%}"
            bar.set_postfix_str(f"step {self.step}, {line}")
            if bar.disable and done >= self.reported + 10:
                self.reported = done
                self.accelerator.print(f"Distillation: {done:.0f} %, step {self.step}, {line}", flush=True)
        if self.checkpoints is None or not saves:
            return None
        self.saved = now
        means = {str(i): value for i, value in enumerate(self.means.tolist())}
        record = {"seconds": self.seconds, "evaluations": [means]}
        return self.checkpoints.save(self.step, {"recipe": self.recipe, "record": record, "data": ""})

    def update(self) -> None:
        pixels, progress = next(self.batches), self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate(progress)
        pixels = pixels.to(self.accelerator.device)
        if self.augment is not None:
            # Drawn on the CPU, so that they are the same on any device.
            chosen = torch.rand(len(pixels), 1, 1, 1) < self.settings.augmentation_probability
            pixels = torch.where(chosen.to(pixels.device), self.augment(pixels), pixels)
        with self.accelerator.autocast():
            taught = self.teacher(pixel_values=pixels, output_hidden_states=True)
            # Before each block, for the tokens of the student.
            tokens, num_patches = int(bool(self.config.use_cls_token)), math.prod(self.config.grid_size)
            states = [torch.cat([x[:, :tokens], x[:, -num_patches:]], 1) for x in taught.hidden_states[:-1]]
            logits = taught.logits[:, self.classes]
            divergence, errors, agreement = student_losses(self.student, pixels, states, logits)
        weight = self.settings.hidden_states * (1 - progress) ** 2
        self.accelerator.backward(divergence + weight * errors.mean())
        self.accelerator.clip_grad_norm_(self.student.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        latest = torch.cat([torch.stack([divergence, agreement]), errors]).detach()
        # The plain mean over the first steps; with WINDOW alone, the first step would dominate in a short run.
        decay = min(WINDOW, self.step / (self.step + 1))
        self.means = torch.lerp(latest, self.means, decay)
        self.step += 1

    def _progress(self) -> float:
        """The share of the budget that is spent; of a budget in minutes, by the time of the main process."""
        if self.settings.minutes is None:
            return self.step / (self.settings.steps or 1)
        return min(self._agreed(self.seconds / (60 * self.settings.minutes)), 1.0)

    def _agreed(self, number: float) -> float:
        if self.accelerator.num_processes == 1:  # without waiting for a GPU
            return number
        return float(broadcast(torch.tensor(number, device=self.accelerator.device)))

    def losses(self) -> list[float]:
        """Return the running means of divergence, agreement and errors over all processes, which must be finite."""
        losses = self.accelerator.reduce(self.means, "mean")
        if not losses.isfinite().all():
            given = self.settings.learning_rate
            raise ValueError(f"the loss is not finite after {self.step} steps: give a learning_rate below {given}")
        return losses.tolist()

    def record(self) -> dict[str, Any]:
        """Return the record of the distillation, serializable as JSON."""
        divergence, agreement, *errors = (round(value, 5) for value in self.losses())
        done = {"images": len(self.images), "steps": self.step, "minutes": round(self.seconds / 60, 2)}
        losses = {"divergence": divergence, "agreement": agreement, "hidden_state_errors": errors}
        return self.settings.model_dump() | {"batch_size": self.batch_size} | done | losses


def rate(progress: float) -> float:
    """Return the learning rate relative to its peak: a linear warm-up, then a cosine decay to 0."""
    if progress < WARMUP:
        return max(progress, 1e-3) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))
