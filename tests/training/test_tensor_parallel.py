"""Two processes that share the features of a model compute what one computes."""

from pathlib import Path

import pytest
import torch
from runs import finish, launch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from aft_hf import AFTConfig, AFTForCausalLM


TOKENS = torch.arange(20)[None] % 16


def sharded_logits(directory: Path) -> None:
    """In each process: load its part of the model, and write down the logits and which of its weights are parts."""
    distributed.init_process_group("gloo")
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=plan).eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    whole = sum(weight.numel() for weight in model.parameters())
    here = sum(getattr(weight, "_local_tensor", weight).numel() for weight in model.parameters())
    torch.save({"logits": logits, "share": here / whole}, directory / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("aft_type", "num_heads", "mixers"),
    [
        ("local", 1, True),
        ("full", 1, True),
        ("simple", 2, True),
        ("alibi", 1, True),
        ("local", 2, False),
        ("conv", 4, False),
    ],
)
def test_two_processes_share_mlps_and_the_mixers_whose_position_biases_serve_all_features(
    tmp_path, aft_type, num_heads, mixers
):
    config = AFTConfig(
        aft_type=aft_type,
        num_heads=num_heads,
        hidden_size=16,
        num_hidden_layers=2,
        position_bias_dim=4,
        local_window_size=4,
        conv_kernel_size=4,
        max_position_embeddings=32,
        vocab_size=16,
    )
    model = AFTForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    assert finish(launch(sharded_logits, (tmp_path,), 2)) == [0, 0]
    expected = model(TOKENS).logits
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-6)
        assert (found["share"] < 0.65) == mixers and found["share"] < 0.8
