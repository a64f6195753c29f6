"""Use saved models by their remote code, without aft_hf: fine-tune on packed documents with TRL, or export to ONNX.

    python without_package.py packing DIRECTORY ...
    python without_package.py onnx DIRECTORY ...

Each directory holds a model with its code, and the tokenizer of a language model. The script fails on any difference.
"""

import sys
import tempfile
from pathlib import Path


class Absent:
    """Import hook that makes aft_hf impossible to import, even where it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "aft_hf":
            raise ModuleNotFoundError(f"No module named {name!r}")


sys.meta_path.insert(0, Absent())

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer  # noqa: E402


REMOTE = {"trust_remote_code": True}
TEXTS = ["Friends, Romans, countrymen", "lend me your ears;"]
LONGEST = 64


def check_packing(directory: Path) -> None:
    """Check that a step on two documents gives the same update whether they are padded, packed or padding-free."""
    before = AutoModelForCausalLM.from_pretrained(directory, **REMOTE).state_dict()

    def changes(**options) -> dict[str, torch.Tensor]:
        return {name: after - before[name] for name, after in tuned(directory, **options).items()}

    expected = changes(packing=False, max_length=LONGEST)
    assert all(change.any() for change in expected.values())
    for options in ({"packing": True, "max_length": LONGEST}, {"padding_free": True, "max_length": None}):
        # Tolerance for float32 sums of gradients of about 1 over at most 64 tokens, in a different order.
        torch.testing.assert_close(changes(**options), expected, rtol=1e-4, atol=1e-5)


def tuned(directory: Path, **options) -> dict[str, torch.Tensor]:
    """Return the weights after one training step of TRL, which loads the model from the directory."""
    import trl
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as out:
        arguments = trl.SFTConfig(
            out,
            max_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1.0,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            model_init_kwargs={**REMOTE, "dtype": "float32"},
            **options,
        )
        tokenizer, data = AutoTokenizer.from_pretrained(directory, **REMOTE), Dataset.from_dict({"text": TEXTS})
        trainer = trl.SFTTrainer(str(directory), arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    assert type(trainer.model).__module__.startswith("transformers_modules."), type(trainer.model)
    return trainer.model.state_dict()


@torch.no_grad()
def check_onnx(directory: Path) -> None:
    """Check that the ONNX program of a model, exported with dynamic sizes, gives the outputs of the model."""
    import onnxruntime
    from torch.export import Dim

    batch = Dim("batch", min=1, max=64)
    if (directory / "tokenizer_config.json").exists():
        model, name = AutoModelForCausalLM.from_pretrained(directory, **REMOTE), "input_ids"
        given, sizes = {name: torch.randint(256, (2, 24)), "use_cache": False}, {1: Dim("length", min=2, max=LONGEST)}
        others = [torch.randint(256, (3, LONGEST))]
    else:
        model, name = AutoModelForImageClassification.from_pretrained(directory, **REMOTE), "pixel_values"
        patch = model.config.patch_size
        sizes = {2: patch * Dim("rows", min=2, max=64), 3: patch * Dim("columns", min=2, max=64)}
        given, others = {name: torch.randn(2, 3, 16, 12)}, [torch.randn(3, 3, 12, 20)]
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    shapes = {each: {0: batch, **sizes} if each == name else None for each in given}
    options = {"dynamo": True, "optimize": False, "verbose": False, "output_names": ["logits"]}
    with tempfile.TemporaryDirectory() as out:
        path = Path(out, "model.onnx")
        torch.onnx.export(model.eval(), (), kwargs=given, dynamic_shapes=shapes, **options).save(path)
        session = onnxruntime.InferenceSession(path)
    for x in [given[name], *others]:
        found = torch.from_numpy(session.run(["logits"], {name: x.numpy()})[0])
        expected = model(**{name: x}).logits
        # Tolerance for one or two layers of float32 sums over at most 64 positions, in a different order.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


if __name__ == "__main__":
    check = {"packing": check_packing, "onnx": check_onnx}[sys.argv[1]]
    for argument in sys.argv[2:]:
        check(Path(argument))
        print("checked", argument, flush=True)
    assert not any(name.split(".")[0] == "aft_hf" for name in sys.modules)
