"""The command `aft-hf`: its commands, and errors of users, which are one line and a non-zero exit status."""

import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from PIL import Image
from saved_models import changed, edited, save_models
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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    return root


TRAIN = ["--do_train", "--train", "images", "--validation-share", 0, "--output_dir", "out", "--use_cpu", "true"]
TRAIN += ["--max_steps", 1, "--report_to", "none"]
# Commands that take a model, by its name among those of `save_models`.
TAKING = {
    "evaluate": ("image", ["{}", "images"]),
    "evaluate a language model": ("text", ["{}", "text.txt"]),
    "finetune": ("image", ["--model_name_or_path", "{}", *TRAIN]),
    "finetune a ViT": ("vit", ["--model_name_or_path", "{}", *TRAIN]),
    "finetune --teacher": ("vit", ["--model_name_or_path", "image", "--teacher", "{}", *TRAIN]),
    "train": (
        "image",
        ["recipe.yaml", "model={{pretrained: {}}}", "output_dir=out", "data.image_size=8", "global_batch_size=1"],
    ),
    "convert": ("vit", ["{}", "out", "--kernel-size", 3, "--num-heads", 2]),
    "publish": ("image", ["{}", "me/tiny", "--dry-run"]),
    "benchmark": ("text", ["{}"]),
    "visualize keys": ("text", ["{}", "keys", "--text", "a"]),
    "visualize biases": ("image", ["{}", "biases"]),
    "visualize attention": ("vit", ["{}", "attention", "--images", "images"]),
}
DAMAGES = {
    "holds NaN or infinity": lambda x: x.fill_(torch.nan),
    "is stored as I32|is torch.int32; weights must be": lambda x: x.int(),
}


@pytest.mark.parametrize("told", DAMAGES)
@pytest.mark.parametrize("command", TAKING)
def test_every_command_refuses_damaged_weights_by_name(command, told, models, tmp_path, aft_hf, monkeypatch):
    name, words = TAKING[command]
    shutil.copytree(models / name, tmp_path / "damaged")
    weights = ("mlp.fc1.weight", "intermediate.dense.weight")  # of an AFT, and of a ViT in its files
    damage = edited(lambda x: x.update({key: DAMAGES[told](x[key]) for key in x if key.endswith(weights)}))
    damage(tmp_path / "damaged" / "model.safetensors")
    for each in models.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    done = aft_hf(command.split()[0], *(str(word).format("damaged") for word in words))
    assert done.returncode != 0 and re.search(rf"damaged: .*weight ({told})", done.stderr), done.stderr
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("options", [{"problem_type": "multi_label_classification"}, {"problem_type": "regression"}])
def test_one_answer_for_models_that_do_not_choose_a_class(options, models, tmp_path, aft_hf, monkeypatch):
    for each in models.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    told = f"a classifier that chooses one of several classes, got problem_type='{options['problem_type']}'"
    for name in ("image", "vit"):
        shutil.copytree(models / name, tmp_path / f"other-{name}")
        changed(**options)(tmp_path / f"other-{name}" / "config.json")
    for command, (name, words) in TAKING.items():
        if command.split()[0] in ("evaluate", "finetune", "train") and name != "text":
            done = aft_hf(command.split()[0], *(str(word).format(f"other-{name}") for word in words))
            assert done.returncode != 0 and told in done.stderr, (command, done.stderr)
    sizes = ["--kernel-size", 3, "--num-heads", 2]
    done = aft_hf("convert", "other-vit", "aft", *sizes)
    assert done.returncode == 0 and told in done.stdout.replace("\n", " ") and "--teacher" not in done.stdout
    done = aft_hf("convert", "other-vit", "aft2", *sizes, "--distill", "--images", "images", "--steps", 1)
    assert done.returncode != 0 and told in done.stderr
