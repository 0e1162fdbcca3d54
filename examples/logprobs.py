"""How likely the model finds a text and its own answer, token by token.

python examples/logprobs.py [MODEL_DIR]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from predict import LLM, EngineConfig, SamplingParams

PROMPT = "def add(a, b):\n    return a"


def main() -> None:
    """Runs the example."""
    directory = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
    llm = LLM(EngineConfig(model_name_or_path=directory, attention="append", max_length=128))
    params = SamplingParams(temperature=0.0, max_new_tokens=6, logprobs=3, prompt_logprobs=0)
    (output,) = llm.generate([PROMPT], params)
    assert llm.tokenizer is not None
    assert output.prompt_logprobs is not None

    known = [entry for entry in output.prompt_logprobs if entry is not None]
    total = sum(next(iter(entry.values())).logprob for entry in known)
    print(f"perplexity of the prompt: {math.exp(-total / len(known)):.2f}")
    for entry in output.outputs[0].logprobs or ():
        tokens = [
            f"{llm.tokenizer.decode([token])!r} {100 * math.exp(each.logprob):.1f}%"
            for token, each in entry.items()
        ]
        print(f"{tokens[0]:24} of {', '.join(tokens[1:])}")


if __name__ == "__main__":
    main()
