"""How much drafts speed up text that repeats: the demo model writes edited copies of its answers.

python examples/edited_copies.py [REPETITIONS [PROMPTS]]

Each prompt is an earlier answer, and the beginning of a copy in which one name differs. Runs with
and without drafts take turns; the text of each is the same.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path

from predict import LLM, EngineConfig, SamplingParams

HERE = Path(__file__).parent
METHODS = ("inference_with_reference", "lookahead")
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)


def edited_copies(llm: LLM, count: int | None) -> list[str]:
    """The prompts, all of them or `count`."""
    sources = (HERE / "prompts.jsonl").read_text().splitlines()[:count]
    starts = [json.loads(line)["src"] for line in sources]
    prompts = []
    for start, answer in zip(starts, llm.generate(starts, PARAMS), strict=True):
        text = start + answer.text
        name = re.search(r"(?:def|class) (\w+)", text)
        copy = text.replace(name[1], name[1] + "_copy") if name else "# copy\n" + text
        prompts.append(f"{text}\n\n\n{copy[: max(len(start), 40)]}")
    return prompts


def main() -> None:
    """Runs the example."""
    plain = EngineConfig(
        model_name_or_path=str(HERE / "demo_model"),
        attention="append",
        max_length=1024,
        prefix_caching=False,
        speculate_max_draft_token_num=10,
        speculate_max_ngram_size=3,
    )
    without = LLM(plain)
    numbers = [int(word) for word in sys.argv[1:]]
    prompts = edited_copies(without, numbers[1] if len(numbers) > 1 else None)
    llms = {method: LLM(plain.changed(speculate_method=method)) for method in METHODS}
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    rates = []
    for _ in range(numbers[0] if numbers else 5):
        begin = time.perf_counter()
        expected = without.generate(prompts, PARAMS)
        seconds = time.perf_counter() - begin
        rates.append(len(prompts) * PARAMS.max_new_tokens / seconds)  # type: ignore[operator]
        for method, llm in llms.items():
            begin = time.perf_counter()
            outputs = llm.generate(prompts, PARAMS)
            ratios[method].append(seconds / (time.perf_counter() - begin))
            assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    print(f"without drafts: {statistics.median(rates):.0f} tokens/s")
    for method, found in ratios.items():
        stats = llms[method].stats()
        length = stats.num_accepted_draft_tokens / stats.num_draft_spans
        print(
            f"{method}: {statistics.median(found):.2f} times as many ({min(found):.2f} to "
            f"{max(found):.2f}); {length:.2f} drafts accepted per step with drafts"
        )


if __name__ == "__main__":
    main()
