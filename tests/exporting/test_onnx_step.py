"""Decoding with onnxruntime, token by token, with the cache as inputs and outputs of the program."""

import pytest
import torch

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.exporting import empty_state, export_step


def build(**options) -> AFTForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_heads": 3, "position_bias_dim": 4, "max_position_embeddings": 40}
    sizes |= {"window_size": 7, "kernel_size": 5, "vocab_size": 32}
    model = AFTForCausalLM(AFTConfig(**(sizes | options))).eval()
    for name, parameter in model.named_parameters():
        if "kernel" in name:
            torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
def test_onnxruntime_decodes_as_the_model_reads(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    pytest.importorskip("onnxscript", reason="needs the extra `onnx`")
    model = build(aft_type=["local", "simple", "conv", "alibi"], num_hidden_layers=4)
    export_step(model, tmp_path / "step.onnx")
    session = runtime.InferenceSession(tmp_path / "step.onnx")
    tokens = torch.randint(32, (3, 40))
    state = {name: tensor.numpy() for name, tensor in empty_state(model, 3).items()}
    assert [value.name for value in session.get_inputs()] == ["input_ids", *state]
    steps = []
    for token in tokens.split(1, 1):
        logits, *following = session.run(None, {"input_ids": token.numpy(), **state})
        shapes = [x.shape for x in state.values()]
        state = dict(zip(state, following))
        assert [x.shape for x in following] == shapes
        steps.append(torch.from_numpy(logits))
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens).logits, rtol=1e-4, atol=1e-5)
    assert state["seen"].tolist() == [40] * 3


def test_a_cache_that_grows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="constant size"):
        export_step(build(aft_type=["local", "full"], num_hidden_layers=2), tmp_path / "step.onnx")
