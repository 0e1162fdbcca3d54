"""How much drafts speed up code that the demo model has not seen: n-grams, Medusa and EAGLE-3.

python examples/drafted_code.py [REPETITIONS [PROMPTS [JSON_FILE]]]

Each prompt is the beginning of a definition in heldout.txt. Runs with and without drafts take
turns, at batch 1 and 8; the text of each is the same. How many drafts a step has, the engine says.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predict import LLM, EngineConfig, SamplingParams

HERE = Path(__file__).parent
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=128)
PROMPT_LENGTH = 64
# A way to draft, and how many drafts a step may have.
METHODS: dict[str, dict[str, Any]] = {
    "n-gram": {
        "speculate_method": "inference_with_reference",
        "speculate_max_ngram_size": 3,
        "speculate_max_draft_token_num": 10,
    },
    "Medusa": {
        "speculate_method": "medusa",
        "draft_model_name_or_path": str(HERE / "demo_drafts" / "medusa"),
        "speculate_max_draft_token_num": 2,
    },
    "EAGLE-3": {
        "speculate_method": "eagle",
        "draft_model_name_or_path": str(HERE / "demo_drafts" / "eagle"),
        "speculate_max_draft_token_num": 4,
    },
}


def heldout_prompts(llm: LLM, count: int) -> list[list[int]]:
    """The first tokens of `count` definitions, from all over the text."""
    text = (HERE / "demo_model" / "heldout.txt").read_text()
    places = [match.start() for match in re.finditer(r"^(?:def|class) ", text, re.MULTILINE)]
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(text[place : place + 600]) for place in places]
    long = [each[:PROMPT_LENGTH] for each in ids if len(each) >= PROMPT_LENGTH]
    return long[:: max(len(long) // count, 1)][:count]


def per_second(llm: LLM, prompts: Sequence[list[int]], expected: Sequence[Any]) -> float:
    """Tokens that come in a second."""
    begin = time.perf_counter()
    outputs = llm.generate(prompts, PARAMS)
    seconds = time.perf_counter() - begin
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    return sum(len(o.token_ids) for o in outputs) / seconds


def main() -> None:
    """Runs the example."""
    numbers = [int(word) for word in sys.argv[1:3]]
    repetitions, count = [*numbers, *(5, 24)[len(numbers) :]]
    plain = EngineConfig(
        model_name_or_path=str(HERE / "demo_model"),
        attention="append",
        max_length=256,
        prefix_caching=False,
    )
    found: dict[str, dict[str, Any]] = {}
    for batch_size in (1, 8):
        without = LLM(plain.changed(batch_size=batch_size))
        prompts = heldout_prompts(without, count)
        expected = without.generate(prompts, PARAMS)
        llms = {
            name: LLM(plain.changed(batch_size=batch_size, **more))
            for name, more in METHODS.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in ("plain", *llms)}
        for _ in range(repetitions):
            for name, llm in {"plain": without, **llms}.items():
                rates[name].append(per_second(llm, prompts, expected))
        for name, each in rates.items():
            row = found.setdefault(name, {})
            ratios = [own / other for own, other in zip(each, rates["plain"], strict=True)]
            row[f"tokens/s at {batch_size}"] = round(statistics.median(each), 1)
            row[f"times plain at {batch_size}"] = round(statistics.median(ratios), 3)
            if name in llms:
                stats = llms[name].stats()
                steps = stats.num_draft_spans or 1
                row[f"tokens per step with drafts at {batch_size}"] = round(
                    1 + stats.num_accepted_draft_tokens / steps, 3
                )
                row[f"right by place at {batch_size}"] = [
                    round(number / steps, 3) for number in stats.num_accepted_by_position
                ]
    for name, row in found.items():
        print(f"{name}: {json.dumps(row)}")
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
