"""Training on streams: the same results for any number of processes, and after a kill."""

from pathlib import Path

import pytest
from datasets import Dataset
from runs import (
    assert_killing_changes_nothing,
    assert_same_run,
    finish,
    images_recipe,
    pixels_recipe,
    results_of,
    run,
    start,
    streamed,
    write_shards,
)

from aft_hf.training.manifest import read_manifest, write_manifest


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def shards(tmp_path_factory, images) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), images)


def test_a_stream_is_learned_and_evaluated_as_the_same_rows_in_place(tmp_path, images, shards):
    values = streamed(images_recipe(tmp_path, images, micro_batch_size=None), shards, workers=0)
    values |= {"steps": 40, "evaluate_every": 40, "save_every": 40}
    results = run(values)
    assert results["metrics"]["validation"]["accuracy"] > 0.8
    in_place = values | {"data": values["data"] | {"streaming": False}, "model": {"pretrained": values["output_dir"]}}
    in_place |= {"steps": 1, "optimizer": {"learning_rate": 1e-30}, "output_dir": str(tmp_path / "in-place")}
    assert run(in_place)["metrics"] == {"validation": pytest.approx(results["metrics"]["validation"], rel=1e-5)}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pixels", "images"])
def test_two_processes_have_the_run_of_one_and_count_each_sample_once(tmp_path, images, shards, task):
    recipe = {"pixels": pixels_recipe, "images": images_recipe}[task](tmp_path, images)
    # 11 or 5 evaluated rows are no multiple of 2 processes x 2 samples.
    values = streamed(recipe, shards, workers=0)
    alone = run(values | {"output_dir": str(tmp_path / "alone")})
    assert finish(start(values | {"steps": 6}, 2)) == [0, 0]
    assert finish(start(values, 2)) == [0, 0]
    assert results_of(values)["processes"] == 2
    assert_same_run(results_of(values), alone)


def test_a_killed_run_goes_on_from_its_position_as_if_never_stopped(tmp_path, images, shards):
    values = streamed(images_recipe(tmp_path, images, evaluate_every=9), shards, workers=2)
    assert_killing_changes_nothing(values, kills=2, seed=1)


def test_other_rows_and_another_buffer_are_another_run(tmp_path, images, shards):
    values = streamed(pixels_recipe(tmp_path, images), shards) | {"steps": 3}
    run(values)
    with pytest.raises(ValueError, match=r"made with data.shuffle_buffer=5, and the recipe has 6"):
        run(values | {"data": values["data"] | {"shuffle_buffer": 6}, "steps": 6})
    train, validation = (str(shards / name) for name in ("train-1.parquet", "validation-0.parquet"))
    with pytest.raises(ValueError, match="other training data"):
        run(streamed(values, shards, dataset=None, train=train, validation=validation))


def test_a_position_of_any_shape_ends_in_one_line(tmp_path, images, shards):
    values = streamed(pixels_recipe(tmp_path, images), shards, shuffle_buffer=7) | {"steps": 3, "save_every": 3}
    run(values)
    checkpoint = tmp_path / "run/checkpoints/step-000000003"
    manifest = read_manifest(checkpoint)
    assert manifest.position[3] is not None
    write_manifest(checkpoint, manifest.model_copy(update={"position": (*manifest.position[:3], {"rows": 1})}))
    with pytest.raises(ValueError, match="position in the stream of training data cannot be used") as stopped:
        run(values | {"steps": 6})
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("task", ["pixels", "images"])
def test_files_folders_and_generated_rows_are_streamed_too(tmp_path, images, task):
    recipe = {"pixels": pixels_recipe, "images": images_recipe}[task](tmp_path, images)
    for i, row in enumerate(Dataset.from_parquet(str(images))):
        folder = tmp_path / "images" / str(row["label"])
        folder.mkdir(parents=True, exist_ok=True)
        row["image"].save(folder / f"{i}.png")
    sources = ({"train": str(path), "validation": str(path)} for path in (images, tmp_path / "images"))
    generated = {"train": "generated", "max_train_samples": 9, "max_eval_samples": 3}
    for number, data in enumerate([*sources, generated]):
        values = streamed(recipe, tmp_path, workers=0, dataset=None, **data) | {"steps": 2}
        assert len(run(values | {"output_dir": str(tmp_path / f"run-{number}")})["losses"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None, "epochs": 2}, "the length of an epoch is unknown with data.streaming: give steps, "),
        ({"save_every": None}, "give steps, evaluate_every and save_every"),
        ({"schedule": {"warmup_epochs": 1}}, "warmup_steps in place of warmup_epochs"),
        ({"task": "bytes"}, r"unknown key data\.streaming"),
    ],
)
def test_a_stream_has_no_epochs(tmp_path, images, shards, changes, message):
    values = streamed(pixels_recipe(tmp_path, images), shards)
    with pytest.raises(ValueError, match=message):
        run(values | changes)


def test_a_stream_is_not_divided_nor_searched_for_classes(tmp_path, images):
    values = streamed(images_recipe(tmp_path, images), tmp_path, dataset=None, train=str(images), workers=0)
    with pytest.raises(ValueError, match="a held-out set cannot be taken from a stream: give validation data"):
        run(values)
    plain = tmp_path / "plain.parquet"
    rows = Dataset.from_parquet(str(images))
    rows.add_column("name", [str(label) for label in rows["label"]]).to_parquet(plain)
    data = values["data"] | {"train": str(plain), "validation": str(plain), "label_column": "name"}
    with pytest.raises(ValueError, match="column 'name' must have the type ClassLabel"):
        run(values | {"data": data})
