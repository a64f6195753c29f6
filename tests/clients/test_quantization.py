"""Quantization of linear layers by torchao and by the dynamic quantization of PyTorch."""

import pytest
import torch


IDS = torch.arange(24).view(2, 12) * 7 % 256


@torch.no_grad()
def test_torchao_quantizes_weights_to_8_bits(load):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: run `make clients`")
    model = load().eval()
    expected = model(IDS).logits
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    # Rounding to 8 bits changes a weight by at most 1/254 of the largest absolute weight of its row.
    assert 0 < (model(IDS).logits - expected).abs().max() < 0.1 * expected.abs().max()
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 16)


@torch.no_grad()
def test_pytorch_quantizes_linear_layers_dynamically(load):
    model = load().eval()
    expected = model(IDS).logits
    with pytest.warns(DeprecationWarning):
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert 0 < (quantized(IDS).logits - expected).abs().max() < 0.1 * expected.abs().max()
    assert quantized.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 16)
