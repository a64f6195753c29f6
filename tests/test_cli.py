"""The command `aft-hf`: its commands, and errors of users, which are one line and a non-zero exit status."""

import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForImageClassification
from aft_hf.conversion import REPORT_NAME


@pytest.fixture
def aft_hf(run_command):
    return partial(run_command, "aft-hf")


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


def test_python_m_is_the_command_and_prints_the_versions_that_bug_reports_need():
    done = subprocess.run([sys.executable, "-m", "aft_hf", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"aft-hf \S+, torch \S+, transformers \S+, Python \S+$", done.stdout)


def test_convert_writes_a_model_and_says_what_became_of_every_tensor(vit, tmp_path, aft_hf):
    done = aft_hf("convert", vit, tmp_path / "aft", "--kernel-size", 5, "--num-heads", 4)
    assert done.returncode == 0, done.stderr
    assert "copied" in done.stdout and "dropped" in done.stdout and "AFT-conv 5/4" in done.stdout
    assert "18 copied tensors verified bit for bit" in done.stdout
    assert {"config.json", "model.safetensors", REPORT_NAME} <= {path.name for path in (tmp_path / "aft").iterdir()}


def test_convert_takes_another_type_another_size_and_pictures_to_look_at(vit, tmp_path, aft_hf):
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        Image.new("RGB", (50, 40), (80 * i, 0, 0)).save(tmp_path / "pictures" / f"{i}.png")
    sizes = ["--kernel-size", 3, "--num-heads", 4, "--image-size", "32x48"]
    fit = ["--init", "attention", "--images", tmp_path / "pictures", "--num-images", 2]
    done = aft_hf("convert", vit, tmp_path / "aft", *sizes, *fit)
    assert done.returncode == 0, done.stderr
    assert "5 tensors (0.00 M) fitted" in done.stdout
    assert "on 2 images" in (tmp_path / "aft" / REPORT_NAME).read_text()
    assert AFTConfig.from_pretrained(tmp_path / "aft").grid_size == (4, 6)


def test_the_script_is_the_command(vit, tmp_path, run_command):
    done = run_command("convert_deit.py", vit, tmp_path / "aft", "--aft-type", "simple")
    assert done.returncode == 0, done.stderr
    assert AFTConfig.from_pretrained(tmp_path / "aft").aft_type == "simple"


def test_a_bad_source_is_one_line_and_a_nonzero_exit(tmp_path, aft_hf):
    done = aft_hf("convert", tmp_path / "nowhere", tmp_path / "aft")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("aft-hf: ")
    assert "no such directory" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_beyond_the_grid_is_one_line_and_a_nonzero_exit(vit, tmp_path, aft_hf):
    done = aft_hf("convert", vit, tmp_path / "aft", "--kernel-size", 99, "--num-heads", 4)
    assert done.returncode != 0
    assert "kernel_size=99" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_as_target_is_refused(vit, tmp_path, aft_hf):
    (tmp_path / "aft").write_text("mine")
    done = aft_hf("convert", vit, tmp_path / "aft", "--kernel-size", 5, "--num-heads", 4)
    assert done.returncode != 0 and "is a file" in done.stderr
    assert (tmp_path / "aft").read_text() == "mine"


@pytest.mark.parametrize("script", ["benchmark", "convert_deit", "evaluate_model", "publish", "train"])
def test_a_script_that_is_one_command_shows_the_usage_of_that_command(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[1] / "scripts" / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert f"Usage: aft-hf {script.split('_')[0]} [OPTIONS]" in capsys.readouterr().out


def test_new_weights_depend_on_the_seed_alone(vit, tmp_path, aft_hf):
    keys = []
    for number, seed in enumerate(([], ["--seed", 0], ["--seed", 1])):
        torch.manual_seed(number)
        out = tmp_path / str(number)
        done = aft_hf("convert", vit, out, "--kernel-size", 3, "--num-heads", 4, *seed)
        assert done.returncode == 0, done.stderr
        keys.append(AFTForImageClassification.from_pretrained(out).aft.layers[0].mixer.k_proj.weight)
    assert torch.equal(keys[0], keys[1]) and not torch.equal(keys[0], keys[2])


def test_the_kernel_size_has_the_name_of_the_config_too(vit, tmp_path, aft_hf):
    done = aft_hf("convert", vit, tmp_path / "out", "--kernel-size", 3, "--num-heads", 2)
    assert done.returncode == 0, done.stderr
    assert AFTConfig.from_pretrained(tmp_path / "out").kernel_size == 3


@pytest.mark.parametrize("name", ["x[/red]y", "[bold]", "a:smile:b", "[link=x", "\\[b]"])
def test_a_name_with_brackets_is_printed_as_it_is(vit, tmp_path, aft_hf, name):
    for label in ("LABEL_0", "LABEL_1"):
        (tmp_path / "images" / label).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "images" / label / "1.png")
    source = shutil.copytree(vit, tmp_path / name / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(source)
    done = aft_hf("convert", source, tmp_path / name / "aft", "--kernel-size", 3, "--num-heads", 2)
    assert done.returncode == 0, done.stderr
    assert f"{name}/vit" in "".join(done.stdout.split("\n")) and f"{name}/aft" in done.stdout
    done = aft_hf("evaluate", tmp_path / name / "aft", tmp_path / "images")
    assert done.returncode == 0, done.stderr
    assert name in "".join(done.stdout.split())
    done = aft_hf("evaluate", tmp_path / name / "nowhere", tmp_path / "images")
    assert done.returncode == 1 and f"{name}/nowhere: no such directory" in done.stderr
