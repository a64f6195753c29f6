"""Publishing to a mock server of the Hub with the real clients, with and without faults."""

import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hub import READ, WRITE, Blob, Hub, Repository
from huggingface_hub import HfApi
from rich.console import Console

from aft_hf.publishing import PublishError, publish, upload
from aft_hf.publishing.card import MARKER


# The stages of an upload that a fault can hit: method and path.
CREATE, INFO = ("POST", "/api/repos/create$"), ("GET", "/api/models/me/tiny$")
VALIDATE, PREUPLOAD = ("POST", "/validate-yaml$"), ("POST", "/preupload/")
BATCH, PUT, VERIFY = ("POST", "/objects/batch$"), ("PUT", "/storage/"), ("POST", "/lfs/verify$")
COMMIT, CHECK = ("POST", "/commit/"), ("GET", "/tree/[0-9a-f]{40}$")
STAGES = (CREATE, INFO, VALIDATE, PREUPLOAD, BATCH, PUT, VERIFY, COMMIT, CHECK)
EMPTY = {".gitattributes"}


@pytest.fixture
def prepared(carded, tmp_path):
    return Path(shutil.copytree(carded / "image", tmp_path / "tiny"))


@pytest.fixture
def send(hub, online, prepared, monkeypatch):
    """Publish the prepared directory to the mock server without checking it again."""
    monkeypatch.setattr(upload, "find_problems", lambda *directories: [])
    monkeypatch.setattr(upload, "new_text", lambda *_, **options: None)

    def send(repo_id="me/tiny", *, token=WRITE, console=None, **options):
        console = console or Console(quiet=True)
        return publish(prepared, repo_id, token=token, endpoint=hub.url, console=console, **options)

    return send


@pytest.fixture
def refused(send):
    """Publish, and return the one line of the error; check that nothing was committed if it says so."""

    def refused(hub, **options):
        with pytest.raises(PublishError) as error:
            send(**options)
        said = str(error.value)
        assert said.isprintable() and len(said) < 1000
        committed = any(repository.files().keys() != EMPTY for repository in hub.repositories.values())
        assert committed != ("nothing was committed" in said)
        return said

    return refused


def files_of(directory) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*")}


def assert_whole(hub: Hub, prepared, commits: int = 2) -> None:
    repository = hub.repositories["me/tiny"]
    assert {name: content for name, content in repository.files().items() if name not in EMPTY} == files_of(prepared)
    assert len(repository.commits) == commits


# --------------------------------------------------------------------------------------------------------- no faults


def test_a_directory_arrives_in_one_commit_and_the_same_again_sends_nothing(send, hub, prepared):
    console = Console(record=True, width=100)
    done = send(console=console)
    assert_whole(hub, prepared)
    said = console.export_text()
    assert done.url == f"{hub.url}/me/tiny" and done.url in said
    assert done.commit == hub.repositories["me/tiny"].head
    assert "model.safetensors" in said and "weights" in said and "kB" in said
    sent = hub.count("PUT", "")
    assert send().commit == done.commit and hub.count("PUT", "") == sent
    assert_whole(hub, prepared)


def test_weights_of_an_earlier_model_in_other_files_do_not_stay_in_force(send, hub, prepared):
    send()
    api = HfApi(endpoint=hub.url, token=WRITE)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        api.upload_file(path_or_fileobj=b"old", path_in_repo=name, repo_id="me/tiny")
    hub.fail("lost", *COMMIT)
    with pytest.raises(PublishError, match="has a new commit, which was not verified"):
        send()
    send()
    files = hub.repositories["me/tiny"].files()
    assert files.pop("notes.txt") == b"old"  # other files of the user stay
    assert files.keys() - EMPTY == files_of(prepared).keys()


def test_a_new_repository_is_private_if_asked_for_and_nothing_private_goes_to_a_public_one(send, refused, hub):
    send("me/private", private=True)
    assert hub.repositories.pop("me/private").private
    HfApi(endpoint=hub.url, token=WRITE).create_repo("me/tiny", private=False)
    assert "exists and is public" in refused(hub, private=True)


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(("kind", "options"), [("status", {"status": 500}), ("drop", {"received": 100})])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage[1])
def test_what_keeps_failing_ends_in_one_line_and_the_next_run_completes_it(
    send, refused, hub, prepared, stage, kind, options
):
    hub.fail(kind, *stage, times=10**6, **options)
    said = refused(hub)
    assert "run the command again" in said and (stage != CHECK or f"committed to {hub.url}/me/tiny" in said)
    sent = hub.count("PUT", "/storage/")
    hub.faults.clear()
    send()
    assert stage != COMMIT or sent == hub.count("PUT", "/storage/") == len(hub.objects)  # nothing is sent again
    assert_whole(hub, prepared)


def test_ctrl_c_in_the_upload_leaves_the_repository_as_it_was(send, hub, prepared, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub._commit_api._upload_lfs_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send()
    assert hub.repositories["me/tiny"].files().keys() == EMPTY
    send()
    assert_whole(hub, prepared)


def test_what_somebody_else_commits_meanwhile_is_kept(send, hub, prepared, monkeypatch):
    api = HfApi(endpoint=hub.url, token=WRITE)
    api.create_repo("me/tiny")
    create_commit = HfApi.create_commit

    def meanwhile(self, *arguments, parent_commit=None, **options):
        if parent_commit is not None:  # ours, not that of `upload_file`
            api.upload_file(path_or_fileobj=b"theirs", path_in_repo="theirs.txt", repo_id="me/tiny")
        return create_commit(self, *arguments, parent_commit=parent_commit, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", meanwhile)
        with pytest.raises(PublishError, match=r"412.*run the command again"):
            send()
    send()
    files = hub.repositories["me/tiny"].files()
    assert files["theirs.txt"] == b"theirs" and files_of(prepared).items() <= files.items()


def test_a_commit_after_which_nobody_answers_is_not_called_undone(send, refused, hub, prepared, monkeypatch):
    commit = Repository.commit

    def commit_and_go(self, files):
        if "config.json" in files:
            for method in ("GET", "POST"):
                hub.fail("drop", method, "", times=10**6)
        return commit(self, files)

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "commit", commit_and_go)
        hub.fail("lost", *COMMIT, times=10**6)
        assert "is unchanged or has the complete commit" in refused(hub)
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


@pytest.mark.parametrize(
    ("token", "repo_id", "told"),
    [
        (False, "me/tiny", "401.*hf auth login"),
        (READ, "me/tiny", "403.*may not write"),
        (WRITE, "others/tiny", "403.*may not write"),
        (WRITE, "me/tiny/x", "Repo id"),
    ],
)
def test_who_may_not_write_is_told_what_to_do_and_changes_nothing(refused, hub, token, repo_id, told):
    assert re.search(told, refused(hub, repo_id=repo_id, token=token))
    assert hub.repositories == {} and hub.count("PUT", "") == 0


def test_a_card_that_the_hub_refuses_is_told_before_anything_is_sent(online, hub, prepared):
    card = prepared / "README.md"
    text = card.read_text().replace(MARKER, "Mine.")
    card.write_text(text.replace("pipeline_tag:", "base_model_relation: converted\npipeline_tag:"))
    with pytest.raises(PublishError, match=r"base_model_relation.*nothing was committed"):
        publish(prepared, "me/tiny", token=WRITE, endpoint=hub.url, console=Console(quiet=True))
    assert hub.repositories["me/tiny"].files().keys() == EMPTY and hub.count("PUT", "") == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_arrives_changed_is_noticed(refused, hub, monkeypatch, name):
    keep = Repository.commit

    def damaged(self, files):
        if name in files:
            files = files | {name: Blob(files[name].content + b" ", files[name].lfs)}
        return keep(self, files)

    monkeypatch.setattr(Repository, "commit", damaged)
    assert f"{name} on the Hub is missing or differs" in refused(hub)


def test_no_network_is_one_line(refused, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline" in refused(hub) and hub.requests == []


ANSWERS = [{"status": 200, "content": content} for content in (b"{}", b"[3]", b"<html>", b"[" * 100_000)]
ANSWERS += [{"status": 307, "headers": {"Location": target}} for target in ("", "ftp://127.0.0.1/x")]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: ascii(answer)[:50])
@pytest.mark.parametrize("stage", [BATCH, PUT, COMMIT, CHECK], ids=lambda stage: stage[1])
def test_an_answer_of_another_shape_or_a_redirect_in_circles_ends_in_one_line(
    send, refused, hub, prepared, stage, answer
):
    hub.fail("status", *stage, times=10**6, **answer)
    # Nothing in some responses of status 200 is needed.
    with suppress(pytest.fail.Exception) if answer["status"] == 200 else nullcontext():
        refused(hub)
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


def test_the_command_publishes_and_prints_the_link(hub, online, saved, tmp_path, monkeypatch, run_command):
    shutil.copytree(saved / "text", tmp_path / "tiny")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"  # HF_ENDPOINT would set this at import
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    done = run_command("aft-hf", "publish", tmp_path / "tiny", "me/tiny", "--private")
    assert done.returncode == 0 and f"{hub.url}/me/tiny" in done.stdout
    repository = hub.repositories["me/tiny"]
    assert repository.private and files_of(tmp_path / "tiny").items() <= repository.files().items()
