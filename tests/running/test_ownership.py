"""One run at a time in an output directory."""

import os
import socket

import pytest
from runs import bytes_recipe, finish, results_of, run, start, wait_for

from aft_hf.running.ownership import LOCK, OWNER, RUN, join_processes, owned


@pytest.fixture(autouse=True)
def joined():
    join_processes()


def test_a_second_process_is_told_who_is_there_and_changes_nothing(tmp_path):
    values = bytes_recipe(tmp_path, save_every=2)
    (first,) = start(values | {"steps": 10**6})
    checkpoints = tmp_path / "run/checkpoints"
    assert wait_for(checkpoints / "step-000000002", first)
    (second,) = start(values | {"optimizer": {"learning_rate": 1.0}})
    assert finish([second]) == [1]
    message = (tmp_path / "run.error").read_text()
    assert f"OSError: {tmp_path}/run is in use by process {first.pid} on {socket.gethostname()} since 20" in message
    assert "give another output directory" in message and message.count("\n") == 1
    # After a kill the lock is free, and the run can be resumed.
    first.kill()
    assert finish([first]) == [-9]
    done = max(int(path.name[-9:]) for path in checkpoints.glob("step-*"))
    results = run(values | {"steps": done + 1})
    assert len(results["losses"]) == done + 1
    assert not (tmp_path / "run" / OWNER).exists()


def test_the_processes_of_one_launch_share_the_directory_and_a_second_launch_is_refused(tmp_path):
    values = bytes_recipe(tmp_path, steps=4)
    with owned(tmp_path / "run"):
        assert finish(start(values, 2)) == [1, 1]
    lines = (tmp_path / "run.error").read_text().splitlines()
    assert len(lines) == 2 and len(set(lines)) == 1 and f"in use by process {os.getpid()}" in lines[0]
    assert finish(start(values, 2)) == [0, 0]
    assert results_of(values)["processes"] == 2


def test_a_folder_that_cannot_be_written_is_refused_and_leaves_the_directory_free(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    refused = pytest.raises(OSError, match=rf"cannot write to {tmp_path} \(.*checkpoints")
    with refused, owned(tmp_path, tmp_path / "checkpoints"):
        pass
    with owned(tmp_path):
        pass


@pytest.mark.parametrize("name", [LOCK, OWNER])
def test_a_link_in_place_of_a_file_of_the_lock_is_not_followed(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("mine")
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere" / "precious")
    with pytest.raises(OSError, match=rf"cannot write to {tmp_path}/run \("), owned(tmp_path / "run"):
        pass
    assert [path.read_text() for path in (tmp_path / "elsewhere").iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["run/checkpoint-1/a/b", "run/_run/other", ".run-distillation"])
def test_no_link_deeper_in_a_directory_and_no_hidden_one_is_followed(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    directory = tmp_path / name.split("/")[0]
    with pytest.raises(OSError, match=f"{name}: is a link to {tmp_path}/elsewhere"), owned(directory, temporary=True):
        pass
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["checkpoints", "results.json", RUN])
def test_a_run_follows_no_link_in_its_directory(name, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    if name == "results.json":
        (tmp_path / "elsewhere").rmdir()
    assert finish(start(bytes_recipe(tmp_path, steps=1))) == [1]
    assert f"{name}: is a link to {tmp_path}/elsewhere; remove it" in (tmp_path / "run.error").read_text()
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_a_directory_is_removed_if_the_run_made_it_or_it_is_temporary_unless_it_holds_anything_else(tmp_path):
    (tmp_path / "existing").mkdir()
    (tmp_path / "temporary" / RUN).mkdir(parents=True)
    with owned(tmp_path / "temporary", temporary=True):
        pass
    for name in ("existing", "new", "log"):
        with pytest.raises(RuntimeError), owned(tmp_path / name, tmp_path / name / "checkpoints"):
            if name == "log":
                (tmp_path / "log" / "log").touch()
            raise RuntimeError
    assert {path.name for path in tmp_path.iterdir()} == {"existing", "log"}
    with owned(tmp_path / "log"):  # which is free again
        pass
