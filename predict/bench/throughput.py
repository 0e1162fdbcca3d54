"""Speed of one engine run, on real or random weights: `python -m predict.bench.throughput --help`.

Takes every flag of the predictor, and --num_requests, --input_len, --output_len, --output_file.
Prompts are random token ids, new ones for every repetition, so that no prefix cache helps; each
request decodes exactly --output_len tokens. --cases measures several sizes in one run. With
--speculate_method the same requests also run with and without drafts in turns, over two kinds of
text (see predict.bench.speculation).
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np

from predict.bench.cases import Case, add_peer, cases_table, parse_cases, peer_of
from predict.bench.ceilings import Limits, share_text
from predict.bench.report import write_json
from predict.cli.command import run_command
from predict.cli.flags import FLAGS, Flag, parse_flags
from predict.cli.run_config import PredictorConfig
from predict.config.engine import EngineConfig
from predict.config.model import DTYPE_BYTES
from predict.config.quantization import CODES_OF_ACTIVATIONS
from predict.errors import UserError
from predict.nn.cache_formats import kv_format_of
from predict.nn.spec import DecoderSpec
from predict.request import RequestOutput, SamplingParams
from predict.system.console import say, show
from predict.system.host import frozen_objects, process_age_seconds
from predict.system.outputs import check_output
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.llm import LLM
    from predict.nn.decoder import Decoder

PROG = "python -m predict.bench.throughput"
GROUP = "Throughput run"
# fmt: off
OWN_FLAGS = (
    Flag(GROUP, "cases", "strs", None,
         "Sizes REQUESTSxINPUTxOUTPUT to measure one after another in place of --num_requests, "
         "--input_len and --output_len, as in 8x128x256; in a table beside what others reach."),
    Flag(GROUP, "num_requests", "int", None, "Requests in all; when not given, batch_size."),
    Flag(GROUP, "input_len", "int", 128, "Tokens of each prompt."),
    Flag(GROUP, "output_len", "int", 64, "Tokens that each request decodes."),
    Flag(GROUP, "repetitions", "int", 3,
         "Timed repetitions of the latency part; 0: only the rate of all requests."),
    Flag(GROUP, "copy_edits", "float", 0.05,
         "Share of a copied text's tokens that are not the prompt's."),
    Flag(GROUP, "draft_agreement", "float", 0.7,
         "Share of the draft model's tokens that are the copied text's."),
)
# fmt: on
# The predictor's own lengths follow from input_len and output_len here, and its output is text.
REPLACED = (
    *("src_length", "max_length", "output_file", "resume", "data_file"),
    *("benchmark", "benchmark_file"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured: sizes in tokens and requests."""

    num_requests: int
    batch_size: int
    input_len: int
    output_len: int
    repetitions: int
    seed: int
    copy_edits: float = 0.05
    draft_agreement: float = 0.7
    cases: tuple[Case, ...] = ()  # in place of the sizes, one after another


@dataclass(frozen=True)
class Cost:
    """Work of one forward pass, from the network's shape."""

    weight_bytes: int  # of all matrices that a decode step multiplies by
    layer_flops_per_token: int
    head_flops_per_row: int
    attention_flops_per_pair: int  # per (query token, visible token), over all layers
    cache_bytes_per_token: int

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: str, kv_format: str = "dense") -> Cost:
        """The work of a network whose weights have `dtype`, and its cache `kv_format`."""
        head = spec.vocab_size * spec.hidden_size
        return cls(
            weight_bytes=spec.num_matmul_weights * DTYPE_BYTES[dtype],
            layer_flops_per_token=2 * (spec.num_matmul_weights - head),
            head_flops_per_row=2 * head,
            attention_flops_per_pair=4 * spec.num_layers * spec.num_heads * spec.head_dim,
            cache_bytes_per_token=kv_format_of(kv_format).bytes_per_token(spec, DTYPE_BYTES[dtype]),
        )

    def decode_bytes(self, batch_size: int, context_len: float) -> float:
        """Bytes that one decode step must read."""
        return self.weight_bytes + batch_size * context_len * self.cache_bytes_per_token

    def prefill_flops(self, batch_size: int, input_len: int) -> float:
        """Operations of `batch_size` prompts, one logit row each."""
        pairs = input_len * (input_len + 1) / 2
        per_prompt = (
            input_len * self.layer_flops_per_token
            + self.head_flops_per_row
            + pairs * self.attention_flops_per_pair
        )
        return batch_size * per_prompt


def linear_bytes(decoder: Decoder) -> int:
    """Bytes of the matrices that a decode step multiplies by, as their schemes store them."""
    linears = [decoder.head]
    for layer in decoder.layers:
        linears += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    return sum(
        tensor.size * tensor.element_size() for linear in linears for tensor in linear.tensors
    )


def program_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """Bytes of an exported program's parameters but for an embedding that is not the head's too.

    Those are the matrices that a decode step multiplies by, and at most a few percent more.
    """
    stored = (
        (Path(config.model.model_name_or_path) / f"{config.model.model_prefix}.pdiparams")
        .stat()
        .st_size
    )
    if spec.tie_word_embeddings:
        return stored
    return stored - spec.vocab_size * spec.hidden_size * DTYPE_BYTES[config.model.dtype]


def random_prompts(spec: DecoderSpec, plan: Plan, count: int, run: int) -> list[list[int]]:
    """`count` prompts of random token ids; another set for each run."""
    # The sizes too: of one seed, a longer prompt would begin with a shorter one, which is cached.
    generator = np.random.default_rng((plan.seed, run, count, plan.input_len))
    return generator.integers(0, spec.vocab_size, (count, plan.input_len)).tolist()


def timed(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[float, list[RequestOutput]]:
    """Seconds for all prompts at once, each decoding exactly `output_len` tokens."""
    params = SamplingParams(max_new_tokens=output_len, ignore_eos=True, temperature=0.0)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, outputs


LATENCIES = ("ttft_ms", "prefill_tokens_per_s", "tpot_ms", "decode_tokens_per_s")


def measure(llm: LLM, plan: Plan, beside: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Latencies of one batch (medians over repetitions), then the rate of all requests.

    beside: called before, between and after what is timed; it measures the machine's limits.
    """
    spec = llm.spec
    batch = min(plan.batch_size, plan.num_requests)
    runs = iter(range(1_000_000))

    def prompts(count: int) -> list[list[int]]:
        return random_prompts(spec, plan, count, next(runs))

    timed(llm, prompts(batch), min(plan.output_len, 4))  # warm-up
    beside()
    first, whole, ttft = [], [], []
    for _ in range(plan.repetitions):
        seconds, outputs = timed(llm, prompts(batch), 1)
        first.append(seconds)
        ttft += [o.metrics.time_to_first_token or 0.0 for o in outputs]
        if plan.output_len > 1:
            whole.append(timed(llm, prompts(batch), plan.output_len)[0])
        beside()
    results: dict[str, Any] = dict.fromkeys(LATENCIES)
    if first:
        prefill_seconds = statistics.median(first)
        results["ttft_ms"] = 1e3 * statistics.median(ttft)
        results["prefill_tokens_per_s"] = batch * plan.input_len / prefill_seconds
    if whole:
        tpot = (statistics.median(whole) - prefill_seconds) / (plan.output_len - 1)
        results["tpot_ms"] = 1e3 * tpot
        results["decode_tokens_per_s"] = batch / tpot
    if plan.num_requests > batch or not first:
        seconds, _ = timed(llm, prompts(plan.num_requests), plan.output_len)
        beside()
    else:
        seconds = statistics.median(whole or first)
    num_output = plan.num_requests * plan.output_len
    results["output_tokens_per_s"] = num_output / seconds
    results["total_tokens_per_s"] = (num_output + plan.num_requests * plan.input_len) / seconds
    results["requests_per_s"] = plan.num_requests / seconds
    return results


def add_rates(results: dict[str, Any], plan: Plan, cost: Cost) -> None:
    """Adds the bytes that decode reads and the operations that prefill does, per second."""
    batch = min(plan.batch_size, plan.num_requests)
    if results["prefill_tokens_per_s"] is not None:
        prefill_seconds = batch * plan.input_len / results["prefill_tokens_per_s"]
        flops = cost.prefill_flops(batch, plan.input_len) / prefill_seconds
        results["prefill_gflops"] = flops / 1e9
    if results["tpot_ms"] is not None:
        context = plan.input_len + plan.output_len / 2
        rate = cost.decode_bytes(batch, context) / results["tpot_ms"] * 1e3
        results["decode_gbs"] = rate / 1e9


def add_shares(results: dict[str, Any], ceilings: dict[str, float], scheme: str | None) -> None:
    """Adds decode's share of the read bandwidth and prefill's of the arithmetic ceiling.

    The latter is of products of the dtype, which those of 8 bits may pass.
    """
    results["measured_gflops_ceiling"] = ceilings["flops_per_s"] / 1e9
    if "prefill_gflops" in results and scheme not in CODES_OF_ACTIVATIONS:
        results["prefill_flops_share"] = results["prefill_gflops"] * 1e9 / ceilings["flops_per_s"]
    results["measured_bandwidth_gbs"] = ceilings["read_bytes_per_s"] / 1e9
    if "decode_gbs" in results:
        results["decode_bandwidth_share"] = (
            results["decode_gbs"] * 1e9 / ceilings["read_bytes_per_s"]
        )


def _share(value: float) -> str:
    return share_text(value, digits=1)


ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("startup_s", "process start to ready, s", "{:.2f}".format),
    ("ttft_ms", "time to first token (median), ms", "{:.2f}".format),
    ("tpot_ms", "time per output token of the batch, ms", "{:.3f}".format),
    ("prefill_tokens_per_s", "prefill tokens/s", "{:,.1f}".format),
    ("decode_tokens_per_s", "decode tokens/s", "{:,.1f}".format),
    ("output_tokens_per_s", "output tokens/s, all requests", "{:,.1f}".format),
    ("total_tokens_per_s", "prompt + output tokens/s", "{:,.1f}".format),
    ("decode_gbs", "decode reads, GB/s", "{:.1f}".format),
    ("decode_bandwidth_share", "  share of measured bandwidth", _share),
    ("prefill_gflops", "prefill, GFLOP/s", "{:,.0f}".format),
    ("prefill_flops_share", "  share of measured ceiling", _share),
    ("measured_bandwidth_gbs", "measured read bandwidth, GB/s", "{:.1f}".format),
    ("measured_bandwidth_spread", "  its highest over its lowest", "{:.2f}".format),
    ("measured_gflops_ceiling", "measured arithmetic ceiling, GFLOP/s", "{:,.0f}".format),
    ("copy_tokens_per_s_without_drafts", "copied text, tokens/s without drafts", "{:,.1f}".format),
    ("copy_tokens_per_s", "  with drafts", "{:,.1f}".format),
    ("copy_speed_up", "  speed-up", "{:.3f}".format),
    ("copy_predicted_speed_up", "  speed-up that its drafts predict", "{:.3f}".format),
    ("copy_acceptance_rate", "  acceptance rate", "{:.1%}".format),
    ("copy_mean_accepted_length", "  mean accepted length, tokens", "{:.2f}".format),
    ("copy_mean_draft_length", "  mean draft length, tokens", "{:.2f}".format),
    ("copy_drafted_share", "  share of tokens from steps with drafts", "{:.1%}".format),
    ("draft_step_ms", "draft model's step, ms", "{:.3f}".format),
    (
        "random_tokens_per_s_without_drafts",
        "random text, tokens/s without drafts",
        "{:,.1f}".format,
    ),
    ("random_tokens_per_s", "  with drafts", "{:,.1f}".format),
    ("random_speed_up", "  speed-up", "{:.3f}".format),
    ("random_acceptance_rate", "  acceptance rate", "{:.1%}".format),
    ("random_mean_accepted_length", "  mean accepted length, tokens", "{:.2f}".format),
    ("peak_memory_bytes", "peak memory, bytes", "{:,}".format),
)


def table(results: dict[str, Any]) -> str:
    """The results as aligned lines."""
    rows = [
        (label, show(results[key])) for key, label, show in ROWS if results.get(key) is not None
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value:>16}" for label, value in rows)


def measured(llm: LLM, config: EngineConfig, plan: Plan, cost: Cost) -> dict[str, Any]:
    """`measure` with rates, and on the CPU with the shares of the limits measured in between.

    Those of a shared host move: what is timed is held against the mean of what was there beside it.
    """
    limits = None
    if llm.device is None:
        context = plan.input_len + plan.output_len / 2
        batch = min(plan.batch_size, plan.num_requests)
        limits = Limits(config.model.dtype, cost.decode_bytes(batch, context))
    results = measure(llm, plan, limits.sample if limits else lambda: None)
    add_rates(results, plan, cost)
    if limits is not None:
        add_shares(results, limits.mean, config.quantization.settings.scheme)
        results["measured_bandwidth_spread"] = limits.spread
    return results


def measure_cases(llm: LLM, config: EngineConfig, plan: Plan, cost: Cost) -> list[dict[str, Any]]:
    """The results of every case, each with its sizes and what others reach."""
    from predict.device.devices import driver_info

    gpu = None if llm.device is None else driver_info().gpus[llm.device.index].name
    rows = []
    for case in plan.cases:
        sizes = asdict(case)
        own = replace(plan, batch_size=config.scheduling.batch_size, **sizes)
        results = measured(llm, config, own, cost)
        scheme = config.quantization.settings.scheme or "dense"
        add_peer(
            results, peer_of(case, llm.spec, gpu, config.model.dtype, scheme, config.kv_format)
        )
        rows.append({"case": str(case), **sizes, **results})
    return rows


def run(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """Builds the engine, measures, and returns everything that the table and the JSON show."""
    from predict.bench.speculation import measure_drafts, replaced
    from predict.llm import LLM
    from predict.loading.model import is_compiled

    llm = LLM(config)
    startup = process_age_seconds()
    decoder = llm.decoder
    stored = linear_bytes(decoder) if decoder else program_bytes(config, llm.spec)
    cost = replace(Cost.of(llm.spec, config.model.dtype, config.kv_format), weight_bytes=stored)
    rows = []
    with frozen_objects():
        with replaced(llm, llm.engine.runner, None):
            if plan.cases:
                rows = measure_cases(llm, config, plan, cost)
                results: dict[str, Any] = {"cases": rows}
            else:
                results = measured(llm, config, plan, cost)
                rows = [results]
        if llm.engine.proposer is not None:
            prompts = [
                random_prompts(llm.spec, plan, plan.num_requests, 1_000_000 + run)
                for run in range(plan.repetitions)
            ]
            results |= measure_drafts(
                llm, prompts, plan.output_len, plan.copy_edits, plan.draft_agreement
            )
    if llm.device is not None:
        from predict.bench.gpu_kernels import measure_limits

        ceilings = measure_limits(llm.device, config.model.dtype)
        for row in rows if ceilings else ():
            add_shares(row, ceilings, config.quantization.settings.scheme)
    import paddle

    stats = llm.stats()
    return {
        **results,
        "startup_s": startup,
        "peak_memory_bytes": stats.peak_memory_bytes,
        "num_preemptions": stats.num_preemptions,
        **({} if plan.cases else sizes_of(plan)),
        "dtype": config.model.dtype,
        "mode": config.model.mode,
        "device": config.model.device,
        "speculate_method": config.speculation.speculate_method,
        "speculate_max_draft_token_num": config.speculation.speculate_max_draft_token_num,
        "operators": "compiled" if is_compiled(llm.backend) else "plain Paddle",
        "model": config.model.model_name_or_path,
        "machine": platform.machine(),
        "paddle_version": paddle.__version__,
        "python_version": platform.python_version(),
    }


def sizes_of(plan: Plan) -> dict[str, int]:
    """The sizes of a run without cases, as the JSON has them."""
    names = ("num_requests", "batch_size", "input_len", "output_len")
    return {name: getattr(plan, name) for name in names}


def parse(argv: Sequence[str]) -> tuple[EngineConfig, Plan, str | None, tuple[str, ...]]:
    """The engine, the plan, the JSON file and the notes that a command line asks for."""
    output_file = Flag(GROUP, "output_file", "str", None, "Write the results as JSON.")
    kept = tuple(flag for flag in FLAGS if flag.name not in REPLACED)
    flags = parse_flags(argv, (*OWN_FLAGS, output_file, *kept), PROG, __doc__ or "")
    cases = parse_cases(flags["cases"] or ())
    given = [name for name in ("num_requests", "input_len", "output_len") if flags.given(name)]
    if cases and given:
        raise UserError(f"--cases has its own sizes; leave --{given[0]} or --cases out")
    if cases and flags["speculate_method"] is not None:
        raise UserError("--cases measures without drafts; leave --speculate_method or --cases out")
    values = dict(flags.values)
    if cases:
        values["input_len"] = max(case.input_len for case in cases)
        values["output_len"] = max(case.output_len for case in cases)
        if not flags.given("batch_size"):
            values["batch_size"] = max(case.num_requests for case in cases)
    max_length = max(
        (case.input_len + case.output_len for case in cases),
        default=values["input_len"] + values["output_len"],
    )
    lengths = {
        "src_length": values["input_len"],
        "max_length": max_length,
        "output_file": "",
        "resume": False,
        "data_file": None,
        "benchmark": False,
        "benchmark_file": None,
    }
    config = PredictorConfig.from_flags(replace(flags, values={**values, **lengths}))
    plan = Plan(
        num_requests=values["num_requests"] or values["batch_size"],
        batch_size=values["batch_size"],
        input_len=values["input_len"],
        output_len=values["output_len"],
        repetitions=flags["repetitions"],
        seed=flags["seed"],
        copy_edits=flags["copy_edits"],
        draft_agreement=flags["draft_agreement"],
        cases=cases,
    )
    if flags["output_file"] is not None:
        engine = config.engine
        folders = {
            name: engine.settings[name]
            for name in ("model_name_or_path", "draft_model_name_or_path")
        }
        check_output("output_file", flags["output_file"], folders=folders)
    return config.engine, plan, flags["output_file"], config.notes


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        config, plan, output_file, notes = parse(sys.argv[1:] if argv is None else argv)
        for note in notes:
            say(f"note: {note}")
        results = run(config, plan)
        if plan.cases:
            show(cases_table(results["cases"]))
        show(table(results))
        if output_file is not None:
            write_json(results, output_file)
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
