"""Reading untrusted files of any content: each becomes a value of a declared type, or an `InputError`."""

from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from .errors import InputError, described, explain, explained


LARGEST_JSON = 2**26  # bytes: ten times the size of the weight index or results of the largest existing models
LARGEST_YAML = 2**20  # characters, which take half a minute

Content = TypeVar("Content")


class Document(BaseModel):
    """Base class of the schemas of JSON objects: declared keys have exactly their types, other keys are kept."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError("must name a file beside this one")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


def _at_most(largest: int) -> AfterValidator:
    """Return a validator that limits numbers, also in objects and lists."""

    def check(value: Any) -> Any:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(part)
        if isinstance(value, (int, float)) and not abs(value) <= largest:
            raise ValueError(f"must be at most {largest}")
        return value

    return AfterValidator(check)


def _numbered(labels: dict[str, Any] | None) -> dict[str, Any] | None:
    if labels is not None and labels.keys() != {str(number) for number in range(len(labels))}:
        raise ValueError("must map each label 0 .. num_labels - 1 to its name")
    return labels


Layers = Annotated[Any, _at_most(2**12)]
Side = Annotated[Any, _at_most(2**12)]  # pixels
Number = Annotated[float, Field(allow_inf_nan=False)]


class ModelConfig(Document):
    """Schema of any config.json: the keys that select the classes, and those that configs make lists of."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, str | list[str | None]] | None = None
    id2label: Annotated[dict[str, Any] | None, AfterValidator(_numbered)] = None
    num_labels: Annotated[Any, _at_most(2**22)] = None
    num_hidden_layers: Layers = None
    n_layer: Layers = None
    n_layers: Layers = None
    num_layers: Layers = None
    tokenizer_class: str | None = None
    image_processor_type: str | None = None


class ImageProcessorConfig(Document):
    """Schema of preprocessor_config.json: the class, the image sizes in any form, and the normalization."""

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None
    size: Side = None
    crop_size: Side = None
    pad_size: Side = None
    rescale_factor: Number | None = None
    image_mean: Number | list[Number] | None = None
    image_std: Number | list[Number] | None = None


class ProcessorConfig(Document):
    """Schema of processor_config.json: the image processor, if it is stored there."""

    image_processor: ImageProcessorConfig | None = None


class TokenizerConfig(Document):
    """Schema of tokenizer_config.json: the class, and the maximum length."""

    tokenizer_class: str | None = None
    model_max_length: Annotated[Number, Field(ge=1, multiple_of=1)] | None = None


class WeightsIndex(Document):
    """Schema of the index of sharded weights: the file of each tensor."""

    weight_map: Annotated[dict[str, FileName], Field(min_length=1)]


def parse_json(content: str | bytes, kind: type[Content], source: str) -> Content:
    """Parse a JSON text as a value of type `kind`, any that pydantic supports; the error names the `source`."""
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as problems:
        raise InputError(f"{source}: {explain(problems)}") from problems


def read_json(path: Path, kind: type[Content]) -> Content:
    """Read a regular file of up to `LARGEST_JSON` bytes as a value of type `kind`; see `parse_json`."""
    return parse_json(_content(path), kind, str(path))


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, with the checks of `read_json`."""
    with explained(f"{path}: is not UTF-8 text"):
        text = _content(path).decode()
    return text


def _content(path: Path) -> bytes:
    with explained(f"{path}: cannot be read"):
        if not path.is_file():  # opening a pipe waits for a writer, and reading it may never end
            raise InputError(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            content = file.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise InputError(f"{path}: is larger than {LARGEST_JSON >> 20} MiB, the limit for {path.name}")
    return content


class PlainLoader(yaml.SafeLoader):
    """YAML loader that refuses aliases: nine lines of them can expand to a billion values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*) are not supported")
        return super().compose_node(parent, index)


def parse_yaml(text: str, source: str, loader: type[PlainLoader] = PlainLoader) -> Any:
    """Return the value of a YAML text of up to `LARGEST_YAML` characters."""
    if len(text) > LARGEST_YAML:
        raise InputError(f"{source}: is larger than {LARGEST_YAML >> 20} MiB, the limit for YAML")
    try:
        return yaml.load(text, loader)  # nosec B506  # a SafeLoader
    except Exception as problem:  # YAML's constructors pass on Python's errors for invalid dates and numbers
        raise InputError(f"{source}: not YAML that can be read: {described(problem)}") from None


def parse_header(text: str, source: str) -> dict[str, Any]:
    """Return the metadata in the YAML header of a README.md; they are empty if it has none."""
    text = text.removeprefix("\ufeff")
    matches = (REGEX_YAML_BLOCK.search(each) for each in (text, StringIO(text, newline=None).read()))
    raw, header = (StringIO(match[2] if match else "", newline=None).read() for match in matches)
    if raw != header:  # libraries read one or the other
        raise InputError(f"{source}: its header has line breaks of several kinds; save it with line feeds")
    values = parse_yaml(header, source)
    if not isinstance(values, dict | None):
        raise InputError(f"{source}: its header must be a mapping of keys to values")
    return values or {}
