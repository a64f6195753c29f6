"""Checkpoints: complete or not there, and never in the way of each other."""

import json
import resource
import shutil
from itertools import product
from pathlib import Path

import pytest
from runs import bytes_recipe, finish, launch, run

from aft_hf.training.checkpoints import MANIFEST, find_damage


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with checkpoints of steps 3, 6, 9 and 12, and its results."""
    values = bytes_recipe(tmp_path_factory.mktemp("original"), keep_checkpoints=9)
    return values, run(values)


@pytest.fixture
def copied(tmp_path, original):
    """A copy of that run which ends with the checkpoint of step 9: its recipe and the directory of its checkpoints."""
    values = original[0] | {"output_dir": str(tmp_path / "run")}
    shutil.copytree(original[0]["output_dir"], values["output_dir"])
    shutil.rmtree(tmp_path / "run/checkpoints/step-000000012")
    return values, tmp_path / "run/checkpoints"


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", MANIFEST]
DAMAGES = [cut_in_half, flip_a_bit, Path.unlink]


# The manifest has no sum of itself, so a wrong bit in it may pass.
@pytest.mark.parametrize(
    ("file", "damage"), [each for each in product(FILES, DAMAGES) if each != (MANIFEST, flip_a_bit)]
)
def test_any_damage_to_any_file_is_found(tmp_path, original, file, damage):
    path = tmp_path / "copy"
    shutil.copytree(Path(original[0]["output_dir"]) / "checkpoints/step-000000009", path)
    assert find_damage(path) is None
    damage(path / file)
    assert file in find_damage(path)


def test_a_run_goes_on_from_the_newest_complete_checkpoint_and_says_which_it_skips(copied, original, capsys):
    values, checkpoints = copied
    flip_a_bit(checkpoints / "step-000000009/optimizer.bin")
    (checkpoints / "step-000000006" / MANIFEST).unlink()
    (checkpoints / ".partial-000000010").mkdir()
    results = run(values)
    said = capsys.readouterr().out
    assert f"{checkpoints}/step-000000009 is damaged (optimizer.bin is not what was written): skipped" in said
    assert f"{checkpoints}/step-000000006 is damaged (no checkpoint.json): skipped" in said
    assert f"going on from {checkpoints}/step-000000003" in said
    assert results["losses"] == original[1]["losses"]
    assert not (checkpoints / ".partial-000000010").exists()


def test_a_finished_run_started_again_removes_what_a_kill_left_of_a_checkpoint(tmp_path, original):
    values = original[0] | {"output_dir": str(tmp_path / "run")}
    shutil.copytree(original[0]["output_dir"], values["output_dir"])
    checkpoints = tmp_path / "run/checkpoints"
    left = checkpoints / ".partial-step-000000003"  # killed while it removed that checkpoint
    (checkpoints / "step-000000003").rename(left)
    (left / MANIFEST).unlink()
    results = run(values)
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{step:09d}" for step in (6, 9, 12)]
    assert results["losses"] == original[1]["losses"]


def test_a_run_with_no_complete_checkpoint_begins_again(copied, original):
    values, checkpoints = copied
    for path in checkpoints.iterdir():
        (path / "model.safetensors").unlink()
    assert run(values)["losses"] == original[1]["losses"]


def test_the_newest_checkpoints_are_kept(tmp_path):
    values = bytes_recipe(tmp_path, steps=7, save_every=2, keep_checkpoints=2)
    run(values)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-000000006", "step-000000007"]


def test_a_disk_that_is_full_leaves_the_last_complete_checkpoint(copied, original):
    values, checkpoints = copied
    assert finish(launch(_run_with_little_room, (values,))) == [1]
    message = Path(f"{values['output_dir']}.error").read_text()
    assert "OSError: cannot write the checkpoint of step 12" in message and message.count("\n") == 1
    assert f"the last complete one is {checkpoints}/step-000000009" in message
    assert find_damage(checkpoints / "step-000000009") is None and not (checkpoints / "step-000000012").exists()
    assert run(values)["losses"] == original[1]["losses"]


def _run_with_little_room(values) -> None:
    from runs import _run_elsewhere

    # A file longer than that cannot be written: an error as of a full disk, without one.
    limit = 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    _run_elsewhere(values)


def test_a_folder_that_cannot_be_written_stops_the_run_with_one_message(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write the checkpoint of step 3 .* there is no earlier one"):
        run(bytes_recipe(tmp_path))


def test_a_checkpoint_asked_for_by_name_has_to_be_complete(copied):
    values, checkpoints = copied
    cut_in_half(checkpoints / "step-000000009/model.safetensors")
    with pytest.raises(ValueError, match=r"step-000000009 is no complete checkpoint: model.safetensors is not"):
        run(values | {"resume": str(checkpoints / "step-000000009")})


def test_the_manifest_says_where_the_run_stands(original):
    manifest = json.loads((Path(original[0]["output_dir"]) / "checkpoints/step-000000009" / MANIFEST).read_text())
    assert manifest["step"] == 9 and len(manifest["record"]["losses"]) == 9
    assert manifest["recipe"]["optimizer"]["learning_rate"] == 1e-2
