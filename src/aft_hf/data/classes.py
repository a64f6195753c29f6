"""Classes: names and numbers of class labels, and which models choose one class."""

import re
from collections.abc import Sequence
from reprlib import repr as shown
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

NUMBER = re.compile(r"(?:LABEL_)?(\d+)")


def are_names(labels: Sequence[str]) -> bool:
    """Return whether the labels are class names, and not just numbers or the LABEL_0, LABEL_1, ... of transformers."""
    return not all(NUMBER.fullmatch(str(label)) for label in labels)


def chooses_a_class(config: PreTrainedConfig) -> bool:
    """Return whether a classifier chooses one of several classes. Multi-label models and regressions do not."""
    return len(config.id2label or {}) > 1 and config.problem_type in (None, "single_label_classification")


def other_task(config: PreTrainedConfig) -> str:
    """Return the answer of all commands to a classifier that does not choose one of several classes."""
    return (
        "aft-hf trains, distills and evaluates a classifier that chooses one of several classes, got "
        f"problem_type={config.problem_type!r} and num_labels={len(config.id2label or {})}; train and evaluate a "
        "multi-label classifier or a regression with transformers' Trainer"
    )


def require_a_class(name: str, config: PreTrainedConfig) -> None:
    """Raise a ValueError unless the classifier `name` chooses one of several classes."""
    if not chooses_a_class(config):
        raise ValueError(f"{name}: {other_task(config)}")


def model_classes(config: PreTrainedConfig) -> list[str]:
    """Return the names of the classes of a model, in the order of their numbers."""
    return [name for _, name in sorted((config.id2label or {}).items())]


def teacher_classes(teacher: PreTrainedConfig, student: PreTrainedConfig) -> list[int]:
    """Return the number that each class of a student has in its teacher, which has the same (see `matched_places`)."""
    require_a_class("the teacher", teacher)
    require_a_class("the model", student)
    theirs, ours = model_classes(teacher), model_classes(student)
    if theirs == ours:
        return list(range(len(ours)))
    both = f"the teacher has the {len(theirs)} classes {shown(theirs)}, the model {len(ours)}: {shown(ours)}"
    places = matched_places(theirs, ours)
    if -1 in places and len(theirs) == len(ours) and are_names(ours) and not are_names(theirs):
        places = [*range(len(ours))]  # the numbers of the teacher do not begin at 0
    if sorted(places) != list(range(len(theirs))):
        raise ValueError(f"{both}; both need the same classes: set id2label if only the names differ")
    if are_names(theirs) != are_names(ours):
        logger.warning(f"classes of the teacher and the model are matched by number: {both}")
    return places


def matched_places(labels: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the place of the label of each class of a model, or -1 if it has none.

    Classes are matched by name, or by number if the labels or the names of the model are only numbers: "007" is class
    7, wherever it stands, since folders sort numbers as text ("10" before "2"). The number of a name is its place.
    """
    known, wanted = list[Any](labels), list[Any](names)
    if not (are_names(labels) and are_names(names)):
        known, wanted = (
            [*range(len(x))] if are_names(x) else [int(NUMBER.sub(r"\1", label)) for label in x]
            for x in (labels, names)
        )
        if are_names(labels) and sorted(wanted) != [*range(len(names))]:  # numbers from 1 on
            wanted = [*range(len(names))]
    places = {key: place for place, key in reversed([*enumerate(known)])}
    return [places.get(key, -1) for key in wanted]
