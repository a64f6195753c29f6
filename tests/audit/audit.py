"""Audit of a release: no unsafe code, no known vulnerability in a dependency, reproducible builds, a working wheel.

    python tests/audit/audit.py [--reuse]

bandit checks src and scripts; pyproject.toml lists the disabled checks and the reasons. pip-audit looks up the
packages of this environment; if it has no data on packages, the audit prints a line about them and continues. The
wheel and the source distribution are built twice and compared byte for byte. The wheel is installed into a new virtual
environment with its declared dependencies, at the versions of constraints.txt, and `smoke.py` runs there in an empty
folder.

With --reuse, the new environment imports the packages of this one. That saves time, but an undeclared dependency is
not detected.
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


def read_code() -> str | None:
    """Return the findings of bandit, or None."""
    command = [sys.executable, "-m", "bandit", "--quiet", "--configfile", "pyproject.toml", "--recursive"]
    done = subprocess.run([*command, "src", "scripts"], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout + done.stderr


def look_up_packages() -> tuple[str | None, str]:
    """Return the packages of this environment with known vulnerabilities, or None; and a line on the lookup."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--timeout", "15", "--format", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except json.JSONDecodeError:  # pip-audit printed an error instead of its results
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return None, f"NOT LOOKED UP: pip-audit could not get its data: {said[:200]}"
    found = [
        f"{each['name']} {each['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'no version'}"
        for each in packages
        for hole in each.get("vulns", ())
    ]
    known = sum("skip_reason" not in each for each in packages)
    if not known:  # for instance, if the package index is a mirror without vulnerability data
        return None, f"NOT LOOKED UP: no vulnerability data on any of the {len(packages)} packages"
    return "\n".join(found) or None, f"no known vulnerability; no data on {len(packages) - known} of {len(packages)}"


def build_twice(folder: Path) -> tuple[str | None, list[Path]]:
    """Build twice; return the names of the files that differ, or None, and the files of the first build."""
    contents = []
    for name in ("first", "second"):
        command = [sys.executable, ROOT / "scripts" / "build.py", folder / name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return done.stdout + done.stderr, []
        contents.append({path.name: path.read_bytes() for path in (folder / name).iterdir()})
    first, second = contents
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return ", ".join(differing) or None, sorted((folder / "first").iterdir())


def install_and_try(wheel: Path, folder: Path, *, reuse: bool) -> tuple[str | None, str]:
    """Install the wheel and run the smoke test; return the output of a failure, or None, and the test's last line."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    places = {"base": str(environment), "platbase": str(environment)}
    python = Path(sysconfig.get_path("scripts", "venv", vars=places)) / Path(sys.executable).name
    options = ["--no-deps"] if reuse else ["--constraint", ROOT / "constraints.txt"]
    commands = [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options, wheel]]
    commands.append([python, HERE / "smoke.py"])
    empty = folder / "empty"
    empty.mkdir()
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    variables.pop("PYTHONPATH", None)
    for command in commands:
        done = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True)
        if done.returncode != 0:
            return done.stdout + done.stderr, ""
        if reuse:  # Python does not read the .pth files of a folder named in a .pth file: no editable installs
            lent = Path(sysconfig.get_path("purelib", "venv", vars=places)) / "lent.pth"
            lent.write_text(sysconfig.get_path("purelib") + "\n")
    return None, done.stdout.strip().splitlines()[-1]


def main(*, reuse: bool) -> int:
    failures = 0

    def tell(name: str, problem: str | None, line: str) -> None:
        nonlocal failures
        failures += problem is not None
        print(f"{name}: {f'FAILED{os.linesep}{problem}' if problem else line}", flush=True)

    tell("code (bandit)", read_code(), "no findings")
    tell("packages (pip-audit)", *look_up_packages())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        problem, built = build_twice(folder)
        tell("two builds", problem, f"equal: {', '.join(path.name for path in built)}")
        if built:
            wheel = next(path for path in built if path.suffix == ".whl")
            tell("wheel in a new environment", *install_and_try(wheel, folder, reuse=reuse))
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--reuse"]):
        sys.exit(__doc__)
    sys.exit(main(reuse="--reuse" in sys.argv))
