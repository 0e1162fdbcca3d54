"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from predict.server.errors import ApiError

# Open without a key: health checks, and the page's files, which hold no data.
OPEN_PATHS = ("/health", "/ready", "/v2/health/live", "/v2/health/ready", "/")
OPEN_PREFIXES = ("/static/",)


class Keys:
    """The keys of a server; without any, every request is allowed."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that the time of a comparison tells nothing of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None, x_api_key: bytes | None) -> bytes:
        """What tells the owner of the key from others: its digest; b"" where none is asked for.

        The key stands in Authorization, behind Bearer, or in X-Api-Key. Raises ApiError 401 for a
        wrong one, unless the path is open.
        """
        if not self._digests or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return b""
        scheme, _, key = (authorization or b"").partition(b" ")
        if authorization is None and x_api_key is not None:
            scheme, key = b"bearer", x_api_key
        shown = _digest(key.strip())
        fits = [hmac.compare_digest(shown, digest) for digest in self._digests]
        if scheme.lower() == b"bearer" and any(fits):
            return shown
        got = "no API key was sent" if scheme == b"" else "the API key is wrong"
        raise ApiError(
            401,
            f"{got}; send the header Authorization: Bearer KEY with a key of this server, or "
            "X-Api-Key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
