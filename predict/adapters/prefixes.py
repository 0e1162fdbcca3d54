"""The prefixes of prefix tuning that requests may begin with: whose cache blocks hold them.

A prefix of P tokens has keys and values and no token ids. It lies in cache blocks that are written
once and held for good. Tables of its requests begin with its whole blocks; the last one, where P is
no multiple of a block, is copied for each request, which goes on in the copy.

A draft model has no prefix, and its cache lies in blocks of the same numbers. A token's place in
its own cache begins at 0, which is the first slot of a block: there the blocks behind the partial
one hold its cache, whole blocks of a request's tokens. Each of them is behind, or at, the block in
which the target has its last token, so that requests share it where they share that one. Imports no
Paddle.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

_keys = itertools.count(1)


@dataclass(frozen=True, eq=False)
class ServedPrefix:
    """A prefix in the cache.

    block_ids: that it fills. partial: the block behind them that its last `num_partial` tokens
    are in; None where there are none. num_reserved: slots of a request's blocks that are not
    counted for its own tokens.
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
        """What keeps its requests' cache blocks apart from those of others."""
        return b"prefix" + self.key.to_bytes(8, "little") if self.num_tokens else b""


NO_PREFIX = ServedPrefix("", 0)


def prefix_in(
    name: str, num_tokens: int, block_ids: list[int], block_size: int, for_drafts: bool = False
) -> ServedPrefix:
    """The prefix that these blocks, all it needs, are for.

    for_drafts: a draft model's cache lies in its requests' blocks.
    """
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
    """A request's blocks as a draft model's cache has them: those of its own tokens."""
    num_before = len(prefix.all_block_ids)
    return block_ids[num_before:] if num_before else block_ids
