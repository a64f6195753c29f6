"""Publishing a directory on the Hub: checks, an upload in one commit, and the verification of the upload.

`HfApi.upload_folder` is not used: it uploads a large folder in several commits, so an interrupted upload leaves a part
of the model in the repository.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2  # the HTTP client of huggingface_hub, which lets its errors pass
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_session
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils.sha import git_hash
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..data.checksums import sha256
from ..progress import plain_console
from ..reading import described, first_line
from .card import README, card_license, copy_into, made_card
from .checks import CODE, CONFIG, PACKAGE, find_problems
from .errors import PublishError
from .folder import files_by_name, files_to_upload


WEIGHTS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
ATTEMPTS, WAIT = 4, 2.0  # a transient failure is retried after 2, 4 and 8 seconds
TIMEOUT = 300.0  # seconds without any data after which a connection times out
HINTS = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token with write access",
    403: "the token may not write there: use a token with write access, and a repository of your own",
    412: "there was another commit at the same time: run the command again",
    429: "there were too many requests: wait, and run the command again",
}
Result = TypeVar("Result")


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
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    license: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
    console: Console | None = None,
) -> Publication:
    """Check a saved model, write its card, upload it in one commit and verify the upload.

    An interrupted upload resumes with the same call: files that have arrived are not sent again, and the repository
    does not change before the single commit at the end.

    Args:
        directory: the directory that `save_pretrained` wrote, with the tokenizer or image processor.
        repo_id: "name/model" on the Hub. The repository is created if it does not exist.
        private: True for a private new repository, False for a public one. Default: the setting of the account.
        revision: the branch to commit to, created from main if it does not exist. Default: main.
        create_pr: open a pull request instead of committing.
        license: license of the weights, as for `write_card`.
        dry_run: only check, and show the card and the files; nothing is written or uploaded, and no network is needed.
        token: token of the Hub. Default: the token of `hf auth login` or HF_TOKEN.
        endpoint: URL of the Hub. Default: the environment variable HF_ENDPOINT.
        console: the rich console to print to. Default: the standard output.

    Raises:
        PublishError: the directory has problems, the Hub refuses the upload or cannot be reached, or the uploaded
            files differ from the local files. The message says what to do.
    """
    directory, console = Path(directory), console or plain_console()
    if create_pr and revision is not None:
        raise PublishError(
            "give a revision or ask for a pull request, not both: a pull request is always against main"
        )
    if not (directory / CONFIG).is_file():
        _refuse_unfit(directory)
    api = HfApi(endpoint=endpoint, token=token)
    with made_card(directory, repo_id=repo_id, license=license) as made:
        for name in CODE:  # a model may be kept without its code, which the installed package has
            if not (directory / name).exists():
                shutil.copyfile(PACKAGE / name, made / name)
        _refuse_unfit(directory, made)
        files = files_by_name(directory, made)
        if dry_run:
            console.print(files[README].read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
        _show(console, directory, repo_id, files)
        if dry_run:
            console.print("nothing was uploaded")
            return Publication(f"{api.endpoint}/{repo_id}", None, list(files))
        copy_into(directory, made)
    with _with_timeout():
        with _explained(lambda error: f"{repo_id}: nothing was committed"):
            before = _prepare_repository(api, repo_id, private, revision)
        with _explained(lambda error: _outcome(error, api, repo_id, revision, before, create_pr)):
            commit = _commit(api, repo_id, directory, list(files), revision, before, create_pr)
        url = commit.pr_url or f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
        with _explained(lambda error: f"committed to {url}, but not verified; run the command again to verify it"):
            _verify(api, repo_id, directory, list(files), commit)
    console.print(f"verified {len(files)} files: {url}", soft_wrap=True)
    return Publication(url, commit.oid, list(files))


def _refuse_unfit(directory: Path, made: Path | None = None) -> None:
    if problems := find_problems(directory, made):
        raise PublishError(f"{directory} cannot be published: {'; '.join(problems)}")


def _show(console: Console, directory: Path, repo_id: str, files: dict[str, Path]) -> None:
    """Print which files are uploaded or left out."""
    kinds = dict.fromkeys(CODE, "code") | {README: f"card, license {card_license(files[README])}"}
    table = Table("file", "kind", "size", title=Text(f"{directory} to {repo_id}"))
    for name, path in files.items():
        kind = "weights" if name.endswith(".safetensors") else kinds.get(name, "")
        table.add_row(Text(name, overflow="fold"), kind, decimal(path.stat().st_size))
    table.caption = f"{len(files)} files, {decimal(sum(path.stat().st_size for path in files.values()))}"
    console.print(table)
    if left_out := [path.relative_to(directory).as_posix() for path in files_to_upload(directory)[1]]:
        console.print(f"left out: {', '.join(left_out)}", markup=False)


# --------------------------------------------------------------------------------------------------------- the upload


def _prepare_repository(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> ModelInfo:
    """Create the repository and the branch if they do not exist, and return the state of the branch."""
    _retried(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    info = _retried(lambda: _repository_info(api, repo_id))
    if private and not info.private:
        raise PublishError(f"{repo_id} exists and is public; make it private on the Hub, or use another name")
    if revision is None:
        return info
    _retried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
    return _retried(lambda: _repository_info(api, repo_id, revision))


def _repository_info(api: HfApi, repo_id: str, revision: str | None = None, *, blobs: bool = False) -> ModelInfo:
    # Without an explicit timeout, `model_info` overrides the session's timeout and waits forever.
    return api.model_info(repo_id, revision=revision, timeout=TIMEOUT, files_metadata=blobs)


def _commit(
    api: HfApi,
    repo_id: str,
    directory: Path,
    names: list[str],
    revision: str | None,
    before: ModelInfo,
    create_pr: bool,
) -> CommitInfo:
    """Commit all files on top of `before` in one commit, which also deletes weights of `before` that are not replaced.

    A retry is safe: files that have arrived are not sent again, and if a commit was made but its response was lost,
    a retry finds nothing left to commit. A pull request could be opened twice, so it is retried only after too many
    requests (429).
    """

    def attempt() -> CommitInfo:
        there = {file.rfilename for file in _repository_info(api, repo_id, revision).siblings or ()}
        # The new files do not replace these old weights, and an old single file would be loaded instead of new shards.
        stale = sorted(name for name in there.difference(names) if re.fullmatch(WEIGHTS, name))
        # Operations keep the state of their upload, so each attempt needs new ones.
        added = [CommitOperationAdd(name, directory / name) for name in names]
        return api.create_commit(
            repo_id,
            [*added, *(CommitOperationDelete(name) for name in stale)],
            commit_message=f"Upload {directory.resolve().name}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=None if create_pr else before.sha,
        )

    if create_pr:
        return _retried(attempt, lambda error: _status(error) == 429)
    return _retried(attempt, lambda error: _is_transient(error) or _status(error) == 412)


def _outcome(
    error: Exception, api: HfApi, repo_id: str, revision: str | None, before: ModelInfo, create_pr: bool
) -> str:
    """Describe the repository after a commit that failed, which may exist if only the response was lost."""
    nothing = f"{repo_id}: nothing was committed"
    if not _is_transient(error):
        return nothing
    if create_pr:
        return f"{repo_id} is unchanged; look for this one among its pull requests before you run the command again"
    try:
        now = _repository_info(api, repo_id, revision)
    except Exception:
        return f"{repo_id} is unchanged or has the complete commit: the Hub does not answer"
    return nothing if now.sha == before.sha else f"{repo_id} has a new commit, which was not verified"


def _verify(api: HfApi, repo_id: str, directory: Path, names: list[str], commit: CommitInfo) -> None:
    """Compare the checksums of the files in the commit with those of the local files.

    For weights, this is the checksum that the Hub recorded at the upload, not one of the bytes that it would send.

    Raises:
        PublishError: a file is missing or differs.
    """
    info = _retried(lambda: _repository_info(api, repo_id, commit.oid, blobs=True))
    there = {file.rfilename: file for file in info.siblings or ()}
    for name in names:
        file, path = there.get(name), directory / name
        is_same = file is not None and (
            file.lfs.sha256 == sha256(path) if file.lfs else file.blob_id == git_hash(path.read_bytes())
        )
        if not is_same:
            raise PublishError(f"{name} on the Hub is missing or differs from the local file")


# ----------------------------------------------------------------------------------------------------------- failures


@contextmanager
def _with_timeout() -> Iterator[None]:
    """Set a timeout for the client of huggingface_hub, which by default waits forever."""
    session = get_session()
    before, session.timeout = session.timeout, httpx2.Timeout(TIMEOUT)
    try:
        yield
    finally:
        session.timeout = before


def _is_transient(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return any(isinstance(each, httpx2.TransportError) for each in _causes(error))


def _retried(action: Callable[[], Result], may_retry: Callable[[Exception], bool] = _is_transient) -> Result:
    """Call `action`, and retry it after a pause if the Hub is busy or the connection breaks.

    huggingface_hub retries the transfer of files, but not the requests that create repositories, branches and commits.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return action()
        except Exception as error:
            if not may_retry(error):
                raise
        time.sleep(WAIT * 2 ** (attempt - 1))
    return action()


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its chain of causes, outermost first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error of the Hub. A repository that does not exist may be hidden: 401."""
    for each in _causes(error):
        if isinstance(each, HfHubHTTPError):
            return 401 if isinstance(each, RepositoryNotFoundError) else each.response.status_code
    return None


@contextmanager
def _explained(context: Callable[[Exception], str]) -> Iterator[None]:
    """Convert errors of the Hub and the network to a one-line PublishError: the cause, the fix, and the state of the
    repository, which `context` describes."""
    try:
        yield
    except Exception as error:  # after an unexpected response, huggingface_hub can raise any exception
        raise PublishError(f"{_reason(error)} ({context(error)})") from error


def _reason(error: Exception) -> str:
    """Describe an error in one line: what the Hub answered, or why it could not be asked, and what to do."""
    status = _status(error) or 0
    hint = HINTS.get(status, "run the command again" if _is_transient(error) else "")
    for each in _causes(error):
        match each:
            case HfHubHTTPError():
                said = each.server_message or each.response.headers.get("X-Error-Message")
                told = f"the Hub answered {each.response.status_code}"
                told += f" {first_line(ValueError(said or each.response.reason_phrase))}"
                return f"{told}; {hint}" if hint else told
            case httpx2.TransportError():
                return f"the connection to the Hub failed ({described(each)}); {hint}"
            case httpx2.HTTPError() | httpx2.InvalidURL():
                return f"the Hub redirects in a loop or to no valid address ({first_line(each)}); check HF_ENDPOINT"
    return described(error)
