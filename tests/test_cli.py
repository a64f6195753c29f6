"""The command `aft-hf`: its commands, and errors of users, which are one line and a non-zero exit status."""

import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from PIL import Image
from tiny_models import vit_model
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForImageClassification, cli
from aft_hf.conversion import REPORT_NAME


@pytest.fixture
def aft_hf(run_command):
    return partial(run_command, "aft-hf")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "vit"
    vit_model(32, patch_size=8).save_pretrained(path)
    return path


def test_python_m_is_the_command_and_prints_the_versions_that_bug_reports_need():
    done = subprocess.run([sys.executable, "-m", "aft_hf", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"aft-hf \S+, torch \S+, transformers \S+, Python \S+$", done.stdout)


def test_convert_writes_a_model_of_another_size_fitted_to_pictures_and_says_what_became_of_every_tensor(
    vit, tmp_path, aft_hf
):
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        Image.new("RGB", (50, 40), (80 * i, 0, 0)).save(tmp_path / "pictures" / f"{i}.png")
    sizes = ["--kernel-size", 3, "--num-heads", 4, "--image-size", "32x48"]
    fit = ["--init", "attention", "--images", tmp_path / "pictures", "--num-images", 2]
    done = aft_hf("convert", vit, tmp_path / "aft", *sizes, *fit)
    assert done.returncode == 0, done.stderr
    assert "dropped" in done.stdout and "AFT-conv 3/4" in done.stdout and "5 tensors (0.00 M) fitted" in done.stdout
    assert re.search(r"\d+ copied tensors verified bit for bit", done.stdout)
    assert {"config.json", "model.safetensors", REPORT_NAME} <= {path.name for path in (tmp_path / "aft").iterdir()}
    assert "on 2 images" in (tmp_path / "aft" / REPORT_NAME).read_text()
    assert AFTConfig.from_pretrained(tmp_path / "aft").grid_size == (4, 6)


COMMANDS = [command.name or command.callback.__name__ for command in cli.app.registered_commands]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "transformers"])
def test_help_fits_80_columns_without_cut_names(command, monkeypatch, aft_hf):
    monkeypatch.setenv("COLUMNS", "80")
    done = aft_hf(command, "--help")
    assert done.returncode == 0 and f"Usage: aft-hf {command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80 and "\u2026" not in done.stdout


def test_train_prints_the_resolved_recipe_or_the_meaning_of_all_keys_and_trains_nothing(tmp_path, aft_hf):
    recipe = "configs/examples/bytes_aft_local.yaml"
    done = aft_hf("train", recipe, "--print-config", f"output_dir={tmp_path / 'out'}", "optimizer.learning_rate=1e-4")
    assert done.returncode == 0 and "learning_rate: 0.0001" in done.stdout and "keep_checkpoints: 2" in done.stdout
    done = aft_hf("train", "--explain")
    assert done.returncode == 0 and "base: text, optional\n    Another recipe" in done.stdout
    assert "optimizer.learning_rate: number > 0, required\n    Maximum learning rate.\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    done = aft_hf("train", recipe, "optimizer.learning_rat=1")
    message = "aft-hf: unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "keeps"), [("evaluate", True), ("transformers", False)])
def test_all_commands_but_a_server_keep_freed_memory(command, keeps, monkeypatch, aft_hf):
    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append(command))
    assert aft_hf(command, "--help").returncode == 0
    assert calls == [command] * keeps


def test_new_weights_depend_on_the_seed_alone(vit, tmp_path, aft_hf):
    keys = []
    for number, seed in enumerate(([], ["--seed", 0], ["--seed", 1])):
        torch.manual_seed(number)
        out = tmp_path / str(number)
        done = aft_hf("convert", vit, out, "--kernel-size", 3, "--num-heads", 4, *seed)
        assert done.returncode == 0, done.stderr
        keys.append(AFTForImageClassification.from_pretrained(out).aft.layers[0].mixer.k_proj.weight)
    assert torch.equal(keys[0], keys[1]) and not torch.equal(keys[0], keys[2])


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
