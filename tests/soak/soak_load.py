"""Soak test of a long-running process: memory and CPU time per request stay flat, threads give the same results.

`make soak` runs it, `make test` does not. The environment variable REQUESTS sets the number of requests of each kind.
Default: 10,000.
"""

import gc
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from tiny_models import image_model, language_model
from torch import nn


REQUESTS = int(os.environ.get("REQUESTS", 10_000))
SIZES = {"hidden_size": 32, "num_heads": 4}
TYPES = ("local", "simple", "conv", "alibi", "full")


def text_models() -> list[nn.Module]:
    return [language_model(aft_type, max_position_embeddings=96, **SIZES) for aft_type in TYPES]


def text_request(models: list[nn.Module], number: int) -> torch.Tensor:
    """Generate with one of the models; the number determines the model, the prompt and the batch size."""
    model, draw = models[number % len(models)], random.Random(number)
    prompt = torch.tensor([[draw.randrange(1, 256) for _ in range(draw.randrange(1, 60))]] * draw.randrange(1, 4))
    return model.generate(prompt, max_new_tokens=draw.randrange(1, 8), do_sample=False, pad_token_id=0)


def image_request(model: nn.Module, number: int) -> torch.Tensor:
    """Return the logits of a batch; the number determines the batch size, the image size and the pixels."""
    draw = random.Random(number)
    shape = (draw.randrange(1, 4), 3, 4 * draw.randrange(1, 12), 4 * draw.randrange(1, 12))
    pixels = torch.rand(shape, generator=torch.Generator().manual_seed(number))
    with torch.inference_mode():
        return model(pixels).logits


def memory() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def serve(request: Callable[[int], torch.Tensor]) -> None:
    """Serve all requests, and check that memory and CPU time stay flat.

    The first tenth is a warm-up. Memory is compared before and after the other nine tenths, CPU time between the first
    and the last of the nine, which serve the same requests.
    """
    tenth = REQUESTS // 10
    for number in range(tenth):  # warm-up
        request(number)
    seconds, before = [], memory()
    for part in range(9):
        began = time.process_time()
        for number in range(tenth):
            request(number if part in (0, 8) else part * tenth + number)
        seconds.append(time.process_time() - began)
    grown = memory() - before
    print(f"{REQUESTS} requests: memory grew by {grown:.1f} MiB, last tenth / first {seconds[-1] / seconds[0]:.2f}")
    assert grown < 32  # MiB: allocators keep some pages; a leak of 4 KiB per request would be 35 MiB
    assert seconds[-1] < 1.5 * seconds[0]  # CPU time, which hardly depends on other processes


def test_generation_with_mixed_types_and_shapes_keeps_memory_and_time_flat():
    models = text_models()
    serve(lambda number: text_request(models, number))


def test_classification_of_mixed_image_shapes_keeps_memory_and_time_flat():
    model = image_model("conv", **SIZES)
    serve(lambda number: image_request(model, number))


def test_eight_threads_generate_the_same_tokens_as_one():
    models, numbers = text_models(), range(REQUESTS // 10)
    alone = [text_request(models, number) for number in numbers]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda number: text_request(models, number), numbers))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(alone, together))
