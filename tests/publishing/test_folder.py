"""Folders with symlinks or odd files: no file outside is overwritten or uploaded, and a dry run changes nothing."""

import os

import pytest
from saved_models import listing

from aft_hf.errors import InputError
from aft_hf.publishing import find_problems, publish, write_card


PASSWORD = "machine example.org login me password letmein"


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "netrc"
    path.write_text(PASSWORD)
    return path


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize("name", [".README.md.tmp", "README.md", "losses.png"])
@pytest.mark.parametrize("write", [write_card, lambda directory: publish(directory, "me/tiny", dry_run=True)])
def test_a_planted_link_is_not_written_through(directory, outside, name, write):
    (directory / name).symlink_to(outside)
    try:
        write(directory)
    except InputError as error:
        assert name in str(error)
    assert outside.read_text() == PASSWORD


@pytest.mark.parametrize("name", ["notes.txt", "results.json", "more/notes.txt"])
def test_a_link_out_of_the_folder_is_refused_by_name_before_anything_is_written(directory, outside, name):
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).symlink_to(outside)
    before = listing(directory.parent)
    for dry in (True, False):
        with pytest.raises(InputError) as error:
            publish(directory, "me/tiny", dry_run=dry)
        assert name in str(error.value) and "link" in str(error.value) and str(outside) in str(error.value)
        assert "letmein" not in str(error.value)
    assert listing(directory.parent) == before


@pytest.mark.parametrize("repo_id", ["model", "a/b/c", "a b/x", "https://huggingface.co/a/b", "a/-x", ""])
def test_a_name_that_is_not_of_a_repository_is_refused_before_anything_is_written(directory, repo_id):
    before = listing(directory)
    for dry in (True, False):
        with pytest.raises(InputError, match="is not the name of a repository; give name/model"):
            publish(directory, repo_id, dry_run=dry)
    assert listing(directory) == before


def test_links_within_the_folder_and_other_odd_files_are_refused_by_name(directory, tmp_path):
    (directory / "notes.txt").write_text("mine")
    (directory / "also.txt").symlink_to("notes.txt")
    (directory / "data").symlink_to(tmp_path)
    (directory / "lost.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(directory / "pipe.txt")  # which is not waited for
    told = "; ".join(find_problems(directory))
    assert "also.txt: is a link to notes.txt; replace it with a copy" in told
    assert "data: is a link" in told and "lost.txt: is a link" in told
    assert "pipe.txt: is not a regular file" in told


def test_a_dry_run_changes_nothing_in_the_folder(directory, capsys):
    before = listing(directory.parent)
    done = publish(directory, "me/tiny", dry_run=True)
    said = capsys.readouterr().out
    assert {"README.md", "config.json"} <= set(done.files)
    assert "no license" in said and "nothing was uploaded" in said
    assert listing(directory.parent) == before
    (directory / "README.md").write_text("---\nlicense: gpl-3.0\n---\n# Mine\n")
    before = listing(directory.parent)
    with pytest.raises(InputError, match="lacks library_name"):
        publish(directory, "me/tiny", dry_run=True)
    assert listing(directory.parent) == before


def test_files_are_named_as_they_are_called(directory, capsys):
    for name in ("[red]notes[", "[", "notes[/].txt", ".hidden[/x]"):
        (directory / name.replace("/", "\N{DIVISION SLASH}")).write_text("mine")
    publish(directory, "me/tiny", dry_run=True)
    said = capsys.readouterr().out
    assert "[red]notes[" in said and ".hidden[" in said
