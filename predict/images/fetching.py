"""Pictures by address: from hosts and from a folder that flags allow, and from nowhere else.

A host's name is resolved once, all of its addresses must be public, and the one that was checked is
dialled. Redirects are not followed, proxies not asked. Bytes and seconds are limited. Imports no
NumPy.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from predict.errors import UserError, quoted
from predict.images.limits import FETCHED_TOGETHER, MAX_BYTES

PORTS = {"http": 80, "https": 443}
SECONDS = 10.0  # of an address: its name, the connection, and all bytes
CHUNK = 1 << 16
# Of protocols, of sites, of books: Python takes some of them for public.
INSIDE = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "fec0::/10", "3fff::/20")))
# (host, port) -> its addresses
Resolve = Callable[[str, int], list[str]]


def is_address(source: Any) -> bool:
    """Whether a source is to be fetched, or read by "file://"."""
    return isinstance(source, str) and source[:8].lower().startswith(
        ("http://", "https://", "file://")
    )


def resolved(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_public(address: str) -> bool:
    """Whether an address of IP is one of the public internet, and stands for no other one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # of a zone: fe80::1%eth0
        return False
    if any(found in each for each in INSIDE):
        return False
    inner: list[Any] = []
    if isinstance(found, ipaddress.IPv6Address):
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if any(each is not None for each in inner):
            return all(is_public(str(each)) for each in inner if each is not None)
    return found.is_global and not (found.is_multicast or found.is_reserved)


@dataclass(frozen=True)
class Media:
    """Where pictures may be fetched from."""

    domains: tuple[str, ...] = ()  # hosts, "host:port" for another port than the scheme's
    folder: str | None = None
    seconds: float = SECONDS
    resolve: Resolve = resolved

    def bytes_of(self, address: str, where: str) -> bytes:
        """The bytes behind an address. Raises UserError for one that is not allowed."""
        self.check(address, where)
        if address[:5].lower() == "file:":
            return self._read(address, where)
        return self._fetched(urlsplit(address), where)

    def all_of(self, addresses: Mapping[str, str]) -> dict[str, bytes]:
        """The bytes behind the addresses of a prompt. addresses: where each stands.

        Raises UserError for one that is not allowed, and where they take too much together.
        """
        found, size = dict[str, bytes](), 0
        seconds = FETCHED_TOGETHER * self.seconds
        ends = time.monotonic() + seconds
        for address, where in addresses.items():
            if time.monotonic() > ends:
                raise UserError(
                    f"the addresses up to {where} take more than {seconds:g} s to fetch; send the "
                    "pictures themselves"
                )
            found[address] = self.bytes_of(address, where)
            size += len(found[address])
            if size > FETCHED_TOGETHER * MAX_BYTES:
                raise UserError(
                    f"the addresses up to {where} lead to {size} bytes (allowed: "
                    f"{FETCHED_TOGETHER * MAX_BYTES} in all); shrink the pictures"
                )
        return found

    def check(self, address: str, where: str) -> None:
        """Raises UserError for an address that is not allowed; asks nobody."""
        said = f"{where} is the address {quoted(address)}"
        instead = "send the picture itself, data:image/png;base64,..."
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError as error:
            raise UserError(f"{said}, which is none ({error}); {instead}") from None
        if any(ord(c) <= 32 or ord(c) > 126 for c in address) or "\\" in address:
            raise UserError(f"{said}, which has other characters than ASCII's printed ones")
        if parts.scheme.lower() == "file":
            if self.folder is None:
                raise UserError(
                    f"{said}, and no file is read (allowed: with --allowed_local_media_path, what "
                    f"lies below that folder); {instead}"
                )
            if parts.netloc not in ("", "localhost"):
                raise UserError(f"{said} of another host (allowed: file:///folder/name)")
            return
        if not self.domains:
            raise UserError(
                f"{said}, and none is fetched (allowed: with --allowed_media_domains, from hosts "
                f"that it names); {instead}"
            )
        if parts.username is not None or parts.password is not None:
            raise UserError(f"{said}, with a user (allowed: addresses without one)")
        host = (parts.hostname or "").lower()
        named = host if port in (None, PORTS[parts.scheme.lower()]) else f"{host}:{port}"
        if named not in self.domains:
            raise UserError(
                f"{said}, whose host is not allowed (allowed: those of --allowed_media_domains); "
                f"{instead}"
            )

    def _read(self, address: str, where: str) -> bytes:
        """A file below the folder, links followed. What lies elsewhere is not told apart."""
        assert self.folder is not None
        root = Path(os.path.realpath(self.folder))
        refused = UserError(
            f"{where}: {quoted(address)} is no file below --allowed_local_media_path"
        )
        try:
            path = Path(os.path.realpath(unquote(urlsplit(address).path)))
            if root not in path.parents or not path.is_file():
                raise refused
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except (OSError, ValueError):
            raise refused from None

    def _fetched(self, parts: SplitResult, where: str) -> bytes:
        scheme, host = parts.scheme.lower(), (parts.hostname or "").lower()
        port = parts.port or PORTS[scheme]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        late = UserError(f"{where} takes more than {self.seconds:g} s to fetch; send it itself")
        opened: list[socket.socket] = []
        ended = threading.Event()

        def end() -> None:
            ended.set()
            for each in opened:
                with contextlib.suppress(OSError):  # under TLS, whose state others use
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

        timer, started = threading.Timer(self.seconds, end), time.monotonic()
        timer.daemon = True
        timer.start()
        try:
            address = self._public_address(host, port, where, late)
            left = max(started + self.seconds - time.monotonic(), 1e-3)
            connection = socket.create_connection((address, port), left)
            with connection:
                stream = _stream(connection, host) if scheme == "https" else connection
                opened.append(stream)  # which has the connection now
                with stream:
                    if ended.is_set():  # when there was nothing to shut
                        raise late
                    if isinstance(stream, ssl.SSLSocket):
                        stream.do_handshake()
                    data = b"".join(_body(stream, host, port, scheme, path, where))
                if ended.is_set():  # which looks like an end of the answer
                    raise late
                return data
        except UserError:
            if ended.is_set():
                raise late from None
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if ended.is_set() or isinstance(error, TimeoutError):
                raise late from None
            raise UserError(
                f"{where} cannot be fetched from {quoted(host)} ({type(error).__name__}); send the "
                "picture itself"
            ) from None
        finally:
            timer.cancel()

    def _public_address(self, host: str, port: int, where: str, late: UserError) -> str:
        """The address to dial. A resolver that does not answer is left to itself."""
        found: list[list[str]] = []
        failed: list[Exception] = []

        def ask() -> None:
            try:
                found.append(self.resolve(host, port))
            except Exception as error:  # UnicodeError of a strange name, too
                failed.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            raise late
        if failed or not found[0]:
            raise UserError(f"{where}: the host {quoted(host)} is not known")
        if not all(map(is_public, found[0])):
            raise UserError(
                f"{where}: the host {quoted(host)} has an address that is not public, which is "
                "not asked"
            )
        return found[0][0]


NO_MEDIA = Media()  # no address is allowed


def _stream(connection: socket.socket, host: str) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    return context.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)


def _body(stream: Any, host: str, port: int, scheme: str, path: str, where: str) -> Iterator[bytes]:
    """The bytes of an answer 200."""
    name = f"[{host}]" if ":" in host else host
    shown = name if port == PORTS[scheme] else f"{name}:{port}"
    stream.sendall(
        f"GET {path} HTTP/1.1\r\nHost: {shown}\r\nUser-Agent: regatta\r\nAccept: image/*\r\n"
        "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
    )
    answer = http.client.HTTPResponse(stream, method="GET")
    answer.begin()
    if 300 <= answer.status < 400:
        raise UserError(f"{where}: {quoted(host)} sends elsewhere, and that is not followed")
    if answer.status != 200:
        raise UserError(f"{where}: {quoted(host)} answers {answer.status} (allowed: 200)")
    if answer.getheader("Content-Encoding", "identity").lower() != "identity":
        raise UserError(f"{where}: {quoted(host)} sends it coded (allowed: plain bytes)")
    size = 0
    while chunk := answer.read(CHUNK):
        size += len(chunk)
        if size > MAX_BYTES:
            raise UserError(f"{where} has more than {MAX_BYTES} bytes; shrink it")
        yield chunk
    if answer.length:
        raise UserError(f"{where}: {quoted(host)} ended in the middle of it")
