"""How time and memory grow: lines over the length or the image size, and their slopes on log-log axes."""

import math
from typing import Any


# A row of results, as JSON holds it.
Row = dict[str, Any]

QUANTITIES = ("seconds", "peak_bytes")

Line = list[tuple[int, float]]  # (tokens, or pixels of the side; seconds or bytes)


def lines(rows: list[Row]) -> dict[tuple[str, str, str, str, str], dict[str, Line]]:
    """What grows, by (machine, sizes, unit, task, quantity), and in it by model."""
    found: dict[tuple[str, str, str, str, str], dict[str, Line]] = {}
    for row in rows:
        if row["suite"] != "growth" or "seconds" not in row:
            continue
        for quantity in QUANTITIES:
            group = (row["machine"]["device"], row["sizes"], row["unit"], row["task"], quantity)
            for model, value in row.get(quantity, {}).items():
                found.setdefault(group, {}).setdefault(model, []).append((row["size"], value))
    return {group: {model: sorted(line) for model, line in models.items()} for group, models in found.items()}


def slopes(rows: list[Row]) -> list[Row]:
    """The slope of each line: over all of it, and where it is longer than a decade, over the first and the last."""
    keys = ("machine", "sizes", "unit", "task", "quantity")
    return [
        dict(zip(keys, group)) | {"model": model} | line_slopes(line)
        for group, models in lines(rows).items()
        for model, line in models.items()
        if len(line) > 1
    ]


def line_slopes(line: Line) -> dict[str, float]:
    """Slopes of one line, by the part they are of."""
    shortest, longest = line[0][0], line[-1][0]
    parts = {"all": line}
    if longest > 10 * shortest:
        parts["first_decade"] = [point for point in line if point[0] <= 10 * shortest]
        parts["last_decade"] = [point for point in line if point[0] >= longest / 10]
    return {name: slope(part) for name, part in parts.items() if len(part) > 1}


def slope(line: Line) -> float:
    """By least squares on log-log axes: 1 where it is linear, 2 where quadratic."""
    xs, ys = ([math.log(max(value, 1e-9)) for value in values] for values in zip(*line))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)
