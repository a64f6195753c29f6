"""Processes that hold rows of images compute what one process with the whole images computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from collectives import averaged_gradients, counted_bytes, error_of, exact_outcome, whole
from runs import finish, launch
from torch import distributed

from aft_hf import (
    AFTBackbone,
    AFTConfig,
    AFTConv,
    AFTForImageClassification,
    AFTLocal,
    AFTSimple,
    context_parallel,
    local_shard,
)
from aft_hf.parallel import SequenceShard


BATCH, PATCH, KERNEL = 2, 2, 5


def build_config(rows: int, columns: int, **options: Any) -> AFTConfig:
    return AFTConfig(
        modality="image",
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=2,
        patch_size=PATCH,
        image_size=[rows * PATCH, columns * PATCH],
        num_labels=5,
        initializer_range=0.3,
        **{"aft_type": "conv", "kernel_size": KERNEL, "use_cls_token": False} | options,
    )


def build_case(rows: int = 11, columns: int = 3, keys: str = "moderate", **options: Any) -> tuple[Any, dict]:
    """Build a classifier whose layers differ from a plain average, and whole images with their classes."""
    torch.manual_seed(0)
    model = AFTForImageClassification(build_config(rows, columns, **options)).eval()
    with torch.no_grad():
        for layer in model.aft.layers:
            if isinstance(layer.mixer, AFTConv):
                layer.mixer.kernel_scale += 1.5
            if keys == "hostile":
                layer.mixer.k_proj.weight *= 30
                layer.mixer.k_proj.bias += 200
    pixels = torch.randn(BATCH, 3, rows * PATCH, columns * PATCH, generator=torch.Generator().manual_seed(1))
    return model, {"pixel_values": pixels, "labels": torch.arange(BATCH)}


def checkpointed() -> tuple[Any, dict]:
    model, inputs = build_case()
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model, inputs


CASES: dict[str, Callable[[], tuple[Any, dict]]] = {
    "conv": build_case,
    "shards shorter than the reach of a kernel": lambda: build_case(rows=5, kernel_size=7),
    "a kernel that reaches the whole image from everywhere": lambda: build_case(rows=6, kernel_size=11),
    "a kernel of one position": lambda: build_case(kernel_size=1),
    "one column": lambda: build_case(columns=1),
    "position embeddings": lambda: build_case(use_position_embeddings=True),
    "window alone": lambda: build_case(global_connectivity=False),
    "selected": lambda: build_case(position_bias_selection="gumbel"),
    "entropy": lambda: build_case(position_bias_entropy_weight=0.1),
    "simple and conv": lambda: build_case(aft_type=["simple", "conv"]),
    "reference": lambda: build_case(mixing_implementation="reference"),
    "checkpointing": checkpointed,
}


def outcome(model: AFTForImageClassification, inputs: dict[str, torch.Tensor], group: Any = None) -> dict:
    """Return loss, logits, hidden states and gradients of parameters and pixels, on whole images or on their rows."""
    pixels = inputs["pixel_values"]
    pixels = (pixels if group is None else rows_of(pixels, group)).clone().requires_grad_()
    if group is None:
        output = model(pixels, labels=inputs["labels"], output_hidden_states=True)
    else:
        with context_parallel(group):
            output = model(pixels, labels=inputs["labels"], output_hidden_states=True)
    output.loss.backward()
    hidden, gradient = output.hidden_states[-1].detach(), pixels.grad
    if group is not None:
        hidden, gradient = whole(hidden, group), whole(gradient, group, 2) / group.size()
    found = {"logits": output.logits.detach(), "hidden": hidden, "pixels": gradient, "loss": output.loss.detach()}
    return found | averaged_gradients(model, group)


def rows_of(pixels: torch.Tensor, group: Any) -> torch.Tensor:
    return local_shard(pixels, group, dim=2, unit=PATCH)


@torch.no_grad()
def feature_map(group: Any = None) -> torch.Tensor:
    """Return the feature map of a grid too large for a table of all pairs, from shards of very different heights."""
    torch.manual_seed(0)
    model = AFTBackbone(build_config(64, 50)).eval()
    model.layers[0].mixer.kernel_scale += 1.5
    pixels = torch.randn(1, 3, 64 * PATCH, 50 * PATCH)
    if group is None:
        return model(pixels).feature_maps[0]
    first = 64 - 3 * (group.size() - 1)
    heights = [first * PATCH] + [3 * PATCH] * (group.size() - 1)
    with context_parallel(group):
        return whole(model(pixels.split(heights, 2)[group.rank()]).feature_maps[0], group, 2)


MIXERS = {
    "AFTConv": lambda: AFTConv(16, 2, KERNEL, spatial_dims=1, reparameterized=False, position_bias_init_std=1.0),
    "AFTSimple": lambda: AFTSimple(16),
}


@torch.no_grad()
def sequence_seen_from_both_sides(name: str, group: Any = None) -> torch.Tensor:
    torch.manual_seed(0)
    mixer, x = MIXERS[name](), torch.randn(BATCH, 37, 16)
    if group is None:
        return mixer(x)
    shard = local_shard(x, group)
    return whole(mixer(shard, documents=SequenceShard(group, BATCH, shard.shape[1], x.device)), group)


def bytes_of_a_layer(rows: int, group: Any) -> dict[str, int]:
    """Count the bytes that this process sends in the forward and backward pass of one layer on one image."""
    mixer = build_case()[0].aft.layers[0].mixer
    x = torch.randn(1, rows * 3, 16, requires_grad=True)
    shard = SequenceShard(group, 1, rows * 3, x.device, columns=3)
    _ = shard.from_the_end  # both are exchanged once for all layers
    with counted_bytes() as counts:
        mixer(x, documents=shard, grid_size=(rows, 3)).sum().backward()
    return counts


IMAGES = torch.zeros(1, 3, 2 * PATCH, 3 * PATCH)


def of_different_widths(group: Any) -> None:
    build_case()[0](IMAGES[..., : (2 + group.rank() % 2) * PATCH])


# Calls with a shard that must raise an error in every process, by part of the message.
WRONG = {
    "no class token and no attention_mask, got a class token": lambda group: build_case(
        aft_type="simple", use_cls_token=True
    )[0](IMAGES),
    "no class token and no attention_mask, got an attention_mask": lambda group: build_case()[0].aft(
        pixel_values=IMAGES, attention_mask=torch.ones(1, 6)
    ),
    "a bidirectional AFTLocal cannot take": lambda group: AFTLocal(16, 64, 5)(
        torch.randn(1, 8, 16), documents=SequenceShard(group, 1, 8, torch.device("cpu"))
    ),
    "has no padding and no documents": lambda group: AFTSimple(16)(
        torch.randn(1, 8, 16), documents=SequenceShard(group, 1, 8, torch.device("cpu"), torch.ones(1, 8).bool())
    ),
    "do not match image_size=22 x 6": lambda group: build_case(use_position_embeddings=True)[0](IMAGES),
    "the processes have rows of [2, 3": of_different_widths,
    "is not a multiple of 4": lambda group: local_shard(torch.zeros(1, 3, 18, 6), group, dim=2, unit=4),
    "1 units of 4 cannot be divided into": lambda group: local_shard(torch.zeros(1, 3, 4, 6), group, dim=2, unit=4),
}


def compute(directory: Path) -> None:
    """Compute in each process all results that the tests compare."""
    distributed.init_process_group("gloo")
    group, rank = distributed.group.WORLD, distributed.get_rank()
    found: dict[str, Any] = {name: outcome(*case(), group) for name, case in CASES.items()}
    found["hostile"] = outcome(*build_case(keys="hostile"), group)
    found["feature map"] = feature_map(group)
    found["sequences"] = {name: sequence_seen_from_both_sides(name, group) for name in MIXERS}
    found["bytes"] = {rows: bytes_of_a_layer(rows, group) for rows in (4, 40)}
    found["errors"] = {name: error_of(call, group) for name, call in WRONG.items()}
    torch.save(found, directory / f"{rank}.pt")
    distributed.barrier()  # no process leaves while another is still receiving
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of each of 4 processes."""
    directory = tmp_path_factory.mktemp("rows")
    assert finish(launch(compute, (directory,), 4)) == [0] * 4
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_rows_have_the_outputs_the_loss_and_the_gradients_of_whole_images(found, case):
    expected = outcome(*CASES[case]())
    for process in found:
        assert process[case].keys() == expected.keys()
        for name, wanted in expected.items():  # sums over tokens in another order
            error = float((process[case][name] - wanted).abs().max())
            assert error <= 1e-5 * max(1.0, float(wanted.abs().max())), name


def test_rows_of_large_keys_are_as_exact_as_float32_knows_them(found):
    exact, bound = exact_outcome(outcome, *build_case(keys="hostile"))
    for process in found:
        for name, wanted in exact.items():
            error = float((process["hostile"][name] - wanted).abs().max())
            assert error <= bound * max(1.0, float(wanted.abs().max())), name


def test_a_backbone_gives_the_feature_maps_of_its_rows_whatever_their_number(found):
    expected = feature_map()
    for process in found:
        torch.testing.assert_close(process["feature map"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_of_sequences_seen_from_both_sides_take_shards(found, mixer):
    expected = sequence_seen_from_both_sides(mixer)
    for process in found:
        torch.testing.assert_close(process["sequences"][mixer], expected, rtol=1e-5, atol=1e-5)


def test_a_layer_sends_two_states_and_the_rows_beside_its_own_each_way_whatever_the_height(found):
    width, heads, columns = 16, 2, 3
    state, halo = 4 * (width + 2 * heads), 4 * (width + heads) * columns * (KERNEL // 2)
    for rank, process in enumerate(found):
        low, high = (process["bytes"][rows] for rows in (4, 40))
        assert low == high
        assert high["all_gather"] == 4 * state  # sums and their gradients, upwards and downwards
        # Inner processes have a neighbor above and below, the first and the last process have only one.
        neighbours = (rank < len(found) - 1) + (rank > 0)
        assert high["all_to_all_single"] == 2 * neighbours * halo
        assert "all_reduce" not in high


@pytest.mark.parametrize("message", WRONG)
def test_what_rows_cannot_have_is_an_error_in_every_process_that_sees_it(found, message):
    assert all(message in process["errors"][message] for process in found)
