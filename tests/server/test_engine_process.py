"""The engine's side of the socket: it never waits for the front, and failures stay alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from predict import LLM
from predict.engine.samples import Samples, StreamOutput
from predict.errors import EXIT_USAGE, EngineError, UserError
from predict.server.engine_client import EngineClient, EngineDied
from predict.server.engine_process import EngineLoop, FrontEnded, Link, serve
from predict.server.wire import (
    Failed,
    FromEngine,
    Messages,
    Start,
    StepNews,
    Stop,
    frame,
)
from tests.server.engines import GREEDY, ScriptedLink, adds, config, running, write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(config(write_model(tmp_path_factory.mktemp("model") / "tiny")))


def test_a_step_is_one_message_with_all_that_is_new(llm: LLM) -> None:
    link = ScriptedLink(adds(3))
    EngineLoop(llm, link).run()
    assert len(link.sent) == GREEDY.max_new_tokens
    for message in link.sent:
        assert isinstance(message, StepNews)
        assert [request_id for request_id, _ in message.pieces] == [0, 1, 2]
    last = link.sent[-1]
    assert isinstance(last, StepNews)
    assert [ended.request_id for ended in last.ended] == [0, 1, 2]


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_whose_text_cannot_be_made_ends_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    method = "pieces" if streamed else "output"
    original = getattr(Samples, method)

    def failing(samples: Samples) -> Any:
        if samples.requests[0].prompt_token_ids[-1] == 8:
            raise RuntimeError("no text")
        return original(samples)

    monkeypatch.setattr(Samples, method, failing)
    link = ScriptedLink(adds(2, streamed))
    EngineLoop(llm, link).run()
    steps = [message for message in link.sent if isinstance(message, StepNews)]
    ends = {ended.request_id: ended for step in steps for ended in step.ended}
    assert set(ends) == {0, 1}
    told = [
        piece for step in steps for index, pieces in step.pieces if index == 1 for piece in pieces
    ]
    assert told[-1].finish_reason == "error"
    assert "no text" in (told[-1].error or "")
    assert (ends[0].output is None) == streamed
    assert llm.stats().num_used_blocks == 0


def test_an_engine_that_fails_ends_the_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        raise EngineError("the device is gone")

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(EngineError, match="the device is gone"):
        EngineLoop(llm, ScriptedLink(adds(1))).run()


def test_wrong_files_of_vectors_are_told_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "modules.json").write_text("{}")
    monkeypatch.setattr("predict.llm.LLM", None)  # which would read them
    link = ScriptedLink([Start(config(folder).settings)])
    assert serve(link) == EXIT_USAGE
    (failed,) = link.sent
    assert isinstance(failed, Failed)
    assert "modules.json is an object" in failed.message


def test_a_front_that_does_not_read_keeps_nobody_waiting() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    said = StepNews([(1, [StreamOutput("x" * 1000, (1,), None)])], [])
    for _ in range(20_000):  # more than any socket holds
        link.send(said)
    ours.sendall(frame(Stop()))
    assert link.received(wait=False) == [Stop()]
    ours.setblocking(False)
    messages: Messages[FromEngine] = Messages(FromEngine)
    count = 0
    while count < 20_000:
        link.received(wait=False)  # sends what it kept
        count += len(messages.take(ours.recv(1 << 24)))
    assert count == 20_000
    ours.close()
    with pytest.raises(FrontEnded):
        link.received(wait=True)
    theirs.close()


LAST_WORDS = """
import socket, sys
from predict.server.engine_process import Link
from predict.server.wire import Failed
link = Link(socket.socket(fileno=int(sys.argv[1])))
link.received(wait=True)
link.send_all(Failed("it is gone", {status}))
sys.exit({status})
"""
NONSENSE = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(b"\\4\\0\\0\\0what")
sock.recv(1 << 20)
sock.recv(1 << 20)
"""


@pytest.mark.parametrize(
    ("script", "kind", "failure", "status"),
    [
        (LAST_WORDS.format(status=1), EngineDied, "it is gone", 1),
        (LAST_WORDS.format(status=2), UserError, "it is gone", 2),
        (NONSENSE, EngineDied, "no message", 1),
    ],
)
def test_the_front_hears_why_the_engine_has_ended(
    tmp_path: Path, script: str, kind: type[Exception], failure: str, status: int
) -> None:
    async def main(client: EngineClient) -> None:
        with pytest.raises(kind, match=failure):
            await client.ready()
        await client.died()
        assert failure in (client.failure or "")
        assert client.exit_code == status

    with running(config(tmp_path), script) as engine:
        engine.run(main(engine.client))
