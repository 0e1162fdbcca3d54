"""Holds a conversation through a chat template. The demo model only knows how to write Python.

python examples/chat.py [MODEL_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

from predict import LLM, EngineConfig, SamplingParams

HERE = Path(__file__).parent
QUESTIONS = ["Write a function that adds two numbers.", "Now one that multiplies them."]


def main() -> None:
    """Runs the example."""
    given = sys.argv[1:]
    llm = LLM(
        EngineConfig(
            model_name_or_path=given[0] if given else str(HERE / "demo_model"),
            # A model made for chats brings its own.
            chat_template=None if given else str(HERE / "demo_template.jinja"),
            inference_model=True,
            attention="append",
            max_length=512,
        )
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=40, stop="\n\n")
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.text})
        print(f"--- {question}\n{output.text}")


if __name__ == "__main__":
    main()
