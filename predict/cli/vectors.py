"""--task embed: the vectors of a data file's texts, as JSON lines or as rows of a .npy file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.cli.data import BUILT_IN_PROMPT, DataItem, read_data_file
from predict.cli.run_config import PredictorConfig
from predict.cli.work import checked_outputs
from predict.engine.retrieval import Retrieval
from predict.errors import UserError
from predict.loading.model import read_spec
from predict.loading.pooling import read_pooling
from predict.system.console import say
from predict.system.outputs import is_special, locked, whole_file
from predict.system.progress import Progress
from predict.system.signals import Signals
from predict.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from predict.config.engine import EngineConfig
    from predict.llm import LLM

    MakeLLM = Callable[[EngineConfig, Tokenizer | None], LLM]

BATCH = 64  # texts between two looks at signals


def embed_file(config: PredictorConfig, make_llm: MakeLLM, signals: Signals) -> int:
    """Writes the vectors of a run's texts; returns the exit status.

    Texts and files are checked before the model is loaded. Raises UserError.
    """
    for name in ("benchmark", "resume"):
        if getattr(config, name):
            raise UserError(f"--task embed goes with no --{name}; leave one of the two out")
    items, engine = _items(config), config.engine
    for flag, path in checked_outputs(config):
        with locked(flag, path):
            model = engine.model
            tokenizer = Tokenizer.from_dir(model.model_name_or_path, model.chat_template)
            spec, _ = read_spec(model.model_name_or_path, model.model_type)
            files = read_pooling(model.model_name_or_path, spec, model.pooling)
            retrieval = Retrieval(files, spec, tokenizer, engine.max_length)
            retrieval.pooler()
            _check_lengths(items, retrieval)
            llm = make_llm(engine, tokenizer)
            _write(Path(path), items, _vectors(llm, items, signals))
    say(f"{len(items)} vectors are in {config.output_file}")
    return 0


def _items(config: PredictorConfig) -> Sequence[DataItem]:
    if config.data_file is None:
        return [DataItem("the built-in prompt", BUILT_IN_PROMPT)]
    items = read_data_file(config.data_file)
    for item in items:
        if not isinstance(item.src, str):
            raise UserError(f"{item.where}: src is a conversation (allowed for vectors: a text)")
        if item.sampling:
            name = next(iter(item.sampling))
            raise UserError(f"{item.where}: {name} is of answers, and --task embed makes none")
    return items


def _check_lengths(items: Sequence[DataItem], retrieval: Retrieval) -> None:
    rules = retrieval.rules
    prompt = rules.prompt_named(None)
    for item in items:
        count = len(retrieval.writer.text(str(item.src), prompt).token_ids)
        if not 0 < count <= rules.max_length:
            raise UserError(
                f"{item.where}: src has {count} tokens (allowed: 1 to {rules.max_length}, "
                "--max_length)"
            )


def _vectors(llm: LLM, items: Sequence[DataItem], signals: Signals) -> Any:
    found = []
    with Progress(len(items)) as progress:
        for start in range(0, len(items), BATCH):
            signals.check()
            batch = items[start : start + BATCH]
            found.append(llm.embed([str(item.src) for item in batch]))
            for _ in batch:
                progress.on_finished()
    return np.concatenate(found)


def _write(path: Path, items: Sequence[DataItem], vectors: Any) -> None:
    is_stream = is_special(str(path))  # a pipe, or a terminal
    with path.open("wb") if is_stream else whole_file(path) as file:
        if path.suffix == ".npy":
            content = io.BytesIO()
            np.save(content, vectors)
            file.write(content.getvalue())
            return
        for item, vector in zip(items, vectors, strict=True):
            line = {"src": item.src, "tgt": item.tgt, "embedding": vector.tolist()}
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
