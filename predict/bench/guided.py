"""What guides cost: the same requests with a guide and without one, in one process, in turns.

python -m predict.bench.guided --model_name_or_path DIR --batch_size 32 [flags of the predictor]

All requests sample as many tokens. Prints tokens per second, their ratio, what the masks of a step
took on the host, and the share of tokens that the guide forced and that took no step of their own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.bench.cases import Case
from predict.bench.outputs import Outputs, output_flags
from predict.bench.record import (
    check_measured,
    command_line,
    cpu_device,
    gpu_device,
    own_versions,
    record,
    suite,
)
from predict.bench.throughput import REPLACED, engine_config
from predict.cli.command import run_command
from predict.cli.flags import FLAGS, Flag, parse_flags
from predict.cli.run_config import PredictorConfig
from predict.errors import UserError
from predict.guide import Guide
from predict.request import SamplingParams
from predict.system.console import say, show
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.llm import LLM

PROG = "python -m predict.bench.guided"
GROUP = "guided benchmark"
# Objects with strings, numbers and words, far more of them than anybody waits for.
SCHEMA = {
    "type": "array",
    "minItems": 1 << 20,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "size": {"type": "number", "minimum": 0, "maximum": 1000},
            "kind": {"enum": ["small", "large", "unknown"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "size", "kind", "tags"],
        "additionalProperties": False,
    },
}
# fmt: off
OWN_FLAGS = (
    Flag(GROUP, "guide", "json", None,
         "The guide, as SamplingParams.guide has it; it must not end before --output_len tokens. "
         "When not given, a JSON schema of many small objects."),
    Flag(GROUP, "input_len", "int", 128, "Tokens of each prompt, random ones."),
    Flag(GROUP, "output_len", "int", 128, "Tokens of each answer."),
    Flag(GROUP, "repetitions", "int", 5, "Timed pairs of runs."),
    output_flags(GROUP)[0],
)
# fmt: on
UNITS = {
    "tokens_per_s": "tokens/s",
    "mask_ms_per_step": "ms",
    "forced_share": "of all tokens",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    case: Case
    guide: Guide
    repetitions: int
    seed: int


def run_once(llm: LLM, plan: Plan, turn: int, guided: bool) -> dict[str, float]:
    """Rates of one run; raises UserError where an answer ends early."""
    generator = np.random.default_rng((plan.seed, turn))
    shape = plan.case.num_requests, plan.case.input_len
    prompts = generator.integers(0, llm.spec.vocab_size, shape).tolist()
    params = [
        SamplingParams(
            max_new_tokens=plan.case.output_len,
            temperature=1.0,
            seed=turn * plan.case.num_requests + index,
            ignore_eos=True,
            guide=plan.guide if guided else None,
        )
        for index in range(plan.case.num_requests)
    ]
    before, started = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds, after = time.perf_counter() - started, llm.stats()
    num_tokens = sum(len(output.token_ids) for output in outputs)
    ended = [output for output in outputs if len(output.token_ids) < plan.case.output_len]
    if ended:
        said = ended[0].outputs[0].error or f"it was complete ({ended[0].finish_reason})"
        raise UserError(
            f"an answer ended after {len(ended[0].token_ids)} of {plan.case.output_len} tokens: "
            f"{said}; give a --guide that goes on, or lower --output_len"
        )
    num_steps = after.num_mask_steps - before.num_mask_steps
    return {
        "tokens_per_s": num_tokens / seconds,
        "mask_ms_per_step": 1e3 * (after.mask_seconds - before.mask_seconds) / max(num_steps, 1),
        "forced_share": (after.num_forced_tokens - before.num_forced_tokens) / num_tokens,
    }


def measure(llm: LLM, plan: Plan) -> list[dict[str, Any]]:
    """The rows: without a guide, and with one."""
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn in range(-1, plan.repetitions):  # the first pair loads kernels and records graphs
        for guided in (False, True) if turn % 2 else (True, False):
            taken = run_once(llm, plan, turn + 1, guided)
            if turn >= 0:
                runs[guided].append(taken)
    rows: list[dict[str, Any]] = []
    for guided, taken_runs in runs.items():
        samples = {name: [each[name] for each in taken_runs] for name in UNITS}
        rows.append(
            {
                "name": "with a guide" if guided else "without",
                "case": str(plan.case),
                "values": {name: statistics.median(each) for name, each in samples.items()},
                "samples": samples,
            }
        )
    pairs = zip(rows[1]["samples"]["tokens_per_s"], rows[0]["samples"]["tokens_per_s"], strict=True)
    ratios = [guided / plain for guided, plain in pairs]
    rows[1]["values"]["times_as_fast"] = statistics.median(ratios)
    rows[1]["samples"]["times_as_fast"] = ratios
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What is printed of them."""
    lines = [f"{'':14}{'tokens/s':>12}{'times as fast':>16}{'masks, ms/step':>16}{'forced':>9}"]
    for row in rows:
        values = row["values"]
        ratio = f"{values['times_as_fast']:.3f}" if "times_as_fast" in values else ""
        masks = f"{values['mask_ms_per_step']:.3f}" if ratio else ""
        forced = f"{100 * values['forced_share']:.0f}%" if ratio else ""
        lines.append(
            f"{row['name']:14}{values['tokens_per_s']:12,.1f}{ratio:>16}{masks:>16}{forced:>9}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> tuple[PredictorConfig, Plan, Outputs]:
    """The engine, the plan and the files to write that a command line asks for."""
    kept = tuple(flag for flag in FLAGS if flag.name not in REPLACED)
    flags = parse_flags(argv, (*OWN_FLAGS, *kept), PROG, __doc__ or "")
    case = Case(flags["batch_size"], flags["input_len"], flags["output_len"])
    config = engine_config(flags, [case], flags["batch_size"])
    guide = Guide(json_schema=SCHEMA) if flags["guide"] is None else Guide.of(flags["guide"])
    plan = Plan(case=case, guide=guide, repetitions=flags["repetitions"], seed=flags["seed"])
    outputs = Outputs(flags["output_file"], None)
    outputs.check(folders={"model_name_or_path": config.engine.model.model_name_or_path})
    return config, plan, outputs


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        words = sys.argv[1:] if argv is None else argv
        config, plan, outputs = parse(words)
        for note in config.notes:
            say(f"note: {note}")
        from predict.llm import LLM

        check_measured(config.engine.model.device)
        llm = LLM(config.engine)
        rows = measure(llm, plan)
        show(table(rows))
        device = cpu_device() if llm.device is None else gpu_device(llm.device.index)
        settings = {
            "model": config.engine.model.model_name_or_path,
            "dtype": config.engine.model.dtype,
            "mode": config.engine.model.mode,
            "batch_size": config.engine.scheduling.batch_size,
            "guide": plan.guide.text,
        }
        method = (
            "Prompts of random token ids; temperature 1; the same number of tokens with a guide "
            "and without, in turns."
        )
        made = suite(rows, UNITS, command_line(PROG, words), method)
        outputs.write(record(device, own_versions(), settings, {"guided": made}))
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
