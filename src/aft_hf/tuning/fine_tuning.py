"""Fine-tuning of an AFT, or of any image classifier of transformers, on labeled images: `aft-hf finetune`.

It is transformers' Trainer with a separate learning rate for position biases, augmentation, and the distillation of
DeiT (Touvron et al. 2021, "Training data-efficient image transformers & distillation through attention", arXiv
2012.12877, Eq. 2 and 3).
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..atomic_files import move_into, refuse_to_replace
from ..configuration_aft import AFTConfig, pair
from ..conversion.source import load_image_processor, read_source
from ..data.classes import model_classes, require_a_class, teacher_classes
from ..data.images import ImagePipeline, build_augmentation, class_numbers, match_classes, trained_classes
from ..data.loading import hold_out, load_splits, refuse_inside, require_column
from ..data.samples import RowSamples, sum_arrays
from ..loading import load, load_trained
from ..publishing import write_card
from ..reading import Document, read_json
from ..running.checkpoints import DATA, refuse_changes
from ..running.ownership import owned, refuse_links
from ..running.safe_loading import data_only
from ..training.metrics import accuracy
from ..training.optimization import parameter_groups
from ..training.tasks import some_rows
from .evaluation import is_image_classifier


logger = logging.get_logger(__name__)

ALL_RESULTS = "all_results.json"
# Arguments of Trainer that a resumed run must share with its checkpoint, besides the batch size.
SAME = ["adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed", "dataloader_drop_last", "fp16"]
SAME += ["label_smoothing_factor", "learning_rate", "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm"]
SAME += ["optim", "optim_args", "seed", "warmup_steps", "train_sampling_strategy", "weight_decay"]
IDENTITY = "aft_hf"  # key of the values of `_identity` in the state of Trainer


def parse_arguments(words: Sequence[str]) -> TrainingArguments:
    """Parse the options of transformers' `TrainingArguments` from the command line."""
    parser = HfArgumentParser(cast(Any, TrainingArguments), prog="aft-hf finetune", usage="%(prog)s [OPTIONS]")
    (arguments,) = parser.parse_args_into_dataclasses([*words])
    arguments.disable_tqdm |= not sys.stderr.isatty()  # a log gets a line per report, not a bar per step
    arguments.remove_unused_columns = False  # images become pixel values when a row is read
    arguments.eval_do_concat_batches, arguments.batch_eval_metrics = True, False  # the accuracy is that of all batches
    if not (arguments.do_train or arguments.do_eval):
        raise ValueError("nothing to do: give --do-train, --do-eval, or both")
    if arguments.fp16 and arguments.device.type == "cpu":  # Accelerate would compute in float32
        raise ValueError("--fp16 needs a GPU, and none is available: give --bf16 or neither")
    return arguments


def finetune(options: SimpleNamespace, arguments: TrainingArguments) -> dict[str, float]:
    """Train, evaluate, save, push if requested, and return the metrics; `options` are those of `finetune_command`."""
    set_seed(arguments.seed)
    directory = Path(str(arguments.output_dir))
    refuse_links(directory)
    for name in (TRAINER_STATE_NAME, "train_results.json", "eval_results.json", ALL_RESULTS):  # which Trainer writes
        refuse_to_replace(directory / name)
    if (directory / ALL_RESULTS).exists():  # which it extends
        read_json(directory / ALL_RESULTS, dict[str, Any])
    refuse_inside(str(directory), options.train, options.validation, options.dataset_name)
    trainer = _build_trainer(options, arguments)
    metrics = _train(trainer, arguments) if arguments.do_train else {}
    if arguments.do_eval:
        result = trainer.evaluate()
        metrics |= result
        trainer.log_metrics("eval", result)
        trainer.save_metrics("eval", result)
    if arguments.push_to_hub:
        trainer.push_to_hub()
    if arguments.do_train:
        trainer.accelerator.print(f"aft-hf: the model is in {arguments.output_dir}", flush=True)
    return metrics


def _build_trainer(options: SimpleNamespace, arguments: TrainingArguments) -> "FineTuner":
    """Build the Trainer of an image classifier, which gets the classes of the data if it is trained."""
    source, trains = options.model_name_or_path, arguments.do_train
    columns = {"image_column": options.image_column, "label_column": options.label_column}
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    config = load(AutoConfig, source, **hub)
    if not is_image_classifier(config):
        instead = "to train a language model further, give it as model.pretrained of a recipe to aft-hf train"
        raise ValueError(f"{source}: is no image classifier; {instead}")
    with arguments.main_process_first():
        splits = load_splits(options.dataset_name, options.dataset_config_name, options.train, options.validation)
        if "train" not in splits and (trains or "validation" not in splits):
            raise ValueError("there is no training data: give --train, or a dataset with a split named train")
        require_column(splits, options.image_column, "--image-column")
        require_column(splits, options.label_column, "--label-column")
        names = labels = model_classes(config)
        if trains:
            names, labels = trained_classes(splits["train"], options.label_column, names)
        splits = hold_out(splits, options.validation_share)
        if arguments.do_eval and "validation" not in splits:
            raise ValueError("there is no validation data: give --validation, or a --validation-share above 0")
        if not trains:
            splits.pop("train", None)
        config.id2label = dict(enumerate(names))
        require_a_class(source, config)
        processor = load_image_processor(source, config, **hub)
        datasets: dict[str, RowSamples] = {}
        for split, rows in some_rows(splits, options, shuffled=True).items():
            numbers = (class_numbers if trains else match_classes)(rows, options.label_column, labels)
            make = ImagePipeline(processor, numbers=numbers, **columns)
            datasets[split] = RowSamples(rows, make, [*columns.values()])
    height, width = next(iter(datasets.values()))[0]["pixel_values"].shape[1:]
    return FineTuner(
        args=arguments,
        model=(load if trains else load_trained)(
            AutoModelForImageClassification,
            source,
            id2label=config.id2label,
            label2id={name: number for number, name in enumerate(names)},
            ignore_mismatched_sizes=trains,  # another number of classes gets a new classifier
            dtype="float32",
            attn_implementation=options.attn_implementation,
            **hub,
        ),
        train_dataset=datasets.get("train"),
        eval_dataset=datasets.get("validation"),
        processing_class=processor,
        preprocess_logits_for_metrics=lambda logits, _: logits[0] if isinstance(logits, (tuple, list)) else logits,
        compute_metrics=lambda p: accuracy(torch.tensor(p.predictions), torch.tensor(p.label_ids)),
        position_bias_scale=options.position_bias_scale,
        augment=build_augmentation(options.augmentation, (height, width)),
        teacher=None if options.teacher is None else read_source(options.teacher).to_transformers(),
        distillation={
            "kind": options.distillation,
            "weight": options.distillation_weight,
            "temperature": options.distillation_temperature,
        },
    )


class SavedState(Document):
    """Schema of trainer_state.json: the fields that are used when a run resumes from a checkpoint."""

    global_step: Annotated[int, Field(ge=0, lt=2**53)]
    train_batch_size: Annotated[int, Field(gt=0)]
    log_history: list[dict[str, Any]] = []
    stateful_callbacks: dict[str, Any] = {}


def _identity(trainer: "FineTuner") -> dict[str, Any]:
    """Return what determines the result of a training, except its length, as values of JSON."""
    arguments, tensors = trainer.args, {} if trainer.teacher is None else trainer.teacher.state_dict()
    values = {name: getattr(arguments, name) for name in SAME} | {
        DATA: cast(RowSamples, trainer.train_dataset).fingerprint(),
        "batch size": arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
        "position_bias_scale": trainer.position_bias_scale,
        "augmentation": repr(trainer.augment),
        "teacher's weights": sum_arrays(tensor.reshape(-1).view(torch.uint8).cpu() for tensor in tensors.values()),
        "distillation": trainer.distillation,
        "image processor": cast(Any, trainer.processing_class).to_dict(),
    }
    for name, model in (("model", trainer.model), ("teacher", trainer.teacher)):
        if model is not None:
            values[name] = model.config.to_dict() | {"_name_or_path": None, "transformers_version": None}
    return json.loads(json.dumps(values, default=str))


def _train(trainer: "FineTuner", arguments: TrainingArguments) -> dict[str, float]:
    """Train from the start or a checkpoint, and save; a lock excludes other runs from the directory meanwhile."""
    with owned(Path(str(arguments.output_dir))):
        checkpoint, trainer.identity = _checkpoint(arguments), _identity(trainer)
        if checkpoint is not None:
            saved = read_json(checkpoint / TRAINER_STATE_NAME, SavedState).stateful_callbacks.get(IDENTITY)
            if isinstance(saved, dict):
                refuse_changes(checkpoint, saved, trainer.identity, "another --output-dir for a new run")
            else:
                logger.warning(f"{checkpoint} does not record its training data and options, so they are not compared")
            # Trainer would begin with a new optimizer if its file is missing.
            for name in () if trainer.sharded else (OPTIMIZER_NAME, SCHEDULER_NAME):
                if not (checkpoint / name).is_file():
                    raise ValueError(f"{checkpoint}: there is no {name}; give an earlier checkpoint")
        with nullcontext() if checkpoint is None else data_only(checkpoint):
            metrics = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint)).metrics
        trainer.save_model()
        if trainer.is_world_process_zero():  # Trainer extends this file, which may hold results of earlier weights
            Path(str(arguments.output_dir), ALL_RESULTS).unlink(missing_ok=True)
        trainer.save_state()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    return metrics


def _checkpoint(arguments: TrainingArguments) -> Path | None:
    """Return the checkpoint to resume from: a given directory, or the newest one for `true`, if there is any.

    A run that begins at step 0 beside checkpoints logs a warning: it overwrites or deletes them.
    """
    wanted = str(arguments.resume_from_checkpoint)
    if wanted.lower() not in ("true", "none", "false"):
        return Path(wanted)
    # The state is written last: a checkpoint without it is incomplete, as the run was stopped while writing.
    states = Path(str(arguments.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    checkpoints = [state.parent for state in states if state.parent.name.rpartition("-")[2].isdecimal()]
    newest = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    if wanted.lower() == "true" or newest is None:
        return newest
    logger.warning(
        f"training begins at step 0 although {newest} exists: --resume-from-checkpoint true resumes from it, and "
        "another --output-dir keeps the two runs apart"
    )
    return None


class FineTuner(Trainer):
    """transformers' Trainer with additional options for AFT models and image classifiers.

    `augment` is applied to the pixel values, (B, channels, height, width), of each training batch: in the training
    step, so that a resumed training draws the same random numbers. `teacher` is a ViT or DeiT with the same classes
    and the same normalization, since it receives the pixel values of the model. `distillation` holds arguments of
    `distillation_loss`; `position_bias_scale` is that of `parameter_groups`.
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
        self.identity: dict[str, Any] = {}  # is saved with checkpoints
        self.sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # whose checkpoints have files of their own
        if teacher is not None:
            if teacher.base_model is teacher:
                kind = type(teacher).__name__
                raise ValueError(f"the teacher is a {kind}, which has no classifier: give an image classifier")
            self.teacher_classes = teacher_classes(teacher.config, self.model.config)
            teacher.eval().requires_grad_(False).to(self.args.device)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer named by `args.optim`, with the groups of `parameter_groups`."""
        if self.optimizer is None:
            model = self.model if model is None else model
            scales = {"weight_decay": self.args.weight_decay, "position_bias_scale": self.position_bias_scale}
            groups = parameter_groups(model, self.args.learning_rate, **scales)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return Trainer's loss, in training with augmentation and distillation as configured."""
        if self.augment is not None and model.training:
            inputs = {**inputs, "pixel_values": self.augment(inputs["pixel_values"])}
        share: Any = 1.0
        if num_items_in_batch is not None:
            # Many classifiers of transformers ignore `num_items_in_batch`, and the teacher's loss is a mean, too.
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            share, num_items_in_batch = len(inputs["labels"]) * processes / num_items_in_batch, None
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.teacher is not None and model.training:
            pixels = inputs["pixel_values"].to(self.teacher.dtype)
            other_size = tuple(pixels.shape[2:]) != pair(self.teacher.config.image_size)
            with torch.no_grad(), self.accelerator.autocast():
                taught = self.teacher(pixels, interpolate_pos_encoding=other_size).logits[:, self.teacher_classes]
            loss = distillation_loss(loss, outputs.logits, taught, **self.distillation)
        return (loss * share, outputs) if return_outputs else loss * share

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_weights(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_weights(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_weights(self, checkpoint: str, model: nn.Module) -> bool:
        """Load the weights of a checkpoint by `from_pretrained`, and return whether that is possible.

        `save_pretrained` saves some models, such as ViT, under the tensor names of earlier versions. Trainer loads the
        file without renaming, and ignores tensors of other names (huggingface/transformers issue 48805).
        """
        if self.sharded or not isinstance(model, PreTrainedModel):  # an adapter
            return False
        saved = load_trained(type(model), checkpoint, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
        return True

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate as Trainer does; the random state of the CPU is restored, so that the training does not change."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*arguments, **options)

    def create_model_card(
        self, language: str | None = None, license: str | None = None, *arguments: Any, **options: Any
    ) -> None:
        """Write the card of `aft_hf.publishing` from the run's files, or Trainer's for adapters and other models."""
        directory = Path(str(self.args.output_dir))
        if not (directory / "config.json").is_file() or self.model.config.model_type != AFTConfig.model_type:
            super().create_model_card(language, license, *arguments, **options)
        elif self.is_world_process_zero():
            write_card(directory, repo_id=self.hub_model_id, license=license)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        cast(Any, self.state.stateful_callbacks)[IDENTITY] = self.identity  # in trainer_state.json
        super()._save_checkpoint(*arguments, **options)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as Trainer does, but leave an earlier model unchanged if a file of the new one cannot be written."""
        directory = Path(str(output_dir or self.args.output_dir))
        with move_into(directory) if self.args.should_save else nullcontext(directory) as aside:
            super()._save(str(aside), state_dict)


def distillation_loss(
    loss: torch.Tensor,
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    kind: Literal["soft", "hard"] = "soft",
    weight: float = 0.5,
    temperature: float = 3.0,
) -> torch.Tensor:
    """Return the loss of the task combined with the distillation loss of a teacher.

    soft (Eq. 2): (1 - weight) loss + weight temperature^2 KL(softmax(z_t / temperature) || softmax(z / temperature));
    hard (Eq. 3): (1 - weight) loss + weight CE(z, argmax z_t).

    `loss` is a mean over the batch; z and z_t are logits, (B, classes). No gradient flows to the teacher. DeiT uses a
    weight of 0.1 for soft and 0.5 for hard distillation, and a temperature of 3.
    """
    if kind not in ("soft", "hard"):
        raise ValueError(f"distillation must be one of soft, hard, got {kind!r}")
    if not 0 <= weight <= 1 or temperature <= 0:
        raise ValueError(f"the weight must be in [0, 1] and the temperature positive, got {weight} and {temperature}")
    logits, teacher_logits = logits.float(), teacher_logits.detach().float()
    if kind == "hard":
        return (1 - weight) * loss + weight * F.cross_entropy(logits, teacher_logits.argmax(-1))
    ours, taught = (F.log_softmax(each / temperature, -1) for each in (logits, teacher_logits))
    divergence = F.kl_div(ours, taught, reduction="batchmean", log_target=True)
    return (1 - weight) * loss + weight * temperature**2 * divergence
