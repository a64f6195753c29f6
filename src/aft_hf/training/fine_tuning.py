"""A Trainer that knows what a new AFT needs: a learning rate for its position biases, and perhaps a teacher, mixed
images, and an average of the weights."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..configuration_aft import AFTConfig, pair
from ..data.classes import are_names, shortened
from ..data.classification import mix_batch
from ..publishing import write_card
from ..reading import Document, UnreadableError, explained, first_line
from .averaging import averaged, keep_average, swap_average
from .distillation import distillation_loss
from .optimization import parameter_groups
from .records import move_into
from .tasks import regularization


logger = logging.get_logger(__name__)


class SavedState(Document):
    """trainer_state.json of a checkpoint: what Trainer calculates with, or adds to, when it goes on."""

    global_step: Annotated[int, Field(ge=0, lt=2**53)]
    train_batch_size: Annotated[int, Field(gt=0)]
    epoch: float | None = None
    log_history: list[dict[str, Any]] = []
    stateful_callbacks: dict[str, dict[str, Any] | list[dict[str, Any]]] = {}


class FineTuner(Trainer):
    """transformers' Trainer with some options more.

    Args:
        position_bias_scale: factor on the learning rate of position biases (see `parameter_groups`).
        augment: applied to the pixel values, (B, channels, height, width), of each batch in training. It is part of
            the step, not of reading the data, so that a training that is resumed draws the same random numbers.
        teacher: a ViT or DeiT of the same classes, whose logits enter the training loss (`distillation_loss`). It
            sees the pixel values of the model, so that both need the same normalization.
        distillation: the keyword arguments of `distillation_loss`.
        mixup, cutmix: alpha of their Beta distributions, 0 for none: each batch in training is mixed with itself in
            reverse (`mix_batch`), and the loss is the cross entropy with the mixed classes.
        ema_decay: keep an exponential moving average of the weights (`keep_average`); evaluations during a training
            and the model that it leaves are those of the average.
        **options: the arguments of `Trainer`.

    Raises:
        ValueError: a teacher of other classes or another numbering of them, values out of range, or options that do
            not go together.
    """

    model: Any  # a PreTrainedModel, or what PEFT puts around one

    def __init__(
        self,
        *,
        position_bias_scale: float = 1.0,
        augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
        teacher: PreTrainedModel | None = None,
        distillation: dict[str, Any] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        ema_decay: float | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.position_bias_scale, self.augment = position_bias_scale, augment
        multiplier = getattr(self.model.config, "position_bias_multiplier", 1.0)
        if position_bias_scale > 1 and multiplier > 1:
            logger.warning(
                f"position biases learn {position_bias_scale:g} times as fast by position_bias_scale, and already "
                f"{multiplier:g} times by the position_bias_multiplier of the model: leave out the first"
            )
        self.teacher, self.distillation = teacher, distillation or {}
        self.mixing, self.ema_decay = {"mixup": mixup, "cutmix": cutmix}, ema_decay
        self._averaged: torch.optim.Optimizer | None = None  # the optimizer that keeps an average
        self._check_mixing_and_average()
        if teacher is not None or any(self.mixing.values()):
            # The loss is then a mean over its own batch, which Trainer has to scale where gradients are accumulated.
            self.model_accepts_loss_kwargs = False
        if teacher is not None:
            _require_same_classes(teacher, self.model)
            teacher.eval().requires_grad_(False).to(self.args.device)
        if self.label_smoother is not None and getattr(self.model.config, "position_bias_entropy_weight", 0) > 0:
            raise ValueError(
                "label_smoothing_factor takes the place of the model's own loss, and so of what "
                "position_bias_entropy_weight adds to it: set one of them to 0"
            )

    def _check_mixing_and_average(self) -> None:
        for name, alpha in self.mixing.items():
            if not 0 <= alpha < math.inf:
                raise ValueError(f"{name} must be the alpha of a Beta distribution, 0 (none) or more, got {alpha}")
        kind = self.model.config.problem_type
        if any(self.mixing.values()) and kind not in (None, "single_label_classification"):
            raise ValueError(f"mixup and cutmix need one class per image, and the model has problem_type {kind!r}")
        if self.ema_decay is None:
            return
        if not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in (0, 1), got {self.ema_decay}")
        if self.is_deepspeed_enabled:
            raise ValueError("ema_decay does not go with DeepSpeed, whose optimizers keep a state of their own")
        if self.args.load_best_model_at_end:
            raise ValueError(
                "ema_decay does not go with load_best_model_at_end: checkpoints have the weights of the training, and "
                "what is evaluated is their average; leave one of them out"
            )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that `args.optim` names, with the groups of `parameter_groups`."""
        if self.optimizer is None:
            model = self.model if model is None else model
            groups = parameter_groups(
                model,
                self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                position_bias_scale=self.position_bias_scale,
            )
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **options)
        if self.ema_decay is not None and self._averaged is not self.optimizer:
            keep_average(self.optimizer, self.ema_decay)
            self._averaged = self.optimizer
        return self.optimizer

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        """Trainer's; with `ema_decay`, the model is the average of its weights in the end."""
        output = super().train(*arguments, **options)
        if self.ema_decay is not None:
            swap_average(_inner(self.optimizer), self.model_wrapped)
        return output

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Trainer's loss; in training of augmented images, and with the teacher's part."""
        if self.augment is not None and model.training:
            inputs = {**inputs, "pixel_values": self.augment(inputs["pixel_values"])}
        if any(self.mixing.values()) and model.training:
            loss, outputs, inputs = self._mixed_loss(model, inputs)
        else:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.teacher is not None and model.training:
            teacher_logits = self._teacher_logits(inputs["pixel_values"])
            loss = distillation_loss(loss, outputs.logits, teacher_logits, **self.distillation)
        return (loss, outputs) if return_outputs else loss

    def _mixed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any, dict[str, Any]]:
        """The loss of mixed images, the outputs of the model, and its inputs."""
        targets = F.one_hot(inputs["labels"], self.model.config.num_labels).float()
        pixels, targets = mix_batch(inputs["pixel_values"], targets, **self.mixing)
        inputs = {**inputs, "pixel_values": pixels}
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        smoothing = self.args.label_smoothing_factor
        loss = F.cross_entropy(outputs.logits.float(), targets, label_smoothing=smoothing)
        return loss + regularization(self.model, outputs), outputs, inputs

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Trainer's, which goes on with a new optimizer where the checkpoint has none."""
        if checkpoint is not None and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # they have other files
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
                if not Path(checkpoint, name).is_file():
                    raise UnreadableError(
                        f"{checkpoint}: has no {name}, without which a run cannot go on; give another checkpoint"
                    )
        with explained(f"{checkpoint}: its optimizer or schedule cannot be loaded; give an earlier checkpoint"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with explained(f"{checkpoint}: its random states cannot be loaded; give an earlier checkpoint"):
            super()._load_rng_state(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with explained(f"{resume_from_checkpoint}: its model cannot be loaded; give an earlier checkpoint"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Trainer's, which leaves the random numbers of a training that continues as they were, and which evaluates
        the average of the weights where there is one."""
        during_training = self.ema_decay is not None and self.is_in_train
        weights = averaged(_inner(self.optimizer), self.model_wrapped) if during_training else nullcontext()
        with torch.random.fork_rng(devices=[]), weights:
            return super().evaluate(*arguments, **options)

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """The card of `aft_hf.publishing`, from the files of the run; Trainer's for adapters and other models."""
        assert self.args.output_dir is not None  # Trainer's arguments have filled it in
        config = Path(self.args.output_dir) / "config.json"
        if not config.is_file() or self.model.config.model_type != AFTConfig.model_type:
            super().create_model_card(*arguments, **options)
        elif self.is_world_process_zero():
            write_card(self.args.output_dir, repo_id=getattr(self, "hub_model_id", None))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Trainer's, which leaves an earlier model as it was if it cannot write all files of the new one."""
        if not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        output_dir = output_dir or self.args.output_dir
        assert output_dir is not None
        directory = Path(output_dir)
        try:
            with move_into(directory) as aside:
                super()._save(str(aside), state_dict)
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer has an error of its own
            raise OSError(
                f"cannot write the model to {directory} ({first_line(error)}); what was there stays as it was"
            ) from error

    @torch.no_grad()
    def _teacher_logits(self, pixel_values: torch.Tensor) -> torch.Tensor:
        teacher = self.teacher
        assert teacher is not None
        other_size = tuple(pixel_values.shape[2:]) != pair(teacher.config.image_size)
        with self.accelerator.autocast():
            return teacher(pixel_values.to(teacher.dtype), interpolate_pos_encoding=other_size).logits


def _inner(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The optimizer of a training itself, where Accelerate has wrapped it."""
    assert optimizer is not None
    return getattr(optimizer, "optimizer", optimizer)


def _require_same_classes(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    if teacher.base_model is teacher:
        raise ValueError(f"the teacher is a {type(teacher).__name__}, which has no classifier to learn from")
    theirs, ours = (list((model.config.id2label or {}).values()) for model in (teacher, student))
    if len(theirs) != len(ours):
        raise ValueError(f"the teacher knows {len(theirs)} classes, the model {len(ours)}: both need the same")
    if theirs == ours:
        return
    if sorted(theirs) == sorted(ours):
        raise ValueError(f"the teacher numbers the classes {theirs}, the model {ours}")
    both = f"{shortened(theirs)}, the model {shortened(ours)}"
    if are_names(theirs) and are_names(ours):
        raise ValueError(
            f"the teacher knows the classes {both}: take a teacher of the same classes, or give it their names "
            "(id2label) if these are the same"
        )
    logger.warning(f"the classes of teacher and model are taken to be the same by number: the teacher has {both}")
