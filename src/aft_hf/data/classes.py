"""Names of classes: whether there are any, and how to show them."""

import re
from collections.abc import Sequence


SHOWN = 5
NUMBER = re.compile(r"(?:LABEL_)?(\d+)")


def are_names(labels: Sequence[str]) -> bool:
    """Whether labels say what the classes are: numbers, and the LABEL_0 ... of transformers, do not."""
    return not all(NUMBER.fullmatch(str(label)) for label in labels)


def in_order_of_numbers(labels: Sequence[str], count: int) -> list[str]:
    """Labels by the class numbers 0 .. count - 1: those that are numbers at their own place, with "" between them,
    whatever order they come in (folders are sorted as text, "10" before "2"); names in the order that they have.

    Raises:
        ValueError: a number that is none of these, or two labels of the same number.
    """
    if are_names(labels):
        return list(labels)
    ordered = [""] * count
    for label in labels:
        found = NUMBER.fullmatch(label)
        assert found is not None
        number = int(found[1])
        if number >= count or ordered[number]:
            raise ValueError(
                f"label {label!r} is none of the class numbers 0 .. {count - 1}, or is there twice: give each class "
                "its number, or the name that the model has for it"
            )
        ordered[number] = label
    return ordered


def shortened(labels: Sequence[str]) -> str:
    """The first few labels, and how many there are."""
    more = f" ... ({len(labels)} in all)" if len(labels) > SHOWN else ""
    return f"{', '.join(repr(str(label)) for label in labels[:SHOWN])}{more}"
