"""Publishing to a Hub in memory by the client of huggingface_hub, with and without faults."""

import json
import shutil
import socket

import httpx2
import pytest
from hub import FILES, answer
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from aft_hf.errors import InputError
from aft_hf.loading import MARKER
from aft_hf.publishing import publish, upload


@pytest.fixture
def send(hub, prepared, monkeypatch):
    """Publish the prepared directory without checking it again."""
    monkeypatch.setattr(upload, "find_problems", lambda *directories: [])
    monkeypatch.setattr(upload, "new_text", lambda *_, **options: None)

    def send(**options):
        return publish(prepared, "me/tiny", **options)

    return send


def refusal(send, hub, **options) -> str:
    """Publish, and return the one line of the error, which must be right about whether anything was committed."""
    with pytest.raises(InputError) as error:
        send(**options)
    said = str(error.value)
    assert said.isprintable() and len(said) < 1000
    committed = any(repository.commits[1:] for repository in hub.repositories.values())
    assert committed != ("nothing was committed" in said) or "is unchanged or has" in said
    return said


def assert_whole(hub, prepared, commits: int = 2) -> None:
    repository = hub.repositories["me/tiny"]
    expected = {path.relative_to(prepared).as_posix(): path.read_bytes() for path in prepared.rglob("*")}
    assert repository.commits[-1] == FILES | expected and len(repository.commits) == commits


def test_a_directory_arrives_in_one_commit_and_the_same_again_is_none(send, hub, prepared, capsys):
    done = send()
    assert_whole(hub, prepared)
    said = capsys.readouterr().out
    assert done.url == f"{hub.endpoint}/me/tiny" and done.url in said
    assert done.commit == hub.oid(hub.repositories["me/tiny"])
    assert "kB  model.safetensors" in said
    assert send().commit == done.commit
    assert_whole(hub, prepared)


def test_files_of_an_earlier_model_that_the_new_one_lacks_do_not_stay_in_force(send, hub, prepared):
    send()
    repository = hub.repositories["me/tiny"]
    old = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "notes.txt")
    old += ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "processor_config.json")
    old += ("adapter_config.json", "adapter_model.bin", "adapter_model.safetensors", "generation_config.json")
    old += ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")
    old += ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "custom_generate/generate.py")
    old += ("additional_chat_templates/tool_use.jinja",)
    repository.commits.append(repository.commits[-1] | dict.fromkeys(old, b"old"))
    (prepared / "optimizer.pt").write_bytes(b"mine")  # is left out, also of the verification
    repository.commits[-1]["optimizer.pt"] = b"theirs"
    send()
    # Other files of the user stay.
    assert repository.commits[-1] == repository.commits[1] | {"notes.txt": b"old", "optimizer.pt": b"theirs"}


TRAINERS = "This model card has been generated automatically according to the information the Trainer had access to."
# The second is of an earlier upload from another folder.
LICENSED = ["---\nlicense: mit\n---\n", f"---\nlicense: mit\n---\n{MARKER}\n# tiny\n"]


@pytest.mark.parametrize(
    ("theirs", "is_lost"),
    [
        ("---\nlicense: mit\n---\n# My model\n\nThree pages.\n", True),
        ("Gr\xfc\xdfe", True),
        ("---\ntags:\n- generated_from_trainer\n---\n# Completed\n", True),
        *((each, True) for each in LICENSED),
        ("---\ndatasets: [mine]\nlicense: null\n---\n", False),
        ("---\ntags:\n- aft\n---\n", False),
        ("", False),
        (f"# outputs\n<!-- {TRAINERS} -->", False),
        ("# Model Card for Model ID\n", False),
    ],
)
def test_a_card_that_somebody_wrote_on_the_hub_is_not_lost(send, hub, prepared, theirs, is_lost):
    send()
    commits = hub.repositories["me/tiny"].commits
    commits.append(commits[-1] | {"README.md": theirs.encode("latin-1")})
    if is_lost:
        keep = "give --license" if theirs in LICENSED else "download it into .*tiny"
        with pytest.raises(InputError, match=rf"of the card on the Hub.* lost; {keep}.*nothing was committed"):
            send()
        assert len(commits) == 3
        hub.fail("hf_hub_download", httpx2.ConnectError("reset"))
        with pytest.raises(InputError, match=r"reset.*nothing was committed"):
            send()
        (prepared / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")  # a user's card needs no download
    send()
    assert_whole(hub, prepared, commits=4)


def test_a_license_on_the_hub_may_be_changed(send, hub, prepared):
    send()
    card = prepared / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1))
    commits = hub.repositories["me/tiny"].commits
    commits.append(commits[-1] | {"README.md": b"---\nlicense: mit\n---\n"})
    send()
    assert b"license: apache-2.0" in commits[-1]["README.md"]


def test_a_card_in_another_encoding_is_named(send, prepared):
    (prepared / "README.md").write_bytes(b"Gr\xfcn")
    with pytest.raises(InputError, match=r"README.md: is not UTF-8 text"):
        send()


def test_a_new_repository_is_private_if_asked_for_and_nothing_private_goes_to_a_public_one(send, hub):
    send(private=True)
    assert hub.repositories.pop("me/tiny").private
    hub.create_repo("me/tiny", private=False, exist_ok=True)
    assert "exists and is public" in refusal(send, hub, private=True)


ERRORS = [answer(500), answer(429), httpx2.ConnectError("reset"), httpx2.ReadTimeout("no answer")]
# What huggingface_hub raises after answers of another shape, redirects in circles and other surprises.
ERRORS += [
    KeyError("commitUrl"),
    json.JSONDecodeError("no JSON", "<html>", 0),
    TypeError("a\nb"),
    RecursionError("deep"),
]
ERRORS += [httpx2.TooManyRedirects("20"), httpx2.UnsupportedProtocol("ftp"), RuntimeError("Error while uploading 'x'")]
STAGES = [("create_repo", "before"), ("create_repo", "after"), ("model_info", "before")]
STAGES += [("create_commit", "before"), ("create_commit", "after"), ("list_repo_tree", "before")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {error.args}"[:40])
@pytest.mark.parametrize(("method", "when"), STAGES)
def test_what_fails_ends_in_one_line_and_the_next_run_completes_it(send, hub, prepared, method, when, error):
    hub.fail(method, error, when)
    said = refusal(send, hub)
    assert ("committed to" in said) == (method == "list_repo_tree")
    assert ("has a new commit, which was not verified" in said) == ((method, when) == ("create_commit", "after"))
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


def test_a_hub_that_never_answers_is_not_waited_for(prepared, monkeypatch):
    monkeypatch.setattr(upload, "TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with socket.create_server(("127.0.0.1", 0)) as hub, pytest.raises(InputError, match=r"timed out.* nothing was"):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        publish(prepared, "me/tiny")


def test_a_commit_after_which_nobody_answers_is_not_called_undone(send, hub, prepared):
    def go():
        hub.fail("model_info", httpx2.ConnectError("gone"))
        raise httpx2.ConnectError("gone")

    hub.fail("create_commit", go, "after")
    assert "is unchanged or has the complete commit" in refusal(send, hub)
    hub.faults.clear()
    send()
    assert_whole(hub, prepared)


def test_ctrl_c_passes_and_what_somebody_else_commits_meanwhile_is_kept(send, hub, prepared):
    hub.fail("create_commit", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        send()
    commits = hub.repositories["me/tiny"].commits
    hub.fail("create_commit", lambda: commits.append(commits[-1] | {"theirs.txt": b"theirs"}))
    with pytest.raises(InputError, match=r"412 A commit has happened since.*run the command again"):
        send()
    hub.faults.clear()
    send()
    assert commits[-1].pop("theirs.txt") == b"theirs"
    assert_whole(hub, prepared, commits=3)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (answer(401), "401 no; log in with `hf auth login`"),
        (answer(404, "hidden", RepositoryNotFoundError), "401 hidden; log in"),
        (answer(403), "403 no; the token may not write there"),
        (HFValidationError("Repo id must be in the form"), "Repo id must be in the form (me/tiny"),
    ],
)
def test_a_publisher_without_write_access_is_told_to_log_in_or_use_another_token(send, hub, error, told):
    hub.fail("create_repo", error)
    assert told in refusal(send, hub)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [{}, b" "], ids=["missing", "changed"])
def test_a_file_that_arrives_changed_or_not_at_all_is_noticed(send, hub, name, content):
    def damage():
        commits = hub.repositories["me/tiny"].commits
        commits[-1] = {key: each for key, each in commits[-1].items() if key != name} | (content and {name: content})

    hub.fail("create_commit", damage, "after")
    assert f"{name} on the Hub is missing or differs" in refusal(send, hub)


def test_the_command_publishes_and_prints_the_link(hub, saved, tmp_path, run_command):
    shutil.copytree(saved / "text", tmp_path / "tiny")
    done = run_command("aft-hf", "publish", tmp_path / "tiny", "me/tiny", "--private")
    assert done.returncode == 0 and f"{hub.endpoint}/me/tiny" in done.stdout
    assert hub.repositories["me/tiny"].private
    assert_whole(hub, tmp_path / "tiny")
