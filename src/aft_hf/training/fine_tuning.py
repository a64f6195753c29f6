"""A Trainer for AFT models: a separate learning rate for position biases, and optional distillation and
augmentation."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import logging

from ..configuration_aft import AFTConfig, pair
from ..data.atomic_files import move_into
from ..data.classes import are_names, shortened
from ..loading import load_trained
from ..publishing import write_card
from ..reading import Document, first_line
from .distillation import distillation_loss
from .optimization import parameter_groups


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
        **options: arguments of `Trainer`.

    Raises:
        ValueError: the teacher has other classes or numbers them differently.
    """

    model: Any

    def __init__(
        self,
        *,
        position_bias_scale: float = 1.0,
        augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
        teacher: PreTrainedModel | None = None,
        distillation: dict[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.position_bias_scale, self.augment = position_bias_scale, augment
        self.teacher, self.distillation = teacher, distillation or {}
        if teacher is not None:
            # The loss is then a mean over the micro-batch, which Trainer must scale when it accumulates gradients.
            self.model_accepts_loss_kwargs = False
            _require_same_classes(teacher, self.model)
            teacher.eval().requires_grad_(False).to(self.args.device)

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
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return Trainer's loss, in training with augmentation and distillation as configured."""
        if self.augment is not None and model.training:
            inputs = {**inputs, "pixel_values": self.augment(inputs["pixel_values"])}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.teacher is not None and model.training:
            teacher_logits = self._teacher_logits(inputs["pixel_values"])
            loss = distillation_loss(loss, outputs.logits, teacher_logits, **self.distillation)
        return (loss, outputs) if return_outputs else loss

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
        """Evaluate as Trainer does; the random state of the CPU is restored, so that the training does not change."""
        with torch.random.fork_rng(devices=[]):
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


def _require_same_classes(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    if teacher.base_model is teacher:
        raise ValueError(
            f"the teacher is a {type(teacher).__name__}, which has no classifier: give an image classifier"
        )
    theirs, ours = (list((model.config.id2label or {}).values()) for model in (teacher, student))
    both = f"the teacher has the {len(theirs)} classes {shortened(theirs)}, the model {len(ours)}: {shortened(ours)}"
    if len(theirs) != len(ours) or (theirs != ours and are_names(theirs) and are_names(ours)):
        raise ValueError(f"{both}; both need the same in the same order: set id2label if only the names differ")
    if theirs != ours:
        logger.warning(f"classes of the teacher and the model are matched by number: {both}")
