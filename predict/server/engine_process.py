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
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from predict.engine.answers import News, Tell
from predict.engine.embedding import VectorJob
from predict.engine.samples import Samples, StreamOutput
from predict.errors import EXIT_FAILURE, UserError
from predict.rests import Rests
from predict.server.engine_client import LOG_FORMAT_VARIABLE
from predict.server.pictures import received_pictures
from predict.server.wire import (
    Abort,
    Add,
    AnswerMetrics,
    AskChange,
    AskRest,
    AskStats,
    AskVectors,
    Changed,
    DropVectors,
    Ended,
    Failed,
    FromEngine,
    FromFront,
    Messages,
    ModelInfo,
    Needs,
    Ready,
    Start,
    StepNews,
    Stop,
    Told,
    Vectors,
    frame,
)
from predict.system import notes
from predict.system.console import say
from predict.system.json_lines import JsonLines

if TYPE_CHECKING:
    from predict.config.engine import EngineConfig
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


class EngineLoop:
    """Answers the front's messages until Stop.

    A request's failure, refusal or abort does not touch the others; `run` raises a failure of the
    engine itself (EngineError).
    """

    def __init__(self, llm: LLM, link: Link):
        self._llm = llm
        self._answers = llm.answers
        self._answers.wake = link.wake
        self._link = link
        self._live: dict[int, tuple[Samples, Tell]] = {}  # unfinished, by the front's ids
        self._pieces: list[tuple[int, list[StreamOutput]]] = []  # not sent yet
        self._ended: list[Ended] = []
        self._jobs: dict[int, VectorJob] = {}  # unfinished, by the front's questions
        self._rests = Rests(llm)
        self._later: list[AskVectors] = []  # texts that wait for a rest

    def run(self) -> None:
        """Returns when the front says stop. Raises FrontEnded, EngineError."""
        embedder = self._llm.embedder
        while True:
            busy = self._answers.is_busy or embedder.is_busy
            busy = busy or self._rests.is_waiting
            for message in self._link.received(wait=not busy):
                if isinstance(message, Stop):
                    return
                self._obey(message)
            self._rests.settle()
            if self._later and not self._rests.is_waiting:
                later, self._later = self._later, []
                for each in later:
                    self._add_texts(each)
            self._llm.check()
            if self._answers.is_busy:
                self._llm.step()
            if embedder.is_busy:
                for job in embedder.step():
                    self._made(job)
            self._send()

    def _obey(self, message: FromFront) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            if message.request_id in self._live:
                samples, tell = self._live[message.request_id]
                if news := self._answers.abort(samples):
                    tell(news)
        elif isinstance(message, AskStats):
            self._send()  # first the text that the counts include
            self._link.send(Told(message.question, self._llm.stats()))
        elif isinstance(message, AskChange):
            self._link.send(self._changed(message))
        elif isinstance(message, AskRest):
            self._rests.ask(message.rest, partial(self._rested, message.question))
        elif isinstance(message, AskVectors):
            if self._rests.is_waiting:
                self._later.append(message)
            else:
                self._add_texts(message)
        elif isinstance(message, DropVectors):
            self._later = [each for each in self._later if each.question != message.question]
            if message.question in self._jobs:
                self._llm.embedder.abort(self._jobs.pop(message.question))

    def _rested(self, question: int, error: Exception | None) -> None:
        refused = str(error) if isinstance(error, UserError) else None
        failed = None
        if error is not None and refused is None:
            failed = f"{type(error).__name__}: {error}"
        self._link.send(Changed(question, refused, failed, self._llm.is_sleeping))

    def _add_texts(self, message: AskVectors) -> None:
        try:
            retrieval = self._llm.retrieval
            pooler = retrieval.score_pooler() if message.scores else retrieval.pooler()
            job = self._llm.add_texts(message.texts, pooler, message.adapter)
        except UserError as error:
            self._link.send(Vectors(message.question, refused=str(error)))
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            self._link.send(Vectors(message.question, failed=failed))
        else:
            self._jobs[message.question] = job

    def _made(self, job: VectorJob) -> None:
        question = next((each for each, own in self._jobs.items() if own is job), None)
        if question is None:  # dropped
            return
        del self._jobs[question]
        if job.vectors is not None:
            made = Vectors(question, job.vectors.tobytes(), job.vectors.shape[1])
        elif isinstance(job.error, UserError):
            made = Vectors(question, refused=str(job.error))
        else:
            made = Vectors(question, failed=str(job.error))
        self._link.send(made)

    def _changed(self, message: AskChange) -> Changed:
        """Changes adapters or prefixes; no failure of it touches running requests."""
        try:
            self._llm.change(message.change)
        except UserError as error:
            return Changed(message.question, refused=str(error))
        except Exception as error:
            return Changed(message.question, failed=f"{type(error).__name__}: {error}")
        return Changed(message.question)

    def _add(self, message: Add) -> None:
        tell = partial(self._take, message)
        try:
            sight, sent = self._llm.parts.sight, message.pictures
            pictures = received_pictures(sent, sight) if sent else None
            samples = self._llm.samples(
                *(message.prompt_token_ids, message.params),
                streamed=message.streamed,
                pictures=pictures,
            )
            self._live[message.request_id] = samples, tell
            self._answers.add([samples], tell)
        except Exception as error:
            self._end(message.request_id, error)

    def _take(self, message: Add, news: News) -> None:
        """Notes what is new of an answer."""
        if news.output is not None and news.error is None:
            output = None if message.streamed else news.output
            metrics = metrics_of(news.samples, message.sent_at)
            del self._live[message.request_id]
            self._ended.append(Ended(message.request_id, metrics, output))
        elif news.error is not None:
            self._end(message.request_id, news.error, news.pieces if news.output is None else ())
            return
        if news.pieces:
            self._pieces.append((message.request_id, news.pieces))

    def _end(self, request_id: int, error: Exception, pieces: Sequence[StreamOutput] = ()) -> None:
        """Ends an answer that never ran, or whose text cannot be made."""
        self._live.pop(request_id, None)
        if isinstance(error, UserError):
            self._ended.append(Ended(request_id, None, refused=str(error)))
            return
        text = f"{type(error).__name__}: {error}"
        said = [*pieces] or [StreamOutput("", (), "error", error=text)]
        self._pieces.append((request_id, said))
        self._ended.append(Ended(request_id, None))

    def _send(self) -> None:
        if self._pieces or self._ended:
            self._link.send(StepNews(self._pieces, self._ended))
            self._pieces, self._ended = [], []


def metrics_of(samples: Samples, sent_at: float) -> AnswerMetrics:
    """The metrics of an answer that has ended. sent_at: see Add."""
    requests = samples.requests
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
        return None if when is None else max(when - sent_at, 0.0)

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
        num_draft_tokens=sum(request.num_draft_tokens for request in requests),
        num_accepted_draft_tokens=sum(each.num_accepted_draft_tokens for each in requests),
        guide_seconds=None if samples.guide is None else since(samples.begun_time),
        text_seconds=samples.text_seconds,
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
        rules=llm.retrieval.rules,
        makes_text=llm.spec.makes_text,
    )


def check_pooling_files(config: EngineConfig) -> None:
    """Raises UserError, ahead of any weight, for files of vectors and scores that are wrong."""
    from predict.loading.model import read_spec
    from predict.loading.pooling import read_pooling

    name = config.model.model_name_or_path
    read_pooling(name, read_spec(name, config.model.model_type)[0], config.model.pooling)


def needed_bytes(config: EngineConfig) -> int:
    """Bytes of a model's weights and its cache, before a weight is read. Raises UserError."""
    from predict.build import Builder
    from predict.config.speculation import FOLDERS
    from predict.loading.memory import bytes_per_token, num_cache_blocks
    from predict.loading.model import open_weights
    from predict.resting import refused

    builder = Builder(config, None)
    made, spec = builder.config, builder.spec
    has_draft = made.speculation.speculate_method in FOLDERS
    if what := refused(made, builder.platform, has_draft, spec.vision is not None):
        raise UserError(
            f"--model_folders puts models to sleep, which does not go with {what} yet; leave that "
            "out, or serve this model by itself"
        )
    weights = open_weights(made, spec, builder.reader, builder.platform)
    weights.source.close()
    if builder.platform.gpu is not None and made.cache.num_cache_blocks is None:
        raise UserError(
            "--model_folders on a GPU needs --num_cache_blocks: else the first model takes all "
            "that is free"
        )
    num_blocks = made.cache.num_cache_blocks or num_cache_blocks(made, spec)
    return weights.num_bytes + num_blocks * made.cache.block_size * bytes_per_token(made, spec)


def serve(link: Link) -> int:
    """Loads a model and answers the front until Stop; the exit status. Raises FrontEnded."""
    from predict.cli.command import explanation
    from predict.config.engine import EngineConfig
    from predict.system.host import frozen_objects

    start = link.received(wait=True)[0]  # nothing else comes before Ready
    assert isinstance(start, Start)
    try:
        from predict.llm import LLM

        config = EngineConfig(**start.settings)
        check_pooling_files(config)
        if start.asks:
            link.send(Needs(needed_bytes(config)))
            if isinstance(link.received(wait=True)[0], Stop):
                return 0
        llm = LLM(config)
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
    if os.environ.get(LOG_FORMAT_VARIABLE) == "json":
        sys.stderr = JsonLines(sys.stderr, "engine")
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
