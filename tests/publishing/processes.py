"""Running Python in other processes with separate caches."""

import os
import subprocess
import sys
from pathlib import Path

from hub import WRITE, Hub


HERE = Path(__file__).parent


def environment(home: Path, hub: Hub | None = None, token: str | None = WRITE) -> dict[str, str]:
    """Return the environment variables of a process with separate caches, which uses the mock server or is offline."""
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    variables |= {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    if hub is None:
        return variables | {"HF_HUB_OFFLINE": "1"}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return variables if token is None else variables | {"HF_TOKEN": token}


def run(*arguments, env: dict[str, str], check: bool = True) -> subprocess.CompletedProcess:
    """Run Python, and show its output if it fails."""
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
