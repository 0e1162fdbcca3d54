"""Rest: what may be asked of a model's weights while it stays loaded. Imports no Paddle."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from predict.errors import UserError, one_of, quoted
from predict.system.files import check_name

LEVELS = (1, 2)
MODES = ("wait", "abort")
ACTS = ("sleep", "wake_up", "update_weights")
MAX_DIGESTS = 4096
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class Rest:
    """One change of where weights lie, or of what they are. Raises UserError for what is none.

    level: of sleep: 1, weights go to the host's memory; 2, they are dropped, and read again from
    the model's folder. The cache is given up either way. path: of update_weights, a folder with
    tensors of the same shapes. digests: SHA-256 in hexadecimal by file name, of all files with
    weights there; None: nothing is checked. mode: wait, what was asked before ends first, with the
    weights that it began with; abort, it ends now, with finish_reason "abort".
    """

    act: Literal["sleep", "wake_up", "update_weights"]
    level: int = 1
    path: str | None = None
    digests: Mapping[str, str] | None = None
    mode: Literal["wait", "abort"] = "wait"

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise one_of("act", self.act, ACTS)
        if self.mode not in MODES:
            raise one_of("mode", self.mode, MODES)
        if type(self.level) is not int or self.level not in LEVELS:
            raise UserError(f"level is {quoted(self.level)} (allowed: 1, 2)")
        if (self.path is not None) != (self.act == "update_weights"):
            raise UserError("path goes with update_weights, and it needs one")
        if self.path is not None:
            check_name("path", self.path)
        self._check_digests()

    def _check_digests(self) -> None:
        if self.digests is None:
            return
        if not isinstance(self.digests, Mapping) or not 0 < len(self.digests) <= MAX_DIGESTS:
            raise UserError(f"digests has to name 1 to {MAX_DIGESTS} files, each with its SHA-256")
        for name, digest in self.digests.items():
            if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
                raise UserError(
                    f"digests has {quoted(name)} (allowed: names of files of the folder)"
                )
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise UserError(
                    f"digests[{quoted(name)}] is {quoted(digest)} (allowed: 64 hexadecimal digits, "
                    "the SHA-256 of the file)"
                )


T = TypeVar("T")


class RestVerbs(Generic[T]):
    """Sleep, wake-up and updates. T: what each returns, None or an awaitable.

    mode: LLM raises UserError where answers run, unless it is "abort". AsyncLLM waits until what
    was asked before has ended, or aborts it; what is asked meanwhile waits.
    """

    def rest(self, rest: Rest) -> T:
        """Does what `rest` says. Raises UserError, with all as it was, where it cannot be."""
        raise NotImplementedError

    def sleep(self, level: int = 1, mode: Literal["wait", "abort"] = "wait") -> T:
        """Gives the memory of the caches and of the weights back.

        level: 1, the weights go to the host's memory, where they lie on a CPU anyway; 2, they are
        dropped, and `wake_up` reads them again from their folder. What is cached of prompts is
        forgotten. Raises UserError for models that cannot sleep yet.
        """
        return self.rest(Rest("sleep", level, mode=mode))

    def wake_up(self) -> T:
        """Puts weights and caches into their places. Raises UserError where there is no room."""
        return self.rest(Rest("wake_up"))

    def update_weights(
        self,
        path: str | os.PathLike[str],
        digests: Mapping[str, str] | None = None,
        mode: Literal["wait", "abort"] = "wait",
    ) -> T:
        """Replaces the weights by those of a folder, of the same shapes and names.

        digests: SHA-256 in hexadecimal of each file with weights, by its name; None: not checked.
        A model that sleeps wakes up. The tokenizer stays, loaded adapters too, and what is cached
        of prompts is forgotten. Raises UserError, with the weights as they were, where the folder's
        do not fit.
        """
        rest = Rest("update_weights", path=os.fspath(path), digests=digests, mode=mode)
        return self.rest(rest)
