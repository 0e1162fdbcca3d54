"""Makes embeddings.npz: hidden states of Hugging Face transformers on the golden checkpoints.

Needs torch and transformers 5; the tests that read the file need neither:

    python tests/golden/make_embeddings.py

Of each case and of each prompt of its golden.json, in float32 on the CPU with eager attention:
"CASE/last" and "CASE/mean" [prompts, H], the last token's hidden state behind the last norm, and
the mean over all tokens. "CASE/layers.0" [T, H] of the last prompt, behind the first layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

from tests.support.packed import unpack

HERE = Path(__file__).resolve().parent
CASES = ("gemma2_9b", "gpt2_small", "llama_gqa", "mixtral_8x7b", "opt_350m", "qwen3")


def main() -> None:
    unpack(HERE)
    made: dict[str, Any] = {}
    for case in CASES:
        prompts = json.loads((HERE / case / "golden.json").read_text())["prompts"]
        model = AutoModel.from_pretrained(
            HERE / case, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        last, mean = [], []
        for prompt in prompts:
            with torch.no_grad():
                found = model(torch.tensor([prompt]), output_hidden_states=True)
            hidden = found.last_hidden_state[0]
            last.append(hidden[-1].numpy())
            mean.append(hidden.mean(0).numpy())
        made[f"{case}/last"], made[f"{case}/mean"] = np.stack(last), np.stack(mean)
        made[f"{case}/layers.0"] = found.hidden_states[1][0].numpy()
    np.savez_compressed(HERE / "embeddings.npz", **made)


if __name__ == "__main__":
    main()
