"""A loaded model whose weights leave their device, come back, or become others.

Between sleep and wake-up the process keeps all but weights and caches: tokenizer, scheduler,
compiled guides, adapters on the host. An update is a sleep of level 1 from which the model wakes
with other weights; where these cannot be read, it wakes with those that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from predict.config.engine import EngineConfig
from predict.config.rest import Rest
from predict.engine.addons import Addons
from predict.engine.engine import Engine
from predict.engine.runner.networks import DynamicForward
from predict.engine.runner.residence import Residence
from predict.engine.step import Runner
from predict.errors import UserError
from predict.loading.digests import check_same, checked
from predict.loading.model import check_memory, open_weights, read_spec
from predict.loading.platform import Platform
from predict.loading.sources import CheckpointSource
from predict.nn.decoder import Decoder, map_tensors
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec
from predict.system.notes import LOG

if TYPE_CHECKING:
    from paddle import Tensor

ASLEEP = "the model sleeps; wake it up first (wake_up, or POST /wake_up)"


class Origin(NamedTuple):
    """What a model's weights are read with."""

    config: EngineConfig
    read: DecoderSpec  # as its config.json says
    spec: DecoderSpec  # as it runs
    reader: ConfigReader
    digests: Mapping[str, str] | None = None  # of an update, whose folder is read again later


class Resting:
    """Sleep, wake-up and updates of one model, while nothing of it runs."""

    def __init__(
        self,
        origin: Origin,
        platform: Platform,
        decoder: Decoder | None,
        residence: Residence | None,
        refusal: str | None,
    ) -> None:
        """decoder: as it was read. refusal: why this model never rests; None: it may."""
        self._origin, self._platform, self._refusal = origin, platform, refusal
        self._names = [] if decoder is None else [name for name, _ in named(decoder)]
        self._residence = residence
        self.out_of_memory: Callable[[], AbstractContextManager[None]] = lambda: (
            platform.explained_out_of_memory("end other processes on this device")
        )

    @property
    def level(self) -> int:
        """Of the sleep; 0 while the model is awake."""
        return 0 if self._residence is None else self._residence.level

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that leave."""
        return 0 if self._residence is None else self._residence.num_bytes

    def check(self, rest: Rest) -> None:
        """Raises UserError for what cannot be done now, or with this model."""
        if self._refusal is not None or self._residence is None:
            raise UserError(f"{rest.act} does not go with {self._refusal} yet; leave that out")
        if rest.act == "sleep" and self.level:
            raise UserError("sleep: the model sleeps already; wake it up first")
        if rest.act == "wake_up" and not self.level:
            raise UserError("wake_up: the model is awake")

    def act(self, rest: Rest, engine: Engine, addons: Addons) -> None:
        """Does it. Raises UserError, with all as it was, where it cannot be done.

        Nothing may run.
        """
        self.check(rest)
        residence = self._residence
        assert residence is not None
        started = time.perf_counter()
        self._platform.make_current()
        if rest.act == "sleep":
            engine.scheduler.forget_cache()
            residence.leave(rest.level)
        elif rest.act == "wake_up":
            self._wake(residence, addons)
        else:
            self._update(residence, rest, engine, addons)
        LOG.info(f"{rest.act} took {time.perf_counter() - started:.2f} s")

    def _wake(
        self,
        residence: Residence,
        addons: Addons,
        fresh: list[Tensor] | None = None,
        origin: Origin | None = None,
    ) -> None:
        """fresh: other weights, and origin: what they were read with."""
        with self.out_of_memory():
            if fresh is None and residence.level == 2:
                fresh = self._read(self._origin)
            residence.come_back(fresh)
        self._origin = origin or self._origin
        addons.write_again()

    def _update(self, residence: Residence, rest: Rest, engine: Engine, addons: Addons) -> None:
        assert rest.path is not None
        before = residence.level
        # A model of made-up weights may get real ones.
        config = self._origin.config.changed(model_name_or_path=rest.path, load_format="auto")
        if not before:
            engine.scheduler.forget_cache()
            residence.leave(1)
        origin = self._origin._replace(config=config, digests=rest.digests)
        try:
            self._wake(residence, addons, self._read(origin), origin)
        except BaseException:
            if not before and residence.level:
                self._wake(residence, addons)
            raise

    def _read(self, origin: Origin) -> list[Tensor]:
        """The weights of a folder, which fit this model. Raises UserError."""
        model = origin.config.model
        read, reader = read_spec(model.model_name_or_path, model.model_type)
        if read != origin.read:
            raise UserError(
                f"{model.model_name_or_path}: its config.json describes another network than the "
                "one that runs; start a server with it"
            )
        opened = open_weights(origin.config, origin.spec, reader, self._platform)
        check_memory([opened], with_cache=False)
        stamps = {}
        if isinstance(opened.source, CheckpointSource):
            stored = opened.source.checkpoint.stored.values()
            files = {path for array in stored for path, _ in array.places}
            stamps = checked(Path(model.model_name_or_path), files, origin.digests)
        found = named(opened.read())
        check_same(stamps)
        return self._fitting(found, model.model_name_or_path)

    def _fitting(self, found: list[tuple[str, Tensor]], directory: str) -> list[Tensor]:
        """New tensors in the order of the model's own."""
        residence = self._residence
        assert residence is not None
        if [name for name, _ in found] != self._names:
            raise UserError(f"{directory}: its weights are stored in another form; convert them")
        own = [each for _, each in found]
        for new, old in zip(own, residence.weights, strict=True):
            if new.shape != old.shape or new.dtype != old.dtype:
                raise UserError(
                    f"{directory}: a tensor is {list(new.shape)} {new.dtype}, and the model has "
                    f"{list(old.shape)} {old.dtype} in its place; give weights of the same shapes"
                )
        return own


def named(decoder: Decoder) -> list[tuple[str, Tensor]]:
    """The tensors of a decoder by their paths, each once, but for empty ones."""
    found: dict[int, tuple[str, Tensor]] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        if tensor.size:
            found.setdefault(id(tensor), (path, tensor))
        return tensor

    map_tensors(decoder, note)
    return list(found.values())


def residence_of(
    platform: Platform,
    decoder: Decoder | None,
    kept: Iterable[Tensor],
    scratch: Iterable[Tensor],
    rebind: Callable[[], None],
) -> Residence:
    """The residence of a model. decoder: as it was read. kept, scratch, rebind: see Residence."""
    weights = [] if decoder is None else [each for _, each in named(decoder)]
    return Residence(platform.gpu, weights, kept, scratch, rebind)


def rebinding(forwards: Sequence[DynamicForward], runner: Runner) -> Callable[[], None]:
    """What to call when weights or caches have other memory: graphs are recorded anew."""

    def rebind() -> None:
        for forward in forwards:
            forward.rebind()
        if (graphs := getattr(runner, "graphs", None)) is not None:
            graphs.drop(lambda _: True)

    return rebind


def refused(
    config: EngineConfig, platform: Platform, has_draft: bool, has_tower: bool
) -> str | None:
    """What keeps a model from resting; None: nothing does."""
    device, degree = platform.device, config.ranks.tensor_parallel_degree
    names = {
        f"--device {config.model.device}": not (device.is_cpu or device.is_gpu),
        f"--mode {config.model.mode}": config.model.mode == "static",
        f"--tensor_parallel_degree {degree}": degree > 1,
        f"--speculate_method {config.speculation.speculate_method}": has_draft,
        "a model that reads pictures": has_tower,
    }
    return next((name for name, is_there in names.items() if is_there), None)
