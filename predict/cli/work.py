"""What a run over a data file answers, checked before a weight is read, and what it keeps of it.

Shared by the commands that answer data files. Imports no Paddle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from predict.cli.data import BUILT_IN_PROMPT, DataItem, read_data_file
from predict.cli.identity import input_paths, run_inputs
from predict.cli.journal import journal_path
from predict.cli.prompts import prepare_params, prepare_prompts
from predict.cli.results import Results, open_results
from predict.cli.run_config import PredictorConfig
from predict.config.engine import check_params
from predict.errors import EXIT_FAILURE, TokenizerError
from predict.images.placed import Pictures
from predict.loading.model import read_spec
from predict.nn.spec import DecoderSpec
from predict.request import RequestOutput, SamplingParams, TokenLogprobs
from predict.sight import reader_of
from predict.system.console import say
from predict.system.outputs import check_output, is_special
from predict.system.signals import Interrupted, Signals, number_of
from predict.text.tokenizer import Tokenizer
from predict.vectors import PromptOrError


@dataclass(frozen=True)
class Work:
    """The prompts of a run, read, tokenized and checked before the model is loaded."""

    items: Sequence[DataItem]
    token_ids: list[list[int] | TokenizerError]
    params: list[SamplingParams]
    tokenizer: Tokenizer
    pictures: Sequence[Pictures | None] = ()  # by prompt, whose tokens it has

    @property
    def prompts(self) -> list[PromptOrError]:
        """What LLM.generate takes."""
        seen = self.pictures or [None] * len(self.token_ids)
        return [
            ids if each is None else {"prompt": ids, "multi_modal_data": each}
            for ids, each in zip(self.token_ids, seen, strict=True)
        ]


def answers_prompts(config: PredictorConfig) -> bool:
    """Whether a run answers prompts; else it measures speed alone."""
    return config.data_file is not None or not config.benchmark


def checked_outputs(config: PredictorConfig) -> list[tuple[str, str]]:
    """(flag, path) of what a run writes; raises UserError where something would be destroyed."""
    engine = config.engine
    template = engine.model.chat_template
    files = {
        "data_file": config.data_file,
        "chat_template": None if template is None or not os.path.isfile(template) else template,
    }
    folders = input_paths(engine)
    folders |= {f"lora_modules {name}": p for name, p in engine.adapters.directories.items()}
    outputs: list[tuple[str, str]] = []
    if answers_prompts(config):
        check_output("output_file", config.output_file, files=files, folders=folders)
        outputs.append(("output_file", config.output_file))
        files["output_file"] = config.output_file
        if not is_special(config.output_file):
            journal = journal_path(config.output_file)
            inputs = {**files, "benchmark_file": config.benchmark_file}
            check_output("output_file", journal, files=inputs)
    if config.benchmark_file is not None:
        check_output("benchmark_file", config.benchmark_file, files=files, folders=folders)
        outputs.append(("benchmark_file", config.benchmark_file))
    return outputs


def prepare(config: PredictorConfig) -> Work:
    """What a run answers; raises UserError for the first prompt that cannot run."""
    engine = config.engine
    if config.data_file is None:
        items = [DataItem("the built-in prompt", BUILT_IN_PROMPT)] * config.num_requests
    else:
        items = read_data_file(config.data_file)
    tokenizer = Tokenizer.from_dir(engine.model.model_name_or_path, engine.model.chat_template)
    model, lengths = engine.model, (engine.scheduling.src_length, engine.max_length)

    def spec() -> DecoderSpec:
        return read_spec(model.model_name_or_path, model.model_type)[0]

    prompts = prepare_prompts(items, tokenizer, *lengths, lambda: reader_of(engine, spec()))
    params = prepare_params(
        items,
        config.sampling_params,
        tokenizer,
        lambda: spec().vocab_size,
        lambda params: check_params(params, engine),
    )
    for warning in prompts.warnings:
        say(f"warning: {warning}")
    return Work(items, prompts.token_ids, params, tokenizer, prompts.pictures)


@contextmanager
def kept_results(config: PredictorConfig, work: Work) -> Iterator[Results]:
    """The results of `work`, opened for the length of a `with` block.

    Interrupted, or failed, what is finished is kept, and a line says where. Raises UserError where
    results cannot be kept.
    """
    results = open_results(
        config.output_file,
        len(work.items),
        lambda: run_inputs(config, work.items, work.token_ids, work.pictures),
        config.resume,
        say,
    )
    try:
        yield results
    except KeyboardInterrupt as error:
        results.close()
        raise Interrupted(number_of(error), f"interrupted: {results.kept}") from error
    except Exception:
        results.close()
        if results.num_results:
            say(f"stopped: {results.kept}")
        raise


def finished(results: Results, signals: Signals, speed: str, num_failed: int) -> int:
    """Puts all results where they belong, and says so; the run's exit status."""
    with signals.held(f"{results.path} is written first"):
        if not results.finish():
            return EXIT_FAILURE
    say("; ".join(filter(None, (results.summary, speed))))
    return EXIT_FAILURE if num_failed else 0


def result_line(item: DataItem, output: RequestOutput) -> dict[str, Any]:
    """What the output file says of a prompt: PaddleNLP's keys, and what was asked for besides.

    "outputs" has all answers where there are several. "logprobs" (then of each answer) and
    "prompt_logprobs" have a list per token, its own first; "error" says what ended an answer early.
    """
    return {"src": item.src, "tgt": item.tgt, **answer_of(output)}


def answer_of(output: RequestOutput) -> dict[str, Any]:
    """A result line without what the data file says itself."""
    result: dict[str, Any] = {"output": output.text}
    several = len(output.outputs) > 1
    if several:
        result["outputs"] = [answer.text for answer in output.outputs]
    if output.outputs[0].logprobs is not None:
        logprobs = [_plain(answer.logprobs or ()) for answer in output.outputs]
        result["logprobs"] = logprobs if several else logprobs[0]
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = _plain(output.prompt_logprobs)
    errors = [answer.error for answer in output.outputs if answer.error is not None]
    if errors:
        result["error"] = errors[0]
    return result


def _plain(tokens: Sequence[TokenLogprobs | None]) -> list[Any]:
    """Logprobs for JSON, which has no infinity: null stands for -inf."""
    return [
        None
        if token is None
        else [
            {
                "token_id": token_id,
                "logprob": round(entry.logprob, 6) if math.isfinite(entry.logprob) else None,
                "rank": entry.rank,
            }
            for token_id, entry in token.items()
        ]
        for token in tokens
    ]
