"""Measurements of a trained model in addition to its score."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from aft_hf.analysis import bias_maps
from aft_hf.loading import load, load_trained
from aft_hf.mixers_aft import AFTConv
from aft_hf.training.recipe import BytesRecipe, ImagesRecipe, Recipe, build_recipe
from aft_hf.training.tasks import TASKS, BytesTask, read_rows, some_rows
from aft_hf.tuning.evaluation import evaluate_classifier


LONGER = (1, 2, 4, 8)  # multiples of the sequence length in training
LARGER = (1.25, 1.5, 1.75)  # multiples of the image size in training


@torch.inference_mode()
def lengths(recipe: Recipe) -> dict[str, float]:
    """Bits per character of the test text at multiples of the sequence length in training, as "test_at_4x"."""
    model = _trained(AutoModelForCausalLM, recipe)
    bits = {}
    for factor in LONGER:
        values = recipe.model_dump()
        values["data"]["seq_len"] *= factor
        longer = build_recipe(values)
        assert isinstance(longer, BytesRecipe)
        task = BytesTask(longer)
        scores = []
        for batch in DataLoader(task.evaluated["test"], max(1, recipe.global_batch_size // factor)):
            batch = {name: x.to(model.device) for name, x in batch.items()}
            scores.append([x.cpu() for x in task.scores(model, batch)])
        metrics = task.metrics("test", *map(torch.cat, zip(*scores)))
        bits[f"test_at_{factor}x"] = metrics["bits_per_character"]
    return bits


def image_sizes(recipe: Recipe) -> dict[str, float]:
    """Accuracy on the validation images at larger sizes than in training, as "test_at_40_px"."""
    assert isinstance(recipe, ImagesRecipe)
    data = recipe.data
    model = _trained(AutoModelForImageClassification, recipe)
    processor = load(AutoImageProcessor, recipe.output_dir)
    rows = some_rows(read_rows(recipe), data, shuffled=True)["validation"]
    options: dict[str, Any] = {"image_column": data.image_column, "label_column": data.label_column}
    options["enlarge_patches"] = False  # as in the paper
    scores = {}
    for factor in LARGER:
        side = round(data.image_size * factor)
        metrics = evaluate_classifier(model, processor, rows, image_size=(side, side), **options)
        scores[f"test_at_{side}_px"] = metrics["accuracy"]
    return scores


@torch.no_grad()
def kernels(recipe: Recipe) -> dict[str, float]:
    """Fraction of a kernel in use: exp(entropy of softmax(w)) / size, averaged over layers and heads."""
    shares = []
    for mixer in _trained(AutoModelForImageClassification, recipe).modules():
        if isinstance(mixer, AFTConv):
            log_p = torch.log_softmax(mixer.kernel_bias().flatten(1), -1)  # (h, s s)
            entropy = -(log_p.exp() * log_p).sum(-1)
            shares.append(entropy.exp() / log_p.shape[-1])
    return {"kernel_use": torch.cat(shares).mean().item()}


def locality(recipe: Recipe) -> dict[str, float]:
    """Mean distance of two patches with the weights softmax(w), relative to equal weights: the mean over layers, heads
    and queries. The class token is left out.
    """
    model = _trained(AutoModelForImageClassification, recipe)
    rows, columns = model.config.grid_size
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double()
    distances = torch.cdist(places, places)
    weights = torch.stack(bias_maps(model))[..., -len(places) :, -len(places) :].double().softmax(-1)
    return {"distance": ((weights * distances).sum(-1) / distances.mean(-1)).mean().item()}


def position_biases(recipe: Recipe) -> dict[str, float]:
    """Number of position-bias parameters per layer."""
    kind = AutoModelForImageClassification if recipe.task == "images" else AutoModelForCausalLM
    model = _trained(kind, recipe)
    count = sum(w.numel() for name, w in model.named_parameters() if ".position_bias_" in name)
    return {"bias_parameters": count / model.config.num_hidden_layers}


MEASURES: dict[str, Callable[[Recipe], dict[str, float]]] = {
    "lengths": lengths,
    "image_sizes": image_sizes,
    "kernels": kernels,
    "locality": locality,
    "position_biases": position_biases,
}


def scores(recipe: Recipe, results: dict[str, Any]) -> dict[str, float]:
    """Metrics of every run, from the results of `train`.

    "test" is bits per character, bits per dimension or accuracy on the evaluation data, and "test_error" its standard
    error as these data are a sample. "train" is the mean training loss over the last tenth of the steps, in bits if
    "test" is in bits.
    """
    name = {"bytes": "bits_per_character", "pixels": "bits_per_dim", "images": "accuracy"}[recipe.task]
    tested = results["metrics"].get("test") or results["metrics"]["validation"]
    last = [row["loss"] for row in results["losses"] if row["step"] > 0.9 * results["steps"]]
    return {
        "test": tested[name],
        "test_error": test_error(recipe),
        "train": sum(last) / len(last) / (1 if recipe.task == "images" else math.log(2)),
        "parameters": results["parameters"],
        "seconds": results["seconds"],
    }


@torch.inference_mode()
def test_error(recipe: Recipe) -> float:
    """Standard error of the test score over the windows, images or sequences of the test set."""
    task = TASKS[recipe.task](recipe)
    model = _trained(task.auto_model, recipe).eval()
    rows = task.evaluated.get("test") or task.evaluated["validation"]
    parts = []
    for batch in DataLoader(rows, recipe.global_batch_size):
        parts.append([x.cpu().double() for x in task.scores(model, {k: x.to(model.device) for k, x in batch.items()})])
    predictions, references = (torch.cat(each) for each in zip(*parts))
    if recipe.task == "images":
        right = (predictions.argmax(-1) == references).double()
        return float(right.std() / math.sqrt(len(right)))
    losses, counts = predictions / math.log(2), references[:, -1]  # bits; characters or dimensions
    residuals = losses - counts * (losses.sum() / counts.sum())
    return float(residuals.square().sum().sqrt() / counts.sum())


def _trained(kind: type[Any], recipe: Recipe) -> PreTrainedModel:
    """Load the model of a finished run, on the GPU if there is one."""
    model = load_trained(kind, recipe.output_dir)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
