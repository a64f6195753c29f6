"""Strings from files as text on a card: in Markdown, in its code and in its metadata."""

import json
import re


# What opens or closes something within a line of Markdown, with tables, strike-through and formulas. An underscore
# between letters does not.
SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|!(?=\[)")
# What becomes a link though nothing marks it.
BARE_LINKS = re.compile(r":(?=//)|@|(?<=www)\.", re.IGNORECASE)
HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def one_line(text: str) -> str:
    """Text without line breaks, control characters and those that turn the direction of writing."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def escaped(text: str) -> str:
    """Markdown that shows `text` and does nothing else, within a line or a cell of a table."""
    text = BARE_LINKS.sub(r"\\\g<0>", SPECIAL.sub(r"\\\g<0>", one_line(text)))
    return re.sub("[&<>]", lambda match: HTML[match[0]], text)


def code(text: str) -> str:
    """`text` as code within a line, but not within a table, where a bar would divide it."""
    text = one_line(text)
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def quoted(text: str) -> str:
    """Python that means `text`, between double quotes."""
    return json.dumps(one_line(text), ensure_ascii=False)


def plain(text: str) -> str:
    """Words for the metadata, which the Hub and others show in ways of their own: without brackets and quotes."""
    return one_line(re.sub(r"[<>\[\](){}`\"'\\]", " ", text)) or "unnamed"
