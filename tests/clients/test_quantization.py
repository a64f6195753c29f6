"""Quantization of linear layers by torchao and by the dynamic quantization of PyTorch."""

import pytest
import torch


IDS = torch.arange(24).view(2, 12) * 7 % 256


def by_torchao(model):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: run `make clients`")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_pytorch(model):
    with pytest.warns(DeprecationWarning):
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("quantize", (by_torchao, by_pytorch))
@torch.no_grad()
def test_weights_of_8_bits_give_nearly_the_same_logits_and_generate(quantize, load):
    model = load().eval()
    expected, model = model(IDS).logits, quantize(model)
    # Rounding to 8 bits changes a weight by at most 1/254 of the largest absolute weight of its row.
    assert 0 < (model(IDS).logits - expected).abs().max() < 0.1 * expected.abs().max()
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 16)
