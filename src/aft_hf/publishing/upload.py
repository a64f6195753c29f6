"""Publishing a directory on the Hub: checks, an upload in one commit, and the verification of the upload.

`HfApi.upload_folder` is not used: it uploads a large folder in several commits, so an interrupted upload leaves a part
of the model in the repository.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo, get_session
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from rich.filesize import decimal

from ..atomic_files import write_atomic
from ..errors import InputError, described, shortened
from ..reading import parse_header, read_text
from .card import README, body_of, card_problems, is_generated, new_text
from .checks import CODE, PACKAGE, find_problems
from .facts import MODEL_ID
from .folder import files_to_upload


# Files of an earlier model that transformers would load in place of new ones, or with them.
LOADED = r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?"
LOADED += r"|adapter_config\.json|adapter_model\..*|(pre)?processor_config\.json|generation_config\.json"
LOADED += r"|tokenizer\.(json|model)|tokenizer_config\.json|vocab\..*|merges\.txt|special_tokens_map\.json"
LOADED += r"|added_tokens\.json|chat_template\..*|additional_chat_templates/.*|custom_generate/.*"
TIMEOUT = 300.0  # seconds without data after which a request fails; huggingface_hub waits forever
HINTS = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token with write access",
    403: "the token may not write there: use a token with write access, and a repository of your own",
    429: "there were too many requests: wait, and run the command again",
}


@dataclass(frozen=True)
class Publication:
    """Result of `publish`: the URL, the commit hash (None if nothing was uploaded), and the names of the files."""

    url: str
    commit: str | None
    files: list[str]


def publish(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    dry_run: bool = False,
    license: str | None = None,
) -> Publication:
    """Check a saved model, write its card, upload it in one commit and verify the upload.

    An interrupted upload resumes with the same call: files that have arrived are not sent again, and the repository
    does not change before the single commit at the end. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        directory: the directory that `save_pretrained` wrote, with the tokenizer or image processor.
        repo_id: "name/model" on the Hub. The repository is created if it does not exist.
        private: True for a private new repository, False for a public one. Default: the setting of the account.
        license: license of the weights, as for `write_card`.
        dry_run: only check, and show the card and the files; nothing is written or uploaded, and no network is needed.

    Raises:
        InputError: `repo_id` is not name/model, the directory has problems, a card on the Hub that aft-hf did not
            write would be lost, the Hub refuses the upload or cannot be reached, or the uploaded files differ from the
            local ones. The message says what to do.
    """
    if not MODEL_ID.fullmatch(repo_id):
        raise InputError(f"{repo_id!r} is not the name of a repository; give name/model, such as me/my-model")
    directory, api = Path(directory), HfApi()
    url = f"{api.endpoint}/{repo_id}"
    # A model may be kept without its code, which the installed package has.
    new = {name: (PACKAGE / name).read_text(encoding="utf-8") for name in CODE if not (directory / name).exists()}
    problems = find_problems(directory)
    if not problems and (text := new_text(directory, repo_id=repo_id, license=license)) is not None:
        new[README], problems = text, card_problems(text, directory)
    if problems:
        raise InputError(f"{directory} cannot be published: {'; '.join(problems)}")
    kept, left_out = files_to_upload(directory)
    sizes = {name: path.stat().st_size for name, path in kept.items()}
    sizes |= {name: len(content.encode()) for name, content in new.items()}
    files, text = sorted(sizes), new.get(README) or read_text(directory / README).removeprefix("\ufeff")
    if dry_run:
        print(text)
    print(*(f"{decimal(sizes[name]):>10}  {name}" for name in files), sep="\n")
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    print(f"{repo_id}: {len(files)} files, {decimal(sum(sizes.values()))}")
    given = ModelCard(text).data.get("license")
    print(f"license {given}" if given else "no license is given, and the card says so; --license mit gives one")
    if dry_run:
        print("nothing was uploaded")
        return Publication(url, None, files)
    for name, content in new.items():
        with write_atomic(directory / name) as file:
            file.write(content.encode())

    session, outcome = get_session(), f"{repo_id}: nothing was committed"
    usual, session.timeout = session.timeout, TIMEOUT
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        before = api.model_info(repo_id, timeout=TIMEOUT)
        if private and not before.private:
            raise InputError(f"{repo_id} exists and is public; make it private on the Hub, or use another name")
        there = {file.rfilename for file in before.siblings or ()}
        if README in there and is_generated(text) and (lost := _lost(api, repo_id, before, text)):
            keep = f"download it into {directory} to keep it" if lost == "text" else "give --license"
            raise InputError(
                f"{repo_id}: the {lost} of the card on the Hub, {README}, would be lost; {keep}, or delete it there"
            )
        stale = [name for name in sorted(there.difference(files)) if re.fullmatch(LOADED, name)]
        added = (CommitOperationAdd(name, directory / name) for name in files)
        message, outcome, deleted = f"Upload {directory.resolve().name}", "", map(CommitOperationDelete, stale)
        commit = api.create_commit(repo_id, [*added, *deleted], commit_message=message, parent_commit=before.sha)
        outcome = f"committed to {url}, but not verified; run the command again to verify it"
        if stale:
            print(f"deleted in the repository: {', '.join(stale)}")
        # For weights, the checksum is that which the Hub recorded at the upload, not of the bytes that it would send.
        report = api.verify_repo_checksums(repo_id, revision=commit.oid, local_dir=directory)
        differing = {each["path"] for each in report.mismatches} | {*report.extra_paths}  # also other files
        if wrong := sorted(differing.intersection(files)):
            raise InputError(f"{wrong[0]} on the Hub is missing or differs from the local file")
    except Exception as error:  # after an unexpected response, huggingface_hub can raise any exception
        raise InputError(f"{_reason(error)} ({outcome or _outcome(api, repo_id, before)})") from error
    finally:
        session.timeout = usual
    print(f"verified {len(files)} files: {url}")
    return Publication(url, commit.oid, files)


def _lost(api: HfApi, repo_id: str, before: ModelInfo, new: str) -> str:
    """Return what of the card on the Hub a new card would lose: "text", a license that it lacks, or nothing."""
    with TemporaryDirectory() as aside:
        path = api.hf_hub_download(repo_id, README, revision=before.sha, local_dir=aside)
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not is_generated(text) and body_of(text).strip():
        return "text"
    license = parse_header(text, f"{README} of {repo_id}").get("license")
    return f"license {shortened(str(license))}" if license and not ModelCard(new).data.get("license") else ""


def _outcome(api: HfApi, repo_id: str, before: ModelInfo) -> str:
    """Describe the repository after a commit that failed, which may exist if only the response was lost."""
    try:
        if api.model_info(repo_id, timeout=TIMEOUT).sha == before.sha:
            return f"{repo_id}: nothing was committed"
        return f"{repo_id} has a new commit, which was not verified"
    except Exception:
        return f"{repo_id} is unchanged or has the complete commit: the Hub does not answer"


def _reason(error: BaseException) -> str:
    """Describe an error in one line: what the Hub answered, or why it could not be asked, and what to do."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    if not isinstance(error, HfHubHTTPError):
        return described(error) if isinstance(error, ValueError) else f"{described(error)}; run the command again"
    # A repository that does not exist may be hidden.
    status = 401 if isinstance(error, RepositoryNotFoundError) else error.response.status_code
    said = shortened(error.server_message or error.response.reason_phrase)
    return f"the Hub answered {status} {said}; {HINTS.get(status, 'run the command again')}"
