"""Rows of the table of inputs in the buffers of recorded steps."""

from __future__ import annotations

from pathlib import Path

from predict.device import devices
from tests.support.added_fields import NUM_TOKENS, PROMPTS, came_of


def test_a_row_is_all_that_graphs_need(tmp_path: Path, gpu: devices.Device) -> None:
    result = came_of("gpu", tmp_path)
    assert result["dynamic"] == came_of("cpu", tmp_path / "cpu")["dynamic"]
    lens = [len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS]
    assert result["positions"] == [*(n - 1 for n in lens), 0]
    assert result["marks"] == [*(2 * (n - 1) for n in lens), 5]  # and the padding of the row
    assert result["context_lens"] == result["more_lens"] == [*lens, 1]
