"""Processes that hold shards of sequences, or rows of images, compute what one process with the whole computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from runs import FSDP2, assert_same_run, bytes_recipe, finish, launch, results_of, run, start, wait_for
from tiny_models import image_model, language_model, vit_model
from torch import distributed
from torch.utils.data import DataLoader
from transformers import DynamicCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from aft_hf import (
    AFTBackbone,
    AFTConv,
    AFTForCausalLM,
    AFTLocal,
    AFTSimple,
    caching_aft,
    context_parallel,
    local_shard,
    mixers_aft,
    modeling_aft,
)
from aft_hf.parallel import SequenceShard
from aft_hf.training.context_parallelism import ContextParallelGroup
from aft_hf.training.recipe import build_recipe


TYPES = ("simple", "alibi", "local", "conv")
LENGTH, BATCH = 45, 3  # 45 is not divisible by 2 or 4
WINDOW, PATCH, KERNEL = 7, 2, 5
Case = tuple[Any, dict[str, torch.Tensor]]  # a model and its whole inputs


def with_large_keys(model: Any) -> Any:
    """Give the keys of a model a large size and a large offset."""
    with torch.no_grad():
        for layer in model.aft.layers:
            layer.mixer.k_proj.weight *= 30
            layer.mixer.k_proj.bias += 200
    return model


def build_model(aft_type: str | list[str], **options: Any) -> AFTForCausalLM:
    sizes = {"hidden_size": 16, "num_heads": 2, "vocab_size": 16, "max_position_embeddings": 64}
    sizes |= {"kernel_size": WINDOW, "window_size": WINDOW, "initializer_range": 0.3}
    return language_model(aft_type, **(sizes | options))


def build_inputs(kind: str) -> dict[str, torch.Tensor]:
    """Build whole rows: plain, with padding at both ends and inside, with documents across shards, or with both."""
    tokens = torch.randint(0, 16, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "short":  # shards of one or two tokens: a window spans several shards
        inputs = {name: x[:, :6] for name, x in inputs.items()}
    if kind in ("padding", "both"):
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[0, :13], mask[1, 40:], mask[1, 20:24], mask[2, 8:40] = 0, 0, 0, 0
        inputs["attention_mask"], inputs["labels"] = mask, inputs["labels"].masked_fill(mask == 0, -100)
    if kind in ("zeros", "positions"):  # the positions of one document, with zeros at padding
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        if kind == "zeros":
            mask[0, 3], mask[1, 20:24], mask[2, :14] = 0, 0, 0
            inputs["attention_mask"], inputs["labels"] = mask, inputs["labels"].masked_fill(mask == 0, -100)
        inputs["position_ids"] = (mask.cumsum(1) - 1) * mask
    if kind == "shifted":
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    if kind in ("documents", "both"):
        starts = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        starts[:, 0] = True
        starts[0, [5, 23, 24]], starts[1, 12], starts[2, 30] = True, True, True
        inputs["position_ids"] = positions_of_documents(starts)
    return inputs


def positions_of_documents(starts: torch.Tensor) -> torch.Tensor:
    places = torch.arange(starts.shape[1])
    return places - torch.where(starts, places, 0).cummax(1).values


def text(aft_type: str | list[str], kind: str = "plain", **options: Any) -> Case:
    return build_model(aft_type, **options), build_inputs(kind)


def model_of_images(rows: int, columns: int, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_heads": 2, "num_labels": 5, "kernel_size": KERNEL, "use_cls_token": False}
    sizes |= {"patch_size": PATCH, "image_size": [rows * PATCH, columns * PATCH], "initializer_range": 0.3}
    return image_model(**(sizes | options))


def image(rows: int = 11, columns: int = 3, **options: Any) -> Case:
    pixels = torch.randn(BATCH, 3, rows * PATCH, columns * PATCH, generator=torch.Generator().manual_seed(1))
    return model_of_images(rows, columns, **options), {"pixel_values": pixels, "labels": torch.arange(BATCH)}


def checkpointed(build: Callable[..., Case], *arguments: Any) -> Case:
    model, inputs = build(*arguments)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model, inputs


CASES: dict[str, Callable[[], Case]] = {
    f"{aft_type}-{kind}": partial(text, aft_type, kind)
    for aft_type in TYPES
    for kind in ("plain", "short", "padding", "both")
}
CASES |= {
    "local-documents": partial(text, "local", "documents"),
    "local-zeros at padding": partial(text, "local", "zeros"),
    "alibi-shifted labels": partial(text, "alibi", "shifted"),
    "local-window alone": partial(text, "local", "both", global_connectivity=False),
    "conv-window alone": partial(text, "conv", "documents", global_connectivity=False),
    "local-table": partial(text, "local", "padding", position_bias_dim=None),
    "local-wide": partial(text, "local", window_size=60),
    "conv-selected": partial(text, "conv", position_bias_selection="gumbel"),
    "conv-entropy": partial(text, "conv", "padding", position_bias_entropy_weight=0.1),
    "mixed-reference": partial(text, ["simple", "local"], "both", mixing_implementation="reference"),
    "local-checkpointing": partial(checkpointed, text, "local"),
    "images": image,
    "images, shards shorter than the reach of a kernel": partial(image, rows=5, kernel_size=7),
    "images, a kernel that reaches the whole image from everywhere": partial(image, rows=6, kernel_size=11),
    "images, a kernel of one position": partial(image, kernel_size=1),
    "images, one column": partial(image, columns=1),
    "images, position embeddings": partial(image, use_position_embeddings=True),
    "images, window alone": partial(image, global_connectivity=False),
    "images, selected": partial(image, position_bias_selection="gumbel"),
    "images, entropy": partial(image, position_bias_entropy_weight=0.1),
    "images, simple and conv": partial(image, aft_type=["simple", "conv"]),
    "images, reference": partial(image, mixing_implementation="reference"),
    "images, checkpointing": partial(checkpointed, image),
}
HOSTILE = {aft_type: partial(text, aft_type) for aft_type in TYPES} | {"images": image}  # with large keys


def packed_and_padded(seed: int) -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    """Return a model, rows with random padding and documents, and random lengths of 2 shards."""
    random = torch.Generator().manual_seed(seed)
    length, options = 5 + seed % 7, {"use_position_embeddings": bool(seed % 2), "window_size": 3, "kernel_size": 3}
    model = build_model(TYPES[seed // 2 % 4], **options)
    tokens = torch.randint(0, 16, (BATCH, length), generator=random)
    mask, starts = (torch.rand(BATCH, length, generator=random) < share for share in (0.7, 0.3))
    inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": mask.long()}
    inputs["position_ids"] = positions_of_documents(starts)
    cut = int(torch.randint(1, length, (), generator=random))
    return model, inputs, [cut, length - cut]


def shard_that_begins_with_padding_of_a_document() -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    inputs = {"input_ids": torch.arange(7)[None], "labels": torch.arange(7)[None]}
    inputs["attention_mask"] = torch.tensor([[0, 0, 0, 1, 0, 0, 1]])
    inputs["position_ids"] = torch.tensor([[0, 0, 0, 1, 2, 3, 0]])
    return build_model("simple", use_position_embeddings=True), inputs, [4, 3]


# Cases with the lengths of 2 shards.
CUTS = [shard_that_begins_with_padding_of_a_document, *(partial(packed_and_padded, seed) for seed in range(24))]


def whole(x: torch.Tensor, group: Any, dim: int = 1) -> torch.Tensor:
    """Gather the shards of all processes and concatenate them."""
    shards = [None] * group.size()
    distributed.all_gather_object(shards, x, group)
    return torch.cat(shards, dim)


def averaged_gradients(model: torch.nn.Module, group: Any = None) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter name, averaged over the processes."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if group is not None:
        for gradient in gradients.values():
            distributed.all_reduce(gradient, group=group)
            gradient /= group.size()
    return gradients


def outcome(
    model: Any, inputs: dict[str, torch.Tensor], group: Any = None, lengths: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """Return loss, outputs and gradients of parameters, embeddings and pixels, on the whole or on shards, of `lengths`
    if given.
    """
    given, of_images = dict(inputs), "pixel_values" in inputs
    if lengths is not None:
        given = {name: x.split(lengths, 1)[group.rank()] for name, x in inputs.items()}
    elif group is not None:
        for name in ["pixel_values"] if of_images else inputs:
            given[name] = local_shard(inputs[name], group, **({"dim": 2, "unit": PATCH} if of_images else {}))
    if of_images:
        x = given["pixel_values"] = given["pixel_values"].clone().requires_grad_()
    else:
        x = given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids")).detach().requires_grad_()
        given["use_cache"] = False
    with nullcontext() if group is None else context_parallel(model, group):
        output = model(**given, output_hidden_states=True)
    output.loss.backward()
    mask = given.get("attention_mask", torch.ones(1, 1)).bool()[..., None]
    states = (output.hidden_states[-1] if of_images else output.logits * mask).detach()
    actual = {"states": states, "inputs": x.grad}
    if group is not None:
        actual = {"states": whole(states, group), "inputs": whole(x.grad, group, 1 + of_images) / group.size()}
    if of_images:  # every process has the logits of the whole image
        actual["logits"] = output.logits.detach()
    return actual | {"loss": output.loss.detach()} | averaged_gradients(model, group)


def outcome_of_large_keys(case: str, group: Any = None) -> dict[str, torch.Tensor]:
    model, inputs = HOSTILE[case]()
    return outcome(with_large_keys(model), inputs, group)


def exact_outcome(case: str) -> tuple[dict[str, torch.Tensor], float]:
    """Return the outcome in float64, and the relative error to expect in float32.

    The relative error of exp(K) is the rounding error of K. In each layer K is rounded twice: when it is computed, and
    when w is added.
    """
    (model, inputs), largest = HOSTILE[case](), []
    for layer in with_large_keys(model).double().aft.layers:
        layer.mixer.k_proj.register_forward_hook(
            lambda module, given, key: largest.append(float(key.detach().abs().max()))
        )
    return outcome(model, inputs), sum(2 * key * 2**-24 for key in largest)


@torch.no_grad()
def loss_of_another_model(group: Any) -> torch.Tensor:
    model, inputs = text("local")
    with context_parallel(build_model("local"), group):
        return model(**inputs).loss


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that are passed to each collective within the context, by its name."""
    counts: dict[str, int] = {}
    originals = {name: getattr(distributed, name) for name in ("all_gather", "all_to_all_single", "all_reduce")}

    def counting(name: str) -> Any:
        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            given = first if name == "all_reduce" else arguments[0]
            counts[name] = counts.get(name, 0) + given.nbytes
            return originals[name](first, *arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(distributed, name, counting(name))
        yield counts


def bytes_of_a_layer(kind: str, length: int, group: Any) -> dict[str, int]:
    """Count the bytes that this process sends in the forward and backward pass of one layer on one row or image."""
    model = image()[0] if kind == "images" else build_model(kind, max_position_embeddings=2048)
    grid = {"grid_size": (length // 3, 3)} if kind == "images" else {}
    x = torch.randn(1, length, 16, requires_grad=True)
    shard = SequenceShard(group, 1, length, x.device, **({"columns": 3} if grid else {}))
    _ = shard.from_the_end if grid else None  # exchanged once for all layers, as the shard itself
    with counted_bytes() as counts:
        model.aft.layers[0].mixer(x, visibility=shard, **grid).sum().backward()
    return counts


@torch.no_grad()
def feature_map(group: Any = None) -> torch.Tensor:
    """Return the feature map of a grid too large for a table of all pairs, from shards of very different heights."""
    model, pixels = model_of_images(64, 50, head=AFTBackbone), torch.randn(1, 3, 64 * PATCH, 50 * PATCH)
    if group is None:
        return model(pixels).feature_maps[0]
    first = 64 - 3 * (group.size() - 1)
    heights = [first * PATCH] + [3 * PATCH] * (group.size() - 1)
    with context_parallel(model, group):
        return whole(model(pixels.split(heights, 2)[group.rank()]).feature_maps[0], group, 2)


MIXERS = {
    "AFTConv": lambda: AFTConv(
        16, 2, KERNEL, spatial_dims=1, position_bias_reparameterized=False, position_bias_init_std=1.0
    ),
    "AFTSimple": lambda: AFTSimple(16),
}


@torch.no_grad()
def sequence_seen_from_both_sides(name: str, group: Any = None) -> torch.Tensor:
    torch.manual_seed(0)
    mixer, x = MIXERS[name](), torch.randn(BATCH, 37, 16)
    if group is None:
        return mixer(x)
    shard = local_shard(x, group)
    return whole(mixer(shard, visibility=SequenceShard(group, BATCH, shard.shape[1], x.device)), group)


PROMPTS = [(t, kind) for t in TYPES for kind in ("plain", "short", "padding", "zeros", "positions", "static")]


@torch.no_grad()
def generated(aft_type: str, kind: str, group: Any = None) -> torch.Tensor:
    """Return logits of tokens after a prompt, one or several at a time; one process or a group reads the prompt."""
    model, inputs = text(aft_type, kind)
    labels = inputs.pop("labels")
    given = {name: x if group is None else local_shard(x, group) for name, x in inputs.items()}
    given["cache"] = model.aft.new_cache(64) if kind == "static" else None
    with nullcontext() if group is None else context_parallel(model, group):
        cache = model(**given, use_cache=True).cache
    assert cache.get_seq_length() == labels.shape[1]
    mask = inputs.get("attention_mask", torch.ones_like(labels))
    actual = []
    for length in (1, 4, 1, 1):
        tokens = labels[:, :length].clamp_min(0)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        actual.append(model(tokens, attention_mask=mask, cache=cache, use_cache=True).logits)
    return torch.cat(actual, 1)


TOKENS, IMAGES = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 3, 2 * PATCH, 3 * PATCH)


def within(group: Any, model: Any, *given: Any, **inputs: Any) -> Any:
    with context_parallel(model, group):
        return model(*given, **inputs)


@torch.no_grad()
def logits_in_bfloat16(group: Any) -> torch.Tensor:
    """Return the logits of images, of which each process must have the same bits."""
    model, inputs = image()
    return within(
        group, model.bfloat16(), local_shard(inputs["pixel_values"].bfloat16(), group, dim=2, unit=PATCH)
    ).logits


def generate_within(group: Any) -> None:
    model = build_model("conv")
    with context_parallel(model, group):
        model.generate(TOKENS, max_new_tokens=2)


def continued(group: Any) -> None:
    model = build_model("conv")
    within(group, model, TOKENS, cache=model(TOKENS, use_cache=True).cache)


def bidirectional(mixer: Any, group: Any, *real: torch.Tensor) -> None:
    mixer(torch.randn(1, 8, 16), visibility=SequenceShard(group, 1, 8, torch.device("cpu"), *real))


# Calls with a shard that must raise an error in some process, by part of the message.
WRONG: dict[str, Callable[[Any], Any]] = {
    "causal AFTFull cannot take": lambda group: within(group, build_model("full"), TOKENS),
    "12 tokens is longer than max_position_embeddings=10": lambda group: within(
        group,
        build_model("local", max_position_embeddings=10),
        local_shard(torch.zeros(1, 12, dtype=torch.long), group),
    ),
    "must be the padding mask of the shard, (1, 8)": lambda group: within(
        group, build_model("conv"), TOKENS, attention_mask=torch.ones(1, 9)
    ),
    "must continue those of the shard before it": lambda group: within(
        group, build_model("conv"), TOKENS, position_ids=torch.arange(3, 11)[None]
    ),
    "do not continue one": continued,
    "1 tokens cannot be divided into": lambda group: local_shard(TOKENS[:, :1], group),
}
WRONG_IN_ALL: dict[str, Callable[[Any], Any]] = {  # in every process
    "cache must be this model's AFTCache, got DynamicCache": lambda group: within(
        group, build_model("conv"), TOKENS, cache=DynamicCache()
    ),
    "AFTCache, got AFTCache": lambda group: within(
        group, build_model("conv"), TOKENS, cache=build_model("conv", num_hidden_layers=1).aft.new_cache()
    ),
    "gradient checkpointing takes no cache": lambda group: within(
        group, checkpointed(text, "conv")[0], TOKENS, cache=build_model("conv").aft.new_cache()
    ),
    "generate does not run within context_parallel": generate_within,
    "no class token and no attention_mask, got a class token": lambda group: within(
        group, image(aft_type="simple", use_cls_token=True)[0], IMAGES
    ),
    "no class token and no attention_mask, got an attention_mask": lambda group: within(
        group, image()[0].aft, pixel_values=IMAGES, attention_mask=torch.ones(1, 6)
    ),
    "give mask == 0": lambda group: within(
        group, build_model("conv"), TOKENS, attention_mask=torch.zeros(1, 8).index_fill(1, torch.tensor(0), -torch.inf)
    ),
    "a bidirectional AFTLocal cannot take": lambda group: bidirectional(AFTLocal(16, 64, 5), group),
    "has no padding and no documents": lambda group: bidirectional(AFTSimple(16), group, torch.ones(1, 8).bool()),
    "do not match image_size=22 x 6": lambda group: within(group, image(use_position_embeddings=True)[0], IMAGES),
    "the processes have rows of [2, 3": lambda group: within(
        group, image()[0], IMAGES[..., : (2 + group.rank() % 2) * PATCH]
    ),
    "is not a multiple of 4": lambda group: local_shard(torch.zeros(1, 3, 18, 6), group, dim=2, unit=4),
}


def error_of(call: Callable[[Any], Any], group: Any) -> str:
    """Return the message of the ValueError that a call raises, "" if it raises none."""
    try:
        call(group)
    except ValueError as error:
        return str(error)
    return ""


def averages_with_padding_of_nan(group: Any) -> torch.Tensor:
    """Return the averages of all tokens, in shards of 3 tokens, where those of padding are NaN."""
    torch.manual_seed(0)
    mixer, x, mask = AFTSimple(8, causal=True, use_output_projection=False), torch.randn(2, 12, 8), torch.ones(2, 12)
    mask[0, :5], mask[1, 4:7], mask[1, 10] = 0, 0, 0
    x = x.masked_fill(mask.unsqueeze(-1) == 0, torch.nan)
    if group is None:
        return mixer(x, attention_mask=mask).detach()
    own, padding = (part.chunk(4, 1)[group.rank()] for part in (x, mask))
    return mixer(own, visibility=SequenceShard(group, 2, 3, x.device, padding.bool())).detach()


def compute(directory: Path) -> None:
    """Compute in each process all results that the tests compare."""
    distributed.init_process_group("gloo")
    group, rank = distributed.group.WORLD, distributed.get_rank()
    actual: dict[str, Any] = {name: outcome(*case(), group) for name, case in CASES.items()}
    pairs = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    cuts = [case() for case in CUTS]
    actual["cuts"] = [outcome(model, inputs, pairs[rank // 2], lengths) for model, inputs, lengths in cuts]
    actual["another model"] = loss_of_another_model(group)
    actual["hostile"] = {name: outcome_of_large_keys(name, group) for name in HOSTILE}
    actual["bytes"] = {(t, length): bytes_of_a_layer(t, length, group) for t in HOSTILE for length in (51, 300)}
    actual["generated"] = {(t, kind): generated(t, kind, group) for t, kind in PROMPTS}
    actual["feature map"] = feature_map(group)
    actual["sequences"] = {name: sequence_seen_from_both_sides(name, group) for name in MIXERS}
    actual["nan"] = averages_with_padding_of_nan(group)
    actual["bfloat16"] = logits_in_bfloat16(group)
    actual["empty"] = within(group, build_model("local"), TOKENS[:0]).logits.detach()
    actual["no images"] = within(group, image()[0], IMAGES[:0]).logits.detach()
    actual["outside"] = error_of(partial(local_shard, TOKENS), pairs[1 - rank // 2])
    actual["errors"] = {name: error_of(call, group) for name, call in (WRONG | WRONG_IN_ALL).items()}
    torch.save(actual, directory / f"{rank}.pt")
    distributed.barrier()  # no process leaves while another is still receiving
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def actual(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of each of 4 processes."""
    directory = tmp_path_factory.mktemp("shards")
    assert finish(launch(compute, (directory,), 4)) == [0] * 4
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(4)]


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((actual[name] - wanted).abs().max())
        assert error <= bound * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize("case", CASES)
def test_shards_have_the_outputs_the_loss_and_the_gradients_of_the_whole(actual, case):
    expected = outcome(*CASES[case]())
    for process in actual:
        assert_near(process[case], expected, 1e-5)  # sums over tokens in another order


@pytest.mark.parametrize("index", range(len(CUTS)))
def test_padding_and_documents_may_lie_anywhere_at_a_cut(actual, index):
    expected = outcome(*CUTS[index]()[:2])
    for process in actual:
        assert_near(process["cuts"][index], expected, 1e-5)


def test_nan_in_padding_of_a_shard_gives_averages_of_0(actual):
    averages = torch.cat([process["nan"] for process in actual], 1)
    torch.testing.assert_close(averages, averages_with_padding_of_nan(None))
    assert averages.isfinite().all()


def test_another_model_takes_whole_sequences_within_the_context(actual):
    model, inputs = text("local")
    assert all(process["another model"] == model(**inputs).loss for process in actual)


@pytest.mark.parametrize("case", HOSTILE)
def test_shards_of_large_keys_are_as_exact_as_float32_knows_them(actual, case):
    exact, bound = exact_outcome(case)
    for result in [outcome_of_large_keys(case), *(process["hostile"][case] for process in actual)]:
        assert_near(result, exact, bound)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_layer_sends_one_state_and_one_window_each_way_whatever_the_length(actual, kind):
    width, keys = 16, 2 if kind in ("conv", "images") else 16
    of_images = 1 + (kind == "images")  # sums and their gradients go upwards and downwards
    state = 4 * (width + 2 * keys)
    window = {"local": WINDOW - 1, "conv": WINDOW - 1, "images": 2 * 3 * (KERNEL // 2)}.get(kind, 0)
    for rank, process in enumerate(actual):
        short, long = (process["bytes"][kind, length] for length in (51, 300))
        assert short == long
        assert long["all_gather"] == 2 * of_images * state  # sums in the forward pass, gradients in the backward pass
        # The last process sends keys and values to no other process, the first one sends gradients to none.
        sent = (rank < len(actual) - 1) + (rank > 0)
        assert long.get("all_to_all_single", 0) == sent * 4 * (width + keys) * window
        assert "all_reduce" not in long


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_in_shards_leaves_the_state_of_generation_in_every_process(actual, prompt):
    expected = generated(*prompt)
    for process in actual:
        torch.testing.assert_close(process["generated"][prompt], expected, rtol=1e-5, atol=1e-5)


def test_backbones_and_bidirectional_mixers_of_sequences_take_shards(actual):
    sequences, expected = {name: sequence_seen_from_both_sides(name) for name in MIXERS}, feature_map()
    for process in actual:
        torch.testing.assert_close(process["feature map"], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(process["sequences"], sequences, rtol=1e-5, atol=1e-5)


def test_all_processes_have_the_same_logits_of_images_in_bfloat16(actual):
    assert all(torch.equal(process["bfloat16"], actual[0]["bfloat16"]) for process in actual)
    model, inputs = image()
    expected = model(inputs["pixel_values"]).logits
    torch.testing.assert_close(actual[0]["bfloat16"].float(), expected, rtol=0.1, atol=0.1)


def test_a_batch_of_no_rows_has_no_logits_and_a_process_outside_of_the_group_no_shard(actual):
    for process in actual:
        assert process["empty"].shape == (0, 8, 16) and process["no images"].shape == (0, 5)
        assert process["outside"] == "this process is not in the group of the shards"


@pytest.mark.parametrize("message", WRONG | WRONG_IN_ALL)
def test_what_a_shard_cannot_have_is_an_error_in_every_process_that_sees_it(actual, message):
    seen = [message in process["errors"][message] for process in actual]
    assert all(seen) if message in WRONG_IN_ALL else any(seen)


def test_a_model_whose_class_is_not_of_the_package_is_refused(tmp_path):
    build_model("simple").save_pretrained(tmp_path)
    own_code = get_class_from_dynamic_module("modeling_aft.AFTForCausalLM", str(tmp_path))
    model = own_code.from_pretrained(tmp_path)
    both = torch.nn.ModuleList([build_model("simple"), model.aft])
    for refused in (model, both, vit_model(), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="import aft_hf and load"), context_parallel(refused, None):
            pass


def test_the_package_changes_no_class_of_a_model():
    with context_parallel(build_model("local"), None):
        for module in (modeling_aft, mixers_aft, caching_aft):
            for kind in vars(module).values():
                for method in vars(kind).values() if isinstance(kind, type) else ():
                    place = getattr(method, "__globals__", {}).get("__name__", "")
                    assert not place.startswith("aft_hf.") or place.endswith("_aft"), method


# --------------------------------------------------------------------------------------------------------- Accelerate


def rows_of_tokens() -> torch.Tensor:
    return torch.randint(0, 16, (4, LENGTH), generator=torch.Generator().manual_seed(2))


def step_with_accelerate(directory: Path) -> None:
    """Take an Accelerate step on a mesh of 2 x 2 processes: batches along one dimension, shards along the other."""
    # Accelerate shards on accelerators only; here it must take the CPU processes for accelerators.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=2)
    )
    model = build_model(["local", "conv"], position_bias_entropy_weight=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows_of_tokens(), batch_size=2))
    mesh = accelerator.torch_device_mesh["cp"]
    (batch,) = batches
    shard = local_shard(batch, mesh)
    with context_parallel(model, mesh):
        loss = model(input_ids=shard, labels=shard, use_cache=False).loss
    accelerator.backward(loss)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    actual = {"batch": batch, "loss": accelerator.reduce(loss.detach(), "mean")} | gradients
    torch.save(actual, directory / f"{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()  # no process leaves while another is still receiving
    accelerator.end_training()


def test_a_loop_on_accelerate_takes_the_shards_of_its_mesh(tmp_path):
    assert finish(launch(step_with_accelerate, (tmp_path,), 4)) == [0] * 4
    model, rows = build_model(["local", "conv"], position_bias_entropy_weight=0.1), rows_of_tokens()
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    for rank in range(4):
        actual = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(actual["batch"], rows[:2] if rank < 2 else rows[2:])
        torch.testing.assert_close(actual["loss"], loss.detach(), rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- training


def recipe_without_dropout(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe with two layer types, and no dropout, since shards draw other random numbers than whole rows."""
    values = bytes_recipe(directory)
    values["model"] |= {"hidden_dropout_prob": 0.0, "aft_type": ["local", "alibi"]}
    values["data"] |= {"seq_len": 17}
    return values | changes


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """The results of the recipe in one process."""
    return run(recipe_without_dropout(tmp_path_factory.mktemp("alone")))


def test_a_killed_run_of_shards_and_of_batches_goes_on_as_the_run_of_one_process(tmp_path, alone):
    values = recipe_without_dropout(tmp_path, context_parallel=2)
    processes = start(values, 4)
    wait_for(Path(values["output_dir"]) / "checkpoints" / "step-000000003", processes[0])
    for process in processes:
        process.kill()
    finish(processes)
    assert finish(start(values, 4)) == [0] * 4
    assert_same_run(results_of(values), alone)


def test_shards_go_with_fsdp2_and_a_run_goes_on_without_them(tmp_path, alone):
    values = recipe_without_dropout(tmp_path)
    assert finish(start(values | {"steps": 6, "context_parallel": 2}, 2, **FSDP2)) == [0, 0]
    assert finish(start(values, 2, **FSDP2)) == [0, 0]
    assert_same_run(results_of(values), alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel": 3}, "context_parallel=3 does not divide the 2 processes"),
        ({"task": "images"}, "needs compile=False and a task of sequences, not images"),
    ],
)
def test_a_recipe_that_cannot_take_shards_is_an_error(tmp_path, changes, message):
    recipe = build_recipe(recipe_without_dropout(tmp_path, context_parallel=2)).model_copy(update=changes)
    with pytest.raises(ValueError, match=message):
        ContextParallelGroup(recipe, SimpleNamespace(num_processes=2, process_index=0))


def test_a_model_that_cannot_take_shards_is_an_error_before_training(tmp_path):
    values = recipe_without_dropout(tmp_path, context_parallel=2)
    values["model"] |= {"aft_type": "full"}
    assert finish(start(values, 2)) == [1, 1]
    message = (tmp_path / "run.error").read_text()
    assert "needs a model whose layers are of the aft_type simple, alibi, local or conv, got aft with full" in message
