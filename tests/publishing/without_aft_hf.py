"""Use of published models with transformers and torch, but without aft_hf: load, run, train, save and load again.

    python without_aft_hf.py cases.json

`tiny.write_all_cases` writes the cases. Each model is loaded by every Auto class that fits it, compared, run by
`pipeline` and `generate`, trained for a step, saved to `out`/second, loaded from there, and saved to `out`/third. The
logits after the step are written to `out`/logits.safetensors. Any difference raises an error.
"""

import json
import sys
from pathlib import Path


class Absent:
    """Import hook that hides the installed package aft_hf."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "aft_hf":
            raise ModuleNotFoundError(f"No module named {name!r}")


sys.meta_path.insert(0, Absent())

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    pipeline,
)


# Relative to the largest value: 80 times the rounding of float32. Rounding differs between processors, and on the same
# processor with the place of the weights in memory.
TOLERANCE = 1e-5
REMOTE = {"trust_remote_code": True}


def main(cases: list[dict]) -> None:
    for case in cases:
        check = {"text": check_text, "image": check_image}[case["task"]]
        check(case["source"], load_file(case["expected"]), Path(case["out"]))
        print("checked", case["source"], flush=True)
    assert not any(name.split(".")[0] == "aft_hf" for name in sys.modules)


def check_text(source: str, expected: dict[str, torch.Tensor], out: Path) -> None:
    inputs = {"input_ids": expected["inputs"]}
    model = load(AutoModelForCausalLM, "AFTForCausalLM", source)
    compare(source, model(**inputs).logits, expected["logits"])
    check_backbone(source, model, inputs)
    generated = model.generate(expected["inputs"], max_length=expected["generated"].shape[1], do_sample=False)
    assert torch.equal(generated, expected["generated"]), f"{source}: generates {generated}"
    written = pipeline("text-generation", model=source, **REMOTE)("Text", max_new_tokens=3, do_sample=False)
    assert written[0]["generated_text"].startswith("Text"), written
    tokenizer = AutoTokenizer.from_pretrained(source, **REMOTE)
    assert tokenizer.decode(tokenizer("Ünicode")["input_ids"]) == "Ünicode"
    logits = train_a_step(model, {**inputs, "labels": expected["inputs"]}, inputs)
    save_again(AutoModelForCausalLM, model, tokenizer, inputs, logits, out)


def check_image(source: str, expected: dict[str, torch.Tensor], out: Path) -> None:
    inputs = {"pixel_values": expected["inputs"]}
    model = load(AutoModelForImageClassification, "AFTForImageClassification", source)
    compare(source, model(**inputs).logits, expected["logits"])
    check_backbone(source, model, inputs)
    processor = AutoImageProcessor.from_pretrained(source, **REMOTE)
    picture = Image.new("RGB", (20, 30), "red")
    answers = pipeline("image-classification", model=source, **REMOTE)(picture)
    direct = model(**processor(picture, return_tensors="pt")).logits.softmax(-1)[0]
    named = {model.config.id2label[i]: score for i, score in enumerate(direct.tolist())}
    assert all(abs(named[each["label"]] - each["score"]) < TOLERANCE for each in answers), (answers, named)

    labels = torch.zeros(len(expected["inputs"]), dtype=torch.long)
    logits = train_a_step(model, {**inputs, "labels": labels}, inputs)
    save_again(AutoModelForImageClassification, model, processor, inputs, logits, out)


def load(auto_class: type, name: str, source: str) -> torch.nn.Module:
    """Load a model, and check the classes of model and config and that the code comes from the repository."""
    model = auto_class.from_pretrained(source, **REMOTE).eval()
    config = AutoConfig.from_pretrained(source, **REMOTE)
    assert type(model).__name__ == name and type(config).__name__ == "AFTConfig"
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    return model


@torch.no_grad()
def check_backbone(source: str, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    backbone = AutoModel.from_pretrained(source, **REMOTE).eval()
    assert type(backbone).__name__ == "AFTModel", type(backbone)
    compare(f"{source}, backbone", backbone(**inputs)[0], model.base_model(**inputs)[0])


def train_a_step(model: torch.nn.Module, batch: dict, inputs: dict) -> torch.Tensor:
    """Train for one step of gradient descent and return the logits after it."""
    before = model(**inputs).logits
    model.train()
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval().zero_grad()
    with torch.no_grad():
        after = model(**inputs).logits
    assert (after - before).abs().max() > 1e-3, "the step changed nothing"
    return after


@torch.no_grad()
def save_again(auto_class: type, model, processor, inputs: dict, logits, out: Path) -> None:
    """Save and load the model twice, and save the backbone alone."""
    for generation in ("second", "third"):
        directory = out / generation
        model.save_pretrained(directory)
        processor.save_pretrained(directory)
        model = auto_class.from_pretrained(directory, **REMOTE).eval()
        compare(f"{out.name}, {generation} generation", model(**inputs).logits, logits)
    model.base_model.save_pretrained(out / "backbone")
    backbone = AutoModel.from_pretrained(out / "backbone", **REMOTE).eval()
    compare(f"{out.name}, backbone saved alone", backbone(**inputs)[0], model.base_model(**inputs)[0])
    save_file({"logits": logits.contiguous()}, out / "logits.safetensors")


def compare(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    difference, largest = (x.abs().max().item() for x in (got - expected, expected))
    assert difference <= TOLERANCE * largest, f"{what}: differs by {difference} where the largest value is {largest}"


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
