"""Prefixes of prefix tuning that requests may begin with, and the cache blocks that hold them.

A prefix of P tokens has keys and values and no token ids. Its cache blocks are written once and
stay pinned. Tables of its requests begin with its whole blocks; where P is no multiple of a block,
each request gets a copy of the last block and continues in the copy.

A draft model has no prefix, and its cache has blocks with the same numbers. Its token positions
begin at 0, at the first slot of a block: the blocks behind the partial one hold whole blocks of a
request's tokens. Each of them is at or behind the block with the target's last token of it, so
requests share it where they share that block. Imports no Paddle.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

_keys = itertools.count(1)


@dataclass(frozen=True, eq=False)
class ServedPrefix:
    """A prefix in the cache.

    block_ids: its full blocks. partial: the block with its last `num_partial` tokens, or None.
    num_reserved: slots of a request's blocks that its own tokens do not use.
    """

    name: str
    num_tokens: int
    block_ids: tuple[int, ...] = ()
    partial: int | None = None
    num_partial: int = 0
    num_reserved: int = 0
    key: int = field(default_factory=lambda: next(_keys))

    @property
    def all_block_ids(self) -> list[int]:
        """Its blocks in order, the partial one included."""
        return [*self.block_ids, *(() if self.partial is None else (self.partial,))]

    @property
    def salt(self) -> bytes:
        """Separates its requests' cache blocks from those of other requests."""
        return b"prefix" + self.key.to_bytes(8, "little") if self.num_tokens else b""


NO_PREFIX = ServedPrefix("", 0)


def prefix_in(
    name: str, num_tokens: int, block_ids: list[int], block_size: int, for_drafts: bool = False
) -> ServedPrefix:
    """A prefix in these blocks. for_drafts: a draft model's cache shares its requests' blocks."""
    num_whole, num_partial = divmod(num_tokens, block_size)
    return ServedPrefix(
        name,
        num_tokens,
        tuple(block_ids[:num_whole]),
        block_ids[num_whole] if num_partial else None,
        num_partial,
        len(block_ids) * block_size if for_drafts else num_tokens,
    )


def draft_table(block_ids: list[int], prefix: ServedPrefix) -> list[int]:
    """The blocks of a request in a draft model's cache, which has no prefix."""
    num_before = len(prefix.all_block_ids)
    return block_ids[num_before:] if num_before else block_ids
