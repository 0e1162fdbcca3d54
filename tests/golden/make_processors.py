"""Makes processors.npz: what Hugging Face transformers' logits processors leave of some logits.

Needs torch and transformers 5; the tests that read the file need neither:

    python tests/golden/make_processors.py

- "logits" [num_rows, vocab_size] float32, peaked, flat and in between;
- "history" [num_rows, length] int32, of which the first `NUM_PROMPT` are the prompt; from few
  tokens, so that n-grams come twice;
- "cases": JSON, a list of {"name", "params"} with the fields of SamplingParams;
- "scores" [num_cases, num_rows, vocab_size] float32: what transformers draws from the softmax of.

The processors and their order are those that transformers' own `generate` takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent

NUM_ROWS, VOCAB_SIZE = 8, 97
LENGTH, NUM_PROMPT = 40, 25
EOS = 3

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_p small": {"top_p": 0.05},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "typical_p small": {"typical_p": 0.1},
    "typical_p large": {"typical_p": 0.97},
    "typical_p hot": {"typical_p": 0.6, "temperature": 1.7},
    "top_k, top_p": {"top_k": 20, "top_p": 0.7, "temperature": 1.3},
    "top_p, min_p": {"top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "all warpers": {
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "typical_p": 0.8,
    },
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_penalty below 1": {"repetition_penalty": 0.8},
    "no_repeat_ngram 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram 3": {"no_repeat_ngram_size": 3},
    "no_repeat_ngram long": {"no_repeat_ngram_size": LENGTH + 1},
    "logit_bias": {"logit_bias": {"5": 4.0, "17": -3.5, "90": 100.0, "0": -100.0}},
    "bad words": {"bad_words": [[11], [2, 12], [7, 1, 13], [EOS], [EOS, 14]]},
    "min_length": {"min_length": LENGTH - NUM_PROMPT + 1},
    "min_length reached": {"min_length": LENGTH - NUM_PROMPT},
    "penalty after bias": {"logit_bias": {"1": 2.5, "8": -2.5}, "repetition_penalty": 1.5},
    "everything": {
        "logit_bias": {"1": 2.5, "30": 3.0},
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "bad_words": [[30], [2, 31]],
        "min_length": 20,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.9,
    },
}


def generation_config(params: dict[str, Any]) -> GenerationConfig:
    """SamplingParams' fields in transformers' words."""
    values = dict(params)
    words = {
        "sequence_bias": {(int(k),): v for k, v in values.pop("logit_bias", {}).items()} or None,
        "bad_words_ids": values.pop("bad_words", None),
        "min_new_tokens": values.pop("min_length", None),
    }
    values.setdefault("top_k", 0)
    return GenerationConfig(
        do_sample=True, eos_token_id=EOS, pad_token_id=0, max_new_tokens=64, **words, **values
    )


def main() -> None:
    """Writes the file."""
    rng = np.random.default_rng(17)
    spread = np.array([0.01, 0.5, 1, 1.5, 2, 3, 5, 8])[:, None]
    logits = (rng.standard_normal((NUM_ROWS, VOCAB_SIZE)) * spread).astype(np.float32)
    history = rng.integers(0, 10, (NUM_ROWS, LENGTH))
    # Ends of histories that complete words of two and three tokens.
    history[::2, -1] = 2
    history[1::4, -2:] = (7, 1)
    history[3::4, -1] = EOS
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    scores = []
    for params in CASES.values():
        config = generation_config(params)
        model._prepare_special_tokens(config, device="cpu")
        processors = model._get_logits_processor(config, input_ids_seq_length=NUM_PROMPT)
        scores.append(processors(torch.tensor(history), torch.tensor(logits)).numpy())
    np.savez_compressed(
        HERE / "processors.npz",
        logits=logits,
        history=history.astype(np.int32),
        scores=np.array(scores, np.float32),
        cases=json.dumps([{"name": name, "params": CASES[name]} for name in CASES]),
        num_prompt=NUM_PROMPT,
        eos_token_id=EOS,
    )


if __name__ == "__main__":
    main()
