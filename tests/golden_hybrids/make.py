"""Makes the checkpoints beside it, and what Hugging Face transformers finds for them.

Needs torch and transformers 5; the tests that read the files need neither:

    python tests/golden_hybrids/make.py [CASE ...]

Weights are stored in bfloat16. In float32 on the CPU, by transformers' own torch code. golden.npz:
of each case "CASE/logits" [prompts, vocabulary], of each prompt's last position. golden.json:
"prompts", lists of token ids, and of each case the greedy continuations. Seeds are searched until
no greedy step is close.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models import qwen3_5, qwen3_5_moe

from tests.support.packed import pack_weights

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 63, 64, 65, 200)
NUM_NEW_TOKENS, MIN_MARGIN = 16, 1e-2
TOKENS: dict[str, Any] = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
SIZES: dict[str, Any] = {
    **TOKENS,
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
EYES = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
LFM2: dict[str, Any] = {
    **{key: SIZES[key] for key in [*TOKENS, "vocab_size", "hidden_size", "num_hidden_layers"]},
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "block_multiple_of": 8,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
T = transformers
DENSE = {**SIZES, "intermediate_size": 48}
# Name -> the class, its config.
CASES: dict[str, tuple[Any, Any]] = {
    "qwen3_next": (T.Qwen3NextForCausalLM, lambda: T.Qwen3NextConfig(**DENSE, **EXPERTS)),
    "qwen3_5": (  # with its eyes, which stay unread
        qwen3_5.Qwen3_5ForConditionalGeneration,
        lambda: qwen3_5.Qwen3_5Config(text_config=DENSE, vision_config=EYES, **TOKENS),
    ),
    "qwen3_5_text": (  # as many key heads as value heads, of other sizes; tied
        qwen3_5.Qwen3_5ForCausalLM,
        lambda: qwen3_5.Qwen3_5TextConfig(
            **{
                **DENSE,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 24,
                "tie_word_embeddings": True,
            }
        ),
    ),
    "qwen3_5_moe_text": (
        qwen3_5_moe.Qwen3_5MoeForCausalLM,
        lambda: qwen3_5_moe.Qwen3_5MoeTextConfig(**SIZES, **EXPERTS),
    ),
    "lfm2": (T.Lfm2ForCausalLM, lambda: T.Lfm2Config(**LFM2)),
    "lfm2_biases": (
        T.Lfm2ForCausalLM,
        lambda: T.Lfm2Config(**LFM2, conv_bias=True, conv_L_cache=4),
    ),
    "lfm2_moe": (
        T.Lfm2MoeForCausalLM,
        lambda: T.Lfm2MoeConfig(
            **{key: value for key, value in LFM2.items() if key != "block_multiple_of"}
            | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
            moe_intermediate_size=8,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
        ),
    ),
}
# Their norms' factors are the weights; those of others are 1 + weight.
PLAIN_NORMS = (
    "linear_attn.norm",
    "operator_norm",
    "ffn_norm",
    "embedding_norm",
    "layernorm.weight",
)


def randomize(model: Any) -> None:
    """Weights of sizes at which every part of the network counts."""
    plain = PLAIN_NORMS if model.config.model_type.startswith("lfm2") else PLAIN_NORMS[:1]
    for name, values in model.named_parameters():
        if name.endswith("A_log"):
            values.uniform_(-1.5, 1.0)
        elif values.ndim == 1:
            values.normal_(0.0, 1.0 if name.endswith("dt_bias") else 0.3)
            values += 1.0 if any(part in name for part in plain) else 0.0
        else:
            values.normal_(0.0, 0.35 if values.shape[-1] < 64 else 1.5 / values.shape[-1] ** 0.5)
        values.copy_(values.bfloat16())  # as they are stored
    for name, values in model.named_buffers():
        if name.endswith("expert_bias"):
            values.copy_(values.uniform_(-0.3, 0.3).bfloat16())


def attempt(name: str, seed: int, prompts: list[list[int]]) -> tuple[Any, Any, Any] | None:
    """The model of a seed, its greedy answers, and logits; None where a step is close."""
    torch.manual_seed(seed)
    kind, config = CASES[name]
    model = kind(config()).eval().float()
    randomize(model)
    answers, logits = [], []
    for prompt in prompts:
        ids = list(prompt)
        for step in range(NUM_NEW_TOKENS):
            last = model(torch.tensor([ids])).logits[0, -1]
            if step == 0:
                logits.append(last.numpy())
            best = last.topk(2).values
            if best[0] - best[1] < MIN_MARGIN:
                return None
            ids.append(int(last.argmax()))
        answers.append(ids[len(prompt) :])
    return model, answers, np.stack(logits)


def main() -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, SIZES["vocab_size"], n).tolist() for n in LENGTHS]
    golden: dict[str, Any] = {"prompts": prompts}
    arrays = {}
    if sys.argv[1:]:  # these alone, beside what is there
        golden = json.loads((HERE / "golden.json").read_text())
        arrays = dict(np.load(HERE / "golden.npz"))
    for name in sys.argv[1:] or CASES:
        found = next(f for seed in range(500) if (f := attempt(name, seed, prompts)) is not None)
        model, golden[name], arrays[f"{name}/logits"] = found
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.bfloat16().save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()
        pack_weights(HERE / name)
        print(name, np.abs(arrays[f"{name}/logits"]).max(), flush=True)
    np.savez_compressed(HERE / "golden.npz", **arrays)
    (HERE / "golden.json").write_text(json.dumps(golden))


if __name__ == "__main__":
    with torch.no_grad():
        main()
