"""Qwen3-Next's and Qwen3.5's layer for multi-token prediction: random ones, and by plain NumPy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predict import LLM, SamplingParams
from predict.engine.batch import span_inputs, stated
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.loading.checkpoint import Checkpoint
from predict.loading.safetensors_writer import write
from tests.support.checkpoints import stored
from tests.support.drafters import Array, Tensors, chained, rotated, silu
from tests.support.hybrids import BLOCK_SIZE, FOLDER

AT = "mtp.layers.0."
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def mtp_tensors(config: Mapping[str, Any], seed: int = 9, is_joined: bool = False) -> Tensors:
    """The layer of a config.json. is_joined: all experts in one tensor, else one by one."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, keys = config["head_dim"], config["num_key_value_heads"]
    mlp, attention = f"{AT}mlp.", f"{AT}self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in
           ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        f"{AT}input_layernorm.weight": (hidden,),
        f"{AT}post_attention_layernorm.weight": (hidden,),
        f"{attention}q_proj.weight": (2 * heads * head_dim, hidden),
        f"{attention}k_proj.weight": (keys * head_dim, hidden),
        f"{attention}v_proj.weight": (keys * head_dim, hidden),
        f"{attention}o_proj.weight": (hidden, heads * head_dim),
        f"{attention}q_norm.weight": (head_dim,),
        f"{attention}k_norm.weight": (head_dim,),
    }  # fmt: skip

    def block(at: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{at}gate_proj.weight": (inner, hidden),
            f"{at}up_proj.weight": (inner, hidden),
            f"{at}down_proj.weight": (hidden, inner),
        }

    count = config.get("num_experts", 0)
    if not count:
        shapes |= block(mlp, config["intermediate_size"])
    else:
        shapes[f"{mlp}gate.weight"] = (count, hidden)
        shapes[f"{mlp}shared_expert_gate.weight"] = (1, hidden)
        shapes |= block(f"{mlp}shared_expert.", config["shared_expert_intermediate_size"])
        for number in range(count):
            shapes |= block(f"{mlp}experts.{number}.", config["moe_intermediate_size"])
    generator = np.random.default_rng(seed)
    made: Tensors = {
        name: ((0.3 if len(shape) == 1 else 0.35) * generator.standard_normal(shape))
        .astype(np.float32)
        for name, shape in shapes.items()
    }  # fmt: skip
    return _joined(made, count) if is_joined else made


def _joined(made: Tensors, count: int) -> Tensors:
    every = [
        [made.pop(f"{AT}mlp.experts.{number}.{name}_proj.weight") for number in range(count)]
        for name in ("gate", "up", "down")
    ]
    gate, up, down = (np.stack(each) for each in every)
    made[f"{AT}mlp.{EXPERTS[0]}"] = np.concatenate([gate, up], axis=1)
    made[f"{AT}mlp.{EXPERTS[1]}"] = down
    return made


def config_of(case: str) -> dict[str, Any]:
    """config.json of a golden checkpoint's text."""
    values = json.loads((FOLDER / case / "config.json").read_text())
    found: dict[str, Any] = values.get("text_config", values)
    return found


def with_mtp(case: str, folder: Path, **more: Any) -> Path:
    """A golden checkpoint in float32, with such a layer."""
    shutil.copytree(FOLDER / case, folder)
    checkpoint = Checkpoint(folder)
    made = {name: (array.dtype, array.read()) for name, array in checkpoint.stored.items()}
    layer = {name: ("F32", value) for name, value in mtp_tensors(config_of(case), **more).items()}
    write(folder / "model.safetensors", made | layer)
    return folder


def final_states(llm: LLM, tokens: list[int]) -> Array:
    """[T, H] of the model, behind its last norm, from one step that keeps no state."""
    blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    request = Request(0, tokens, SamplingParams())
    spans = [ScheduledSpan(request, len(tokens), 0, blocks, True)]
    inputs = stated(span_inputs(spans, BLOCK_SIZE), spans)
    made: Array = llm.engine.runner.run(inputs, ("norm",)).hidden["norm"].numpy()
    return made


def _shared(folder: Path) -> tuple[Array, Array]:
    """Its table of tokens, and its head."""
    there = {name: value for name, (_, value) in stored(folder).items()}
    table = next(value for name, value in there.items() if "embed_tokens" in name)
    values = [np.asarray(each).astype(np.uint32) << 16 for each in
              (table, there.get("lm_head.weight", table))]  # fmt: skip
    first, second = (each.view(np.float32).astype(np.float64) for each in values)
    return first, second


def _softmax(x: Array) -> Array:
    shares = np.exp(x - x.max(-1, keepdims=True))
    made: Array = shares / shares.sum(-1, keepdims=True)
    return made


class Layer:
    """The layer in float64, row by row."""

    def __init__(self, config: Mapping[str, Any], made: Tensors) -> None:
        self.config = config
        self.weights = {name: value.astype(np.float64) for name, value in made.items()}

    def normed(self, x: Array, name: str) -> Array:
        length = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        made: Array = x / length * (1 + self.weights[f"{name}.weight"])
        return made

    def product(self, x: Array, name: str) -> Array:
        made: Array = x @ self.weights[f"{name}.weight"].T
        return made

    def attention(self, x: Array) -> Array:
        config, at, count = self.config, f"{AT}self_attn.", len(x)
        dim, heads = config["head_dim"], config["num_attention_heads"]
        both = self.product(x, f"{at}q_proj").reshape(count, heads, 2 * dim)
        q, gate = self.normed(both[..., :dim], f"{at}q_norm"), both[..., dim:]
        k, v = (self.product(x, f"{at}{name}_proj").reshape(count, -1, dim) for name in "kv")
        k = self.normed(k, f"{at}k_norm")
        rope = config["rope_parameters"]
        turned, places = int(dim * rope["partial_rotary_factor"]), np.arange(count)
        q, k = (
            np.concatenate(
                [
                    rotated(each[..., :turned], places, rope["rope_theta"], False),
                    each[..., turned:],
                ],
                axis=-1,
            )
            for each in (q, k)
        )
        mixed = np.zeros((count, heads, dim))
        for head in range(heads):
            key = head // (heads // k.shape[1])
            for row in range(count):
                shares = _softmax(k[: row + 1, key] @ q[row, head] * dim**-0.5)
                mixed[row, head] = shares @ v[: row + 1, key]
        mixed = mixed / (1 + np.exp(-gate))
        return self.product(mixed.reshape(count, -1), f"{at}o_proj")

    def mlp(self, x: Array, at: str) -> Array:
        inner = silu(self.product(x, f"{at}gate_proj")) * self.product(x, f"{at}up_proj")
        return self.product(inner, f"{at}down_proj")

    def experts(self, x: Array) -> Array:
        at = f"{AT}mlp."
        if "num_experts" not in self.config:
            return self.mlp(x, at)
        gate = self.product(x, f"{at}shared_expert_gate")
        made = self.mlp(x, f"{at}shared_expert.") / (1 + np.exp(-gate))
        for row, shares in enumerate(_softmax(self.product(x, f"{at}gate"))):
            best = np.argsort(-shares)[: self.config["num_experts_per_tok"]]
            for expert in best:
                share = shares[expert] / shares[best].sum()
                made[row] += share * self.mlp(x[row : row + 1], f"{at}experts.{expert}.")[0]
        return made

    def rows(self, states: Array, token: Array) -> Array:
        """What is fed on: of each row, behind the layer's own norm."""
        token = self.normed(token, "mtp.pre_fc_norm_embedding")
        states = self.normed(states, "mtp.pre_fc_norm_hidden")
        x = self.product(np.concatenate([token, states], 1), "mtp.fc")
        x = x + self.attention(self.normed(x, f"{AT}input_layernorm"))
        x = x + self.experts(self.normed(x, f"{AT}post_attention_layernorm"))
        return self.normed(x, "mtp.norm")


def mtp_logits(
    case: str, folder: Path, states: Array, tokens: Sequence[int], count: int
) -> list[Array]:
    """The logits of `count` drafts. states: of all places but the last. See `chained`."""
    layer = Layer(config_of(case), mtp_tensors(config_of(case)))
    table, head = _shared(folder)

    def rows(states: Array, behind: Sequence[int]) -> tuple[Array, Array]:
        fed = layer.rows(states, table[list(behind)])
        return fed, fed @ head.T

    return chained(rows, states, tokens, count)
