"""Training samples: how a row becomes a sample, their order, and the fingerprints by which changed data are detected.

A sample is a function of its row and, in training, of its `SampleKey`, the order one of seed and step. A fingerprint
depends on the content alone, not on paths: the size, all labels, all bytes of a file, the first `WHOLE` of images.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from hashlib import sha256
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

from .image_files import ImageError, check_file, open_image


WHOLE = 2**30  # bytes, which take seconds to read
PICTURES = 256  # images, which take seconds to decode
# The values of sub-pixels are the tokens 0 .. 255. This token, which is no sub-pixel, begins the input of a model.
START_TOKEN = 256
EMPTY = " (in a CSV file: an empty cell, NA, null and the like)"  # the cause of a missing value

Rows = Any  # a Dataset of `datasets`, which only the extra "train" installs
Row = dict[str, Any]
Sample = dict[str, torch.Tensor]


class SampleKey(NamedTuple):
    """Index into a training dataset, which also determines the random numbers of the sample."""

    epoch: int
    index: int  # type: ignore[assignment]  # shadows the method of tuples
    repetition: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """Return the random generator of this sample."""
        return np.random.default_rng((seed, *self))


Maker = Callable[[Row, SampleKey | None], Sample]


def image_of(row: Row, column: str) -> Image.Image:
    """Return the image in a column of a row: a decoded one, the content of a file, its path (no address), or both."""
    value, name = row[column], None
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        value, name = value["bytes"] or value["path"], value["path"]
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, (bytes, str)) and value:
        return open_image(value, name and str(name))
    what = "" if value is None else f" but {shown(value)}: give a column of images, of image files, or of their paths"
    raise ImageError(f"has no image in column {column!r}{what}")


@dataclass
class PixelSequences:
    """Maker of sequences: `labels`, the 3 H W sub-pixels, and `input_ids`, shifted by the start token.

    Pixels are in raster order, the channels of a pixel side by side. Images of another size are resized (mean over
    areas). Samples with a key are flipped with probability 1/2, and their brightness is shifted, within 0 .. 255.
    """

    options: Any  # `PixelsData` of a recipe
    seed: int = 0  # of the augmentation

    def __call__(self, row: Row, key: SampleKey | None = None) -> Sample:
        image, size = image_of(row, self.options.image_column).convert("RGB"), (self.options.image_size,) * 2
        if image.size != size:
            image = image.resize(size, Image.Resampling.BOX)
        pixels = np.asarray(image)
        if key is not None:
            random = key.random(self.seed)
            shift = random.integers(-self.options.brightness_shift, self.options.brightness_shift, endpoint=True)
            if self.options.flip and random.random() < 0.5:
                pixels = pixels[:, ::-1]
            pixels = np.clip(pixels.astype(np.int64) + shift, 0, 255)
        labels = torch.from_numpy(pixels.reshape(-1).astype(np.int64))
        return {"input_ids": torch.cat([torch.tensor([START_TOKEN]), labels[:-1]]), "labels": labels}


@dataclass(eq=False)
class RowSamples(Dataset[Sample]):
    """Dataset of the samples of rows, indexed by `SampleKey` in training and by number in evaluation."""

    rows: Rows
    make: Maker
    columns: Sequence[str] = ()  # whose content is the fingerprint; that of the images first
    order: str = ""  # the end of the fingerprint: a digest of an unusual order of the classes

    def fingerprint(self) -> str:
        return sum_rows(self.rows, *self.columns) + self.order

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | SampleKey) -> Sample:
        index, own = (key.index, key) if isinstance(key, SampleKey) else (key, None)
        try:
            return self.make(self.rows[index], own)
        except ImageError as error:
            kept = self.rows._indices  # the row in the file, if these are some of its rows
            number = index if kept is None else kept.column(0)[index]
            raise ImageError(f"row {number}: {error}") from error


@dataclass(eq=False)
class GlobalBatches(Sampler[list[SampleKey]]):
    """Sampler of the micro-batches of one process, starting at any step.

    Each epoch is shuffled anew, and its last incomplete batch is dropped. The global batch of a step is split into
    micro-batches 0 .. n - 1; with P processes, process p takes p, p + P, p + 2 P, ... So micro-batch k of a step holds
    the same samples for any number of processes. With repetitions, successive micro-batches hold copies of the same
    samples, and an epoch of the same length a part of all (repeated augmentation, Hoffer et al. 2020, as in DeiT).
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    _: KW_ONLY
    seed: int
    start: int  # first step
    stop: int  # the step after the last
    process: int = 0  # index of this process (with context parallelism: of its group)
    processes: int = 1
    repetitions: int = 1

    def __iter__(self) -> Iterator[list[SampleKey]]:
        steps = steps_per_epoch(self.num_samples, self.global_batch_size)
        micro_batches = self.global_batch_size // self.micro_batch_size
        epoch, order = -1, np.empty(0, int)
        for step in range(self.start, self.stop):
            if step // steps != epoch:
                epoch = step // steps
                order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
            first = step % steps * self.global_batch_size
            places = range(first, first + self.global_batch_size)
            batch = [SampleKey(epoch, int(order[i // self.repetitions]), i % self.repetitions) for i in places]
            for k in range(self.process, micro_batches, self.processes):
                yield batch[k::micro_batches]


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of complete global batches in the data, of which it must have one."""
    if num_samples < global_batch_size:
        raise ValueError(f"the training data has {num_samples} samples, fewer than {global_batch_size=}: reduce it")
    return num_samples // global_batch_size


def sum_file(path: str | Path, span: tuple[int, int] | None = None) -> str:
    """Return the fingerprint of a file, or of a part of it, given as (start, stop) in bytes."""
    start, stop = (0, Path(path).stat().st_size) if span is None else span
    digest = sha256()
    with Path(path).open("rb") as file:
        file.seek(start)
        while block := file.read(min(stop - file.tell(), 2**20)):
            digest.update(block)
    return f"{stop - start} bytes, {digest.hexdigest()}"


def sum_rows(rows: Rows, image_column: str, *columns: str) -> str:
    """Return the fingerprint of a column of images and of other columns, in the order of the rows."""
    rows, left = rows.with_format("arrow"), WHOLE
    values = [rows.select_columns([column])[:][column].to_pylist() for column in columns]  # without the images
    names = [getattr(rows.features[column], "names", None) for column in columns]  # of numbered classes
    digest = sha256(repr((values, names)).encode())
    for table in rows.select_columns([image_column]).iter(100):
        for image in table[image_column].to_pylist():
            content, path = (image["bytes"], image["path"]) if isinstance(image, dict) else (image, image)
            if not (content and isinstance(content, bytes)):
                content = check_file(path).read_bytes() if isinstance(path, str) else repr(image).encode()
            digest.update(content)
            left -= len(content)
        if left <= 0:
            break
    return f"{len(rows)} rows, {digest.hexdigest()}"


def sum_images(images: Sequence[Image.Image]) -> str:
    """Return the fingerprint of images in the given order: of up to `PICTURES` evenly spaced ones."""
    count = min(len(images), PICTURES)
    chosen = (images[len(images) * i // count].convert("RGB") for i in range(count))
    return f"{len(images)} images, {sum_arrays(each for image in chosen for each in (image.size, image))}"


def sum_arrays(arrays: Iterable[Any]) -> str:
    """Return the fingerprint of arrays, of anything that numpy converts to one."""
    digest = sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
