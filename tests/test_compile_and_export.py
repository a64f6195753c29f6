"""torch.compile without graph breaks, and torch.export of image models for any size.

The graphs are run as they were captured ("aot_eager"): what is tested is that there is one, not how fast it is.
"""

import pytest
import torch
from torch.export import Dim, export

from aft_hf import AFTConfig, AFTConv, AFTForCausalLM, AFTForImageClassification


TYPES = ["full", "local", "simple", "conv", "alibi"]


def language_model(aft_type):
    config = AFTConfig(
        aft_type=aft_type,
        hidden_size=12,
        num_hidden_layers=2,
        num_heads=3,
        position_bias_dim=4,
        local_window_size=7,
        conv_kernel_size=5,
        max_position_embeddings=80,
    )
    return AFTForCausalLM(config).eval()


def compiled(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("aft_type", TYPES)
def test_forward_and_training_step_compile_as_one_graph(aft_type):
    model, ids = language_model(aft_type), torch.randint(256, (2, 40))
    torch.testing.assert_close(compiled(model)(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled(model)(ids, labels=ids).loss.backward()
    for gradient, parameter in zip(expected, [p for p in model.parameters() if p.grad is not None]):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["dense", "convolution"])
@torch.no_grad()
def test_both_forms_of_aft_conv_on_a_grid_compile_as_one_graph(implementation):
    mixer, hidden = AFTConv(12, 3, 5, implementation=implementation).eval(), torch.randn(2, 36, 12)
    torch.testing.assert_close(compiled(mixer)(hidden), mixer(hidden))


@pytest.mark.parametrize("aft_type", TYPES)
@torch.no_grad()
def test_a_decode_step_compiles_once_for_all_tokens(aft_type):
    model, ids = language_model(aft_type), torch.randint(256, (2, 40))
    states = [model(ids).past_key_values for _ in range(2)]
    step, graphs = compiled(model), []
    for _ in range(8):
        token = torch.randint(256, (2, 1))
        logits = step(token, past_key_values=states[0]).logits
        torch.testing.assert_close(logits, model(token, past_key_values=states[1]).logits)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # The second token teaches the compiler that the number of past tokens changes; from then on nothing is new.
    assert graphs[1] == graphs[-1] <= 2


@torch.no_grad()
def test_an_exported_aft_conv_takes_any_batch_and_image_size():
    config = AFTConfig(
        modality="image",
        aft_type="conv",
        hidden_size=12,
        num_hidden_layers=2,
        num_heads=3,
        image_size=32,
        patch_size=4,
        conv_kernel_size=5,
    )
    model = AFTForImageClassification(config).eval()
    for layer in model.aft.layers:
        layer.mixer.kernel_scale.normal_()
    shapes = {
        0: Dim("batch", min=1, max=64),
        2: 4 * Dim("rows", min=2, max=512),
        3: 4 * Dim("columns", min=2, max=512),
    }
    program = export(
        model,
        (),
        kwargs={"pixel_values": torch.randn(2, 3, 32, 24)},
        dynamic_shapes={"pixel_values": shapes},
        strict=False,
    ).module()
    for size in ((1, 3, 64, 16), (5, 3, 8, 100)):
        pixels = torch.randn(size)
        torch.testing.assert_close(program(pixel_values=pixels).logits, model(pixels).logits)
