"""What types lose on the two real models, on any device, beside what was recorded.

    python -m tests.golden_real.measure FOLDER --device gpu [--dtype float16 ...]

Downloads the models into FOLDER. More words are settings of EngineConfig by name. A line for each
model: of the file, and of a dense checkpoint made of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from predict.convert import main as convert
from tests.support.real_models import download, measured, recorded


def main() -> None:
    folder, *words = sys.argv[1:]
    names = [word.removeprefix("--") for word in words[::2]]
    settings = {"dtype": "bfloat16", **dict(zip(names, words[1::2], strict=True))}
    for name, path in download(Path(folder)).items():
        dense = Path(folder) / f"dense_{name}"
        if not dense.is_dir():
            convert([str(path), str(dense), "--format", "hf", "--dtype", "float32"])
        wanted = recorded(name)
        recording = f"transformers: perplexity {wanted['perplexity']:.4f} in float32"
        print(f"{name}: {recording}, loss {wanted['bfloat16_loss']:.4f} in bfloat16")
        for what, place in (("file", path), ("dense", dense)):
            found = measured(place, name, **settings)
            print(f"{name} {what}: perplexity {found.perplexity:.4f}, loss {found.loss:.4f}")


if __name__ == "__main__":
    main()
