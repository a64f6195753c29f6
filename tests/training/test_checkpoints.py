"""Checkpoints: they are complete or absent, and do not interfere with each other."""

import json
import os
import resource
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from runs import bytes_recipe, finish, launch, plant, run
from torch.distributed.checkpoint import CheckpointException

from aft_hf.data.atomic_files import UNFINISHED
from aft_hf.reading import UnreadableError
from aft_hf.training import loop
from aft_hf.training.checkpoints import find_damage
from aft_hf.training.manifest import MANIFEST, checksum, read_manifest, sealed, write_manifest


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
    for bit in random.choice(8 * len(content), 2000, replace=False):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / MANIFEST).write_bytes(damaged)
        with pytest.raises(UnreadableError):
            read_manifest(tmp_path)


NESTED = "[" * 100_000
SHAPES = ["", "null", "0", "-1", "1e999", "true", '""', "[]", "[[]]", "{", "{}", '{"":{}}', '{"files":[]}', NESTED]
SHAPES += ['{"a":' * 100_000, "\ufeff{}", '"\\ud800"', "NaN", "{'step': 9}", "9" * 5000]
WRONG = [None, True, -1, 1.5, "", "nine", [], [[]], {}, {"": None}, [None], 10**30, [1, 2, 3, {}], [[1, 2, 3]]]
# For each key, the values of `WRONG` that are valid.
KEYS = {"step": [10**30], "rates": [[]], "record": [], "recipe": [{}, {"": None}], "data": ["", "nine"]}
KEYS |= {"position": [[], [1, 2, 3, {}]], "files": []}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[:12])
def test_a_manifest_of_any_shape_is_damage(tmp_path, shape, sealed):
    content = shape.encode(errors="surrogatepass")
    if sealed:  # with a correct checksum, as an attacker would write it
        content = b'"x":%s}' % content
        content = b'{"sum":"%s",%s' % (checksum(content).encode(), content)
    (tmp_path / MANIFEST).write_bytes(content)
    damage = find_damage(tmp_path)
    assert damage.startswith(MANIFEST) and "\n" not in damage and len(damage) < 1000


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_type_is_damage_also_where_the_sum_is_right(tmp_path, original, key):
    manifest = read_manifest(Path(original[0]["output_dir"]) / "checkpoints/step-000000009")
    for value in [value for value in WRONG if value not in KEYS[key]]:
        (tmp_path / MANIFEST).write_bytes(sealed(manifest.model_dump() | {key: value}))
        damage = find_damage(tmp_path)
        assert damage.startswith(f"{MANIFEST}: ") and key in damage and "\n" not in damage


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../step-000000006/model.safetensors", "a/../../b", "", "a\0b", "a\\b"]
)
def test_a_manifest_names_files_of_its_own_checkpoint_alone(tmp_path, original, name):
    manifest = read_manifest(Path(original[0]["output_dir"]) / "checkpoints/step-000000009")
    write_manifest(tmp_path, manifest.model_copy(update={"files": {name: "1:0"}}))
    assert "must name a file beside this one" in find_damage(tmp_path)


@pytest.mark.parametrize("step", [3, 44, -5])
def test_a_manifest_of_another_step_is_damage_and_nothing_else_suffers(copied, original, step, capsys):
    values, checkpoints = copied
    newest = checkpoints / "step-000000009"
    write_manifest(newest, read_manifest(newest).model_copy(update={"step": step}))
    results = run(values)
    said = capsys.readouterr().out
    assert f"{newest} is damaged ({MANIFEST}" in said and f"resuming from {checkpoints}/step-000000006" in said
    assert results["losses"] == original[1]["losses"]
    for path in checkpoints.glob("step-*"):
        assert find_damage(path) is None
    assert {path.name for path in checkpoints.glob("step-*")} >= {"step-000000003", "step-000000006"}


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


FOREIGN = {
    "step-500": True,  # as other tools name their checkpoints
    "step-000000001": True,  # without a manifest
    "step-10": False,
    "step-000000099": False,
    "step-\u00b2": True,
    "step--9": True,
    ".partial-notes": True,
    "set-aside-notes": True,
    "set-aside-step-000000009": False,
    "notes.txt": False,
}


@pytest.mark.parametrize("resumes", [True, False])
def test_only_what_the_run_has_written_is_renamed_or_deleted(copied, original, resumes):
    values, checkpoints = copied
    if not resumes:
        for path in checkpoints.glob("step-*"):
            shutil.rmtree(path)
    for name, is_folder in FOREIGN.items():
        if is_folder:
            (checkpoints / name).mkdir()
        (checkpoints / name / "notes" if is_folder else checkpoints / name).write_text("mine")
    assert run(values | {"keep_checkpoints": 1})["losses"] == original[1]["losses"]
    for name, is_folder in FOREIGN.items():
        path = checkpoints / name
        if name == "step-000000001" and not resumes:  # nothing tells it from a damaged checkpoint of an earlier run
            path = checkpoints / f"set-aside-{name}"
        assert (path / "notes" if is_folder else path).read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "folder", "link", "broken link"])
def test_what_has_the_name_of_the_next_checkpoint_stays(tmp_path, copied, kind):
    values, checkpoints = copied
    path, elsewhere = checkpoints / "step-000000012", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes").write_text("mine")
    create = {"file": path.touch, "folder": path.mkdir}
    create |= {"link": lambda: path.symlink_to(elsewhere), "broken link": lambda: path.symlink_to("nowhere")}
    take_steps = loop.take_steps

    def take_steps_after(run):
        create[kind]()
        if kind == "folder":
            (path / "notes").write_text("mine")
        take_steps(run)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="cannot write the checkpoint of step 12"):
        patch.setattr(loop, "take_steps", take_steps_after)
        run(values)
    assert os.path.lexists(path) and not list(checkpoints.glob(".*"))
    assert (elsewhere / "notes").exists() and (kind != "folder" or (path / "notes").exists())


NAMES = ["config.json", "model.safetensors", "results.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "broken link", "folder", "pipe"])
def test_a_model_replaces_regular_files_alone_and_all_of_them_or_none(tmp_path, finished, name, kind):
    values, directory = finished
    path, elsewhere = directory / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "link" else "nowhere")
    before = {each: (each.lstat().st_mtime_ns, each.lstat().st_mode) for each in directory.iterdir()}
    others = {directory / each for each in NAMES if name == "results.json" or each != "results.json"}
    content = elsewhere.read_bytes()
    with pytest.raises(OSError, match=f"cannot write the model and its results to .*{name}: (is|exists)") as error:
        run(values)
    assert "\n" not in str(error.value) and elsewhere.read_bytes() == content
    changed = {each for each, state in before.items() if (each.lstat().st_mtime_ns, each.lstat().st_mode) != state}
    assert path not in changed and (name == "results.json" or not changed & others)
    assert not list(directory.glob(".*"))


def test_a_run_goes_on_from_the_newest_complete_checkpoint_and_says_which_it_skips(copied, original, capsys):
    values, checkpoints = copied
    flip_a_bit(checkpoints / "step-000000009/optimizer.bin")
    (checkpoints / "step-000000006" / MANIFEST).unlink()
    (checkpoints / UNFINISHED / "left").mkdir(parents=True)  # as after a kill
    results = run(values)
    said = capsys.readouterr().out
    assert f"{checkpoints}/step-000000009 is damaged (optimizer.bin does not match its checksum): skipped" in said
    assert f"{checkpoints}/step-000000006 is damaged (no checkpoint.json): skipped" in said
    assert f"resuming from {checkpoints}/step-000000003" in said
    assert results["losses"] == original[1]["losses"]
    assert not (checkpoints / UNFINISHED).exists()


def test_a_run_with_no_complete_checkpoint_begins_again(copied, original):
    values, checkpoints = copied
    for path in checkpoints.glob("step-*"):
        (path / "model.safetensors").unlink()
    assert run(values)["losses"] == original[1]["losses"]


def test_the_newest_checkpoints_are_kept(tmp_path):
    run(bytes_recipe(tmp_path, steps=7, save_every=2, keep_checkpoints=2))
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-000000006", "step-000000007"]


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
    assert f"OSError: cannot write the model and its results to {directory} (" in message
    assert "free disk space and run the same command again to write them" in message and message.count("\n") == 1
    assert {path: path.read_bytes() for path in directory.iterdir() if path.is_file()} == files
    assert not list(directory.glob(".*"))
    assert run(values)["losses"] == original[1]["losses"]


def test_what_a_kill_left_of_a_model_holds_no_room_while_the_run_goes_on(finished, monkeypatch):
    values, directory = finished
    (directory / UNFINISHED).mkdir()
    (directory / UNFINISHED / "model.safetensors").write_bytes(b"half")
    seen, take_steps = [], loop.take_steps
    monkeypatch.setattr(
        loop, "take_steps", lambda run: [seen.append((directory / UNFINISHED).exists()), take_steps(run)]
    )
    run(values | {"steps": 15})
    assert seen == [False]


def _run_with_little_room(values) -> None:
    from runs import _run_elsewhere

    # Writing a longer file is an error, which stands for a full disk.
    limit = 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    _run_elsewhere(values)


def test_a_folder_that_cannot_be_written_stops_the_run_with_one_message(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("in the way")
    with pytest.raises(OSError, match=rf"cannot write to {tmp_path}/run \(.*/run/checkpoints"):
        run(bytes_recipe(tmp_path))


def test_the_manifest_says_where_the_run_stands(original):
    path = Path(original[0]["output_dir"]) / "checkpoints/step-000000009"
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest == {"sum": manifest["sum"], **json.loads(read_manifest(path).model_dump_json())}
    assert manifest["step"] == 9 and len(manifest["record"]["losses"]) == 9
    assert manifest["recipe"]["optimizer"]["learning_rate"] == 1e-2
