"""Prints an answer as it grows, then two prompts side by side.

python examples/stream.py [MODEL_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

from predict import LLM, EngineConfig, SamplingParams

PROMPTS = ["def binary_search(items, target):", "class Stack:"]


def main() -> None:
    """Runs the example."""
    directory = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
    llm = LLM(
        EngineConfig(
            model_name_or_path=directory,
            attention="append",
            batch_size=len(PROMPTS),
            max_length=256,
        )
    )
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_new_tokens=40)
    print(PROMPTS[0], end="")
    for piece in llm.stream(PROMPTS[0], params):
        print(piece.text, end="", flush=True)
    print()

    texts = list(PROMPTS)
    for piece in llm.stream(PROMPTS, params):
        texts[piece.prompt_index] += piece.text
        if piece.finish_reason is not None:
            print(f"--- {piece.finish_reason}\n{texts[piece.prompt_index]}")


if __name__ == "__main__":
    main()
