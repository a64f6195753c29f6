"""ONNX export of deep models: it takes minutes, agrees with the model, and can be quantized by onnxruntime."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import image_model, language_model
from torch import nn
from torch.export import Dim

from aft_hf.exporting import empty_state, export_step


onnx = pytest.importorskip("onnx", reason="needs the extra `onnx`")
runtime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
pytest.importorskip("onnxscript", reason="needs the extra `onnx`")

DEPTHS = [4, pytest.param(24, marks=pytest.mark.slow)]
MIXED = ["local", "alibi", "simple", "conv"]
LONGEST = 128


def deep_model(layers: int, aft_type: str | list[str]) -> nn.Module:
    types = aft_type if isinstance(aft_type, str) else (aft_type * layers)[:layers]
    sizes = {"hidden_size": 128 if layers > 4 else 16, "num_heads": 4, "position_bias_dim": 16}
    sizes |= {"window_size": 32, "kernel_size": 8, "max_position_embeddings": LONGEST}
    return language_model(types, num_hidden_layers=layers, **sizes)


def export(model: nn.Module, path: Path, inputs: dict, sizes: dict) -> None:
    """Export a model as docs/serving.md shows."""
    options = {"dynamo": True, "optimize": False, "verbose": False, "output_names": ["logits"]}
    torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=sizes, **options).save(path)


def run(path: Path, **inputs: torch.Tensor) -> torch.Tensor:
    session = runtime.InferenceSession(path)
    return torch.from_numpy(session.run(["logits"], {name: x.numpy() for name, x in inputs.items()})[0])


def assert_equal_to_rounding(actual: torch.Tensor, model: nn.Module, **inputs: torch.Tensor) -> None:
    """Assert that the errors of program and model, both in float32, against the model in float64 are similar."""
    expected = model(**inputs).logits
    exact = model.double()(**{name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}).logits
    model.float()
    rounding = (expected.double() - exact).abs().max()
    # Both round in a different order. The largest error of a few thousand numbers varies by less than a factor of ten.
    assert (actual.double() - exact).abs().max() < 10 * rounding + 1e-6 * exact.abs().max()


def quantized(path: Path) -> Path:
    """Quantize the linear layers of a program to 8 bits, as docs/serving.md shows."""
    from onnxruntime.quantization import quantize_dynamic, shape_inference

    prepared, small = path.with_suffix(".prepared.onnx"), path.with_suffix(".int8.onnx")
    shape_inference.quant_pre_process(path, prepared, skip_symbolic_shape=True)
    program = onnx.load(prepared)
    program.graph.ClearField("value_info")  # the quantizer transposes weights and keeps the old shapes
    quantize_dynamic(program, small, op_types_to_quantize=["MatMul"])  # not Conv, whose kernels are computed
    return small


def count_operators(path: Path) -> Counter:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("layers", DEPTHS)
@pytest.mark.parametrize("aft_type", ["local", "full", "simple", "conv", "alibi"])
@torch.no_grad()
def test_a_deep_language_model_is_exported_and_quantized(layers, aft_type, tmp_path):
    if aft_type != "local" and layers != 4:
        pytest.skip("one type stands for all in depth")
    model = deep_model(layers, aft_type)
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
    inputs = {"input_ids": torch.randint(256, (2, 96)), "use_cache": False}
    path = tmp_path / "model.onnx"
    export(model, path, inputs, {"input_ids": sizes, "use_cache": None})
    for size in [(2, 96), (1, 1), (3, LONGEST)]:
        ids = torch.randint(256, size)
        assert_equal_to_rounding(run(path, input_ids=ids), model, input_ids=ids)
    small = quantized(path)
    # The q, k, v and o projections and the two linear layers of the MLP in each layer, and the head.
    assert count_operators(small)["MatMulInteger"] == 6 * layers + 1
    ids = inputs["input_ids"]
    expected = model(ids).logits
    error = (run(small, input_ids=ids) - expected).square().mean() / expected.square().mean()
    assert 0 < error < 0.05


@pytest.mark.parametrize("layers", DEPTHS)
@torch.no_grad()
def test_a_step_of_a_deep_language_model_decodes_and_is_quantized(layers, tmp_path):
    """The cache is input and output of the program."""
    model, tokens = deep_model(layers, MIXED), torch.randint(256, (2, 40))
    path = tmp_path / "step.onnx"
    export_step(model, path)
    expected = model(tokens).logits
    for program, bound in ((path, 1e-6), (quantized(path), 0.05)):
        session = runtime.InferenceSession(program)
        state = {name: tensor.numpy() for name, tensor in empty_state(model, 2).items()}
        shapes = [x.shape for x in state.values()]
        assert [value.name for value in session.get_inputs()] == ["input_ids", *state]
        steps = []
        for token in tokens.split(1, 1):
            logits, *following = session.run(None, {"input_ids": token.numpy(), **state})
            state = dict(zip(state, following))
            assert [x.shape for x in following] == shapes
            steps.append(torch.from_numpy(logits))
        assert state["seen"].tolist() == [40] * 2
        error = (torch.cat(steps, 1) - expected).square().mean() / expected.square().mean()
        assert error < bound
    with pytest.raises(ValueError, match="constant size"):  # a cache that grows
        export_step(deep_model(1, "full"), tmp_path / "full.onnx")


@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_deep_image_classifier_is_exported_for_any_size_and_quantized(layers, tmp_path):
    sizes = {"hidden_size": 192 if layers > 2 else 24, "num_heads": 4, "image_size": 64, "patch_size": 8}
    model = image_model("conv", num_hidden_layers=layers, num_labels=10, **sizes)
    shape = {0: Dim("batch", min=1, max=64), 2: 8 * Dim("rows", min=2, max=64), 3: 8 * Dim("columns", min=2, max=64)}
    path, pixels = tmp_path / "model.onnx", torch.randn(2, 3, 64, 48)
    export(model, path, {"pixel_values": pixels}, {"pixel_values": shape})
    for image in (pixels, torch.randn(1, 3, 32, 96)):
        assert_equal_to_rounding(run(path, pixel_values=image), model, pixel_values=image)
    small, expected = quantized(path), model(pixel_values=pixels).logits
    assert count_operators(small)["MatMulInteger"] >= 6 * layers
    error = (run(small, pixel_values=pixels) - expected).square().mean() / expected.square().mean()
    assert 0 < error < 0.05
