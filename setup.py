"""What pyproject.toml cannot say: a wheel that holds the compiled library fits one platform.

The library does not use Python's C API, so the wheel fits every Python 3.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARY = Path(__file__).resolve().parent / "predict" / "lib" / "libregatta_cpu.so"


class PlatformDistribution(Distribution):
    """A distribution that is pure Python only when no library was built."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is tied to a platform."""
        return LIBRARY.is_file()


class PlatformWheel(bdist_wheel):
    """A wheel tagged py3-none-<platform>."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns Python, ABI and platform tags."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": PlatformWheel})
