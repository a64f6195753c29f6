"""The records of finished runs, gathered for the report."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .claims import Claim, Comparison
from .verdict import Judgement, judge, together


class Records:
    """Records by arm and seed.

    Args:
        records: as `run_arm` writes them; of two of one arm and seed the later one counts.

    Raises:
        ValueError: they are of runs at several scales, or smoke tests among others: these do not compare.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]):
        self._of: dict[str, dict[int, Mapping[str, Any]]] = {}
        for record in records:
            self._of.setdefault(record["arm"], {})[record["seed"]] = record
        kinds = {(record["scale"], record["smoke"]) for record in self.all()}
        if len(kinds) > 1:
            raise ValueError(
                f"these runs do not compare, (scale, smoke) is {', '.join(map(str, sorted(kinds)))}: "
                "give each scale its own --out and --page"
            )

    def all(self) -> list[Mapping[str, Any]]:
        """All records, in the order of arms and seeds."""
        return [self._of[arm][seed] for arm in sorted(self._of) for seed in sorted(self._of[arm])]

    def of(self, arm: str) -> list[Mapping[str, Any]]:
        """The records of an arm by seed."""
        return [record for _, record in sorted(self._of.get(arm, {}).items())]

    def values(self, arm: str, metric: str) -> dict[int, float]:
        """A metric of an arm for each seed that has it."""
        metrics = {record["seed"]: record["metrics"] for record in self.of(arm)}
        return {seed: values[metric] for seed, values in metrics.items() if metric in values}

    def judge(self, comparison: Comparison) -> Judgement:
        """What the runs say about a comparison."""
        other = comparison.other if isinstance(comparison.other, float) else self.values(*comparison.other)
        return judge(
            self.values(*comparison.ours),
            other,
            higher=comparison.higher,
            margin=comparison.margin,
            paired=comparison.paired,
        )

    def verdict(self, claim: Claim) -> str:
        """What the runs say about a claim."""
        return together([self.judge(each).verdict for each in claim.comparisons if each.judged])


def read_records(*places: Path) -> Records:
    """The records below `places`, later ones over earlier ones: a folder of JSON files, or one file with a list. What
    does not exist is passed over.

    Raises:
        ValueError: as `Records`.
    """
    found: list[Mapping[str, Any]] = []
    for place in places:
        if place.is_dir():
            found += [json.loads(path.read_text()) for path in sorted(place.glob("*.json"))]
        elif place.exists():
            found += json.loads(place.read_text())
    return Records(found)
