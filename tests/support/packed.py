"""Large goldens are kept compressed: `name.xz`, and tests read `name` beside it, which git ignores.

tests/conftest.py unpacks what is not there; makers of goldens pack what they wrote. By hand, after
making some:

    python -m tests.support.packed      # packs what is not packed or newer, then unpacks the rest
"""

from __future__ import annotations

import contextlib
import lzma
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
SUFFIX = ".xz"
# lc, lp and pb of LZMA: of text, of 16-bit values, of 32-bit ones. Random weights share no strings;
# what can be saved is in the high bytes, which lp tells from the low ones.
WAYS = ((3, 0, 2), (0, 1, 0), (1, 1, 0), (2, 1, 0), (0, 2, 0), (1, 2, 0), (2, 2, 0))


def unpacked_name(path: Path) -> Path:
    """The file that a compressed one stands for."""
    return path.with_suffix("")


def unpack(folder: Path = TESTS) -> None:
    """Writes every file that is kept compressed beneath `folder` and missing or older than it.

    Several processes may do so at once: each file appears whole. Raises OSError and lzma.LZMAError.
    """
    for packed in sorted(folder.rglob(f"*{SUFFIX}")):
        time = packed.stat().st_mtime_ns
        target = unpacked_name(packed)
        with contextlib.suppress(FileNotFoundError):
            if target.stat().st_mtime_ns >= time:
                continue
        with whole(target) as part:
            part.write_bytes(lzma.decompress(packed.read_bytes()))
            os.utime(part, ns=(time, time))


def pack(path: Path) -> Path:
    """Writes `path` compressed beside it, in the way that takes the fewest bytes."""
    data = path.read_bytes()
    target = Path(f"{path}{SUFFIX}")
    with whole(target) as part:
        part.write_bytes(min((compressed(data, *way) for way in WAYS), key=len))
    time = target.stat().st_mtime_ns
    os.utime(path, ns=(time, time))
    return target


def pack_weights(folder: Path) -> None:
    """Packs all safetensors of a golden's folder."""
    for path in sorted(folder.rglob("*.safetensors")):
        pack(path)


def compressed(data: bytes, lc: int, lp: int, pb: int) -> bytes:
    """A stream that `xz` and Python's lzma read."""
    preset = 9 | lzma.PRESET_EXTREME
    way = {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": 1 << 20}
    filters = [{**way, "lc": lc, "lp": lp, "pb": pb}]
    return lzma.compress(data, check=lzma.CHECK_CRC32, filters=filters)


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A file to write, which takes the target's place in the end."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def ignored_by_git() -> list[Path]:
    """What .gitignore names among the files beneath tests/ that are kept compressed, or should be.

    Those that git tracks all the same are among them.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--ignored", "--exclude-standard"]
    done = subprocess.run([*command, "tests"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in done.stdout.split("\0") if name.endswith((".json", ".safetensors"))]
    return [path for name in sorted(set(names)) if (path := ROOT / name).is_file()]


def main() -> None:
    """Packs what is new, and unpacks what is missing."""
    for path in ignored_by_git():
        packed = Path(f"{path}{SUFFIX}")
        if not packed.exists() or packed.stat().st_mtime_ns < path.stat().st_mtime_ns:
            print(f"{pack(path).relative_to(ROOT)}: {packed.stat().st_size} bytes")
    unpack()


if __name__ == "__main__":
    main()
