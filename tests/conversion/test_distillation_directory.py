"""The checkpoints of a distillation: nothing of others is deleted, and no step is lost when the model is written."""

import itertools
import os

import numpy as np
import pytest
import torch
from checkpoints import OPTIONS
from PIL import Image
from safetensors.torch import load_file

from aft_hf.conversion import REPORT_NAME, ConversionError, ConversionReport, saving
from aft_hf.conversion import distillation as module
from aft_hf.training.checkpoints import Checkpoints
from aft_hf.training.ownership import RUN, owned
from aft_hf.training.steps import StopSignal


CHECKPOINTS = ".out-distillation"


@pytest.fixture(scope="module")
def images():
    pixels = np.random.default_rng(0).integers(256, size=(8, 32, 32, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]


def distill(vit, out, images, overwrite=False, options=OPTIONS, **budget):
    distillation = {"images": images, "batch_size": 4, **(budget or {"steps": 3})}
    _, report = saving.save_converted(vit, out, distillation=distillation, overwrite=overwrite, **options)
    return load_file(out / "model.safetensors"), report.options["distillation"]


def stop_at(monkeypatch, step):
    """Simulate a SIGTERM in a step of the next distillation."""
    calls = itertools.count(1)
    monkeypatch.setattr(StopSignal, "agreed", lambda self: 15 if next(calls) == step else 0)


def contents(directory):
    """Return the content of each path in a directory: target of a symlink, bytes of a file, None for all others."""
    found = {}
    for path in sorted(directory.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(directory).as_posix()] = kind
    return found


def folder(path):
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    return path


def link_to_checkpoints(path):
    target = path.parent / "elsewhere" / "step-000000003"
    folder(target)
    path.symlink_to(target.parent)


# What may lie where the checkpoints go.
FOREIGN = {
    "notes": folder,
    "a model": lambda path: (folder(path) / "model.safetensors").write_bytes(b"weights"),
    "a training run": lambda path: [folder(path / "checkpoints"), folder(path / RUN)],
    "checkpoints of another tool": lambda path: [folder(path / "step-500"), folder(path / "checkpoint-500")],
    "a hidden file": lambda path: (path.mkdir(), (path / ".notes").write_text("mine")),
    "a file like a checkpoint": lambda path: (path.mkdir(), (path / "step-000000001").write_text("mine")),
    "a link like a checkpoint": lambda path: (
        path.mkdir(),
        (path / "step-000000001").symlink_to(folder(path.parent / "elsewhere")),
    ),
    "a file": lambda path: path.write_text("mine"),
    "a link to a folder": lambda path: path.symlink_to(folder(path.parent / "elsewhere")),
    "a link to checkpoints": link_to_checkpoints,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("create", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_of_this_run_is_refused_before_anything_is_computed(vit, images, tmp_path, monkeypatch, create):
    create(tmp_path / CHECKPOINTS)
    states = {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")}
    monkeypatch.setattr(saving, "read_source", lambda *arguments, **options: pytest.fail("the source was read"))
    with pytest.raises(ConversionError, match=rf"{CHECKPOINTS}.*is no checkpoint of a distillation.*move it") as error:
        distill(vit, tmp_path / "out", images)
    assert "\n" not in str(error.value)
    assert {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")} == states


def test_a_directory_in_use_is_refused_before_anything_is_computed(vit, images, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "read_source", lambda *arguments, **options: pytest.fail("the source was read"))
    module.PartialState(cpu=True)
    with owned(tmp_path / CHECKPOINTS), pytest.raises(OSError, match="is in use by"):
        distill(vit, tmp_path / "out", images)


@pytest.mark.parametrize("name", ["notes.txt", f"{RUN}/notes.txt", "more/notes.txt"])
def test_what_is_put_beside_the_checkpoints_while_they_are_made_stays(vit, images, tmp_path, monkeypatch, name):
    note, write = tmp_path / CHECKPOINTS / name, saving._write

    def write_with_note(*arguments):
        note.parent.mkdir(exist_ok=True)
        note.write_text("mine")
        write(*arguments)

    monkeypatch.setattr(saving, "_write", write_with_note)
    distill(vit, tmp_path / "out", images)
    left = {path for path in (tmp_path / CHECKPOINTS).rglob("*") if path.is_file()}
    assert note.read_text() == "mine" and left <= {note, tmp_path / CHECKPOINTS / RUN / "run.lock"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_distillation_goes_on_with_the_same_command_and_leaves_only_the_model(
    vit, images, tmp_path, monkeypatch, overwrite
):
    expected, _ = distill(vit, tmp_path / "uninterrupted", images)
    if overwrite:
        saving.save_converted(vit, tmp_path / "out", **OPTIONS)
        (tmp_path / "out" / "notes.txt").write_text("mine")
    stop_at(monkeypatch, 2)
    with pytest.raises(SystemExit):
        distill(vit, tmp_path / "out", images, overwrite)
    monkeypatch.undo()
    (tmp_path / CHECKPOINTS / ".aft-hf-unfinished").mkdir()  # as after a kill
    folder(tmp_path / "out-distillation" / "checkpoints")  # of somebody, with a similar name
    weights, _ = distill(vit, tmp_path / "out", images, overwrite)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert {path.name for path in tmp_path.iterdir()} == {"vit", "uninterrupted", "out", "out-distillation"}
    assert (tmp_path / "out-distillation" / "checkpoints" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "notes.txt").exists() == overwrite


def test_a_link_as_output_stays_and_the_model_is_where_it_leads(vit, images, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/model")
    distill(vit, tmp_path / "out", images)
    assert os.readlink(tmp_path / "out") == "disk/model" and os.listdir(tmp_path / "disk") == ["model"]
    assert (tmp_path / "disk" / "model" / REPORT_NAME).is_file()


@pytest.mark.parametrize("budget", [{"steps": 3}, {"minutes": 0.0005}], ids=["steps", "minutes"])
@pytest.mark.parametrize("failing", ["save_pretrained", "verification", "rename"])
def test_no_step_is_lost_if_the_model_cannot_be_written(vit, images, tmp_path, monkeypatch, failing, budget):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    def wrong(*arguments):
        raise ConversionError("a tensor differs")

    expected = distill(vit, tmp_path / "uninterrupted", images, **budget)[0] if "steps" in budget else None
    place = {
        "save_pretrained": ("aft_hf.AFTForImageClassification.save_pretrained", full),
        "verification": ("aft_hf.conversion.saving.verify_conversion", wrong),
        "rename": ("aft_hf.conversion.saving._put_in_place", full),
    }
    monkeypatch.setattr(*place[failing])
    with pytest.raises(ConversionError, match=rf"; run again to resume from {tmp_path / CHECKPOINTS}$"):
        distill(vit, tmp_path / "out", images, **budget)
    monkeypatch.undo()
    (saved,) = (tmp_path / CHECKPOINTS).glob("step-*")
    monkeypatch.setattr(module._Run, "update", lambda *arguments: pytest.fail("a step is computed again"))
    weights, done = distill(vit, tmp_path / "out", images, **budget)
    assert "steps" not in budget or all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert done["steps"] == int(saved.name[-9:]) and not (tmp_path / CHECKPOINTS).exists()


def test_the_model_is_written_even_if_the_last_checkpoint_does_not_fit_on_the_disk(
    vit, images, tmp_path, monkeypatch, capsys
):
    def full(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(Checkpoints, "save", full)
    distill(vit, tmp_path / "out", images)
    assert "no space left" in capsys.readouterr().out and (tmp_path / "out" / REPORT_NAME).exists()


@pytest.mark.parametrize("distilled", [False, True])
def test_what_another_process_has_written_there_meanwhile_stays(vit, images, tmp_path, monkeypatch, distilled):
    convert = saving._convert

    def convert_meanwhile(*arguments):
        monkeypatch.undo()
        saving.save_converted(vit, tmp_path / "out", **OPTIONS)
        return convert(*arguments)

    monkeypatch.setattr(saving, "_convert", convert_meanwhile)
    with pytest.raises(ConversionError, match="is not empty"):
        if distilled:
            distill(vit, tmp_path / "out", images)
        else:
            saving.save_converted(vit, tmp_path / "out", **OPTIONS | {"kernel_size": 5})
    report = ConversionReport.model_validate_json((tmp_path / "out" / REPORT_NAME).read_text())
    assert "distillation" not in report.options
    assert distilled == bool(list(tmp_path.glob(f"{CHECKPOINTS}/step-000000003")))
