"""Records what lm-evaluation-harness finds with transformers, for tasks of local JSON.

Needs lm-eval, torch 2.13, transformers 5 and accelerate; from the repository's root:

    python -m tests.golden_evaluate.make

- documents.jsonl: places in `heldout.txt`, each with the text that follows there, or with what the
  model itself says greedily.
- scores.json: by task, the metrics, and what each document got: [log-likelihood, whether the
  continuation is greedy], or the text. On the CPU in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "examples" / "demo_model"
DOCUMENTS, SCORES = HERE / "documents.jsonl", HERE / "scores.json"
TASKS = ("demo_loglikelihood", "demo_generate")
NUM_DOCUMENTS = 24
CONTEXT, CONTINUATION = 240, 30  # characters
NUM_GREEDY_TOKENS = 24  # as demo_generate.yaml has


def evaluated(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """By task, the metrics and the answers to each document. model, settings: as lm_eval has."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=settings,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
        bootstrap_iters=0,
    )
    made = {}
    for task in TASKS:
        metrics = {
            name.removesuffix(",none"): value
            for name, value in found["results"][task].items()
            if isinstance(value, float) and "stderr" not in name
        }
        answers = [sample["resps"][0][0] for sample in found["samples"][task]]
        made[task] = {"metrics": metrics, "answers": answers}
    return made


def documents() -> list[dict[str, str]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    step = len(text) // NUM_DOCUMENTS
    made = []
    for index in range(NUM_DOCUMENTS):
        end = text.index("\n", index * step + CONTEXT) + (0 if index % 4 else -4)
        context, continuation = text[end - CONTEXT : end], text[end : end + CONTINUATION]
        if index % 2:
            ids = tokenizer(context, return_tensors="pt")
            said = model.generate(**ids, max_new_tokens=NUM_GREEDY_TOKENS, do_sample=False)
            continuation = tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
        made.append({"context": context, "continuation": continuation})
    return made


def main() -> None:
    """Records; with words MODEL SETTINGS FILE writes what that model finds into the file."""
    if sys.argv[1:]:
        model, settings, file = sys.argv[1:]
        Path(file).write_text(json.dumps(evaluated(model, json.loads(settings))))
        return
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in documents()]
    DOCUMENTS.write_text("".join(rows), encoding="utf-8")
    scores = evaluated("hf", {"pretrained": str(DEMO), "dtype": "float32", "device": "cpu"})
    SCORES.write_text(json.dumps(scores, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
