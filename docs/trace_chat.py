"""Prints the calls on the way of a chat, from its body to its server-sent events, and their files.

Front and engine run in one process here, on two threads. At each stop on the way, the calls that
are open stand on the way. A hop is a call from one file of predict/ to another. Stops are where a
chat takes another form, and where it enters another room; the way ends at the doors of the text
room and of the engine's step (trace_path.py follows that one).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import logging
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

Frames = list[tuple[str, str]]
# What is done, and the function that does it, where it is called from.
STOPS = {
    "the body is read": "predict.server.limits:parse_json",
    "its fields are checked": "predict.server.routes.chat:parsed",
    "its parameters are made": "predict.request:SamplingParams.__post_init__",
    "its messages are rendered": "predict.server.front_model:FrontModel.render",
    "they become a text": "predict.text.chat_template:JinjaTemplate.render",
    "the text becomes tokens": "predict.text.tokenizer:Tokenizer.encode",
    "these go to the engine": "predict.server.engine_client:frame",
    "requests are made of them": "predict.engine.samples:Samples.__init__",
    "they are queued": "predict.engine.engine:Engine.add",
    "a step runs": "predict.engine.engine:Engine.step",
    "new text is made": "predict.text.answer_text:AnswerText.take",
    "it goes to the front": "predict.server.engine_process:frame",
    "it becomes events": "predict.server.answers:ChatEvents.encode",
    "they are sent": "predict.server.app:_Answer.__call__",
}
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2}


def watch(place: str, seen: Callable[[Frames], object]) -> None:
    """Has seen(calls) called with the calls that are open whenever that function is called."""
    from docs.trace_path import call_stack

    module, _, path = place.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        holder = getattr(holder, each)
    real = getattr(holder, name)
    code = real.__code__
    file = str(code.co_filename).removeprefix(f"{ROOT}/")

    @functools.wraps(real)
    def watched(*arguments: Any, **named: Any) -> Any:
        seen([*call_stack(sys._getframe(1)), (file, code.co_qualname)])
        return real(*arguments, **named)

    setattr(holder, name, watched)


class Here:
    """In the place of the engine's process: a thread of this one."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def kill(self) -> None:
        """Nothing: the thread has ended."""


async def trace() -> dict[str, Frames]:
    """The calls that are open when each stop is first reached by a chat."""
    from predict import LLM
    from predict.server.app import create_app
    from predict.server.config import ServerConfig
    from predict.server.engine_client import EngineClient
    from predict.server.engine_process import EngineLoop, Link, info_of
    from predict.server.front_model import FrontModel
    from predict.server.wire import Ready

    model = ROOT / "examples" / "demo_model"
    llm = LLM(model, dtype="float32", max_length=128, chat_template="chatml")
    config = ServerConfig(engine=llm.config, access_log=False)
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    link.send(Ready(info_of(llm)))
    engine = threading.Thread(target=EngineLoop(llm, link).run)
    engine.start()
    client = EngineClient(Here(ours))  # type: ignore[arg-type]
    await client.connect()
    await client.ready()
    app = create_app(client, FrontModel.load(config), config)
    found: dict[str, Frames] = {}
    for what, place in STOPS.items():
        watch(place, functools.partial(found.setdefault, what))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        answer = await http.post("/v1/chat/completions", json=BODY)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    await client.stop()
    engine.join()
    return {what: found[what] for what in STOPS}


def main() -> int:
    """Prints the way."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    files: dict[str, None] = {}
    hops = 0
    for what, frames in asyncio.run(trace()).items():
        print(f"{what}:")
        for file, function in frames:
            print(f"  {file:<38} {function}")
        files.update(dict.fromkeys(file for file, _ in frames))
        hops = max(hops, sum(a[0] != b[0] for a, b in itertools.pairwise(frames)))
    print(f"at most {hops} hops between files to a stop, {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
