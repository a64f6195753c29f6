r"""Fine-tune an AFT, or any model of transformers, on labeled images or on text, with the Trainer of transformers.

    python scripts/finetune.py --do_train --do_eval --model_name_or_path outputs/quickstart/converted \
        --train outputs/quickstart/digits/train.parquet --validation outputs/quickstart/digits/test.parquet \
        --output_dir outputs/fine-tuned --num_train_epochs 5 --learning_rate 1e-3

All options of `TrainingArguments` work. Instead of options, one JSON or YAML file with their values can be given.
"""

import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import DatasetDict, Image
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import default_logdir
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from aft_hf.conversion import read_source
from aft_hf.conversion.source import load_image_processor
from aft_hf.data.images import (
    AUGMENTATIONS,
    ImagePipeline,
    ImageRows,
    build_augmentation,
    class_names,
    class_numbers,
)
from aft_hf.data.loading import ImageColumn, hold_out, load_splits, require_column
from aft_hf.data.text import group_into_blocks
from aft_hf.loading import load
from aft_hf.progress import no_bars_in_logs
from aft_hf.reading import explained, read_json, read_text, reported
from aft_hf.training.distillation import DISTILLATIONS
from aft_hf.training.evaluation import is_image_classifier
from aft_hf.training.fine_tuning import FineTuner, SavedState
from aft_hf.training.metrics import BitsPerToken, TopKAccuracy, token_losses
from aft_hf.training.ownership import RUN, owned
from aft_hf.training.safe_loading import data_only


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Directory or Hub id: an AFT, a ViT, a GPT-2 ..."})
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Attention of a ViT, GPT-2 ..., such as sdpa or eager. Default: that of transformers. An AFT "
            "accepts only eager."
        },
    )
    position_bias_scale: float = field(
        default=1.0,
        metadata={
            "help": "Factor on the learning rate of AFT's position biases; leave it at 1 if the model has a "
            "position_bias_multiplier, as after a conversion."
        },
    )
    teacher: str | None = field(
        default=None,
        metadata={
            "help": "ViT or DeiT with the same classes (any source of `aft-hf convert`) for distillation; its inputs "
            "are those of the model's own image processor."
        },
    )
    distillation: str = field(default="soft", metadata={"help": "Loss, as in DeiT.", "choices": DISTILLATIONS})
    distillation_weight: float = field(default=0.5, metadata={"help": "Weight of the teacher in the loss."})
    distillation_temperature: float = field(default=3.0, metadata={"help": "Temperature of soft distillation."})
    ema_decay: float | None = field(
        default=None,
        metadata={
            "help": "Decay of an exponential moving average of the weights, such as 0.999; it is evaluated and saved."
        },
    )
    lora_rank: int = field(
        default=0,
        metadata={
            "help": "Train LoRA adapters of this rank on q, k, v and o, and the classifier of images; everything else "
            "is frozen, including AFT's position biases. 0: train everything."
        },
    )
    lora_alpha: float = field(default=16.0, metadata={"help": "Scale of the adapters: alpha / rank."})


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the Hub, or a local one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train: str | None = field(
        default=None, metadata={"help": "Training data instead of a dataset: a folder of images, or a file."}
    )
    validation: str | None = field(default=None, metadata={"help": "Validation data: a folder of images, or a file."})
    validation_share: float = field(
        default=0.05,
        metadata={
            "help": "Share of the training data (for text the last blocks) that is held out if there is no validation "
            "data. 0: train on all of it."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first images or blocks."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only the first images or blocks."})
    image_column: str = field(default="image", metadata={"help": "Column of the images."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    augmentation: str = field(default="none", metadata={"help": "Augmentation of images.", "choices": AUGMENTATIONS})
    mixup: float = field(default=0.0, metadata={"help": "Alpha of mixup of training images, 0.8 in DeiT. 0: none."})
    cutmix: float = field(
        default=0.0,
        metadata={"help": "Alpha of CutMix, 1 in DeiT. With mixup too, each batch takes one of them at random."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens per block. Default: the maximum length of the model, at most 1024."}
    )


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows the default of each option, and the description with its line breaks."""


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save, push if requested, and return the metrics."""
    no_bars_in_logs()
    model_args, data_args, training_args = _parse(arguments)
    with explained(f"the seed {training_args.seed} cannot be used; give a number below 2**32"):
        set_seed(training_args.seed)
    hub = {"revision": model_args.revision, "trust_remote_code": model_args.trust_remote_code}
    config = load(AutoConfig, model_args.model_name_or_path, **hub)
    build = _classification if is_image_classifier(config) else _language_modeling
    with training_args.main_process_first():
        splits = load_splits(
            data_args.dataset_name, data_args.dataset_config_name, data_args.train, data_args.validation
        )
        if "train" not in splits and (training_args.do_train or "validation" not in splits):
            raise ValueError("there is no training data: give --train, or a dataset with a split named train")
        model, options = build(model_args, data_args, splits, config, hub)
    if training_args.do_eval and options["eval_dataset"] is None:
        raise ValueError("there is no validation data: give --validation, or a --validation_share above 0")
    if model_args.lora_rank:
        model = _with_adapters(model, model_args)

    trainer = FineTuner(
        model=model,
        args=training_args,
        position_bias_scale=model_args.position_bias_scale,
        teacher=None if model_args.teacher is None else read_source(model_args.teacher).to_transformers(),
        distillation={
            "kind": model_args.distillation,
            "weight": model_args.distillation_weight,
            "temperature": model_args.distillation_temperature,
        },
        mixup=data_args.mixup,
        cutmix=data_args.cutmix,
        ema_decay=model_args.ema_decay,
        **options,
    )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            # Not among the files of the model, which `push_to_hub` uploads.
            callback.logging_dir = str(Path(training_args.output_dir, RUN, default_logdir()))
            _say(f"TensorBoard's files are in {callback.logging_dir}", training_args)
    metrics = _train(trainer, training_args) if training_args.do_train else {}
    if training_args.do_eval:
        result = trainer.evaluate()
        metrics |= result
        trainer.log_metrics("eval", result)
        trainer.save_metrics("eval", result)
    if training_args.push_to_hub:
        name = data_args.dataset_name
        on_hub = [name] if name is not None and not Path(name).exists() else []
        task = "image-classification" if build is _classification else "text-generation"
        trainer.push_to_hub(tasks=task, dataset=on_hub, dataset_tags=on_hub)
    if training_args.do_train:
        _say(f"the model is in {training_args.output_dir}", training_args)
    return metrics


def _parse(arguments: list[str] | None) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    usage = "%(prog)s --model_name_or_path MODEL --train DATA --output_dir OUT\n"
    usage += "                   --do_train [option ...]\n       %(prog)s options.json"
    kinds = (ModelArguments, DataArguments, TrainingArguments)
    parser = HfArgumentParser(kinds, description=__doc__, usage=usage, formatter_class=HelpFormatter)
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) == 1 and arguments[0].endswith((".json", ".yaml", ".yml")):
        path = Path(arguments[0])
        with explained(f"{path}: cannot be used as options"):
            values = read_json(path, dict[str, Any]) if path.suffix == ".json" else yaml.safe_load(read_text(path))
            parsed = parser.parse_dict(values)
    else:
        parsed = parser.parse_args_into_dataclasses(arguments)
    training_args = parsed[2]
    training_args.disable_tqdm |= not sys.stderr.isatty()  # a log gets a line per report, not a bar per step
    training_args.remove_unused_columns = False  # images become pixel values when a row is read
    if not (training_args.do_train or training_args.do_eval):
        raise ValueError("nothing to do: give --do_train, --do_eval, or both")
    if any(count is not None and count < 1 for count in (parsed[1].max_train_samples, parsed[1].max_eval_samples)):
        raise ValueError("--max_train_samples and --max_eval_samples must be at least 1")
    if training_args.fp16 and training_args.device.type == "cpu":  # Accelerate would compute in float32
        raise ValueError("--fp16 needs a GPU, and none is available: give --bf16 or neither")
    return parsed


def _train(trainer: FineTuner, training_args: TrainingArguments) -> dict[str, float]:
    """Train from the start or a checkpoint, and save; a lock excludes other runs from the directory meanwhile."""
    with owned(Path(training_args.output_dir)):
        checkpoint = _checkpoint(training_args)
        if checkpoint is not None:
            read_json(Path(checkpoint, TRAINER_STATE_NAME), SavedState)
            with explained(f"{checkpoint}: {TRAINER_STATE_NAME} cannot be used; give an earlier checkpoint"):
                TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
        with nullcontext() if checkpoint is None else data_only(Path(checkpoint)):
            metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    return metrics


def _checkpoint(training_args: TrainingArguments) -> str | None:
    """The checkpoint to resume from: a given directory, or the newest one for `--resume_from_checkpoint true`.

    Prints a line if a run begins at step 0 although there are checkpoints.
    """
    wanted = str(training_args.resume_from_checkpoint)  # a JSON file may have the boolean true
    if wanted.lower() not in ("none", "false", "true"):
        return wanted
    # The state is written last: a checkpoint without it is incomplete, as the run was stopped while writing.
    states = Path(training_args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    found = [state.parent for state in states if state.parent.name.rpartition("-")[2].isdecimal()]
    newest = max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    if wanted.lower() == "true":
        return None if newest is None else str(newest)
    if newest is not None:
        _say(
            f"begins at step 0, although {newest} exists: --resume_from_checkpoint true resumes from it, another "
            "--output_dir keeps the two runs apart",
            training_args,
        )
    return None


def _say(message: str, training_args: TrainingArguments) -> None:
    """Print a line on the standard output, in one process only."""
    if training_args.process_index == 0:
        print(f"finetune.py: {message}", flush=True)


def _classification(
    model_args: ModelArguments,
    data_args: DataArguments,
    splits: DatasetDict,
    config: PreTrainedConfig,
    hub: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """An image classifier with the classes of the data, and the options of its Trainer."""
    require_column(splits, data_args.image_column, "--image_column")
    require_column(splits, data_args.label_column, "--label_column")
    names = class_names(splits.get("train", splits.get("validation")), data_args.label_column)
    splits = _first_rows(hold_out(_decoded(splits, data_args.image_column), data_args.validation_share), data_args)
    if sorted(names) == sorted(config.id2label.values()):
        names = [config.id2label[number] for number in range(len(names))]  # in the order of the weights
    model = load(
        AutoModelForImageClassification,
        model_args.model_name_or_path,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        ignore_mismatched_sizes=True,  # another number of classes gets a new classifier
        dtype="float32",
        attn_implementation=model_args.attn_implementation,
        **hub,
    )
    processor = load_image_processor(model_args.model_name_or_path, config, **hub)
    datasets = {
        split: ImageRows(
            rows.with_transform(
                ImagePipeline(
                    processor,
                    image_column=data_args.image_column,
                    label_column=data_args.label_column,
                    numbers=class_numbers(rows, data_args.label_column, names),
                )
            )
        )
        for split, rows in splits.items()
    }
    height, width = next(iter(datasets.values()))[0]["pixel_values"].shape[1:]
    accuracy = TopKAccuracy(keep_in_memory=True)
    return model, {
        "train_dataset": datasets.get("train"),
        "eval_dataset": datasets.get("validation"),
        "processing_class": processor,
        "augment": build_augmentation(data_args.augmentation, (height, width)),
        "compute_metrics": lambda p: accuracy.compute(predictions=p.predictions, references=p.label_ids),
    }


def _first_rows(splits: DatasetDict, data_args: DataArguments) -> DatasetDict:
    """At most `max_train_samples` and `max_eval_samples` rows of the splits."""
    counts = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    return DatasetDict(
        {
            split: rows if counts.get(split) is None else rows.select(range(min(counts[split], len(rows))))
            for split, rows in splits.items()
        }
    )


def _decoded(splits: DatasetDict, column: str) -> DatasetDict:
    """`splits` with a column of images, which may be bytes or paths in a file."""
    if all(isinstance(dataset.features[column], Image) for dataset in splits.values()):
        return splits
    try:
        return splits.cast_column(column, ImageColumn())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"--image_column: {column!r} holds no images, and no bytes or paths of images") from error


def _language_modeling(
    model_args: ModelArguments,
    data_args: DataArguments,
    splits: DatasetDict,
    config: PreTrainedConfig,
    hub: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A language model, and the options of its Trainer."""
    if model_args.teacher is not None or data_args.augmentation != "none" or data_args.mixup or data_args.cutmix:
        raise ValueError("--teacher, --augmentation, --mixup and --cutmix are for image classifiers")
    require_column(splits, data_args.text_column, "--text_column")
    options: dict[str, Any] = {"dtype": "float32", "attn_implementation": model_args.attn_implementation}
    model = load(AutoModelForCausalLM, model_args.model_name_or_path, **options, **hub)
    tokenizer = load(AutoTokenizer, model_args.model_name_or_path, **hub)
    block_size = data_args.block_size
    if block_size is None:
        limits = (1024, tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
        block_size = min(limit for limit in limits if limit is not None)
    blocks = DatasetDict()
    for split, rows in splits.items():
        with explained(f"the {split} data cannot be used"):
            blocks[split] = group_into_blocks(rows, tokenizer, block_size, column=data_args.text_column)
        if len(blocks[split]) == 0:
            raise ValueError(f"the {split} text is shorter than one block of {block_size} tokens: give --block_size")
    blocks = _first_rows(hold_out(blocks, data_args.validation_share, shuffle=False), data_args)
    bits = BitsPerToken(keep_in_memory=True)
    return model, {
        "train_dataset": blocks.get("train"),
        "eval_dataset": blocks.get("validation"),
        "processing_class": tokenizer,
        "data_collator": default_data_collator,
        "preprocess_logits_for_metrics": token_losses,
        "compute_metrics": lambda p: bits.compute(
            predictions=p.predictions.flatten(), references=p.label_ids[:, 1:].flatten()
        ),
    }


def _with_adapters(model: PreTrainedModel, model_args: ModelArguments) -> PreTrainedModel:
    """Add LoRA to the projections of the mixers; the classifier of images is trained without it."""
    lora = LoraConfig(
        r=model_args.lora_rank,
        lora_alpha=model_args.lora_alpha,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=["classifier"] if hasattr(model, "classifier") else None,
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    return model


if __name__ == "__main__":
    with reported("finetune.py"):
        main()
