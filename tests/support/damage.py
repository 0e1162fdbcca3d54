"""Files that are almost right."""

from __future__ import annotations

import random
import struct


def changed_bytes(data: bytes, dice: random.Random) -> bytes:
    """Some bits flipped, a part cut, doubled, moved or replaced."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randrange(len(made) + 1), dice.choice((1, 2, 8, 40))
        kind = dice.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del made[at:]
        elif kind == 2:
            del made[at : at + length]
        elif kind == 3:
            made[at : at + length] = dice.randbytes(length)
        elif kind == 4:
            made[at:at] = made[dice.randrange(len(made) + 1) :][:length]
        else:
            number = dice.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            made[at : at + 8] = struct.pack("<Q", number)
    return bytes(made)
