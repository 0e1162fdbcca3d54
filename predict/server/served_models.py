"""The models that requests may name: the one that is served, by its names, and its adapters."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from predict.config.adapters import check_adapter_name
from predict.errors import UserError, one_of
from predict.server.adapter_root import adapter_folder
from predict.server.config import ServerConfig
from predict.server.engine_client import AdapterFailed, Engine
from predict.server.errors import ApiError, invalid

MAX_ADAPTERS = 4096  # that are loaded: a client may name one folder again and again
MAX_SHOWN = 20  # names in a message


class ServedModel(NamedTuple):
    """What a request's `model` means."""

    name: str  # as answers have it
    adapter: str | None  # of SamplingParams


class ServedModels:
    """One event loop's. Adapters come and go one at a time, while requests run."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._started = int(time.time())
        # By name: when they were loaded, in seconds since 1970.
        self._adapters = dict.fromkeys(config.engine.adapters.names, self._started)
        self._changing = asyncio.Lock()

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; of None the base. Raises ApiError 404 for one not here."""
        names = self._config.model_names
        if name is None:
            return ServedModel(names[0], None)
        if name in names:
            return ServedModel(name, None)
        if name in self._adapters:
            return ServedModel(name, name)
        known = [*names, *self._adapters][:MAX_SHOWN]
        raise ApiError(
            404, str(one_of("model", name[:200], known)), param="model", code="model_not_found"
        )

    def card(self, name: str) -> dict[str, Any]:
        """What /v1/models says of a name. Raises ApiError 404."""
        model = self.find(name)
        is_adapter = model.adapter is not None
        return {
            "id": name,
            "object": "model",
            "created": self._adapters[name] if is_adapter else self._started,
            "owned_by": "regatta",
            "parent": self._config.model_names[0] if is_adapter else None,
            "max_model_len": self._config.engine.scheduling.max_length,
        }

    def cards(self) -> list[dict[str, Any]]:
        """Of all names, the base's first."""
        return [self.card(name) for name in (*self._config.model_names, *self._adapters)]

    async def load(self, engine: Engine, name: str, path: str) -> dict[str, Any]:
        """Loads an adapter, which requests may name from then on; its card. Raises ApiError."""
        root = self._root()
        async with self._changing:
            self._check_new(name)
            folder = await asyncio.to_thread(adapter_folder, root, path)
            try:
                await engine.load_adapter(name, folder)
            except UserError as error:
                # Where the root lies is not for clients.
                raise invalid("lora_path", str(error).replace(folder, path)) from None
            except AdapterFailed as error:
                said = str(error).replace(folder, path)
                raise ApiError(500, f"the adapter was not loaded: {said}") from None
            self._adapters[name] = int(time.time())
        return self.card(name)

    async def unload(self, engine: Engine, name: str) -> None:
        """Takes an adapter away; requests that run go on to their ends. Raises ApiError."""
        self._root()
        async with self._changing:
            if name not in self._adapters:
                known = ", ".join(list(self._adapters)[:MAX_SHOWN]) or "none"
                raise ApiError(
                    404,
                    f"there is no adapter {name[:200]!r} (loaded: {known})",
                    param="lora_name",
                    code="model_not_found",
                )
            if name in self._config.engine.adapters.prefixes:
                raise invalid(
                    "lora_name", f"{name!r} is a prefix, which stays; give an adapter's name"
                )
            created = self._adapters.pop(name)  # no request comes behind the message
            try:
                await engine.unload_adapter(name)
            except (UserError, AdapterFailed) as error:
                self._adapters[name] = created
                raise ApiError(500, f"the adapter was not unloaded: {error}") from None

    def _root(self) -> str:
        root = self._config.adapter_root
        if root is None:
            raise ApiError(
                403,
                "this server's adapters are fixed; start it with --allow_adapter_updates and "
                "--adapter_root to change them",
            )
        return root

    def _check_new(self, name: str) -> None:
        try:
            check_adapter_name(name)
        except UserError as error:
            raise invalid("lora_name", str(error)) from None
        if name in self._adapters or name in self._config.model_names:
            raise invalid(
                "lora_name",
                f"a model {name!r} is loaded already; unload it first, or give another name",
                "already_loaded",
            )
        if len(self._adapters) >= MAX_ADAPTERS:
            raise invalid(
                "lora_name",
                f"{len(self._adapters)} adapters are loaded (allowed: {MAX_ADAPTERS}); unload one",
            )
