"""The engine's process: owns the LLM, obeys the front between steps, and never sees HTTP.

One thread does everything, so that no step waits for Python's lock. After each step one message
with all new text is sent, while the device runs the next step. The front starts this process, which
ends when the front does; the front handles the signals.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from predict.engine.failures import explained
from predict.engine.samples import Samples, StreamOutput
from predict.errors import EXIT_FAILURE, UserError
from predict.server.wire import (
    Abort,
    Add,
    AddonChange,
    AnswerMetrics,
    AskStats,
    Changed,
    Ended,
    Failed,
    FromEngine,
    FromFront,
    Messages,
    ModelInfo,
    Ready,
    Start,
    StepNews,
    Stop,
    Told,
    frame,
)
from predict.system import notes
from predict.system.console import say

if TYPE_CHECKING:
    from predict.llm import LLM

READ_BYTES = 1 << 20  # at once
SOCKET_BYTES = 4 << 20  # that the kernel holds for a front that is busy
FRONT_ENDED = "the server's front process has ended, and so the engine ends"


class FrontEnded(Exception):  # noqa: N818  # a state
    """Nobody is at the other end of the socket."""


class Link:
    """The engine's end of the socket. Writes never block: what the front has not read is kept."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._sock = sock
        self._messages: Messages[FromFront] = Messages(FromFront)
        self._unsent: deque[memoryview] = deque()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wakes, select.POLLIN)

    def wake(self) -> None:
        """Makes a waiting `received` return. May be called by any thread."""
        os.eventfd_write(self._wakes, 1)

    def received(self, wait: bool) -> list[FromFront]:
        """The front's messages since the last call.

        wait: for at least one message, or `wake`. Raises FrontEnded.
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
                if any(found == self._wakes for found, _ in self._poll.poll()):
                    os.eventfd_read(self._wakes)
                    return []

    def send(self, message: FromEngine) -> None:
        """Sends a message, or keeps it for later. Raises FrontEnded."""
        self._unsent.append(memoryview(frame(message)))
        self._flush()

    def send_all(self, message: FromEngine) -> None:
        """Sends the last message and waits until the kernel has taken it. Raises FrontEnded."""
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
    """Answers the front's messages until Stop.

    A request's failure, refusal or abort does not touch the others; `run` raises a failure of the
    engine itself (EngineError).
    """

    def __init__(self, llm: LLM, link: Link):
        self._llm = llm
        self._link = link
        self._live: dict[int, _Live] = {}  # by the front's ids
        self._by_request: dict[int, _Live] = {}  # by the engine's ids
        # Answers whose guides are being compiled on other threads; their requests are not queued.
        self._compiling: dict[int, _Live] = {}
        self._pieces: list[tuple[int, list[StreamOutput]]] = []  # not sent yet
        self._ended: list[Ended] = []

    def run(self) -> None:
        """Returns when the front says stop. Raises FrontEnded, EngineError."""
        while True:
            for message in self._link.received(wait=not self._live):
                if isinstance(message, Stop):
                    return
                self._obey(message)
            if self._compiling:
                self._begin_compiled()
            if self._live:
                self._step()
            self._send()

    def _obey(self, message: FromFront) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            if live := self._compiling.pop(message.request_id, None):
                live.samples.abandon()
                self._collect([live])
            elif live := self._live.get(message.request_id):
                self._llm.abort([live.samples])
                self._collect([live])
        elif isinstance(message, AskStats):
            self._send()  # first the text that the counts include
            self._link.send(Told(message.question, self._llm.stats()))
        elif isinstance(message, AddonChange):
            self._link.send(self._changed(message))

    def _changed(self, message: AddonChange) -> Changed:
        """Loads or unloads an adapter or a prefix; no failure of it touches running requests."""
        llm, is_prefix = self._llm, message.kind == "prefix"
        try:
            if message.path is None:
                (llm.unload_prefix if is_prefix else llm.unload_adapter)(message.name)
            else:
                (llm.load_prefix if is_prefix else llm.load_adapter)(message.name, message.path)
        except UserError as error:
            return Changed(message.question, refused=str(error))
        except Exception as error:
            return Changed(message.question, failed=f"{type(error).__name__}: {error}")
        return Changed(message.question)

    def _add(self, message: Add) -> None:
        try:
            samples = self._llm.samples(
                message.prompt_token_ids, message.params, streamed=message.streamed
            )
            live = _Live(message, samples)
            if samples.guide is None:
                self._begin(live)
            else:
                self._compiling[live.request_id] = live
                samples.guide.add_done_callback(lambda _: self._link.wake())
        except Exception as error:
            self._refuse(message.request_id, error)

    def _begin_compiled(self) -> None:
        for live in list(self._compiling.values()):
            guide = live.samples.guide
            if guide is not None and guide.done():
                del self._compiling[live.request_id]
                try:
                    guide.result()
                    self._begin(live)
                except Exception as error:
                    self._refuse(live.request_id, error)

    def _begin(self, live: _Live) -> None:
        """Queues an answer's requests. Raises UserError, with nothing queued."""
        self._llm.queue([live.samples])
        self._live[live.request_id] = live
        for request in live.samples.requests:
            self._by_request[request.request_id] = live

    def _refuse(self, request_id: int, error: Exception) -> None:
        """Ends an answer that never ran."""
        if isinstance(error, UserError):
            self._ended.append(Ended(request_id, None, refused=str(error)))
            return
        text = f"{type(error).__name__}: {error}"
        self._pieces.append((request_id, [StreamOutput("", (), "error", error=text)]))
        self._ended.append(Ended(request_id, None))

    def _step(self) -> None:
        batch, finished = self._llm.step(live.samples for live in self._live.values())
        sampled = (span.request for span in batch.spans if span.samples) if batch else ()
        found = (self._by_request.get(each.owner.request_id) for each in (*sampled, *finished))
        # None: aborted while the step ran.
        self._collect({id(live): live for live in found if live is not None}.values())

    def _collect(self, answers: Iterable[_Live]) -> None:
        """Notes the new pieces of these answers, and drops those that have ended."""
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
            except Exception as error:  # making its text failed: this answer alone ends
                text = explained(live.samples.requests[0], error)
                self._pieces.append((live.request_id, [StreamOutput("", (), "error", error=text)]))
                self._llm.abort([live.samples])
            self._forget(live)
            self._ended.append(Ended(live.request_id, metrics_of(live), output))

    def _forget(self, live: _Live) -> None:
        self._live.pop(live.request_id, None)
        for request in live.samples.requests:
            self._by_request.pop(request.request_id, None)

    def _send(self) -> None:
        if self._pieces or self._ended:
            self._link.send(StepNews(self._pieces, self._ended))
            self._pieces, self._ended = [], []


def metrics_of(live: _Live) -> AnswerMetrics:
    """The metrics of an answer that has ended."""
    requests = live.samples.requests
    first = requests[0]
    times = first.token_times
    ends = [request.finish_time for request in requests if request.finish_time is not None]
    if first.beam_group is not None:
        num_output_tokens = sum(len(each.token_ids) for each in first.beam_group.returned)
    else:
        num_output_tokens = sum(r.num_known_tokens - r.num_prompt_tokens for r in requests)

    per_token = None
    if len(times) > 1 and first.beam_group is None:  # whose tokens all come at the end
        per_token = (times[-1] - times[0]) / (len(times) - 1)

    def since(when: float | None) -> float | None:
        return None if when is None else max(when - live.sent_at, 0.0)

    return AnswerMetrics(
        num_prompt_tokens=first.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(request.num_preemptions for request in requests),
        queue_seconds=since(first.first_scheduled_time),
        time_to_first_token=since(first.first_token_time),
        time_per_output_token=per_token,
        seconds=since(max(ends, default=time.perf_counter())) or 0.0,
        finish_reasons=tuple(request.finish_reason or "" for request in requests),
    )


def info_of(llm: LLM) -> ModelInfo:
    """The description of the loaded model that the front needs."""
    config = llm.config
    return ModelInfo(
        model_type=llm.spec.model_type,
        dtype=config.model.dtype,
        device=llm.platform.device.flag,
        mode=config.model.mode,
        vocab_size=llm.spec.vocab_size,
        max_length=config.max_length,
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
    """Loads a model and answers the front until Stop; the exit status. Raises FrontEnded."""
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
    """Starts a thread that ends this process when the front ends, even while a model loads."""

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
    """Ignores SIGINT, SIGTERM and SIGHUP, which a terminal sends to both processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(argv: list[str]) -> int:
    """Serves the front at the other end of a socket. argv: the socket's file descriptor."""
    ignore_signals()
    sock = socket.socket(fileno=int(argv[0]))
    watch = end_with_front(sock)
    try:
        with notes.printed():
            return serve(Link(sock))
    except FrontEnded:
        watch.join()  # which ends the process
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
