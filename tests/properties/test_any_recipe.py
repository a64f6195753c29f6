"""Property tests of recipes: any YAML is a recipe or is refused in one line; valid recipes survive a round trip."""

import json
from pathlib import Path

import pytest
import yaml
from hostile import JSON, VALUES, places, with_value
from hypothesis import given
from hypothesis import strategies as st

from aft_hf.training.recipe import Recipe, build_recipe, load_recipe


COUNTS = st.integers(1, 10**6)
RATES = st.floats(1e-8, 1, allow_nan=False)
TASKS = {"bytes": {"seq_len": 8}, "pixels": {"image_size": 4}, "images": {"image_size": 8, "label_column": "label"}}


@st.composite
def valid_recipes(draw) -> dict:
    task = draw(st.sampled_from(sorted(TASKS)))
    values = {
        "task": task,
        "notes": draw(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)),
        "model": {"architecture": "aft", "hidden_size": 8} if draw(st.booleans()) else {"pretrained": "name"},
        "data": TASKS[task] | {"train": "file", "workers": draw(st.integers(0, 4))},
        "optimizer": {"learning_rate": draw(RATES), "betas": [0.9, draw(st.sampled_from([0.95, 0.999]))]},
        "schedule": {"name": draw(st.sampled_from(["linear", "cosine"])), "warmup_steps": draw(st.integers(0, 9))},
        "global_batch_size": draw(COUNTS),
        "mixed_precision": draw(st.sampled_from(["no", "bf16", "fp16"])),
        "max_grad_norm": draw(st.none() | RATES),
        "ema_decay": draw(st.none() | st.sampled_from([0.5, 0.999])),
        "seed": draw(st.integers(0, 2**40)),
        "output_dir": "out",
    }
    return values | draw(st.sampled_from([{"steps": 3}, {"epochs": 1.5}]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


def read(folder: Path, text: str | bytes, *overrides: str) -> Recipe | str:
    """Return the recipe, or the error message if the text is refused."""
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        return load_recipe(path, overrides)
    except ValueError as error:  # any other exception fails the test
        message = " ".join(str(error).split())
        assert message.isprintable() and len(message) < 3000
        return message


@given(valid_recipes())
def test_a_valid_recipe_survives_a_round_trip_through_yaml(folder, values):
    recipe = build_recipe(values)
    assert read(folder, recipe.to_yaml()) == recipe
    values["notes"] = ""  # PyYAML's safe_dump leaves texts such as 3e-4 unquoted, which recipes read as numbers
    assert read(folder, yaml.safe_dump(values)) == build_recipe(values)


@pytest.mark.parametrize("notes", ["\x85", "a\u2028b", "\u2029", "3e-4", "1E5", "1_0.5e+3"])
def test_a_string_that_yaml_could_misread_survives_a_round_trip(folder, notes):
    values = {"task": "bytes", "model": {"pretrained": "name"}, "data": {"train": "file"}, "output_dir": "out"}
    values |= {"notes": notes, "optimizer": {"learning_rate": 1.0}, "global_batch_size": 1, "steps": 1}
    recipe = build_recipe(values)
    assert read(folder, recipe.to_yaml()) == recipe


@given(valid_recipes(), st.floats(0, 1, exclude_max=True), st.sampled_from(VALUES) | JSON)
def test_any_value_at_any_place_of_a_recipe_is_read_or_refused(folder, values, pick, value):
    where = list(places(values))
    place = where[int(pick * len(where))]
    read(folder, json.dumps(with_value(values, place, value)))


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_a_recipe_or_is_refused(folder, text):
    read(folder, text)


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_override_is_applied_or_refused(folder, key, value):
    values = {"task": "bytes", "model": {"architecture": "aft"}, "optimizer": {"learning_rate": 1.0}, "steps": 1}
    read(folder, yaml.safe_dump(values | {"global_batch_size": 1}), f"{key}={value}", f"notes={value}")


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))])
# Inputs that once gave another error or a hang: (YAML, overrides, part of the error message).
FOUND = {
    "aliases of aliases": (BOMB, (), "aliases (*) are not supported"),
    "an alias of itself": ("a: &a [*a]", (), "aliases (*) are not supported"),
    "100,000 lists": ("[" * 100_000, (), "not YAML"),
    "a long integer": ("seed: " + "1" * 5_000, (), "not YAML"),
    "a base that is empty": ("base: ''", (), "base=''"),
    "a base that no file can have": ('base: "a\\0b"', (), "a text must not contain"),
    "an override of 10,000 levels": ("{}", ("a." * 10_000 + "a=1",), "must have at most 20 dots"),
    "a key of 5,000 levels": ("? " + "a." * 5_000 + "a\n: 1", (), "must have at most 20 dots"),
    "a missing base": ("base: other.yaml", (), "other.yaml: no such file"),
    "no text": (b"\xff\xfe\x00", (), "is not UTF-8 text"),
}


@pytest.mark.parametrize("case", FOUND)
def test_an_input_that_once_failed_is_refused_in_one_line(folder, case):
    text, overrides, named = FOUND[case]
    said = read(folder, text, *overrides)
    assert isinstance(said, str) and named in said


def test_a_pair_of_recipes_that_are_each_others_base_is_refused(folder):
    (folder / "one.yaml").write_text("base: two.yaml")
    (folder / "two.yaml").write_text("base: one.yaml")
    with pytest.raises(ValueError, match="leads back"):
        load_recipe(folder / "one.yaml")
