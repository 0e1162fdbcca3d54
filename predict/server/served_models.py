"""The models that requests may name: the one that is served, its adapters, its tuned prefixes."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from predict.config.adapters import AddonKind, Change, check_adapter_name
from predict.errors import UserError, one_of
from predict.server.adapter_root import below_root
from predict.server.config import ServerConfig
from predict.server.engine_client import ChangeFailed, EngineHandle
from predict.server.errors import ApiError, invalid

MAX_ADAPTERS = 4096  # that are loaded, and prefixes: a client may name one folder over and over
MAX_SHOWN = 20  # names in a message


class ServedModel(NamedTuple):
    """The model that a request names."""

    name: str  # as answers have it
    adapter: str | None  # of SamplingParams


class Kind(NamedTuple):
    """A kind of thing that requests may name beside the model, and its routes' field names."""

    noun: AddonKind
    name_field: str
    path_field: str
    load_route: str
    unload_route: str
    takes_files: bool = False  # else folders alone


LORA = Kind("adapter", "lora_name", "lora_path", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
PREFIX = Kind(
    "prefix", "prefix_name", "prefix_path", "/v1/load_prefix", "/v1/unload_prefix", takes_files=True
)


class Loaded(NamedTuple):
    """A loaded adapter or prefix."""

    kind: Kind
    created: int  # when it was loaded, in seconds since 1970


class ServedModels:
    """The names that requests may use. Not thread-safe; one change is made at a time."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._started = int(time.time())
        adapters = config.engine.adapters
        self._loaded = {
            name: Loaded(LORA if name in adapters.directories else PREFIX, self._started)
            for name in adapters.names
        }
        self._changing = asyncio.Lock()
        self.beside: list[ServedModels] = []  # of the server's other models

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; the base for None. Raises ApiError 404 for an unknown name."""
        names = self._config.model_names
        if name is None:
            return ServedModel(names[0], None)
        if name in names:
            return ServedModel(name, None)
        if name in self._loaded:
            return ServedModel(name, name)
        others = [each for other in self.beside for each in other.names]
        known = [*names, *self._loaded, *others][:MAX_SHOWN]
        raise ApiError(
            404, str(one_of("model", name[:200], known)), param="model", code="model_not_found"
        )

    @property
    def names(self) -> list[str]:
        """What requests may name as their model."""
        return [*self._config.model_names, *self._loaded]

    def card(self, name: str) -> dict[str, Any]:
        """The entry of a name in /v1/models. Raises ApiError 404."""
        other = next((each for each in self.beside if name in each.names), None)
        if other is not None and name not in self.names:
            return other.card(name)
        self.find(name)
        loaded = self._loaded.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started if loaded is None else loaded.created,
            "owned_by": "regatta",
            "parent": None if loaded is None else self._config.model_names[0],
            "max_model_len": self._config.engine.max_length,
        }

    def cards(self) -> list[dict[str, Any]]:
        """The entries of all names, the base's first."""
        others = [name for other in self.beside for name in other.names]
        return [self.card(name) for name in (*self.names, *others)]

    async def load(self, engine: EngineHandle, kind: Kind, name: str, path: str) -> dict[str, Any]:
        """Loads an adapter or prefix under a new name; returns its card. Raises ApiError."""
        root = self._root()
        async with self._changing:
            self._check_new(kind, name)
            found = await asyncio.to_thread(
                below_root, root, path, kind.path_field, kind.takes_files
            )
            try:
                await engine.change(Change(kind.noun, name, found))
            except UserError as error:
                # Where the root lies is not for clients.
                raise invalid(kind.path_field, str(error).replace(found, path)) from None
            except ChangeFailed as error:
                said = str(error).replace(found, path)
                raise ApiError(500, f"the {kind.noun} was not loaded: {said}") from None
            self._loaded[name] = Loaded(kind, int(time.time()))
        return self.card(name)

    async def unload(self, engine: EngineHandle, kind: Kind, name: str) -> None:
        """Unloads an adapter or prefix; running requests are finished. Raises ApiError."""
        self._root()
        async with self._changing:
            loaded = self._loaded.get(name)
            if loaded is None:
                alike = [each for each, other in self._loaded.items() if other.kind is kind]
                known = ", ".join(alike[:MAX_SHOWN]) or "none"
                raise ApiError(
                    404,
                    f"there is no {kind.noun} {name[:200]!r} (loaded: {known})",
                    param=kind.name_field,
                    code="model_not_found",
                )
            if loaded.kind is not kind:
                raise invalid(
                    kind.name_field,
                    f"{name!r} is of the kind {loaded.kind.noun}, and no {kind.noun}; "
                    f"{loaded.kind.unload_route} unloads it",
                )
            del self._loaded[name]  # first: no later request may name it
            try:
                await engine.change(Change(kind.noun, name))
            except (UserError, ChangeFailed) as error:
                self._loaded[name] = loaded
                raise ApiError(500, f"the {kind.noun} was not unloaded: {error}") from None

    def _root(self) -> str:
        root = self._config.adapter_root
        if root is None:
            raise ApiError(
                403,
                "this server's adapters are fixed; start it with --allow_adapter_updates and "
                "--adapter_root to change them",
            )
        return root

    def _check_new(self, kind: Kind, name: str) -> None:
        try:
            check_adapter_name(name)
        except UserError as error:
            raise invalid(kind.name_field, str(error)) from None
        if name in self._loaded or name in self._config.model_names:
            raise invalid(
                kind.name_field,
                f"a model {name!r} is loaded already; unload it first, or give another name",
                "already_loaded",
            )
        if len(self._loaded) >= MAX_ADAPTERS:
            raise invalid(
                kind.name_field,
                f"{len(self._loaded)} adapters and prefixes are loaded (allowed: {MAX_ADAPTERS}); "
                "unload one",
            )
