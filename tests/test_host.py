"""What the process takes of its host."""

from __future__ import annotations

import gc

from predict import host


def test_frozen_objects_are_left_out_until_the_end() -> None:
    kept: list[list[int]] = [[] for _ in range(1000)]
    with host.frozen_objects():
        assert gc.get_freeze_count() >= len(kept)
    assert gc.get_freeze_count() == 0
