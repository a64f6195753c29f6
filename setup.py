"""Compile the CPU kernels when the package is installed or a wheel is built; everything else is in setup.cfg.

AFT_HF_COMPILE=0 leaves them out.
"""

import os
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


# Not imported as a part of the package, which needs PyTorch.
spec = spec_from_file_location("build_kernels", Path(__file__).parent / "src/aft_hf/kernels/build.py")
assert spec is not None and spec.loader is not None
kernels = module_from_spec(spec)
spec.loader.exec_module(kernels)


COMPILE = os.environ.get("AFT_HF_COMPILE") != "0"


class BuildWithKernels(build_py):
    """Copies the package and compiles the kernels into it; for an editable installation, next to their sources."""

    def run(self) -> None:
        directory = kernels.SOURCES if self.editable_mode else Path(self.build_lib) / "aft_hf/kernels/cpu"
        if not self.editable_mode:  # files of an earlier build would change the digest of the sources
            shutil.rmtree(directory, ignore_errors=True)
        super().run()
        if not COMPILE:
            return
        try:
            kernels.build(directory)
        except (OSError, RuntimeError) as error:
            print(kernels.NOT_COMPILED, error, file=sys.stderr)


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the package belongs to one platform: with kernels."""
        return COMPILE and kernels.compiler() is not None


class WheelWithKernels(bdist_wheel):
    """A wheel for every Python of this platform, since the kernels depend neither on Python nor on PyTorch."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=Package, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
