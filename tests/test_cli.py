"""The command `aft-hf`: its commands, and errors of users, which are one line and a non-zero exit status."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from saved_models import changed, edited, save_models
from tiny_models import vit_model
from tqdm import tqdm
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForImageClassification, cli
from aft_hf.console import plain_output
from aft_hf.conversion import REPORT_NAME
from aft_hf.running.checkpoints import Manifest, Record, write_manifest


@pytest.fixture
def aft_hf(run_command):
    return partial(run_command, "aft-hf")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "vit"
    vit_model(32, patch_size=8).save_pretrained(path)
    return path


@pytest.mark.parametrize("module", ("aft_hf", "aft_hf.cli"))
def test_python_m_is_the_command_and_prints_the_versions_that_bug_reports_need(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
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
    for words in ("dropped", "AFT-conv 3/4 (kernel size/position-bias heads)", "4 tensors (0.00 M) fitted"):
        assert words in done.stdout
    assert re.search(r"\d+ copied tensors verified bit for bit", done.stdout)
    assert {"config.json", "model.safetensors", REPORT_NAME} <= {path.name for path in (tmp_path / "aft").iterdir()}
    assert '"images": 2' in (tmp_path / "aft" / REPORT_NAME).read_text()
    assert AFTConfig.from_pretrained(tmp_path / "aft").grid_size == (4, 6)


COMMANDS = [command.name or command.callback.__name__ for command in cli.app.registered_commands]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "transformers"])
def test_help_fits_80_columns_without_cut_names(command, monkeypatch, aft_hf):
    monkeypatch.setenv("COLUMNS", "80")
    done = aft_hf(command, "--help")
    assert done.returncode == 0 and f"Usage: aft-hf {command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80 and "\u2026" not in done.stdout


def test_train_prints_the_resolved_recipe_or_names_an_unknown_key_and_trains_nothing(tmp_path, aft_hf):
    recipe = "configs/examples/bytes_aft_local.yaml"
    done = aft_hf("train", recipe, "--print-config", f"output_dir={tmp_path / 'out'}", "optimizer.learning_rate=1e-4")
    assert done.returncode == 0 and "learning_rate: 0.0001" in done.stdout and "keep_checkpoints: 2" in done.stdout
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
    "has the dtype torch.int32; ": lambda x: x.int(),
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
def test_all_commands_refuse_multi_label_models_and_regressions_alike(options, models, tmp_path, aft_hf, monkeypatch):
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


CONTROLS = ["\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "\rover", "\u202etxt.exe", "\x1b[A", "\x08\x08", "\x1bc"]
NAME = f"a{''.join(CONTROLS)}b"


def is_plain(text):
    return all(each.isprintable() or each in "\n\t" for each in text)


def test_no_name_of_a_file_or_class_controls_the_terminal(vit, tmp_path, aft_hf):
    source = shutil.copytree(vit, tmp_path / NAME)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(source)
    for label in ("LABEL_0", f"LABEL_1{NAME}"):
        (tmp_path / "images" / label).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "images" / label / "1.png")
    for words, code, said in (
        (["convert", source, tmp_path / f"{NAME}aft", "--kernel-size", 3, "--num-heads", 2], 0, "baft"),
        (["visualize", tmp_path / f"{NAME}aft", "biases", "--out", tmp_path / f"{NAME}.svg"], 0, "b.svg"),
        (["evaluate", source, tmp_path / "images"], 0, "accuracy"),
        ([NAME], 2, "No such command"),
    ):
        done = aft_hf(*words)
        assert done.returncode == code and said in done.stdout + done.stderr and is_plain(done.stdout + done.stderr)


def test_no_file_name_in_a_manifest_controls_the_terminal(tmp_path, aft_hf):
    for number, control in enumerate(CONTROLS, 1):
        checkpoint = tmp_path / "checkpoints" / f"step-{number:09}"
        checkpoint.mkdir(parents=True)
        manifest = Manifest(step=number, record=Record(), recipe={}, data="", files={f"a{control}b": "0"})
        write_manifest(checkpoint, manifest)
    small = ["steps=1", "model.num_hidden_layers=1", "model.hidden_size=16", "model.num_heads=1", "tracker=null"]
    data = ["data.train=generated", "data.seq_len=16", "data.max_eval_samples=1"]
    done = aft_hf("train", "configs/examples/bytes_aft_local.yaml", f"output_dir={tmp_path}", *small, *data)
    assert done.returncode == 0, done.stderr
    assert is_plain(done.stdout) and done.stdout.count("is damaged (a") == len(CONTROLS)


def test_no_name_of_a_tensor_controls_the_terminal_nor_do_colors_of_a_library(vit, tmp_path):
    copy = Path(shutil.copytree(vit, tmp_path / "vit"))
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {f"x{control}y": torch.ones(1) for control in CONTROLS}, copy / "model.safetensors")
    (tmp_path / "images/LABEL_0").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "images/LABEL_0/1.png")
    words = [sys.executable, "-m", "aft_hf", "evaluate", str(copy), str(tmp_path / "images")]
    ours, theirs = os.openpty()  # transformers colors its report in a terminal
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    shown = done.stderr
    assert done.returncode == 0, shown
    with suppress(OSError):  # the end
        while block := os.read(ours, 1000):
            shown += block.replace(b"\r\n", b"\n")
    assert b"UNEXPECTED" in shown and b"accuracy" in shown and is_plain(shown.decode())


def test_bars_move_in_their_lines_and_nothing_else_does(capsys):
    with plain_output():
        print("\x1b[A", "\r|", file=sys.stdout)
        print("error \x1b[A \r|", file=sys.stderr)
        with tqdm(total=1, desc="\x1b]0;x\rdesc", file=sys.stderr), tqdm(total=1, position=1, file=sys.stderr):
            pass
    shown = capsys.readouterr()
    assert shown.out == " [A  |\n" and shown.err.startswith("error  [A  |\n\r ]0;x desc:   0%|")
    assert "\x1b[A" in shown.err and "\x1b]" not in shown.err
    print("\x1b[31m")
    assert capsys.readouterr().out == "\x1b[31m\n"
