"""Fine-tuning of an AFT, or of any image classifier of transformers, on labeled images: `aft-hf finetune`."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from datasets import DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import default_logdir
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..conversion import read_source
from ..conversion.source import load_image_processor
from ..data.images import ImagePipeline, build_augmentation, class_names, class_numbers
from ..data.loading import hold_out, load_splits, require_column
from ..data.samples import RowSamples
from ..loading import load
from ..reading import read_json
from .evaluation import is_image_classifier
from .fine_tuning import FineTuner, SavedState
from .metrics import accuracy
from .ownership import RUN, owned
from .safe_loading import data_only
from .tasks import first_rows


def parse_arguments(words: Sequence[str]) -> TrainingArguments:
    """Parse the options of transformers' `TrainingArguments` from the command line."""
    parser = HfArgumentParser(cast(Any, TrainingArguments), prog="aft-hf finetune", usage="%(prog)s [OPTIONS]")
    (arguments,) = parser.parse_args_into_dataclasses([*words])
    arguments.disable_tqdm |= not sys.stderr.isatty()  # a log gets a line per report, not a bar per step
    arguments.remove_unused_columns = False  # images become pixel values when a row is read
    if not (arguments.do_train or arguments.do_eval):
        raise ValueError("nothing to do: give --do-train, --do-eval, or both")
    if arguments.fp16 and arguments.device.type == "cpu":  # Accelerate would compute in float32
        raise ValueError("--fp16 needs a GPU, and none is available: give --bf16 or neither")
    return arguments


def finetune(options: SimpleNamespace, arguments: TrainingArguments) -> dict[str, float]:
    """Train, evaluate, save, push if requested, and return the metrics.

    Args:
        options: the options of `finetune_command` by name.
        arguments: the options of Trainer.
    """
    set_seed(arguments.seed)
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    config = load(AutoConfig, options.model_name_or_path, **hub)
    if not is_image_classifier(config):
        raise ValueError(
            f"{options.model_name_or_path}: is no image classifier; to train a language model further, give it as "
            "model.pretrained of a recipe to aft-hf train"
        )
    with arguments.main_process_first():
        splits = load_splits(options.dataset_name, options.dataset_config_name, options.train, options.validation)
        if "train" not in splits and (arguments.do_train or "validation" not in splits):
            raise ValueError("there is no training data: give --train, or a dataset with a split named train")
        model, parts = _classification(options, splits, config, hub)
    if arguments.do_eval and parts["eval_dataset"] is None:
        raise ValueError("there is no validation data: give --validation, or a --validation-share above 0")

    trainer = FineTuner(
        model=model,
        args=arguments,
        position_bias_scale=options.position_bias_scale,
        teacher=None if options.teacher is None else read_source(options.teacher).to_transformers(),
        distillation={
            "kind": options.distillation,
            "weight": options.distillation_weight,
            "temperature": options.distillation_temperature,
        },
        **parts,
    )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            # Not among the files of the model, which `push_to_hub` uploads.
            callback.logging_dir = str(Path(str(arguments.output_dir), RUN, default_logdir()))
            _say(f"TensorBoard's files are in {callback.logging_dir}", arguments)
    metrics = _train(trainer, arguments) if arguments.do_train else {}
    if arguments.do_eval:
        result = trainer.evaluate()
        metrics |= result
        trainer.log_metrics("eval", result)
        trainer.save_metrics("eval", result)
    if arguments.push_to_hub:
        trainer.push_to_hub()
    if arguments.do_train:
        _say(f"the model is in {arguments.output_dir}", arguments)
    return metrics


def _train(trainer: FineTuner, arguments: TrainingArguments) -> dict[str, float]:
    """Train from the start or a checkpoint, and save; a lock excludes other runs from the directory meanwhile."""
    with owned(Path(str(arguments.output_dir))):
        checkpoint = _checkpoint(arguments)
        if checkpoint is not None:
            read_json(Path(checkpoint, TRAINER_STATE_NAME), SavedState)
            # Trainer would begin with a new optimizer if its file is missing. DeepSpeed and FSDP have other files.
            sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
            for name in () if sharded else (OPTIMIZER_NAME, SCHEDULER_NAME):
                if not Path(checkpoint, name).is_file():
                    raise ValueError(f"{checkpoint}: there is no {name}; give an earlier checkpoint")
        with nullcontext() if checkpoint is None else data_only(Path(checkpoint)):
            metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    return metrics


def _checkpoint(arguments: TrainingArguments) -> str | None:
    """Return the checkpoint to resume from: a given directory, or the newest one for `true`, if there is any."""
    wanted = str(arguments.resume_from_checkpoint)
    if wanted.lower() != "true":
        return None if wanted.lower() in ("none", "false") else wanted
    # The state is written last: a checkpoint without it is incomplete, as the run was stopped while writing.
    states = Path(str(arguments.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    found = [state.parent for state in states if state.parent.name.rpartition("-")[2].isdecimal()]
    newest = max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def _say(message: str, arguments: TrainingArguments) -> None:
    """Print a line on the standard output, in one process only."""
    if arguments.process_index == 0:
        print(f"aft-hf: {message}", flush=True)


def _classification(
    options: SimpleNamespace, splits: DatasetDict, config: PreTrainedConfig, hub: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """An image classifier with the classes of the data, and the options of its Trainer."""
    require_column(splits, options.image_column, "--image-column")
    require_column(splits, options.label_column, "--label-column")
    names = class_names(splits.get("train", splits.get("validation")), options.label_column)
    splits = first_rows(hold_out(splits, options.validation_share), options)
    of_model: dict[Any, str] = config.id2label or {}
    if sorted(names) == sorted(of_model.values()):
        names = [of_model[number] for number in range(len(names))]  # in the order of the weights
    model = load(
        AutoModelForImageClassification,
        options.model_name_or_path,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        ignore_mismatched_sizes=True,  # another number of classes gets a new classifier
        dtype="float32",
        attn_implementation=options.attn_implementation,
        **hub,
    )
    processor = load_image_processor(options.model_name_or_path, config, **hub)
    columns = {"image_column": options.image_column, "label_column": options.label_column}
    datasets = {
        split: RowSamples(
            rows, ImagePipeline(processor, numbers=class_numbers(rows, options.label_column, names), **columns)
        )
        for split, rows in splits.items()
    }
    height, width = next(iter(datasets.values()))[0]["pixel_values"].shape[1:]
    return model, {
        "train_dataset": datasets.get("train"),
        "eval_dataset": datasets.get("validation"),
        "processing_class": processor,
        "augment": build_augmentation(options.augmentation, (height, width)),
        "compute_metrics": lambda p: accuracy(torch.tensor(p.predictions), torch.tensor(p.label_ids)),
    }
