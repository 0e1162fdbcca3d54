"""Speed of one engine run, on real or random weights: `python -m predict.bench.throughput --help`.

Takes every flag of the predictor, and its own. Prompts are random token ids, new ones for every
repetition, so that no prefix cache helps; each request decodes exactly its output tokens. --cases
measures several sizes in one run. With --speculate_method the same requests also run with and
without drafts in turns, over two kinds of text (see predict.bench.speculation). With --task embed
requests are texts, of which vectors are made.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np

from predict.bench.cases import EXPERT_UNITS, UNITS, Case, cases_table, parse_cases
from predict.bench.ceilings import Limits, measure_gpu_ceilings, share_text
from predict.bench.cost import Cost, linear_bytes, program_bytes
from predict.bench.outputs import Outputs, output_flags
from predict.bench.random_adapters import write_adapters
from predict.bench.random_head import write_head
from predict.bench.record import (
    RecordRow,
    Suite,
    check_measured,
    command_line,
    cpu_device,
    gpu_device,
    own_versions,
    record,
    repeated_row,
    spread_of,
    suite,
)
from predict.bench.routing import ROUTINGS, Routing, check_routing, counted, counts_experts, skew
from predict.cli.command import command
from predict.cli.flags import FLAGS, Flag, FlagValues, parse_flags
from predict.cli.identity import input_paths
from predict.cli.run_config import PredictorConfig
from predict.config.engine import EngineConfig
from predict.config.schemes import scheme_info
from predict.device import library
from predict.device.devices import indices_of, kind_of
from predict.errors import UserError
from predict.guide import Guide
from predict.nn.kinds.experts import ExpertBlock
from predict.nn.spec import DecoderSpec
from predict.ranks.front import RanksRunner
from predict.request import RequestOutput, SamplingParams
from predict.system.console import say, show
from predict.system.host import frozen_objects, process_age_seconds
from predict.system.progress import Progress
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.llm import LLM

PROG = "python -m predict.bench.throughput"
GROUP = "Throughput run"
# fmt: off
OWN_FLAGS = (
    Flag(GROUP, "cases", "strs", None,
         "Sizes REQUESTSxINPUTxOUTPUT to measure one after another in place of --num_requests, "
         "--input_len and --output_len, as in 8x128x256."),
    Flag(GROUP, "num_requests", "int", None, "Requests in all; when not given, batch_size."),
    Flag(GROUP, "input_len", "int", 128, "Tokens of each prompt."),
    Flag(GROUP, "output_len", "int", 64, "Tokens that each request decodes."),
    Flag(GROUP, "repetitions", "int", 5,
         "Timed repetitions of the latency part; 0: only one run of all requests."),
    Flag(GROUP, "routing", "str", None,
         "Which experts routers of random weights choose (--load_format dummy): uniform, all alike "
         "often, as when not given; skewed, some far more often, as in trained models.",
         choices=ROUTINGS),
    Flag(GROUP, "random_adapters", "str", None,
         "Requests in turn have one of so many LoRA adapters of random weights: NUMBER, or "
         "NUMBERxRANK; when no rank is given, 16."),
    Flag(GROUP, "request_adapters", "bool", True,
         "With --lora_modules or --random_adapters, request i has adapter i mod N of them. false: "
         "none has one."),
    Flag(GROUP, "guide", "json", None,
         "All requests sample under this guide, as SamplingParams.guide has it; it must not end "
         "before their last token."),
    Flag(GROUP, "copy_edits", "float", 0.05,
         "Share of a copied text's tokens that are not the prompt's."),
    Flag(GROUP, "draft_agreement", "float", 0.7,
         "Share of the draft model's tokens that are the copied text's."),
    *output_flags(GROUP),
)
# fmt: on
# The predictor's own lengths follow from input_len and output_len here, and its output is text.
REPLACED: dict[str, Any] = {"output_file": "", "resume": False, "benchmark": False}
REPLACED |= dict.fromkeys(("src_length", "max_length", "data_file", "benchmark_file"))
PLANNED = ("repetitions", "seed", "copy_edits", "draft_agreement", "routing")  # flags of Plan
METHOD = (
    "Prompts of random token ids, new ones for each run; every request decodes all its tokens. "
    "{} Rates: of all requests together. Share of the limit: least time that the device's measured "
    "limits allow for the whole run, over the time it took."
)
LATENCIES = (
    "TTFT: median over one batch of requests, of one token each. TPOT: (time of N tokens - time of "
    "one) / (N - 1), of the whole batch."
)
LATENCIES_OF_ONE_RUN = "TTFT and TPOT: medians over the requests of one run, waiting included."
COUNTED_STEPS, COUNTED_TOKENS = 16, 1 << 14
EXPERTS = (
    " Experts: distinct ones of a layer and step, means over layers and steps of one more run, "
    "block by block, where the router's plain twin chooses by the hidden states of each block. A "
    "decoding step is taken to read so many."
)
TEXTS = (
    "Texts of random token ids, new ones for each run, all at once: rates until the last vector is "
    "there. Share of the limit: least time that the device's measured limits allow, over the time "
    "it took; the LM head's product is no part of it."
)
DRAFTS = "The same requests with and without drafts, in turns; see predict.bench.speculation."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: sizes in tokens and requests."""

    cases: tuple[Case, ...]  # one after another
    batch_size: int  # requests that run at once
    repetitions: int
    seed: int
    copy_edits: float = 0.05
    draft_agreement: float = 0.7
    routing: Routing | None = None  # of random weights
    adapters: tuple[str, ...] = ()  # of requests, in turn
    guide: Guide | None = None
    embeds: bool = False  # requests are texts, whose vectors are made

    def params(self, count: int, output_len: int) -> list[SamplingParams]:
        """Of so many requests, each of which decodes exactly `output_len` tokens."""
        common = SamplingParams(max_new_tokens=output_len, ignore_eos=True, temperature=0.0)
        if self.guide is not None:
            # Samples: the likeliest text under a guide may be one token over and over.
            common = replace(common, temperature=1.0, seed=self.seed, guide=self.guide)
        own = [replace(common, adapter=name) for name in self.adapters] or [common]
        return [own[index % len(own)] for index in range(count)]


def random_prompts(
    spec: DecoderSpec, seed: int, count: int, input_len: int, run: int
) -> list[list[int]]:
    """`count` prompts of random token ids; another set for each run."""
    # The sizes too: of one seed, a longer prompt would begin with a shorter one, which is cached.
    generator = np.random.default_rng((seed, run, count, input_len))
    return generator.integers(0, spec.vocab_size, (count, input_len)).tolist()


def timed(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[float, list[RequestOutput]]:
    """Seconds for all prompts at once. Raises UserError where a guide ends an answer early."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for output, wanted in zip(outputs, params, strict=True):
        if len(output.token_ids) != wanted.max_new_tokens:
            said = output.outputs[0].error or f"it was complete ({output.finish_reason})"
            raise UserError(
                f"an answer ended after {len(output.token_ids)} of {wanted.max_new_tokens} tokens: "
                f"{said}; give a --guide that goes on, or fewer output tokens"
            )
    return seconds, outputs


def count_experts(llm: LLM, plan: Plan, case: Case) -> dict[str, float]:
    """Distinct experts that a layer chooses in a step: means over layers and steps, untimed.

    Of prompts and tokens of the case's kind; of at most COUNTED_STEPS decoding steps. Of prompts
    with more tokens than COUNTED_TOKENS the first few, and decoding behind short ones.
    """
    batch = min(plan.batch_size, case.num_requests)
    whole = min(batch, max(1, COUNTED_TOKENS // case.input_len))
    output_len = min(case.output_len, 1 + COUNTED_STEPS)

    def run(count: int, input_len: int, output_len: int) -> None:
        prompts = random_prompts(llm.spec, plan.seed, count, input_len, 2_000_000)
        timed(llm, prompts, plan.params(count, output_len))

    with counted(llm) as chosen:
        run(whole, case.input_len, 1)
        if output_len > 1:
            chosen.counting = "decode"
            run(batch, min(case.input_len, max(2, COUNTED_TOKENS // batch)), output_len)
    return chosen.means()


def measure(
    llm: LLM,
    plan: Plan,
    case: Case,
    beside: Callable[[], None] = lambda: None,
    on_run: Callable[[], None] = lambda: None,
) -> RecordRow:
    """Latencies of one batch (medians over repetitions), then the rate of all requests.

    Without repetitions the latencies are medians over the requests of the one run, their waiting
    included. beside: called before, between and after what is timed; it measures the machine's
    limits. on_run: called after each repetition, and after the run of all requests.
    """
    batch = min(plan.batch_size, case.num_requests)
    numbers = iter(range(1_000_000))
    crc = 0  # of all tokens

    def run(count: int, output_len: int) -> tuple[float, list[RequestOutput]]:
        nonlocal crc
        prompts = random_prompts(llm.spec, plan.seed, count, case.input_len, next(numbers))
        seconds, outputs = timed(llm, prompts, plan.params(count, output_len))
        crc = zlib.crc32(json.dumps([list(each.token_ids) for each in outputs]).encode(), crc)
        return seconds, outputs

    def to_first(outputs: Sequence[RequestOutput]) -> list[float]:
        return [each.metrics.time_to_first_token or 0.0 for each in outputs]

    run(batch, min(case.output_len, 4))  # warm-up
    beside()
    before = llm.stats()
    first, whole, ttft = [], [], []
    for _ in range(plan.repetitions):
        seconds, outputs = run(batch, 1)
        first.append(seconds)
        ttft.append(statistics.median(to_first(outputs)))
        if case.output_len > 1:
            whole.append(run(batch, case.output_len)[0])
        beside()
        on_run()
    steps = case.output_len - 1
    tpot = [(late - early) / steps for late, early in zip(whole, first, strict=False)]
    rates = whole or first
    if case.num_requests > batch or not first:
        seconds, outputs = run(case.num_requests, case.output_len)
        beside()
        on_run()
        rates = [seconds]
        if not first:
            ttft = to_first(outputs)
            each_tpot = (each.metrics.time_per_output_token or 0.0 for each in outputs)
            tpot = list(each_tpot) if steps else []
    num_input = case.num_requests * case.input_len
    num_output = case.num_requests * case.output_len
    samples = {
        "ttft_ms": [1e3 * value for value in ttft],
        "tpot_ms": [1e3 * value for value in tpot],
        "input_tokens_per_s": [num_input / value for value in rates],
        "output_tokens_per_s": [num_output / value for value in rates],
    }
    row = repeated_row(str(case), {name: each for name, each in samples.items() if each})
    if not first:  # requests of one run are no repetitions of it
        row["spread"] = {name: spread_of([value]) for name, value in row["values"].items()}
    row["tokens_crc32"] = crc
    values = row["values"]
    values.setdefault("tpot_ms", None)
    values["total_tokens_per_s"] = (num_input + num_output) / statistics.median(rates)
    values["requests_per_s"] = case.num_requests / statistics.median(rates)
    if first:
        values["prefill_tokens_per_s"] = batch * case.input_len / statistics.median(first)
    if whole:
        taken = (statistics.median(whole) - statistics.median(first)) / steps
        values["tpot_ms"] = 1e3 * taken  # medians of each: less than a pair's share of noise
        values["decode_tokens_per_s"] = batch / taken
    if plan.guide is not None:
        after = llm.stats()
        num_masks = after.num_mask_steps - before.num_mask_steps
        mask_seconds = after.mask_seconds - before.mask_seconds
        values["mask_ms_per_step"] = 1e3 * mask_seconds / max(num_masks, 1)
        values["forced_tokens"] = after.num_forced_tokens - before.num_forced_tokens
    return row


def measure_texts(
    llm: LLM,
    plan: Plan,
    case: Case,
    beside: Callable[[], None] = lambda: None,
    on_run: Callable[[], None] = lambda: None,
) -> RecordRow:
    """The rate of all texts of a case, as of `measure`; without repetitions of one run."""
    rates = []
    for number in range(max(plan.repetitions, 1) + 1):
        prompts = random_prompts(llm.spec, plan.seed, case.num_requests, case.input_len, number)
        start = time.perf_counter()
        llm.embed(prompts)
        if number:  # the first one warms up
            rates.append(case.num_requests * case.input_len / (time.perf_counter() - start))
            on_run()
        beside()
    row = repeated_row(str(case), {"input_tokens_per_s": rates})
    rate = row["values"]["prefill_tokens_per_s"] = statistics.median(rates)
    row["values"]["requests_per_s"] = rate / case.input_len
    return row


def add_rates(row: RecordRow, case: Case, batch_size: int, cost: Cost) -> None:
    """Adds the bytes that decode reads and the operations that prefill does, per second."""
    values = row["values"]
    batch = min(batch_size, case.num_requests)
    if "prefill_tokens_per_s" in values:
        prefill_seconds = batch * case.input_len / values["prefill_tokens_per_s"]
        flops = cost.prefill_flops(batch, case.input_len) / prefill_seconds
        values["prefill_gflops"] = flops / 1e9
    if "decode_tokens_per_s" in values:
        steps_per_s = values["decode_tokens_per_s"] / batch
        values["decode_gbs"] = cost.decode_bytes(batch, case.mean_context) * steps_per_s / 1e9
    runs_per_s = values["requests_per_s"] / case.num_requests
    values["run_gbs"] = cost.run_bytes(case, batch) * runs_per_s / 1e9
    values["run_gflops"] = cost.run_flops(case) * runs_per_s / 1e9


def add_shares(row: RecordRow, ceilings: Mapping[str, float], scheme: str | None) -> None:
    """Adds shares of the read bandwidth and of the arithmetic ceiling; of the run, the larger.

    The ceiling is of products of the dtype, which those of 8 bits may pass: they have no share of
    it.
    """
    values = row["values"]
    read, flops = ceilings["read_bytes_per_s"] / 1e9, ceilings["flops_per_s"] / 1e9
    values["measured_bandwidth_gbs"], values["measured_gflops_ceiling"] = read, flops
    if "decode_gbs" in values:
        values["decode_bandwidth_share"] = values["decode_gbs"] / read
    of_bytes, of_products = values["run_gbs"] / read, values["run_gflops"] / flops
    counts_products = scheme is None or scheme_info(scheme).activations is None
    if counts_products and "prefill_gflops" in values:
        values["prefill_flops_share"] = values["prefill_gflops"] / flops
    if of_bytes >= of_products:
        values["share_of_limit"], row["limit"] = of_bytes, "bandwidth"
    elif counts_products:
        values["share_of_limit"], row["limit"] = of_products, "products"


RATE, TIME, SHARE = "{:,.1f}".format, "{:.3f}".format, partial(share_text, digits=1)
DETAILS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("prefill_tokens_per_s", "prefill tokens/s", RATE),
    ("decode_tokens_per_s", "decode tokens/s", RATE),
    ("total_tokens_per_s", "prompt + output tokens/s", RATE),
    ("decode_gbs", "decode reads, GB/s", RATE),
    ("decode_bandwidth_share", "  share of measured bandwidth", SHARE),
    ("prefill_gflops", "prefill, GFLOP/s", RATE),
    ("prefill_flops_share", "  share of measured ceiling", SHARE),
    ("measured_bandwidth_gbs", "measured read bandwidth, GB/s", RATE),
    ("measured_bandwidth_spread", "  its highest over its lowest", TIME),
    ("measured_gflops_ceiling", "measured arithmetic ceiling, GFLOP/s", RATE),
    ("mask_ms_per_step", "masks of a step, ms", TIME),
    ("forced_tokens", "tokens that the guide forced", "{:,}".format),
    *(
        (f"{text}_{name}", label, form)
        for text in ("copy", "random")
        for name, label, form in (
            ("tokens_per_s_without_drafts", f"{text} text, tokens/s without drafts", RATE),
            ("tokens_per_s", "  with drafts", RATE),
            ("speed_up", "  speed-up", TIME),
            ("acceptance_rate", "  acceptance rate", "{:.1%}".format),
            ("mean_accepted_length", "  mean accepted length, tokens", TIME),
            ("mean_draft_length", "  mean draft length, tokens", TIME),
            ("drafted_share", "  share of tokens from steps with drafts", "{:.1%}".format),
        )
    ),
    ("ready_s", "process start to ready, s", "{:.2f}".format),
    ("peak_memory_bytes", "peak memory, bytes", "{:,}".format),
)


def details(made: Mapping[str, Any]) -> str:
    """What the table of cases leaves out, as aligned lines: of one case, and of the process."""
    suites = made["suites"]
    cases = suites["throughput"]["rows"]
    others = [*suites.get("drafts", {"rows": ()})["rows"], *suites["process"]["rows"]]
    values: dict[str, Any] = {}
    for row in (*(cases if len(cases) == 1 else ()), *others):
        values |= row["values"]
    lines = [
        (label, show(values[key])) for key, label, show in DETAILS if values.get(key) is not None
    ]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {value:>16}" for label, value in lines)


def measure_cases(llm: LLM, config: EngineConfig, plan: Plan, cost: Cost) -> list[RecordRow]:
    """The row of every case: what was measured, rates, and on a CPU the shares of its limits.

    Those of a shared host move: what is timed is held against the mean of what was there beside it.
    """
    rows = []
    counts = counts_experts(llm)
    waiting = [c for c in plan.cases if c.num_requests > plan.batch_size or not plan.repetitions]
    if plan.embeds and plan.repetitions:
        waiting = []
    with Progress(
        len(plan.cases) * plan.repetitions + len(waiting), unit="run", label="measuring"
    ) as progress:
        for case in plan.cases:
            batch = min(plan.batch_size, case.num_requests)
            experts = count_experts(llm, plan, case) if counts else {}
            own_cost = cost.choosing(llm.spec, experts.get("decode_experts"))
            limits = None
            if first_gpu(llm) is None and library.find() is not None:
                num_bytes = own_cost.decode_bytes(batch, case.mean_context)
                limits = Limits(config.model.dtype, num_bytes)
            beside = limits.sample if limits else lambda: None
            timed_case = measure_texts if plan.embeds else measure
            row = timed_case(llm, plan, case, beside, progress.on_finished)
            add_rates(row, case, plan.batch_size, own_cost)
            row["values"] |= experts
            if limits is not None:
                add_shares(row, limits.mean, config.quantization.settings.scheme)
                row["values"]["measured_bandwidth_spread"] = limits.spread
            rows.append(row)
    return rows


def first_gpu(llm: LLM) -> int | None:
    """The index of the GPU that runs the model, or its first rank; None: the CPU does."""
    if llm.device is not None:
        return llm.device.index
    flag = llm.config.model.device
    return next(iter(indices_of(flag)), 0) if kind_of(flag) == "gpu" else None


def run(config: EngineConfig, plan: Plan, command: str = "") -> dict[str, Any]:
    """Builds the engine, measures, and returns what the file holds.

    command: the line that asked for it.
    """
    from predict.bench.speculation import measure_drafts, replaced
    from predict.llm import LLM
    from predict.loading.model import read_spec

    check_measured(config.model.device)
    if plan.routing is not None:
        spec, _ = read_spec(config.model.model_name_or_path)
        check_routing(config, any(spec.blocks_of(ExpertBlock)))
    llm = LLM(config)
    startup = process_age_seconds()
    if plan.routing == "skewed":
        skew(llm, plan.seed)
    if llm.decoder is not None:
        stored = linear_bytes(llm.decoder)
    elif isinstance(llm.engine.runner, RanksRunner):
        stored = llm.engine.runner.weight_bytes
    else:
        stored = program_bytes(config, llm.spec)
    cost = replace(Cost.of(llm.spec, config.model.dtype, config.kv_format), weight_bytes=stored)
    if plan.embeds:
        cost = replace(cost, head_flops_per_row=0)
    suites: dict[str, Suite] = {}
    with frozen_objects():
        with replaced(llm, None):
            rows = measure_cases(llm, config, plan, cost)
        if llm.engine.speculation.proposer is not None:
            case = plan.cases[0]
            sizes = case.num_requests, case.input_len
            prompts = [
                random_prompts(llm.spec, plan.seed, *sizes, 1_000_000 + number)
                for number in range(plan.repetitions)
            ]
            drafts = measure_drafts(
                llm, prompts, case.output_len, plan.copy_edits, plan.draft_agreement
            )
            suites["drafts"] = suite([{"name": str(case), "values": drafts}], {}, command, DRAFTS)
    if llm.device is not None:
        ceilings = measure_gpu_ceilings(llm.device, llm.config.model.dtype)
        for row in rows if ceilings else ():
            add_shares(row, ceilings, config.quantization.settings.scheme)
    stats = llm.stats()
    process = {"ready_s": startup, "peak_memory_bytes": stats.peak_memory_bytes}
    process["preemptions"] = stats.num_preemptions
    settings = {
        "model": config.model.model_name_or_path,
        "dtype": llm.config.model.dtype,
        "quant_type": config.quantization.settings.types,
        "kv_format": config.kv_format,
        "lm_head_quant_type": config.quantization.settings.head_scheme or "none",
        "mode": config.model.mode,
        "device": config.model.device,
        "batch_size": plan.batch_size,
        "repetitions": plan.repetitions,
        "speculate_method": config.speculation.speculate_method,
        "speculate_max_draft_token_num": config.speculation.speculate_max_draft_token_num,
        "adapters": len(config.adapters.directories),
        "request_adapters": bool(plan.adapters),
        "guide": None if plan.guide is None else plan.guide.text,
        "operators": "compiled" if llm.platform.compiled else "plain Paddle",
    }
    method = METHOD.format(LATENCIES if plan.repetitions else LATENCIES_OF_ONE_RUN)
    units = UNITS
    if plan.embeds:
        method, settings["task"] = TEXTS, "embed"
    if config.ranks.tensor_parallel_degree > 1:
        settings["tensor_parallel_degree"] = config.ranks.tensor_parallel_degree
    if counts_experts(llm):
        settings["routing"] = plan.routing or "as the weights have it"
        method, units = method + EXPERTS, UNITS | EXPERT_UNITS
    suites["throughput"] = suite(rows, units, command, method)
    of_process = [{"name": "process", "values": process}]
    suites["process"] = suite(of_process, {}, command, "As the system counts time and memory.")
    gpu = first_gpu(llm)
    device = cpu_device() if gpu is None else gpu_device(gpu)
    return record(device, own_versions(), settings, suites)


def parse(
    argv: Sequence[str], scratch: Path | None = None
) -> tuple[EngineConfig, Plan, Outputs, tuple[str, ...]]:
    """The engine, the plan, the files to write and the notes that a command line asks for.

    scratch: a folder for random adapters, which need one.
    """
    kept = tuple(flag for flag in FLAGS if flag.name not in REPLACED)
    flags = parse_flags(argv, (*OWN_FLAGS, *kept), PROG, __doc__ or "")
    cases = parse_cases(flags["cases"] or ())
    given = [name for name in ("num_requests", "input_len", "output_len") if flags.given(name)]
    if cases and given:
        raise UserError(f"--cases has its own sizes; leave --{given[0]} or --cases out")
    if cases and flags["speculate_method"] is not None:
        raise UserError("--cases measures without drafts; leave --speculate_method or --cases out")
    if flags["lora_modules"] and flags["random_adapters"] is not None:
        raise UserError("--lora_modules and --random_adapters both name adapters; leave one out")
    batch_size = flags["batch_size"]
    if not cases:
        num_requests = flags["num_requests"] or batch_size
        cases = (Case(num_requests, flags["input_len"], flags["output_len"]),)
    elif not flags.given("batch_size"):
        batch_size = max(case.num_requests for case in cases)
    config = engine_config(flags, cases, batch_size, scratch)
    engine, embeds = config.engine, config.task == "embed"
    if embeds:
        check_texts(flags, cases)
    plan = Plan(
        cases=cases,
        batch_size=batch_size,
        **{name: flags[name] for name in PLANNED},
        adapters=tuple(engine.adapters.directories) if flags["request_adapters"] else (),
        guide=None if flags["guide"] is None else Guide.of(flags["guide"]),
        embeds=embeds,
    )
    outputs = Outputs(flags["output_file"], flags["plot"])
    outputs.check(folders=input_paths(engine))
    return engine, plan, outputs, config.notes


def check_texts(flags: FlagValues, cases: Sequence[Case]) -> None:
    """Raises UserError for what --task embed does not measure."""
    for name in ("speculate_method", "guide", "random_adapters", "lora_modules"):
        if flags[name]:
            raise UserError(f"--task embed measures texts alone; leave --{name} out")
    if any(case.output_len > 1 for case in cases):
        raise UserError("--task embed makes no tokens; give cases of one, as in 1024x512x1")


def engine_config(
    flags: FlagValues, cases: Sequence[Case], batch_size: int, scratch: Path | None
) -> PredictorConfig:
    """The run that the predictor's flags ask for, with the lengths of the cases."""
    values = {
        **REPLACED,
        "batch_size": batch_size,
        "src_length": max(case.input_len for case in cases),
        "max_length": max(case.input_len + case.output_len for case in cases),
    }
    if flags["random_adapters"] is not None:
        assert scratch is not None
        model = flags["model_name_or_path"]
        values["lora_modules"] = write_adapters(
            flags["random_adapters"], model, scratch, flags["seed"]
        )
    if flags["speculate_method"] == "eagle" and flags["draft_model_name_or_path"] is None:
        assert scratch is not None
        head = write_head(flags["model_name_or_path"], scratch / "head", flags["seed"])
        values["draft_model_name_or_path"] = head
    return PredictorConfig.from_flags(replace(flags, values={**flags.values, **values}))


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="regatta-") as scratch:
        config, plan, outputs, notes = parse(words, Path(scratch))
        for note in notes:
            say(f"note: {note}")
        made = run(config, plan, command_line(PROG, words))
    show(cases_table(made["suites"]["throughput"]["rows"]))
    show("\n" + details(made))
    outputs.write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
