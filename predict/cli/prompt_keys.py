"""Keys of a prompt that are not read, and the known keys that their writer may have meant."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from predict.errors import quoted
from predict.names import nearest
from predict.request import SAMPLING_KEYS

MAX_KEYS = 500  # looked at, of those that differ: each takes some ms
MAX_WARNINGS = 10
# num_return_sequences is n, as the flag is called.
KNOWN_KEYS = ("src", "tgt", "images", "num_return_sequences", *SAMPLING_KEYS)

# Asked for elsewhere, and not here.
UNSUPPORTED = (
    "functions guided_choice guided_grammar guided_json guided_regex response_format "
    "tool_choice tools"
)


def meant(key: str) -> str | None:
    """The key that a mistyped one, or another tool's, stands for; None for one that is like none.

    Most keys that are like none are for the file's owner: a likeness by chance is none here.
    """
    return nearest(key, KNOWN_KEYS, likeness=0.8)


def key_warnings(keys_of: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """One line for each key that was probably meant for us.

    keys_of: (where it stands, its keys that are not KNOWN_KEYS) of every prompt. A key that is like
    none of ours belongs to the file's owner, and nothing is said of it.
    """
    places: dict[str, list[str]] = {}
    for where, keys in keys_of:
        for key in keys:
            places.setdefault(key, []).append(where)
    warnings = []
    for key, wheres in islice(places.items(), MAX_KEYS):
        count = "1 prompt has" if len(wheres) == 1 else f"{len(wheres)} prompts have"
        said = f"{count} the key {quoted(key)}, which nothing reads ({wheres[0]}"
        said += ")" if len(wheres) == 1 else " first)"
        if key in UNSUPPORTED.split():
            warnings.append(f"{said}; this release has no such feature")
        elif (ours := meant(key)) is not None:
            warnings.append(f"{said}; did you mean {ours!r}?")
    rest = len(warnings) - MAX_WARNINGS
    return warnings[:MAX_WARNINGS] + [f"{rest} more keys are read by nothing"] * (rest > 0)
