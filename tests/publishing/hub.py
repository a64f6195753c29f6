"""A mock server of the Hub: the part of its HTTP API that the real client needs to upload models, in memory.

    with Hub() as hub:
        HfApi(endpoint=hub.url, token=WRITE).create_repo("me/model")

It listens on the loopback interface. Large files are uploaded by LFS to a storage under another host name, as on the
Hub. `Hub.fail` injects faults.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


# A token with write access, a token with read access only, and the user of both.
WRITE, READ, USER = "stand-in-write", "stand-in-read", "me"
LFS_SUFFIXES = (".safetensors", ".png")
RELATIONS = ("adapter", "finetune", "merge", "quantized")


@dataclass(frozen=True)
class Blob:
    """A file in a commit; `lfs` tells whether it lies in the LFS storage."""

    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The hash by which clients identify the file: SHA-256 for LFS, Git's hash otherwise."""
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    """A repository with one branch. Commits are dictionaries of files by path."""

    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    head: str = ""

    def commit(self, files: dict[str, Blob]) -> str:
        """Add a commit atomically: the branch moves when all files are known."""
        listing = json.dumps([len(self.commits), {path: blob.oid for path, blob in files.items()}])
        self.head = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    def files(self) -> dict[str, bytes]:
        """Return the contents of the files by path, for comparison in tests."""
        return {path: blob.content for path, blob in self.commits[self.head].items()}


class ApiError(Exception):
    """An error response in the format of the Hub."""

    def __init__(self, status: int, message: str, code: str | None = None, **content):
        super().__init__(message)
        self.status, self.message, self.code, self.content = status, message, code, content


class Hub:
    """The server and its state."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS by sha256, verified
        self.unverified: dict[str, bytes] = {}
        self.faults: list[dict] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self.closed = threading.Event()

    def __enter__(self) -> "Hub":
        self.server = Server(("127.0.0.1", 0), partial(Handler, self))
        port = self.server.server_address[1]
        self.url, self.storage = f"http://127.0.0.1:{port}", f"http://localhost:{port}/storage"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def fail(self, kind: str, method: str, pattern: str, times: int = 1, **options) -> None:
        """Inject a fault into the next `times` requests of `method` whose path matches `pattern`.

        Kinds: "status": answer with `status`, `headers` and `content`; "drop": drop the connection after `received`
        bytes of the body; "lost": process the request, but drop the connection instead of answering; "silent": keep
        the connection open and never answer.
        """
        assert kind in ("status", "drop", "lost", "silent")
        self.faults.append({"kind": kind, "method": method, "pattern": pattern, "times": times} | options)

    def next_fault(self, method: str, path: str) -> dict:
        """Return the fault of a request, an empty dictionary if there is none."""
        with self.lock:
            for fault in self.faults:
                if fault["times"] > 0 and fault["method"] == method and re.search(fault["pattern"], path):
                    fault["times"] -= 1
                    return fault
        return {}

    def count(self, method: str, pattern: str) -> int:
        """Return the number of requests of `method` whose path matches `pattern`."""
        return sum(bool(re.search(rf"^{method} .*{pattern}", request)) for request in self.requests)

    def repository(self, repo_id: str, token: str | None) -> Repository:
        repository = self.repositories.get(repo_id)
        if repository is None or (repository.private and token is None):
            raise ApiError(401 if token is None else 404, "Repository not found", "RepoNotFound")
        return repository

    def commit_of(self, repository: Repository, revision: str) -> str:
        oid = repository.head if revision == "main" else revision
        if oid not in repository.commits:
            raise ApiError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """Ignore errors: tests expect broken connections."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments):
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *_) -> None:
        """Do not log."""

    def answer_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        fault = self.hub.next_fault(self.command, path)
        kind = fault.get("kind")
        if kind == "drop":
            self.rfile.read(min(fault.get("received", 0), int(self.headers.get("Content-Length") or 0)))
            return self.hang_up()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if kind == "silent":
            self.hub.closed.wait()
            return self.hang_up()
        if kind == "status":
            return self.send(fault["status"], fault.get("content", b"{}"), fault.get("headers", {}))
        try:
            token = self.token()
            for method, pattern, function in ROUTES:
                match = re.fullmatch(pattern, path)
                if method == self.command and match:
                    with self.hub.lock:
                        status, content, headers = function(self, token, body, **match.groupdict())
                    break
            else:
                raise ApiError(404, f"no such page: {self.command} {path}")
        except ApiError as error:
            headers = {"X-Error-Message": error.message}
            if error.code is not None:
                headers["X-Error-Code"] = error.code
            status, content = error.status, json.dumps({"error": error.message} | error.content).encode()
        if kind == "lost":
            return self.hang_up()
        self.send(status, content, headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer_request

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def token(self) -> str | None:
        value = self.headers.get("Authorization")
        if value is None:
            return None
        if (token := value.removeprefix("Bearer ")) not in (WRITE, READ):
            raise ApiError(401, "Invalid credentials in Authorization header")
        return token


ROUTES: list[tuple[str, str, Callable]] = []
REPO = r"(?P<repo_id>[\w.-]+/[\w.-]+)"


def route(method: str, pattern: str):
    """Register a function of (handler, token, body, **groups of the pattern) -> (status, content, headers)."""

    def register(function: Callable) -> Callable:
        ROUTES.append((method, pattern, function))
        return function

    return register


def as_json(content, status: int = 200) -> tuple[int, bytes, dict]:
    return status, json.dumps(content).encode(), {"Content-Type": "application/json"}


def require_write(token: str | None) -> None:
    if token is None:
        raise ApiError(401, "Invalid username or password.")
    if token != WRITE:
        raise ApiError(403, "you must use a write token")


@route("POST", "/api/repos/create")
def create_repo(handler, token, body):
    require_write(token)
    asked = json.loads(body)
    owner = asked.get("organization") or USER
    repo_id = f"{owner}/{asked['name']}"
    if owner != USER:
        raise ApiError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    if repo_id in handler.hub.repositories:
        raise ApiError(409, "You already created this model repo", url=f"{handler.hub.url}/{repo_id}")
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    repository = handler.hub.repositories[repo_id] = Repository(private)
    repository.commit({".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})
    return as_json({"url": f"{handler.hub.url}/{repo_id}", "name": repo_id, "id": repo_id})


@route("GET", rf"/api/models/{REPO}(/revision/(?P<revision>.+))?")
def repo_info(handler, token, body, repo_id, revision):
    repository = handler.hub.repository(repo_id, token)
    oid = handler.hub.commit_of(repository, revision or "main")
    siblings = [{"rfilename": path} for path in repository.commits[oid]]
    info = {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": oid, "private": repository.private}
    return as_json(info | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0})


@route("GET", rf"/api/models/{REPO}/tree/(?P<revision>.+)")
def tree(handler, token, body, repo_id, revision):
    repository, entries = handler.hub.repository(repo_id, token), []
    for path, blob in repository.commits[handler.hub.commit_of(repository, revision)].items():
        entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
        lfs = {"lfs": {"oid": blob.oid, "size": len(blob.content), "pointerSize": 130}} if blob.lfs else {}
        entries.append(entry | lfs)
    return as_json(entries)


@route("POST", "/api/validate-yaml")
def validate_yaml(handler, token, body):
    errors, warnings = [], []
    match = re.match(r"---\n(.*?\n)---\n", json.loads(body)["content"], re.DOTALL)
    try:
        metadata = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        metadata, errors = {}, [f"YAML is not valid: {error}"]
    if metadata is None:
        warnings.append("empty or missing yaml metadata in repo card")
    else:
        errors += metadata_errors(metadata)
    content = {"errors": [{"message": each} for each in errors], "warnings": [{"message": each} for each in warnings]}
    return as_json(content, 400 if errors else 200)


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


@route("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)")
def preupload(handler, token, body, repo_id, revision):
    require_write(token)
    repository = handler.hub.repository(repo_id, token)
    there = repository.commits[handler.hub.commit_of(repository, revision)]
    return as_json(
        {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                    "oid": there[file["path"]].oid if file["path"] in there else None,
                }
                for file in json.loads(body)["files"]
            ]
        }
    )


@route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
def lfs_batch(handler, token, body, repo_id):
    require_write(token)
    hub = handler.hub
    hub.repository(repo_id, token)
    answers = []
    for item in json.loads(body)["objects"]:
        answer = {"oid": item["oid"], "size": item["size"], "authenticated": True}
        if item["oid"] not in hub.objects:
            upload = {"href": f"{hub.storage}/{item['oid']}"}
            answer["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/{repo_id}.git/info/lfs/verify"}}
        answers.append(answer)
    return as_json({"transfer": "basic", "objects": answers})


@route("PUT", "/storage/(?P<oid>[0-9a-f]{64})")
def lfs_put(handler, token, body, oid):
    if token is not None:
        raise ApiError(400, "a token was sent to the storage")
    if hashlib.sha256(body).hexdigest() != oid:
        raise ApiError(400, "the content does not have the hash it was announced with")
    handler.hub.unverified[oid] = body
    return 200, b"", {}


@route("POST", rf"/{REPO}\.git/info/lfs/verify")
def lfs_verify(handler, token, body, repo_id):
    require_write(token)
    asked = json.loads(body)
    content = handler.hub.unverified.pop(asked["oid"], None) or handler.hub.objects.get(asked["oid"])
    if content is None or len(content) != asked["size"]:
        raise ApiError(404, "the object is not there")
    handler.hub.objects[asked["oid"]] = content
    return as_json({})


@route("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)")
def commit(handler, token, body, repo_id, revision):
    require_write(token)
    hub, repository = handler.hub, handler.hub.repository(repo_id, token)
    parent = hub.commit_of(repository, revision)
    files, lines = dict(repository.commits[parent]), [json.loads(line) for line in body.splitlines()]
    for line in lines:
        key, value = line["key"], line["value"]
        if key == "header":
            if value.get("parentCommit") not in (None, parent):
                raise ApiError(412, "A commit has happened since. Please refresh and try again.")
        elif key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in hub.objects:
                raise ApiError(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
            files[value["path"]] = Blob(hub.objects[value["oid"]], True)
        elif key == "deletedFile":
            if files.pop(value["path"], None) is None:
                raise ApiError(400, f"no such file: {value['path']}")
        else:
            raise ApiError(400, f"unknown operation {key}")
    oid = repository.commit(files)
    return as_json({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{repo_id}/commit/{oid}"})
