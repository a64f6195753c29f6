"""Old checkpoints: directories that earlier versions saved still load and give the recorded logits.

Each archive of fixtures/ holds what `tiny.save` wrote, without the code, and expected.safetensors, which holds what
`tiny.expected_of` returned.
"""

import shutil

import pytest
import torch
from processes import HERE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification


ARCHIVES = sorted((HERE / "fixtures").glob("*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: archive.name)
@torch.no_grad()
def test_an_old_checkpoint_gives_its_recorded_logits_with_the_code_of_today(archive, tmp_path):
    shutil.unpack_archive(archive, tmp_path, filter="data")
    expected = load_file(tmp_path / "expected.safetensors")
    if archive.name.startswith("text"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        logits = model(input_ids=expected["inputs"]).logits
        limit = expected["generated"].shape[1]
        generated = model.generate(expected["inputs"], max_length=limit, do_sample=False)
        assert torch.equal(generated, expected["generated"])
    else:
        model = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
        logits = model(pixel_values=expected["inputs"]).logits
    assert type(model).__module__ == "aft_hf.modeling_aft"
    # The logits were recorded in float32 on another processor.
    largest = expected["logits"].abs().max().item()
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5 * largest, rtol=0)
