"""Makes LoRA adapters with Hugging Face's PEFT, and what it computes with them.

Needs torch, transformers 5 and peft; the tests that read the files need none of them:

    python -m tests.golden_adapters.make                # everything
    python -m tests.golden_adapters.make llama_dora     # some cases by name

One folder per case: adapter_config.json and adapter_model.safetensors as PEFT saves them, of random
values, for a checkpoint of tests/golden, and golden.json:

- "base": the folder of tests/golden;
- "prompts" and "greedy", lists of token id lists, of the base in float32 with the adapter beside
  it, not merged; "base_greedy": without it;
- "min_margin", the smallest lead of the largest logit over the next in all greedy steps, "seed".

golden.npz: "last_logits" [num_prompts, vocab_size], of each prompt's last position; float32. Seeds
are searched until no greedy step is close, and the adapter changes every continuation.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.golden.families import CASES as BASES
from tests.golden.hf_models import HFModel, HFSource
from tests.support.packed import pack_weights, unpack

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_NEW_TOKENS, NUM_PROMPTS, MIN_MARGIN, MAX_SEEDS = 24, 4, 1e-2, 200
LLAMA_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Adapter:
    """An adapter of a golden checkpoint."""

    base: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"  # of the stored adapter


transformers.logging.disable_progress_bar()
CASES: dict[str, Adapter] = {
    "llama_patterns": Adapter(
        "llama_gqa",
        {
            "target_modules": LLAMA_LINEARS,
            "rank_pattern": {"down_proj": 6, "layers.0.self_attn.q_proj": 2, "^.*1.mlp.up_proj": 1},
            "alpha_pattern": {"o_proj": 3, "mlp.gate_proj": 20},
        },
    ),
    "llama_rslora": Adapter(
        "llama_gqa",
        {"target_modules": "all-linear", "use_rslora": True},
        dtype="bfloat16",
    ),
    "llama_dora": Adapter("llama_gqa", {"target_modules": LLAMA_LINEARS, "use_dora": True}),
    "llama_biases": Adapter(
        "llama_biases", {"target_modules": ["q_proj", "up_proj"], "bias": "all"}
    ),
    "llama_lora_bias": Adapter(
        "llama_biases", {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}
    ),
    # The head of these is their embedding, until an adapter changes one of the two.
    "tied_head": Adapter(
        "qwen2_tied", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    ),
    "tied_embedding": Adapter("qwen2_tied", {"target_modules": ["embed_tokens", "k_proj"]}),
    "tied_saved": Adapter(
        "qwen2_tied",
        {"target_modules": ["down_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    ),
    "tied_both": Adapter(
        "qwen3_tied",
        {
            "target_modules": ["o_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "embedding_dora": Adapter(
        "llama_mha", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}
    ),
    # Matrices of [in, out], square ones among them.
    "gpt2": Adapter(
        "gpt2_small",
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "gpt2_dora": Adapter(
        "gpt2_small",
        {"target_modules": ["attn.c_proj", "wpe"], "fan_in_fan_out": True, "use_dora": True},
    ),
    # Queries, keys and values in one matrix, head by head; gate and up in one.
    "bloom": Adapter("bloom_7b", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    "phi3": Adapter("phi3_mini", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "gemma3_text": Adapter(
        "gemma3_4b", {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}
    ),
    "mixtral": Adapter("mixtral_8x7b", {"target_modules": ["q_proj", "k_proj", "o_proj"]}),
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Trainable values that change what the model says: products half as large as its matrices."""
    generator = torch.Generator().manual_seed(seed)
    state = dict(model.named_parameters())
    for name, tensor in sorted(state.items()):
        values = torch.randn(tensor.shape, generator=generator)
        if ".lora_A." in name:
            tensor.copy_(values / tensor.shape[1] ** 0.5)
        elif (".lora_B." in name and name.endswith("weight")) or ".lora_embedding_" in name:
            tensor.copy_(values)
        elif ".lora_magnitude_vector." in name:
            tensor.mul_(1 + 0.3 * values)
        elif "lora_" in name or (tensor.requires_grad and name.endswith("bias")):
            tensor.copy_(0.3 * values)
        elif tensor.requires_grad:
            tensor.add_(0.5 * values * tensor.std(correction=0))


def load_base(case: Adapter) -> Any:
    """The base in float32."""
    return HFSource(BASES[case.base]).load(GOLDEN / case.base).model


def write(case: Adapter, folder: Path, seed: int) -> None:
    """Writes the adapter of one seed, as PEFT does."""
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **case.config}
    model = get_peft_model(load_base(case), LoraConfig(**settings))
    with torch.no_grad():
        randomize(model, seed)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder)
    for path in folder.iterdir():
        if path.name not in FILES:
            path.unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": case.base}
    path.write_text(json.dumps(config, indent=2) + "\n")


def attempt(case: Adapter, folder: Path, seed: int) -> dict[str, Any] | None:
    """Writes adapter and goldens of one seed; None if a choice is too close."""
    shutil.rmtree(folder, ignore_errors=True)
    write(case, folder, seed)
    golden = json.loads((GOLDEN / case.base / "golden.json").read_text())
    prompts = golden["prompts"][:NUM_PROMPTS]
    beside = PeftModel.from_pretrained(load_base(case), folder).float().eval()
    model = HFModel(beside.requires_grad_(False))
    made = [model.generate(prompt, NUM_NEW_TOKENS) for prompt in prompts]
    base = [tokens[:NUM_NEW_TOKENS] for tokens in golden["greedy"][:NUM_PROMPTS]]
    greedy = [each.token_ids for each in made]
    margin = min(each.min_margin for each in made)
    if margin < MIN_MARGIN or any(a == b for a, b in zip(greedy, base, strict=True)):
        return None
    if any(model.has_close_choice(p + g) for p, g in zip(prompts, greedy, strict=True)):
        return None
    np.savez_compressed(
        folder / "golden.npz",
        last_logits=np.stack([model.logits(prompt)[-1] for prompt in prompts]),
    )
    return {
        "base": case.base,
        "seed": seed,
        "peft": peft.__version__,
        "min_margin": margin,
        "prompts": prompts,
        "greedy": greedy,
        "base_greedy": base,
    }


def make(name: str) -> None:
    """Searches a seed and leaves its adapter and goldens in the case's folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        for seed in range(MAX_SEEDS):
            golden = attempt(CASES[name], folder, seed)
            if golden is not None:
                break
        else:
            raise SystemExit(f"{name}: no seed below {MAX_SEEDS} has a margin of {MIN_MARGIN}")
        (folder / "golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(folder, HERE / name, copy_function=shutil.copyfile)
        pack_weights(HERE / name)
    size = sum(path.stat().st_size for path in (HERE / name).iterdir())
    print(f"{name:20} {size / 1000:6.1f} kB  seed {seed:3d}  margin {golden['min_margin']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES))
    names = parser.parse_args().names
    unpack(GOLDEN)
    for chosen in names:
        make(chosen)
