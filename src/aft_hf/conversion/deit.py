"""Converting a trained ViT or DeiT to AFT-conv."""

import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from ..configuration_aft import AFTConfig, pair
from ..modeling_aft import AFTForImageClassification
from .report import ConversionReport, TensorRecord
from .source import ConversionError, VisionTransformerSource, read_source


REPORT_NAME = "conversion_report.json"

# The paper's smallest kernels and heads for a small model (11/16).
KERNEL_SIZE, NUM_HEADS = 11, 16

# Names on disk of a ViT or DeiT after its prefix, and what they become. {i} is the layer.
COPIED = {
    "embeddings.patch_embeddings.projection": "aft.embeddings.patch_embeddings",
    "encoder.layer.{i}.layernorm_before": "aft.layers.{i}.layernorm_before",
    "encoder.layer.{i}.attention.attention.value": "aft.layers.{i}.mixer.v_proj",
    "encoder.layer.{i}.attention.output.dense": "aft.layers.{i}.mixer.o_proj",
    "encoder.layer.{i}.layernorm_after": "aft.layers.{i}.layernorm_after",
    "encoder.layer.{i}.intermediate.dense": "aft.layers.{i}.mlp.fc1",
    "encoder.layer.{i}.output.dense": "aft.layers.{i}.mlp.fc2",
    "layernorm": "aft.layernorm",
    "classifier": "classifier",
}
# The two heads of a distilled DeiT, of which it predicts the mean.
DISTILLED_HEADS = ("cls_classifier", "distillation_classifier")
# What AFT-conv has no place for, or what the paper leaves behind.
DROPPED = {
    r"embeddings\.(cls_token|distillation_token)": "AFT-conv has no class token",
    r"embeddings\.position_embeddings": "AFT-conv needs no position embeddings",
    r"embeddings\.mask_token": "for pre-training only",
    r"encoder\.layer\.\d+\.attention\.attention\.(query|key)\.(weight|bias)": "the paper does not transfer it",
    r"pooler\.dense\.(weight|bias)": "the classifier does not use it",
}


def convert_deit(
    source: str | os.PathLike | VisionTransformerSource,
    *,
    kernel_size: int = KERNEL_SIZE,
    num_heads: int = NUM_HEADS,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Turn a trained ViT or DeiT image classifier into an AFT-conv, as the paper does for its Table 8.

    Patch embedding, layer norms, value and output projections, MLPs and classifier are copied. Query and key
    projections and the position biases are new: the model is to be fine-tuned.

    Args:
        source: a directory that transformers saved or a repository of the Hub, with safetensors weights; or what
            `read_source` made of one.
        kernel_size: s of the AFT-conv, odd.
        num_heads: h of the AFT-conv; divides the width of the source.
        image_size: image size of the new model in pixels, a multiple of the patch size; the source's by default.

    Returns:
        The model (in the dtype of the source) and the account of every tensor.

    Raises:
        ConversionError: the source cannot be read or is not a ViT or DeiT.
        ValueError: sizes that make no sense for it.
    """
    checkpoint = source if isinstance(source, VisionTransformerSource) else read_source(source)
    model = AFTForImageClassification(_target_config(checkpoint.config, kernel_size, num_heads, image_size))
    model = model.to(checkpoint.dtype)
    target = model.state_dict()
    remaining = {_without_prefix(name): name for name in checkpoint.tensors}
    copied: dict[str, torch.Tensor] = {}
    report = ConversionReport(checkpoint.name)

    for target_name, names in _copies(target, remaining, checkpoint.name):
        full_names = tuple(remaining.pop(name) for name in names)
        tensors = [checkpoint.tensors[name] for name in full_names]
        if any(tensor.shape != target[target_name].shape for tensor in tensors):
            raise ConversionError(
                f"{checkpoint.name}: {full_names[0]} is {tuple(tensors[0].shape)}, but its config.json says "
                f"{tuple(target[target_name].shape)}"
            )
        copied[target_name] = tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)
        note = "" if len(tensors) == 1 else "mean of both heads"
        report.records.append(TensorRecord("copied", target_name, full_names, tuple(tensors[0].shape), note))

    for name in target:
        if name not in copied:
            report.records.append(TensorRecord("new", name, (), tuple(target[name].shape)))

    for name, full_name in remaining.items():
        reason = next((why for pattern, why in DROPPED.items() if re.fullmatch(pattern, name)), None)
        if reason is None:
            raise ConversionError(f"{checkpoint.name}: {full_name} is no tensor of a {checkpoint.config.model_type}")
        shape = tuple(checkpoint.tensors[full_name].shape)
        report.records.append(TensorRecord("dropped", None, (full_name,), shape, reason))

    report.check(checkpoint.tensors, target)
    model.load_state_dict(copied, strict=False)
    return model.eval(), report


def save_converted(
    source: str | os.PathLike, directory: str | os.PathLike, *, overwrite: bool = False, **options
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Convert, and write model, image processor and report to `directory`: all of it, or nothing.

    Args:
        source: as for `convert_deit`.
        directory: where to write; must not exist or be empty.
        overwrite: replace an earlier conversion in `directory`.
        **options: the other arguments of `convert_deit`.

    Raises:
        ConversionError: as `convert_deit`, or `directory` holds something else or cannot be written.
    """
    directory = Path(directory).resolve()
    _check_target(directory, source, overwrite)
    checkpoint = read_source(source)
    model, report = convert_deit(checkpoint, **options)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as aside:
            finished, replaced = Path(aside) / "finished", Path(aside) / "replaced"
            model.save_pretrained(finished)
            _image_processor(checkpoint, model.config).save_pretrained(finished)
            (finished / REPORT_NAME).write_text(report.to_json() + "\n")
            if directory.exists():
                directory.rename(replaced)
            finished.rename(directory)
    except OSError as error:
        raise ConversionError(f"{directory}: cannot be written ({error.strerror or error})") from error
    return model, report


def _check_target(directory: Path, source: str | os.PathLike, overwrite: bool) -> None:
    """Refuse to write over anything but an earlier conversion that the user wants to be replaced."""
    if directory.exists() and not directory.is_dir():
        raise ConversionError(f"{directory}: is a file; give a directory")
    for name, path in (("the source", Path(source).resolve()), ("the working directory", Path.cwd())):
        if path.exists() and path.is_relative_to(directory):
            raise ConversionError(f"{directory}: holds {name}; give another directory")
    if directory.exists() and any(directory.iterdir()):
        if not overwrite:
            raise ConversionError(f"{directory}: is not empty; give another directory, or ask to overwrite it")
        if not (directory / REPORT_NAME).exists():
            raise ConversionError(
                f"{directory}: only an earlier conversion is overwritten, and there is no {REPORT_NAME} in it"
            )


def _copies(
    target: Collection[str], available: Collection[str], source_name: str
) -> list[tuple[str, tuple[str, ...]]]:
    """Which tensors of the source make up each tensor of the target that has a counterpart.

    Raises:
        ConversionError: a counterpart is missing.
    """
    copies = []
    for source_module, target_module in COPIED.items():
        pattern = re.escape(target_module).replace(r"\{i\}", r"(?P<i>\d+)") + r"\.(?P<kind>weight|bias)"
        for target_name in target:
            match = re.fullmatch(pattern, target_name)
            if not match:
                continue
            layer = match.groupdict().get("i", "")
            names = (f"{source_module.format(i=layer)}.{match['kind']}",)
            if source_module == "classifier" and names[0] not in available:
                names = tuple(f"{head}.{match['kind']}" for head in DISTILLED_HEADS)
                if not any(name in available for name in names):
                    continue  # a backbone: the classifier is new
            missing = [name for name in names if name not in available]
            if missing:
                raise ConversionError(f"{source_name}: {missing[0]} is missing from the checkpoint")
            copies.append((target_name, names))
    return copies


def _without_prefix(name: str) -> str:
    return re.sub(r"^(vit|deit)\.", "", name)


def _target_config(
    source: PreTrainedConfig, kernel_size: int, num_heads: int, image_size: int | tuple[int, int] | None
) -> AFTConfig:
    return AFTConfig(
        modality="image",
        aft_type="conv",
        conv_kernel_size=kernel_size,
        num_heads=num_heads,
        image_size=source.image_size if image_size is None else image_size,
        patch_size=source.patch_size,
        num_channels=source.num_channels,
        hidden_size=source.hidden_size,
        num_hidden_layers=source.num_hidden_layers,
        intermediate_size=source.intermediate_size,
        hidden_act=source.hidden_act,
        hidden_dropout_prob=source.hidden_dropout_prob,
        layer_norm_eps=source.layer_norm_eps,
        initializer_range=source.initializer_range,
        qkv_bias=source.qkv_bias,
        id2label=source.id2label,
        label2id=source.label2id,
        problem_type=source.problem_type,
    )


def _image_processor(checkpoint: VisionTransformerSource, config: AFTConfig) -> BaseImageProcessor:
    """The source's processor at the size of the new model; the library's for ViT where the source has none."""
    height, width = pair(config.image_size)
    processor = checkpoint.image_processor or ViTImageProcessorPil()
    if pair(checkpoint.config.image_size) == (height, width) and checkpoint.image_processor is not None:
        return processor
    if getattr(processor, "do_center_crop", False):
        # Keep the margin that is cropped: a resize to 256 before a crop of 224 becomes 438 before 384.
        ratio = max(height, width) / max(pair(checkpoint.config.image_size))
        processor.size = {side: round(length * ratio) for side, length in processor.size.items()}
        processor.crop_size = {"height": height, "width": width}
    else:
        processor.size = {"height": height, "width": width}
    return processor
