"""The `aft-hf` command: what a user can do wrong ends in one line and a non-zero exit."""

import subprocess
import sys

import pytest
from transformers import ViTConfig, ViTForImageClassification

from aft_hf.conversion import REPORT_NAME


def aft_hf(*arguments):
    return subprocess.run([sys.executable, "-m", "aft_hf.cli", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "vit"
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=40,
        image_size=32,
        patch_size=8,
    )
    ViTForImageClassification(config).save_pretrained(path)
    return path


def test_convert_writes_a_model_and_says_what_became_of_every_tensor(vit, tmp_path):
    done = aft_hf("convert", vit, tmp_path / "aft", "--kernel-size", 5, "--num-heads", 4)
    assert done.returncode == 0, done.stderr
    assert "copied" in done.stdout and "dropped" in done.stdout and "AFT-conv 5/4" in done.stdout
    assert {"config.json", "model.safetensors", REPORT_NAME} <= {path.name for path in (tmp_path / "aft").iterdir()}


def test_a_bad_source_is_one_line_and_a_nonzero_exit(tmp_path):
    done = aft_hf("convert", tmp_path / "nowhere", tmp_path / "aft")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("aft-hf: ")
    assert "no such directory" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_beyond_the_grid_is_one_line_and_a_nonzero_exit(vit, tmp_path):
    done = aft_hf("convert", vit, tmp_path / "aft", "--kernel-size", 99, "--num-heads", 4)
    assert done.returncode != 0
    assert "conv_kernel_size=99" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_as_target_is_refused(vit, tmp_path):
    (tmp_path / "aft").write_text("mine")
    done = aft_hf("convert", vit, tmp_path / "aft", "--kernel-size", 5, "--num-heads", 4)
    assert done.returncode != 0 and "is a file" in done.stderr
    assert (tmp_path / "aft").read_text() == "mine"
