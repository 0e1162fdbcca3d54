"""Makes beams.json: what Hugging Face transformers' beam search finds on the golden checkpoints.

Needs torch and transformers 5; the tests that read the file need neither:

    python tests/golden/make_beams.py

One entry per search: "model" (a folder beside this file, or examples/demo_model), "prompt" (token
ids), "num_beams", "length_penalty", "early_stopping", "num_return_sequences", "repetition_penalty",
"min_new_tokens", "max_new_tokens", "eos" (token ids that end a hypothesis), and the result, best
first: "sequences" (generated token ids) and "scores".

Everything is computed on the CPU in float32 with eager attention. A search stays out when noise on
its logits, far above what another order of summation makes, changes what it finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

from tests.support.packed import pack, unpack

HERE = Path(__file__).resolve().parent
DEMO = "examples/demo_model"
NOISE = 2e-4  # float32 sums in another order differ by about 1e-5 here
NUM_NOISY_RUNS = 6
MAX_NEW_TOKENS = 20
PER_SETTING = 2  # prompts for each model and setting

SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 8, "num_return_sequences": 3},
    *(
        {
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "num_return_sequences": num_beams // 2,
            "num_eos": num_eos,
        }
        for num_beams, length_penalty, num_eos in (
            (2, 0.6, 1),
            (2, 2.0, 2),
            (4, 0.6, 2),
            (4, 1.0, 1),
            (4, 2.0, 1),
            (8, 0.6, 1),
            (8, 1.0, 2),
            (8, 2.0, 1),
            (4, -0.5, 1),
        )
        for early_stopping in (False, True, "never")
    ),
    {"num_beams": 4, "repetition_penalty": 1.3, "num_return_sequences": 2},
    {"num_beams": 4, "repetition_penalty": 0.8, "num_eos": 1},
    {"num_beams": 4, "min_new_tokens": 9, "num_eos": 1, "early_stopping": True},
    {"num_beams": 8, "min_new_tokens": 6, "num_eos": 2, "num_return_sequences": 8},
    {
        "num_beams": 4,
        "min_new_tokens": 5,
        "num_eos": 2,
        "repetition_penalty": 1.2,
        "length_penalty": 2.0,
        "num_return_sequences": 4,
    },
)
DEFAULTS: dict[str, Any] = {
    "length_penalty": 1.0,
    "early_stopping": False,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "max_new_tokens": MAX_NEW_TOKENS,
}


class Noise(LogitsProcessor):
    """Adds a little to every log-probability, before all other processors."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores with noise; seeded, so a run can be repeated."""
        return scores + NOISE * torch.randn(scores.shape, generator=self.generator)


def search(
    model: Any, prompt: list[int], eos: list[int], settings: dict[str, Any], seed: int | None = None
) -> tuple[list[list[int]], list[float]]:
    """Sequences and scores; seed: of the noise, None for none."""
    config = GenerationConfig(
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{key: value for key, value in settings.items() if key != "min_new_tokens" or value},
    )
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # token 0 is no padding here
        generation_config=config,
        logits_processor=[] if seed is None else [Noise(seed)],
    )
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    rows = found.sequences[:, len(prompt) :].tolist()
    return [
        row[:length] for row, length in zip(rows, lengths, strict=True)
    ], found.sequences_scores.tolist()


def searches(model: Any, prompts: list[list[int]], own_eos: list[int]) -> Iterator[dict[str, Any]]:
    """Entries for every setting; own_eos: the model's, where it has learned to write one."""
    for changes in SETTINGS:
        settings = {**DEFAULTS, **changes}
        num_eos = settings.pop("num_eos", 0)
        num_found = 0
        for index in range(len(prompts)):
            prompt = prompts[(index + len(changes)) % len(prompts)]
            eos = own_eos
            if num_eos and not own_eos:
                # Tokens that some beams come across: others end at other places.
                free = {**settings, "min_new_tokens": 0, "num_return_sequences": 2}
                best, second = search(model, prompt, [], free)[0]
                eos = sorted({best[4 + index % 3], second[9]})[:num_eos]
            sequences, scores = search(model, prompt, eos, settings)
            stable = all(
                search(model, prompt, eos, settings, seed)[0] == sequences
                for seed in range(NUM_NOISY_RUNS)
            )
            if not stable:
                continue
            yield {
                "prompt": prompt,
                "eos": eos,
                **settings,
                "sequences": sequences,
                "scores": [round(score, 5) for score in scores],
            }
            num_found += 1
            if num_found == PER_SETTING:
                break
        if num_found == 0:
            print(f"no stable search for {changes}")


def load(directory: Path) -> Any:
    """The model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config = GenerationConfig()
    return model.eval()


def main() -> None:
    """Writes beams.json."""
    torch.set_num_threads(1)
    unpack(HERE)
    entries: list[dict[str, Any]] = []
    for name in ("llama_gqa", "qwen2", "mistral_window", DEMO):
        if name == DEMO:
            cases = json.loads((HERE / "demo_model.json").read_text())["cases"]
            prompts = [case["prompt_ids"] for case in cases]
            directory = HERE.parents[1] / DEMO
            eos = json.loads((directory / "config.json").read_text())["eos_token_id"]
            own_eos = eos if isinstance(eos, list) else [eos]
        else:
            directory, own_eos = HERE / name, []
            prompts = json.loads((directory / "golden.json").read_text())["prompts"]
        found = [{"model": name, **entry} for entry in searches(load(directory), prompts, own_eos)]
        print(f"{name}: {len(found)} searches")
        entries += found
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    text = f'{{"transformers": "{transformers.__version__}", "searches": [\n{lines}\n]}}\n'
    (HERE / "beams.json").write_text(text)
    pack(HERE / "beams.json")


if __name__ == "__main__":
    main()
