"""Distillation without labels: a converted model learns what its teacher computes, from images alone.

Two objectives, one after the other, in one run:

1. Layer by layer, for a share of the budget, which is 0 unless it is asked for. Each block is fed with the teacher's
   hidden states and fitted to its next ones; the last block is fitted with the classifier to the teacher's logits,
   since what a ViT leaves in the patches after its last block nobody reads. Blocks do not depend on each other.
2. End to end. The model sees images, and is fitted to the logits and, less and less, to the hidden states. This alone
   measured best (docs/conversion.md).

Teacher and student see the same augmented images. Hidden states are those of one batch: memory does not depend on the
number of images.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from PIL import Image
from torch import nn
from torch.nn.functional import kl_div, log_softmax, mse_loss
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers.image_processing_utils import BaseImageProcessor

from ..configuration_aft import pair
from ..data.image_size import resized_processor
from ..data.images import build_augmentation
from ..data.order import GlobalBatches, SampleKey
from ..modeling_aft import AFTForImageClassification
from ..training.checkpoints import Checkpoints
from ..training.manifest import read_manifest
from ..training.optimization import parameter_groups
from ..training.ownership import owned
from ..training.stopping import StopSignal
from .identity import differences, distillation_identity
from .source import VisionTransformerSource


WARMUP = 0.1  # share of the budget
MAX_GRAD_NORM = 1.0
SAVE_EVERY = 300.0  # seconds
WINDOW = 0.95  # of the running means of the losses


@dataclass(frozen=True)
class DistillationOptions:
    """How to distill: a budget of `steps` or of `minutes`, and the hyper-parameters.

    Attributes:
        steps: updates; None where the budget is time. A run of as many steps and one seed is reproducible.
        minutes: of the whole distillation, the time of interrupted runs included.
        batch_size: images per update, over all processes.
        learning_rate: the peak; it rises over a tenth of the budget and falls by a cosine.
        weight_decay: of AdamW.
        layer_by_layer: the share of the budget for the first objective, in [0, 1).
        hidden_states: the weight of the hidden states where the second one begins, beside 1 for the logits; it falls
            to 0 in a straight line, since an AFT cannot have all hidden states of its source, and need not.
        augmentation: of `build_augmentation`.
        seed: of the order of the images and of their augmentation.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    layer_by_layer: float = 0.0
    hidden_states: float = 1.0
    augmentation: str = "shift"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"distillation takes steps or minutes, got steps={self.steps} and minutes={self.minutes}")
        for name in ("steps", "minutes", "batch_size", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} of a distillation must be greater than 0, got {value}")
        for name in ("weight_decay", "hidden_states"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of a distillation must not be negative, got {getattr(self, name)}")
        if not 0 <= self.layer_by_layer < 1:
            raise ValueError(f"layer_by_layer must be in [0, 1), a share of the budget, got {self.layer_by_layer}")


def distill(
    model: AFTForImageClassification,
    source: VisionTransformerSource,
    images: Sequence[Image.Image],
    *,
    checkpoints: Path | None = None,
    accelerator: Accelerator | None = None,
    workers: int = 0,
    conversion: Mapping[str, Any] | None = None,
    owner: ExitStack | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit a converted model to its source on images without labels; in place, and on what Accelerate finds.

    Args:
        model: what `convert_deit` made of `source`.
        source: the teacher.
        images: pictures, which are opened when they are asked for; some thousand of those that the model is for.
        checkpoints: a directory to save to every five minutes and when stopped (SIGTERM, Ctrl-C), and to go on from.
            One distillation at a time can use it.
        accelerator: a new one by default.
        workers: processes that read images.
        conversion: how `model` was made, as far as its config does not tell it, in what JSON holds. Checkpoints of
            another conversion are refused.
        owner: what keeps the directory of the checkpoints from other distillations, until it is closed: for a caller
            who still has to write what came of this one. By default nobody does after the return.
        **options: those of `DistillationOptions`; `steps` or `minutes` is needed.

    Returns:
        What was done, for the report: the options, images, steps and minutes, the last mean losses, and the share of
        images on which model and teacher agreed in the last steps.

    Raises:
        ValueError: a source without a classifier or with other classes, no images, options that make no sense,
            checkpoints of other options or of another conversion, or a loss that is not finite.
        OSError: another process uses the directory of the checkpoints.
        SystemExit: with 128 + the number of the signal, after a signal and a checkpoint.
    """
    settings = DistillationOptions(**options)
    if not source.heads:
        raise ValueError(f"{source.name}: has no classifier, and so no logits to learn from")
    if len(images) == 0:
        raise ValueError("there are no images to distill on; give some thousand of those that the model is for")
    # Accelerate makes a group of CPU processes only if told that they are to be CPU processes.
    accelerator = accelerator or Accelerator(cpu=not torch.accelerator.is_available())
    dtype, mode = model.dtype, model.training
    with ExitStack() as alone:
        identity = {}
        if checkpoints is not None:
            (alone if owner is None else owner).enter_context(owned(Path(checkpoints)))
            identity = distillation_identity(asdict(settings), model, source, images, conversion or {})
        try:
            run = _Run(model.float().train(), source, images, settings, checkpoints, identity, accelerator, workers)
            run.train()
        finally:
            model.train(mode).to(device="cpu", dtype=dtype)
    return run.record()


class Objectives(nn.Module):
    """The two objectives of a student: the divergence from the teacher's logits, and the errors of hidden states.

    Args:
        student: the model to train.
    """

    def __init__(self, student: AFTForImageClassification):
        super().__init__()
        self.student = student

    def forward(
        self, pixels: torch.Tensor, states: Sequence[torch.Tensor], logits: torch.Tensor, layer_by_layer: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            pixels: (B, channels, height, width).
            states: of the teacher before each block, (B, T, d) for the tokens that the student has.
            logits: of the teacher, (B, classes).
            layer_by_layer: whether each block is fed with `states` in place of the output of the one before it.

        Returns:
            KL(teacher || student) of the classes in nats; for the embeddings and each block but the last the squared
            error of its output relative to the variance of the teacher's, (layers,); the share of images with the
            teacher's class.
        """
        model = self.student.aft
        hidden_states, grid_size = model.embeddings(pixels)
        errors = [relative_error(hidden_states, states[0])]
        for i, layer in enumerate(model.layers):
            # The embeddings are the student's own: those of the teacher have positions, which AFT-conv has not.
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
    """A distillation: what it works on, and how far it is."""

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
        self.identity = identity
        self.size, self.keeps_class_token = pair(model.config.image_size), model.config.use_cls_token
        self.teacher = source.to_transformers().float().requires_grad_(False).to(accelerator.device)
        self.interpolates = self.size != pair(source.config.image_size)
        groups = parameter_groups(model, settings.learning_rate, weight_decay=settings.weight_decay)
        self.objectives, self.optimizer = accelerator.prepare(
            Objectives(model), torch.optim.AdamW(groups, lr=settings.learning_rate)
        )
        self.augment = build_augmentation(settings.augmentation, self.size)
        self.step, self.seconds = 0, 0.0
        self.means: torch.Tensor | None = None  # of the last steps: divergence, agreement, errors
        self.checkpoints = None if checkpoints is None else Checkpoints(accelerator, checkpoints, keep=1)
        set_seed(settings.seed, device_specific=True)
        self._resume()
        self.loader = self._loader(_Images(images, _processor(source, self.size)), workers)

    def _loader(self, dataset: "_Images", workers: int) -> DataLoader[Any]:
        processes = self.accelerator.num_processes
        batch_size = min(self.settings.batch_size, self.num_images)
        if batch_size % processes:
            raise ValueError(f"batch_size={batch_size} is not a multiple of the {processes} processes")
        batches = GlobalBatches(
            self.num_images,
            batch_size,
            batch_size // processes,
            seed=self.settings.seed,
            start=self.step,
            stop=self.settings.steps or 2**31,  # time has no number of steps
            process=self.accelerator.process_index,
            processes=processes,
        )
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=dataset.collate,
            num_workers=workers,
            generator=torch.Generator(),  # or beginning to read would draw from the random numbers of the run
        )

    def train(self) -> None:
        """Spend what is left of the budget."""
        show, saved, since = self.accelerator.is_main_process, time.monotonic(), time.monotonic()
        reported = 100 * self._progress(own=True)
        options = {"disable": None if show else True}  # none in a log
        bar = tqdm(total=100, desc="Distillation", bar_format="{l_bar}{bar}| {postfix}", **options)
        with StopSignal(self.accelerator) as stop, bar:
            batches: Iterator[torch.Tensor] = iter(self.loader)
            while (progress := self._progress()) < 1:
                self._update(next(batches), progress)
                now = time.monotonic()
                self.step, self.seconds, since = self.step + 1, self.seconds + now - since, now
                done = 100 * self._progress(own=True)
                bar.update(done - bar.n)
                if self.step % 10 == 0:  # in all processes: the losses are means over them
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
                    place = "nothing was saved" if self.checkpoints is None else f"{path}: the same command goes on"
                    self.accelerator.print(f"stopped after {self.step} steps; {place}")
                    raise SystemExit(128 + stopped)
        self._check()

    def _update(self, pixels: torch.Tensor, progress: float) -> None:
        settings, layer_by_layer = self.settings, progress < self.settings.layer_by_layer
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate(progress)
        pixels = pixels.to(self.accelerator.device)
        if self.augment is not None:
            pixels = self.augment(pixels)
        with self.accelerator.autocast():
            states, logits = self._teach(pixels)
            divergence, errors, agreement = self.objectives(pixels, states, logits, layer_by_layer)
        # Alone, the blocks have one loss each; together, hidden states are a help for the logits.
        of_states = errors.sum() if layer_by_layer else weight_of_hidden_states(settings, progress) * errors.mean()
        self.accelerator.backward(divergence + of_states)
        self.accelerator.clip_grad_norm_(self.objectives.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        latest = torch.cat([torch.stack([divergence, agreement]), errors]).detach()
        self.means = latest if self.means is None else torch.lerp(latest, self.means, WINDOW)

    @torch.no_grad()
    def _teach(self, pixels: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The teacher's hidden states before each block, for the tokens that the student has, and its logits."""
        options = {"interpolate_pos_encoding": True} if self.interpolates else {}
        outputs = self.teacher(pixel_values=pixels, output_hidden_states=True, **options)
        patch_size = pair(self.teacher.config.patch_size)
        num_patches = (self.size[0] // patch_size[0]) * (self.size[1] // patch_size[1])
        states = [x[:, -num_patches:] for x in outputs.hidden_states[:-1]]
        if self.keeps_class_token:
            states = [torch.cat([x[:, :1], patches], 1) for x, patches in zip(outputs.hidden_states, states)]
        return states, outputs.logits

    def _progress(self, *, own: bool = False) -> float:
        """The share of the budget that is spent: for all processes that of the first one."""
        if self.settings.steps is not None:
            return self.step / self.settings.steps
        assert self.settings.minutes is not None  # the options have one of them
        spent = self.seconds / (60 * self.settings.minutes)
        return min(spent if own else self._agreed(spent), 1.0)

    def _agreed(self, number: float) -> float:
        if self.accelerator.num_processes == 1:
            return number
        return float(broadcast(torch.tensor(number, device=self.accelerator.device)))

    def _mean_losses(self) -> torch.Tensor:
        """Of all processes."""
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
        """What was done, in words and numbers that JSON holds."""
        divergence, agreement, *errors = (round(value, 5) for value in self._mean_losses().tolist())
        return {
            **asdict(self.settings),
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
        return self.checkpoints.save(self.step, state)

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if self.checkpoints is None:
            return
        self.checkpoints.remove_partial()
        path = self.checkpoints.newest()
        if path is None:
            self.checkpoints.set_aside(0)
            return
        manifest = read_manifest(path)
        then, now = differences(manifest.recipe, self.identity)
        if then != now:
            raise ValueError(
                f"{self.checkpoints.directory}: the distillation that was begun there has the options {then}, and "
                f"these are {now}; give those, or remove the directory"
            )
        self.checkpoints.load(path)
        self.checkpoints.set_aside(manifest.step)
        self.step, self.seconds = manifest.step, manifest.record.seconds
        (means,) = manifest.record.evaluations
        self.means = torch.tensor(list(means.values()), device=self.accelerator.device)
        self.accelerator.print(f"going on from {path}")


class _Images(Dataset[Image.Image]):
    """Pictures by the keys of `GlobalBatches`, and batches of them as pixel values."""

    def __init__(self, images: Sequence[Image.Image], processor: BaseImageProcessor):
        self.images, self.processor = images, processor

    def __getitem__(self, key: SampleKey) -> Image.Image:
        return self.images[key.index].convert("RGB")

    def collate(self, pictures: list[Image.Image]) -> torch.Tensor:
        """(B, channels, height, width)."""
        return self.processor(pictures, return_tensors="pt")["pixel_values"]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The mean squared error relative to the variance of what is expected."""
    expected = expected.float()
    return mse_loss(found.float(), expected) / expected.var().clamp_min(1e-12)


def rate(progress: float) -> float:
    """The learning rate relative to its peak: a linear warm-up, then a cosine to 0."""
    if progress < WARMUP:
        return max(progress, 1e-3) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def weight_of_hidden_states(settings: DistillationOptions, progress: float) -> float:
    """That of their mean error beside 1 for the logits, when the model is trained end to end."""
    return settings.hidden_states * (1 - progress) / (1 - settings.layer_by_layer)


def _processor(source: VisionTransformerSource, size: tuple[int, int]) -> BaseImageProcessor:
    if size == pair(source.config.image_size):
        return source.image_processor
    return resized_processor(source.image_processor, size)


__all__ = ["DistillationOptions", "Objectives", "distill"]
