"""Addresses of pictures: from hosts and a folder that flags name, by public addresses alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.images import fetching
from predict.images.fetching import Media, is_public

PICTURE = b"\x89PNG" + bytes(range(256)) * 400
SLOW_ENDS: list[str] = []  # paths whose headers somebody read to their end


class Host(BaseHTTPRequestHandler):
    """Answers as its paths say."""

    def do_GET(self) -> None:
        if self.path == "/slow":  # its headers never end
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for _ in range(100):
                self.wfile.write(b"X: y\r\n")
                time.sleep(0.05)
            SLOW_ENDS.append(self.path)
            return
        status = {"/elsewhere": 302, "/none": 404}.get(self.path, 200)
        self.send_response(status)
        if self.path == "/elsewhere":
            self.send_header("Location", "http://169.254.169.254/")
        if self.path == "/coded":
            self.send_header("Content-Encoding", "gzip")
        if self.path == "/cut":
            self.send_header("Content-Length", str(2 * len(PICTURE)))
        self.end_headers()
        count = 10**6 if self.path == "/endless" else 1
        for _ in range(count):
            self.wfile.write(PICTURE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/a.png?b=1", ""),
        ("/elsewhere", "sends elsewhere, and that is not followed"),
        ("/none", "answers 404"),
        ("/coded", "sends it coded"),
        ("/cut", "cannot be fetched|in the middle"),
        ("/endless", "more than 1000000 bytes"),
        ("/slow", r"takes more than 0\.4 s to fetch"),
    ],
)
def test_hosts_are_taken_at_no_word(
    path: str, words: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one address that was checked is dialled, whatever the name says later."""
    monkeypatch.setattr(fetching, "MAX_BYTES", 1_000_000)
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    seconds = 0.4 if path == "/slow" else 20.0
    media = Media((f"pictures.example:{port}",), seconds=seconds, resolve=resolve)
    address = f"http://Pictures.example:{port}{path}"
    if words:
        with pytest.raises(UserError, match=f"picture 2.*({words})"):
            media.bytes_of(address, "picture 2")
    else:
        assert media.bytes_of(address, "picture 2") == PICTURE
    assert asked == ["pictures.example"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://other.example/a.png", "whose host is not allowed"),
        ("http://a.example.other.example/", "whose host is not allowed"),
        ("http://a.example:8080/", "whose host is not allowed"),
        ("http://a.example@other.example/", "with a user"),
        ("http://u:p@a.example/", "with a user"),
        ("http://a.example\\@other.example/", "other characters"),
        ("http://a.example/\r\nX: y", "other characters"),
        ("http://a.example:99999/", "which is none"),
        ("http://a.example/", "an address that is not public"),
        ("https://b.example:8443/", "is not known"),
    ],
)
def test_what_is_not_allowed_is_not_asked(address: str, words: str) -> None:
    def resolve(host: str, port: int) -> list[str]:
        if host == "b.example":
            raise OSError
        return ["8.8.8.8", "10.0.0.1"]  # one that is not public is enough

    media = Media(("a.example", "b.example:8443"), resolve=resolve)
    with pytest.raises(UserError, match=words):
        media.bytes_of(address, "picture 1")


def test_addresses_of_networks_inside_are_not_public() -> None:
    inside = (
        *("127.0.0.1", "10.1.1.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.0.8", "::1", "::", "fc00::1"),
        *("fe80::1", "fe80::1%eth0", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("fec0::1", "feff::1", "::127.0.0.1"),
    )
    assert [each for each in inside if is_public(each)] == []
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8")))


def test_time_ends_within_a_handshake(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a whole address, not of each part of it."""

    class Context:
        def wrap_socket(self, connection: socket.socket, **_: object) -> socket.socket:
            made = socket.socket(fileno=connection.detach())
            made.settimeout(20)
            time.sleep(0.3)  # the other side is slow
            return made

    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    monkeypatch.setattr("ssl.create_default_context", Context)
    media = Media((f"a.example:{port}",), seconds=0.2, resolve=lambda *_: ["127.0.0.1"])
    SLOW_ENDS.clear()
    with pytest.raises(UserError, match=r"takes more than 0\.2 s"):
        media.bytes_of(f"https://a.example:{port}/slow", "picture 1")
    assert not SLOW_ENDS


def test_addresses_of_a_prompt_have_limits_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 100)
    addresses = {}
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(90))
        addresses[f"file://{tmp_path}/{number}"] = f"picture {number + 1}"
    with pytest.raises(UserError, match=r"up to picture 3 lead to 270 bytes \(allowed: 200"):
        Media(folder=str(tmp_path)).all_of(addresses)
    with pytest.raises(UserError, match="up to picture 1 take more than -2 s"):
        Media(folder=str(tmp_path), seconds=-1).all_of(addresses)


def test_files_lie_below_the_folder_that_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"seen")
    (tmp_path / "secret").write_bytes(b"no")
    (folder / "link").symlink_to(tmp_path / "secret")
    media = Media(folder=str(folder))
    assert media.bytes_of(f"file://{folder}/a%20b.png", "picture 1") == b"seen"
    for path in (
        tmp_path / "secret",
        folder / ".." / "secret",
        folder / "link",
        folder,
        "/nowhere",
    ):
        with pytest.raises(UserError, match="is no file below --allowed_local_media_path"):
            media.bytes_of(f"file://{path}", "picture 1")
    with pytest.raises(UserError, match="of another host"):
        media.bytes_of(f"file://other{folder}/a%20b.png", "picture 1")
    with pytest.raises(UserError, match="no file is read"):
        Media().bytes_of(f"file://{folder}/a%20b.png", "picture 1")


def test_hosts_of_flags_are_checked() -> None:
    for host in ("https://a.example", "*.example", "", "a.example/x"):
        with pytest.raises(UserError, match="allowed_media_domains"):
            EngineConfig(model_name_or_path="x", allowed_media_domains=(host,))
