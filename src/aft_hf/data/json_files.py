"""Writing results as JSON files."""

import json
from pathlib import Path
from typing import Any

from .whole_files import write_whole


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a JSON file atomically (see `write_whole`)."""
    with write_whole(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
