"""Completes a few prompts with the demo model, then streams one.

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
            inference_model=True,
            attention="append",
            batch_size=len(PROMPTS),
            max_length=256,
        )
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=48)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
        print(f"--- {output.finish_reason}, {len(output.token_ids)} tokens\n{prompt}{output.text}")

    print("--- streamed, sampled\n" + PROMPTS[0], end="")
    sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_new_tokens=48)
    for piece in llm.stream(PROMPTS[0], sampled):
        print(piece.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
