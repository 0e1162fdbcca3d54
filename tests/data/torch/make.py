"""Writes state.bin and old.bin as torch does, and state.safetensors, the values.

python tests/data/torch/make.py  # needs torch and safetensors
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def main() -> None:
    """Writes the files beside this one."""
    torch.manual_seed(0)
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = torch.nn.Linear(2, 3).state_dict()  # an OrderedDict with _metadata
    state |= {
        "whole": values,
        "turned": values.T,  # shares a storage with the one above
        "cut": values[1:, 1:],
        "bfloat16": values.to(torch.bfloat16),
        "float8": values.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(values.half()),
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "row": values.double()[1:2],
    }
    torch.save(state, HERE / "state.bin")
    old = {"a": torch.zeros(2)}
    torch.save(old, HERE / "old.bin", _use_new_zipfile_serialization=False)
    kept = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    save_file(kept, HERE / "state.safetensors")


if __name__ == "__main__":
    main()
