"""Escaping of strings from files for the model card: for its Markdown, its code and its metadata."""

import html
import json
import re

from ..errors import printable


# Characters with a meaning inside a line of Markdown, including tables, strikethrough and formulas. An underscore
# between letters has none.
SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|!(?=\[)")
# Parts of text that become links without any markup.
BARE_LINKS = re.compile(r":(?=//)|@|(?<=www)\.", re.IGNORECASE)


def escaped(text: str) -> str:
    """Return Markdown that shows `text` literally, inside a line or a table cell."""
    return html.escape(BARE_LINKS.sub(r"\\\g<0>", SPECIAL.sub(r"\\\g<0>", printable(text))), quote=False)


def code(text: str) -> str:
    """Return `text` as inline code. It is not for tables, where a vertical bar would end the cell."""
    text = printable(text)
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def quoted(text: str) -> str:
    """Return a Python string literal of `text` in double quotes."""
    return json.dumps(printable(text), ensure_ascii=False)


def plain(text: str) -> str:
    """Return `text` without brackets, quotes and backslashes, for metadata that others display in their own ways."""
    return printable(re.sub(r"[<>\[\](){}`\"'\\]", " ", text)) or "unnamed"
