"""Holds two conversations through a chat template, whose second answers depend on the first ones.

The demo model only knows how to write Python: a question is the head of a function, and the answer
its body. Both conversations end in the same question.

python examples/chat.py [MODEL_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

from predict import LLM, EngineConfig, SamplingParams

HERE = Path(__file__).parent
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):"""
QUEUE = """class Queue:
    def __init__(self):
        self.jobs = []

    def submit(self, job):"""
LAST = "    def __len__(self):"


def main() -> None:
    """Runs the example."""
    given = sys.argv[1:]
    llm = LLM(
        EngineConfig(
            model_name_or_path=given[0] if given else str(HERE / "demo_model"),
            # A model made for chats brings its own.
            chat_template=None if given else str(HERE / "demo_template.jinja"),
            attention="append",
            max_length=512,
        )
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=40, stop=("\n\n", "\n    def"))
    for first in (STACK, QUEUE):
        messages: list[dict[str, str]] = []
        for question in (first, LAST):
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, params)
            messages.append({"role": "assistant", "content": output.text})
            print(f"--- user\n{question}\n--- assistant\n{output.text}")


if __name__ == "__main__":
    main()
