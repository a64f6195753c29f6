"""The checks before an upload: each problem is reported in a line that names the file."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from saved_models import changed, edited
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTForImageClassification
from aft_hf.errors import InputError
from aft_hf.loading import MARKER
from aft_hf.publishing import find_problems, publish, write_card
from aft_hf.publishing.folder import files_to_upload


pytestmark = pytest.mark.usefixtures("without_limits")


TOKEN = "hf_" + "A1b2C3d4E5" * 3 + "F6g7"


def only_problem(directory) -> str:
    problems = find_problems(directory)
    assert len(problems) == 1, problems
    assert "\n" not in problems[0]
    return problems[0]


def test_a_saved_model_a_backbone_and_a_model_in_shards_have_no_problems(carded, tmp_path):
    for task in ("text", "image"):
        assert find_problems(carded / task) == []
    model = tiny.build("text", "local")
    tiny.save(model.aft, tmp_path / "backbone")
    tiny.save(model, tmp_path / "shards", max_shard_size="4KB")
    for name in ("backbone", "shards"):
        write_card(tmp_path / name)
        assert find_problems(tmp_path / name) == []


OTHER_CODE = {"AutoModel": "someone/else--modeling_aft.AFTModel"}


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("config.json", changed(model_type="vit"), "model_type is 'vit', not \"aft\""),
        ("config.json", changed(num_heads=3), "cannot be loaded by AFTForImageClassification"),
        ("config.json", changed(architectures=["AFTForDreams"]), "architectures is 'AFTForDreams'"),
        ("config.json", changed(auto_map=None), "no auto_map"),
        ("config.json", changed(auto_map=OTHER_CODE), "another repository"),
        ("config.json", changed(intermediate_size=32), "of another shape"),
        ("config.json", changed(num_hidden_layers=1), "are unexpected"),
        ("preprocessor_config.json", changed(image_processor_type="No"), "cannot be loaded by AutoImageProcessor"),
        ("config.json", Path.unlink, "the directory contains no config.json"),
        ("model.safetensors", Path.unlink, "no file named model.safetensors"),
        ("preprocessor_config.json", Path.unlink, "save the image processor beside the model"),
        ("mixing_aft.py", lambda path: path.write_text("import os\n"), "differs from the installed aft_hf"),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be loaded by AFT"),
        ("model.safetensors", edited(lambda x: x.pop("classifier.bias")), "missing, such as classifier.bias"),
        (
            "model.safetensors",
            edited(lambda x: x["classifier.bias"].fill_(torch.nan)),
            "bias holds NaN or infinity (3 of 3",
        ),
        ("model.safetensors", edited(dict, author=TOKEN), "model.safetensors: holds a Hugging Face token"),
    ],
)
def test_a_file_that_is_missing_wrong_or_damaged_is_told(prepared, name, damage, told):
    damage(prepared / name)
    assert told in only_problem(prepared)


def test_weights_that_are_not_uploaded_are_told(prepared):
    (prepared / (name := ".hidden/model.safetensors")).parent.mkdir()
    (prepared / "model.safetensors").rename(prepared / name)
    (prepared / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"classifier.bias": name}}))
    assert only_problem(prepared) == f"{prepared / name}: the weight index lists it, but it is not uploaded"


@pytest.mark.parametrize(
    ("aft_type", "fields", "side", "problem"),
    [
        ("full", {}, 32, "of its image processor; save that with which"),
        ("conv", {"num_channels": 1}, 16, "of its image processor; save that with which"),
        ("conv", {}, 32, None),  # this model takes images of any size
        ("full", {"dtype": torch.bfloat16}, 16, None),
    ],
)
def test_an_image_processor_that_does_not_fit_the_model_is_refused(tmp_path, aft_type, fields, side, problem):
    config = tiny.build("image", aft_type).config
    config.update(fields)
    AFTForImageClassification(config).to(config.dtype).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(tmp_path)
    write_card(tmp_path)
    assert find_problems(tmp_path) == [] if problem is None else problem in only_problem(tmp_path)


def test_an_image_processor_may_lie_in_the_file_of_a_processor(prepared):
    values = json.loads((prepared / "preprocessor_config.json").read_text())
    (prepared / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    (prepared / "preprocessor_config.json").unlink()
    assert find_problems(prepared) == []
    (prepared / "processor_config.json").write_text("{}")
    assert "save the image processor beside the model" in only_problem(prepared)


def test_the_generation_config_of_a_model_may_be_missing_but_not_damaged(carded, tmp_path):
    directory = Path(shutil.copytree(carded / "text", tmp_path / "tiny"))
    (directory / "generation_config.json").write_text("{")
    assert "generation_config.json: does not load" in only_problem(directory)
    (directory / "generation_config.json").unlink()
    assert find_problems(directory) == []


def test_a_missing_or_generated_card_and_missing_code_are_no_problem_as_publish_writes_them(prepared):
    (prepared / "modeling_aft.py").unlink()
    (prepared / "README.md").write_text(f"---\ntags: 3\n---\n{MARKER}")
    for _ in range(2):
        assert find_problems(prepared) == []
        files = publish(prepared, "me/tiny", dry_run=True).files
        assert {"README.md", "modeling_aft.py"} <= {*files}
        (prepared / "README.md").unlink(missing_ok=True)


def test_a_card_of_the_user_is_checked_and_a_byte_order_mark_is_no_problem(prepared, capsys):
    card = prepared / "README.md"
    generated = card.read_text().replace("library_name", "name")
    card.write_text(generated.replace(MARKER, ""))
    assert only_problem(prepared) == "README.md: the metadata lacks library_name"
    card.write_text(
        "\ufeff---\nlicense: mit\n" + generated.replace(MARKER, "").replace("name:", "library_name:", 1)[4:]
    )
    assert find_problems(prepared) == []
    publish(prepared, "me/tiny", dry_run=True)
    assert "license mit" in capsys.readouterr().out


def test_a_tokenizer_larger_than_the_vocabulary_is_told(carded, tmp_path):
    directory = Path(shutil.copytree(carded / "text", tmp_path / "tiny"))
    tiny.build_byte_tokenizer(bos_token="<s>").save_pretrained(directory)
    assert "259 tokens, the model 258" in only_problem(directory)


PICKLES = {
    "model.bin": torch.save,
    "notes.dat": torch.save,
    "notes.txt": lambda x, path: path.write_bytes(pickle.dumps(x)),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_told_by_name_and_by_content(prepared, name):
    PICKLES[name]({}, prepared / name)
    assert only_problem(prepared).startswith(f"{name}: is a pickle")


def test_a_safetensors_file_is_no_pickle_whatever_the_length_of_its_header(prepared):
    path = prepared / "model.safetensors"
    content, length = path.read_bytes(), 0x10280
    end = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + content[8:end].ljust(length) + content[end:])
    assert path.read_bytes().startswith(b"\x80\x02") and find_problems(prepared) == []
    path.write_bytes(pickle.dumps({}))
    assert "model.safetensors: is a pickle" in find_problems(prepared)[0]


@pytest.mark.parametrize(
    "secret",
    [
        TOKEN,
        "AKIA" + "ABCDEFGH23456789",
        "ghp_" + "a1B2" * 9,
        "sk-" + "proj-" + "a1B2c3D4" * 3,
        "https://me:" + "secret@example.org/model",
        "-----BEGIN " + "PRIVATE KEY-----",
        "-----BEGIN " + "PGP PRIVATE KEY BLOCK-----",
        "wandb_api_key: " + "0123456789abcdef" * 2 + "01234567",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_a_key_is_told_with_its_line_but_not_repeated(prepared, secret, encoding):
    (prepared / "notes.md").write_text(f"one\ntwo\n{secret}\n", encoding)
    told = only_problem(prepared)
    assert told.startswith("notes.md: holds a") and "line 3" in told and secret not in told


def test_files_of_training_are_not_published(prepared):
    beside = ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", ".DS_Store", "runs/events"]
    beside += ["checkpoint-10/optimizer.pt", "checkpoints/step-000000010/state.bin", ".git/config"]
    for name in beside:
        (prepared / name).parent.mkdir(parents=True, exist_ok=True)
        (prepared / name).write_bytes(pickle.dumps(TOKEN))
    (prepared / "notes.md").write_text("hf_hub_download and task-specific-fine-tuned-models-are-here, https://a.b/c@d")
    kept, left_out = files_to_upload(prepared)
    assert find_problems(prepared) == []  # what only looks like a key is let through
    assert {"config.json", "model.safetensors", "README.md", "notes.md"} <= kept.keys()
    assert set(left_out) == {name.split("/")[0] for name in beside}


def test_all_problems_are_told_at_once_and_nothing_is_asked_of_the_hub(prepared, hub):
    (prepared / "model.pt").write_bytes(pickle.dumps({}))
    (prepared / "notes.md").write_text(TOKEN)
    with pytest.raises(InputError, match=r"model\.pt: is a pickle.*notes\.md: holds a Hugging Face token"):
        publish(prepared, "me/tiny")


def test_adapters_and_missing_directories_are_told(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for name, told in ((".", "merge the adapter into its model"), ("nowhere", "nowhere: no such directory$")):
        with pytest.raises(InputError, match=told):
            publish(tmp_path / name, "me/tiny", dry_run=True)


def test_the_command_line_and_publishing_need_no_package_of_the_extra_train(carded):
    missing = dict.fromkeys(("accelerate", "datasets", "kornia", "sklearn", "tensorboard"))
    lines = [f"import sys; sys.modules.update({missing})", "import aft_hf.cli, aft_hf.publishing as publishing"]
    lines += [f"print(publishing.find_problems({str(carded / 'text')!r}))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
