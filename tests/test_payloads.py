"""No file in the folder of a model runs code when a command or the demo uses the model.

The payloads cover each form of code in a folder that a library could execute: a pickle, a module, and names of
classes, kernels or functions in a config. A payload that runs leaves a trace. The result of the command is not tested
here.
"""

import contextlib
import importlib
import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_models import changed, save_models
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, CLIPConfig, CLIPModel
from typer.testing import CliRunner

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.cli import app
from aft_hf.errors import InputError
from aft_hf.loading import load
from aft_hf.publishing import publish
from tests.runs import Payload, saved_payload


pytestmark = pytest.mark.usefixtures("datasets_cache", "without_limits")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with all files that the commands read, and data for them."""
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    for name in ("image", "text"):
        shutil.copyfile(root / "converted" / "conversion_report.json", root / name / "conversion_report.json")
    return root


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "it-ran"


def use(command: str, folder: Path) -> None:
    """Run a command, or the demo, on a folder."""
    text, aft = folder.name == "text", folder.parent / "aft"
    data = folder.parents[1] / ("text.txt" if text else "images")
    sizes = ["--kernel-size", "3", "--num-heads", "2"]
    distill = ["--distill", "--steps", "1", "--batch-size", "2", "--init", "paper"]
    kind = "attention" if folder.name == "vit" else "keys"
    drawn = ["--text", "abc"] if text else ["--images", data]
    tuning = ["--train", data, "--validation", data, "--max_eval_samples", "8"]
    tuning += ["--output_dir", aft, "--do_eval", "--use_cpu", "true", "--report_to", "none"]
    words = {
        "convert": ["convert", folder, aft, *sizes],
        "fit": ["convert", folder, aft, *sizes, "--init", "attention", "--images", data],
        "distill": ["convert", folder, aft, *sizes, *distill, "--images", data],
        "evaluate": ["evaluate", folder, data, *(["--block-size", "8"] if text else [])],
        "draw": ["visualize", folder, kind, *drawn, "--out", aft / "a.png"],
        "finetune": ["finetune", "--model_name_or_path", folder, *tuning],
    }
    if command == "publish":
        publish(folder, "me/tiny", dry_run=True)
    elif command == "show":
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path(__file__).parents[1] / "spaces" / "demo"))
            importlib.import_module("loading").load(str(folder))
    else:
        done = CliRunner().invoke(app, [*map(str, words[command])])
        if done.exception is not None:
            raise done.exception


COMMANDS = {"convert": ["vit"], "evaluate": ["vit", "image", "text"], "publish": ["image", "text"]}
COMMANDS |= {"show": ["image", "text"]}
CASES = [(command, name) for command, names in COMMANDS.items() for name in names]


@pytest.fixture
def planted(folders, tmp_path, monkeypatch):
    """A function that copies a folder to plant payloads in. Any prompt that asks for permission is answered by yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")

    def copy(name):
        shutil.copytree(folders / "images", tmp_path / "images", dirs_exist_ok=True)
        shutil.copyfile(folders / "text.txt", tmp_path / "text.txt")
        return Path(shutil.copytree(folders / name, tmp_path / "work" / name, dirs_exist_ok=True))

    return copy


def run(command, folder, trace):
    with contextlib.suppress(Exception):
        use(command, folder)
    shutil.rmtree(folder.parent / "aft", ignore_errors=True)
    assert not trace.exists()


def test_payloads_run_where_they_are_asked_to(trace):
    old = saved_payload(trace, _use_new_zipfile_serialization=False)
    for content in (pickle.dumps(Payload(trace)), saved_payload(trace), old):
        torch.load(io.BytesIO(content), weights_only=False) if content[:2] == b"PK" else pickle.loads(content)
        if content[:2] != b"PK" and not trace.exists():
            torch.load(io.BytesIO(content), weights_only=False)
        trace.rmdir()


@pytest.mark.parametrize(("command", "name"), CASES)
def test_no_file_that_is_a_pickle_runs(planted, trace, command, name):
    for file in [path.name for path in planted(name).iterdir() if path.suffix != ".py"]:
        folder = planted(name)
        contents = (saved_payload(trace), pickle.dumps(Payload(trace)))
        for content in contents if "model" in file else contents[:1]:
            (folder / file).write_bytes(content)
            run(command, folder, trace)


@pytest.mark.parametrize(("command", "name"), CASES)
def test_no_pickle_beside_the_files_of_a_model_runs(planted, trace, command, name):
    folder = planted(name)
    for file in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl", "adapter_model.bin"):
        (folder / file).write_bytes(saved_payload(trace))
    run(command, folder, trace)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    run(command, folder, trace)
    (folder / "adapter_config.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    run(command, folder, trace)  # without model.safetensors, pytorch_model.bin would be loaded
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.bin")}
    for file in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (folder / file).write_text(json.dumps(index))
    run(command, folder, trace)


@pytest.mark.parametrize(("command", "name"), CASES)
def test_no_module_in_the_folder_runs(planted, trace, command, name):
    folder, code = planted(name), f"import os\nos.mkdir({str(trace)!r})\n"
    own = [path.name for path in folder.glob("*.py")]
    modules = [
        "evil.py",
        "__init__.py",
        "sitecustomize.py",
        "custom_generate/generate.py",
        "tokenizer.py",
        "handler.py",
    ]
    for file in own + modules:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(code)
    run(command, folder, trace)
    classes = ("AutoConfig", "AutoModel", "AutoModelForImageClassification", "AutoModelForCausalLM")
    classes += ("AutoImageProcessor", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor")
    auto_map = dict.fromkeys(classes, "evil.Evil") | {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    for changes in (
        {"auto_map": auto_map},
        {"auto_map": auto_map, "model_type": "evil", "tokenizer_class": "Evil", "image_processor_type": "Evil"},
        {"auto_map": auto_map, "trust_remote_code": True, "custom_pipelines": {"x": {"impl": "evil.Evil"}}},
    ):
        for file in folder.glob("*config.json"):
            changed(**changes)(file)
        run(command, folder, trace)


MORE_CASES = [*CASES, ("fit", "vit"), ("distill", "vit")]
MORE_CASES += [("draw", "vit"), ("draw", "image"), ("draw", "text"), ("finetune", "vit"), ("finetune", "image")]


@pytest.fixture
def fetching(trace, monkeypatch):
    """Make each attempt to download a kernel leave a trace, as if the library kernels were installed."""

    def fetched(*_, **options):
        trace.mkdir()

    from transformers.integrations import hub_kernels

    for function in ("load_and_register_attn_kernel", "get_kernel", "lazy_load_kernel"):
        monkeypatch.setattr(hub_kernels, function, fetched)
    for module in ("modeling_utils", "integrations.hub_kernels", "utils.import_utils"):
        monkeypatch.setattr(f"transformers.{module}.is_kernels_available", lambda: True)


@pytest.mark.parametrize(("command", "name"), MORE_CASES)
def test_no_kernel_of_somebody_is_fetched(planted, trace, command, name, fetching):
    use(command, planted(name))  # the folders are whole without payloads
    for value in ("someone/kernel", "kernels-community/flash-attn2", "flash_attention_2"):
        folder = planted(name)
        changes = {"experts_implementation": "deepgemm", "_experts_implementation": "sonicmoe", "use_kernels": True}
        changed(attn_implementation=value, _attn_implementation=value, **changes)(folder / "config.json")
        run(command, folder, trace)


@pytest.mark.parametrize(("command", "name"), MORE_CASES)
def test_no_model_with_a_kernel_is_loaded_as_a_tokenizer_or_image_processor(planted, trace, command, name, fetching):
    for model in ("GPT2LMHeadModel", "GPT2LMHeadModelFast", "ViTModel", "AutoModel"):
        for own in (True, False):  # without classes of their own, both take those in config.json
            folder = planted(name)
            kernel = {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel"}
            for file in folder.glob("*config.json"):
                named = model if own or file.name == "config.json" else None
                changed(tokenizer_class=named, image_processor_type=named, **kernel)(file)
            run(command, folder, trace)


@pytest.mark.parametrize("place", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_no_nested_config_names_a_kernel(tmp_path, trace, fetching, place):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    parts = {"vision_config": sizes | {"image_size": 8, "patch_size": 4}, "text_config": sizes | {"vocab_size": 9}}
    CLIPModel(CLIPConfig(**parts, projection_dim=8)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    named = {part: content[part] | {place: "someone/kernel"} for part in parts}
    named[place] = {"": "someone/kernel", "text_config": "someone/kernel"}
    changed(**named)(tmp_path / "config.json")
    config = load(AutoConfig, tmp_path)
    assert {each._attn_implementation for each in (config, config.vision_config, config.text_config)} == {None}
    load(AutoModel, tmp_path)
    load(CLIPModel, tmp_path, config=config)
    assert load(AutoModel, tmp_path, attn_implementation="eager").config.text_config._attn_implementation == "eager"
    assert not trace.exists()


CODE = {
    "a quantization": {"quantization_config": {"quant_method": "eetq"}},
    "a nested quantization": {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
    "another model": {"model_type": "detr", "backbone": "someone/else", "use_timm_backbone": False},
    "a pickle of timm": {"model_args": {"checkpoint_path": "evil.pth"}},
    "code of a nested model": {"vision_config": {"auto_map": {"AutoModel": "someone/evil--evil.Evil"}}},
    "code of a model in a list": {"parts": [{"auto_map": {"AutoModel": "evil.Evil"}}]},
}


@pytest.mark.parametrize("case", CODE)
@pytest.mark.parametrize("auto_class", [AutoConfig, AutoModel, AutoTokenizer, AFTConfig, AFTForCausalLM])
def test_a_config_that_makes_a_library_run_code_is_refused_by_the_key(planted, case, auto_class):
    folder = planted("text")
    changed(**CODE[case])(folder / "config.json")
    with pytest.raises(InputError, match=r"config\.json: .* can load code or files") as refused:
        load(auto_class, folder)
    assert str(refused.value).count("\n") == 0


def test_an_adapter_does_not_choose_another_model(planted):
    folder = planted("text")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "someone/else"}')
    with pytest.raises(InputError, match=r"adapter_config\.json: merge the adapter into its model"):
        load(AutoModelForCausalLM, folder)


@pytest.mark.parametrize(("command", "name"), CASES)
def test_no_text_of_yaml_or_jinja_runs(planted, trace, command, name):
    folder = planted(name)
    yaml = f"!!python/object/apply:os.mkdir [{json.dumps(str(trace))}]"
    jinja = "{{ cycler.__init__.__globals__.os.mkdir('TRACE') }}".replace("TRACE", str(trace))
    (folder / "README.md").write_text(f"---\nlicense: {yaml}\ntags:\n- {yaml}\n---\n# Mine\n")
    run(command, folder, trace)
    (folder / "README.md").unlink(missing_ok=True)
    results = {
        "metrics": {"validation": {f"{jinja}loss": 1.0}},
        "recipe": {"notes": jinja},
        "versions": {jinja: jinja},
    }
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "chat_template.jinja").write_text(jinja)
    run(command, folder, trace)
