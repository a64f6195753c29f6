"""Checkpoints: they are complete or absent, and do not interfere with each other."""

import json
import resource
import shutil
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import bytes_recipe, finish, launch, plant, run, run_elsewhere
from torch.distributed.checkpoint import CheckpointException

from aft_hf.atomic_files import UNFINISHED
from aft_hf.errors import InputError
from aft_hf.running.checkpoints import MANIFEST, find_damage, read_manifest, write_manifest
from tests.properties.hostile import JSON


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with checkpoints of steps 3, 6, 9 and 12, and its results."""
    values = bytes_recipe(tmp_path_factory.mktemp("original"), keep_checkpoints=9)
    return values, run(values)


@pytest.fixture
def finished(tmp_path, original):
    """The recipe and the output directory of a copy of that run."""
    shutil.copytree(original[0]["output_dir"], tmp_path / "run")
    return original[0] | {"output_dir": str(tmp_path / "run")}, tmp_path / "run"


@pytest.fixture
def copied(finished):
    """The recipe and the checkpoint directory of a copy of that run, without checkpoints after step 9."""
    values, directory = finished
    shutil.rmtree(directory / "checkpoints/step-000000012")
    return values, directory / "checkpoints"


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", MANIFEST]
DAMAGES = [cut_in_half, flip_a_bit, Path.unlink]


@pytest.mark.parametrize(("file", "damage"), list(product(FILES, DAMAGES)))
def test_any_damage_to_any_file_is_found(tmp_path, original, file, damage):
    path = tmp_path / "copy"
    shutil.copytree(Path(original[0]["output_dir"]) / "checkpoints/step-000000009", path)
    assert find_damage(path) is None
    damage(path / file)
    assert file in find_damage(path)


def test_no_bit_of_a_manifest_changes_unnoticed(tmp_path, original):
    content = (Path(original[0]["output_dir"]) / "checkpoints/step-000000009" / MANIFEST).read_bytes()
    random = np.random.default_rng(0)
    for bit in random.choice(8 * len(content), 1000, replace=False):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / MANIFEST).write_bytes(damaged)
        with pytest.raises(InputError):
            read_manifest(tmp_path)


def assert_damage(directory: Path, content: bytes, *words: str) -> None:
    (directory / MANIFEST).write_bytes(content)
    damage = find_damage(directory)
    assert all(word in damage for word in words) and "\n" not in damage and len(damage) < 1000


@given(JSON, st.text(max_size=30))
def test_a_manifest_of_any_shape_is_damage(tmp_path_factory, value, text):
    directory = tmp_path_factory.mktemp("manifest")
    for content in (json.dumps(value).encode(), text.encode(), b"[" * 100_000):
        right = sha256(content).hexdigest().encode() + b"\n" + content  # as an attacker would write it
        for each in (content, right):
            assert_damage(directory, each, MANIFEST)


@pytest.mark.parametrize("name", ["/etc/hostname", "../step-000000006/model.safetensors", "a/../../b", "a\\b"])
def test_a_manifest_names_files_of_its_own_checkpoint_alone(tmp_path, original, name):
    manifest = read_manifest(Path(original[0]["output_dir"]) / "checkpoints/step-000000009")
    write_manifest(tmp_path, manifest.model_copy(update={"files": {name: "1:0"}}))
    assert "must name a file beside this one" in find_damage(tmp_path)


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_is_set_aside_before_a_checkpoint_has_been_loaded(copied, damaged):
    values, checkpoints = copied
    message = "step-000000003"
    if damaged:
        cut_in_half(checkpoints / "step-000000003/model.safetensors")
        message = r"step-000000003 is not a complete checkpoint: model.safetensors does not"
    else:
        plant(checkpoints / "step-000000003", "optimizer.bin", b"no optimizer")
    names = {path.name for path in checkpoints.glob("step-*")}
    with pytest.raises(ValueError, match=message):
        run(values | {"resume": str(checkpoints / "step-000000003")})
    assert {path.name for path in checkpoints.glob("*step-*")} == names


def test_a_recipe_of_any_shape_in_a_checkpoint_ends_in_one_line(copied):
    values, checkpoints = copied
    newest = checkpoints / "step-000000009"
    for recipe in ({}, {"task": ["bytes"]}, {"task": "bytes", "model": []}, {"task": {}, "a": {"b": []}}):
        write_manifest(newest, read_manifest(newest).model_copy(update={"recipe": recipe}))
        with pytest.raises(ValueError, match=f"{newest}: its recipe cannot be read") as stopped:
            run(values)
        assert "\n" not in str(stopped.value)


# Folders and files that are no checkpoints of the run, though some have similar names.
BESIDE = ["step-500/notes", "step--9/notes", ".partial-notes/notes", "set-aside-notes/notes"]
BESIDE += ["step-10", "step-000000099", "notes.txt"]


def test_only_what_the_run_has_written_is_renamed_or_deleted(copied, original):
    values, checkpoints = copied
    for name in BESIDE:
        (checkpoints / name).parent.mkdir(exist_ok=True)
        (checkpoints / name).write_text("mine")
    earlier = (checkpoints / "step-000000003").rename(checkpoints.parent / "earlier")  # on another disk
    (checkpoints / "step-000000003").symlink_to(earlier)
    assert run(values | {"keep_checkpoints": 1})["losses"] == original[1]["losses"]
    assert find_damage(earlier) is None and not (checkpoints / "step-000000006").exists()
    assert all((checkpoints / name).read_text() == "mine" for name in BESIDE)


def test_a_run_goes_on_from_the_newest_complete_checkpoint_and_says_which_it_skips(finished, original, capsys):
    values, checkpoints = finished[0], finished[1] / "checkpoints"
    newest = checkpoints / "step-000000012"
    cut_in_half(newest / MANIFEST)
    flip_a_bit(checkpoints / "step-000000009/optimizer.bin")
    (checkpoints / "step-000000006" / MANIFEST).unlink()
    (checkpoints / UNFINISHED / "left").mkdir(parents=True)  # as after a kill
    results = run(values)
    said = capsys.readouterr().out
    assert f"{newest} is damaged ({MANIFEST} does not match its checksum): skipped" in said
    assert f"{checkpoints}/step-000000009 is damaged (optimizer.bin does not match its checksum): skipped" in said
    assert f"{checkpoints}/step-000000006 is damaged (no checkpoint.json): skipped" in said
    assert f"resuming from {checkpoints}/step-000000003" in said
    assert results["losses"] == original[1]["losses"]
    assert not (checkpoints / UNFINISHED).exists() and not any(map(find_damage, checkpoints.glob("step-*")))


def test_a_run_with_no_complete_checkpoint_begins_again(copied, original):
    values, checkpoints = copied
    for path in checkpoints.glob("step-*"):
        (path / "model.safetensors").unlink()
    assert run(values)["losses"] == original[1]["losses"]


def test_a_disk_that_is_full_leaves_the_last_complete_checkpoint(copied, original):
    values, checkpoints = copied
    assert finish(launch(_run_with_little_room, (values,))) == [1]
    message = Path(f"{values['output_dir']}.error").read_text()
    assert "OSError: cannot write the checkpoint of step 12" in message and message.count("\n") == 1
    assert f"the last complete checkpoint is {checkpoints}/step-000000009" in message
    assert find_damage(checkpoints / "step-000000009") is None and not (checkpoints / "step-000000012").exists()
    assert not list(checkpoints.glob(".*"))  # no partial checkpoint occupies the disk
    assert run(values)["losses"] == original[1]["losses"]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("save_state", "cannot write the checkpoint of step 12"),
        ("load_state", "step-000000009 does not fit the model"),
    ],
)
def test_an_error_of_sharded_checkpoints_ends_in_one_line(copied, monkeypatch, method, message):
    """A CheckpointException does not derive from Exception, and lists the errors of all processes."""

    def fail(*_):
        raise CheckpointException("failed", {0: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(f"accelerate.Accelerator.{method}", fail)
    with pytest.raises((OSError, ValueError), match=rf"{message}.*No space left on device") as stopped:
        run(copied[0])
    assert "\n" not in str(stopped.value)
    assert not list(copied[1].glob(".*"))


def test_a_disk_that_is_full_at_the_end_leaves_the_model_that_was_there(finished, original):
    values, directory = finished
    files = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    assert finish(launch(_run_with_little_room, (values,))) == [1]
    message = Path(f"{directory}.error").read_text()
    assert f"OSError: cannot write to {directory} (" in message
    assert "free disk space and run the same command again to write them" in message and message.count("\n") == 1
    assert {path: path.read_bytes() for path in directory.iterdir() if path.is_file()} == files
    assert not list(directory.glob(".*"))
    assert run(values)["losses"] == original[1]["losses"]


def _run_with_little_room(values) -> None:
    # Writing a longer file is an error, which stands for a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    run_elsewhere(values)
