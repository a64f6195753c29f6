"""Tiny training runs, in this process and in others, which can then be killed."""

import faulthandler
import gc
import io
import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aft_hf.atomic_files import sha256
from aft_hf.running.checkpoints import MANIFEST, read_manifest, write_manifest
from aft_hf.training.loop import train
from aft_hf.training.recipe import build_recipe


# The fork server preloads the imports, which take seconds; a tiny run takes less.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["aft_hf.training.loop"])

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}

CLASSES = ["dark", "light", "red"]  # of `write_images`


def write_text(path: Path, size: int = 6000) -> Path:
    """Write a file in which each letter limits the letters that may follow, so that a model can learn from it."""
    random = np.random.default_rng(0)
    letters = np.cumsum(random.integers(1, 3, size)) % 26 + ord("a")
    path.write_bytes(letters.astype(np.uint8).tobytes())
    return path


def write_images(path: Path) -> Path:
    """Write a parquet file of 8 x 8 images in three classes that any model can distinguish."""
    random = np.random.default_rng(0)
    colours = np.array([[40, 40, 40], [210, 210, 210], [200, 40, 40]])
    labels = [i % 3 for i in range(36)]
    pixels = [np.clip(colours[label] + random.integers(-20, 20, (8, 8, 3)), 0, 255) for label in labels]
    rows = {"image": [Picture.fromarray(each.astype(np.uint8)) for each in pixels], "label": labels}
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=CLASSES)})).to_parquet(path)
    return path


def bpe_tokenizer(text: str, normalizer: Any = None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with merged tokens and an end-of-text token."""
    tokenizer, special = Tokenizer(models.BPE()), ["<|endoftext|>"]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


def bytes_recipe(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe with random numbers and state to resume: dropout, accumulation, warm-up and EMA."""
    text = directory / "text"
    if not text.exists():
        write_text(text)
    values = {
        "task": "bytes",
        "model": {
            "architecture": "aft",
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "position_bias_dim": 2,
            "window_size": 4,
            "hidden_dropout_prob": 0.1,
        },
        "data": {"train": str(text), "seq_len": 16, "max_eval_samples": 7},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1},
        "schedule": {"name": "inverse_sqrt", "warmup_steps": 4},
        "steps": 12,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_grad_norm": 1.0,
        "ema_decay": 0.8,
        "log_every": 1,
        "evaluate_every": 6,
        "save_every": 3,
        "tracker": None,
        "output_dir": str(directory / "run"),
    }
    return values | changes


def pixels_recipe(directory: Path, images: Path) -> dict:
    return bytes_recipe(directory) | {
        "task": "pixels",
        "data": {"train": str(images), "validation": str(images), "image_size": 4, "max_eval_samples": 5},
        "steps": 4,
    }


def images_recipe(directory: Path, images: Path, **changes) -> dict:
    augmentation = {"crop_scale": [0.5, 1.0], "rand_augment_operations": 1, "erasing": 0.2, "mixup": 0.8}
    model = {"architecture": "aft", "aft_type": "conv", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4}
    model |= {"kernel_size": 3, "patch_size": 2, "drop_path_rate": 0.1, "position_bias_entropy_weight": 0.001}
    data = {"train": str(images), "validation": str(images), "image_size": 8, "workers": 2}
    changes = {"model": model, "data": data | {"augmentation": augmentation | {"cutmix": 1.0}}} | changes
    return bytes_recipe(directory) | {"task": "images", "label_smoothing": 0.1} | changes


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Train in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return train(build_recipe(values))


def start(values: dict[str, Any], processes: int = 1, **environment: str) -> list[Any]:
    """Train in other processes; one that fails appends its error to OUTPUT_DIR.error and exits with code 1."""
    return launch(run_elsewhere, (values,), processes, **environment)


def launch(target: Callable, arguments: tuple, processes: int = 1, **environment: str) -> list[Any]:
    """Call a function in other processes, with the environment for a process group if there are several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(processes):
        variables = dict(environment)
        if processes > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            variables |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(CONTEXT.Process(target=_call, args=(target, arguments, variables)))
        started[-1].start()
    return started


def finish(processes: list[Any], timeout: float = 300) -> list[int]:
    """Wait for processes, killing them after the timeout, and return their exit codes."""
    for process in processes:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def wait_for(path: Path, process: Any, timeout: float = 300) -> bool:
    """Return whether `path` appears before the process ends."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.exitcode is None:
        if path.exists():
            return True
        time.sleep(0.005)
    return path.exists()


def kill_at_random(values: dict[str, Any], kills: int, seed: int, processes: int = 1) -> int:
    """Start an endless run and kill it at a random moment, `kills` times; return the number of completed steps.

    Every second step writes a checkpoint, so many kills hit a run that is writing a checkpoint.
    """
    random, checkpoints, done = Random(seed), Path(values["output_dir"]) / "checkpoints", 0
    endless = values | {"steps": 10**6, "save_every": 2}  # no kill comes after the end, however fast the machine
    for _ in range(kills):
        started = start(endless, processes)
        # The run makes up to four checkpoints before it is killed, or none.
        goal = done + 2 * random.randrange(5)
        if goal > done:
            assert wait_for(checkpoints / f"step-{goal:09d}", started[0])
        time.sleep(random.uniform(0, 0.15))
        random.shuffle(started)
        for process in started:
            process.kill()
            time.sleep(random.uniform(0, 0.02))
        codes = finish(started)
        # A process whose peers have been killed may fail before it is killed itself.
        assert codes[0] == -9 and set(codes) <= {-9, 1}
        done = max((int(path.name[-9:]) for path in checkpoints.glob("step-*")), default=0)
    return done


def assert_killing_changes_nothing(values: dict[str, Any], kills: int, seed: int, processes: int = 1) -> None:
    """Assert that a run that is killed `kills` times gives bitwise the results of an uninterrupted run."""
    done = kill_at_random(values, kills, seed, processes)
    values = values | {"steps": done + 3}
    reference = values | {"output_dir": f"{values['output_dir']}-reference"}
    assert finish(start(values, processes)) == [0] * processes
    assert finish(start(values, processes)) == [0] * processes  # only loads the last checkpoint
    assert finish(start(reference, processes)) == [0] * processes

    results, expected = results_of(values), results_of(reference)
    assert len(results["losses"]) == done + 3 and results["processes"] == processes
    for key in ("losses", "evaluations", "metrics"):
        assert results[key] == expected[key]
    weights, wanted = (load_file(Path(v["output_dir"]) / "model.safetensors") for v in (values, reference))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert not list(Path(values["output_dir"]).rglob(".*"))


class Payload:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def saved_payload(marker: Path, **options: Any) -> bytes:
    """Return a file of `torch.save`, with these options of it, that holds a payload."""
    file = io.BytesIO()
    torch.save({"state": {}, "param_groups": Payload(marker)}, file, **options)
    return file.getvalue()


def plant(checkpoint: Path, name: str, content: bytes) -> None:
    """Write a file into a checkpoint and update its checksums, as an attacker would."""
    path = checkpoint / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    sums = {str(path.relative_to(checkpoint)): sha256(path) for path in files}
    write_manifest(checkpoint, read_manifest(checkpoint).model_copy(update={"files": sums}))


def results_of(values: dict) -> dict:
    return json.loads((Path(values["output_dir"]) / "results.json").read_text())


def assert_same_run(results: dict, expected: dict) -> None:
    losses, wanted = ([row["loss"] for row in each["losses"]] for each in (results, expected))
    assert len(losses) == len(wanted) == 12
    assert losses == pytest.approx(wanted, abs=1e-5)
    for split, metrics in expected["metrics"].items():
        assert results["metrics"][split] == pytest.approx(metrics, abs=1e-5)


def _call(target: Callable, arguments: tuple, environment: dict[str, str]) -> None:
    faulthandler.enable()  # a crash prints the stacks of all threads
    gc.freeze()  # see `frozen_objects` in conftest.py
    os.environ.update(environment)
    torch.set_num_threads(1)
    # Forked data workers are children of this process and end when it is killed. Workers of a fork server would not.
    multiprocessing.set_start_method("fork", force=True)
    target(*arguments)


def run_file(output: str, program: str, *arguments: str) -> None:
    """Run a file, or a module without a file of its name, as the main module of this process, whose output is appended
    to a file.
    """
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv, sys.path = [program, *arguments], ["", *sys.path]
    run_program = runpy.run_path if Path(program).is_file() else runpy.run_module
    run_program(program, run_name="__main__")


def run_elsewhere(values: dict[str, Any]) -> None:
    if "ACCELERATE_USE_FSDP" in os.environ:
        # Accelerate shards on accelerators only; here it must take the CPU processes for accelerators.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    try:
        train(build_recipe(values))
    except (ValueError, OSError) as error:
        with open(f"{values['output_dir']}.error", "a") as file:
            file.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)
