"""Every command and Python snippet of the pages runs, on the models that ship and on those of the quickstarts.

The snippets of a page run in the order of the page, in one folder. A command that takes minutes runs with the
additional options in SHORTER. NOT_RUN lists the commands that do not run here, with the reasons.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch.distributed.run import parse_args

from tests.conversion.test_labml import layer_state
from tests.runs import finish, launch, run_file


ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "configs/README.md", "spaces/demo/README.md"]
for folder in ("model_cards", "docs"):
    PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("**/*.md"))
PAGES = [page for page in PAGES if page not in ("docs/integrations.md", "docs/serving.md")]  # tests/clients runs them

FENCE = re.compile(r'^```(bash|python|\w+ title="(?P<file>.*)")\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One command of a bash block, a whole Python block, or a file whose name is the title of its block."""

    page: str
    line: int
    language: str
    code: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: str) -> Iterator[Snippet]:
    """Yield all snippets of a page, in the order of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("code")) + 1
        if fence["file"]:
            yield Snippet(page, line, "file", fence["code"], fence["file"])
        elif fence[1] == "python":
            yield Snippet(page, line, "python", fence["code"])
        else:
            yield from (Snippet(page, line + number, "bash", code) for number, code in commands(fence["code"]))


def commands(block: str) -> Iterator[tuple[int, str]]:
    """Yield (line, command) for a bash block: continued lines are joined, comments and blank lines left out."""
    start, command = 0, ""
    for number, line in enumerate(block.splitlines()):
        if not command:
            start = number
        command += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        words = shlex.split(command, comments=True)
        if words:
            yield start, shlex.join(words)
        command = ""


# {start of a command: options appended to the commands that begin with it}; the longest match applies.
SHORTER = {
    "aft-hf benchmark": "--turns 1 --batch-size 1",
    "aft-hf convert outputs/quickstart/vit outputs/distilled": "--steps 3",
    "aft-hf convert outputs/quickstart/vit outputs/mine": "--steps 3",
    "aft-hf train configs/examples/bytes_aft_local.yaml data.train=tinyshakespeare.txt": (
        "--smoke output_dir=outputs/bytes-aft-local"
    ),
    "aft-hf train model_cards/cifar10": "steps=2 evaluate_every=2 save_every=2 data.max_eval_samples=8 "
    "global_batch_size=8 micro_batch_size=8 mixed_precision=no",  # bfloat16 is slow on CPUs without it
    "aft-hf train model_cards/digits": "steps=2 evaluate_every=2 save_every=2 data.max_eval_samples=20",
    "aft-hf train model_cards/shakespeare": "steps=2 evaluate_every=2 save_every=2 data.max_eval_samples=2 "
    "global_batch_size=2",
    "aft-hf train recipe.yaml": "steps=2 evaluate_every=2 save_every=2 data.max_eval_samples=20",
    "aft-hf train configs/examples/bytes_aft_local.yaml data.train=tinyshakespeare.txt output_dir=": "--smoke",
    "accelerate launch --config_file configs/accelerate/fsdp2.yaml": "--smoke",
    "aft-hf finetune": "--max_steps 2",
    "torchrun --nproc-per-node 2 -m aft_hf train": "--smoke",
    "torchrun --nproc-per-node 4 scripts/measure_context_parallel.py": "--tokens 100",
    "torchrun --nproc-per-node 4 scripts/measure_context_parallel.py --image-side": "--image-side 256",
}
# {page: (code, code that computes the same from less)}
SHORTER_PYTHON = {"docs/tutorials/ablations.md": ("test_size=0.25", "test_size=20")}
NOT_RUN = {
    r"make (quickstart|quickstart-text|quickstart-pixels|test|lint|gpu)": "CI runs them; gpu needs a GPU",
    r"make (demo|install)|python spaces/demo/app.py": "starts a server or installs packages; tests/demo tests the app",
    r"(nice )?python -m scripts\.(benchmark|measure|reproduction)": "takes long and writes to docs/; see their tests",
    r"python scripts/measure_conversion.py": "takes hours; tests/scripts runs it with few images",
    r"pip install": "installs packages from an index",
    r"source .venv/bin/activate": "the tests run in this environment",
    r"hf (repos|upload)": "needs an account on the Hub",
    r"config = ParallelismConfig": "shards on GPUs only; tests/training/test_context_parallel.py runs it on CPUs",
}
PAGES_WITH_SNIPPETS = [page for page in PAGES if any(snippets(page))]


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory) -> Path:
    """Folder with the outputs of both quickstarts, made once for all workers, or the folder AFT_HF_QUICKSTART."""
    if given := os.environ.get("AFT_HF_QUICKSTART"):
        return ROOT / given
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    outputs = shared / "quickstart-outputs"
    with FileLock(shared / "quickstart.lock"):
        for kind, name in (("image", "quickstart"), ("text", "quickstart-text")):
            if not (outputs / name / "made").exists():
                command = [sys.executable, "scripts/quickstart.py", kind, "--short", "--out", outputs / name]
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
                (outputs / name / "made").touch()
    return outputs


@pytest.fixture
def workplace(tmp_path, quickstart) -> Path:
    """Folder with the files that the pages name: from the repository, the quickstarts, and small data of a reader."""
    from datasets import ClassLabel, Dataset, Features, Image

    for name in ("configs", "model_cards", "scripts", "spaces", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "outputs").mkdir()
    for name in ("quickstart", "quickstart-text"):
        subprocess.run(["cp", "-r", quickstart / name, tmp_path / "outputs" / name], check=True)
    torch.save(layer_state(), tmp_path / "layer.pth")  # of labml
    (tmp_path / "tinyshakespeare.txt").write_text((ROOT / "README.md").read_text() * 8)
    pixels = np.random.default_rng(0).integers(256, size=(64, 32, 32, 3), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    images = Dataset.from_dict({"image": list(pixels), "label": [index % 10 for index in range(64)]}, features)
    for split in ("train", "validation", "test"):
        for folder in (tmp_path, tmp_path / "cifar10"):
            folder.mkdir(exist_ok=True)
            images.to_parquet(str(folder / f"{split}.parquet"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("forks_for_spawned_processes")
@pytest.mark.parametrize("page", PAGES_WITH_SNIPPETS)
def test_every_snippet_of_a_page_runs(page, workplace, run_command, monkeypatch):
    """Commands of aft-hf run in this process. A fork server with the libraries starts the processes of launchers,
    and one for each Python snippet, which runs as the main module and needs its own imports. The server has imported
    aft_hf, which registers the Auto classes, so the text of a snippet with Auto classes is searched for the import.
    """
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=os.pathsep)
    for snippet in snippets(page):
        if snippet.file:
            (workplace / snippet.file).write_text(snippet.code)
            continue
        if any(re.match(pattern, snippet.code) for pattern in NOT_RUN):
            continue
        start = max((start for start in SHORTER if snippet.code.startswith(start)), key=len, default=None)
        command = snippet.code if start is None else f"{snippet.code} {SHORTER[start]}"
        command = command.replace("--nproc-per-node 4", "--nproc-per-node 2")  # as many as a small machine has cores
        if snippet.language == "python":
            registers = re.search(r"^(import|from) aft_hf|trust_remote_code=True", command, re.MULTILINE)
            assert registers or not re.search(r"\bAuto[A-Z]|\bpipeline\(", command), f"{snippet} lacks import aft_hf"
            Path("output.txt").unlink(missing_ok=True)
            Path("snippet.py").write_text(command.replace(*SHORTER_PYTHON.get(page, ("", ""))))
            ended = finish(launch(run_file, ("output.txt", "snippet.py"), **os.environ))
            assert ended == [0], f"{snippet}:\n{Path('output.txt').read_text()[-3000:]}"
            continue
        # Only the command for FSDP2 runs its launcher: a launcher imports the libraries again, which takes seconds.
        if command.startswith(("torchrun", "accelerate launch -m")):
            asked = parse_args(shlex.split(command.removeprefix("accelerate "))[1:])
            count, program = int(asked.nproc_per_node), (asked.training_script, *asked.training_script_args)
            environment = {**os.environ, "TORCHELASTIC_RUN_ID": "snippet"}
            ended = finish(launch(run_file, ("output.txt", *program), count, **environment))
            assert ended == [0] * count, f"{snippet}: {command}\n{Path('output.txt').read_text()[-3000:]}"
            continue
        if command.startswith("aft-hf"):
            done = run_command(*shlex.split(command))
        else:
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, f"{snippet}: {command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def test_every_entry_of_shorter_and_not_run_matches_a_command():
    shown = [snippet.code for page in PAGES for snippet in snippets(page)]
    for page, (code, _) in SHORTER_PYTHON.items():
        assert any(code in snippet.code for snippet in snippets(page)), f"{page} lacks {code!r}: remove SHORTER_PYTHON"
    for start in SHORTER:
        assert any(code.startswith(start) for code in shown), f"no page shows {start!r}: remove it from SHORTER"
    for pattern in NOT_RUN:
        assert any(re.match(pattern, code) for code in shown), f"no page shows {pattern!r}: remove it from NOT_RUN"


@pytest.mark.parametrize("page", sorted({*PAGES} - {"docs/benchmark.md", "docs/reproduction.md"}))  # partly generated
def test_code_fits_the_box_of_a_page(page):
    blocks = re.findall(r"^```.*?^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 76] == []


def test_the_chat_of_the_serving_page_asks_for_the_model_that_its_server_serves():
    """A server that was started with a model refuses requests for another one."""
    chat = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## Chat")[2].partition("\n## ")[0]
    served, asked = (re.findall(rf"aft-hf transformers {command} (\S+)", chat) for command in ("serve", "chat"))
    assert served == asked and len(asked) == 1


def test_no_page_and_no_message_installs_the_package_by_a_name_that_anyone_may_register_on_pypi():
    """It is not on PyPI, so that a package with its name there would be somebody else's."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [path for path in map(Path, listed.split("\0")) if path.suffix in (".py", ".md", ".ipynb", ".cpp", ".h")]
    assert Path("README.md") in texts and Path("src/aft_hf/publishing/template.md") in texts
    named = re.compile(r"\baft-hf\[|install( -\S+)* [\"']?aft[-_]hf\b|newer aft-hf")
    actual = {str(path): named.findall((ROOT / path).read_text(encoding="utf-8")) for path in texts}
    assert {path: lines for path, lines in actual.items() if lines and path != "tests/pages/test_snippets.py"} == {}


@pytest.mark.parametrize("page", PAGES)
def test_code_is_in_fences_with_a_language(page):
    """Other code would not run in these tests."""
    text = (ROOT / page).read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n    (?! *[-*\d]).*", outside) == []
    languages = {fence.split()[0] for fence in re.findall(r"^```(\S.*)$", text, re.MULTILINE)}
    assert languages <= {"bash", "python", "yaml", "text"}
