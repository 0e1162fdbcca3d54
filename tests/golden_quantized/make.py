"""Makes quantized golden checkpoints with the libraries that own the layouts.

Needs torch, transformers 5, gptqmodel, llmcompressor, compressed-tensors and autoawq; the tests
that read the files need none of them:

    python -m tests.golden_quantized.make            # everything
    python -m tests.golden_quantized.make gptq_sym   # some cases by name

One folder per case: a tiny Llama of random weights, quantized and written by the library named in
`CASES`, and golden.json:

- "weights": of each quantized matrix "sha256" of the bytes and "corner", the first 2 x 3 values of
  the library's own dequantized weight [out, in], in "dtype";
- "made_with": versions.

GPTQModel leaves its logs in the folder that it is run in.

Only what a checkpoint needs is kept: config.json and model.safetensors, the latter compressed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its loader wants two, whatever the machine

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.packed import pack_weights

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "data" / "tokenizers" / "byte_level"  # the libraries insist on one
VOCAB_SIZE = 344
PACKAGES = ("torch", "transformers", "compressed-tensors", "llmcompressor", "gptqmodel", "autoawq")
Weights = dict[str, torch.Tensor]


def base_model(directory: Path, dtype: torch.dtype, **changes: Any) -> None:
    """A random Llama whose input features have very different sizes, as act-order wants them."""
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )
    model = LlamaForCausalLM(config)
    for name, values in model.named_parameters():
        if "layernorm" in name:
            values.data *= torch.exp(torch.randn_like(values))
        elif "proj" in name:
            values.data = torch.randn_like(values) * 0.15
    model.to(dtype).save_pretrained(directory)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)


def calibration(count: int = 16, length: int = 48) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB_SIZE, (count, length), generator=generator).tolist()


def gptq(out: Path, **settings: Any) -> Weights:
    """GPTQModel quantizes, writes, loads again and dequantizes."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    with tempfile.TemporaryDirectory() as base:
        base_model(Path(base), torch.float16)
        config = QuantizeConfig(device="cpu", **settings)
        model = GPTQModel.load(base, config, dtype=torch.float16)
        inputs = [{"input_ids": torch.tensor([ids])} for ids in calibration()]
        for entry in inputs:
            entry["attention_mask"] = torch.ones_like(entry["input_ids"])
        model.quantize(inputs, batch_size=1, backend=BACKEND.TORCH)
        model.save(str(out))
    # float16 as the scales are stored: another type would round them first.
    loaded = GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    return {
        name.removeprefix("model.model.").removeprefix("model."): module.dequantize_weight().T
        for name, module in loaded.model.named_modules()
        if hasattr(module, "qweight")
    }


def awq(out: Path) -> Weights:
    """AutoAWQ's packing of its own pseudo-quantized matrices, and its dequantization."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    size = 32
    base_model(out, torch.float16)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16)
    made: Weights = {}
    weights: Weights = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        rows = module.weight.data.reshape(-1, size)
        low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        scales = (high - low).clamp(min=1e-5) / 15
        zeros = (-torch.round(low / scales)).clamp_(0, 15)
        codes = torch.clamp(torch.round(rows / scales) + zeros, 0, 15)
        module.weight.data = ((codes - zeros) * scales).reshape(module.weight.shape)
        scales, zeros = (
            v.view(module.weight.shape[0], -1).t().contiguous() for v in (scales, zeros)
        )
        packed = WQLinear_GEMM.from_linear(module, 4, size, scales=scales, zeros=zeros)
        made |= {f"{name}.{k}": v.contiguous() for k, v in packed.state_dict().items()}
        weights[name] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size).T
    held = load_file(out / "model.safetensors")
    held = {k: v for k, v in held.items() if k.removesuffix(".weight") not in weights}
    save_file({**held, **made}, out / "model.safetensors", metadata={"format": "pt"})
    announce(
        out,
        {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
        | {"version": "gemm", "modules_to_not_convert": None},
    )
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def announce(directory: Path, quantization: Mapping[str, Any]) -> None:
    """Puts a quantization_config into config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(config, indent=2) + "\n")


def compressed(out: Path, modifier: Callable[[], Any], data: bool, **changes: Any) -> Weights:
    """llm-compressor quantizes and writes; compressed-tensors decompresses."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot

    with tempfile.TemporaryDirectory() as base:
        base_model(Path(base), torch.bfloat16, **changes)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        inputs: dict[str, Any] = {}
        if data:
            ids = calibration()
            masks = [[1] * len(row) for row in ids]
            inputs = {
                "dataset": Dataset.from_dict({"input_ids": ids, "attention_mask": masks}),
                "num_calibration_samples": len(ids),
                "max_seq_length": len(ids[0]),
            }
        oneshot(model=model, tokenizer=base, recipe=modifier(), **inputs)
        model.save_pretrained(out, save_compressed=True)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.load_from_registry(config["format"])
    held = load_file(out / "model.safetensors")
    names = [name.removesuffix(".weight_scale") for name in held if name.endswith("weight_scale")]
    weights = {}
    for name in names:
        state = {k.removeprefix(f"{name}."): v for k, v in held.items() if k.startswith(f"{name}.")}
        weights[name.removeprefix("model.")] = compressor.decompress(state, scheme)["weight"]
    return weights


def quantization(scheme: str) -> Callable[[], Any]:
    """Rounding, with llm-compressor's scheme of that name; 4-bit and 8-bit groups are of 32."""

    def make() -> Any:
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return QuantizationModifier(ignore=["lm_head"], **_groups(scheme))

    return make


def _groups(scheme: str) -> dict[str, Any]:
    from compressed_tensors.quantization import preset_name_to_scheme

    group = preset_name_to_scheme(scheme, ["Linear"])
    if group.weights.group_size is not None:
        group.weights.group_size = 32
    return {"config_groups": {"group_0": group}}


def finegrained(out: Path) -> Weights:
    """DeepSeek's layout, by the operations with which transformers quantizes and dequantizes."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    base_model(out, torch.bfloat16, num_hidden_layers=1, **sizes)
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    made: Weights = {}
    weights: Weights = {}
    for name, values in load_file(out / "model.safetensors").items():
        if "proj" not in name:
            made[name] = values
            continue
        parts = Fp8Quantize(quantizer).convert({name: values})
        made |= parts
        scale = parts[name + "_scale_inv"]
        weights[name.removesuffix(".weight").removeprefix("model.")] = Fp8Dequantize(
            quantizer
        )._dequantize_one(parts[name], scale)
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    announce(out, quantizer.quantization_config.to_dict())
    return weights


CASES: dict[str, Callable[[Path], Weights]] = {
    "gptq_sym": lambda out: gptq(out, bits=4, group_size=32, sym=True, desc_act=False),
    "gptq_act_order": lambda out: gptq(out, bits=4, group_size=32, sym=True, desc_act=True),
    "gptq_asym_v2": lambda out: gptq(
        out, bits=4, group_size=32, sym=False, desc_act=True, format="gptq_v2"
    ),
    "gptq_dynamic": lambda out: gptq(
        out,
        bits=4,
        group_size=32,
        sym=True,
        desc_act=False,
        dynamic={
            "-:.*down_proj": {},
            r"+:model\.layers\.0\.self_attn\.": {
                "bits": 8,
                "group_size": -1,
                "act_group_aware": False,
            },
            r".*\.v_proj": {"bits": 8},
            r".*\.0\.mlp\.up_proj": {"group_size": 64},
            ".*o_proj": {"desc_act": True},
        },
    ),
    "gptq_8bit_channel": lambda out: gptq(
        out, bits=8, group_size=-1, sym=True, desc_act=False, act_group_aware=False
    ),
    "awq": awq,
    "ct_w4a16": lambda out: compressed(out, quantization("W4A16"), False),
    "ct_w4a16_asym": lambda out: compressed(out, quantization("W4A16_ASYM"), False),
    "ct_w8a16": lambda out: compressed(out, quantization("W8A16"), False),
    "ct_w8a8": lambda out: compressed(out, quantization("W8A8"), False),
    "ct_w4a8": lambda out: compressed(out, quantization("W4A8"), False),
    "ct_fp8_dynamic": lambda out: compressed(out, quantization("FP8_DYNAMIC"), False),
    "ct_fp8_static": lambda out: compressed(out, quantization("FP8"), True),
    "ct_fp8_block": lambda out: compressed(
        out, quantization("FP8_BLOCK"), False, hidden_size=128, intermediate_size=160
    ),
    "fp8_block": finegrained,
}


def describe(weight: torch.Tensor) -> dict[str, Any]:
    """Dtype, sha256 and a corner of a matrix."""
    values = weight.detach().contiguous().cpu()
    data = values.view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape),
        "sha256": hashlib.sha256(data).hexdigest(),
        "corner": values[:2, :3].float().tolist(),
    }


def versions() -> dict[str, str]:
    """Of the packages that are installed: one case needs a few of them."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def make(name: str) -> None:
    """Writes one case's folder."""
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    weights = CASES[name](out)
    for path in out.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"].pop("meta", None)  # how it was made, with paths
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    golden = {
        "made_with": versions(),
        "weights": {f"model.{key}": describe(weight) for key, weight in sorted(weights.items())},
    }
    (out / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    pack_weights(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    for name in parser.parse_args().cases or CASES:
        make(name)
        print(name, flush=True)


if __name__ == "__main__":
    main()
