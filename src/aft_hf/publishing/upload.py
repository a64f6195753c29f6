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
from typing import Any, TypeVar

import httpx2  # the HTTP client of huggingface_hub, which lets its errors pass
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_session
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils.sha import git_hash
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from transformers.utils import CONFIG_NAME

from ..data.checksums import sha256
from ..progress import plain_console
from ..reading import described, first_line
from .card import README, card_license, copy_into, made_card
from .checks import CODE, PACKAGE, find_problems
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
    if not (directory / CONFIG_NAME).is_file():
        _refuse_unfit(directory)
    api = HfApi(endpoint=endpoint, token=token)
    url = f"{api.endpoint}/{repo_id}"
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
            return Publication(url, None, list(files))
        copy_into(directory, made)
    repository = _Repository(api, repo_id)
    with _with_timeout():
        with _explained(lambda error: f"{repo_id}: nothing was committed"):
            before = repository.prepare(private)
        with _explained(lambda error: repository.outcome(error, before)):
            commit = repository.commit(directory, list(files), before)
        with _explained(lambda error: f"committed to {url}, but not verified; run the command again to verify it"):
            repository.verify(directory, list(files), commit)
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


class _Repository:
    """A repository on the Hub. Requests are retried after transient failures."""

    def __init__(self, api: HfApi, repo_id: str):
        self.api, self.repo_id = api, repo_id

    def prepare(self, private: bool | None) -> ModelInfo:
        """Create the repository if it does not exist, and return its state."""
        _retried(lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True))
        info = _retried(self._info)
        if private and not info.private:
            raise PublishError(f"{self.repo_id} exists and is public; make it private on the Hub, or use another name")
        return info

    def commit(self, directory: Path, names: list[str], before: ModelInfo) -> CommitInfo:
        """Commit all files in one commit on top of `before`, without the weights of `before` that are not replaced.

        A retry is safe: files that have arrived are not sent again, and if a commit was made but its response was
        lost, a retry finds nothing left to commit.
        """

        def attempt() -> CommitInfo:
            there = {file.rfilename for file in self._info().siblings or ()}
            # An old single file would be loaded instead of new shards.
            stale = sorted(name for name in there.difference(names) if re.fullmatch(WEIGHTS, name))
            # Operations keep the state of their upload, so each attempt needs new ones.
            added = [CommitOperationAdd(name, directory / name) for name in names]
            deleted = [CommitOperationDelete(name) for name in stale]
            message = f"Upload {directory.resolve().name}"
            return self.api.create_commit(
                self.repo_id, [*added, *deleted], commit_message=message, parent_commit=before.sha
            )

        return _retried(attempt, lambda error: _is_transient(error) or _status(error) == 412)

    def outcome(self, error: Exception, before: ModelInfo) -> str:
        """Describe the repository after a commit that failed, which may exist if only the response was lost."""
        if _is_transient(error):
            try:
                if self._info().sha != before.sha:
                    return f"{self.repo_id} has a new commit, which was not verified"
            except Exception:
                return f"{self.repo_id} is unchanged or has the complete commit: the Hub does not answer"
        return f"{self.repo_id}: nothing was committed"

    def verify(self, directory: Path, names: list[str], commit: CommitInfo) -> None:
        """Compare the checksums of the files in the commit with those of the local files.

        For weights, this is the checksum that the Hub recorded at the upload, not one of the bytes that it would send.

        Raises:
            PublishError: a file is missing or differs.
        """
        info = _retried(lambda: self._info(revision=commit.oid, files_metadata=True))
        there = {file.rfilename: file for file in info.siblings or ()}
        for name in names:
            file, path = there.get(name), directory / name
            is_same = file is not None and (
                file.lfs.sha256 == sha256(path) if file.lfs else file.blob_id == git_hash(path.read_bytes())
            )
            if not is_same:
                raise PublishError(f"{name} on the Hub is missing or differs from the local file")

    def _info(self, **options: Any) -> ModelInfo:
        # Without an explicit timeout, `model_info` overrides the session's timeout and waits forever.
        return self.api.model_info(self.repo_id, timeout=TIMEOUT, **options)


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
    if (status := _status(error)) is not None:
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


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error of the Hub. A repository that does not exist may be hidden: 401."""
    for each in _causes(error):
        if isinstance(each, HfHubHTTPError):
            return 401 if isinstance(each, RepositoryNotFoundError) else each.response.status_code
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


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
    status = _status(error)
    hint = HINTS.get(status or 0, "run the command again" if _is_transient(error) else "")
    told = described(error)
    for each in _causes(error):
        if isinstance(each, HfHubHTTPError):
            said = each.server_message or each.response.headers.get("X-Error-Message")
            told = f"the Hub answered {status} {first_line(ValueError(said or each.response.reason_phrase))}"
        elif isinstance(each, (httpx2.RequestError, httpx2.InvalidURL)):
            told = f"the connection to the Hub failed ({described(each)})"
    return f"{told}; {hint}" if hint else told
