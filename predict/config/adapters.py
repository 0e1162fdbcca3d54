"""Adapters that requests may name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from predict.errors import UserError
from predict.names import hint
from predict.system.files import check_name as check_file_name
from predict.system.options import Checked, option
from predict.system.ranges import COUNT, Range

LORA_CONFIG = "lora_config.json"  # PaddleNLP's
ADAPTER_FILES = f"{LORA_CONFIG} or adapter_config.json"  # what an adapter's folder holds
MAX_NAME = 200  # characters of an adapter's name
MAX_SHOWN = 20  # names in a message
AddonKind = Literal["adapter", "prefix"]
T = TypeVar("T")


def check_adapter_name(name: str) -> None:
    """Raises UserError for a text that can be no adapter's name."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise UserError(
            f"an adapter's name is {name[:MAX_NAME]!r} (allowed: 1 to {MAX_NAME} printable "
            "characters)"
        )


def unknown(name: str, known: Iterable[str], what: str = "adapter") -> UserError:
    """The error for a name that no adapter, or whatever it is, has."""
    known = list(known)
    names, name = ", ".join(known[:MAX_SHOWN]) or "none", name[:MAX_NAME]
    return UserError(f"{what} is {name!r} (loaded: {names}){hint(name, known)}")


class Change(NamedTuple):
    """Loads an adapter or a tuned prefix, which requests may name then, or unloads it."""

    kind: AddonKind
    name: str
    path: str | None = None  # the folder or file to load; None: unload


class AddonVerbs(Generic[T]):
    """Changes of adapters and prefixes by name. T: what each returns, None or an awaitable.

    They raise UserError, and change nothing, where a name, a file or the room does not suit.
    Requests with what is unloaded go on to their ends.
    """

    def change(self, change: Change) -> T:
        """Makes one change."""
        raise NotImplementedError

    def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> T:
        """Reads a LoRA adapter that requests may name from now on."""
        return self.change(Change("adapter", name, os.fspath(directory)))

    def unload_adapter(self, name: str) -> T:
        """Forgets an adapter."""
        return self.change(Change("adapter", name))

    def load_prefix(self, name: str, path: str | os.PathLike[str]) -> T:
        """Writes a tuned prefix into the cache, which requests may name from now on.

        path: a folder or a .npy file, see predict.loading.prefix.
        """
        return self.change(Change("prefix", name, os.fspath(path)))

    def unload_prefix(self, name: str) -> T:
        """Forgets a prefix; its blocks are freed when its last request ends.

        The prefix of requests without a name stays.
        """
        return self.change(Change("prefix", name))


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig(Checked):
    """Adapters of requests. Raises UserError for other values."""

    # fmt: off
    lora_modules: tuple[str, ...] = option((),
        "LoRA adapters that requests may name, each with its folder, as sql=adapters/sql "
        "chat=adapters/chat: requests of one batch may each have their own.",
        group="Adapters", kind="pairs", null_words=())
    allow_adapter_updates: bool = option(False,
        "Adapters and prefixes may come and go while requests run.", is_flag=False)
    max_loras: int = option(8,
        "Adapters of --max_lora_rank that lie on the device at once; requests with others wait "
        "until there is room.",
        allowed=Range(1, 1 << 12))
    max_lora_rank: int = option(16,
        "Largest rank of an adapter that requests may name.", allowed=Range(1, 1 << 12))
    max_cpu_loras: int = option(64,
        "Adapters whose values stay in the host's memory; others are read again when they are "
        "needed.",
        allowed=COUNT)
    prefix_path: tuple[str, ...] = option((),
        "A tuned prefix: the folder that PaddleNLP saved, or a .npy file. A JSON list has several: "
        "a path alone for requests that name none, name=path for those that name it as their "
        "adapter. --max_length counts it.",
        kind="texts")
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.prefix_path, (str, os.PathLike)):
            object.__setattr__(self, "prefix_path", (os.fsdecode(self.prefix_path),))
        super().__post_init__()
        both = sorted(self.directories.keys() & self.prefixes.keys())
        if both:
            raise UserError(
                f"lora_modules and prefix_path both name {both[0]!r}; give each its own name"
            )

    @property
    def directories(self) -> dict[str, str]:
        """The adapters' folders by their names. Raises UserError."""
        found: dict[str, str] = {}
        for text in self.lora_modules:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise UserError(
                    f"lora_modules has {text!r} (allowed: name=path, the path of an adapter's "
                    "folder)"
                )
            check_adapter_name(name)
            if name in found:
                raise UserError(f"lora_modules names two adapters {name!r}; give each its own name")
            found[name] = path
        return found

    def check_name(self, name: str) -> None:
        """Raises UserError where a request may never name this adapter, or this prefix."""
        if not (self.is_used or self.names):
            raise UserError(
                f"adapter is {name[:MAX_NAME]!r}, and this model serves none; start it with "
                "lora_modules, or leave adapter out"
            )
        if not self.allow_adapter_updates and name not in self.names:
            raise unknown(name, self.names)

    @property
    def prefixes(self) -> dict[str, str]:
        """The prefixes' paths by their names, "" for that of requests without. Raises UserError."""
        found: dict[str, str] = {}
        for text in self.prefix_path:
            name, equals, path = text.partition("=")
            if not equals or "/" in name:  # a path alone, perhaps with a = in it
                name, path = "", text
            elif not (name and path):
                raise UserError(f"prefix_path has {text!r} (allowed: path, or name=path)")
            else:
                check_adapter_name(name)
            check_file_name("prefix_path", path)
            if name in found:
                which = f"two prefixes {name!r}" if name else "two prefixes without a name"
                raise UserError(f"prefix_path has {which}; give each its own name, as name=path")
            found[name] = path
        return found

    @property
    def names(self) -> list[str]:
        """Adapters and prefixes that requests may name from the start."""
        return [*self.directories, *filter(None, self.prefixes)]

    @property
    def is_used(self) -> bool:
        """Whether requests may name adapters."""
        return bool(self.lora_modules) or self.allow_adapter_updates
