"""Load on any OpenAI-compatible server: latencies, goodput, and the highest load that holds.

Answers are streamed. Latencies count from the time a request was due, so a client or a server that
falls behind shows in them. Prompts are made up (random words, or token ids with --vocab_size), or
come from a data file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.bench.outputs import Outputs, output_flags
from predict.bench.record import client_versions, command_line, cpu_identity, record, suite
from predict.bench.serving.loads import OPEN, Found, Send, highest_load, send_at, send_in_flight
from predict.bench.serving.report import (
    METRICS,
    LatencyLimits,
    LoadReport,
    RequestRecord,
    load_rows,
    positive,
    table,
)
from predict.bench.serving.workload import (
    Ask,
    Lengths,
    asks_of_file,
    made_up,
    texts,
    token_ids,
    words,
)
from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.errors import EXIT_FAILURE, UserError
from predict.system.console import say, show
from predict.system.progress import Progress
from predict.system.ranges import COUNT, Range
from predict.system.signals import Signals

if TYPE_CHECKING:
    import aiohttp

    from predict.bench.serving.client import Server

PROG = "python -m predict.bench.serving"
_SERVER = "Server"
_LOAD = "Load"
_WORK = "Workload"
_RESULT = "Results"
SHARE = Range(0.001, 1.0, whole=False)
# fmt: off
FLAGS = (
    Flag(_SERVER, "base_url", "str", "http://127.0.0.1:8000/v1",
         "Where the routes of OpenAI's API are, with /v1."),
    Flag(_SERVER, "endpoint", "str", "completions",
         "Which of them is asked.",
         choices=("completions", "chat")),
    Flag(_SERVER, "model", "str", None,
         "Name of the model; when not given, the first one that the server names."),
    Flag(_SERVER, "api_key", "str", None,
         "Key of the server; when not given, $REGATTA_API_KEY."),
    Flag(_SERVER, "extra_body", "json", None,
         "A JSON object whose keys every request has besides."),
    Flag(_SERVER, "request_timeout", "float", 600.0,
         "Seconds after which a request has failed."),
    Flag(_LOAD, "arrival", "str", "poisson",
         "poisson: at random times; fixed: at equal distances; both whatever became of those "
         "before. concurrency: each when another one ends.",
         choices=("poisson", "fixed", "concurrency")),
    Flag(_LOAD, "load", "strs", ["1"],
         "Loads that are measured one after another: requests/s, with concurrency requests in "
         "flight."),
    Flag(_LOAD, "num_requests", "int", 100, "Requests of each load."),
    Flag(_LOAD, "seconds", "float", None,
         "In place of --num_requests: as many as the load sends in this time."),
    Flag(_LOAD, "repetitions", "int", 1,
         "Runs of each load, with other prompts and times; predict.bench.compare needs several.",
         allowed=Range(1, 1000)),
    Flag(_LOAD, "warm_up", "int", 1,
         "Requests before all, one after another, which do not count.", allowed=Range(0, 1000)),
    Flag(_LOAD, "seed", "int", 0, "Of arrivals and prompts."),
    Flag(_LOAD, "limits", "strs", None,
         "What a good request may take, in ms: ttft:500,tpot:50,e2e:10000, or some of these."),
    Flag(_LOAD, "sweep", "bool", False,
         "Look for the highest load that holds the limits, from --load on: twice as much while it "
         "holds, then between."),
    Flag(_LOAD, "good_share", "float", 0.99,
         "A load holds when this share of its requests is good.", allowed=SHARE),
    Flag(_LOAD, "max_load", "float", 1024.0, "Where a sweep ends."),
    Flag(_LOAD, "resolution", "float", 0.05,
         "How far a sweep narrows the load down, as a share of it.", allowed=SHARE),
    Flag(_WORK, "workload", "str", "random",
         "random: made-up prompts of given lengths; shared_prefix: those of a group begin alike; "
         "file: --data_file's.",
         choices=("random", "shared_prefix", "file")),
    Flag(_WORK, "input_len", "int", 128, "Tokens of each prompt."),
    Flag(_WORK, "output_len", "int", 64,
         "Tokens of each answer; of a data file's prompts that say no max_new_tokens."),
    Flag(_WORK, "len_spread", "float", 0.0,
         "Lengths are drawn from LEN * (1 - this) to LEN * (1 + this)."),
    Flag(_WORK, "prefix_len", "int", 64,
         "With shared_prefix: of --input_len, what a group has in common."),
    Flag(_WORK, "num_prefixes", "int", 4,
         "With shared_prefix: groups, in turn."),
    Flag(_WORK, "vocab_size", "int", None,
         "Send random token ids below this, not words: exact lengths, for completions.",
         allowed=COUNT),
    Flag(_WORK, "ignore_eos", "bool", True,
         "Ask for answers of just --output_len tokens, with a field that OpenAI's API lacks; false "
         "where a server refuses it."),
    Flag(_WORK, "data_file", "str", None,
         'Prompts as of the predictor, {"src": ...} a line, in turn. Sampling keys are sent.'),
    Flag(_RESULT, "device_name", "str", None,
         "What the server runs on, for the file: predict.bench.compare refuses files of different "
         "devices."),
    *output_flags(_RESULT),
)
# fmt: on
UNITS = {"poisson": "requests/s", "fixed": "requests/s", "concurrency": "requests in flight"}
# Words of the two texts by which a server's count of words is taken: short enough for any model.
CALIBRATION_WORDS = (8, 40)
LATE_MS = 20.0  # a client's delay that is worth a word
METHOD = (
    "Each load is a run of its requests, and each repetition another one with other prompts and "
    "times. Values are medians over the repetitions, of each run's own mean or percentile over its "
    "requests. Latencies count from the time a request was due."
)
Asks = Callable[[int, int], list[Ask]]  # of (requests, number of the load): new ones for each load


@dataclass(frozen=True)
class LoadPlan:
    """What is measured, of the flags."""

    flags: FlagValues
    loads: tuple[float, ...]
    limits: LatencyLimits

    @property
    def is_open(self) -> bool:
        """Whether a load is a rate."""
        return self.flags["arrival"] in OPEN

    @property
    def unit(self) -> str:
        return UNITS[self.flags["arrival"]]

    def count(self, load: float) -> int:
        seconds = self.flags["seconds"]
        return self.flags["num_requests"] if seconds is None else max(1, round(load * seconds))


@dataclass
class Measured:
    """The results so far, which are kept when a run is interrupted."""

    model: str = ""
    reports: list[LoadReport] = field(default_factory=list)
    found: Found | None = None


async def measure(plan: LoadPlan, send: Send, ask: Asks, into: Measured) -> None:
    """Measures every load, or sweeps; reports go to `into`, and to the terminal as they come."""
    flags = plan.flags

    async def one(load: float) -> LoadReport:
        number = len(into.reports) + 1
        asks = ask(plan.count(load), number)
        label = f"{load:g} {plan.unit}"
        with Progress(len(asks), unit="request", label=label) as progress:

            async def counted(ask: Ask, due: float) -> RequestRecord:
                record = await send(ask, due)
                progress.on_finished()
                return record

            if plan.is_open:
                times = OPEN[flags["arrival"]](load, len(asks), (flags["seed"], number))
                records = await send_at(counted, asks, times)
            else:
                records = await send_in_flight(counted, asks, round(load))
        report = LoadReport.of(load, records, plan.limits)
        into.reports.append(report)
        numbers = report.numbers
        say(
            f"{label}: {numbers['num_requests']} requests, {numbers['good_share']:.1%} good, "
            f"{numbers['num_failed']} failed"
        )
        if numbers["max_late_ms"] > LATE_MS:
            say(
                f"note: the client sent requests up to {numbers['max_late_ms']:.0f} ms late, which "
                "is in their latencies; run it where more of a core is free"
            )
        return report

    async def holds(load: float) -> bool:
        return (await one(load)).numbers["good_share"] >= float(flags["good_share"])

    warm = await send_in_flight(send, ask(flags["warm_up"], 0), 1) if flags["warm_up"] else []
    if warm and all(record.error is not None for record in warm):
        errors = ", ".join({str(record.error) for record in warm})
        raise UserError(
            f"every warm-up request failed ({errors}); is the server up, "
            "and does it know these fields? --ignore_eos false sends none of its own",
            1,
        )
    if flags["sweep"]:
        into.found = await highest_load(
            holds, plan.loads[0], flags["max_load"], flags["resolution"], not plan.is_open
        )
        return
    for _ in range(flags["repetitions"]):  # in turns: what drifts meets all loads
        for load in plan.loads:
            await one(load)


def parse(argv: Sequence[str]) -> LoadPlan:
    """The plan of a command line; raises UserError for what does not go together."""
    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "", "[--flag [VALUE] ...]")
    loads = tuple(positive("load", text) for text in flags["load"])
    plan = LoadPlan(flags, loads, LatencyLimits.parse(flags["limits"] or ()))
    ids, file = flags["vocab_size"] is not None, flags["workload"] == "file"
    own = [name for name in ("prefix_len", "num_prefixes") if flags.given(name)]
    refusals = {
        "--load is empty; give it at least one number": not loads,
        "--load of --arrival concurrency counts requests in flight: whole numbers from 1": (
            not plan.is_open and any(load != round(load) for load in loads)
        ),
        "--seconds needs a rate; give --num_requests with concurrency": (
            not plan.is_open and flags["seconds"] is not None
        ),
        "--seconds and --num_requests both say how many; leave one out": (
            flags.given("num_requests", "seconds")
        ),
        "--sweep needs --limits, as in --limits ttft:500,tpot:50": (
            flags["sweep"] and not plan.limits
        ),
        "--sweep begins at one load, measured once: give --load one number, and leave "
        "--repetitions or --sweep out": (
            flags["sweep"] and (len(loads) > 1 or flags["repetitions"] > 1)
        ),
        "--workload file and --data_file go together; give both or none": (
            file != (flags["data_file"] is not None)
        ),
        "--vocab_size sends token ids, which --endpoint completions takes, of made-up prompts; "
        "leave it out": ids and (flags["endpoint"] == "chat" or file),
        f"--{' and --'.join(own)}: of --workload shared_prefix; leave it out": (
            bool(own) and flags["workload"] != "shared_prefix"
        ),
        '--extra_body is no JSON object; write it as {"top_p": 0.9}': (
            not isinstance(flags["extra_body"] or {}, dict)
        ),
    }
    for message, is_wrong in refusals.items():
        if is_wrong:
            raise UserError(message)
    return plan


async def prompts(session: aiohttp.ClientSession, server: Server, flags: FlagValues) -> Asks:
    """Makes a load's prompts; asks the server how it counts words."""
    from predict.bench.serving.client import count_tokens

    if flags["workload"] == "file":
        asks = asks_of_file(flags["data_file"], server.chat, flags["output_len"])
        return lambda count, number: [
            asks[at % len(asks)] for at in range(number * count, (number + 1) * count)
        ]
    shared = flags["workload"] == "shared_prefix"
    lengths = Lengths(
        flags["input_len"],
        flags["output_len"],
        flags["len_spread"],
        flags["prefix_len"] if shared else 0,
        flags["num_prefixes"] if shared else 1,
    )
    if flags["vocab_size"] is not None:
        maker = token_ids(flags["vocab_size"])
    else:
        generator = np.random.default_rng(flags["seed"])
        few, many = [
            (number, await count_tokens(session, server, words(generator, number)))
            for number in CALIBRATION_WORDS
        ]
        maker = texts(few, many)
    return lambda count, number: made_up(maker, lengths, count, (flags["seed"], number))


async def run(plan: LoadPlan, into: Measured) -> None:
    """Measures a server; what comes out, and the model's name, go to `into`."""
    from predict.bench.serving.client import Server, first_model, new_session, send

    flags = plan.flags
    body = {"ignore_eos": True} if flags["ignore_eos"] and flags["workload"] != "file" else {}
    server = Server(
        base_url=flags["base_url"].rstrip("/"),
        chat=flags["endpoint"] == "chat",
        model=flags["model"] or "",
        body={**body, **(flags["extra_body"] or {})},
        api_key=flags["api_key"] or os.environ.get("REGATTA_API_KEY") or None,
        timeout_s=flags["request_timeout"],
    )
    async with new_session(server) as session:
        if not server.model:
            server = replace(server, model=await first_model(session, server.base_url))
        into.model = server.model
        ask = await prompts(session, server, flags)
        await measure(plan, partial(send, session, server), ask, into)


def results(plan: LoadPlan, measured: Measured, command: str) -> dict[str, Any]:
    """Everything for the JSON file; the key of the server is not in it."""
    flags, hidden = plan.flags, ("api_key", "device_name", "output_file", "plot")
    settings = {name: value for name, value in flags.values.items() if name not in hidden}
    settings["model"] = measured.model
    device = {"name": flags["device_name"] or "not given", "client": cpu_identity()["name"]}
    rows = load_rows(measured.reports, plan.unit)
    made = record(
        device, client_versions(), settings, {"serving": suite(rows, METRICS, command, METHOD)}
    )
    return {
        **made,
        "limits_ms": asdict(plan.limits),
        "sweep": None if measured.found is None else asdict(measured.found),
    }


def sweep_line(found: Found, unit: str) -> str:
    """What a sweep found, in words."""
    if found.highest is None:
        return f"no load held the limits, down to {found.lowest_failed:g} {unit}"
    line = f"highest load that held the limits: {found.highest:g} {unit}"
    if found.lowest_failed is None:
        return f"{line}, which is --max_load"
    return f"{line}; {found.lowest_failed:g} did not"


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code: 1 where a request failed."""
    plan = parse(words)
    outputs = Outputs(plan.flags["output_file"], plan.flags["plot"])
    outputs.check(files={"data_file": plan.flags["data_file"]})
    measured = Measured()
    try:
        asyncio.run(run(plan, measured))
    finally:  # loads that were measured before an interruption are shown and written too
        if measured.reports:
            # Those of one load together.
            show(table(sorted(measured.reports, key=lambda each: each.load), plan.unit))
            if measured.found is not None:
                show(sweep_line(measured.found, plan.unit))
            outputs.write(results(plan, measured, command_line(PROG, public_words(words))))
    failed = any(report.errors for report in measured.reports)
    return EXIT_FAILURE if failed and not plan.flags["sweep"] else 0


def public_words(words: Sequence[str]) -> list[str]:
    """A command line without the server's key."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, _ = word.replace("-", "_").partition("=")
        if name != "__api_key":
            kept.append(word)
        elif not equals:
            next(left, None)
    return kept


if __name__ == "__main__":
    sys.exit(main())
