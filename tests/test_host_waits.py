"""No host synchronization in training, prefill and decoding of every type.

The tests need no GPU: reading a value of a meta tensor, which has no data, raises an error where the host would wait
for an accelerator. Control flow is that of an accelerator, since only the values of CPU tensors are read.
"""

import pytest
import torch
from tiny_models import image_model, language_model
from torch import nn

from aft_hf import mixing_aft


TYPES = ["full", "local", "simple", "conv", "alibi"]
OPTIONS = {
    "": {},
    "window alone": {"global_connectivity": False},
    "gumbel": {"position_bias_selection": "gumbel", "position_bias_reparameterized": False},
    "entropy": {"position_bias_entropy_weight": 0.001},
    "table": {"position_bias_dim": None},
}
VARIANTS = [(x, "") for x in TYPES] + [("local", "window alone"), ("conv", "window alone"), ("full", "table")]
VARIANTS += [("conv", "gumbel"), ("conv", "entropy")]
variants = pytest.mark.parametrize(("aft_type", "options"), VARIANTS)
LENGTH = 70


@pytest.fixture(params=["portable form", "operators"])
def computed_by(request, monkeypatch):
    """With operators, the device has all of them but `grid`, as one with Triton kernels."""
    if request.param == "operators":
        monkeypatch.setattr(mixing_aft, "provides", lambda name, device_type: name != "grid")


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "max_position_embeddings": 128, "window_size": 8}


def model_of(aft_type: str, options: str) -> nn.Module:
    with torch.device("meta"):
        return language_model(aft_type, **SIZES, **OPTIONS[options])


def meta(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


MASKS = {
    "no mask": lambda: {},
    "padding": lambda: {"attention_mask": meta(2, LENGTH)},
    "a pair mask": lambda: {"attention_mask": meta(2, LENGTH, LENGTH, dtype=torch.bool)},
}


@variants
@pytest.mark.parametrize("mask", MASKS)
def test_a_training_step_waits_for_nothing(aft_type, options, mask, computed_by):
    model, ids = model_of(aft_type, options).train(), meta(2, LENGTH)
    if mask == "padding":
        model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False, **MASKS[mask]()).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "mixer" not in name)


@pytest.mark.parametrize(("aft_type", "options"), [x for x in VARIANTS if x[0] != "full"])
def test_a_training_step_on_packed_documents_waits_for_nothing(aft_type, options, computed_by):
    model, ids = model_of(aft_type, options).train(), meta(2, LENGTH)
    model(ids, labels=ids, position_ids=meta(2, LENGTH)).loss.backward()
    boundaries = meta(5, dtype=torch.int32)
    model(ids, labels=ids, cu_seq_lens_q=boundaries).loss.backward()


@variants
@pytest.mark.parametrize(("padded", "static"), ((False, False), (True, False), (False, True), (True, True)))
def test_prefill_and_decoding_wait_for_nothing(aft_type, options, padded, static, computed_by):
    if static and aft_type == "full":
        pytest.skip("there is no static cache for a state that grows")
    model = model_of(aft_type, options).eval()
    cache = model.aft.new_cache(LENGTH + 3) if static else None
    with torch.no_grad():
        mask = meta(2, LENGTH) if padded else None
        output = model(meta(2, LENGTH), attention_mask=mask, cache=cache, use_cache=True)
        for step in range(1, 3):
            mask = meta(2, LENGTH + step) if padded and not static else None
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, attention_mask=mask, cache=output.cache, use_cache=True)
    assert output.logits.shape == (2, 1, 256)


@pytest.mark.parametrize(("aft_type", "options"), [x for x in VARIANTS if x[0] != "alibi"])
def test_a_training_step_on_images_waits_for_nothing(aft_type, options, computed_by):
    with torch.device("meta"):
        model = image_model(aft_type, num_hidden_layers=1, num_labels=5, **OPTIONS[options]).train()
    model(meta(2, 3, 32, 32, dtype=torch.float32), labels=meta(2)).loss.backward()
