"""Answers a data file with many replicas of a model, as predictor.py does with one.

    python -m predict.batch_ray --model_name_or_path DIR --dtype bfloat16 --num_replicas 8 \
        --data_file prompts.jsonl

Ray Data deals the prompts out (pip install "regatta[ray]"). The output is predictor.py's, as are
the journal beside it, --resume, and the exit codes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from predict.cli.command import command
from predict.cli.flags import FLAGS, USAGE, Flag, FlagValues, parse_flags
from predict.errors import UserError
from predict.scale_out.cluster import RAY_FLAGS, check_ray, connected, share_of
from predict.system.console import say
from predict.system.outputs import locked
from predict.system.ranges import Range
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.scale_out.answerer import MakeLLM

DESCRIPTION = "Answers the prompts of a data file with many replicas of a model, on Ray."
NOT_HERE = ("benchmark", "benchmark_file", "total_request_num")  # flags of the predictor alone
OWN_FLAGS = (
    Flag("ReplicaPlan", "num_replicas", "int", 2,
         "Processes that answer, each with the whole model and a batch of --batch_size.",
         allowed=Range(1, 1 << 16)),
    *RAY_FLAGS,
)  # fmt: skip
BATCH_FLAGS = (*(flag for flag in FLAGS if flag.name not in NOT_HERE), *OWN_FLAGS)


@command()
def main(words: Sequence[str], signals: Signals, make_llm: MakeLLM | None = None) -> int:
    """Runs the command line and returns its exit status.

    make_llm: makes the LLM of a replica, in its process; tests pass a stand-in.
    """
    flags = parse_flags(words, BATCH_FLAGS, "batch_ray.py", DESCRIPTION, USAGE)
    return run(flags, make_llm, signals)


def run(flags: FlagValues, make_llm: MakeLLM | None, signals: Signals) -> int:
    """Answers the data file; returns the exit status.

    Every output and every prompt is checked before Ray is started. Raises UserError.
    """
    from predict.cli.run_config import PredictorConfig
    from predict.cli.work import checked_outputs, finished, kept_results, prepare
    from predict.system.progress import Progress

    check_ray()
    if flags["data_file"] is None:
        raise UserError("--data_file is needed: the prompts that the replicas answer")
    defaults = {flag.name: flag.default for flag in FLAGS if flag.name in NOT_HERE}
    config = PredictorConfig.from_flags(replace(flags, values={**defaults, **flags.values}))
    for note in config.notes:
        say(f"note: {note}")
    num_replicas: int = flags["num_replicas"]
    share = share_of(config.engine.model.device, num_replicas, flags["cpus_per_replica"])
    with ExitStack() as stack:
        for flag, path in checked_outputs(config):
            stack.enter_context(locked(flag, path))
        work = prepare(config)
        if any(work.pictures):
            raise UserError(
                "--data_file has pictures, which replicas on Ray do not read yet; run it with "
                "predict.predictor"
            )
        with kept_results(config, work) as results:
            num_failed, speed = 0, ""
            if not results.is_complete:
                with connected(flags["ray_address"], share, num_replicas):
                    from predict.scale_out.batch import BatchJob, ReplicaPlan

                    replicas = ReplicaPlan(config.engine, num_replicas, share, make_llm)
                    batch = BatchJob(work, results, replicas)
                    with Progress(len(work.items)) as progress:
                        batch.run(signals, progress)
                num_failed, speed = batch.num_failed, progress.speed
            return finished(results, signals, speed, num_failed)


if __name__ == "__main__":
    sys.exit(main())
