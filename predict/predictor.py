"""The command line: answers the prompts of a data file, as PaddleNLP's predictor.py does.

    python predict/predictor.py --model_name_or_path DIR --dtype float32 --data_file prompts.jsonl

Leaves with 0, 1 (a result could not be written, or an error inside), 2 (wrong flags, files or
model), or 128 + the number of the signal that ended it (130 after Ctrl-C).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from predict.cli.command import command
from predict.cli.flags import parse_flags
from predict.errors import TokenizerError
from predict.system.console import say
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.cli.data import DataItem
    from predict.cli.results import Results
    from predict.cli.run_config import PredictorConfig
    from predict.cli.work import Work
    from predict.config.engine import EngineConfig
    from predict.llm import LLM
    from predict.request import RequestOutput
    from predict.system.progress import Progress
    from predict.text.tokenizer import Tokenizer

    MakeLLM = Callable[[EngineConfig, Tokenizer | None], LLM]

DESCRIPTION = "Answers the prompts of a data file with a large language model."
BANNER = "***********{}**********"


@command()
def main(words: Sequence[str], signals: Signals, make_llm: MakeLLM | None = None) -> int:
    """Runs the command line and returns its exit status.

    `make_llm` builds the LLM; tests pass a stand-in, so that nothing heavy is imported.
    """
    flags = parse_flags(words, description=DESCRIPTION)
    from predict.cli.run_config import PredictorConfig

    return run(PredictorConfig.from_flags(flags), make_llm or _make_llm, signals)


def run(config: PredictorConfig, make_llm: MakeLLM, signals: Signals) -> int:
    """Answers the data file and runs the benchmark, as configured; returns the exit status.

    Every output and every prompt is checked before the model is loaded. Raises UserError.
    """
    from predict.cli.work import answers_prompts, checked_outputs, kept_results, prepare
    from predict.system.host import frozen_objects
    from predict.system.outputs import locked

    for note in config.notes:
        say(f"note: {note}")
    if config.task == "embed":
        from predict.cli.vectors import embed_file

        return embed_file(config, make_llm, signals)
    with ExitStack() as stack:
        for flag, path in checked_outputs(config):
            stack.enter_context(locked(flag, path))
        llm: LLM | None = None
        status = 0
        if answers_prompts(config):
            work = prepare(config)
            with kept_results(config, work) as results:
                if not results.is_complete:
                    llm = make_llm(config.engine, work.tokenizer)
                with frozen_objects():
                    status = answer(llm, work, results, signals)
        if config.benchmark:
            from predict.bench.padded import run_benchmark

            signals.check()
            llm = llm or make_llm(config.engine, None)
            with frozen_objects():
                run_benchmark(llm, config)
    return status


def answer(llm: LLM | None, work: Work, results: Results, signals: Signals) -> int:
    """Generates, prints and keeps what has no result yet, then writes the output.

    llm: None where nothing is left to generate. Returns the exit status. Raises Interrupted at the
    end of a step, unless it was the last one.
    """
    from predict.cli.results import result_bytes
    from predict.cli.work import finished, result_line
    from predict.system.progress import Progress

    num_failed = 0
    with Progress(len(work.items), num_tokens=_lone_length(work)) as progress:
        console = _Console(progress, work.items, results.done)

        def on_output(index: int, output: RequestOutput) -> None:
            nonlocal num_failed
            item = work.items[index]
            result = result_line(item, output)
            results.put(index, result_bytes(result))
            progress.on_finished()
            console.finished(index, [answer.text for answer in output.outputs])
            if "error" in result:
                num_failed += 1
                say(f"error: {item.where}: {result['error']}")

        def on_step(prompt_tokens: int, output_tokens: int) -> None:
            progress.on_step(prompt_tokens, output_tokens)
            if not results.is_complete:
                signals.check()

        if llm is not None:
            with signals.held("the running step ends first"):
                llm.generate(work.prompts, work.params, on_output, on_step, results.done)
        speed = "" if llm is None else progress.speed + _drafts(llm)
    return finished(results, signals, speed, num_failed)


def _lone_length(work: Work) -> int | None:
    """Tokens that a lone answer may take, for its progress; None where there are several."""
    if len(work.params) != 1 or work.params[0].num_samples > 1 or work.params[0].num_beams > 1:
        return None
    prompt = work.token_ids[0]
    if isinstance(prompt, TokenizerError):
        return None
    limits = [work.params[0].max_new_tokens]
    if work.params[0].max_length is not None:
        limits.append(work.params[0].max_length - len(prompt))
    return min((limit for limit in limits if limit is not None), default=None)


def _drafts(llm: LLM) -> str:
    """How speculation went, for the last line; nothing without it."""
    from predict.system.progress import draft_summary

    if llm.config.speculation.speculate_method is None:
        return ""
    stats = llm.stats()
    counts = stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_draft_spans
    return "; " + draft_summary(*counts, stats.num_accepted_by_position)


class _Console:
    """Prints each new result under PaddleNLP's banners, in input order, until nobody reads."""

    def __init__(self, progress: Progress, items: Sequence[DataItem], done: Container[int]) -> None:
        self._progress = progress
        self._items = items
        self._done = done
        self._waiting: dict[int, Sequence[str]] = {}  # for one before them
        self._next = 0
        self._open = True

    def finished(self, index: int, outputs: Sequence[str]) -> None:
        self._waiting[index] = outputs
        while self._next in self._waiting or self._next in self._done:
            if self._next in self._waiting:
                self._show(self._items[self._next], self._waiting.pop(self._next))
            self._next += 1

    def _show(self, item: DataItem, outputs: Sequence[str]) -> None:
        parts = [("Source", item.src), ("Target", item.tgt)]
        parts += [("Output", output) for output in outputs]
        text = "\n".join(f"{BANNER.format(name)}\n{value}" for name, value in parts)
        self._open = self._open and self._progress.print(text)


def _make_llm(config: EngineConfig, tokenizer: Tokenizer | None) -> LLM:
    from predict.llm import LLM

    return LLM(config, tokenizer)


if __name__ == "__main__":
    sys.exit(main())
