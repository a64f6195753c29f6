"""peft: adapters on the projections of the mixers are trained, saved, loaded and merged; prompt tuning."""

import pytest
import torch


peft = pytest.importorskip("peft", reason="needs peft: run `make clients`")

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=PROJECTIONS),
    "LoRA everywhere": lambda: peft.LoraConfig(r=2, target_modules="all-linear"),
    "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, target_modules=PROJECTIONS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"]),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"]),
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


def test_prompt_tuning_learns_and_prefix_tuning_is_refused(load):
    ids = torch.randint(256, (2, 12))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(load(), prompts)
    model(input_ids=ids, labels=ids).loss.backward()
    assert next(p for p in model.parameters() if p.requires_grad).grad.abs().sum() > 0
    sizes = {"num_layers": 2, "num_attention_heads": 1, "token_dim": 16}
    prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    with pytest.raises(ValueError, match="prompt tuning or LoRA"):
        peft.get_peft_model(load(), prefixes)(input_ids=ids, labels=ids)
