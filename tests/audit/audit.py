"""What a release has to pass beside its tests: no unsafe code, no known hole in a dependency, packages that work.

    python tests/audit/audit.py [--reuse]

bandit reads src and scripts (pyproject.toml says which of its checks are off, and why). pip-audit looks up the
packages of this environment; where it has no data, a line says so, and the audit goes on. Wheel and source
distribution are built twice and compared byte for byte. The wheel is installed into a new environment with the
dependencies that it declares, at the versions of constraints.txt, and `smoke.py` runs there in an empty folder.

--reuse lends the new environment the packages of this one, which saves time, and does not notice an undeclared one.
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
    """What bandit finds, or None."""
    command = [sys.executable, "-m", "bandit", "--quiet", "--configfile", "pyproject.toml", "--recursive"]
    done = subprocess.run([*command, "src", "scripts"], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout + done.stderr


def look_up_packages() -> tuple[str | None, str]:
    """Packages of this environment with a known vulnerability, or None; and a line on what was looked up."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--timeout", "15", "--format", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except json.JSONDecodeError:  # it prints its results, or ends in an error
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return None, f"NOT LOOKED UP, pip-audit has no data here: {said[:200]}"
    found = [
        f"{each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version'}"
        for each in packages
        for hole in each.get("vulns", ())
    ]
    known = sum("skip_reason" not in each for each in packages)
    if not known:  # as where a mirror serves packages and nothing else
        return None, f"NOT LOOKED UP: there is no data on any of {len(packages)} packages here"
    return "\n".join(found) or None, f"no known vulnerability; no data on {len(packages) - known} of {len(packages)}"


def build_twice(folder: Path) -> tuple[str | None, list[Path]]:
    """The files that differ between two builds, or None; and those of the first."""
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
    """What went wrong, or None; and what the smoke test says."""
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
        if reuse:  # a folder that a .pth names is read for packages, not for editable ones such as this checkout
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
