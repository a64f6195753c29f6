"""The layers that the paper compares AFT with: each computes the formula of its source, and trains in AFT's block."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from aft_hf import build_byte_tokenizer
from scripts.reproduction.baselines import (
    BaselineConfig,
    DenseSynthesizer,
    LambdaLayer,
    LinearAttention,
    Performer,
    RwkvTimeMixing,
    wkv,
)


WIDTH, HEADS = 12, 3
TEXT_LAYERS = {
    "linear": lambda: LinearAttention(WIDTH, HEADS),
    "performer": lambda: Performer(WIDTH, HEADS),
    "synthesizer": lambda: DenseSynthesizer(WIDTH, HEADS, 150),
}


def by_head(x):
    """(B, T, d) as (B, h, T, d_h)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("length", (1, 63, 64, 200))
@pytest.mark.parametrize(("name", "growth"), [("linear", 1.0), *(("performer", growth) for growth in (0.3, 1.0, 3.0))])
def test_linear_attention_and_performers_are_averages_with_the_features_of_their_papers(name, growth, length):
    layer, x = TEXT_LAYERS[name](), torch.randn(2, length, WIDTH)
    x = x * growth ** torch.linspace(-1, 1, length).unsqueeze(-1)
    query, key, value = (by_head(p(x)).double() for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if name == "linear":
        query, key = (torch.nn.functional.elu(y) + 1 for y in (query, key))
    else:
        query, key = (y / (WIDTH / HEADS) ** 0.25 for y in (query, key))
        query, key = (torch.exp(y @ layer.directions.double().mT - y.square().sum(-1, True) / 2) for y in (query, key))
    weights = (query @ key.mT).tril()
    expected = layer.o_proj(joined(weights / weights.sum(-1, keepdim=True) @ value).float())
    tolerance = 1e-5 if name == "linear" else 1e-3  # for the epsilon of a performer
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", TEXT_LAYERS)
def test_large_keys_and_their_gradients_stay_finite(name):
    layer, x = TEXT_LAYERS[name](), torch.randn(1, 130, WIDTH)
    output = layer(torch.cat([14 * x[:, :40], 0.1 * x[:, 40:90], 100 * x[:, 90:]], 1))
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_a_synthesizer_predicts_its_weights_without_keys():
    layer, x = TEXT_LAYERS["synthesizer"](), torch.randn(2, 9, WIDTH)
    hidden, value = torch.relu(layer.hidden(x)), by_head(layer.v_proj(x))
    heads = []
    for head, score in enumerate(layer.scores):
        size = WIDTH // HEADS
        rows = score(hidden[..., head * size : (head + 1) * size])
        outputs = [rows[:, t, : t + 1].softmax(-1).unsqueeze(1) @ value[:, head, : t + 1] for t in range(9)]
        heads.append(torch.cat(outputs, 1))
    torch.testing.assert_close(layer(x), layer.o_proj(torch.cat(heads, -1)))


@pytest.mark.parametrize("name", TEXT_LAYERS)
@pytest.mark.parametrize("kept", (40, 64))
@pytest.mark.parametrize("factor", (0.0, 100.0))
def test_later_tokens_change_nothing(name, kept, factor):
    layer, x = TEXT_LAYERS[name](), 40 * torch.rand(1, 130, 1) * torch.randn(1, 130, WIDTH)
    changed = torch.cat([x[:, :kept], factor * x[:, kept:]], 1)
    torch.testing.assert_close(layer(changed)[:, :kept], layer(x)[:, :kept], rtol=1e-5, atol=1e-6)


def rwkv():
    return RwkvTimeMixing(RwkvConfig(hidden_size=WIDTH, num_hidden_layers=3), 1)


def test_rwkv_averages_as_transformers_does_and_its_gradient_is_finite():
    layer, x = rwkv(), torch.randn(2, 20, WIDTH)
    expected, _ = RwkvSelfAttention.forward(layer, x)
    torch.testing.assert_close(layer(x), expected)
    key, value = 100 * torch.randn(1, 20, WIDTH, requires_grad=True), torch.randn(1, 20, WIDTH)
    wkv(layer.time_decay, layer.time_first, key, value).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (layer.time_decay, layer.time_first))


def test_a_lambda_layer_is_a_function_of_contents_and_offsets():
    rows, columns, size = 2, 3, 4
    layer, x = LambdaLayer(WIDTH, HEADS, size, (rows, columns)).eval(), torch.randn(2, rows * columns, WIDTH)
    query, value = layer.q_proj(x), layer.v_proj(x)  # normalization is the identity at first, up to its epsilon
    key = layer.k_proj(x).softmax(1)
    outputs = []
    for n in range(rows * columns):
        offsets = torch.stack(
            [
                layer.offsets[m // columns - n // columns + rows - 1, m % columns - n % columns + columns - 1]
                for m in range(rows * columns)
            ]
        )
        function = (key + offsets).mT @ value  # (B, k, v)
        outputs.append((query[:, n].unflatten(-1, (HEADS, size)) @ function).flatten(1))
    torch.testing.assert_close(layer(x), layer.o_proj(torch.stack(outputs, 1)), rtol=1e-4, atol=1e-4)


def config_of(mixer):
    sizes = {"hidden_size": WIDTH, "num_heads": HEADS, "num_hidden_layers": 2, "max_position_embeddings": 32}
    images = {"modality": "image", "image_size": 8, "patch_size": 4, "use_cls_token": False, "num_labels": 5}
    return BaselineConfig(mixer=mixer, **sizes, **(images if mixer == "lambda" else {}))


@pytest.mark.parametrize("mixer", (*TEXT_LAYERS, "rwkv", "lambda"))
def test_a_model_trains_is_saved_and_loaded_again(mixer, tmp_path):
    auto = AutoModelForImageClassification if mixer == "lambda" else AutoModelForCausalLM
    model = auto.from_config(config_of(mixer))
    tokens = torch.randint(256, (4, 32))
    inputs = {"pixel_values": torch.randn(4, 3, 8, 8)} if mixer == "lambda" else {"input_ids": tokens}
    labels = torch.randint(5, (4,)) if mixer == "lambda" else tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    model.eval().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"config.json", "generation_config.json", "model.safetensors"}
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.mixer == mixer and config.to_diff_dict() == model.config.to_diff_dict()
    again = auto.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=0.0, atol=0.0)


def test_the_command_line_evaluates_a_baseline(tmp_path, run_command):
    AutoModelForCausalLM.from_config(config_of("linear")).save_pretrained(tmp_path / "model")
    build_byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Some text. " * 20)
    done = run_command("scripts.reproduction.baselines", "evaluate", tmp_path / "model", tmp_path / "text.txt")
    assert done.returncode == 0 and "bits_per_token" in done.stdout, done.stderr


def test_what_a_baseline_does_not_compute_is_an_error():
    model, tokens = AutoModelForCausalLM.from_config(config_of("linear")), torch.randint(256, (2, 9))
    with pytest.raises(ValueError, match="no cache"):
        model(input_ids=tokens, use_cache=True)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="a baseline takes no visibility"):
        model(input_ids=tokens, attention_mask=mask)
    with pytest.raises(NotImplementedError, match="does not generate"):
        model.generate(tokens)
    torch.testing.assert_close(model(tokens, torch.ones_like(tokens)).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="no class token"):
        BaselineConfig(mixer="lambda", modality="image", use_cls_token=True)
