"""Files that stand where compiled libraries would, with metadata that fits them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from predict.device import library
from predict.device.built import BuiltFile, Metadata, describe

BUILT = Metadata(
    abi=library.ABI,
    paddle_version="3.3.1",
    paddle_commit="76884955",
    compiler="g++ 12.2.0",
    sources_digest="00",
    file=BuiltFile(1, "0" * 64),
)


def write_library(
    folder: Path,
    name: str = library.LIBRARY_NAME,
    content: bytes = b"not a shared object",
    **values: Any,
) -> Path:
    """A file that is no library, described by BUILT with `values`; returns its path."""
    path = folder / name
    path.write_bytes(content)
    metadata = replace(BUILT, file=describe(path), **values)
    path.with_suffix(".json").write_text(metadata.to_json())
    return path


def this_paddle() -> dict[str, Any]:
    """The values of the installed Paddle, whose libraries pass the check."""
    version = library.import_paddle().version
    return {"paddle_version": version.full_version, "paddle_commit": version.commit}
