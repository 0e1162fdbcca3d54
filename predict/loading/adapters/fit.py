"""Fitting an adapter to a checkpoint: every name found there, every shape checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

from predict.errors import UserError
from predict.loading.adapters.base import BIAS, WEIGHT, Base
from predict.loading.adapters.crossing import crossed
from predict.loading.adapters.record import Adapter, LowRank
from predict.loading.adapters.values import Values
from predict.loading.arrays import MAX_SHOWN, Shape, listed


def fitted(adapter: Adapter, base: Base) -> Adapter:
    """The adapter under the base's names.

    Raises UserError for targets that the base has not or in another order, shapes that are not its,
    and what would be changed twice.
    """
    return _Fitting(crossed(adapter, base), base).fitted()


class _Fitting:
    def __init__(self, adapter: Adapter, base: Base):
        self.adapter, self.base = adapter, base
        self.shapes = base.every_shape

    def fitted(self) -> Adapter:
        adapter, base = self.adapter, self.base
        wanted = [*(name + WEIGHT for name in adapter.linears), *adapter.replaced]
        found = {name: base.find(name) for name in wanted}
        unknown = [name for name, there in found.items() if there is None]
        if unknown:
            self._refuse_unknown(unknown)
        places = {name: there for name, there in found.items() if there is not None}
        linears: dict[str, LowRank] = {}
        for name, linear in adapter.linears.items():
            place = places[name + WEIGHT]
            ours = place.removesuffix(WEIGHT)
            self._check_once(ours, linears)
            self._check_order(ours)
            linears[ours] = self._linear(replace(linear, name=ours), place)
        replaced: dict[str, Values] = {}
        for name, values in adapter.replaced.items():
            self._check_once(places[name], replaced)
            self._check_order(places[name])
            replaced[places[name]] = self._values(values, self.shapes[places[name]], places[name])
        changed = {*replaced, *(name + WEIGHT for name in linears)}
        unties = base.is_tied and (
            base.head in changed
            or (base.embedding in changed and not adapter.config.ties_embeddings)
        )
        return replace(adapter, linears=linears, replaced=replaced, unties_head=unties)

    def _refuse_unknown(self, unknown: list[str]) -> NoReturn:
        known = sorted({name.removesuffix(WEIGHT) for name in self._matrices()})
        raise UserError(
            f"{self.adapter.directory}: the adapter changes {listed(unknown)}, which the model has "
            f"not, or which is not used here (its matrices: {listed(known)}); use the model that "
            f"the adapter was trained on{self._trained_on()}"
        )

    def _trained_on(self) -> str:
        name = self.adapter.config.base_model
        return f", {name[:MAX_SHOWN]!r}" if name else ""

    def _matrices(self) -> Iterator[str]:
        for name, shape in self.shapes.items():
            if len(shape) == 2:
                yield name

    def _check_once(self, name: str, known: Mapping[str, object]) -> None:
        if name in known:
            raise UserError(f"{self.adapter.directory}: two tensors of the adapter change {name}")

    def _check_order(self, name: str) -> None:
        """Refuses matrices of states whose rows or columns a GGUF file has in its own order."""
        config = self.base.config
        is_tiled = config.get_bool("linear_tiled_value_heads", False)
        is_apart = not config.get_bool("linear_grouped_rows", True) and ".in_proj_ba" in name
        if (is_tiled or is_apart) and ".linear_attn." in name:
            raise UserError(
                f"{self.adapter.directory}: the adapter changes {name}, whose heads a GGUF file "
                "has in another order than the checkpoint that the adapter was trained on; use "
                f"that checkpoint{self._trained_on()}"
            )

    def _linear(self, linear: LowRank, place: str) -> LowRank:
        """The product with its tensors fitted to the matrix `place`."""
        shape = self.shapes[place]
        if len(shape) != 2 or linear.is_table != (place in self.base.tables):
            kind = "an embedding" if linear.is_table else "a linear"
            raise UserError(
                f"{linear.a.where} is of {kind}, and {place} {list(shape)} is none; use the model "
                f"that the adapter was trained on{self._trained_on()}"
            )
        is_transposed = linear.is_table or place in self.base.transposed
        rows, columns = shape[::-1] if is_transposed else shape
        rank = linear.rank
        bias = linear.bias
        if bias is not None:
            if place.removesuffix(WEIGHT) + BIAS not in self.shapes:
                raise UserError(
                    f"{bias.where} is added to a bias, and {linear.name} has none; the adapter "
                    "cannot be merged: train it without lora_bias"
                )
            bias = self._values(bias, (rows,), linear.name)
        return replace(
            linear,
            a=self._values(linear.a, (rank, columns), linear.name),
            b=self._values(linear.b, (rows, rank), linear.name),
            magnitude=linear.magnitude and self._values(linear.magnitude, (rows,), linear.name),
            bias=bias,
            is_transposed=is_transposed,
        )

    def _values(self, values: Values, shape: Shape, name: str) -> Values:
        if values.shape != shape:
            raise UserError(
                f"{values.where} has the shape {list(values.shape)}, and {name} of the "
                f"model needs {list(shape)}; use the model that the adapter was trained on"
                f"{self._trained_on()}"
            )
        return values
