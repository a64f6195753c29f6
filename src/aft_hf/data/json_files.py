"""Writing results as JSON files."""

import json
from pathlib import Path
from typing import Any

from .atomic_files import write_atomic


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a JSON file atomically (see `write_atomic`)."""
    with write_atomic(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
