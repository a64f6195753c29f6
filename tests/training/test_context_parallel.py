"""Processes that hold shards of a sequence compute what one process with the whole sequence computes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from collectives import averaged_gradients, counted_bytes, error_of, exact_outcome, whole
from runs import FSDP2, assert_same_run, bytes_recipe, finish, launch, results_of, run, start, wait_for
from torch import distributed
from torch.utils.data import DataLoader

from aft_hf import AFTConfig, AFTForCausalLM, context_parallel, local_shard
from aft_hf.mixing_aft import Documents
from aft_hf.parallel import SequenceShard
from aft_hf.training.context_parallelism import ContextParallelGroup
from aft_hf.training.recipe import build_recipe


TYPES = ("simple", "alibi", "local", "conv")
LENGTH, BATCH = 45, 3  # 45 is not divisible by 2 or 4
WINDOW = 7


def build_model(aft_type: str, keys: str = "moderate", **options: Any) -> AFTForCausalLM:
    """Build a model whose layers differ from a plain average; "hostile" keys are large and have a large offset."""
    torch.manual_seed(0)
    config = AFTConfig(
        aft_type=aft_type,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=2,
        kernel_size=WINDOW,
        vocab_size=16,
        initializer_range=0.3,
        position_bias_init_std=0.7,
        **{"position_bias_dim": 4, "window_size": WINDOW, "max_position_embeddings": 64} | options,
    )
    model = AFTForCausalLM(config)
    with torch.no_grad():
        for layer in model.aft.layers:
            if aft_type == "conv":
                layer.mixer.kernel_scale += 1.5
            if keys == "hostile":
                layer.mixer.k_proj.weight *= 30
                layer.mixer.k_proj.bias += 200
    return model


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
    if kind in ("documents", "both"):
        starts = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        starts[:, 0] = True
        starts[0, [5, 23, 24]], starts[1, 12], starts[2, 30] = True, True, True
        inputs["position_ids"] = Documents(starts).positions()
    return inputs


def build_cases() -> dict[str, tuple[AFTForCausalLM, dict[str, torch.Tensor]]]:
    """Build models and whole rows, by the name of the case."""
    cases = {}
    for aft_type in TYPES:
        for kind in ("plain", "short", "padding", "documents", "both"):
            cases[f"{aft_type}-{kind}"] = build_model(aft_type), build_inputs(kind)
        cases[f"{aft_type}-hostile"] = build_model(aft_type, "hostile"), build_inputs("plain")
    hidden = {"global_connectivity": False}
    cases["local-window alone"] = build_model("local", **hidden), build_inputs("both")
    cases["conv-window alone"] = build_model("conv", **hidden), build_inputs("documents")
    cases["local-table"] = build_model("local", position_bias_dim=None), build_inputs("padding")
    cases["local-wide"] = build_model("local", window_size=60), build_inputs("plain")
    cases["conv-selected"] = build_model("conv", position_bias_selection="gumbel").eval(), build_inputs("plain")
    cases["conv-entropy"] = build_model("conv", position_bias_entropy_weight=0.1), build_inputs("padding")
    mixed = ["simple", "local"]
    cases["mixed-reference"] = build_model(mixed, mixing_implementation="reference"), build_inputs("both")
    cases["local-checkpointing"] = build_model("local"), build_inputs("plain")
    cases["local-checkpointing"][0].gradient_checkpointing_enable({"use_reentrant": False})
    return cases


def outcome(model: AFTForCausalLM, inputs: dict[str, torch.Tensor], group: Any = None) -> dict[str, torch.Tensor]:
    """Return loss, logits and gradients of parameters and embeddings, on whole rows or on this process's shards."""
    given = {name: x if group is None else local_shard(x, group) for name, x in inputs.items()}
    embedded = model.get_input_embeddings()(given.pop("input_ids")).detach().requires_grad_()
    if group is None:
        output = model(inputs_embeds=embedded, use_cache=False, **given)
    else:
        with context_parallel(group):
            output = model(inputs_embeds=embedded, use_cache=False, **given)
    output.loss.backward()
    mask = given.get("attention_mask", torch.ones_like(given["labels"])).bool()[..., None]
    found = {"logits": output.logits.detach() * mask, "inputs": embedded.grad}
    if group is not None:
        found["inputs"] = found["inputs"] / group.size()
        found = {name: whole(x, group) for name, x in found.items()}
    return found | {"loss": output.loss.detach()} | averaged_gradients(model, group)


def bytes_of_a_layer(aft_type: str, length: int, group: Any) -> dict[str, int]:
    """Count the bytes that this process sends in the forward and backward pass of one layer on one row."""
    mixer = build_model(aft_type, max_position_embeddings=2048).aft.layers[0].mixer
    x = torch.randn(1, length, 16, requires_grad=True)
    shard = SequenceShard(group, 1, length, x.device)  # exchanged once for all layers
    with counted_bytes() as counts:
        mixer(x, documents=shard).sum().backward()
    return counts


def compute(directory: Path) -> None:
    """Compute in each process all results that the tests compare."""
    distributed.init_process_group("gloo")
    group, rank = distributed.group.WORLD, distributed.get_rank()
    found = {name: outcome(*case, group) for name, case in build_cases().items()}
    found["bytes"] = {(t, length): bytes_of_a_layer(t, length, group) for t in TYPES for length in (50, 300)}
    found["generated"] = {(t, kind): generated(t, kind, group) for t, kind in PROMPTS}
    found["errors"] = {name: error_of(call, group) for name, call in WRONG.items()}
    torch.save(found, directory / f"{rank}.pt")
    distributed.barrier()  # no process leaves while another is still receiving
    distributed.destroy_process_group()


PROMPTS = [(t, kind) for t in TYPES for kind in ("plain", "short", "padding")]


@torch.no_grad()
def generated(aft_type: str, kind: str, group: Any = None) -> torch.Tensor:
    """Return logits of tokens after a prompt, one or several at a time; one process or a group reads the prompt."""
    model, inputs = build_model(aft_type).eval(), build_inputs(kind)
    labels = inputs.pop("labels")
    given = {name: x if group is None else local_shard(x, group) for name, x in inputs.items()}
    if group is None:
        cache = model(**given, use_cache=True).cache
    else:
        with context_parallel(group):
            cache = model(**given, use_cache=True).cache
    assert cache.get_seq_length() == labels.shape[1]
    mask = inputs.get("attention_mask", torch.ones_like(labels))
    found = []
    for length in (1, 4, 1, 1):
        tokens = labels[:, :length].clamp_min(0)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        found.append(model(tokens, attention_mask=mask, cache=cache, use_cache=True).logits)
    return torch.cat(found, 1)


TOKENS = torch.zeros(1, 8, dtype=torch.long)
CACHE = build_model("conv").aft.new_cache()
# Calls with a shard that must raise an error in some process, by part of the message.
WRONG = {
    "causal AFTFull cannot take": lambda group: build_model("full")(TOKENS),
    "12 tokens is longer than max_position_embeddings=10": lambda group: build_model(
        "local", max_position_embeddings=10
    )(local_shard(torch.zeros(1, 12, dtype=torch.long), group)),
    "must be the padding mask of the shard, (1, 8)": lambda group: build_model("conv")(
        TOKENS, attention_mask=torch.ones(1, 9)
    ),
    "must continue those of the shard before it": lambda group: build_model("conv")(
        TOKENS, position_ids=torch.arange(3, 11)[None]
    ),
    "do not continue one": lambda group: build_model("conv")(
        TOKENS, cache=build_model("conv").eval()(TOKENS, cache=CACHE).cache
    ),
    "1 tokens cannot be divided into": lambda group: local_shard(TOKENS[:, :1], group),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of each of 4 processes."""
    directory = tmp_path_factory.mktemp("shards")
    assert finish(launch(compute, (directory,), 4)) == [0] * 4
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    """The results of one process."""
    return {name: outcome(*case) for name, case in build_cases().items()}


CASES = [f"{t}-{kind}" for t in TYPES for kind in ("plain", "short", "padding", "documents", "both")]
CASES += ["local-window alone", "conv-window alone", "local-table", "local-wide", "conv-selected", "conv-entropy"]
CASES += ["mixed-reference", "local-checkpointing"]


@pytest.mark.parametrize("case", CASES)
def test_shards_have_the_outputs_the_loss_and_the_gradients_of_whole_rows(found, expected, case):
    for process in found:
        assert process[case].keys() == expected[case].keys()
        for name, wanted in expected[case].items():  # sums over tokens in another order
            error = float((process[case][name] - wanted).abs().max())
            assert error <= 1e-5 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize("aft_type", TYPES)
def test_shards_of_large_keys_are_as_exact_as_float32_knows_them(found, expected, aft_type):
    exact, bound = exact_outcome(outcome, build_model(aft_type, "hostile"), build_inputs("plain"))
    for process in [expected, *found]:
        for name, wanted in exact.items():
            error = float((process[f"{aft_type}-hostile"][name] - wanted).abs().max())
            assert error <= bound * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize("aft_type", TYPES)
def test_a_layer_sends_one_state_and_one_window_each_way_whatever_the_length(found, aft_type):
    width, keys = 16, 2 if aft_type == "conv" else 16
    state = 4 * (width + 2 * keys)
    window = 4 * (width + keys) * (WINDOW - 1) if aft_type in ("local", "conv") else 0
    for rank, process in enumerate(found):
        short, long = (process["bytes"][aft_type, length] for length in (50, 300))
        assert short == long
        assert long["all_gather"] == 2 * state  # sums in the forward pass, their gradients in the backward pass
        # The last process sends keys and values to no other process, the first one sends gradients to none.
        sent = (rank < len(found) - 1) + (rank > 0)
        assert long.get("all_to_all_single", 0) == sent * window
        assert "all_reduce" not in long


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_in_shards_leaves_the_state_of_generation_in_every_process(found, prompt):
    expected = generated(*prompt)
    for process in found:
        torch.testing.assert_close(process["generated"][prompt], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("message", WRONG)
def test_what_a_shard_cannot_have_is_an_error_in_every_process_that_sees_it(found, message):
    assert any(message in process["errors"][message] for process in found)


# --------------------------------------------------------------------------------------------------------- Accelerate


def rows_of_tokens() -> torch.Tensor:
    return torch.randint(0, 16, (4, LENGTH), generator=torch.Generator().manual_seed(2))


def step_with_accelerate(directory: Path) -> None:
    """Take an Accelerate step on a mesh of 2 x 2 processes: batches along one dimension, shards along the other."""
    # Accelerate shards on accelerators only; here it must take the CPU processes for accelerators.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["AFTLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=2)
    )
    model = build_model(["local", "alibi"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows_of_tokens(), batch_size=2))
    mesh = accelerator.torch_device_mesh["cp"]
    (batch,) = batches
    shard = local_shard(batch, mesh)
    with context_parallel(mesh):
        loss = model(input_ids=shard, labels=shard, use_cache=False).loss
    accelerator.backward(loss)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    found = {"batch": batch, "loss": accelerator.reduce(loss.detach(), "mean")} | gradients
    torch.save(found, directory / f"{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()  # no process leaves while another is still receiving
    accelerator.end_training()


def test_a_loop_on_accelerate_takes_the_shards_of_its_mesh(tmp_path):
    assert finish(launch(step_with_accelerate, (tmp_path,), 4)) == [0] * 4
    model, rows = build_model(["local", "alibi"]), rows_of_tokens()
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    for rank in range(4):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["batch"], rows[:2] if rank < 2 else rows[2:])
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


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
        ({"compile": True}, "context_parallel=2 needs compile=False, got compile=True"),
        ({"task": "images"}, "needs a task of sequences, 'bytes', 'tokens' or 'pixels', got task='images'"),
    ],
)
def test_a_recipe_that_cannot_take_shards_is_an_error(tmp_path, changes, message):
    recipe = build_recipe(recipe_without_dropout(tmp_path, context_parallel=2)).model_copy(update=changes)
    with pytest.raises(ValueError, match=message):
        ContextParallelGroup.of(recipe, SimpleNamespace(num_processes=2, process_index=0))


def test_a_model_that_cannot_take_shards_is_an_error_before_training(tmp_path):
    values = recipe_without_dropout(tmp_path, context_parallel=2)
    values["model"] |= {"aft_type": "full"}
    assert finish(start(values, 2)) == [1, 1]
    message = (tmp_path / "run.error").read_text()
    assert "needs a model whose layers are of the aft_type simple, alibi, local or conv, got aft with full" in message
