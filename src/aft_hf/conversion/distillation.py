"""Distillation without labels: a converted model learns the outputs of its teacher from images alone.

A run optimizes two objectives, one after the other:

1. Layer by layer, for a share of the budget (default: 0). Each block gets the teacher's hidden states as input and is
   fitted to the teacher's next hidden states. The last block is fitted together with the classifier to the teacher's
   logits, since a ViT does not use the hidden states of the patches after its last block. The blocks are independent.
2. End to end. The model gets images and is fitted to the teacher's logits and, with a weight that decays to 0, to its
   hidden states. This objective alone measured best (docs/conversion.md).

Teacher and student see the same images, a random subset of which is augmented. Only the hidden states of one batch are
held in memory, so memory does not depend on the number of images.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, set_seed
from PIL import Image
from torch import nn
from torch.nn.functional import kl_div, log_softmax, mse_loss
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers.image_processing_utils import BaseImageProcessor

from ..configuration_aft import pair
from ..data.classes import chooses_a_class
from ..data.image_size import pixel_values, processor_for
from ..data.images import build_augmentation, check_augmentation
from ..data.order import GlobalBatches, SampleKey
from ..modeling_aft import AFTForImageClassification
from ..reading import explained
from ..training.checkpoints import Checkpoints, is_own, remove_checkpoints
from ..training.manifest import MANIFEST, find_changes, read_manifest
from ..training.optimization import parameter_groups
from ..training.ownership import RUN, owned
from ..training.stopping import StopSignal
from .errors import ConversionError
from .identity import describe, distillation_identity
from .source import VisionTransformerSource


WARMUP = 0.1  # share of the budget
MAX_GRAD_NORM = 1.0
SAVE_EVERY = 300.0  # seconds
WINDOW = 0.95  # decay of the running means of the losses


@dataclass(frozen=True)
class DistillationOptions:
    """Options of a distillation: the budget, in `steps` or in `minutes`, and the hyperparameters.

    Attributes:
        steps: number of updates; None for a budget in minutes. Runs with the same steps and seed are reproducible.
        minutes: duration of the whole distillation, including interrupted runs; None for a budget in steps.
        batch_size: images per update, summed over all processes.
        learning_rate: peak learning rate; it rises over the first tenth of the budget and then decays by a cosine.
        weight_decay: weight decay of AdamW.
        layer_by_layer: share of the budget for the layer-by-layer objective, in [0, 1).
        hidden_states: initial weight of the hidden states in the end-to-end objective, where the logits have weight
            1. It is proportional to the square of the remaining share of the end-to-end phase, since an AFT cannot
            reproduce all hidden states of its source, and need not.
        augmentation: name of the augmentation, as for `build_augmentation`.
        augmentation_probability: probability that an image is augmented, in [0, 1]. The other images are unchanged,
            as at inference: a teacher that was trained without this augmentation is less accurate with it.
        seed: seed of the order of the images and of their augmentation.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    layer_by_layer: float = 0.0
    hidden_states: float = 5.0
    augmentation: str = "shift"
    augmentation_probability: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(
                f"distillation takes steps or minutes, exactly one, got steps={self.steps} and minutes={self.minutes}"
            )
        for name in ("steps", "minutes", "batch_size", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} of a distillation must be greater than 0 and finite, got {value}")
        for name in ("weight_decay", "hidden_states"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} of a distillation must be finite and not negative, got {getattr(self, name)}"
                )
        if not 0 <= self.layer_by_layer < 1:
            raise ValueError(f"layer_by_layer must be in [0, 1), a share of the budget, got {self.layer_by_layer}")
        if not 0 <= self.augmentation_probability <= 1:
            raise ValueError(f"augmentation_probability must be in [0, 1], got {self.augmentation_probability}")
        check_augmentation(self.augmentation)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


def distill(
    model: AFTForImageClassification,
    source: VisionTransformerSource,
    images: Sequence[Image.Image],
    *,
    checkpoints: Path | None = None,
    accelerator: Accelerator | None = None,
    workers: int = 0,
    conversion: Mapping[str, Any] | None = None,
    lock: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train a converted model in place on the outputs of its source, on images without labels.

    It runs on the device of `accelerator`, in all processes of an `accelerate launch`.

    Args:
        model: the model that `convert_deit` returned for `source`. For AFT-conv, `init="attention"` measured best.
        source: the teacher.
        images: sequence of PIL images, each loaded when it is accessed: a few thousand images of the model's domain.
        checkpoints: directory of the checkpoints. A checkpoint is saved every five minutes, at the end, when the run
            is stopped (SIGTERM, Ctrl-C), and, in a single process, when `images` raises an error. The run resumes from
            the newest one. Only one distillation at a time can use the directory. Default: no checkpoints.
        accelerator: the `Accelerator` to train with. Default: a new one.
        workers: number of processes that load images.
        conversion: how `model` was converted, as far as its config does not contain it; must be serializable as JSON.
            Checkpoints of another conversion are refused.
        lock: whether to lock the checkpoint directory; False if the caller holds its lock.
        **options: fields of `DistillationOptions`; `steps` or `minutes` is required.

    Returns:
        The record of the distillation for the report: the options, the numbers of images, steps and minutes, the last
        running means of the losses, and the share of images on which model and teacher agreed in the last steps.

    Raises:
        ValueError: the source has no classifier, is a multi-label classifier or a regression, or has another number of
            classes than the model; there are no images; an option is invalid; the checkpoints belong to other options
            or to another conversion; or the loss is not finite.
        OSError: another process uses the checkpoint directory, or it cannot be written.
        SystemExit: the run was stopped by a signal, after a checkpoint was saved; the code is 128 + the signal number.
    """
    settings = DistillationOptions(**options)
    check_distillable(source, images)
    given, expected = model.config.num_labels, source.config.num_labels
    if given != expected:
        raise ValueError(f"the model has {given} classes and {source.name} has {expected}; both need the same classes")
    # Accelerate creates a process group on CPUs only with cpu=True.
    accelerator = accelerator or Accelerator(cpu=not torch.accelerator.is_available())
    dtype, mode = model.dtype, model.training
    identity = {}
    with owned(Path(checkpoints)) if lock and checkpoints is not None else nullcontext():
        if checkpoints is not None:
            identity = distillation_identity(asdict(settings), model, source, images, conversion or {})
        try:
            run = _Run(model.float().train(), source, images, settings, checkpoints, identity, accelerator, workers)
            run.train()
        finally:
            model.train(mode).to(device="cpu", dtype=dtype)
    return run.record()


@contextmanager
def locked_checkpoints(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory for the checkpoints of a distillation; remove them if the context ends normally.

    It yields whether this is the main process of the launch.

    Raises:
        ConversionError: the path is a link or a file, or the directory holds anything but checkpoints.
        OSError: another process uses the directory, or it cannot be written.
    """
    present = directory.iterdir() if directory.is_dir() and not directory.is_symlink() else iter([directory])
    present = (path for path in present if os.path.lexists(path) and path.name != RUN)
    if foreign := [path for path in present if not is_own(path) or _lacks_manifest(path)]:
        raise ConversionError(
            f"{foreign[0]}: is no checkpoint of a distillation, and checkpoints are saved in {directory}; move it, or "
            "give another output directory"
        )
    state = PartialState(cpu=not torch.accelerator.is_available())
    with owned(directory, temporary=True):
        yield state.is_main_process
        if state.is_main_process:
            remove_checkpoints(directory)


def _lacks_manifest(path: Path) -> bool:
    """Whether a directory has the name of a complete checkpoint, but is none."""
    return path.name.startswith("step-") and not (path / MANIFEST).is_file()


def check_distillable(source: VisionTransformerSource, images: Sequence[Image.Image]) -> None:
    """Raise a `ValueError` if the source has no classifier that chooses a class, or if there are no images."""
    if not source.heads:
        raise ValueError(
            f"{source.name}: has no classifier, so there are no logits to learn; give a model with a classifier"
        )
    if not chooses_a_class(source.config):  # the divergence is that of a softmax
        raise ValueError(
            f"{source.name}: a distillation needs a classifier that chooses one of several classes; this one has "
            f"num_labels={source.config.num_labels} and problem_type={source.config.problem_type!r}"
        )
    if len(images) == 0:
        raise ValueError("there are no images to distill on; give a few thousand images of the model's domain")


class Objectives(nn.Module):
    """Losses of a student: the KL divergence from the teacher's logits, and the errors of the hidden states.

    Args:
        student: the model to train.
    """

    def __init__(self, student: AFTForImageClassification):
        super().__init__()
        self.student = student

    def forward(
        self, pixels: torch.Tensor, states: Sequence[torch.Tensor], logits: torch.Tensor, layer_by_layer: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the losses of a batch.

        Args:
            pixels: pixel values, (B, channels, height, width).
            states: hidden states of the teacher before each block, (B, T, d) for the tokens that the student has.
            logits: logits of the teacher, (B, classes).
            layer_by_layer: whether each block gets `states` as input instead of the output of the previous block.

        Returns:
            The divergence KL(teacher || student) of the classes in nats; the squared errors of the outputs of the
            embeddings and of each block but the last, relative to the variance of the teacher's, (layers,); and the
            share of images for which the student predicts the class of the teacher.
        """
        model = self.student.aft
        hidden_states, grid_size = model.embeddings(pixels)
        errors = [relative_error(hidden_states, states[0])]
        for i, layer in enumerate(model.layers):
            # The first block gets the student's own embeddings: the teacher's include position embeddings, which
            # AFT-conv lacks.
            hidden_states = layer(states[i] if layer_by_layer and i > 0 else hidden_states, grid_size=grid_size)
            if i + 1 < len(model.layers):
                errors.append(relative_error(hidden_states, states[i + 1]))
        hidden_states = model.layernorm(hidden_states)
        pooled = hidden_states[:, 0] if model.config.pooling == "cls" else self._patches(hidden_states).mean(1)
        found = log_softmax(self.student.classifier(pooled).float(), -1)
        divergence = kl_div(found, log_softmax(logits.float(), -1), reduction="batchmean", log_target=True)
        return divergence, torch.stack(errors), (found.argmax(-1) == logits.argmax(-1)).float().mean()

    def _patches(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, int(bool(self.student.config.use_cls_token)) :]


class _Run:
    """One distillation run: its components and its progress."""

    def __init__(
        self,
        model: AFTForImageClassification,
        source: VisionTransformerSource,
        images: Sequence[Image.Image],
        settings: DistillationOptions,
        checkpoints: str | Path | None,
        identity: dict[str, Any],
        accelerator: Accelerator,
        workers: int,
    ):
        self.settings, self.accelerator, self.num_images = settings, accelerator, len(images)
        self.batch_size = min(settings.batch_size, len(images))
        self.identity = identity
        self.size, self.keeps_class_token = pair(model.config.image_size), model.config.use_cls_token
        self.teacher = source.to_transformers().float().requires_grad_(False).to(accelerator.device)
        self.interpolates = self.size != pair(source.config.image_size)
        groups = parameter_groups(model, settings.learning_rate, weight_decay=settings.weight_decay)
        self.objectives, self.optimizer = accelerator.prepare(
            Objectives(model), torch.optim.AdamW(groups, lr=settings.learning_rate)
        )
        self.augment = build_augmentation(settings.augmentation, self.size)
        self.step, self.saved_at, self.seconds = 0, 0, 0.0
        self.means: torch.Tensor | None = None  # running means of divergence, agreement and errors
        self.checkpoints = None if checkpoints is None else Checkpoints(accelerator, checkpoints, keep=1)
        set_seed(settings.seed, device_specific=True)
        self._resume()
        self.loader = self._loader(_Images(images, processor_for(source.image_processor, self.size)), workers)

    def _loader(self, dataset: "_Images", workers: int) -> DataLoader[Any]:
        processes = self.accelerator.num_processes
        if self.batch_size % processes:
            raise ValueError(f"batch_size={self.batch_size} is not a multiple of the {processes} processes")
        batches = GlobalBatches(
            self.num_images,
            self.batch_size,
            self.batch_size // processes,
            seed=self.settings.seed,
            start=self.step,
            stop=self.settings.steps or 2**31,  # a budget in minutes has no number of steps
            process=self.accelerator.process_index,
            processes=processes,
        )
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=dataset.collate,
            num_workers=workers,
            generator=torch.Generator(),  # otherwise, the start of the loader would advance the global generator
        )

    def train(self) -> None:
        """Train until the budget is spent."""
        show, saved, since = self.accelerator.is_main_process, time.monotonic(), time.monotonic()
        reported = 100 * self._progress(own=True)
        options = {"disable": None if show else True}  # None: no bar unless in a terminal
        bar = tqdm(total=100, desc="Distillation", bar_format="{l_bar}{bar}| {postfix}", **options)
        with StopSignal(self.accelerator) as stop, bar:
            batches: Iterator[torch.Tensor] = iter(self.loader)
            while (progress := self._progress()) < 1:
                self._update(self._next(batches), progress)
                now = time.monotonic()
                self.step, self.seconds, since = self.step + 1, self.seconds + now - since, now
                done = 100 * self._progress(own=True)
                bar.update(done - bar.n)
                if self.step % 10 == 0:  # in all processes, since the losses are reduced over them
                    self._check()
                    line = self._line()
                    bar.set_postfix_str(line)
                    if bar.disable and done >= reported + 10:
                        reported = done
                        self.accelerator.print(f"Distillation: {done:.0f} %, {line}", flush=True)
                stopped = stop.agreed()
                if self.checkpoints is not None and (stopped or self._agreed(now - saved) > SAVE_EVERY):
                    path, saved = self._save(), now
                if stopped:
                    place = "no checkpoint saved" if self.checkpoints is None else f"run again to resume from {path}"
                    self.accelerator.print(f"stopped after {self.step} steps; {place}")
                    raise SystemExit(128 + stopped)
        self._check()
        if self.checkpoints is not None and self.step > self.saved_at:
            try:
                self._save()
            except OSError as failed:  # the model, which is smaller, may fit on the disk
                if self.accelerator.num_processes > 1:  # the others wait for this process to save
                    raise
                self.accelerator.print(failed)

    def _next(self, batches: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return the next batch. If an image cannot be read, save a checkpoint: the image can then be replaced."""
        try:
            return next(batches)
        except Exception:
            # The other processes do not know of the error, and a checkpoint needs all of them.
            if self.checkpoints is not None and self.accelerator.num_processes == 1 and self.step > self.saved_at:
                try:
                    self.accelerator.print(f"the next images cannot be read; run again to resume from {self._save()}")
                except OSError as failed:
                    self.accelerator.print(f"the next images cannot be read, and {failed}")
            raise

    def _update(self, pixels: torch.Tensor, progress: float) -> None:
        settings, layer_by_layer = self.settings, progress < self.settings.layer_by_layer
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate(progress)
        pixels = pixels.to(self.accelerator.device)
        if self.augment is not None:
            chosen = torch.rand(len(pixels), 1, 1, 1) < settings.augmentation_probability  # the same on any device
            pixels = torch.where(chosen.to(pixels.device), self.augment(pixels), pixels)
        with self.accelerator.autocast():
            states, logits = self._teach(pixels)
            divergence, errors, agreement = self.objectives(pixels, states, logits, layer_by_layer)
        # Layer by layer, each block has a loss of its own; end to end, the hidden states are an auxiliary loss.
        of_states = errors.sum() if layer_by_layer else weight_of_hidden_states(settings, progress) * errors.mean()
        self.accelerator.backward(divergence + of_states)
        self.accelerator.clip_grad_norm_(self.objectives.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        latest = torch.cat([torch.stack([divergence, agreement]), errors]).detach()
        # The plain mean over the first steps; with WINDOW alone, the first step would dominate in a short run.
        weight = min(WINDOW, self.step / (self.step + 1))
        self.means = latest if self.means is None else torch.lerp(latest, self.means, weight)

    @torch.no_grad()
    def _teach(self, pixels: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the teacher's hidden states before each block, for the tokens of the student, and its logits."""
        options = {"interpolate_pos_encoding": True} if self.interpolates else {}
        outputs = self.teacher(pixel_values=pixels, output_hidden_states=True, **options)
        patch_size = pair(self.teacher.config.patch_size)
        num_patches = (self.size[0] // patch_size[0]) * (self.size[1] // patch_size[1])
        states = [x[:, -num_patches:] for x in outputs.hidden_states[:-1]]
        if self.keeps_class_token:
            states = [torch.cat([x[:, :1], patches], 1) for x, patches in zip(outputs.hidden_states, states)]
        return states, outputs.logits

    def _progress(self, *, own: bool = False) -> float:
        """The share of the budget that is spent, by the time of the main process or (`own`) of this process."""
        if self.settings.steps is not None:
            return self.step / self.settings.steps
        assert self.settings.minutes is not None  # `DistillationOptions` requires one of the two
        spent = self.seconds / (60 * self.settings.minutes)
        return min(spent if own else self._agreed(spent), 1.0)

    def _agreed(self, number: float) -> float:
        if self.accelerator.num_processes == 1:
            return number
        return float(broadcast(torch.tensor(number, device=self.accelerator.device)))

    def _mean_losses(self) -> torch.Tensor:
        """The running means, averaged over all processes."""
        assert self.means is not None
        return self.accelerator.reduce(self.means, "mean")

    def _check(self) -> None:
        if self.means is not None and not self._mean_losses().isfinite().all():
            raise ValueError(
                f"the loss of the distillation is not finite after {self.step} steps: give a smaller learning_rate "
                f"than {self.settings.learning_rate}"
            )

    def _line(self) -> str:
        divergence, agreement, *errors = self._mean_losses().tolist()
        error = sum(errors) / len(errors)
        return f"step {self.step}, KL {divergence:.3f}, hidden states {error:.3f}, agreement {agreement:.1%}"

    def record(self) -> dict[str, Any]:
        """Return the record of the distillation, serializable as JSON."""
        divergence, agreement, *errors = (round(value, 5) for value in self._mean_losses().tolist())
        return {
            **asdict(self.settings),
            "batch_size": self.batch_size,
            "images": self.num_images,
            "steps": self.step,
            "minutes": round(self.seconds / 60, 2),
            "divergence": divergence,
            "agreement": agreement,
            "hidden_state_errors": errors,
        }

    def _save(self) -> Path:
        assert self.means is not None and self.checkpoints is not None
        means = {str(i): mean for i, mean in enumerate(self.means.tolist())}
        record = {"losses": [], "pending": [], "seconds": self.seconds, "evaluations": [means]}
        state = {"recipe": self.identity, "record": record, "data": "", "position": (), "rates": []}
        path = self.checkpoints.save(self.step, state)
        self.saved_at = self.step
        return path

    def _resume(self) -> None:
        """Resume from the newest checkpoint, if there is one."""
        if self.checkpoints is None:
            return
        self.checkpoints.remove_partial()
        path = self.checkpoints.newest()
        if path is None:
            self.checkpoints.set_aside(0)
            return
        manifest = read_manifest(path)
        if changes := find_changes(manifest.recipe, self.identity):
            raise ValueError(
                f"{self.checkpoints.directory}: another distillation was begun there ({describe(changes)}); give "
                "the earlier values, or remove the directory"
            )
        self.checkpoints.load(path)
        self.checkpoints.set_aside(manifest.step)
        self.step = self.saved_at = manifest.step
        self.seconds = manifest.record.seconds
        with explained(f"{path}: its running means do not fit the model; remove this checkpoint"):
            (means,) = manifest.record.evaluations
            latest = torch.tensor(list(means.values()), device=self.accelerator.device)
            # Divergence, agreement, and the errors of the embeddings and of each block but the last.
            self.means = latest.float().reshape(2 + self.teacher.config.num_hidden_layers)
        self.accelerator.print(f"resuming from {path}")


class _Images(Dataset[Image.Image]):
    """Dataset of images, indexed by the keys of `GlobalBatches`; `collate` converts images to pixel values."""

    def __init__(self, images: Sequence[Image.Image], processor: BaseImageProcessor):
        self.images, self.processor = images, processor

    def __getitem__(self, key: SampleKey) -> Image.Image:
        return self.images[key.index]

    def collate(self, pictures: list[Image.Image]) -> torch.Tensor:
        """Return the pixel values of a batch, (B, channels, height, width)."""
        return pixel_values(self.processor, pictures)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error relative to the variance of the expected values."""
    expected = expected.float()
    return mse_loss(found.float(), expected) / expected.var().clamp_min(1e-12)


def rate(progress: float) -> float:
    """Return the learning rate relative to its peak: a linear warm-up, then a cosine decay to 0."""
    if progress < WARMUP:
        return max(progress, 1e-3) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def weight_of_hidden_states(settings: DistillationOptions, progress: float) -> float:
    """Return the weight of the mean error of the hidden states in the end-to-end objective (logits: 1)."""
    return settings.hidden_states * ((1 - progress) / (1 - settings.layer_by_layer)) ** 2


__all__ = ["DistillationOptions", "Objectives", "distill"]
