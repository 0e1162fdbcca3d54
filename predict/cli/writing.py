"""Checkpoints written as a command line says, with a bar, and going on after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from predict.cli.flags import Flag
from predict.system.console import show
from predict.system.outputs import resumable
from predict.system.progress import Progress
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.loading.conversion import Conversion

INTERRUPTED = "interrupted; the same command goes on after the last whole file"


def writing_flags(group: str) -> tuple[Flag, Flag]:
    """The flags of every command that writes a checkpoint: how large its files are, and a bar."""
    size = (
        "Bytes of a file at the most; a larger tensor has a file of its own. KB, MB, GB, KiB, "
        "MiB and GiB are known."
    )
    bar = "Show a bar. Default: when stderr is a terminal."
    return (
        Flag(group, "max_shard_size", "str", "5GB", size),
        Flag(group, "progress", "bool", None, bar),
    )


def write_checkpoint(
    conversion: Conversion, flag: str, target: Path, signals: Signals, progress: bool | None
) -> None:
    """Writes what is missing of `target`, and says what is there then. Raises UserError.

    flag: which named the folder, for messages. progress: whether there is a bar; None: on a
    terminal.
    """
    with (
        resumable(flag, target, "the last whole file"),
        Progress(conversion.num_tensors, progress, unit="tensor") as bar,
    ):

        def on_tensor() -> None:
            bar.on_finished()
            signals.check()

        summary = conversion.run(target, on_tensor)
    kept = f", of which {summary.num_kept} were there" if summary.num_kept else ""
    show(
        f"{target}: {summary.num_tensors} tensors, {summary.num_bytes / 2**30:.3f} GiB in "
        f"{summary.num_shards} files{kept}"
    )
