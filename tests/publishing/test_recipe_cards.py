"""The generated table of all recipes and the cards of the recipes that were run."""

import importlib.util
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
from aft_hf.conversion import POSITION_BIAS_MULTIPLIER
from aft_hf.publishing import PublishError, build_card
from aft_hf.publishing.card import card_problems
from aft_hf.publishing.checks import ABSOLUTE_PATHS
from aft_hf.training.recipe import load_recipe


ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("write_model_cards", ROOT / "scripts" / "write_model_cards.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)
CARDS = ROOT / "model_cards"
NAMES = script.recipe_names(ROOT)
KEPT = [name for name in NAMES if (CARDS / "results" / name / "results.json").is_file()]
RUN = "examples/bytes_aft_local"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return script.recipe_cards(ROOT)


@pytest.fixture
def root(tmp_path):
    """A repository with two recipes, and the kept results of one run."""
    for name in (RUN, "examples/bytes_gpt2"):
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "configs" / f"{name}.yaml", tmp_path / "configs" / f"{name}.yaml")
    shutil.copytree(CARDS / "results" / RUN, tmp_path / "model_cards" / "results" / RUN)
    return tmp_path


@pytest.fixture
def run(tmp_path):
    """The output directory of a run: its results and, in place of its model, a tiny one."""
    directory = tmp_path / "run"
    tiny.save(tiny.build("text", "local"), directory)
    results = json.loads((CARDS / "results" / RUN / "results.json").read_text())
    results |= {"losses": [{"step": 1, "loss": 5.5, "learning_rate": 0.1}], "evaluations": [{"step": 1}]}
    (directory / "results.json").write_text(json.dumps(results))
    return directory


def test_there_is_a_card_for_every_recipe_that_was_run_and_no_other(generated):
    on_disk = {path.relative_to(CARDS).with_suffix("").as_posix() for path in CARDS.rglob("*.md")}
    assert on_disk == {*KEPT, "README"} == generated.keys() and len(KEPT) >= 3


@pytest.mark.parametrize("name", [*KEPT, "README"])
def test_a_card_is_what_the_generator_writes(generated, name):
    hint = "run scripts/write_model_cards.py"
    assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == generated[name], hint


@pytest.mark.parametrize("name", KEPT)
def test_a_card_validates_and_has_results(name):
    path = CARDS / f"{name}.md"
    metadata = ModelCard.load(path).data.to_dict()
    assert card_problems(path) == [] == metadata_errors(metadata)
    assert metadata["license"] == "apache-2.0" and len(metadata["datasets"]) == 1
    text = path.read_text(encoding="utf-8")
    assert f"aft-hf train configs/{name}.yaml" in text and "| parameters | " in text
    assert {"model-index", "metrics"} <= metadata.keys() and "not on the Hub" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_every_recipe_with_the_paper_s_score_beside_ours(generated, name):
    recipe = load_recipe(ROOT / "configs" / f"{name}.yaml")
    link = f"{name}.md" if name in KEPT else f"../configs/{name}.yaml"
    (row,) = (line for line in generated["README"].splitlines() if f"]({link})" in line)
    _, _, rows, parameters, paper, ours, _ = (cell.strip() for cell in row.split("|"))
    assert (CARDS / link).is_file() and parameters.endswith(" M")
    assert (rows, paper) == (
        ("; ".join(recipe.paper.rows), f"{recipe.paper.score:.3f}") if recipe.paper else ("none, ours", "")
    )
    assert (ours != "not run") == (name in KEPT)


def test_rows_without_a_recipe_are_quoted(generated):
    repeated = [load_recipe(ROOT / "configs" / f"{name}.yaml").paper for name in NAMES]
    rows = {row for paper in repeated if paper for row in paper.rows}
    assert not rows & {f"{where}: {model}" for where, model, _ in script.QUOTED}
    assert all(f"| {' | '.join(row)} |" in generated["README"] for row in script.QUOTED)


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
    (parameters,) = re.findall(r"\| parameters \| (\d+) \|", (CARDS / f"{name}.md").read_text(encoding="utf-8"))
    # The kept runs on bytes are from before the special tokens: two rows less in the embeddings and in the head.
    special_tokens = 4 * results["recipe"]["model"].get("hidden_size", 128) if "bytes" in name else 0
    assert int(parameters) == results["parameters"] + special_tokens


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("imagenet/aft_conv_small_11_16", "20.30 M"),
        ("imagenet/aft_conv_base_25_32_384_from_deit", "79.86 M"),
        ("imagenet/deit_tiny", "5.72 M"),
    ],
)
def test_parameters_are_counted_with_the_classes_of_the_data(generated, name, count):
    assert re.search(rf"{name}\.yaml\) \|[^|]*\| {count} \|", generated["README"])


def test_a_baseline_is_called_one_and_needs_no_code_of_ours(generated):
    text = generated["examples/bytes_gpt2"]
    assert "It is a baseline" in text and "trust_remote_code" not in text and "import aft_hf" not in text
    assert ModelCard(text).data.tags == ["gpt2", "baseline"]


def card_as_if_run(root, name, *bases):
    """Return the card of a recipe and the table as after a run with an invented score."""
    folder = Path(name).parent
    (root / "configs" / folder).mkdir(exist_ok=True)
    for file in (*bases, Path(name).name):
        shutil.copyfile(ROOT / "configs" / folder / f"{file}.yaml", root / "configs" / folder / f"{file}.yaml")
    kept = root / "model_cards" / "results" / name
    kept.mkdir(parents=True)
    recipe = load_recipe(root / "configs" / f"{name}.yaml").model_dump()
    results = {"metrics": {"validation": {"accuracy": 0.8126}}, "parameters": 1, "recipe": recipe}
    (kept / "results.json").write_text(json.dumps(results))
    cards = script.recipe_cards(root)
    return cards[name], cards["README"]


def test_a_card_shows_the_paper_s_score_beside_ours_and_how_to_convert_what_it_begins_with(root):
    text, table = card_as_if_run(root, "imagenet/aft_conv_base_25_32_384_from_deit", "_training")
    card = ModelCard(text)
    assert "| 0.8126 |" in text and "| 0.834 | 0.813 (validation) |" in table
    assert "The paper reports 0.834 for this recipe (Table 8: AFT-conv ft 25/32)." in text
    assert (
        "\naft-hf convert facebook/deit-base-patch16-384 outputs/deit-base-384-converted --kernel-size 25 "
        "--num-heads 32 --position-bias-multiplier 1\naft-hf train configs/"
    ) in text
    assert "position bias multiplier" not in text
    assert card.data.base_model == "facebook/deit-base-patch16-384"


def test_a_converted_model_is_described_with_the_multiplier_that_the_command_gives_it_or_else_the_usual_one(root):
    path = root / "configs" / "imagenet" / "aft_conv_base_25_32_384_from_deit.yaml"
    path.parent.mkdir()
    recipe = (ROOT / path.relative_to(root)).read_text()
    shutil.copyfile(ROOT / "configs/imagenet/_training.yaml", path.with_name("_training.yaml"))
    option = "--position-bias-multiplier 1\n"
    for written, multiplier in (
        (option, 1.0),
        ("--position-bias-multiplier 2.5\n", 2.5),
        ("\n", POSITION_BIAS_MULTIPLIER),
    ):
        path.write_text(recipe.replace(option, written))
        facts = script.recipe_facts(root, "imagenet/aft_conv_base_25_32_384_from_deit")
        assert facts.config.position_bias_multiplier == multiplier


def test_a_baseline_of_images_is_an_image_classifier(root):
    card = ModelCard(card_as_if_run(root, "imagenet/deit_tiny", "_training", "_deit")[0])
    assert card.data.pipeline_tag == "image-classification" and card.data.tags == ["beit", "baseline"]
    assert "| image size | 224 x 224 |" in card.text and "vocabulary" not in card.text


@pytest.mark.parametrize(
    ("name", "bases", "kind", "task"),
    [
        ("imagenet/resnet50", ["_training"], "ResNet with 16 layers.", "image-classification"),
        ("imagenet/lambda_tiny", ["_training", "_lambda"], "lambda layers with 12 layers", "image-classification"),
        ("enwik8/performer_l12_d512_h8", ["_training", "_baseline"], "Performer with 12 layers", "text-generation"),
        ("enwik8/reformer_l12_d512_h8", ["_training"], "Reformer with 12 layers", "text-generation"),
    ],
)
def test_every_kind_of_baseline_has_a_card(root, name, bases, kind, task):
    card = ModelCard(card_as_if_run(root, name, *bases)[0])
    assert kind in card.text and "It is a baseline" in card.text and card.data.pipeline_tag == task
    assert ("import aft_hf.baselines" in card.text) == ("lambda" in name or "performer" in name)


def test_an_ablation_shows_its_switch(root):
    name = "imagenet/ablation_aft_conv_small_11_384_no_query"
    text, _ = card_as_if_run(root, name, "_training", "_aft", "aft_conv_small_11_384")
    assert "| use query | False |" in text and "gates the average" not in text


def test_a_card_follows_its_recipe_and_writing_again_changes_nothing(root):
    paths = script.write_recipe_cards(root)
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in script.write_recipe_cards(root)] == before and len(paths) == 2
    recipe = root / "configs" / f"{RUN}.yaml"
    recipe.write_text(recipe.read_text().replace("ten minutes", "eleven minutes"))
    script.write_recipe_cards(root)
    assert "eleven minutes" in (root / "model_cards" / f"{RUN}.md").read_text()


def test_the_card_of_a_recipe_without_results_is_removed_and_a_page_by_hand_is_not(root):
    script.write_recipe_cards(root)
    by_hand = root / "model_cards" / "notes.md"
    by_hand.write_text("# Notes")
    shutil.rmtree(root / "model_cards" / "results" / RUN)
    script.write_recipe_cards(root)
    assert [path.name for path in sorted((root / "model_cards").rglob("*.md"))] == ["README.md", "notes.md"]


def test_results_of_a_recipe_that_has_changed_since_are_refused(root):
    recipe = root / "configs" / f"{RUN}.yaml"
    recipe.write_text(recipe.read_text().replace("learning_rate: 3e-3", "learning_rate: 4e-3"))
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate=0\.003, and the recipe has 0\.004"):
        script.recipe_cards(root)


def test_data_that_nobody_named_are_asked_for(root):
    shutil.copytree(root / "configs" / "examples", root / "configs" / "mine")
    with pytest.raises(PublishError, match=r"configs/mine/bytes_aft_local\.yaml: add its data to DATA"):
        script.recipe_cards(root)


def test_of_a_run_is_kept_what_its_card_needs(root, run):
    kept = script.keep_run(root, RUN, run)
    results = json.loads((kept / "results.json").read_text())
    assert not {"losses", "evaluations"} & results.keys() and results["metrics"]
    assert (kept / "position_biases.png").read_bytes().startswith(b"\x89PNG")
    assert not list(root.rglob("*.safetensors"))[1:]  # only the weights of the run


def test_the_run_of_another_recipe_is_not_kept(root, run):
    with pytest.raises(ValueError, match="and the recipe has"):
        script.keep_run(root, "examples/bytes_gpt2", run)
    with pytest.raises(PublishError, match=r"results\.json: no such file"):
        script.keep_run(root, RUN, root)


def test_the_code_on_the_card_of_a_model_of_pixels_draws_an_image(tmp_path, monkeypatch):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "position_bias_dim": 4, "window_size": 4}
    config = AFTConfig(vocab_size=257, max_position_embeddings=3 * 4 * 4, bos_token_id=256, **sizes)
    AFTForCausalLM(config).save_pretrained(tmp_path / "me" / "pixels")
    (tmp_path / "me" / "pixels" / "results.json").write_text(json.dumps({"recipe": {"task": "pixels"}}))
    card = build_card(tmp_path / "me" / "pixels", repo_id="me/pixels")
    assert card.data.pipeline_tag == "unconditional-image-generation" and "tokenizer" not in card.text
    assert "Generates only images of 4 x 4 pixels" in card.text
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)[1], {})
    assert Image.open("drawn.png").size == (4, 4)
