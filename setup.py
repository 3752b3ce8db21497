"""Builds csrc/ into fxpar/libfxpar.so, a plain shared library for ctypes. pyproject.toml says the rest."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildSharedLibrary(build_ext):
    """Builds an "extension" that is no Python module: its file name carries no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class WheelForEveryPython(bdist_wheel):
    """A wheel for one platform, and for every Python 3: the library in it calls neither Python nor torch."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[
        Extension(
            "fxpar.libfxpar",
            sources=sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildSharedLibrary, "bdist_wheel": WheelForEveryPython},
)
