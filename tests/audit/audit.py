"""Audit of a release: no unsafe code, no known vulnerability in a dependency, reproducible builds, a working wheel.

bandit checks src and scripts; pyproject.toml lists the disabled checks and the reasons. pip-audit looks up the
packages of this environment; if it has no data, the audit says so and continues. The wheel and the source distribution
are built twice and compared byte for byte. The wheel is installed into a new virtual environment with its declared
dependencies, at the versions of constraints.txt, and `smoke.py` runs there in an empty folder.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path


HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def look_up_packages() -> None:
    """Exit with the packages of this environment that have known vulnerabilities, if there are any."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--timeout", "15", "--format", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except json.JSONDecodeError:  # pip-audit printed an error instead of its results
        packages = []
    if vulnerable := [each for each in packages if each.get("vulns")]:
        sys.exit(json.dumps(vulnerable, indent=1))
    # The package index may be a mirror without vulnerability data.
    known = sum("skip_reason" not in each for each in packages)
    print(f"pip-audit: no known vulnerability; it has data on {known} packages {done.stderr[-200:]}", flush=True)


def main() -> None:
    bandit = [sys.executable, "-m", "bandit", "--quiet", "--configfile", "pyproject.toml", "--recursive"]
    subprocess.run([*bandit, "src", "scripts"], cwd=ROOT, check=True)
    look_up_packages()
    with tempfile.TemporaryDirectory() as temporary:
        builds, environment, empty = [], Path(temporary, "environment"), Path(temporary, "empty")
        for name in ("first", "second"):
            subprocess.run([sys.executable, ROOT / "scripts" / "build.py", Path(temporary, name)], check=True)
            builds.append({path.name: path.read_bytes() for path in Path(temporary, name).iterdir()})
        if builds[0] != builds[1]:
            sys.exit(f"two builds differ: {sorted(builds[0])} {sorted(builds[1])}")
        print(f"two builds are equal: {', '.join(sorted(builds[0]))}", flush=True)
        venv.create(environment, with_pip=True)
        scripts = sysconfig.get_path("scripts", "venv", vars={"base": str(environment), "platbase": str(environment)})
        python, (wheel,) = Path(scripts, Path(sys.executable).name), Path(temporary, "first").glob("*.whl")
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        empty.mkdir()
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        variables.pop("PYTHONPATH", None)
        for command in ([*pip, wheel], [python, HERE / "smoke.py"]):
            subprocess.run(command, cwd=empty, env=variables, check=True)


if __name__ == "__main__":
    main()
