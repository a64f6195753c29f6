"""Test of the quickstart with a source of the user; `make quickstart` and CI run it without a source."""

import os
import subprocess
import sys

import pytest
from transformers import DeiTConfig, DeiTForImageClassification
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil

from tests.runs import finish, launch, run_file


@pytest.mark.slow
def test_a_deit_with_patches_and_labels_of_its_own_goes_all_the_way(tmp_path, run_command, monkeypatch):
    """The saved model is checked in a fork of a server that has imported the libraries; `make quickstart` starts a new
    process.
    """
    run, output = subprocess.run, tmp_path / "output.txt"

    def fork(words, **options):
        if words[0] != sys.executable:
            return run(words, **options)
        output.unlink(missing_ok=True)
        ended = finish(launch(run_file, (output, *words[1:]), **os.environ))
        print(output.read_text())
        assert ended == [0]

    monkeypatch.setattr(subprocess, "run", fork)
    config = DeiTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=64,
        num_labels=1000,
    )
    DeiTForImageClassification(config).save_pretrained(tmp_path / "deit")
    # As in real DeiTs: the image is resized to more than the input size, then cropped.
    crop = {"size": {"height": 72, "width": 72}, "crop_size": {"height": 64, "width": 64}}
    DeiTImageProcessorPil(**crop).save_pretrained(tmp_path / "deit")
    for _ in range(2):  # the second run replaces what the first one wrote
        options = "--short", "--source", tmp_path / "deit", "--out", tmp_path / "out"
        done = run_command("quickstart.py", "image", *options)
        assert done.returncode == 0, done.stderr[-2000:]
    assert "64 px" in done.stdout and "80 px" in done.stdout and "as before" in " ".join(done.stdout.split())
    assert (tmp_path / "out" / "position_biases.png").stat().st_size > 0


@pytest.mark.slow
def test_nothing_but_the_checkpoints_of_an_earlier_run_is_deleted(tmp_path, run_command):
    (tmp_path / "checkpoints" / "step-500").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-500" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step-000000001").mkdir()
    done = run_command("quickstart.py", "pixels", "--short", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-500", "step-000000020"}
    assert (tmp_path / "checkpoints" / "step-500" / "notes.txt").read_text() == "mine"
