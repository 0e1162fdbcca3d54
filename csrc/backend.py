"""The build backend that pip calls: setuptools' own, after compiling the operator library.

A missing compiler or a failed compile does not fail the install: the reason goes to the terminal
(pip shows it with -v) and to predict/lib/build_error.txt, from where the first run repeats it.
REGATTA_SKIP_BUILD=1 installs without compiling. REGATTA_CUDA=1 compiles for NVIDIA GPUs too, 0 does
not; by default that is done where nvcc and a GPU are.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import build
from predict.device.library import BUILD_ERROR_NAME
from terminal import install_progress

Settings = dict[str, Any] | None


def _target_folders() -> list[str]:
    """Returns the site-packages of the environment being installed into.

    pip runs this process with an import path of its own, but with the target's Python.
    """
    return [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]


def _paddle_requirement() -> list[str]:
    """Returns the Paddle to put beside the compiler: none if it is there or nothing is compiled.

    Every install of Paddle unpacks 700 MB, so one that the target already has is used instead.
    """
    if os.environ.get("REGATTA_SKIP_BUILD") == "1":
        return []
    try:
        build.find_compiler()
    except build.BuildError:
        return []
    required = build.required_paddle_version()
    try:
        if build.find_paddle(_target_folders()).version == required:
            return []
    except build.BuildError:
        pass  # none there: pip installs it now for this build and later for the user
    return [f"paddlepaddle=={required}"]


def _compile() -> None:
    """Builds the library; when that fails, leaves none, and the reason in BUILD_ERROR_NAME."""
    note = build.LIBRARY_DIR / BUILD_ERROR_NAME
    note.unlink(missing_ok=True)
    try:
        if os.environ.get("REGATTA_SKIP_BUILD") == "1":
            raise build.BuildError("it was installed with REGATTA_SKIP_BUILD=1")
        with install_progress() as progress:
            paths = _target_folders()
            print(build.build_cpu_library(extra_paths=paths, progress=progress).summary())
    except build.BuildError as error:
        # An older library would be packed into the wheel as if it were this version's.
        build.remove_library()
        build.LIBRARY_DIR.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{error}\n", encoding="utf-8")
        print(f"regatta: installing without compiled operators: {error}", file=sys.stderr)
        return
    _compile_cuda()


def _compile_cuda() -> None:
    """Builds the CUDA library where it is wanted; when that fails, leaves none, and the reason."""
    from predict.device.devices import CUDA_ERROR_NAME

    note = build.LIBRARY_DIR / CUDA_ERROR_NAME
    note.unlink(missing_ok=True)
    try:
        if build.cuda_wanted():
            with install_progress() as progress:
                paths = _target_folders()
                print(build.build_cuda_library(extra_paths=paths, progress=progress).summary())
    except build.BuildError as error:
        build.remove_cuda_library()
        note.write_text(f"{error}\n", encoding="utf-8")
        print(f"regatta: installing without GPU support: {error}", file=sys.stderr)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Returns what pip puts beside the build: setuptools' needs and, if missing, Paddle."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_paddle_requirement()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same for an editable install."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_paddle_requirement()]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Compiles, then builds the wheel; returns its file name."""
    _compile()
    # setuptools adds to what its last run left here: a removed library would come back.
    for folder in (build.ROOT / "build").glob("lib*"):
        shutil.rmtree(folder)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Compiles, then builds the wheel that points at this checkout; returns its file name."""
    _compile()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
