"""peft: adapters of projections, embeddings and position biases are trained, saved, loaded, merged; prompt tuning."""

from functools import partial

import pytest
import torch
from tiny_models import image_model, language_model

from aft_hf.analysis.maps import bias_maps, key_features
from aft_hf.exporting import empty_state


peft = pytest.importorskip("peft", reason="needs peft: run `make clients`")

ADAPTERS = {
    "LoRA everywhere": lambda: peft.LoraConfig(r=2, target_modules="all-linear"),
    "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "word_embeddings", "lm_head"]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"]),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"]),
    "LoRA of embeddings": lambda: peft.LoraConfig(r=2, target_modules=["word_embeddings", "position_embeddings"]),
    "some tokens": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=list(range(99))),
    "saved embeddings": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["word_embeddings", "position_embeddings", "layernorm"]
    ),
    "position biases": lambda: peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["mixer.position_bias_query", "mixer.position_bias_key"]
    ),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["layernorm", "layernorm_before"]),
}


@pytest.mark.parametrize("make_adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_learns_and_is_merged(make_adapter, load, tmp_path):
    ids = torch.randint(256, (2, 12))
    model = peft.get_peft_model(load(), make_adapter())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        again = peft.PeftModel.from_pretrained(load(), tmp_path).eval()
        torch.testing.assert_close(again(input_ids=ids).logits, expected)
        torch.testing.assert_close(again.merge_and_unload()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


IMAGE_ADAPTERS = {
    "patches": {"target_modules": ["q_proj", "patch_embeddings"]},
    "saved patches": {"target_modules": ["q_proj"], "modules_to_save": ["patch_embeddings", "classifier"]},
    "positions": {"target_modules": ["q_proj"], "target_parameters": ["embeddings.position_embeddings"]},
    "class token": {"target_modules": ["q_proj"], "target_parameters": ["embeddings.cls_token"]},
}


@pytest.mark.parametrize("options", IMAGE_ADAPTERS.values(), ids=IMAGE_ADAPTERS)
def test_an_adapter_of_image_embeddings_gets_a_gradient_and_is_merged(options):
    classifier = image_model("full", image_size=16, num_labels=3)
    model = peft.get_peft_model(classifier, peft.LoraConfig(r=2, init_lora_weights=False, **options))
    pixels = torch.randn(2, 3, 16, 16)
    model(pixel_values=pixels, labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        expected = model.eval()(pixel_values=pixels).logits
        torch.testing.assert_close(model.merge_and_unload()(pixels).logits, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_kernels_changes_their_entropy_too_until_it_is_merged():
    losses, gradients = [], []
    for weight in (0.0, 0.5):
        torch.manual_seed(0)
        sizes = {"image_size": 16, "num_labels": 3, "kernel_size": 3, "position_bias_entropy_weight": weight}
        options = {"target_modules": ["q_proj"], "target_parameters": ["mixer.kernel"], "init_lora_weights": False}
        model = peft.get_peft_model(image_model("conv", **sizes), peft.LoraConfig(r=2, **options))
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
        model(**inputs).loss.backward()
        gradients.append(next(p.grad for name, p in model.named_parameters() if "mixer.lora_A" in name))
        with torch.no_grad():
            losses += [model.eval()(**inputs).loss, model.merge_and_unload()(**inputs).loss]
    assert not torch.allclose(*gradients)
    torch.testing.assert_close(losses[::2], losses[1::2])


def test_adapters_of_position_biases_are_merged_before_their_maps_are_drawn():
    model = language_model("local")
    options = {"target_modules": ["q_proj"], "target_parameters": ["mixer.position_bias_key"]}
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).get_base_model()
    for draw in (bias_maps, partial(key_features, input_ids=torch.arange(4)[None])):
        with pytest.raises(ValueError, match="position biases have adapters: merge or remove adapters first"):
            draw(model)
    assert empty_state(model).keys() == empty_state(language_model("local")).keys()


def test_prompt_tuning_learns(load):
    ids = torch.randint(256, (2, 12))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(load(), prompts)
    model(input_ids=ids, labels=ids).loss.backward()
    assert next(p for p in model.parameters() if p.requires_grad).grad.abs().sum() > 0
