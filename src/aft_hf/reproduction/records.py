"""Records of finished runs, collected for the report."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .claims import Claim, Comparison
from .verdict import Judgement, judge, together


class Records:
    """Records by arm and seed.

    Args:
        records: records that `run_arm` has written; a later record replaces an earlier one of the same arm and seed.

    Raises:
        ValueError: the records mix several scales, or smoke tests and real runs, whose numbers do not compare.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]):
        self._of: dict[str, dict[int, Mapping[str, Any]]] = {}
        for record in records:
            self._of.setdefault(record["arm"], {})[record["seed"]] = record
        kinds = {(record["scale"], record["smoke"]) for record in self.all()}
        if len(kinds) > 1:
            raise ValueError(
                f"runs of different scales do not compare, (scale, smoke) is {', '.join(map(str, sorted(kinds)))}: "
                "give each scale its own --out and --page"
            )

    def all(self) -> list[Mapping[str, Any]]:
        """All records, ordered by arm and seed."""
        return [self._of[arm][seed] for arm in sorted(self._of) for seed in sorted(self._of[arm])]

    def of(self, arm: str) -> list[Mapping[str, Any]]:
        """The records of an arm, ordered by seed."""
        return [record for _, record in sorted(self._of.get(arm, {}).items())]

    def values(self, arm: str, metric: str) -> dict[int, float]:
        """The values of a metric of an arm by seed, for the seeds that have it."""
        metrics = {record["seed"]: record["metrics"] for record in self.of(arm)}
        return {seed: values[metric] for seed, values in metrics.items() if metric in values}

    def judge(self, comparison: Comparison) -> Judgement:
        """Judge a comparison by its runs."""
        other = comparison.other if isinstance(comparison.other, float) else self.values(*comparison.other)
        return judge(
            self.values(*comparison.ours),
            other,
            higher=comparison.higher,
            margin=comparison.margin,
            paired=comparison.paired,
        )

    def verdict(self, claim: Claim) -> str:
        """The verdict on a claim, from its judged comparisons."""
        return together([self.judge(each).verdict for each in claim.comparisons if each.judged])


def read_records(*places: Path) -> Records:
    """Read records; a later record replaces an earlier one of the same arm and seed.

    Args:
        places: folders of JSON files with a record each, or JSON files with a list of records. A path that does not
            exist is skipped.

    Raises:
        ValueError: the records do not compare, see `Records`.
    """
    found: list[Mapping[str, Any]] = []
    for place in places:
        if place.is_dir():
            found += [json.loads(path.read_text()) for path in sorted(place.glob("*.json"))]
        elif place.exists():
            found += json.loads(place.read_text())
    return Records(found)


def digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of the settings and data of a run. It takes their place in the JSON file of a page."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def without_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the digest of its settings in place of the settings."""
    kept = {key: value for key, value in record.items() if key != "settings"}
    return kept | ({"settings_sha256": digest(record["settings"])} if "settings" in record else {})
