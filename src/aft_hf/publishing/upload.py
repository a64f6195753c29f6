"""Publishing a directory on the Hub: checked before, in one commit, verified after.

`HfApi.upload_folder` is not used: it sends a large folder in several commits, and an interrupted one leaves a part of
the model in the repository.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2  # what huggingface_hub talks with: connections fail with its errors
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_session
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.sha import git_hash
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from ..data.check_sums import sha256
from ..reading import described, first_line
from .card import README, card_license, made_card, put_into
from .checks import CODE, CONFIG, find_problems
from .errors import PublishError
from .folder import files_by_name, files_to_upload


WEIGHTS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
ATTEMPTS, WAIT = 4, 2.0  # a transient failure is tried again after 2, 4, 8 seconds
PATIENCE = 300.0  # seconds without a byte after which a connection counts as broken
HINTS = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    403: "the token may not write there: take one that may, and a name of your own",
    412: "somebody else commits there: run the same again",
    429: "the Hub asks to slow down: wait, and run the same again",
}
Result = TypeVar("Result")


@dataclass(frozen=True)
class Publication:
    """What was published: where to see it, and the commit; None where nothing was sent."""

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
    """Check a saved model, write its card, upload it in one commit and verify what arrived.

    An interrupted upload resumes with the same call: files that have arrived are not sent again, and until the one
    commit at the end the repository does not change.

    Args:
        directory: what `save_pretrained` wrote, with tokenizer or image processor beside it.
        repo_id: "name/model" on the Hub; made if it is not there.
        private: make a new repository private (True) or public (False); by default as the account has it.
        revision: a branch to commit to, made from main if it is not there; main by default.
        create_pr: open a pull request instead of committing.
        license: of the weights, as `write_card` takes it.
        dry_run: check and show only; nothing is written or sent, and no network is needed.
        token: of the Hub; by default that of `hf auth login` or HF_TOKEN.
        endpoint: of the Hub; by default HF_ENDPOINT.
        console: where to print.

    Raises:
        PublishError: the directory is not fit to be published, the Hub refused or could not be reached, or what
            arrived is not what was sent. The message says what to do.
    """
    directory, console = Path(directory), console or Console()
    if create_pr and revision is not None:
        raise PublishError("give a revision or ask for a pull request, not both: a pull request is against main")
    if not (directory / CONFIG).is_file():
        _refuse_unfit(directory)
    api = HfApi(endpoint=endpoint, token=token)
    with made_card(directory, repo_id=repo_id, license=license) as made:
        _refuse_unfit(directory, made)
        files = files_by_name(directory, made)
        _show(console, directory, repo_id, files)
        if dry_run:
            console.print("nothing was sent")
            return Publication(f"{api.endpoint}/{repo_id}", None, list(files))
        put_into(directory, made)
    with _impatient():
        with _explained(lambda error: f"{repo_id}: nothing was committed"):
            before = _prepare_repository(api, repo_id, private, revision)
        with _explained(lambda error: _outcome(error, api, repo_id, revision, before, create_pr)):
            commit = _commit(api, repo_id, directory, list(files), revision, before, create_pr)
        url = commit.pr_url or f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
        with _explained(lambda error: f"committed to {url}, but not verified; run the same again to verify it"):
            _verify(api, repo_id, directory, list(files), commit)
    console.print(f"verified {len(files)} files: {url}", soft_wrap=True)
    return Publication(url, commit.oid, list(files))


def _refuse_unfit(directory: Path, made: Path | None = None) -> None:
    if problems := find_problems(directory, made):
        raise PublishError(f"{directory} is not fit to be published: {'; '.join(problems)}")


def _show(console: Console, directory: Path, repo_id: str, files: dict[str, Path]) -> None:
    """Print what is sent and what is left out. Names are escaped: rich takes brackets for markup."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    kinds = dict.fromkeys(CODE, "code") | {README: f"card, license {card_license(files[README])}"}
    table = Table(title=escape(f"{directory} to {repo_id}"))
    table.caption = f"{len(files)} files, {decimal(sum(sizes.values()))}"
    table.add_column("file", overflow="fold")
    table.add_column("what")
    table.add_column("size", justify="right")
    for name, size in sizes.items():
        kind = "weights" if name.endswith(".safetensors") else kinds.get(name, "")
        table.add_row(escape(name), kind, decimal(size))
    console.print(table)
    if left_out := [path.relative_to(directory).as_posix() for path in files_to_upload(directory)[1]]:
        console.print(f"left out: {', '.join(left_out)}", markup=False)


# --------------------------------------------------------------------------------------------------------- the upload


def _prepare_repository(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> ModelInfo:
    """Make repository and branch where they are not there; what the branch holds."""
    _retried(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    info = _retried(lambda: _repository_info(api, repo_id))
    if private and not info.private:
        raise PublishError(f"{repo_id} is there and public; make it private on the Hub, or take another name")
    if revision is None:
        return info
    _retried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
    return _retried(lambda: _repository_info(api, repo_id, revision))


def _repository_info(api: HfApi, repo_id: str, revision: str | None = None, **options: Any) -> ModelInfo:
    # Unless it is given a limit, it overrides that of the session, and waits for ever.
    return api.model_info(repo_id, revision=revision, timeout=PATIENCE, **options)


def _commit(
    api: HfApi,
    repo_id: str,
    directory: Path,
    names: list[str],
    revision: str | None,
    before: ModelInfo,
    create_pr: bool,
) -> CommitInfo:
    """One commit of everything, on top of `before`, of whose weights none stay in force.

    Trying again is safe: files that have arrived are not sent again, and a commit that was made though its answer was
    lost has moved the branch, so that no second one is made. A pull request would be opened twice, so that is tried
    again only where the Hub asks to slow down.
    """
    there = {file.rfilename for file in before.siblings or ()}
    # The new weights do not replace these, and a single file would be read in place of new shards.
    stale = sorted(name for name in there.difference(names) if re.fullmatch(WEIGHTS, name))

    def attempt() -> CommitInfo:
        # Operations remember what became of them, so each attempt has its own.
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
    """Whether a commit that ended in an error was made after all, as when only its answer was lost."""
    nothing = f"{repo_id}: nothing was committed"
    if not _is_transient(error):
        return nothing
    if create_pr:
        return f"{repo_id} is unchanged; look whether its pull requests have this one before you run the same again"
    try:
        now = _repository_info(api, repo_id, revision)
    except Exception:
        return f"{repo_id} is as it was, or has the whole commit: nobody answers"
    return nothing if now.sha == before.sha else f"{repo_id} was committed to, but not verified"


def _verify(api: HfApi, repo_id: str, directory: Path, names: list[str], commit: CommitInfo) -> None:
    """Compare the check sums of the commit with those of the files. Of weights it is the sum that the Hub recorded
    when it took them, not one of the bytes that it would send.

    Raises:
        PublishError: a file is missing or another.
    """
    info = _retried(lambda: _repository_info(api, repo_id, commit.oid, files_metadata=True))
    there = {file.rfilename: file for file in info.siblings or ()}
    for name in names:
        file, path = there.get(name), directory / name
        is_same = file is not None and (
            file.lfs.sha256 == sha256(path) if file.lfs else file.blob_id == git_hash(path.read_bytes())
        )
        if not is_same:
            raise PublishError(f"{name} on the Hub is not what was sent")


# ----------------------------------------------------------------------------------------------------------- failures


@contextmanager
def _impatient() -> Iterator[None]:
    """Gives the client of huggingface_hub, which waits for ever, a limit."""
    session = get_session()
    before, session.timeout = session.timeout, httpx2.Timeout(PATIENCE)
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
    """Do it, again after a pause where the Hub is busy or the connection breaks.

    huggingface_hub retries the transfer of files, but not what makes repositories, branches and commits.
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
    """An error and what it came from, outermost first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _status(error: Exception) -> int | None:
    return next((each.response.status_code for each in _causes(error) if isinstance(each, HfHubHTTPError)), None)


@contextmanager
def _explained(context: Callable[[Exception], str]) -> Iterator[None]:
    """Makes one line of what the Hub and the network do wrong: what happened, what to do, what state things are in."""
    try:
        yield
    except PublishError as error:
        raise PublishError(f"{error} ({context(error)})") from error
    except Exception as error:  # of answers that are not what the Hub gives, huggingface_hub raises anything
        raise PublishError(f"{_reason(error)} ({context(error)})") from error


def _reason(error: Exception) -> str:
    for each in _causes(error):
        match each:
            case HFValidationError() | OfflineModeIsEnabled() | LocalTokenNotFoundError():
                return first_line(each)
            case RevisionNotFoundError():
                return "the Hub does not know the revision"
            case HfHubHTTPError():
                status = 401 if isinstance(each, RepositoryNotFoundError) else each.response.status_code
                said = each.server_message or each.response.headers.get("X-Error-Message")
                said = first_line(ValueError(said or each.response.reason_phrase))
                hint = HINTS.get(status, "run the same again" if status >= 500 else "")
                return f"the Hub answered {each.response.status_code} {said}" + (f"; {hint}" if hint else "")
            case httpx2.TimeoutException():
                return "the Hub did not answer in time; run the same again"
            case httpx2.TransportError():
                return f"the connection to the Hub failed ({first_line(each)}); run the same again"
            case httpx2.HTTPError() | httpx2.InvalidURL():
                return f"the Hub sends elsewhere, and nothing is there ({first_line(each)}); look at HF_ENDPOINT"
    return described(error)
