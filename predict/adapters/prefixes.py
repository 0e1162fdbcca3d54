"""The prefixes of prefix tuning that requests may begin with: whose cache blocks hold them.

A prefix of P tokens has keys and values and no token ids. It lies in cache blocks that are written
once and held for good. Tables of its requests begin with its whole blocks; the last one, where P is
no multiple of a block, is copied for each request, which goes on in the copy. Imports no Paddle.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

_keys = itertools.count(1)


@dataclass(frozen=True, eq=False)
class ServedPrefix:
    """A prefix in the cache.

    block_ids: that it fills. partial: the block behind them that its last `num_partial` tokens
    are in; None where there are none.
    """

    name: str
    num_tokens: int
    block_ids: tuple[int, ...] = ()
    partial: int | None = None
    num_partial: int = 0
    key: int = field(default_factory=lambda: next(_keys))

    @property
    def all_block_ids(self) -> list[int]:
        """Its blocks in order, the partial one included."""
        return [*self.block_ids, *(() if self.partial is None else (self.partial,))]

    @property
    def salt(self) -> bytes:
        """What keeps its requests' cache blocks apart from those of others."""
        return b"prefix" + self.key.to_bytes(8, "little") if self.num_tokens else b""


NO_PREFIX = ServedPrefix("", 0)


def prefix_in(name: str, num_tokens: int, block_ids: list[int], block_size: int) -> ServedPrefix:
    """The prefix that these blocks, all it needs, are for."""
    num_whole, num_partial = divmod(num_tokens, block_size)
    return ServedPrefix(
        name,
        num_tokens,
        tuple(block_ids[:num_whole]),
        block_ids[num_whole] if num_partial else None,
        num_partial,
    )
