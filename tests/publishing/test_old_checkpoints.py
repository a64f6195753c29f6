"""Old checkpoints: directories that earlier versions saved still load and give the recorded logits."""

import pytest
import torch
from processes import HERE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, pipeline
from transformers.utils import is_vision_available


ARCHIVES = sorted((HERE / "fixtures").glob("*.tar.xz"))


def test_there_is_one_of_each_task():
    assert {archive.name.split("-")[0] for archive in ARCHIVES} == {"text", "image"}


@pytest.mark.parametrize("name", [archive.name for archive in ARCHIVES])
@torch.no_grad()
def test_an_old_checkpoint_gives_its_recorded_logits_with_the_code_of_today(old, name):
    directory = old[name]
    expected = load_file(directory / "expected.safetensors")
    if name.startswith("text"):
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        logits = model(input_ids=expected["inputs"]).logits
        limit = expected["generated"].shape[1]
        generated = model.generate(expected["inputs"], max_length=limit, do_sample=False)
        assert torch.equal(generated, expected["generated"])
        assert pipeline("text-generation", model=str(directory))("Old", max_new_tokens=2)
    else:
        model = AutoModelForImageClassification.from_pretrained(directory).eval()
        logits = model(pixel_values=expected["inputs"]).logits
        if is_vision_available():
            assert pipeline("image-classification", model=str(directory))
    assert type(model).__module__ == "aft_hf.modeling_aft"
    # The logits were recorded in float32 on another processor.
    largest = expected["logits"].abs().max().item()
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5 * largest, rtol=0)
