"""Tests of reading DINOv2 and ViT-MAE as equivalent ViTs, and of refusing similar models with a reason."""

import pytest
import torch
from checkpoints import OPTIONS, SIZES, randomize
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    GPT2Config,
    GPT2Model,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)

from aft_hf import convert_deit
from aft_hf.conversion import read_source
from aft_hf.conversion.timm_config import read_timm_config


WITHOUT_MLP = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
DECODER = {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 3}


def dinov2(**options):
    return randomize(Dinov2Model(Dinov2Config(**WITHOUT_MLP, **options)))


def mae():
    return randomize(ViTMAEForPreTraining(ViTMAEConfig(**SIZES, **DECODER, mask_ratio=0.0)))


def outputs(model, pixels):
    """Return the hidden states after the last norm."""
    if isinstance(model, ViTMAEForPreTraining):
        noise = torch.arange(16.0).expand(len(pixels), -1)  # keeps the patches in order
        return model.vit(pixels, noise=noise).last_hidden_state
    return model(pixels).last_hidden_state


@pytest.mark.parametrize("build", (dinov2, mae))
@pytest.mark.parametrize("saved", (True, False), ids=("saved", "in memory"))
def test_dinov2_and_vit_mae_are_read_as_vits_with_the_same_outputs(tmp_path, build, saved):
    model, pixels = build(), torch.randn(2, 3, 32, 32)
    model.save_pretrained(tmp_path)
    source = read_source(tmp_path if saved else model)
    assert source.heads == 0 and source.image_processor.image_mean == pytest.approx([0.485, 0.456, 0.406])
    with torch.no_grad():
        expected = outputs(model, pixels)
        actual = source.to_transformers()(pixel_values=pixels).last_hidden_state
    # Error of 2 layers with sums of up to 96 float32 products; weights of standard deviation 0.5 make states large.
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_the_decoder_of_vit_mae_is_left_behind():
    _, report = convert_deit(mae(), num_labels=5, **OPTIONS)
    assert "decoder.mask_token" in {record.sources[0] for record in report.with_status("dropped")}


REFUSED = {
    "dinov2_with_registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**WITHOUT_MLP)),
    "clip_vision_model": lambda: CLIPVisionModel(CLIPVisionConfig(**SIZES)),
    "gpt2": lambda: GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10)),
    "SwiGLU": lambda: dinov2(use_swiglu_ffn=True),
    "its classifier reads the class token and the mean": lambda: Dinov2ForImageClassification(
        Dinov2Config(**WITHOUT_MLP)
    ),
}


@pytest.mark.parametrize(("name", "build"), REFUSED.items(), ids=REFUSED)
@pytest.mark.parametrize("saved", (True, False), ids=("saved", "in memory"))
def test_model_types_that_are_not_vits_are_refused_by_name(tmp_path, name, build, saved):
    model = build()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name) as error:
        read_source(tmp_path if saved else model)
    assert "\n" not in str(error.value)


READ = "deit_tiny_patch16_224 deit_small_distilled_patch16_224 deit_base_patch16_384 deit3_small_patch16_224"
READ += " vit_tiny_patch16_224 vit_small_patch16_384 vit_small_patch14_dinov2"
NOT_READ = "vit_small_patch14_reg4_dinov2 vit_base_patch16_clip_224 vit_relpos_base_patch16_224 beit_base_patch16_224"
NOT_READ += " eva02_tiny_patch14_224 cait_xxs24_224 resnet50 vit_base_patch16_rope_224"


def test_only_architectures_of_timm_that_are_plain_vits_are_read():
    for architecture in READ.split():
        read_timm_config("name", {"architecture": architecture})
    for architecture in NOT_READ.split():
        with pytest.raises(ValueError, match=f"'{architecture}' cannot be converted"):
            read_timm_config("name", {"architecture": architecture})
