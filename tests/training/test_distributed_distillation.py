"""Distillation by two processes: it reports on both, learns the same as one process, and ends."""

import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import finish, launch
from tiny_models import vit_model
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import convert_deit
from aft_hf.conversion import read_source
from aft_hf.conversion.distillation import distill


pytestmark = pytest.mark.slow

STEPS = 30
LINE = re.compile(r"Distillation: +\d+ %, step (\d+), KL ")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with a ViT, and the outputs of a distillation by one process and by two."""
    root = tmp_path_factory.mktemp("distillation")
    vit = vit_model(hidden_size=16, num_hidden_layers=2, num_labels=3)
    torch.nn.init.normal_(vit.classifier.weight)
    vit.save_pretrained(root / "vit")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(root / "vit")
    for processes in (1, 2):
        # The timeout kills a process that waits for the other one forever.
        assert finish(launch(_distill, (str(root), processes), processes), timeout=120) == [0] * processes
    return root


def _distill(root: str, processes: int) -> None:
    """Distill in each process, once for a number of steps and once for a time."""
    rank, random = os.environ.get("RANK", "0"), np.random.default_rng(0)
    images = [Image.fromarray(pixels) for pixels in random.integers(256, size=(24, 16, 16, 3), dtype=np.uint8)]
    source = read_source(Path(root, "vit"))
    torch.manual_seed(0)
    model = convert_deit(source, kernel_size=3, num_heads=2)[0]
    # Errors of hidden states are left out: they are relative to the variance over the images of one process.
    options = {"batch_size": 8, "hidden_states": 0.0, "augmentation": "none"}
    with Path(root, f"{processes}-{rank}.log").open("w") as log, redirect_stdout(log):
        done = [distill(model, source, images, steps=STEPS, **options)]
        torch.save(model.state_dict(), Path(root, f"{processes}-{rank}.pt"))
    done.append(distill(model, source, images, minutes=0.005, **options))
    Path(root, f"{processes}-{rank}.json").write_text(json.dumps(done))


def test_both_processes_have_the_same_account_and_weights_and_those_of_one_and_the_first_reports(directory):
    steps = [LINE.findall((directory / f"{processes}-0.log").read_text()) for processes in (1, 2)]
    assert steps == [["10", "20", "30"]] * 2 and (directory / "2-1.log").read_text() == ""
    (first, timed), (second, timed_too) = (json.loads((directory / f"2-{rank}.json").read_text()) for rank in (0, 1))
    alone = json.loads((directory / "1-0.json").read_text())[0]
    for name in ("steps", "divergence", "agreement", "hidden_state_errors"):
        assert first[name] == second[name]
    # The tolerance is for float32 after 30 steps of AdamW.
    assert (first["steps"], first["agreement"]) == (STEPS, pytest.approx(alone["agreement"], abs=1e-4))
    assert first["divergence"] == pytest.approx(alone["divergence"], rel=1e-3)
    assert timed["steps"] == timed_too["steps"] >= 1
    weights = [torch.load(directory / f"{name}.pt") for name in ("1-0", "2-0", "2-1")]
    torch.testing.assert_close(weights[2], weights[1], rtol=0, atol=0)
    for name, expected in weights[0].items():
        if not name.endswith("k_proj.bias"):  # Eq. 2 is the same for all keys + c: AdamW magnifies the rounding of 0
            error = (weights[1][name] - expected).norm() / expected.norm()
            assert error < 1e-3, f"{name}: {error}"
