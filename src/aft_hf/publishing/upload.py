"""Publishing a directory on the Hub: checked before, in one commit, verified after."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2  # what huggingface_hub talks with: connections fail with its errors
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_session,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
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
ATTEMPTS, WAIT = 4, 2.0  # what fails in passing is tried again after 2, 4, 8 seconds
PATIENCE = 300.0  # seconds without a byte after which a connection counts as broken
Result = TypeVar("Result")


@dataclass(frozen=True)
class Publication:
    """What was published: where to see it, and the commit; None where nothing was sent."""

    url: str
    commit: str | None
    files: list[str]


def publish(
    directory: str | os.PathLike,
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

    An upload that was interrupted is run again by the same call: what has arrived is not sent again, and until the one
    commit at the end the repository stays as it was.

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
        files = {name: directory / name for name in files}
        return _send(
            api, directory, files, repo_id, private=private, revision=revision, create_pr=create_pr, console=console
        )


def _refuse_unfit(directory: Path, made: Path | None = None) -> None:
    if problems := find_problems(directory, made):
        raise PublishError(f"{directory} is not fit to be published: {'; '.join(problems)}")


def _send(
    api: HfApi,
    directory: Path,
    files: dict[str, Path],
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    console: Console,
) -> Publication:
    """Make the repository, commit, verify."""
    with _explained(lambda error: f"{repo_id}: nothing was committed"):
        repository = _prepare_repository(api, repo_id, private, revision)
    head, stale = repository.sha, _stale_weights(repository, files)
    with _explained(lambda error: _outcome(error, api, repo_id, revision, head, create_pr)):
        commit = _commit(
            api,
            files,
            stale,
            repo_id=repo_id,
            revision=revision,
            head=head,
            create_pr=create_pr,
            commit_message=f"Upload {directory.resolve().name}",
        )
    url = commit.pr_url or f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
    with _explained(lambda error: f"committed to {url}, but not verified; run the same again to verify it"):
        _verify(api, repo_id, commit, files)
    console.print(f"verified {len(files)} files: {url}", soft_wrap=True)
    return Publication(url, commit.oid, list(files))


@contextmanager
def _impatient() -> Iterator[None]:
    """Gives the client of huggingface_hub, which waits for ever, a limit."""
    session = get_session()
    before, session.timeout = session.timeout, httpx2.Timeout(PATIENCE)
    try:
        yield
    finally:
        session.timeout = before


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


def _repository_info(api: HfApi, repo_id: str, revision: str | None = None) -> ModelInfo:
    # Unless it is given a limit, it overrides that of the session, and waits for ever.
    return api.model_info(repo_id, revision=revision, timeout=PATIENCE)


def _commit(
    api: HfApi, files: dict[str, Path], stale: list[str], *, head: str | None, create_pr: bool, **options
) -> CommitInfo:
    """One commit of everything, on top of `head`: `files` added, `stale` ones deleted.

    Trying again is safe: what is there is not sent again, and a commit that was made after all, though no answer came,
    moved the branch from `head`, so that no second one is. Only a pull request would be opened twice, so that is tried
    again only if it was refused.
    """

    def attempt() -> CommitInfo:
        # Operations remember what became of them, so each attempt has its own.
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        parent = None if create_pr else head
        return api.create_commit(operations=operations, parent_commit=parent, create_pr=create_pr, **options)

    return _retried(
        attempt, _was_refused if create_pr else lambda error: _is_transient(error) or _status(error) == 412
    )


def _stale_weights(repository: ModelInfo, names: Collection[str]) -> list[str]:
    """Weights of an earlier model that the new ones do not replace: one file would be read in place of new shards."""
    there = {file.rfilename for file in repository.siblings or ()}
    return sorted(name for name in there.difference(names) if re.fullmatch(WEIGHTS, name))


def _outcome(
    error: Exception, api: HfApi, repo_id: str, revision: str | None, head: str | None, create_pr: bool
) -> str:
    """Whether a commit that ended in an error was made after all, as when only its answer was lost."""
    nothing = f"{repo_id}: nothing was committed"
    if not _is_transient(error):
        return nothing
    if create_pr:
        return f"{repo_id} is as it was; look whether its pull requests have this one before you run the same again"
    try:
        now = _repository_info(api, repo_id, revision).sha
    except Exception:
        return f"{repo_id} is as it was, or has the whole commit: nobody answers"
    return nothing if now == head else f"{repo_id} was committed to, but not verified"


def _verify(api: HfApi, repo_id: str, commit: CommitInfo, files: dict[str, Path]) -> None:
    """Download the commit and compare hashes.

    Raises:
        PublishError: a file is missing or another.
    """
    with tempfile.TemporaryDirectory(prefix="aft-hf-verify-") as downloaded:
        _retried(
            lambda: snapshot_download(
                repo_id,
                revision=commit.oid,
                local_dir=downloaded,
                allow_patterns=[_literal(name) for name in files],
                token=api.token,
                endpoint=api.endpoint,
            )
        )
        for name, path in files.items():
            there = Path(downloaded) / name
            if not there.is_file() or sha256(there) != sha256(path):
                raise PublishError(f"{name} on the Hub is not what was sent")


def _literal(name: str) -> str:
    """A name as a pattern that matches nothing else."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _retried(action: Callable[[], Result], may_retry: Callable[[Exception], bool] | None = None) -> Result:
    """Do it, again after a pause where the Hub is busy or the connection breaks."""
    may_retry = may_retry or _is_transient
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:
            if attempt == ATTEMPTS or not may_retry(error):
                raise
        time.sleep(WAIT * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _causes(error: BaseException | None) -> list[BaseException]:
    """An error and what it came from, outermost first."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _is_transient(error: Exception) -> bool:
    for each in _causes(error):
        if isinstance(each, httpx2.TransportError):
            return True
        if isinstance(each, HfHubHTTPError):
            return each.response.status_code in (408, 429) or each.response.status_code >= 500
    return False


def _was_refused(error: Exception) -> bool:
    """Whether the Hub has surely not done what it was asked for, and would later."""
    return _status(error) == 429


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


@contextmanager
def _explained(context: Callable[[Exception], str]) -> Iterator[None]:
    """What the Hub and the network do wrong becomes one line: what happened, what to do, what state things are in."""
    try:
        yield
    except PublishError as error:
        raise PublishError(f"{error} ({context(error)})") from error
    except Exception as error:  # of answers that are not what the Hub gives, huggingface_hub raises anything
        raise PublishError(f"{_reason(error)} ({context(error)})") from error


def _reason(error: Exception) -> str:
    for each in _causes(error):
        if isinstance(each, (HFValidationError, OfflineModeIsEnabled, LocalTokenNotFoundError)):
            return first_line(each)
        if isinstance(each, RevisionNotFoundError):
            return "the Hub does not know the revision"
        if isinstance(each, HfHubHTTPError):
            status = each.response.status_code
            said = each.server_message or each.response.headers.get("X-Error-Message") or each.response.reason_phrase
            hints = {
                401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
                403: "the token may not write there: take one that may, and a name of your own",
                412: "somebody else commits there: run the same again",
                429: "the Hub asks to slow down: wait, and run the same again",
            }
            hint = hints.get(status, "run the same again" if status >= 500 else "")
            if isinstance(each, RepositoryNotFoundError):
                hint = hints[401]
            return f"the Hub answered {status} {first_line(ValueError(said))}" + (f"; {hint}" if hint else "")
        if isinstance(each, httpx2.TimeoutException):
            return "the Hub did not answer in time; run the same again"
        if isinstance(each, httpx2.TransportError):
            return f"the connection to the Hub failed ({first_line(each)}); run the same again"
        if isinstance(each, (httpx2.HTTPError, httpx2.InvalidURL)):
            return f"the Hub sends elsewhere, and nothing is there ({first_line(each)}); look at HF_ENDPOINT"
    return described(error)
