"""What a program's calls of the library say of blocks and weights, held against a network's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from predict.config.schemes import unfolded
from predict.errors import quoted
from predict.nn.blocks import Block
from predict.nn.kinds import known_kinds
from predict.ops.records import read_records, settings_of


class CalledBlocks(NamedTuple):
    """What a program's calls have."""

    schemes: set[str]  # of linears
    head: str | None  # the scheme of the LM head
    misfits: list[str]  # what no block of the network is, in words


def called_blocks(
    calls: Iterable[tuple[str, dict[str, Any]]], blocks: Sequence[Block]
) -> CalledBlocks:
    """What calls of operators (predict.loading.program_check.ProgramFile) have. blocks: known."""
    known = [(block.kind, settings_of(block)) for block in blocks]
    kinds, head = known_kinds(), None
    schemes, misfits = set[str](), list[str]()
    for operator, attributes in calls:
        if operator == "regatta_logits":
            head = attributes.get("scheme")
        elif "scheme" in attributes:
            schemes.add(unfolded(attributes["scheme"]))
        for kind, settings in read_records(attributes["blocks"]) if "blocks" in attributes else ():
            own = kinds.get(kind, Block)
            schemes |= {unfolded(settings.pop(n)) for n in own.linears if n in settings}
            fields = {n: v for n, v in settings.items() if n not in ("kv_format", "adapters")}
            alike = [fields for known_kind, fields in known if known_kind == kind]
            if alike and alike[0].get("form") == "cheaper":  # no flag asks for one
                fields["form"] = "cheaper"
            # The weights may have biases that config.json does not tell of.
            biases = {n: "1" for n in own.biases.values() if fields.get(n) == "1"}
            if fields not in [{**one, **biases} for one in alike]:
                misfits.append(f"a block of kind {quoted(kind)} is none of config.json's")
    return CalledBlocks(schemes, head, misfits)
