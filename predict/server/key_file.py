"""Keys of a server: what each may ask, and the file that says so."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError, unknown_key
from predict.system.files import json_type, read_json_object
from predict.system.ranges import MAX_COUNT, MAX_INT32, Range

MAX_KEYS = 4096  # of a file: each request is compared with all
MAX_NAME = 64  # characters of a key's name
_FIELDS = ("name", "key", "sha256", "max_queue", "min_priority", "admin")
_NUMBERS = {"max_queue": Range(1, MAX_COUNT), "min_priority": Range(-MAX_INT32, MAX_INT32)}
_HEX = "0123456789abcdefABCDEF"


@dataclass(frozen=True)
class Key:
    """A client's key, by its digest, and the limits of those who show it."""

    digest: bytes = b""  # SHA-256, which tells the owner of a stored response from others
    name: str = ""  # in logs; "": a key without one
    max_queue: int | None = None  # answers of all its requests that run or wait
    min_priority: int | None = None  # the smallest number that its requests may ask
    admin: bool = True  # whether it may change weights, where the server's flags allow it


NO_KEY = Key()


def read_keys(file: Path) -> list[Key]:
    """The keys of a file: {"keys": [{"name": ..., "key": ...}, ...]}. Raises UserError.

    "sha256", in hexadecimal, may stand in place of "key". "max_queue" and "min_priority" are
    limits, see Key; "admin", false where it is not there, lets it change weights.
    """
    value = read_json_object(file)
    listed = value.pop("keys", None)
    if value:
        raise unknown_key(str(file), next(iter(value)), ("keys",))
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_KEYS:
        got = f"{len(listed)} keys" if isinstance(listed, list) else json_type(listed)
        raise UserError(f'{file}: "keys" has {got} (allowed: a list of 1 to {MAX_KEYS} keys)')
    found = [_key(each, f"{file}: keys[{index}]") for index, each in enumerate(listed)]
    for field in ("name", "digest"):
        values = [getattr(each, field) for each in found]
        if len(set(values)) < len(values):
            twice = next(i for i, each in enumerate(values) if each in values[:i])
            raise UserError(
                f"{file}: keys[{twice}] has the {field.replace('digest', 'key')} of a key ahead "
                "of it; give each its own"
            )
    return found


def _key(value: Any, where: str) -> Key:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {json_type(value)} (allowed: an object with name, key)")
    for field in value:
        if field not in _FIELDS:
            raise unknown_key(where, field, _FIELDS)
    name, key, sha256 = (value.get(field) for field in ("name", "key", "sha256"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise UserError(f"{where}.name is wrong (allowed: 1 to {MAX_NAME} visible characters)")
    if (key is None) == (sha256 is None):
        raise UserError(f"{where} needs either key, or the sha256 of one")
    if key is not None:
        if not isinstance(key, str) or not fits_header(key):
            raise UserError(f"{where}.key is wrong (allowed: visible ASCII characters)")
        digest = digest_of(key.encode())
    else:
        if not isinstance(sha256, str) or len(sha256) != 64 or set(sha256) - set(_HEX):
            raise UserError(f"{where}.sha256 is wrong (allowed: 64 hexadecimal digits)")
        digest = bytes.fromhex(sha256)
    admin = value.get("admin", False)
    if not isinstance(admin, bool):
        raise UserError(f"{where}.admin is {json_type(admin)} (allowed: true, false)")
    limits = {
        field: allowed.taken(f"{where}.{field}", value[field], "")
        for field, allowed in _NUMBERS.items()
        if value.get(field) is not None
    }
    return Key(digest, name, **limits, admin=admin)


def fits_header(key: str) -> bool:
    """Whether a header can have a key."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def digest_of(key: bytes) -> bytes:
    """What a key is compared by: all digests have one length."""
    return hashlib.sha256(key).digest()
