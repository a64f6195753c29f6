"""A Hub in memory, behind the methods of the client that `publish` calls, and the Hub's rules for cards."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx2  # the HTTP client of huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash, sha256


RELATIONS = ("adapter", "finetune", "merge", "quantized")
FILES = {".gitattributes": b"*.safetensors filter=lfs\n"}  # of a new repository


def answer(status: int, message: str = "no", kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    """Return the error of the client for an answer of the Hub."""
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://hub.example"))
    return kind(f"a long\ntext: {message}", response=response, server_message=message)


class Hub(HfApi):
    """The client and the Hub. A repository has one branch, whose commits are dictionaries of files by name."""

    def __init__(self):
        super().__init__(endpoint="https://hub.example")
        self.repositories: dict[str, SimpleNamespace] = {}
        self.faults: dict[str, tuple[BaseException | Callable[[], object], str]] = {}

    def fail(self, method: str, fault: BaseException | Callable[[], object], when: str = "before") -> None:
        """Let a method raise an error from now on: before it does anything, or after, when only the answer is lost.

        If the fault is a function, it is called there.
        """
        self.faults[method] = fault, when

    def _fault(self, method: str, when: str) -> None:
        fault, at = self.faults.get(method, (None, ""))
        if at == when and callable(fault):
            fault()
        elif at == when:
            raise fault

    def create_repo(self, repo_id, *, private, exist_ok):
        self._fault("create_repo", "before")
        assert exist_ok
        self.repositories.setdefault(repo_id, SimpleNamespace(private=bool(private), commits=[FILES]))
        self._fault("create_repo", "after")

    def model_info(self, repo_id, *, timeout):
        self._fault("model_info", "before")
        repository = self.repositories[repo_id]
        siblings = [SimpleNamespace(rfilename=name) for name in repository.commits[-1]]
        return SimpleNamespace(sha=self.oid(repository), private=repository.private, siblings=siblings)

    def create_commit(self, repo_id, operations, *, commit_message, parent_commit):
        self._fault("create_commit", "before")
        repository = self.repositories[repo_id]
        if parent_commit != self.oid(repository):
            raise answer(412, "A commit has happened since.")
        files = dict(repository.commits[-1])
        for each in operations:
            if isinstance(each, CommitOperationAdd):
                files[each.path_in_repo] = Path(each.path_or_fileobj).read_bytes()
            else:
                del files[each.path_in_repo]
        if files != repository.commits[-1]:
            repository.commits.append(files)
        self._fault("create_commit", "after")
        return SimpleNamespace(oid=self.oid(repository))

    def hf_hub_download(self, repo_id, filename, *, revision, local_dir):
        self._fault("hf_hub_download", "before")
        assert revision == self.oid(self.repositories[repo_id])
        Path(local_dir, filename).write_bytes(self.repositories[repo_id].commits[-1][filename])
        return str(Path(local_dir, filename))

    def list_repo_tree(self, repo_id, *, recursive, revision, **_):
        """Yield the files of the last commit, those of weights as LFS; `verify_repo_checksums` compares them."""
        self._fault("list_repo_tree", "before")
        assert recursive and revision == self.oid(self.repositories[repo_id])
        for name, content in self.repositories[repo_id].commits[-1].items():
            lfs = {"size": len(content), "oid": sha256(content).hexdigest(), "pointerSize": 130}
            options = {"lfs": lfs} if name.endswith(".safetensors") else {}
            yield RepoFile(path=name, size=len(content), oid=git_hash(content), **options)

    @staticmethod
    def oid(repository) -> str:
        return f"{len(repository.commits):040x}"


def metadata_errors(metadata: dict) -> list[str]:
    """Check the rules of the Hub that a generated card could violate."""
    errors = []
    for name in ("license", "pipeline_tag", "library_name"):
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", metadata.get(name, "x") or ""):
            errors.append(f'"{name}" must be one of the known names')
    for name in ("tags", "datasets", "metrics"):
        if not all(isinstance(each, str) for each in metadata.get(name) or []):
            errors.append(f'"{name}" must be an array of strings')
    if metadata.get("base_model_relation", "finetune") not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {RELATIONS}')
    bases = metadata.get("base_model") or []
    for base in [bases] if isinstance(bases, str) else bases:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
            errors.append(f'"base_model": {base} is not a valid model id')
    for index, model in enumerate(metadata.get("model-index") or []):
        if not model.get("name"):
            errors.append(f'"model-index[{index}].name" is required')
        for result in model.get("results") or [{}]:
            if not result.get("task", {}).get("type") or not all(
                result.get("dataset", {}).get(key) for key in ("name", "type")
            ):
                errors.append(f'"model-index[{index}].results" need task.type, dataset.name and dataset.type')
            if not all({"type", "value"} <= set(metric) for metric in result.get("metrics") or [{}]):
                errors.append(f'"model-index[{index}].results.metrics" need type and value')
    return errors
