"""An adapter as its base has the network: ranks' parts joined, linears cut, or put into one.

What one library has in one matrix the other may have in several, and so may an older version. A
product of the whole is one of each of its parts, with the rows of B that are the part's and the
same A; products of parts are one of the whole, with their ranks side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from predict.errors import UserError
from predict.loading.adapters.base import WEIGHT, Base
from predict.loading.adapters.record import Adapter, LowRank
from predict.loading.adapters.values import Values, below_one_another, in_blocks
from predict.loading.arrays import Indices
from predict.loading.fused import BAICHUAN, PADDLENLP, rows_of
from predict.loading.paddle_checkpoint import TAKING_TURNS, rows_in_turns, separate
from predict.loading.parallel_parts import CHATGLM_V2, check_no_turns, split_of

T = TypeVar("T")
# Matrices of queries, keys and values, and what those are called where they stand alone.
TOGETHER = {
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("query", "key", "value"),
}


def crossed(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with one product for each of the base's linears, as far as they are known.

    Raises UserError for parts of ranks that do not fit together, and for what is ambiguous.
    """
    if adapter.config.format == "PaddleNLP":
        has_turns = _takes_turns(adapter, base)
        adapter = _of_all_ranks(adapter, base, has_turns)
        if has_turns:
            adapter = _in_order(adapter)
    return _put_together(_cut(adapter, base), base)


def _takes_turns(adapter: Adapter, base: Base) -> bool:
    """Whether rows of gate and up take turns: its other linears tell, or else the base does."""
    modules = [name for name, linear in adapter.linears.items() if _is_chatglm(linear.b)]
    modules += [n.rpartition(".")[0] for n, each in adapter.replaced.items() if _is_chatglm(each)]
    if separate(name + WEIGHT for name in modules):
        return True
    if any(name.endswith(".query_key_value") for name in modules):
        return False
    of_gate_and_up = [name for name in modules if name.endswith(TAKING_TURNS)]
    if of_gate_and_up and base.takes_turns is None:
        raise UserError(
            f"{adapter.directory}: {of_gate_and_up[0]} may be of either version of ChatGLM2, whose "
            "rows are in different orders, and neither the adapter nor the model tells which: run "
            "the PaddleNLP checkpoint that it was trained on, or export that with --lora_path"
        )
    return bool(of_gate_and_up and base.takes_turns)


def _is_chatglm(values: Values) -> bool:
    return values.name.startswith(CHATGLM_V2)


def _of_all_ranks(adapter: Adapter, base: Base, has_turns: bool) -> Adapter:
    """The adapter with the tensors of all tensor-parallel ranks."""

    def joined(linear: LowRank) -> LowRank:
        (rows, _), (_, columns) = linear.a.parts[0].shape, linear.b.parts[0].shape
        weight = linear.b.name.removesuffix(".lora_B") + WEIGHT
        split = split_of(weight, (rows, columns), len(linear.b.parts), base.config)
        is_column = split is not None and split.is_column
        return replace(
            linear,
            a=linear.a.joined(None if is_column else split),
            b=linear.b.joined(split if is_column else None),
            mixer=linear.mixer and linear.mixer.joined(None),
        )

    def whole(values: Values) -> Values:
        parts = values.parts
        return values.joined(split_of(values.name, parts[0].shape, len(parts), base.config))

    every = [*adapter.replaced.values(), *(linear.b for linear in adapter.linears.values())]
    if max((len(values.parts) for values in every), default=1) == 1:
        return adapter
    check_no_turns(adapter.directory, [values.name for values in every] if has_turns else [])
    return replace(
        adapter,
        linears={name: joined(linear) for name, linear in adapter.linears.items()},
        replaced={name: whole(values) for name, values in adapter.replaced.items()},
    )


def _in_order(adapter: Adapter) -> Adapter:
    """The adapter with rows of gate, then of up, where they take turns."""

    def in_order(values: Values) -> Values:
        rows = rows_in_turns(values.shape)
        return values if rows is None else values.cut(rows)

    return replace(
        adapter,
        linears={
            name: replace(linear, b=in_order(linear.b)) if name.endswith(TAKING_TURNS) else linear
            for name, linear in adapter.linears.items()
        },
        replaced={
            name: in_order(values) if name.rpartition(".")[0].endswith(TAKING_TURNS) else values
            for name, values in adapter.replaced.items()
        },
    )


def _cut(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with products of each linear where it has them of several at once."""

    def cuts(module: str, values: Values, kind: str) -> Mapping[str, Indices]:
        if base.find(f"{module}.{kind}") is not None:
            return {}
        found = rows_of(module, values.shape, lambda: base.config, table)
        return found if all(base.find(f"{name}.{kind}") for name in found) else {}

    table = PADDLENLP if adapter.config.format == "PaddleNLP" else BAICHUAN
    linears: dict[str, LowRank] = {}
    for name, linear in adapter.linears.items():
        of_each = {
            part: _rows(replace(linear, name=part), rows)
            for part, rows in cuts(name, linear.b, "weight").items()
        }
        _add(adapter, linears, of_each or {name: linear})
    replaced: dict[str, Values] = {}
    for name, values in adapter.replaced.items():
        module, _, kind = name.rpartition(".")
        found = cuts(module, values, kind)
        parts = {f"{part}.{kind}": values.cut(rows) for part, rows in found.items()}
        _add(adapter, replaced, parts or {name: values})
    return replace(adapter, linears=linears, replaced=replaced)


def _add(adapter: Adapter, known: dict[str, T], more: Mapping[str, T]) -> None:
    twice = known.keys() & more.keys()
    if twice:
        raise UserError(
            f"{adapter.directory}: two tensors of the adapter change {min(twice)}, one with others"
        )
    known.update(more)


def _rows(linear: LowRank, rows: Indices) -> LowRank:
    return replace(
        linear,
        b=linear.b.cut(rows),
        magnitude=linear.magnitude and linear.magnitude.cut(rows),
        bias=linear.bias and linear.bias.cut(rows),
    )


def _put_together(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with one product where the base has queries, keys and values in one matrix."""
    linears: dict[str, LowRank] = {}
    parts: dict[tuple[str, str], dict[str, LowRank]] = {}  # by the whole's module and its name
    for name, linear in adapter.linears.items():
        module, _, last = name.rpartition(".")
        wholes = [
            whole
            for whole, names in TOGETHER.items()
            # Elsewhere than in ChatGLM2, query_key_value has them head by head.
            if last in names and (whole == "W_pack" or _is_chatglm(linear.b))
        ]
        if wholes and base.find(name + WEIGHT) is None:
            parts.setdefault((module, wholes[0]), {})[last] = linear
        else:
            linears[name] = linear
    for (module, whole), found in parts.items():
        name = f"{module}.{whole}"
        place = base.find(name + WEIGHT)
        if place is None:
            linears |= {linear.name: linear for linear in found.values()}  # refused elsewhere
        else:
            each = [found.get(part) for part in TOGETHER[whole]]
            _add(adapter, linears, {name: _of_parts(each, place, base)})
    return replace(adapter, linears=linears)


def _of_parts(parts: list[LowRank | None], place: str, base: Base) -> LowRank:
    """The product of a matrix with queries, keys and values; None of those that stay as they are.

    Raises UserError where they are not as large.
    """
    num_rows = base.shapes[place][0]
    there = [part for part in parts if part is not None]
    num_queries = there[0].a.shape[1]  # heads make up the width in all these families
    num_keys = (num_rows - num_queries) // 2
    firsts = []
    for index, part in enumerate(parts):
        if part is None:
            continue
        size = num_keys if index else num_queries
        if part.a.shape[1] != num_queries:
            raise UserError(
                f"{part.a.where} has the shape {list(part.a.shape)}, and that of another part of "
                f"{place} has {num_queries} columns; save the adapter again"
            )
        if part.b.shape[0] != size or not part.is_plain or part.scaling != there[0].scaling:
            raise UserError(
                f"{part.b.where} has the shape {list(part.b.shape)}, and {size} rows of {place} "
                "are its own; plain products of one scaling fit there: use the model that the "
                "adapter was trained on"
            )
        firsts.append(num_queries + (index - 1) * num_keys if index else 0)
    ranks = [part.rank for part in there]
    mixers = [part.mixer for part in there if part.mixer is not None]
    before = [sum(ranks[:index]) for index in range(len(ranks))]
    return replace(
        there[0],
        name=place.removesuffix(WEIGHT),
        a=below_one_another(there[0].a.name, [part.a for part in there]),
        b=in_blocks(there[0].b.name, [part.b for part in there], firsts, num_rows),
        mixer=in_blocks(mixers[0].name, mixers, before, sum(ranks)) if mixers else None,
    )
