"""The cards of the recipes: as the generator writes them, and what they may say."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tiny
from hub import metadata_errors
from huggingface_hub import ModelCard
from PIL import Image

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.publishing import PublishError, build_card
from aft_hf.publishing.card import card_problems
from aft_hf.publishing.checks import ABSOLUTE_PATHS
from aft_hf.publishing.recipes import keep_run, recipe_cards, recipe_names, write_recipe_cards


ROOT = Path(__file__).parents[2]
CARDS = ROOT / "model_cards"
NAMES = recipe_names(ROOT)
KEPT = [name for name in NAMES if (CARDS / "results" / name / "results.json").is_file()]
RUN = "examples/bytes_aft_local"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return recipe_cards(ROOT)


@pytest.fixture
def root(tmp_path):
    """A repository with two recipes, and what was kept of the run of one."""
    for name in (RUN, "examples/bytes_gpt2"):
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "configs" / f"{name}.yaml", tmp_path / "configs" / f"{name}.yaml")
    shutil.copytree(CARDS / "results" / RUN, tmp_path / "model_cards" / "results" / RUN)
    return tmp_path


@pytest.fixture
def run(tmp_path):
    """What a run leaves: its results, and a model, which may be a small one."""
    directory = tmp_path / "run"
    tiny.save(tiny.build("text", "local"), directory)
    results = json.loads((CARDS / "results" / RUN / "results.json").read_text())
    results |= {"losses": [{"step": 1, "loss": 5.5, "learning_rate": 0.1}], "evaluations": [{"step": 1}]}
    (directory / "results.json").write_text(json.dumps(results))
    return directory


def test_there_is_a_card_for_every_recipe_and_no_other(generated):
    on_disk = {path.relative_to(CARDS).with_suffix("").as_posix() for path in CARDS.rglob("*.md")}
    assert on_disk == {*NAMES, "README"} == generated.keys() and len(KEPT) >= 3


@pytest.mark.parametrize("name", [*NAMES, "README"])
def test_a_card_is_what_the_generator_writes(generated, name):
    hint = "run scripts/write_model_cards.py"
    assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == generated[name], hint


@pytest.mark.parametrize("name", NAMES)
def test_a_card_validates_and_has_results_only_where_they_were_measured(name):
    path = CARDS / f"{name}.md"
    metadata = ModelCard.load(path).data.to_dict()
    assert card_problems(path) == [] == metadata_errors(metadata)
    assert metadata["license"] == "apache-2.0" and len(metadata["datasets"]) == 1
    text = path.read_text(encoding="utf-8")
    assert f"aft-hf train configs/{name}.yaml" in text and "| parameters | " in text
    measured = {"model-index", "metrics"} & metadata.keys()
    if name in KEPT:
        assert measured == {"model-index", "metrics"} and "not on the Hub" in text
    else:
        assert not measured and "No trained weights exist yet" in text and "Nothing was measured yet" in text
        assert "## Hyper-parameters" in text and "| seconds |" not in text


@pytest.mark.parametrize("path", [*CARDS.rglob("*.md"), *CARDS.rglob("*.json")], ids=lambda path: path.stem)
def test_no_path_of_a_machine_is_told(path):
    text = path.read_text(encoding="utf-8")
    assert not [match[1] for pattern in ABSOLUTE_PATHS for match in re.finditer(pattern, text)]


@pytest.mark.parametrize("name", KEPT)
def test_results_are_those_of_the_run(name):
    results = json.loads((CARDS / "results" / name / "results.json").read_text())
    index = ModelCard.load(CARDS / f"{name}.md").data.to_dict()["model-index"][0]["results"]
    told = {each["dataset"]["split"]: {m["type"]: m["value"] for m in each["metrics"]} for each in index}
    assert told == results["metrics"]
    assert f"| parameters | {results['parameters']} |" in (CARDS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("imagenet/aft_conv_small_11_16", "20.30 M"),
        ("imagenet/aft_conv_base_25_32_384_from_deit", "79.86 M"),
        ("imagenet/deit_tiny", "5.72 M"),
    ],
)
def test_parameters_are_counted_with_the_classes_of_the_data(generated, name, count):
    assert f"| [{name}]({name}.md) | {count} | ImageNet-1k | not run |" in generated["README"]


def test_a_baseline_is_called_one_and_needs_no_code_of_ours(generated):
    text = generated["enwik8/transformer_l24_d256_h4"]
    assert "It is a baseline" in text and "trust_remote_code" not in text and "import aft_hf" not in text
    assert ModelCard(text).data.tags == ["gpt2", "baseline"]


def test_what_begins_with_a_converted_model_tells_how_to_convert_it(generated):
    card = ModelCard(generated["imagenet/aft_conv_base_25_32_384_from_deit"])
    assert "aft-hf convert facebook/deit-base-patch16-384 outputs/" in card.text
    assert card.data.base_model == "facebook/deit-base-patch16-384"


def test_an_ablation_shows_its_switch(generated):
    assert "| query activation | relu |" in generated["imagenet/ablation_aft_full_tiny_query_relu"]
    assert "gates the average" not in generated["imagenet/ablation_aft_full_tiny_no_query"]


def test_a_card_follows_its_recipe_and_writing_again_changes_nothing(root):
    paths = write_recipe_cards(root)
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_recipe_cards(root)] == before and len(paths) == 3
    recipe = root / "configs/examples/bytes_gpt2.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 600", "steps: 601"))
    write_recipe_cards(root)
    assert "| steps | 601 |" in (root / "model_cards/examples/bytes_gpt2.md").read_text()


def test_results_of_a_recipe_that_has_changed_since_are_refused(root):
    recipe = root / "configs" / f"{RUN}.yaml"
    recipe.write_text(recipe.read_text().replace("learning_rate: 3e-3", "learning_rate: 4e-3"))
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate=0\.003, and the recipe has 0\.004"):
        recipe_cards(root)


def test_data_that_nobody_named_are_asked_for(root):
    shutil.copytree(root / "configs" / "examples", root / "configs" / "mine")
    with pytest.raises(PublishError, match=r"configs/mine/bytes_aft_local\.yaml: say in .*DATA"):
        recipe_cards(root)


def test_of_a_run_is_kept_what_its_card_needs(root, run):
    kept = keep_run(root, RUN, run)
    results = json.loads((kept / "results.json").read_text())
    assert not {"losses", "evaluations"} & results.keys() and results["metrics"]
    assert (kept / "position_biases.png").read_bytes().startswith(b"\x89PNG")
    assert not list(root.rglob("*.safetensors"))[1:]  # but that of the run


def test_the_run_of_another_recipe_is_not_kept(root, run):
    with pytest.raises(ValueError, match="and the recipe has"):
        keep_run(root, "examples/bytes_gpt2", run)
    with pytest.raises(PublishError, match=r"results\.json: no such file"):
        keep_run(root, RUN, root)


def test_the_code_on_the_card_of_a_model_of_pixels_draws_an_image(tmp_path, monkeypatch):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "position_bias_dim": 4, "local_window_size": 4}
    config = AFTConfig(vocab_size=257, max_position_embeddings=3 * 4 * 4, bos_token_id=256, **sizes)
    AFTForCausalLM(config).save_pretrained(tmp_path / "me" / "pixels")
    (tmp_path / "me" / "pixels" / "results.json").write_text(json.dumps({"recipe": {"task": "pixels"}}))
    card = build_card(tmp_path / "me" / "pixels", repo_id="me/pixels")
    assert card.data.pipeline_tag == "unconditional-image-generation" and "tokenizer" not in card.text
    assert "Draws images of 4 x 4 pixels only" in card.text
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)[1], {})
    assert Image.open("drawn.png").size == (4, 4)
