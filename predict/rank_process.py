"""The process of one rank, which predict.ranks.front starts.

    python -m predict.rank_process CHANNELS SUMS SETTINGS SIZE FRONT RANK

First the descriptors of memory that the front has made; then how many ranks there are, the id of
the front's process, and which rank this is. What needs no front is done while that checks files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.ranks.front import Ready
from predict.ranks.life import end_with_front
from predict.ranks.messages import Down
from predict.ranks.rank import Compared, Rank, ToFront
from predict.ranks.shared import Channels
from predict.system import host
from predict.system.files import parse_json
from predict.system.notes import LOG


def main(words: Sequence[str]) -> None:
    """Loads this rank's part of the model and serves the front, which ends the process."""
    channels_fd, sums_fd, settings_fd, size, front, number = map(int, words)
    text = os.pread(settings_fd, os.fstat(settings_fd).st_size, 0).decode()
    settings = parse_json(text, "the settings of ranks")
    end_with_front(front, number, settings["rank_timeout"])
    rank = Rank(Channels.open(channels_fd, size), number)
    cores = host.cores_of_share(number, size, host.node_cores(), os.sched_getaffinity(0))
    if cores is not None:  # all threads are started later, and all memory is first written by them
        os.sched_setaffinity(0, cores)
    try:
        config = EngineConfig(**settings)
        from predict.build import Builder
        from predict.device import communicator, devices, library
        from predict.ranks import gpus
        from predict.ranks.addons import RankAddons
        from predict.ranks.ahead import Answers
        from predict.ranks.drafts import RankFeed

        device = gpus.device_of(config.model.device, number, size)
        if on_gpu := device != "cpu":
            devices.activate(devices.choose(device))
        communicator.open_ranks(sums_fd, number, size)
        if on_gpu:
            gpus.open_gpus(config.model.device, number, size, config.model.batch_invariant)
            Answers(rank)
        library.require().set_num_threads(rank.wait_for_start())
        LOG.propagate = False  # what flags and files give reason to say, the front has said
        builder = Builder(config, None, number, rank.got_on)
        if number == 0:  # what all say is said once
            LOG.addHandler(ToFront(rank))
        host.give_back_library_pages()
        running = builder.running()
        runners = [each for each in (running.runner, running.draft_runner) if each is not None]
        answers = RankAddons(builder.spec, builder.adapters, running.write_prefix).answers
        if (pictures := builder.sight.of_rank) is not None:
            answers[Down.PICTURES] = pictures.answer_of(number, size)
        if os.environ.get("REGATTA_CHECK_RANKS") == "1":
            if on_gpu:
                raise UserError("REGATTA_CHECK_RANKS=1 compares ranks on the CPU alone; unset it")
            from predict.engine.runner.networks import HostRunner

            for runner in runners[: 1 + (builder.draft is not None)]:
                assert isinstance(runner, HostRunner)
                runner.network = Compared(runner.network, size)
        if builder.drafter is not None:
            feed = RankFeed(runners, builder.drafter.feed)
            runners, answers[Down.FEED] = [*feed.runners], feed.answer
        rank.tell_ready(Ready(running.num_blocks, builder.num_state_slots, builder.weight_bytes))
    except Exception as error:
        rank.tell_failure(error)
        raise SystemExit(_until_ended()) from None
    rank.serve(runners, answers)
    raise SystemExit(1)


def _until_ended() -> int:
    """Waits until the front, which was told what is wrong, ends this process."""
    import time

    time.sleep(60)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
