"""What pyproject.toml cannot say: a wheel that holds the compiled library fits some platforms.

The library does not use Python's C API, so the wheel fits every Python 3.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARIES = Path(__file__).resolve().parent / "predict" / "lib"
# manylinux_2_N promises the C library's symbols up to GLIBC_2.N, and the C++ library's up to
# GLIBCXX_3.4.x and CXXABI_1.3.x: N, x, x of auditwheel's table. Paddle's libraries are not counted:
# Paddle's own wheel has them.
MANYLINUX: list[tuple[int, int, int]] = []
MANYLINUX += (17, 19, 7), (24, 22, 10), (27, 24, 11), (31, 28, 12), (34, 29, 13), (35, 30, 13)
MANYLINUX += (36, 30, 13), (38, 30, 13), (39, 33, 15), (40, 33, 15), (41, 33, 15)


def manylinux(libraries: list[Path]) -> int | None:
    """Returns the least N for which manylinux_2_N has what the libraries need; None: no row."""
    needed = {b"GLIBC_2": 0, b"GLIBCXX_3.4": 0, b"CXXABI_1.3": 0}
    for library in libraries:
        # Names of symbol versions stand in the dynamic linker's table of strings.
        for name in re.findall(rb"(?<=\0)[A-Z]+_[\d.]+(?=\0)", library.read_bytes()):
            family = next((family for family in needed if name.startswith(family + b".")), None)
            if family is not None:
                last = int(name[len(family) + 1 :].split(b".")[0])
                needed[family] = max(needed[family], last)
    wanted = needed.values()
    fits = (
        row for row in MANYLINUX if all(has >= need for has, need in zip(row, wanted, strict=True))
    )
    return next((row[0] for row in fits), None)


class PlatformDistribution(Distribution):
    """A distribution that is pure Python only when no library was built."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is tied to a platform."""
        return any(LIBRARIES.glob("*.so"))


class PlatformWheel(bdist_wheel):
    """A wheel tagged py3-none-<platform>."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns Python, ABI and platform tags."""
        _, _, platform = super().get_tag()
        libraries = [*LIBRARIES.glob("*.so"), *LIBRARIES.glob("plugin/*.so")]
        oldest = manylinux(libraries) if platform.startswith("linux_") and libraries else None
        if oldest is not None:
            platform = platform.replace("linux", f"manylinux_2_{oldest}", 1)
        return "py3", "none", platform


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": PlatformWheel})
