"""Hooks of the documentation site: pages generated from code and other files, formulas, and types in docstrings.

Generated pages are the fields of AFTConfig, the keys of recipes, the command line reference, CONTRIBUTING.md,
CHANGELOG.md, the model cards and the notebooks.
"""

import dataclasses
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]


class Values(griffe.Extension):
    """Shows the values of defaults that are constants of a module, and the whole signatures of mixers."""

    def on_function(self, *, func, loader, **kwargs):
        for parameter in func.parameters:
            if isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
                parameter.default = loader.modules_collection[parameter.default.canonical_path].value

    def on_package(self, *, pkg, loader, **kwargs):
        """Replace the `**options` of mixers by the arguments of their base classes."""
        mixers = [each for name, each in pkg["mixers_aft"].classes.items() if name.startswith("AFT")]
        signatures = [griffe.Parameters(*_arguments(mixer)) for mixer in mixers]
        for mixer, parameters in zip(mixers, signatures):
            mixer.set_member("__init__", griffe.Function("__init__", parameters=parameters, lineno=mixer.lineno))


def _arguments(mixer):
    """Return the parameters of `__init__`, with those that `**options` passes to the base class."""
    if "__init__" not in mixer.members:
        return _arguments(mixer.resolved_bases[0])
    own = mixer.members["__init__"]
    kept = [each for each in own.parameters if each.kind is not griffe.ParameterKind.var_keyword]
    if len(kept) == len(own.parameters):
        return kept
    call = re.search(r"super\(\)\.__init__\((.*?)\)\n", f"{own.source}\n", re.DOTALL)[1]
    known = {each.name for each in kept} | set(re.findall(r"(\w+)=", call))
    inherited, keyword = _arguments(mixer.resolved_bases[0]), griffe.ParameterKind.keyword_only
    return kept + [each for each in inherited if each.kind is keyword and each.name not in known]


def on_files(files, config):
    """Add the generated pages."""
    pages = {"reference/configuration.md": _configuration(), "reference/recipes.md": _recipe_keys()}
    pages |= _command_line()
    pages |= {"contributing.md": _page("CONTRIBUTING.md"), "changelog.md": _page("CHANGELOG.md")}
    pages["models.md"] = re.sub(r"\]\((\S+)/README.md\)", r"](models/\1.md)", _page("model_cards/README.md"))
    for path in sorted((ROOT / "model_cards").glob("*/README.md")):
        pages[f"models/{path.parent.name}.md"] = path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = _notebook(path)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_content(content, page, config, files):
    """Set formulas as MathML, and types in docstrings in the form of transformers: (`int`, *optional*)."""
    content = re.sub(r"(?<=\()<code>([^<]*`[^<]*)</code>", lambda match: _markdown(match[1]), content)
    return re.sub(r'class="arithmatex">\\([(\[])(.*?)\\[)\]]', _formula, content, flags=re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    math = convert(html.unescape(match[2]), display="block" if match[1] == "[" else "inline")
    # A prime as a superscript is too small to see without a font for mathematics.
    prime = r'<mrow><mi>\1</mi><mo lspace="0" rspace="0">&#x02032;</mo></mrow>'
    return 'class="arithmatex">' + re.sub(r"<msup><mi>(\w)</mi><mi>&#x02032;</mi></msup>", prime, math)


def _markdown(text: str) -> str:
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    return re.sub(r"\*(\w+)\*", r"<em>\1</em>", text)


def _configuration() -> str:
    """Return the fields of AFTConfig with their types, ranges and defaults."""
    from aft_hf import AFTConfig

    fields = {field.name: field for field in dataclasses.fields(AFTConfig)}
    sections = griffe.Docstring(AFTConfig.__doc__, parser="google").parse("google", warnings=False)
    lines = ["# Configuration", "`aft_hf.AFTConfig`: " + sections[0].value.replace("\n", " ")]
    lines.append("A wrong type, a value out of range and contradicting fields are a `ValueError`.")
    for parameter in sections[1].value:
        field = fields.get(parameter.name, fields.get(f"_{parameter.name}"))
        allowed = field.metadata.get("range")
        range_ = f", {_number(allowed[0])} to {_number(allowed[1])}" if allowed else ""
        default = repr(field.default).replace("'", '"')
        meaning = parameter.description.replace("\n", " ")
        lines.append(f"- **`{parameter.name}`** (`{_type(field.type)}`{range_}, default: `{default}`): {meaning}")
    return "\n\n".join(lines)


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def _type(annotation) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


# Keys of a recipe's file that its schema lacks, since `load_recipe` resolves them.
FILE_KEYS = {
    "base": ("text, optional", "Another recipe, relative to this file, whose values this one overrides."),
    "smoke": ("mapping, optional", "Values that replace others with --smoke, for a run of a few seconds."),
}


def _recipe_keys() -> str:
    """Return the type, default and meaning of every key of recipes: those of all tasks, then those of each task."""
    from aft_hf.training.recipe import RECIPES

    keys = {task: _entries(kind.model_json_schema()) for task, kind in RECIPES.items()}
    shared = set.intersection(*(set(entries.items()) for entries in keys.values()))
    sections = {"Keys of every recipe": shared | FILE_KEYS.items()}
    sections |= {f"Other keys with task: {task}": entries.items() - shared for task, entries in keys.items()}
    parts = ["# Keys of recipes", "[Training from recipes](../training.md#write-a-recipe) has an example."]
    for title, entries in sections.items():
        parts.append(f"## {title}")
        parts.append("\n".join(f"- **`{key}`** ({kind}): {meaning}" for key, (kind, meaning) in sorted(entries)))
    return "\n\n".join(parts)


def _entries(
    section: dict[str, Any], schema: dict[str, Any] | None = None, prefix: str = ""
) -> dict[str, tuple[str, str]]:
    """Return the types and meanings of the keys of a section by key, from its JSON schema."""
    schema = schema or section
    entries: dict[str, tuple[str, str]] = {}
    for name, field in section["properties"].items():
        (kind,) = (each for each in field.get("anyOf", [field]) if each.get("type") != "null")
        key = f"{prefix}{name}"
        if "$ref" in kind:
            entries |= _entries(schema["$defs"][kind["$ref"].rpartition("/")[2]], schema, f"{key}.")
        else:
            default = f"default {json.dumps(field['default'])}" if "default" in field else "required"
            has_other = field.get("default", "") is None or "Default:" in field["description"]
            optional = "optional" if has_other else default
            entries[key] = (f"{_type_of(kind)}, {optional}", field["description"])
    return entries


def _type_of(kind: dict[str, Any]) -> str:
    """Describe the JSON schema of a value, with its bounds."""
    if "enum" in kind or "const" in kind:
        return " or ".join(kind.get("enum", [kind.get("const")]))
    names = {"string": "text", "boolean": "true or false", "object": "mapping", "array": "list"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {kind[name]}" for name, sign in signs.items() if kind.get(name, 2**63) < 2**63]
    return f"{names.get(kind['type'], kind['type'])} {' and '.join(bounds)}".rstrip()


def _page(name: str) -> str:
    """Return a page of the repository's root directory, with its links relative to docs/."""
    return re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))


def _notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown, with a link to the file. Notebooks are stored without outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    title, *rest = parts
    return "\n\n".join([title, f"[Download this notebook]({path.name})", *rest])


def _command_line() -> dict[str, str]:
    """Return a page for each command of `aft-hf`, generated by typer."""
    command = [sys.executable, "-m", "typer", "aft_hf.cli", "utils", "docs", "--name", "aft-hf"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _, *commands = re.split(r"^#(?=# `aft-hf )", text, flags=re.MULTILINE)
    return {f"reference/cli/{re.match(r'# `aft-hf (.*)`', each)[1]}.md": each for each in commands}
