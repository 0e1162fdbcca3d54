"""Completes a few prompts with the demo model; then several answers to one of them, the best first.

python examples/generate.py [MODEL_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

from predict import LLM, EngineConfig, SamplingParams

PROMPTS = ["def binary_search(items, target):", "class Stack:", "import os\n"]


def main() -> None:
    """Runs the example."""
    directory = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
    llm = LLM(
        EngineConfig(
            model_name_or_path=directory,
            attention="append",
            batch_size=8,
            max_length=256,
        )
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=48, stop=("\n\n\n", "\nclass "))
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
        print(f"--- {output.finish_reason}, {len(output.token_ids)} tokens\n{prompt}{output.text}")

    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=1, n=2, best_of=6, max_new_tokens=24)
    (output,) = llm.generate(PROMPTS[:1], sampled)
    for answer in output.outputs:
        print(f"--- {answer.index}: log-probability {answer.cumulative_logprob:.2f}")
        print(PROMPTS[0] + answer.text)


if __name__ == "__main__":
    main()
