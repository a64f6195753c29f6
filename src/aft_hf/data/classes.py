"""Classes: names and numbers of class labels, lists of them for messages, and which models choose one class."""

import re
from collections.abc import Sequence

from transformers import PreTrainedConfig


SHOWN = 5
NUMBER = re.compile(r"(?:LABEL_)?(\d+)")


def are_names(labels: Sequence[str]) -> bool:
    """Return whether the labels are class names, and not just numbers or the LABEL_0, LABEL_1, ... of transformers."""
    return not all(NUMBER.fullmatch(str(label)) for label in labels)


def chooses_a_class(config: PreTrainedConfig) -> bool:
    """Return whether a classifier chooses one of several classes. Multi-label models and regressions do not."""
    return len(config.id2label or {}) > 1 and config.problem_type in (None, "single_label_classification")


def by_number(labels: Sequence[str], count: int) -> list[str]:
    """Return labels such as "007" or "LABEL_7" at their numbers 0 .. count - 1, and "" where there is none.

    Folders sort numbers as text ("10" before "2"), and not every class needs to occur.
    """
    known = {int(NUMBER.sub(r"\1", label)): label for label in reversed(labels)}
    return [known.get(number, "") for number in range(count)]


def listed(labels: Sequence[str]) -> str:
    """Return the first few labels and their total number as text."""
    more = f" ... ({len(labels)} in all)" if len(labels) > SHOWN else ""
    return f"{', '.join(repr(str(label)) for label in labels[:SHOWN])}{more}"
