"""Where outputs may not go, and model folders that are not whole."""

from __future__ import annotations

from tests.hostile.case import Case

CASES = [
    Case("a good run", "predict", code=0, says=("2 of 2 results",), writes_output=True),
    Case("a good export", "export", code=0, writes_output=True),
    Case("a good quantization", "quantize", code=0, writes_output=True),
]
