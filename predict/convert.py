"""A checkpoint in another layout: `python -m predict.convert FROM TO --format hf`.

FROM is a folder of any format that is read. TO becomes one with safetensors files: of Hugging
Face's layout, or of PaddleNLP's. One tensor is in memory at a time. A run that was interrupted, or
killed, goes on where it was when the same command is given again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.cli.writing import INTERRUPTED, write_checkpoint, writing_flags
from predict.errors import UserError
from predict.system.files import find_model_dir
from predict.system.outputs import check_place
from predict.system.signals import Signals

PROG = "python -m predict.convert"
USAGE = "FROM TO --format {hf,paddle} [--flag [VALUE] ...]"
GROUP = "Conversion"
# fmt: off
FLAGS = (
    Flag(GROUP, "format", "str", None,
         "The layout to write: hf, Hugging Face's names and [out, in] matrices; paddle, "
         "PaddleNLP's names and [in, out] matrices. Needed.", choices=("hf", "paddle")),
    Flag(GROUP, "dtype", "str", None,
         "What tensors of floating point become. Default: they stay as they are, bit by bit.",
         choices=("float32", "bfloat16", "float16")),
    *writing_flags(GROUP),
)
# fmt: on


def parse(argv: Sequence[str]) -> tuple[FlagValues, Path, Path]:
    """The flags and the two folders of a command line. Raises UserError."""
    num_folders = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    folders, words = argv[:num_folders], argv[num_folders:]
    flags = parse_flags(words, FLAGS, PROG, __doc__ or "", USAGE)
    if len(folders) != 2:
        raise UserError(f"{len(folders)} folders where two are needed; write {PROG} {USAGE}")
    if flags["format"] is None:
        raise UserError("--format is missing (allowed: hf, paddle)")
    return flags, find_model_dir(folders[0], "FROM"), Path(folders[1])


def run(argv: Sequence[str], signals: Signals) -> int:
    """Converts as a command line says. Raises UserError."""
    from predict.loading.conversion import Conversion, Options, parse_size

    flags, source, target = parse(argv)
    options = Options(flags["format"], flags["dtype"], parse_size(flags["max_shard_size"]))
    check_place("TO", target, {"FROM": source})
    write_checkpoint(Conversion(source, options), "TO", target, signals, flags["progress"])
    return 0


main = command(INTERRUPTED)(run)

if __name__ == "__main__":
    sys.exit(main())
