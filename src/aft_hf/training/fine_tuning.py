"""A Trainer for AFT models: a separate learning rate for position biases, and optional distillation, augmentation,
mixup, CutMix and EMA of the weights."""

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
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..configuration_aft import AFTConfig, pair
from ..data.atomic_files import move_into
from ..data.classes import are_names, shortened
from ..data.classification import mix_batch
from ..loading import load_trained
from ..publishing import write_card
from ..reading import Document, first_line
from .distillation import distillation_loss
from .optimization import averaged, keep_average, parameter_groups, swap_average
from .tasks import regularization


logger = logging.get_logger(__name__)


class SavedState(Document):
    """Schema of trainer_state.json: the fields that Trainer uses when it resumes from a checkpoint."""

    global_step: Annotated[int, Field(ge=0, lt=2**53)]
    train_batch_size: Annotated[int, Field(gt=0)]
    epoch: float | None = None
    log_history: list[dict[str, Any]] = []
    stateful_callbacks: dict[str, dict[str, Any] | list[dict[str, Any]]] = {}


class FineTuner(Trainer):
    """transformers' Trainer with additional options for AFT models and image classifiers.

    Args:
        position_bias_scale: factor on the learning rate of position biases (see `parameter_groups`).
        augment: function that augments the pixel values, (B, channels, height, width), of each training batch. It
            runs in the training step, not in the data loader, so a resumed training draws the same random numbers.
        teacher: a ViT or DeiT with the same classes, whose logits enter the training loss (`distillation_loss`). It
            receives the pixel values of the model, so both need the same normalization.
        distillation: keyword arguments of `distillation_loss`.
        mixup, cutmix: alpha of the Beta distributions of mixup and CutMix, 0 to turn them off. Each training batch is
            mixed with itself in reverse order (`mix_batch`), and the loss is the cross entropy with the mixed labels.
        ema_decay: decay of an exponential moving average of the weights (`keep_average`); None keeps no average.
            Evaluations during training use the averaged weights, and the trained model has them.
        **options: arguments of `Trainer`.

    Raises:
        ValueError: the teacher has other classes or numbers them differently, a value is out of range, or options
            exclude each other.
    """

    model: Any  # a PreTrainedModel, possibly wrapped by PEFT

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
        config = self.model.config
        self.position_bias_scale, self.augment, self.ema_decay = position_bias_scale, augment, ema_decay
        self.teacher, self.distillation, self.mixing = teacher, distillation or {}, {"mixup": mixup, "cutmix": cutmix}
        self._averaged: torch.optim.Optimizer | None = None  # the optimizer that keeps an average
        multiplier = getattr(config, "position_bias_multiplier", 1.0)
        if position_bias_scale > 1 and multiplier > 1:
            logger.warning(
                f"position_bias_scale={position_bias_scale:g} raises the learning rate of position biases, which the "
                f"model's position_bias_multiplier={multiplier:g} already does: leave out position_bias_scale"
            )
        for name, alpha in self.mixing.items():
            if not 0 <= alpha < math.inf:
                raise ValueError(f"{name} must be the alpha of a Beta distribution, or 0 for no mixing, got {alpha}")
        if (mixup or cutmix) and config.problem_type not in (None, "single_label_classification"):
            raise ValueError(f"mixup and cutmix need one class per image, not problem_type={config.problem_type!r}")
        if ema_decay is not None and not 0 < ema_decay < 1:
            raise ValueError(f"ema_decay must be in (0, 1), got {ema_decay}")
        if ema_decay is not None and (self.is_deepspeed_enabled or self.args.load_best_model_at_end):
            raise ValueError(
                "ema_decay does not work with DeepSpeed, whose optimizers keep a state of their own, nor with "
                "load_best_model_at_end, since checkpoints contain the weights that are not averaged"
            )
        if teacher is not None or mixup or cutmix:
            # The loss is then a mean over the micro-batch, which Trainer must scale when it accumulates gradients.
            self.model_accepts_loss_kwargs = False
        if teacher is not None:
            _require_same_classes(teacher, self.model)
            teacher.eval().requires_grad_(False).to(self.args.device)
        if self.label_smoother is not None and getattr(config, "position_bias_entropy_weight", 0) > 0:
            raise ValueError(
                "label_smoothing_factor replaces the model's own loss, including the term of "
                "position_bias_entropy_weight: set one of the two to 0"
            )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer named by `args.optim`, with the groups of `parameter_groups`."""
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
        """Train as Trainer does; with `ema_decay`, the model has its averaged weights in the end."""
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
        """Return Trainer's loss, in training with augmentation, mixing and distillation as configured."""
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
        """Return the loss on mixed images, the outputs of the model, and its inputs."""
        targets = F.one_hot(inputs["labels"], self.model.config.num_labels).float()
        pixels, targets = mix_batch(inputs["pixel_values"], targets, **self.mixing)
        inputs = {**inputs, "pixel_values": pixels}
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        smoothing = self.args.label_smoothing_factor
        loss = F.cross_entropy(outputs.logits.float(), targets, label_smoothing=smoothing)
        return loss + regularization(self.model, outputs), outputs, inputs

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_weights(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        checkpoint = self.state.best_model_checkpoint
        if checkpoint is None or not self._load_weights(checkpoint, self.model):
            super()._load_best_model()

    def _load_weights(self, checkpoint: str, model: nn.Module) -> bool:
        """Load the weights of a checkpoint by `from_pretrained`, and return whether that is possible.

        `save_pretrained` saves some models, such as ViT, under the tensor names of earlier versions. Trainer loads the
        file without renaming, and ignores tensors of other names (huggingface/transformers issue 48805).
        """
        if not isinstance(model, PreTrainedModel) or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False  # adapters, and formats of their own
        saved = load_trained(type(model), checkpoint, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
        return True

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate as Trainer does, during training with the averaged weights if there are any.

        The random state of the CPU is restored afterwards, so that evaluations do not change the training.
        """
        during_training = self.ema_decay is not None and self.is_in_train
        weights = averaged(_inner(self.optimizer), self.model_wrapped) if during_training else nullcontext()
        with torch.random.fork_rng(devices=[]), weights:
            return super().evaluate(*arguments, **options)

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Write the card of `aft_hf.publishing` from the run's files, or Trainer's for adapters and other models."""
        assert self.args.output_dir is not None  # TrainingArguments sets a default
        config = Path(self.args.output_dir) / "config.json"
        if not config.is_file() or self.model.config.model_type != AFTConfig.model_type:
            super().create_model_card(*arguments, **options)
        elif self.is_world_process_zero():
            write_card(self.args.output_dir, repo_id=getattr(self, "hub_model_id", None))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as Trainer does, but leave an earlier model unchanged if a file of the new one cannot be written."""
        if not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        output_dir = output_dir or self.args.output_dir
        assert output_dir is not None
        directory = Path(output_dir)
        try:
            with move_into(directory) as aside:
                super()._save(str(aside), state_dict)
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer raises its own type of error
            raise OSError(
                f"cannot write the model to {directory} ({first_line(error)}); the files in it are unchanged"
            ) from error

    @torch.no_grad()
    def _teacher_logits(self, pixel_values: torch.Tensor) -> torch.Tensor:
        teacher = self.teacher
        assert teacher is not None
        other_size = tuple(pixel_values.shape[2:]) != pair(teacher.config.image_size)
        with self.accelerator.autocast():
            return teacher(pixel_values.to(teacher.dtype), interpolate_pos_encoding=other_size).logits


def _inner(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Return the optimizer itself, without the wrapper of Accelerate."""
    assert optimizer is not None
    return getattr(optimizer, "optimizer", optimizer)


def _require_same_classes(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    if teacher.base_model is teacher:
        raise ValueError(
            f"the teacher is a {type(teacher).__name__}, which has no classifier: give an image classifier"
        )
    theirs, ours = (list((model.config.id2label or {}).values()) for model in (teacher, student))
    if len(theirs) != len(ours):
        raise ValueError(f"the teacher has {len(theirs)} classes, the model {len(ours)}: both need the same")
    if theirs == ours:
        return
    if sorted(theirs) == sorted(ours):
        raise ValueError(f"the teacher numbers the classes {theirs}, the model {ours}: both need the same order")
    both = f"{shortened(theirs)}, the model {shortened(ours)}"
    if are_names(theirs) and are_names(ours):
        raise ValueError(
            f"the teacher has the classes {both}: give a teacher with the same classes, or, if only the names differ, "
            "set its id2label to the names of the model"
        )
    logger.warning(f"classes of the teacher and the model are matched by number: the teacher has {both}")
