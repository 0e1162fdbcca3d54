"""The command line's --benchmark: prompts of src_length tokens, decoded to their full length."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from predict.bench.report import report_of, table, write_json
from predict.cli.run_config import PredictorConfig
from predict.device import library
from predict.request import RequestOutput, SamplingParams
from predict.system.console import show
from predict.system.progress import Progress

if TYPE_CHECKING:
    from predict.llm import LLM

TEXT = "hello world, how are you?"
NUM_RUNS = 3
# No further run is begun after this: a large model on a CPU takes minutes for one.
ENOUGH_SECONDS = 30.0
WARM_UP_TOKENS = 8


def run_benchmark(llm: LLM, config: PredictorConfig) -> dict[str, Any]:
    """Measures, prints, and returns the report; writes it as JSON where --benchmark_file says.

    Warm-up decodes a few tokens of every prompt, so that first-touch memory and lazily built
    kernels are not counted. Raises UserError where the file cannot be written.
    """
    num_input, num_output = config.engine.scheduling.src_length, config.max_new_tokens
    prompts = [_prompt(llm, num_input)] * config.num_requests
    params = replace(
        config.sampling_params,
        max_new_tokens=num_output,
        max_length=None,
        min_length=0,
        ignore_eos=True,
    )
    show("***********Start Benchmark**********")
    show("***********Start Warmup**********")
    warm_up = replace(params, max_new_tokens=min(WARM_UP_TOKENS, num_output))
    _timed(llm, prompts, warm_up, "warm-up")
    show("***********Start Speed Test**********")
    outputs: list[RequestOutput] = []
    runs: list[float] = []  # seconds
    while len(runs) < NUM_RUNS and sum(runs) < ENOUGH_SECONDS:
        seconds, answers = _timed(llm, prompts, params, f"run {len(runs) + 1} of {NUM_RUNS}")
        outputs += answers
        runs.append(seconds)
    memory = llm.stats().peak_memory_bytes
    report = report_of(outputs, sum(runs), memory, llm.startup_seconds)
    # The lines that PaddleNLP's --benchmark ends with; its Output length counts output alone.
    show(f"Avg Elapse time is:  {report['elapsed_s'] / len(runs)}")
    show(f"Output tokens is:  {report['num_output_tokens']}")
    show(
        f"Input length is: {num_input}, Output length is: {num_output}, "
        f"bs is: {config.engine.scheduling.batch_size}, "
        f"IPS: {report['output_tokens_per_s']:.3f} tokens/s, "
        f"QPS: {report['requests_per_s']:.3f} requests/s. "
    )
    show(table(report))
    if instruction_set := _instruction_set(config):
        show(f"products by {instruction_set}")
    if config.benchmark_file is not None:
        write_json(_settings(config, runs) | report, config.benchmark_file)
    return report


def _timed(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, label: str
) -> tuple[float, list[RequestOutput]]:
    """Seconds that the prompts take, and their outputs; a bar on a terminal."""
    total = len(prompts) * (params.max_new_tokens or 0)
    with Progress(len(prompts), num_tokens=total, label=label) as progress:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, on_step=progress.on_step)
        return time.perf_counter() - started, outputs


def _prompt(llm: LLM, length: int) -> Sequence[int]:
    """`length` token ids: a short text over and over, or any ids where there is no tokenizer."""
    if llm.tokenizer is None:
        return [index % llm.spec.vocab_size for index in range(length)]
    text = llm.tokenizer.encode(TEXT)
    return list(itertools.islice(itertools.cycle(text), length))


def _instruction_set(config: PredictorConfig) -> str | None:
    """What products of the compiled operators run by on a CPU; None elsewhere."""
    if config.engine.settings["device"] != "cpu" or library.find() is None:
        return None
    return str(library.require().info()["instruction_set"])


def _settings(config: PredictorConfig, runs: Sequence[float]) -> dict[str, Any]:
    engine = config.engine
    names = ("model_name_or_path", "dtype", "device", "mode", "inference_model", "attention")
    return {name: engine.settings[name] for name in names} | {
        "batch_size": engine.scheduling.batch_size,
        "block_size": engine.cache.block_size,
        "prefix_caching": engine.cache.shares_prefixes,
        "input_length": engine.scheduling.src_length,
        "output_length": config.max_new_tokens,
        "run_seconds": list(runs),
        "instruction_set": _instruction_set(config),
    }
