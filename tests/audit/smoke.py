"""Smoke test of an installed aft-hf: every type of model, and the command line.

    cd $(mktemp -d) && python .../tests/audit/smoke.py

Run it in an empty folder. It needs only aft-hf and transformers: no test tools, no Hub, no file of the repository.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import aft_hf
from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.configuration_aft import AFT_TYPES


SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "num_heads": 2, "position_bias_dim": 4}
IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 3}


def check_text(aft_type: str) -> None:
    """Check that gradients are finite, that the saved model gives the same outputs, and the cache the same tokens."""
    sizes = {"vocab_size": 20, "max_position_embeddings": 24, "window_size": 4, "kernel_size": 4}
    model = AFTForCausalLM(AFTConfig(aft_type=aft_type, bos_token_id=None, eos_token_id=None, **sizes, **SIZES))
    tokens = torch.randint(0, 20, (2, 9))
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None), aft_type
    model.eval().save_pretrained(aft_type)
    loaded = AutoModelForCausalLM.from_pretrained(aft_type).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached, anew = (model.generate(tokens, use_cache=use, **greedy) for use in (True, False))
    assert cached.shape == (2, 15) and torch.equal(cached, anew), aft_type


def aft_hf_command(*arguments: str) -> str:
    """Run the command that pip installed and return its output."""
    command = Path(sysconfig.get_path("scripts")) / "aft-hf"
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def check_command_line() -> None:
    """Check that a ViT with random weights is converted, loaded by its Auto class, and accepted for publishing."""
    assert aft_hf.__version__ in aft_hf_command("--version")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, **IMAGES)).save_pretrained("vit")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained("vit")
    aft_hf_command("convert", "vit", "converted", "--kernel-size", "3", "--num-heads", "2")
    converted = AutoModelForImageClassification.from_pretrained("converted")
    assert converted(torch.randn(1, 3, 16, 16)).logits.shape == (1, 3)
    before = {path: path.read_bytes() for path in Path("converted").rglob("*")}
    assert "model.safetensors" in aft_hf_command("publish", "converted", "me/converted", "--dry-run")
    assert before == {path: path.read_bytes() for path in Path("converted").rglob("*")}


if __name__ == "__main__":
    assert not any(Path.cwd().iterdir()), "run this in an empty folder"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in AFT_TYPES:
        check_text(name)
    check_command_line()
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, aft-hf {aft_hf.__version__} from {Path(aft_hf.__file__).parent}: ok")
