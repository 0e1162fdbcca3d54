"""Where a benchmark's numbers go beside the terminal: --output_file and --plot."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.bench.report import write_json, write_output
from predict.cli.flags import Flag
from predict.errors import UserError
from predict.system.outputs import check_output


def output_flags(group: str) -> tuple[Flag, ...]:
    """The two flags, in a command's group."""
    return (
        Flag(group, "output_file", "str", None, "Write device, versions and all numbers as JSON."),
        Flag(group, "plot", "str", None, "Draw the numbers as a PNG; needs matplotlib ([bench])."),
    )


@dataclass(frozen=True)
class Outputs:
    """The files that a run writes; None: none."""

    output_file: str | None
    plot: str | None = None

    def check(
        self,
        *,
        files: Mapping[str, str | None] | None = None,
        folders: Mapping[str, str | None] | None = None,
    ) -> None:
        """Says before anything is timed what would fail after it.

        files: inputs, by flag. folders: of models, by flag. Raises UserError for files that cannot
        be written, and ModuleNotFoundError without matplotlib.
        """
        if self.output_file is not None:
            check_output("output_file", self.output_file, files=files, folders=folders)
        if self.plot is None:
            return
        others = {**(files or {}), "output_file": self.output_file}
        check_output("plot", self.plot, files=others, folders=folders)
        if Path(self.plot).suffix.lower() != ".png":
            raise UserError(f"--plot {self.plot}: pictures are PNG; end the name in .png")
        import matplotlib.figure  # noqa: F401  # only whether it is there

    def write(self, made: Mapping[str, Any]) -> None:
        """Writes a file of predict.bench.record, and its picture. Raises UserError if it cannot."""
        if self.output_file is not None:
            write_json(made, self.output_file)
        if self.plot is not None:
            from predict.bench.plot import draw

            picture = io.BytesIO()
            draw(made).savefig(picture, format="png", dpi=100)
            write_output(self.plot, picture.getvalue())
