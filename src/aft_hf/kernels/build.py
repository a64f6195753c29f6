"""Compile the CPU kernels: `python src/aft_hf/kernels/build.py`. The installation of the package does it, too.

Needs a C++17 compiler (g++ or clang++, or the one that CXX names), but neither PyTorch nor its headers. The libraries,
one for each instruction set of the machine's architecture, are written next to the sources. Those that are there are
kept: delete `cpu/libaft_*` to compile them again. If there is no compiler, or it fails, a message says so, and the
package computes everything by its portable form.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


SOURCES = Path(__file__).parent / "cpu"
NOT_COMPILED = "aft-hf: the CPU kernels were not compiled, so the portable form is used:"

# The compiler's options for each variant, by architecture, as `platform.machine` names it.
VARIANTS = {
    "x86_64": {"avx512": ["-march=x86-64-v4"], "avx2": ["-march=x86-64-v3"]},
    "aarch64": {"neon": ["-march=armv8-a"]},
}
VARIANTS |= {"AMD64": VARIANTS["x86_64"], "arm64": VARIANTS["aarch64"]}

# Not -ffast-math, which removes roundings and tests for NaN. The last two options silence false warnings about
# intrinsics of GCC.
OPTIONS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
OPTIONS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]


def library_path(variant: str, directory: Path = SOURCES) -> Path:
    """Return the path of the library of a variant. Its name has a digest of the sources and the compiler's options."""
    digest = hashlib.sha256(repr((OPTIONS, VARIANTS)).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    return directory / f"libaft_{variant}_{digest.hexdigest()[:12]}.so"


def compiler() -> str | None:
    """Return the path of the C++ compiler; None if there is none."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))), None)


def build(directory: Path = SOURCES) -> list[str]:
    """Compile the kernels for each instruction set of this architecture, and print the errors of those that fail.

    Args:
        directory: where the libraries are written. One with the name of `library_path` is kept.

    Returns:
        The variants whose libraries are there.

    Raises:
        RuntimeError: there is none: no compiler, it fails, or there are no kernels for this architecture.
    """
    variants = VARIANTS.get(platform.machine(), {})
    program = compiler()
    if not variants:
        raise RuntimeError(f"no kernels for {platform.machine()}")
    sources = sorted(map(str, SOURCES.glob("*.cpp")))
    directory.mkdir(parents=True, exist_ok=True)

    def compile_variant(variant: str) -> bool:
        path = library_path(variant, directory)
        if path.is_file():
            return True
        if program is None:
            return False
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        command = [program, *OPTIONS, *variants[variant], *sources, "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print(f"aft-hf: no CPU kernels for {variant}: {program} failed:\n{result.stderr}", file=sys.stderr)
            return False
        unfinished.replace(path)
        for other in set(directory.glob(f"libaft_{variant}_*.so")) - {path}:  # of earlier sources
            other.unlink(missing_ok=True)
        return True

    with ThreadPoolExecutor() as threads:
        compiled = [variant for variant, done in zip(variants, threads.map(compile_variant, variants)) if done]
    if not compiled:
        raise RuntimeError(f"{program} failed" if program else "no C++ compiler found")
    return compiled


def main() -> int:
    try:
        variants = build()
    except (OSError, RuntimeError) as error:
        print(NOT_COMPILED, error, file=sys.stderr)
        return 1
    print(f"aft-hf: CPU kernels for {', '.join(variants)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
