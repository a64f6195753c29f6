"""Results as JSON files."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write `content` under another name and rename it, so that what is there is always whole; makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(aside, path)
