"""Compare the time and, on a GPU, the peak memory of saved models: the command `aft-hf benchmark`."""

import ctypes
import inspect
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoConfig, AutoModel, PreTrainedModel

from .configuration_aft import pair
from .console import plain_console
from .errors import explained
from .loading import load


Call = Callable[[], object]
Size = tuple[int, str] | None  # of images or texts: a number, and its unit
ON_GPU = torch.cuda.is_available()
LONG_CALL = 5.0  # seconds; a longer call is warmed up once


def benchmark_command(
    models: Annotated[list[str], typer.Argument(help="Directories or Hub ids of models of transformers or AFT.")],
    image_size: Annotated[list[int] | None, typer.Option(min=1, help="Pixels per side. Default: the model's.")] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens. Default: the model's, up to 1024.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images or texts per call.")] = 8,
    training: Annotated[bool, typer.Option("--training", help="Training steps (AdamW), not inference.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="bfloat16: in training by autocast.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Timed calls of each model.")] = 7,
) -> None:
    """Compare the speed and, on a GPU, the peak memory of models, which take turns.

    Both are relative to the first model: a speed of 2 x takes half its time, a memory of 2 x takes twice its memory.
    --image-size and --length may be repeated.
    """
    if image_size and length:
        raise ValueError("give --image-size or --length, not both: models read either images or texts")
    table = Table("size", "model")
    for name in ("ms", "x speed", *(("MiB", "x memory") if ON_GPU else ())):
        table.add_column(name, justify="right")
    given: list[Size] = [*((x, "px") for x in image_size or ()), *((x, "tokens") for x in length or ())]
    for size in given or [None]:  # None: the model's own
        options = {"size": size, "batch_size": batch_size, "training": training, "bf16": bf16}
        size_name, rows = measure(models, turns=turns, **options)
        first_seconds, first_peak = rows[models[0]]
        for model, (seconds, peak) in rows.items():
            memory = [f"{peak / 2**20:.1f}", f"{peak / first_peak:.2f}"] if ON_GPU else []
            table.add_row(size_name, model, f"{1e3 * seconds:.1f}", f"{first_seconds / seconds:.2f}", *memory)
        table.add_section()
    task = "training step" if training else "forward pass"
    plain_console().print(table)
    print(f"{task}, batch size {batch_size}, {'bfloat16' if bf16 else 'float32'}, {machine()}")
    print("ms: median time of a call; x speed: relative to the first model, 2 x is half its time.")
    if ON_GPU:
        print("MiB: peak memory of a call, beyond what is kept between calls; x memory: relative to the first model.")


def measure(sources: list[str], *, turns: int, **options: Any) -> tuple[str, dict[str, tuple[float, int]]]:
    """Return the size of the inputs in words and, by source, the median seconds and (on a GPU) peak bytes of a call.

    The options are those of `build_call`. Without a size, all models get the own size of the first one.
    """
    calls = {}
    for source in sources:
        with explained(f"{source}: cannot be measured"):
            calls[source], options["size"] = build_call(source, **options)
            calls[source]()
    taken = seconds_in_turns(calls, turns)
    measured = {x: (statistics.median(taken[x]), gpu_peak_bytes(calls[x]) if ON_GPU else 0) for x in sources}
    return "{} {}".format(*options["size"]), measured


def build_call(source: str, *, size: Size, batch_size: int, training: bool, bf16: bool) -> tuple[Call, Size]:
    """Return a call of a saved model on random images or texts, and their size: by default the model's own."""
    name = (load(AutoConfig, source).architectures or [""])[0]
    named = getattr(sys.modules["transformers"], name, None)  # AFT's classes, too
    kind = named if isinstance(named, type) and issubclass(named, PreTrainedModel) else AutoModel
    model = load(kind, source, dtype="float32").to("cuda" if ON_GPU else "cpu")
    config, usual = model.config, {"interpolate_pos_encoding": True, "use_cache": False}
    options = {name: usual[name] for name in usual.keys() & inspect.signature(model.forward).parameters}
    torch.manual_seed(0)
    unit = "px" if model.main_input_name == "pixel_values" else "tokens"
    if size and size[1] != unit:
        kinds = ("images", "--image-size", "text") if unit == "px" else ("text", "--length", "images")
        raise ValueError("it reads {}: give {}, and no models of {}".format(*kinds))
    if unit == "px":
        number = size[0] if size else max(pair(getattr(config, "image_size", 224)))
        pixels = torch.randn(batch_size, getattr(config, "num_channels", 3), number, number, device=model.device)
        inputs = {"pixel_values": pixels}
    else:
        number = size[0] if size else min(getattr(config, "max_position_embeddings", None) or 1024, 1024)
        inputs = {"input_ids": torch.randint(config.vocab_size, (batch_size, number), device=model.device)}
    return model_call(model, inputs, training, bf16, **options), (number, unit)


def model_call(model: Any, inputs: Mapping[str, Any], training: bool, bf16: bool, **options: Any) -> Call:
    """A forward pass of a model or, in training, a step of AdamW on the mean square of its first output."""
    if not training:
        model.eval().to(torch.bfloat16 if bf16 else torch.float32)
        inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        return torch.inference_mode()(lambda: model(**inputs, **options))
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6, fused=True)

    def step() -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            output = model(**inputs, **options)[0]
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_in_turns(calls: Mapping[Any, Call], turns: int) -> dict[Any, list[float]]:
    """Time calls that take turns (A B A B ...), so that other load on the machine affects all of them.

    Each call is made twice before it is timed, but only once if it takes longer than `LONG_CALL`. Returns the seconds
    of each timed call by the key of the call.
    """
    for call in [call for call in calls.values() if _seconds(call) <= LONG_CALL]:
        call()
    rounds = [{name: _seconds(call) for name, call in calls.items()} for _ in range(turns)]
    return {name: [each[name] for each in rounds] for name in calls}


def _seconds(call: Call) -> float:
    from torch.utils.benchmark import timer  # waits for the GPU; slow to import

    started = timer()
    call()
    return timer() - started


def keep_freed_memory() -> None:
    """Make the allocator of glibc keep freed memory. Otherwise large tensors may get new pages, which the system
    clears: a training step takes up to 1.2 times as long. The peak memory of this process then means nothing.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-1, -1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


def gpu_peak_bytes(call: Call) -> int:
    """Bytes in use on the GPU at the peak of a call, beyond those in use before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def machine() -> str:
    """The device that models run on, and on a CPU the number of threads."""
    if ON_GPU:
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
