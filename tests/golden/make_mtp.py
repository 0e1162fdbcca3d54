"""Writes mtp.npz: logits of the first three drafts of layers for multi-token prediction.

Needs what make.py needs. transformers' MtpModel computes them, in float32, over golden checkpoints
and the layer that tests.support.drafters.mtp_tensors puts behind their last one:

    python -m tests.golden.make_mtp

By case: "<case>/logits" [3, V] behind MTP_PROMPT and its greedy token, each draft the likeliest
token, and "<case>/tokens" [4], that token and the drafts.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.support.drafters import MTP_CASES, MTP_PROMPT, mtp_tensors
from tests.support.packed import unpack

HERE = Path(__file__).resolve().parent


def drafted(case: str, last: str) -> tuple[np.ndarray, np.ndarray]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(HERE / case / "config.json", folder)
        stored = load_file(HERE / case / "model.safetensors")
        there = {name: tensor.float().numpy() for name, tensor in stored.items()}
        save_file(there | mtp_tensors(there, last), folder / "model.safetensors")
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        behind = int(last.split(".")[2]) + 1
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{behind}\..*"]
        drafter = MtpModel.from_pretrained(model)
        with torch.no_grad():
            found = model(torch.tensor([MTP_PROMPT]), output_hidden_states=True)
            states, tokens = found.hidden_states[-1], [int(found.logits[0, -1].argmax())]
            known, logits = [*MTP_PROMPT[1:], tokens[0]], []
            for _ in range(3):
                places = torch.arange(1, len(known) + 1)[None]
                output = drafter.forward_layer(
                    0, states, places, MtpCache(), input_ids=torch.tensor([known])
                )
                logits.append(drafter._project_to_logits(output[:, -1])[0].numpy())
                tokens.append(int(logits[-1].argmax()))
                known.append(tokens[-1])
                states = torch.cat([states, output[:, -1:]], 1)
        return np.stack(logits), np.array(tokens)


def main() -> None:
    unpack(HERE)
    made: dict[str, Any] = {}
    for case, last in MTP_CASES.items():
        made[f"{case}/logits"], made[f"{case}/tokens"] = drafted(case, last)
    np.savez_compressed(HERE / "mtp.npz", **made)


if __name__ == "__main__":
    main()
