"""Recipes: defaults, overrides and error messages."""

from pathlib import Path

import pytest
import yaml
from runs import images_recipe

from aft_hf.training.recipe import build_recipe, load_recipe


MINIMAL = """
task: bytes
model: {architecture: aft, hidden_size: 32}
optimizer: {learning_rate: 3e-3}
epochs: 2
global_batch_size: 8
output_dir: out
smoke:
  steps: 5
  model: {num_hidden_layers: 1}
  data.seq_len: 16
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_numbers_may_be_written_as_people_do(recipe):
    assert load_recipe(recipe).optimizer.learning_rate == 0.003
    assert load_recipe(recipe, ["optimizer.learning_rate=1e-4"]).optimizer.learning_rate == 1e-4
    assert load_recipe(recipe, ["optimizer.learning_rate=1"]).optimizer.learning_rate == 1.0
    assert load_recipe(recipe, ["steps=010"]).steps == 10
    assert load_recipe(recipe, ["steps=1_000"]).steps == 1000


def test_scalars_have_the_types_of_yaml_1_2(recipe):
    assert load_recipe(recipe, ["mixed_precision=no"]).mixed_precision == "no"
    for text in ("yes", "0x10", "1:30", "2020-01-01", "2020_", "1__2", "_1", "1_.5", "e5"):
        assert load_recipe(recipe, [f"notes={text}"]).notes == text
        assert load_recipe(recipe, [f"notes={text!r}"]).notes == text


def test_overrides_reach_into_sections_and_come_after_smoke(recipe):
    small = load_recipe(recipe, ["model.num_hidden_layers=3", "data.train=a b"], smoke=True)
    assert small.model == {"architecture": "aft", "hidden_size": 32, "num_hidden_layers": 3}
    assert (small.data.seq_len, small.data.train, small.steps, small.epochs) == (16, "a b", 5, None)
    plain = load_recipe(recipe)
    assert (plain.data.seq_len, plain.steps, plain.epochs) == (1024, None, 2)
    recipe.write_text(MINIMAL.partition("smoke:")[0])
    with pytest.raises(ValueError, match="needs a section `smoke`"):
        load_recipe(recipe, smoke=True)


def test_one_of_two_alternatives_replaces_the_other(recipe):
    assert load_recipe(recipe, ["steps=7"]).epochs is None
    assert load_recipe(recipe, ["epochs=7"], smoke=True).steps is None
    given = ["task=bytes", "data={dataset: wiki, dataset_config: small, text_column: content}"]
    assert load_recipe(recipe, [*given, "data.train=x"]).data.model_dump(exclude_unset=True) == {"train": "x"}
    assert load_recipe(recipe, [*given, "data={train: x, dataset: null}"]).data.text_column == "text"
    kept = load_recipe(recipe, [*given, "data.dataset=other"]).data
    assert (kept.dataset, kept.dataset_config, kept.text_column) == ("other", "small", "content")
    # The sizes in the file describe another model; those beside `pretrained` are wanted.
    for order in (1, -1):
        for pretrained in ("model.pretrained=somewhere", "model={pretrained: somewhere}"):
            overrides = ["model.hidden_dropout_prob=0.2", pretrained][::order]
            assert load_recipe(recipe, overrides).model == {"hidden_dropout_prob": 0.2, "pretrained": "somewhere"}
    # A file inherits the fields of its base.
    child = recipe.parent / "child.yaml"
    child.write_text(f"base: {recipe.name}\nmodel: {{pretrained: somewhere, num_heads: 2}}")
    inherited = {"hidden_size": 32, "pretrained": "somewhere", "num_heads": 2}
    assert load_recipe(child).model == inherited
    assert load_recipe(child, smoke=True).model == inherited | {"num_hidden_layers": 1}
    with pytest.raises(ValueError, match="give either epochs or steps"):
        load_recipe(recipe, ["epochs=null"])


def test_a_printed_recipe_leaves_the_normalization_to_the_model_unless_it_is_given(tmp_path, images):
    values = images_recipe(tmp_path, images)
    pretrained, given = {"model": {"pretrained": "x"}}, {"data": values["data"] | {"image_std": [1.0, 1.0, 1.0]}}
    for more, expected in (({}, (False, False)), (pretrained, (False, False)), (pretrained | given, (False, True))):
        data = yaml.safe_load(build_recipe(values | more).to_yaml())["data"]
        assert ("image_mean" in data, "image_std" in data) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rat=1", r"^unknown key optimizer.learning_rat; did you mean optimizer.learning_rate\?$"),
        ("weight-decay=1", r"^unknown key weight-decay; did you mean optimizer.weight_decay\?$"),
        ("model.hiden_size=1", r"^unknown key model.hiden_size .*; did you mean model.hidden_size\?$"),
        ("data.image_size=1", r"^unknown key data.image_size; did you mean data."),
        ("abcdef=1", r"^unknown key abcdef; the page Keys of recipes of the documentation lists all$"),
        ("model.architecture=gtp2", r"^model.architecture='gtp2' is not known to transformers; did you mean gpt2\?$"),
        ("optimizer.learning_rate=fast", r"^optimizer.learning_rate='fast': must be a valid number$"),
        ("seed=9223372036854775808", r"^seed=9223372036854775808: must be less than 9223372036854775808$"),
        ("global_batch_size=true", r"^global_batch_size=True: must be a valid integer"),
        ("mixed_precision=fp8", r"^mixed_precision='fp8': must be 'no', 'bf16' or 'fp16'$"),
        ("schedule.name=cosin", r"^schedule.name='cosin': must be 'constant', .*'cosine', .*"),
        ("schedule.warmup_steps=5", r"^schedule.name='constant' has no warm-up; give constant_with_warmup$"),
        ("epochs=.inf", r"^epochs=inf: must be a finite number$"),
        (
            "model={architecture: aft, aft_type: full, aft_type: conv}",
            r"^model=.*: line 1: 'aft_type' is given twice$",
        ),
        ("model={\n\narchitecture: aft,\narchitecture: aft}", r"line 4: 'architecture' is given twice$"),
        ("steps=1.5", r"^steps=1.5: must be a valid integer$"),
        ("optimizer.learning_rate='1.5.2'", r"^optimizer.learning_rate='1.5.2': must be a valid number$"),
        ("optimizer.learning_rate='1e-3'", r"^optimizer.learning_rate='1e-3': must be a valid number without quotes$"),
        ("steps=1:30", r"^steps='1:30': must be a valid integer$"),
        ("compile=yes", r"^compile='yes': must be true or false$"),
        (r'output_dir="a\0b"', r"^output_dir=.*: line 1: a text must not contain '\\x00', got 'a\\x00b'"),
        (r'output_dir="\ud800"', r"^output_dir=.*: line 1: a text must not contain '\\ud800'"),
        (r'model={"a\0b": 1}', r"^model=.*: line 1: a text must not contain '\\x00'"),
        ("task=byte", r"^task='byte': must be one of bytes, tokens, pixels, images$"),
        ("output_dir=null", r"^output_dir=None: must be a valid string$"),
        ("steps", r"^'steps' is not an override: write key=value"),
        ("steps=[", r"^steps=\[: not YAML"),
    ],
)
def test_invalid_recipes_are_refused_with_the_key_its_value_and_what_is_allowed(recipe, override, message):
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(recipe, [override])
    assert "\n" not in str(error.value) or "not YAML" in str(error.value)


def test_the_home_directory_may_be_written_as_a_tilde(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    actual = load_recipe(recipe, ["output_dir=~/run", "data.train=~/text", "model.pretrained=~/model"])
    assert (actual.output_dir, actual.data.train) == ("/home/me/run", "/home/me/text")
    assert actual.model == {"pretrained": "/home/me/model"}


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match=r"^global_batch_size is missing; output_dir is missing$"):
        build_recipe(
            {"task": "bytes", "model": {"architecture": "aft"}, "optimizer": {"learning_rate": 1.0}, "steps": 1}
        )


def test_a_recipe_takes_over_what_it_does_not_say_from_its_base(recipe, tmp_path):
    path = tmp_path / "child.yaml"
    path.write_text("base: recipe.yaml\noptimizer.weight_decay: 0.5\nsteps: 3\nsmoke: {steps: 2}\noutput_dir: other")
    child, smoke = load_recipe(path), load_recipe(path, smoke=True)
    assert (child.optimizer.learning_rate, child.optimizer.weight_decay) == (0.003, 0.5)
    assert (child.steps, child.epochs, child.output_dir) == (3, None, "other")
    assert (smoke.steps, smoke.data.seq_len, smoke.model["num_hidden_layers"]) == (2, 16, 1)


@pytest.mark.parametrize("own", ["", "output_dir: own"])
def test_the_output_goes_by_the_name_of_the_file_where_the_recipe_or_its_section_smoke_names_none(tmp_path, own):
    path = tmp_path / "folder" / "name.yaml"
    path.parent.mkdir()
    path.write_text(MINIMAL.replace("output_dir: out", own))
    assert load_recipe(path).output_dir == (own.partition(" ")[2] or "outputs/folder/name")
    assert load_recipe(path, smoke=True).output_dir == "outputs/smoke/folder/name"
    assert load_recipe(path, ["output_dir=here"], smoke=True).output_dir == "here"
    path.write_text(path.read_text().replace("smoke:", "smoke:\n  output_dir: small"))
    assert load_recipe(path, smoke=True).output_dir == "small"


@pytest.mark.parametrize(
    ("processes", "micro", "expected"),
    [(1, 2, (2, 4)), (2, 2, (2, 2)), (4, None, (2, 1)), (3, 1, None), (2, 3, None), (16, None, None)],
)
def test_accumulation_follows_from_processes_and_micro_batches(recipe, processes, micro, expected):
    resolved = load_recipe(recipe, [f"micro_batch_size={micro or 'null'}"])
    if expected is not None:
        assert resolved.accumulation(processes) == expected
        return
    with pytest.raises(ValueError, match="global_batch_size=8 is not a multiple of processes x micro_batch_size"):
        resolved.accumulation(processes)


def test_many_unknown_keys_cost_no_more_than_those_that_are_named(recipe, monkeypatch):
    asked = []
    monkeypatch.setattr("difflib.get_close_matches", lambda key, *_, **__: asked.append(key) or [])
    recipe.write_text(MINIMAL + "".join(f"key{i}: 1\n" for i in range(1000)))
    with pytest.raises(ValueError, match=r"unknown key key0; .*unknown key key2; .*; and 997 more"):
        load_recipe(recipe)
    assert len(asked) == 3
