"""Ownership of the cache's blocks: reference counts, prefix cache, least-recently-used eviction.

Counts blocks only; the runner writes their content. Every block is in exactly one place:

    used (ref count > 0)  <--allocate--  free, without cached content  (taken first, a stack)
                          <--acquire---  free, cached content kept     (evicted oldest first)

Prefix cache after vLLM's hash chain: a full block is known by
digest(parent digest + its token ids), so equal digests mean equal text from the first token on.
Ours compares the token ids as well, and the salt is the root of the chain.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

_DIGEST_BYTES = 32
# Whether a block has all that a request needs which matches it by this digest.
Suits = Callable[[int, bytes], bool]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


class BlockManager:
    """Hands out block ids 0..num_blocks-1 and remembers which full blocks hold which tokens.

    Only the owner that got a block from `allocate` may write it, until it is published; blocks from
    `acquire` are shared and read-only. A copy-on-write fork of a sequence is `acquire` of its
    blocks and one `allocate` for the partial last one.

    `block_size` in tokens. `prefix_caching` False forgets content on free. Managers with different
    `salt` never produce equal digests. `lookahead`: tokens behind a block on which its content
    depends, too: blocks match where these are the same.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        salt: bytes | str = b"",
        lookahead: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks {num_blocks}, block_size {block_size} (allowed: at least 1 each)"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.lookahead = lookahead
        self._salt = salt.encode() if isinstance(salt, str) else salt
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: lowest id on top
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of: dict[bytes, int] = {}  # digest -> block that holds that prefix
        # For a block in _block_of: its digest, and the bytes that were hashed.
        self._content: list[tuple[bytes, bytes] | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out; those with cached content are among them."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds a reference to."""
        return self.num_blocks - self.num_free_blocks

    def ref_count(self, block_id: int) -> int:
        """How many sequences use the block."""
        return self._ref_counts[block_id]

    def match_prefix(
        self,
        token_ids: Sequence[int],
        digests: list[bytes] | None = None,
        salt: bytes = b"",
        offset: int = 0,
        suits: Suits | None = None,
    ) -> tuple[list[int], int]:
        """(block_ids, num_cached_tokens) of the longest cached prefix of `token_ids`.

        Whole blocks only, and never all of `token_ids`: at least one token is left to compute for
        its logits. Takes no reference: `acquire` the blocks before the next `allocate`.

        `digests`: of the sequence's leading blocks, extended in place; the caller keeps one list
        per sequence, so that each token is hashed once. `salt` separates sequences of one manager
        and must not change over a sequence's life. `offset`: slots at the beginning of the first
        block without tokens, with the same content for all sequences of that salt. `suits`: blocks
        for which it is false do not match; None: all may.
        """
        if not self.prefix_caching:
            return [], 0
        digests = [] if digests is None else digests
        block_ids: list[int] = []
        most = offset + len(token_ids) - max(self.lookahead, 1)
        for index in range(most // self.block_size):
            # One block at a time: a miss on the first spares hashing a long prompt.
            hashed = self._hashed_bytes(digests, token_ids, index, salt, offset)
            block_id = self._block_of.get(digests[index])
            if block_id is None or not (suits is None or suits(block_id, digests[index])):
                break
            content = self._content[block_id]
            # Token ids compared: a digest may collide, and wrong text must not be the price.
            if content is None or content[1] != hashed:
                break
            block_ids.append(block_id)
        return block_ids, max(len(block_ids) * self.block_size - offset, 0)

    def can_allocate(self, num_new_blocks: int, shared: Sequence[int] = ()) -> bool:
        """Whether `acquire(shared)` followed by `allocate(num_new_blocks)` would succeed."""
        ref_counts = self._ref_counts
        num_taken = sum(ref_counts[block_id] == 0 for block_id in shared)
        return num_new_blocks + num_taken <= self.num_free_blocks

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each block, which must be cached (from `match_prefix`) or used.

        Raises RuntimeError for a block that is neither: its content is gone.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._cached_free:
                    raise RuntimeError(f"block {block_id} is free and holds no cached prefix")
                del self._cached_free[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, num_new_blocks: int) -> list[int]:
        """Block ids for one owner to write; evicts the oldest cached blocks where it must.

        Raises RuntimeError when fewer than `num_new_blocks` are free; nothing is taken then.
        """
        if num_new_blocks > self.num_free_blocks:
            raise RuntimeError(
                f"{num_new_blocks} blocks wanted, {self.num_free_blocks} of {self.num_blocks} free"
            )
        block_ids = []
        for _ in range(num_new_blocks):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._cached_free.popitem(last=False)
                self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def publish(
        self,
        block_ids: Sequence[int],
        token_ids: Sequence[int],
        digests: list[bytes],
        first: int,
        last: int,
        salt: bytes = b"",
        offset: int = 0,
        suits: Suits | None = None,
    ) -> None:
        """Makes blocks `first`..`last - 1` of a sequence, now fully computed, matchable.

        The other arguments are those of the whole sequence (see `match_prefix`). The blocks must
        not be written again. A block whose prefix another block already holds stays private, unless
        that one does not suit: it is forgotten.
        """
        if not self.prefix_caching:
            return
        for index in range(first, last):
            hashed = self._hashed_bytes(digests, token_ids, index, salt, offset)
            digest, block_id = digests[index], block_ids[index]
            holder = self._block_of.get(digest)
            if holder is not None and suits is not None and not suits(holder, digest):
                self._forget(holder)
                if holder in self._cached_free:
                    del self._cached_free[holder]
                    self._free.append(holder)
            if digest not in self._block_of:
                self._block_of[digest] = block_id
                self._content[block_id] = (digest, hashed)

    def digest(
        self, token_ids: Sequence[int], digests: list[bytes], num_blocks: int, salt: bytes = b""
    ) -> bytes:
        """The digest of a sequence's first `num_blocks` blocks; `digests`: see `match_prefix`."""
        for index in range(len(digests), num_blocks):
            self._hashed_bytes(digests, token_ids, index, salt, 0)
        return digests[num_blocks - 1]

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference from each block; published ones keep their content until evicted.

        `block_ids` in sequence order. Raises RuntimeError for a block that is free already.
        """
        # Last block first: it becomes the older one, so a chain is evicted from its tail and
        # what remains can still be matched from its head.
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] = count
            if count == 0:
                if self._content[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached_free[block_id] = None

    def forget_cached(self) -> None:
        """Forgets what free blocks hold, and lets nobody match what used ones do."""
        for block_id in range(self.num_blocks):
            self._forget(block_id)
        self._free += reversed(self._cached_free)
        self._cached_free.clear()

    def check(self, num_holders: Mapping[int, int]) -> None:
        """Raises RuntimeError unless each block is held by so many, and all others are free."""
        for block_id, count in enumerate(self._ref_counts):
            if count != num_holders.get(block_id, 0):
                raise RuntimeError(
                    f"block {block_id} has {count} references, and "
                    f"{num_holders.get(block_id, 0)} sequences hold it"
                )
        free = [*self._free, *self._cached_free]
        if len(free) != len(set(free)) or any(block in num_holders for block in free):
            raise RuntimeError("a block is free twice, or free and used")
        if len(free) + len(num_holders) != self.num_blocks:
            raise RuntimeError(
                f"{len(free)} free and {len(num_holders)} used blocks of {self.num_blocks}"
            )

    def _hashed_bytes(
        self,
        digests: list[bytes],
        token_ids: Sequence[int],
        index: int,
        salt: bytes,
        offset: int,
    ) -> bytes:
        """The bytes that block `index`'s digest hashes; appends the digest where it is missing."""
        parent = digests[index - 1] if index else self._root(salt)
        end = (index + 1) * self.block_size - offset
        begin = max(end - self.block_size, 0)
        hashed = parent + array("i", token_ids[begin : end + self.lookahead]).tobytes()
        if index == len(digests):
            digests.append(_digest(hashed))
        return hashed

    def _root(self, salt: bytes) -> bytes:
        # The length keeps pairs of salts apart whose joined bytes are the same.
        return _digest(len(self._salt).to_bytes(8, "little") + self._salt + salt)

    def _forget(self, block_id: int) -> None:
        content = self._content[block_id]
        if content is not None:
            del self._block_of[content[0]]
            self._content[block_id] = None
