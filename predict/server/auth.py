"""API keys, compared in constant time, and what each may ask."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from predict.errors import UserError
from predict.server.errors import ApiError
from predict.server.key_file import NO_KEY, Key, digest_of, read_keys
from predict.system.notes import LOG

# Open without a key: health checks, and the page's files, which hold no data.
OPEN_PATHS = ("/health", "/ready", "/v2/health/live", "/v2/health/ready", "/")
OPEN_PREFIXES = ("/static/",)
LOOK_SECONDS = 1.0  # between two looks at the file


class Keys:
    """The keys of a server; without any, every request is allowed."""

    def __init__(
        self,
        keys: Sequence[str],
        file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """file: more keys, read again when it changes. Raises UserError where it is wrong."""
        # Digests have one length, so that the time of a comparison tells nothing of a key.
        self._given = [Key(digest_of(key.encode())) for key in keys]
        self._file = None if file is None else Path(file)
        self._clock, self._looked = clock, clock()
        self._seen: object = None
        self._keys = self._given
        if self._file is not None:
            self._seen = _version(self._file)
            self._keys = [*self._given, *read_keys(self._file)]

    def check(self, path: str, authorization: bytes | None, x_api_key: bytes | None) -> Key:
        """The key that is shown; NO_KEY where none is asked for.

        It stands in Authorization, behind Bearer, or in X-Api-Key. Raises ApiError 401 for a
        wrong one, unless the path is open.
        """
        if self._file is not None:
            self._look()
        if self._file is None and not self._given:
            return NO_KEY
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return NO_KEY
        scheme, _, key = (authorization or b"").partition(b" ")
        if authorization is None and x_api_key is not None:
            scheme, key = b"bearer", x_api_key
        shown = digest_of(key.strip())
        fits = [each for each in self._keys if hmac.compare_digest(shown, each.digest)]
        if scheme.lower() == b"bearer" and fits:
            return fits[0]
        got = "no API key was sent" if scheme == b"" else "the API key is wrong"
        raise ApiError(
            401,
            f"{got}; send the header Authorization: Bearer KEY with a key of this server, or "
            "X-Api-Key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _look(self) -> None:
        """Takes in the file where it has changed; one that is wrong changes nothing."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        assert self._file is not None
        version = _version(self._file)
        if version == self._seen:
            return
        self._seen = version
        try:
            found = read_keys(self._file)
        except UserError as error:
            LOG.error(f"{error}; the keys stay as they were")
            return
        self._keys = [*self._given, *found]
        LOG.info(f"--api_key_file {self._file} has changed: {len(found)} keys")


def _version(file: Path) -> object:
    """What changes when a file does; None where there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
