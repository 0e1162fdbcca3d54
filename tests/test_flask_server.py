"""PaddleNLP's command for a server: its flags, its two ports, its client."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from predict.errors import UserError
from predict.flask_server import parse
from tests.server.engines import write_model
from tests.support.paths import ROOT

MODEL = ["--model_name_or_path", "somewhere", "--dtype", "float32"]
SECONDS = 120.0


def test_sampling_is_paddlenlps_unless_flags_say_otherwise() -> None:
    flags = parse(MODEL)
    assert (flags["top_p"], flags["temperature"]) == (0.7, 0.95)
    assert flags.given("top_p", "temperature")
    assert parse([*MODEL, "--top_p", "0.5"])["top_p"] == 0.5
    assert not parse([*MODEL, "--decode_strategy", "greedy_search"]).given("top_p")


def test_ports_have_paddlenlps_names() -> None:
    assert parse(MODEL)["port"] == 8011
    assert parse([*MODEL, "--base_port", "9000"])["flask_port"] == 9000
    assert "no effect" in " ".join(parse([*MODEL, "--title", "Mine"]).notes)
    with pytest.raises(UserError, match="flask_port"):
        parse([*MODEL, "--flask_prot", "1"])


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def test_both_ports_serve_the_page_and_the_api(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    ports = free_ports(2)
    words = ["--model_name_or_path", str(model), "--dtype", "float32", "--device", "cpu"]
    words += ["--port", str(ports[0]), "--flask_port", str(ports[1]), "--max_length", "256"]
    process = subprocess.Popen(
        [sys.executable, "predict/flask_server.py", *words, "--access_log", "false"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        said = next(line for line in process.stderr if "ready: " in line)
        assert f":{ports[1]}/v1" in said
        asked = {"context": "hello", "top_p": 0.0, "max_length": 4, "min_length": 4}
        texts = []
        for port in ports:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
                assert client.get("/").status_code == 200
                lines = client.post("/api/chat", json=asked).text.splitlines()
                parts = [json.loads(line)["result"]["response"]["utterance"] for line in lines]
                texts.append("".join(parts))
        assert texts[0] == texts[1] != ""
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(SECONDS) == 0
