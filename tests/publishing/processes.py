"""Running Python in other processes with separate caches."""

import os
import subprocess
import sys
from pathlib import Path


HERE = Path(__file__).parent


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a process with separate caches, which is offline."""
    variables = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return os.environ | variables | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run Python, and show its output if it fails."""
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
