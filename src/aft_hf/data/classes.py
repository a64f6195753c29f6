"""Names of classes: whether there are any, and how to show them."""

import re
from collections.abc import Sequence


SHOWN = 5


def are_names(labels: Sequence[str]) -> bool:
    """Whether labels say what the classes are: numbers, and the LABEL_0 ... of transformers, do not."""
    return not all(re.fullmatch(r"(LABEL_)?\d+", str(label)) for label in labels)


def shortened(labels: Sequence[str]) -> str:
    """The first few labels, and how many there are."""
    more = f" ... ({len(labels)} in all)" if len(labels) > SHOWN else ""
    return f"{', '.join(repr(str(label)) for label in labels[:SHOWN])}{more}"
