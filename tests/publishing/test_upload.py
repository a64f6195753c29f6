"""Publishing to a mock server of the Hub with the real clients, with and without faults."""

import json
import shutil
from contextlib import nullcontext

import pytest
import typer
from hub import READ, WRITE, Blob, Hub, Repository
from huggingface_hub import HfApi
from processes import HERE, environment, run
from rich.console import Console
from typer.testing import CliRunner

from aft_hf.publishing import PublishError, find_problems, publish, upload, write_card
from aft_hf.publishing.command import publish_command


# The stages of an upload that a fault can hit: method and path.
CREATE, INFO = ("POST", "/api/repos/create$"), ("GET", "/api/models/me/tiny$")
VALIDATE, PREUPLOAD = ("POST", "/validate-yaml$"), ("POST", "/preupload/")
BATCH, PUT, VERIFY = ("POST", "/objects/batch$"), ("PUT", "/storage/"), ("POST", "/lfs/verify$")
COMMIT, CHECK = ("POST", "/commit/"), ("GET", "/revision/[0-9a-f]{40}$")
BEFORE_COMMIT = {
    "create": CREATE,
    "info": INFO,
    "validate": VALIDATE,
    "preupload": PREUPLOAD,
    "batch": BATCH,
    "put": PUT,
    "verify": VERIFY,
    "commit": COMMIT,
}
AFTER_COMMIT = {"check": CHECK}
EMPTY = {".gitattributes"}


@pytest.fixture(scope="module")
def prepared(saved, tmp_path_factory):
    """A checked directory with its card, made once, since these tests begin with the upload."""
    directory = tmp_path_factory.mktemp("prepared") / "tiny"
    shutil.copytree(saved / "image", directory)
    write_card(directory, repo_id="me/tiny")
    assert find_problems(directory) == []
    return directory


@pytest.fixture
def send(hub, online, prepared, monkeypatch, tmp_path):
    """Publish the prepared directory to the mock server without checking it again."""
    monkeypatch.setattr(upload, "find_problems", lambda *directories: [])
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(upload, "made_card", lambda *_, **options: nullcontext(tmp_path / "made"))

    def send(repo_id="me/tiny", *, token=WRITE, console=None, **options):
        console = console or Console(quiet=True)
        return publish(prepared, repo_id, token=token, endpoint=hub.url, console=console, **options)

    return send


def files_of(directory) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*")}


def assert_whole(hub: Hub, prepared, commits: int = 2) -> None:
    repository = hub.repositories["me/tiny"]
    files = repository.files()
    files.pop(".gitattributes")
    assert files == files_of(prepared)
    assert len(repository.messages) == commits


def assert_untouched(hub: Hub) -> None:
    assert all(repository.files().keys() == EMPTY for repository in hub.repositories.values())


# --------------------------------------------------------------------------------------------------------- no faults


def test_a_directory_arrives_in_one_commit_and_the_link_is_told(send, hub, prepared):
    console = Console(record=True, width=100)
    done = send(console=console)
    assert_whole(hub, prepared)
    said = console.export_text()
    assert done.url == f"{hub.url}/me/tiny" and done.url in said
    assert done.commit == hub.repositories["me/tiny"].refs["main"]
    assert "model.safetensors" in said and "weights" in said and "kB" in said


def test_large_files_go_in_parts(online, send, hub, prepared):
    hub.part_size = 3000
    send()
    assert hub.count("PUT", "/part/") >= 4
    assert_whole(hub, prepared)


def test_weights_of_an_earlier_model_in_other_files_do_not_stay_in_force(send, hub, prepared):
    send()
    repository = hub.repositories["me/tiny"]
    api = HfApi(endpoint=hub.url, token=WRITE)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        api.upload_file(path_or_fileobj=b"old", path_in_repo=name, repo_id="me/tiny")
    (prepared / "config.json").write_text((prepared / "config.json").read_text() + "\n")  # something new to commit
    send()
    there = repository.files()
    assert "model-00001-of-00002.safetensors" not in there and "model.safetensors.index.json" not in there
    assert "model.safetensors" in there and "notes.txt" in there  # other files of the user stay


def test_publishing_the_same_again_commits_nothing_and_sends_no_weights(send, hub, prepared):
    first, sent = send(), hub.count("PUT", "")
    assert send().commit == first.commit
    assert_whole(hub, prepared)
    assert hub.count("PUT", "") == sent


def test_a_revision_is_a_branch_and_main_stays_as_it_was(send, hub, prepared):
    assert send(revision="v1").url == f"{hub.url}/me/tiny/tree/v1"
    repository = hub.repositories["me/tiny"]
    assert files_of(prepared).items() <= repository.files("v1").items()
    assert_untouched(hub)
    send(revision="v1")
    assert len(repository.messages) == 2


def test_a_pull_request_is_opened_and_main_stays_as_it_was(send, hub, prepared):
    assert send(create_pr=True).url == f"{hub.url}/me/tiny/discussions/1"
    assert files_of(prepared).items() <= hub.repositories["me/tiny"].files("refs/pr/1").items()
    assert_untouched(hub)


def test_a_new_repository_is_private_if_asked_for_and_nothing_private_goes_to_a_public_one(send, hub):
    with pytest.raises(PublishError, match="not both"):
        send(create_pr=True, revision="v1")
    send("me/private", private=True)
    assert hub.repositories.pop("me/private").private
    HfApi(endpoint=hub.url, token=WRITE).create_repo("me/tiny", private=False)
    with pytest.raises(PublishError, match="exists and is public"):
        send(private=True)
    assert_untouched(hub)


# --------------------------------------------------------------------------------------------------- transient faults

PASSING = [
    *[pytest.param("status", stage, {"status": 500}, id=f"500 {name}") for name, stage in BEFORE_COMMIT.items()],
    *[pytest.param("status", stage, {"status": 503}, id=f"503 {name}") for name, stage in AFTER_COMMIT.items()],
    *[pytest.param("drop", stage, {"received": 100}, id=f"drop {name}") for name, stage in BEFORE_COMMIT.items()],
    *[pytest.param("drop", stage, {}, id=f"drop {name}") for name, stage in AFTER_COMMIT.items()],
    *[pytest.param("lost", stage, {}, id=f"lost {name}") for name, stage in BEFORE_COMMIT.items()],
    pytest.param("status", COMMIT, {"status": 429}, id="429 commit"),
    pytest.param("status", PUT, {"status": 429}, id="429 put"),
]


@pytest.mark.parametrize(("kind", "stage", "options"), PASSING)
def test_what_fails_twice_and_passes_ends_well_in_one_commit(send, hub, prepared, kind, stage, options):
    hub.fail(kind, *stage, times=2, **options)
    send()
    # A commit whose response is lost was made: on the retry, the client finds nothing to commit.
    assert hub.faults[0].times == (1 if (kind, stage) == ("lost", COMMIT) else 0)
    assert_whole(hub, prepared)


def test_a_busy_hub_is_given_the_time_it_asks_for(send, hub, prepared, waits):
    hub.fail("status", *PREUPLOAD, status=429, headers={"Retry-After": "17"})
    send()
    assert max(waits) >= 17
    assert_whole(hub, prepared)


@pytest.mark.parametrize("stage", [INFO, PREUPLOAD, PUT, COMMIT, CHECK], ids=lambda stage: stage[1])
def test_a_hub_that_does_not_answer_is_asked_again(send, hub, prepared, monkeypatch, stage):
    # Every other response of the mock server takes milliseconds.
    monkeypatch.setattr(upload, "TIMEOUT", 1.0)
    hub.fail("silent", *stage)
    send()
    assert_whole(hub, prepared)


def test_a_commit_that_deletes_weights_and_whose_response_is_lost_is_not_an_error(send, hub, prepared):
    send()
    api = HfApi(endpoint=hub.url, token=WRITE)
    api.upload_file(path_or_fileobj=b"old", path_in_repo="model-00001-of-00002.safetensors", repo_id="me/tiny")
    hub.fail("lost", *COMMIT)
    send()
    assert not any(fault.times for fault in hub.faults)
    assert_whole(hub, prepared, commits=4)


# -------------------------------------------------------------------------------------------------- permanent faults


@pytest.mark.parametrize(("kind", "options"), [("status", {"status": 500}), ("drop", {"received": 100})])
@pytest.mark.parametrize("stage", BEFORE_COMMIT.values(), ids=BEFORE_COMMIT)
def test_what_keeps_failing_ends_in_one_line_and_an_untouched_repository(send, hub, prepared, stage, kind, options):
    hub.fail(kind, *stage, times=10**6, **options)
    with pytest.raises(PublishError) as error:
        send()
    assert "\n" not in str(error.value) and "run the command again" in str(error.value)
    assert "nothing was committed" in str(error.value)
    assert_untouched(hub)
    sent = hub.count("PUT", "/storage/")
    hub.faults.clear()
    send()
    assert stage != COMMIT or sent == hub.count("PUT", "/storage/") == len(hub.objects)  # nothing is sent again
    assert_whole(hub, prepared)


def test_what_cannot_be_verified_is_whole_and_the_next_run_verifies_it(send, hub, prepared):
    hub.fail("status", *CHECK, times=10**6, status=500)
    with pytest.raises(PublishError, match=f"committed to {hub.url}/me/tiny, but not verified; run the command again"):
        send()
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


def test_ctrl_c_in_the_upload_leaves_the_repository_as_it_was(send, hub, prepared, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub._commit_api._upload_lfs_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send()
    assert_untouched(hub)
    send()
    assert_whole(hub, prepared)


def test_what_somebody_else_commits_meanwhile_is_kept(send, hub, prepared):
    api = HfApi(endpoint=hub.url, token=WRITE)
    api.create_repo("me/tiny")
    create_commit = HfApi.create_commit

    def meanwhile(self, *arguments, parent_commit=None, **options):
        if parent_commit is not None:  # ours, not that of `upload_file`
            api.upload_file(path_or_fileobj=b"theirs", path_in_repo="theirs.txt", repo_id="me/tiny")
        return create_commit(self, *arguments, parent_commit=parent_commit, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "create_commit", meanwhile)
        with pytest.raises(PublishError, match=r"412.*run the command again"):
            send()
    send()
    files = hub.repositories["me/tiny"].files()
    assert files["theirs.txt"] == b"theirs" and files_of(prepared).items() <= files.items()


def test_a_commit_after_which_nobody_answers_is_not_called_undone(send, hub, prepared):
    hub.fail("lost", *COMMIT, times=10**6)
    commit = Repository.commit

    def commit_and_go(self, ref, files, message):
        if "config.json" in files:
            hub.fail("drop", "GET", "", times=10**6)
            hub.fail("drop", "POST", "", times=10**6)
        return commit(self, ref, files, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repository, "commit", commit_and_go)
        with pytest.raises(PublishError, match="is unchanged or has the complete commit"):
            send()
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


def test_a_pull_request_whose_answer_was_lost_is_not_opened_twice(send, hub):
    hub.fail("lost", *COMMIT, times=10**6)
    with pytest.raises(PublishError, match="pull requests"):
        send(create_pr=True)
    assert [ref for ref in hub.repositories["me/tiny"].refs if ref != "main"] == ["refs/pr/1"]
    assert_untouched(hub)


@pytest.mark.parametrize(
    ("token", "repo_id", "told"),
    [
        (False, "me/tiny", "401.*hf auth login"),
        ("stand-in-expired", "me/tiny", "401.*hf auth login"),
        (READ, "me/tiny", "403.*may not write"),
        (WRITE, "others/tiny", "403.*may not write"),
        (WRITE, "me/tiny/x", "Repo id"),
    ],
)
def test_who_may_not_write_is_told_what_to_do_and_changes_nothing(send, hub, token, repo_id, told):
    with pytest.raises(PublishError, match=told) as error:
        send(repo_id, token=token)
    assert "\n" not in str(error.value)
    assert hub.repositories == {} and hub.count("PUT", "") == 0


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("stage", [PREUPLOAD, PUT, COMMIT], ids=lambda stage: stage[1])
def test_a_token_that_is_refused_on_the_way_ends_in_one_line(send, hub, stage, status):
    hub.fail("status", *stage, times=10**6, status=status)
    with pytest.raises(PublishError, match=f"{status}") as error:
        send()
    assert "\n" not in str(error.value) and "nothing was committed" in str(error.value)
    assert_untouched(hub)


def test_a_card_that_the_hub_refuses_is_told_before_anything_is_sent(send, hub, prepared, monkeypatch, tmp_path):
    refused = tmp_path / "refused"
    shutil.copytree(prepared, refused)
    card = (
        (refused / "README.md").read_text().replace("pipeline_tag:", "base_model_relation: converted\npipeline_tag:")
    )
    (refused / "README.md").write_text(card)
    with pytest.raises(PublishError, match=r"base_model_relation.*nothing was committed"):
        publish(refused, "me/tiny", token=WRITE, endpoint=hub.url, console=Console(quiet=True))
    assert_untouched(hub)
    assert hub.count("PUT", "") == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_arrives_changed_is_noticed(send, hub, monkeypatch, name):
    keep = Repository.commit

    def damaged(self, ref, files, message):
        if name in files:
            files = files | {name: Blob(files[name].content + b" ", files[name].lfs)}
        return keep(self, ref, files, message)

    monkeypatch.setattr(Repository, "commit", damaged)
    with pytest.raises(PublishError, match=f"{name} on the Hub is missing or differs"):
        send()


def test_no_network_is_one_line(prepared, send, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match="offline") as error:
        send()
    assert "\n" not in str(error.value) and hub.requests == []


# ------------------------------------------------------------------------------------------------ malformed responses

ODD = [b"{}", b"[3]", b"<html>", b"[" * 100_000]
ANSWERED = {"info": INFO, "batch": BATCH, "commit": COMMIT, "check": CHECK}


@pytest.mark.parametrize("content", ODD, ids=lambda content: ascii(content[:8]))
@pytest.mark.parametrize("stage", ANSWERED.values(), ids=ANSWERED)
def test_an_answer_of_another_shape_ends_in_one_line_or_does_no_harm(send, hub, prepared, stage, content):
    hub.fail("status", *stage, times=10**6, status=200, content=content)
    try:
        send()
    except PublishError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 1000
        committed = any(repository.files().keys() != EMPTY for repository in hub.repositories.values())
        assert committed != ("nothing was committed" in said)
    else:  # nothing in the response is needed
        assert_whole(hub, prepared)
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


@pytest.mark.parametrize("target", ["itself", "another", "ftp://127.0.0.1/x"])
@pytest.mark.parametrize("stage", [CREATE, PUT, COMMIT, CHECK], ids=["create", "put", "commit", "check"])
def test_redirects_in_circles_and_to_nowhere_end_in_one_line(send, hub, prepared, stage, target):
    known = {"itself": "", "another": f"{hub.url}/api/circle"}  # "": the requested path
    hub.fail("status", *stage, times=10**6, status=307, headers={"Location": known.get(target, target)})
    for method in ("GET", "POST", "PUT", "HEAD"):
        hub.fail("status", method, "^/api/circle$", times=10**6, status=307, headers={"Location": "/api/circle"})
    with pytest.raises(PublishError) as error:
        send()
    said = str(error.value)
    assert said.isprintable() and len(said) < 1000
    assert ("nothing was committed" in said) == (stage != CHECK)
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


# ------------------------------------------------------------------------------------------------- other processes

PUSH = """
import json, sys
from pathlib import Path
import tiny
from aft_hf.publishing import publish
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

work, cases = Path(sys.argv[1]), []
for task, auto_class in (("text", AutoModelForCausalLM), ("image", AutoModelForImageClassification)):
    model = tiny.build(task, "conv")
    tiny.save(model, work / task)
    model.push_to_hub(f"me/pushed-{task}", private=True)
    tiny.companion(task).push_to_hub(f"me/pushed-{task}")
    publish(work / task, f"me/published-{task}", private=True)
    for name in (f"pushed-{task}", f"published-{task}"):
        assert type(auto_class.from_pretrained(f"me/{name}")).__module__ == "aft_hf.modeling_aft"
        cases.append(tiny.write_case(model, f"me/{name}", work / name, push=f"me/again-{name}"))
(work / "cases.json").write_text(json.dumps(cases))
"""


@pytest.mark.slow
def test_both_heads_are_pushed_and_load_from_the_hub_with_and_without_aft_hf(hub, tmp_path):
    (tmp_path / "push.py").write_text(PUSH)
    run(tmp_path / "push.py", tmp_path, env=environment(tmp_path / "cache", hub))
    done = run(HERE / "without_aft_hf.py", tmp_path / "cases.json", env=environment(tmp_path / "elsewhere", hub))
    names = [f"{how}-{task}" for how in ("pushed", "published") for task in ("text", "image")]
    assert all(f"checked me/{name}" in done.stdout for name in names)
    for name in names:
        repository = hub.repositories[f"me/{name}"]
        assert repository.private
        again = hub.repositories[f"me/again-{name}"]
        assert again.files()["modeling_aft.py"] == repository.files()["modeling_aft.py"]
        assert (
            again.files()["model.safetensors"] != repository.files()["model.safetensors"]
        )  # it was trained in between
        assert (
            json.loads(again.files()["config.json"])["auto_map"]
            == json.loads(repository.files()["config.json"])["auto_map"]
        )


def test_the_command_publishes_and_prints_the_link(hub, online, saved, tmp_path, monkeypatch):
    shutil.copytree(saved / "text", tmp_path / "tiny")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"  # HF_ENDPOINT would set this at import
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    app = typer.Typer()
    app.command()(publish_command)
    done = CliRunner().invoke(app, [str(tmp_path / "tiny"), "me/tiny", "--private"], catch_exceptions=False)
    assert done.exit_code == 0 and f"{hub.url}/me/tiny" in done.output
    repository = hub.repositories["me/tiny"]
    assert repository.private and files_of(tmp_path / "tiny").items() <= repository.files().items()


@pytest.mark.slow
def test_the_command_ends_an_error_in_one_line(hub, tmp_path):
    words = ("-m", "aft_hf", "publish", tmp_path / "nowhere", "me/tiny")
    done = run(*words, env=environment(tmp_path / "cache", hub), check=False)
    assert done.returncode == 1 and hub.requests == []
    assert done.stderr.strip().splitlines()[-1].startswith("aft-hf: ") and "no such directory" in done.stderr
    assert "Traceback" not in done.stderr
