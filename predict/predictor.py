"""The command line: answers the prompts of a data file, as PaddleNLP's predictor.py does.

    python predict/predictor.py --model_name_or_path DIR --dtype float32 --data_file prompts.jsonl

Leaves with 0, 1 (a result could not be written, or an error inside), 2 (wrong flags, files or
model), or 128 + the number of the signal that ended it (130 after Ctrl-C).
"""

from __future__ import annotations

import math
import os
import sys

if (
    not __package__
):  # run as a script: Python put predict/ first on the path, where `predict` is not
    _HERE = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != _HERE]
    sys.path.insert(0, os.path.dirname(_HERE))

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from predict.command import run_command
from predict.console import say
from predict.errors import EXIT_FAILURE, EXIT_INTERRUPTED
from predict.flags import parse_flags

if TYPE_CHECKING:
    from predict.config import EngineConfig, PredictorConfig
    from predict.data import DataItem
    from predict.llm import LLM
    from predict.progress import Progress
    from predict.request import RequestOutput, SamplingParams, TokenLogprobs
    from predict.signals import Signals
    from predict.tokenizer import Tokenizer

    MakeLLM = Callable[[EngineConfig, Tokenizer | None], LLM]

DESCRIPTION = "Answers the prompts of a data file with a large language model."
BANNER = "***********{}**********"


def main(argv: Sequence[str] | None = None, make_llm: MakeLLM | None = None) -> int:
    """Runs the command line and returns its exit status.

    `make_llm` builds the LLM; tests pass a stand-in, so that nothing heavy is imported.
    """

    def action(signals: Signals) -> int:
        flags = parse_flags(sys.argv[1:] if argv is None else argv, description=DESCRIPTION)
        from predict.config import PredictorConfig

        return run(PredictorConfig.from_flags(flags), make_llm or _make_llm)

    return run_command(action)


def run(config: PredictorConfig, make_llm: MakeLLM) -> int:
    """Answers the data file and runs the benchmark, as configured; returns the exit status.

    Every prompt is read, tokenized and checked before the model is loaded. Raises UserError.
    """
    from predict.config import check_params
    from predict.data import built_in_items, check_output_path, read_data_file
    from predict.host import frozen_objects
    from predict.nn.hf_config import ConfigReader
    from predict.prompts import prepare_params, prepare_prompts
    from predict.tokenizer import Tokenizer

    for note in config.notes:
        say(f"note: {note}")
    engine = config.engine
    items: list[DataItem] = []
    token_ids: list[list[int]] = []
    params: list[SamplingParams] = []
    tokenizer: Tokenizer | None = None  # None: the LLM reads its own
    if config.data_file is not None or not config.benchmark:
        check_output_path(config.output_file, config.data_file)
        if config.data_file is None:
            items = built_in_items(config.num_requests)
        else:
            items = read_data_file(config.data_file)
        tokenizer = Tokenizer.from_dir(engine.model_name_or_path, engine.chat_template)
        prompts = prepare_prompts(items, tokenizer, engine.src_length, engine.max_length)
        token_ids = prompts.token_ids
        params = prepare_params(
            items,
            config.sampling_params,
            tokenizer,
            lambda: ConfigReader.from_dir(engine.model_name_or_path).get_int("vocab_size"),
            lambda params: check_params(params, engine),
        )
        for warning in prompts.warnings:
            say(f"warning: {warning}")
    if config.benchmark_file is not None:
        check_output_path(config.benchmark_file, config.data_file)
    llm = make_llm(engine, tokenizer)
    with frozen_objects():
        status = answer(llm, config, items, token_ids, params) if items else 0
        if config.benchmark:
            from predict.bench.padded import run_benchmark

            run_benchmark(llm, config)
    return status


def answer(
    llm: LLM,
    config: PredictorConfig,
    items: Sequence[DataItem],
    token_ids: list[list[int]],
    params: list[SamplingParams],
) -> int:
    """Generates, prints and writes one output per item; returns the exit status.

    What is finished when the run ends, by whatever cause, is in the output file.
    """
    from predict.data import ResultWriter
    from predict.progress import Progress

    texts: dict[int, Sequence[str]] = {}  # finished, not yet printed
    num_failed = 0
    with Progress(len(items)) as progress:
        console = _Console(progress)
        writer = ResultWriter(
            config.output_file,
            len(items),
            on_line=lambda index: console.show(items[index], texts.pop(index)),
            warn=lambda message: say(f"error: {message}"),
        )

        def on_output(index: int, output: RequestOutput) -> None:
            nonlocal num_failed
            texts[index] = [answer.text for answer in output.outputs]
            progress.on_finished()
            item = items[index]
            result = result_line(item, output)
            if "error" in result:
                num_failed += 1
                say(f"error: {item.where}: {result['error']}")
            writer.put(index, result)

        interrupted = False
        try:
            llm.generate(token_ids, params, on_output, progress.on_step)
        except KeyboardInterrupt:
            interrupted = True
        except Exception:
            writer.close()
            say(f"stopped: {writer.summary}")
            raise
        writer.close()
    if interrupted:
        say(f"interrupted: {writer.summary}")
        return EXIT_INTERRUPTED
    say(
        f"{writer.summary}; {progress.num_output_tokens} tokens in {progress.seconds:.2f} s, "
        f"{progress.tokens_per_second:.1f} tokens/s"
    )
    return 0 if writer.failure is None and num_failed == 0 else EXIT_FAILURE


def result_line(item: DataItem, output: RequestOutput) -> dict[str, Any]:
    """What the output file says of a prompt: PaddleNLP's keys, and what was asked for besides.

    "outputs" has all answers where there are several. "logprobs" (then of each answer) and
    "prompt_logprobs" have a list per token, its own first; "error" says what ended an answer early.
    """
    result: dict[str, Any] = {"src": item.src, "tgt": item.tgt, "output": output.text}
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


class _Console:
    """Prints each item under PaddleNLP's banners, until nobody reads."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open = True

    def show(self, item: DataItem, outputs: Sequence[str]) -> None:
        if not self._open:
            return
        parts = [("Source", item.src), ("Target", item.tgt)]
        parts += [("Output", output) for output in outputs]
        text = "\n".join(f"{BANNER.format(name)}\n{value}" for name, value in parts)
        try:
            self._progress.print(text.encode("utf-8", "replace").decode("utf-8"))
        except BrokenPipeError:
            self._open = False
            # Python would complain again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _make_llm(config: EngineConfig, tokenizer: Tokenizer | None) -> LLM:
    from predict.llm import LLM

    return LLM(config, tokenizer)


if __name__ == "__main__":
    sys.exit(main())
