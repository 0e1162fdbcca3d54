"""Compares Regatta::text with tokenizers over many strings; run by hand.

    python -m tests.support.text_comparison [--count 200000] [NAME|DIR ...]

Ids, texts and pieces of the small tokenizers NAME (all, where none is named), and of those in the
folders and GGUF files DIR.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from export.export_text import text_file
from predict.text import tokenizer as ours
from tests.support import text_tokenizers as made
from tests.support.paths import DEMO
from tests.support.text_library import ADD_SPECIAL, Text


def compare(name: str, python: ours.Tokenizer, count: int) -> int:
    """How many strings differ; prints the first, and how long both took."""
    data = text_file(python, Path(name))
    text = Text(data)
    num_different, seconds = 0, [0.0, 0.0]
    for string in made.strings(python, count, seed=1):
        begin = time.perf_counter()
        wanted = python.encode(string)
        middle = time.perf_counter()
        ids = text.encode(string, ADD_SPECIAL)
        seconds[0] += middle - begin
        seconds[1] += time.perf_counter() - middle
        whole = python.decode(wanted, False)
        if ids != wanted or b"".join(text.pieces(ids)).decode() != whole:
            num_different += 1
            if num_different == 1:
                print(f"{name}: {string!a}: {ids} for {wanted}", file=sys.stderr)
    took = f"tokenizers {seconds[0]:.1f} s, Regatta::text {seconds[1]:.1f} s"
    print(
        f"{name}: {num_different} of {count} differ; file of {len(data)} bytes; {took}", flush=True
    )
    return num_different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("names", nargs="*", default=[*made.BUILDERS, str(DEMO)])
    given = parser.parse_args()
    total = 0
    for name in given.names:
        build = made.BUILDERS.get(name)
        python = made.python_of(build()) if build else ours.Tokenizer.from_dir(name, "none")
        total += compare(name, python, given.count)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
