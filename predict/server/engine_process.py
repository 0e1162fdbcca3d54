"""The engine's process: owns the LLM, obeys the front between steps, and never sees HTTP.

One thread does it all, so that nothing waits for Python's lock: after each step one message with
all that is new goes out, and while a device runs the next one there is time for it. The front
starts this process, and it ends with the front: signals are the front's business.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from predict.engine.failures import explained
from predict.engine.request_state import Request
from predict.engine.samples import Samples, StreamOutput
from predict.errors import EXIT_FAILURE, EngineError, UserError
from predict.server.wire import (
    Abort,
    Add,
    AnswerMetrics,
    AskStats,
    Ended,
    Failed,
    FromEngine,
    FromFront,
    Messages,
    ModelInfo,
    Ready,
    Start,
    Stats,
    Step,
    Stop,
    Told,
    frame,
)
from predict.system.console import say

if TYPE_CHECKING:
    from predict.llm import LLM

READ_BYTES = 1 << 20  # at once
SOCKET_BYTES = 4 << 20  # that the kernel holds for a front that is busy
FRONT_ENDED = "the server's front process has ended, and so the engine ends"


class FrontEnded(Exception):  # noqa: N818  # a state
    """Nobody is at the other end of the socket."""


class Link:
    """The engine's end of the socket. Writing never waits: what the front does not take is kept."""

    def __init__(self, sock: socket.socket):
        """Takes the socket over."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._sock = sock
        self._messages: Messages[FromFront] = Messages(FromFront)
        self._unsent: deque[memoryview] = deque()
        self._poll = select.poll()

    def received(self, wait: bool) -> list[FromFront]:
        """What the front has sent since the last time.

        wait: for at least one message. Raises FrontEnded.
        """
        while True:
            self._flush()
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                data = None
            except OSError:
                raise FrontEnded from None
            if data is not None:
                if not data:
                    raise FrontEnded
                found = self._messages.take(data)
                if found:
                    return found
            elif not wait:
                return []
            else:
                unsent = select.POLLOUT if self._unsent else 0
                self._poll.register(self._sock, select.POLLIN | unsent)
                self._poll.poll()

    def send(self, message: FromEngine) -> None:
        """Sends a message, or keeps it for later. Raises FrontEnded."""
        self._unsent.append(memoryview(frame(message)))
        self._flush()

    def send_all(self, message: FromEngine) -> None:
        """Sends the last message, and waits until it is gone. Raises FrontEnded."""
        self.send(message)
        self._poll.register(self._sock, select.POLLOUT)
        while self._unsent:
            self._poll.poll()
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._sock.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                raise FrontEnded from None
            self._unsent[0] = self._unsent[0][num_sent:]
            if not self._unsent[0]:
                self._unsent.popleft()


class _Live:
    """An answer that has not ended."""

    __slots__ = ("request_id", "samples", "sent_at", "streamed")

    def __init__(self, message: Add, samples: Samples):
        self.request_id = message.request_id
        self.streamed = message.streamed
        self.sent_at = message.sent_at
        self.samples = samples


class EngineLoop:
    """Answers what the front asks, until it says stop or ends.

    A request's failure, refusal or abort does not touch the others. A failure of the engine itself
    (EngineError) is raised by `run`.
    """

    def __init__(self, llm: LLM, link: Link):
        self._llm = llm
        self._link = link
        self._live: dict[int, _Live] = {}  # by the front's ids
        self._by_request: dict[int, _Live] = {}  # by the engine's ids
        self._pieces: list[tuple[int, list[StreamOutput]]] = []  # that are not sent yet
        self._ended: list[Ended] = []

    def run(self) -> None:
        """Returns when the front says stop. Raises FrontEnded, EngineError."""
        while True:
            for message in self._link.received(wait=not self._live):
                if isinstance(message, Stop):
                    return
                self._obey(message)
            if self._live:
                self._step()
            self._send()

    def _obey(self, message: FromFront) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            live = self._live.get(message.request_id)
            if live is not None:
                self._llm.abort([live.samples])
                self._collect([live])
        elif isinstance(message, AskStats):
            self._send()  # first, what the counts know of
            self._link.send(Told(message.question, stats_of(self._llm)))

    def _add(self, message: Add) -> None:
        try:
            samples = self._llm.samples(
                message.prompt_token_ids, message.params, streamed=message.streamed
            )
            self._llm.queue([samples])
        except UserError as error:
            self._ended.append(Ended(message.request_id, None, refused=str(error)))
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._pieces.append((message.request_id, [StreamOutput("", (), "error", error=text)]))
            self._ended.append(Ended(message.request_id, None))
            return
        live = _Live(message, samples)
        self._live[message.request_id] = live
        for request in samples.requests:
            self._by_request[request.request_id] = live

    def _step(self) -> None:
        batch, finished = self._llm.engine.step()
        if batch is None and not finished:
            raise EngineError(f"nothing runs, and {len(self._live)} answers have not ended")
        sampled = (span.request for span in batch.spans if span.samples) if batch else ()
        touched = {id(live): live for live in self._answers_of((*sampled, *finished))}
        self._collect(touched.values())

    def _answers_of(self, requests: Iterable[Request]) -> Iterable[_Live]:
        for request in requests:
            live = self._by_request.get(request.owner.request_id)
            if live is not None:  # else aborted while the step ran
                yield live

    def _collect(self, answers: Iterable[_Live]) -> None:
        """Takes down what is new of these, and forgets those that have ended."""
        for live in answers:
            output = None
            try:
                if live.streamed:
                    new = live.samples.pieces()
                    if new:
                        self._pieces.append((live.request_id, new))
                if not live.samples.is_finished:
                    continue
                if not live.streamed:
                    output = live.samples.output()
            except Exception as error:  # of its text: it ends, alone
                text = explained(live.samples.requests[0], error)
                self._pieces.append((live.request_id, [StreamOutput("", (), "error", error=text)]))
                self._llm.abort([live.samples])
            self._forget(live)
            self._ended.append(Ended(live.request_id, metrics_of(live), output))

    def _forget(self, live: _Live) -> None:
        del self._live[live.request_id]
        for request in live.samples.requests:
            del self._by_request[request.request_id]

    def _send(self) -> None:
        if self._pieces or self._ended:
            self._link.send(Step(self._pieces, self._ended))
            self._pieces, self._ended = [], []


def metrics_of(live: _Live) -> AnswerMetrics:
    """What an answer that has ended took."""
    requests = live.samples.requests
    first = requests[0]
    times = first.token_times
    ends = [request.finish_time for request in requests if request.finish_time is not None]
    if first.beam_group is not None:
        num_output_tokens = sum(len(each.token_ids) for each in first.beam_group.returned)
    else:
        num_output_tokens = sum(r.num_known_tokens - r.num_prompt_tokens for r in requests)

    def since(when: float | None) -> float | None:
        return None if when is None else max(when - live.sent_at, 0.0)

    return AnswerMetrics(
        num_prompt_tokens=first.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(request.num_preemptions for request in requests),
        queue_seconds=since(first.first_scheduled_time),
        time_to_first_token=since(first.first_token_time),
        time_per_output_token=(times[-1] - times[0]) / (len(times) - 1) if times[1:] else None,
        seconds=since(max(ends, default=live.sent_at)) or 0.0,
        finish_reasons=tuple(request.finish_reason or "" for request in requests),
    )


def stats_of(llm: LLM) -> Stats:
    """The engine's counts so far."""
    stats, scheduler = llm.stats(), llm.engine.scheduler
    return Stats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_steps=stats.num_steps,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
        num_preemptions=stats.num_preemptions,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        num_draft_spans=stats.num_draft_spans,
        num_cache_blocks=stats.num_cache_blocks,
        num_used_blocks=stats.num_used_blocks,
        peak_memory_bytes=stats.peak_memory_bytes,
    )


def info_of(llm: LLM) -> ModelInfo:
    """What was loaded."""
    config = llm.config
    return ModelInfo(
        model_type=llm.spec.model_type,
        dtype=config.model.dtype,
        device="cpu" if llm.device is None else f"gpu:{llm.device.index}",
        mode=config.model.mode,
        vocab_size=llm.spec.vocab_size,
        max_length=config.scheduling.max_length,
        batch_size=config.scheduling.batch_size,
        num_cache_blocks=llm.engine.scheduler.config.num_blocks,
        block_size=config.cache.block_size,
        eos_token_ids=tuple(sorted(llm.engine.eos_token_ids)),
        quant_type=config.quantization.quant_type,
        kv_format=config.kv_format,
        speculate_method=config.speculation.speculate_method,
        startup_seconds=llm.startup_seconds,
    )


def serve(link: Link) -> int:
    """Loads what the front asks for and answers it; the exit status. Raises FrontEnded."""
    from predict.cli.command import explanation
    from predict.config.engine import EngineConfig
    from predict.system.host import frozen_objects

    start = link.received(wait=True)[0]  # nothing else comes before Ready
    assert isinstance(start, Start)
    try:
        from predict.llm import LLM

        llm = LLM(EngineConfig(**start.settings))
        link.send(Ready(info_of(llm)))
        with frozen_objects():
            EngineLoop(llm, link).run()
    except FrontEnded:
        raise
    except Exception as error:
        try:
            message, status = explanation(error)
        except Exception:
            link.send_all(Failed(f"{type(error).__name__}: {error}", EXIT_FAILURE))
            raise
        link.send_all(Failed(message, status))
        return status
    return 0


def end_with_front(sock: socket.socket) -> threading.Thread:
    """A thread that ends this process as soon as the front has ended, even while a model loads."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        poll.poll()
        say(FRONT_ENDED)
        os._exit(EXIT_FAILURE)

    thread = threading.Thread(target=watch, name="regatta-front-watch", daemon=True)
    thread.start()
    return thread


def ignore_signals() -> None:
    """Leaves signals to the front: those of a terminal or of a service manager come to both."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(argv: list[str]) -> int:
    """Serves the front at the other end of a socket, whose number is the one argument."""
    ignore_signals()
    sock = socket.socket(fileno=int(argv[0]))
    watch = end_with_front(sock)
    try:
        return serve(Link(sock))
    except FrontEnded:
        watch.join()  # which ends the process
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
