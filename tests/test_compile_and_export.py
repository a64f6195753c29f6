"""torch.compile without graph breaks, and torch.export for any batch, length and image size (ONNX: tests/exporting).

Compiled graphs run as they were captured (backend "aot_eager"): the tests check that one graph is captured, not speed.
"""

import pytest
import torch
import transformers
from tiny_models import image_model, language_model
from torch.export import Dim, export

from aft_hf import AFTConv


TYPES = ["full", "local", "simple", "conv", "alibi"]
# Compilation takes seconds, so `make test` covers one type, and `make test-all` a model with layers of every type.
ONE_TYPE_OR_ALL = ["local", pytest.param(TYPES, marks=pytest.mark.slow, id="all types")]


def text_inputs(batch_size, length):
    """Tokens with padding at random positions."""
    mask = (torch.rand(batch_size, length) > 0.2).long()
    return {"input_ids": torch.randint(256, (batch_size, length)), "attention_mask": mask, "use_cache": False}


def text_shapes(**length):
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", **length)}
    return {"input_ids": shape, "attention_mask": shape, "use_cache": None}


TEXT_SIZES = [(1, 1), (3, 33), (5, 80), (2, 64)]


def model_of(aft_type):
    """A language model of one type, or with one layer of each type."""
    return language_model(aft_type, num_hidden_layers=len(aft_type) if isinstance(aft_type, list) else 2)


def compiled(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("aft_type", ONE_TYPE_OR_ALL)
def test_forward_and_training_step_compile_as_one_graph(aft_type):
    model, ids = model_of(aft_type), torch.randint(256, (2, 40))
    torch.testing.assert_close(compiled(model)(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model.eval())(ids).logits, model(ids).logits)  # creates a cache
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled(model)(ids, labels=ids).loss.backward()
    for gradient, parameter in zip(expected, [p for p in model.parameters() if p.grad is not None]):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def exported(model):
    return lambda ids: export(model, (ids,))


def as_it_is(model):
    return model


@pytest.mark.parametrize(
    ("aft_type", "make"),
    (("local", compiled), *((name, exported) for name in ("full", "local", "conv", "simple")), ("local", as_it_is)),
)
@torch.no_grad()
def test_a_warning_says_once_that_a_program_clamps_wide_position_biases(aft_type, make, caplog):
    transformers.utils.logging.warning_once.cache_clear()
    model, ids = language_model(aft_type, mixing_implementation="portable", use_cache=False), torch.zeros(1, 8).long()
    assert not model.aft.layers[0].mixer.is_wide
    for parameter in model.aft.layers[0].mixer.parameters(recurse=False):
        parameter.normal_(std=40.0)
    make(model.eval())(ids)
    assert caplog.text.count("differ by more than 65") == (aft_type != "simple" and make is not as_it_is)


@pytest.mark.parametrize("largest_table", [0, 10**6])
@torch.no_grad()
def test_aft_conv_on_a_grid_compiles_as_one_graph_as_a_table_and_as_a_convolution(largest_table, monkeypatch):
    monkeypatch.setattr("aft_hf.portable_aft.LARGEST_GRID_TABLE", largest_table)
    mixer, hidden = AFTConv(12, 3, 5).eval(), torch.randn(2, 36, 12)
    torch.testing.assert_close(compiled(mixer)(hidden), mixer(hidden))


@pytest.mark.parametrize("aft_type", ONE_TYPE_OR_ALL)
@torch.no_grad()
def test_a_decode_step_compiles_once_for_all_tokens(aft_type):
    model, ids = model_of(aft_type), torch.randint(256, (2, 40))
    states = [model(ids).cache for _ in range(2)]
    step, graphs = compiled(model), []
    for _ in range(8):
        token = torch.randint(256, (2, 1))
        logits = step(token, cache=states[0]).logits
        torch.testing.assert_close(logits, model(token, cache=states[1]).logits)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # At the second token the compiler learns that the number of past tokens varies; no later token recompiles.
    assert graphs[1] == graphs[-1] <= 2


def assert_export_equals_model(model, inputs, shapes, others):
    """Assert that a program exported with `inputs` equals the model, on these and on inputs of other sizes."""
    program = export(model, (), kwargs=inputs, dynamic_shapes=shapes).module()
    for other in (inputs, *others):
        torch.testing.assert_close(program(**other).logits, model(**other).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"aft_type": "local"},  # alibi has a test of its own
        pytest.param({"aft_type": ["simple", "full", "conv"], "num_hidden_layers": 3}, marks=pytest.mark.slow),
        pytest.param({"aft_type": "local", "global_connectivity": False}, marks=pytest.mark.slow),
        pytest.param({"aft_type": "conv", "position_bias_selection": "gumbel"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_an_exported_language_model_takes_any_batch_and_length(options):
    model = language_model(**{"num_hidden_layers": 1, **options})
    others = [text_inputs(*size) for size in TEXT_SIZES]
    assert_export_equals_model(model, text_inputs(2, 40), text_shapes(min=1, max=80), others)


@torch.no_grad()
def test_an_exported_language_model_without_tables_takes_thousands_of_tokens():
    model, shapes = language_model("alibi", num_hidden_layers=1), text_shapes(min=1, max=8192)
    assert_export_equals_model(model, text_inputs(2, 40), shapes, [text_inputs(1, 8192), text_inputs(2, 5000)])


@pytest.mark.parametrize("aft_type", ["full", "conv", pytest.param("local", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_layer_adds_few_operations_to_an_exported_program(aft_type):
    """Important for deep models: the time of exporters grows faster than the number of operations."""
    counts = []
    for layers in (1, 2):
        inputs = {"input_ids": torch.randint(256, (2, 40)), "use_cache": False}
        counts.append(len(export(language_model(aft_type, num_hidden_layers=layers), (), kwargs=inputs).graph.nodes))
    assert counts[1] - counts[0] < 330


def image_shapes(aft_type):
    """Dynamic shapes: any image size for `conv`, only the size of the config for types with tables."""
    shape = {0: Dim("batch", min=1, max=64)}
    if aft_type == "conv":
        shape |= {2: 4 * Dim("rows", min=2, max=512), 3: 4 * Dim("columns", min=2, max=512)}
    return {"pixel_values": shape}


def image_inputs(aft_type):
    sizes = [(1, 3, 64, 16), (5, 3, 8, 100)] if aft_type == "conv" else [(1, 3, 32, 32), (5, 3, 32, 32)]
    return [{"pixel_values": torch.randn(size)} for size in sizes]


OVERLAPPING = {"patch_size": 7, "patch_stride": 4}
IMAGE_MODELS = [pytest.param(name, {}, marks=pytest.mark.slow) for name in ("local", "simple", "conv")]
IMAGE_MODELS += [("full", {}), ("conv", OVERLAPPING), ("conv", {"global_connectivity": False})]


@pytest.mark.parametrize(("aft_type", "options"), IMAGE_MODELS)
@torch.no_grad()
def test_an_exported_image_model_takes_any_batch_and_an_aft_conv_any_image_size(aft_type, options):
    example = {"pixel_values": torch.randn(2, 3, 32, 24 if aft_type == "conv" else 32)}
    model = image_model(aft_type, num_hidden_layers=1, **options)
    assert_export_equals_model(model, example, image_shapes(aft_type), image_inputs(aft_type))
