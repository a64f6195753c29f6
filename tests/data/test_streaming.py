"""Streaming datasets: the order of the rows, and resuming from a position."""

import json
from itertools import islice

import numpy as np
import pytest
from datasets import Dataset, Features, Image, load_dataset
from PIL import Image as PILImage

from aft_hf.data.samples import StreamedEvaluation, StreamedSamples
from aft_hf.data.streaming import StreamedBatches


ROWS = 23


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Three parquet files with 23 images. The colour of an image is its number."""
    images = [PILImage.new("RGB", (2, 2), (i, i, i)) for i in range(ROWS)]
    rows = Dataset.from_dict({"image": images, "number": list(range(ROWS))}).cast_column("image", Image())
    folder = tmp_path_factory.mktemp("files")
    for i in range(3):
        rows.shard(3, i).to_parquet(folder / f"{i}.parquet")
    return sorted(map(str, folder.iterdir()))


def stream(files):
    return load_dataset("parquet", data_files=files, split="train", streaming=True)


def sampler(files, *, start=0, stop=12, size=6, micro=2, shuffle_buffer=5, **options) -> StreamedBatches:
    options = {"seed": 3, "shuffle_buffer": shuffle_buffer, "start": start, "stop": stop} | options
    return StreamedBatches(stream(files), size, micro, **options)


def numbers(batches) -> list[list[int]]:
    return [[streamed.row["number"] for streamed in batch] for batch in batches]


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(files):
    keys = [streamed for batch in sampler(files, stop=23) for streamed in batch]  # 138 = 6 x 23 samples
    epochs = [[streamed.row["number"] for streamed in keys if streamed.key.epoch == epoch] for epoch in range(6)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 6 and list(range(ROWS)) not in epochs
    assert len({streamed.key for streamed in keys}) == len(keys)
    assert numbers(sampler(files)) == numbers(sampler(files)) != numbers(sampler(files, seed=4))


def test_files_come_in_another_order_in_each_epoch_and_rows_move_only_within_a_block(files):
    batches = numbers(sampler(files, stop=ROWS, size=4, micro=4, shuffle_buffer=1))
    epochs = np.array(batches).reshape(-1, ROWS)
    file_of = np.repeat([0, 1, 2], [8, 8, 7])
    orders = {tuple(dict.fromkeys(file_of[epoch].tolist())) for epoch in epochs}
    assert len(orders) > 1 and all(len(order) == 3 for order in orders)
    mixed = np.array(numbers(sampler(files, stop=ROWS, size=4, micro=4, shuffle_buffer=8))).reshape(-1, ROWS)
    assert all(set(a[:8]) == set(b[:8]) and list(a) != list(b) for a, b in zip(epochs, mixed))


@pytest.mark.parametrize("buffer", [1, 5, 100])
@pytest.mark.parametrize("repetitions", [1, 3])
@pytest.mark.parametrize("step", [1, 4, 11])
def test_a_run_goes_on_from_a_position_as_if_never_stopped(files, buffer, repetitions, step):
    options = {"shuffle_buffer": buffer, "repetitions": repetitions}
    whole = [[(s.key, s.row["number"]) for s in batch] for batch in sampler(files, **options)]
    first = sampler(files, **options)
    iterator = iter(first)
    for earlier in range(1, step):  # of the checkpoints before
        list(islice(iterator, 3))
        rest = sampler(files, start=earlier, position=first.position(earlier), **options)
        assert next(iter(rest))[0].key == whole[earlier * 3][0][0]
    assert len(list(islice(iterator, 3 + 4))) == 3 + 4 or step == 11  # workers prefetch more than a step
    position = json.loads(json.dumps(first.position(step)))
    for place in (position, ()):  # without a position, all earlier rows are read and skipped
        rest = sampler(files, start=step, position=place, **options)
        assert [[(s.key, s.row["number"]) for s in batch] for batch in rest] == whole[step * 3 :]


def test_what_lies_before_a_position_is_not_read_again(files):
    read = []

    def watched(**options) -> StreamedBatches:
        batches = sampler(files, **options)
        batches.rows = batches.rows.map(lambda row: read.append(row["number"]) or row)
        return batches

    first = watched()
    list(islice(first, 9 * 3))
    position = first.position(9)  # 54 samples: two epochs of 23 and 8 more, which complete a block of 5
    assert position[:3] == (51, 2, 1) and len(read) == 56
    read.clear()
    next(iter(watched(start=9, position=position)))
    assert len(read) == 10  # two blocks of 5: 2 rows are left of the first, and a batch needs 6


def test_processes_share_the_micro_batches_of_one_process(files):
    alone = numbers(sampler(files, size=8))
    two = [numbers(sampler(files, size=8, process=process, processes=2)) for process in (0, 1)]
    assert [batch for pair in zip(*two) for batch in pair] == alone


def test_images_are_decoded_where_samples_are_made_and_not_before(files):
    samples = StreamedSamples(stream(files), lambda row, key: (row["image"].getpixel((0, 0))[0], key))
    (batch, *_) = sampler(files, stop=1)
    assert isinstance(batch[0].row["image"]["bytes"], bytes)
    assert [samples[streamed] for streamed in batch] == [(s.row["number"], s.key) for s in batch]
    assert list(StreamedEvaluation(stream(files), lambda row, _: row["number"])) == list(range(ROWS))


def test_a_stream_from_elsewhere_is_told_by_the_first_samples_of_some_shards(files, tmp_path):
    def fingerprint(names: list[str]) -> str:
        return StreamedSamples(stream(names), lambda row, _: {"number": np.array(row["number"])}).fingerprint()

    assert fingerprint(files) == fingerprint(files)
    changed = tmp_path / "changed.parquet"
    for i in range(len(files)):
        rows = Dataset.from_parquet(str(files[i]))
        rows.select([1, 0, *range(2, len(rows))]).to_parquet(changed)
        assert fingerprint([*files[:i], str(changed), *files[i + 1 :]]) != fingerprint(files)
    assert fingerprint(files[:-1]) != fingerprint(files)


def test_a_stream_without_rows_is_an_error(tmp_path):
    features = Features({"image": Image()})
    Dataset.from_dict({"image": []}, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        list(sampler([str(tmp_path / "a.parquet")]))
    with pytest.raises(ValueError, match="has no rows"):
        StreamedSamples(stream([str(tmp_path / "a.parquet")]), lambda row, key: row).fingerprint()
