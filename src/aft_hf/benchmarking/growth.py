"""Growth of time and memory: lines over the length or the image size, and their slopes on log-log axes."""

import math
from typing import Any


# A row of results, as JSON holds it.
Row = dict[str, Any]

QUANTITIES = ("seconds", "peak_bytes")

Line = list[tuple[int, float]]  # (tokens, or pixels of the side; seconds or bytes)


def lines(rows: list[Row]) -> dict[tuple[str, str, str, str, str], dict[str, Line]]:
    """The lines of the suite `growth`: by (machine, sizes, unit, task, quantity), a dictionary of lines by model."""
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
    """The slopes of each line: over all points and, if it spans more than a decade, over the first and last decade."""
    keys = ("machine", "sizes", "unit", "task", "quantity")
    return [
        dict(zip(keys, group)) | {"model": model} | line_slopes(line)
        for group, models in lines(rows).items()
        for model, line in models.items()
        if len(line) > 1
    ]


def line_slopes(line: Line) -> dict[str, float]:
    """Slopes of one line by part: "all", "first_decade" and "last_decade"."""
    shortest, longest = line[0][0], line[-1][0]
    parts = {"all": line}
    if longest > 10 * shortest:
        parts["first_decade"] = [point for point in line if point[0] <= 10 * shortest]
        parts["last_decade"] = [point for point in line if point[0] >= longest / 10]
    return {name: slope(part) for name, part in parts.items() if len(part) > 1}


def slope(line: Line) -> float:
    """Slope by least squares on log-log axes: 1 for linear growth, 2 for quadratic growth."""
    xs, ys = ([math.log(max(value, 1e-9)) for value in values] for values in zip(*line))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)
