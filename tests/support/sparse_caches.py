"""Networks whose layers do not all keep something in the cache, and their logits in NumPy."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from predict import LLM, EngineConfig, SamplingParams
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from tests.golden import numpy_models as maths
from tests.golden.numpy_models import Matrix, Weights
from tests.support import tiny
from tests.support.checkpoints import write_random
from tests.support.golden import step_logits
from tests.support.golden_logits import LOGIT_TOLERANCE

FAMILY = "sparse_cache"
FAMILIES = Path(__file__).parent / "families"
# The kinds of layers: A attention and an MLP, M an MLP alone, E experts alone.
KINDS = {"A": "attention", "M": "mlp", "E": "experts"}
# Names of networks; "each": with a norm of each head, which are layers of several operators.
NETWORKS = ("AMAMAM", "AEAEAE", "MAEAMA", "EMAME", "AMAEME each")
PROMPTS = [[3, 17, 5, 9, 11], [40, 41, 42, 43, 40, 41, 42, 43] * 5, [7], [101] * 19]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
BLOCK_SIZE = 16


@contextmanager
def known() -> Iterator[None]:
    """The family is found as if it stood in predict.models."""
    package = importlib.import_module("predict.models")
    package.__path__.append(str(FAMILIES))
    try:
        yield
    finally:
        package.__path__.pop()
        sys.modules.pop(f"predict.models.{FAMILY}", None)
        vars(package).pop(FAMILY, None)


def write_network(folder: Path, name: str, **changes: Any) -> Path:
    """A checkpoint of a network, with random weights. changes: of config.json."""
    letters, _, each = name.partition(" ")
    values = tiny.CONFIG | {
        "model_type": FAMILY,
        "num_hidden_layers": len(letters),
        "layer_types": [KINDS[letter] for letter in letters],
        "qk_norm_each": bool(each),
        **changes,
    }
    generator = np.random.default_rng(26)

    def values_of(name: str, shape: tuple[int, ...]) -> Any:
        made = generator.standard_normal(shape, dtype=np.float32)
        return 1 + 0.1 * made if "norm" in name else 0.15 * made

    return write_random(folder, values, values_of)


def config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"max_length": 96, "batch_size": 3, "block_size": BLOCK_SIZE}
    values |= {"inference_model": False, **changes}
    return EngineConfig(model_name_or_path=str(folder), **values)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def check_answers(folder: Path, answers: list[list[int]]) -> None:
    """Raises AssertionError unless each token has NumPy's largest logit, to LOGIT_TOLERANCE."""
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        rows = logits(folder, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        chosen = np.take_along_axis(rows, np.array(answer)[:, None], axis=-1)[:, 0]
        assert (chosen >= rows.max(axis=-1) - LOGIT_TOLERANCE * np.abs(rows).max()).all()


def check_logits(folder: Path, llm: LLM, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Raises AssertionError unless those of a step of several prompts are NumPy's.

    tolerance: of the largest logit.
    """
    prompts = PROMPTS[: llm.config.scheduling.batch_size]
    width = llm.config.max_length // BLOCK_SIZE
    spans = []
    for number, prompt in enumerate(prompts):
        blocks = list(range(number * width, (number + 1) * width))
        request = Request(number, prompt, SamplingParams())
        spans.append(ScheduledSpan(request, len(prompt), 0, blocks, True))
    found = step_logits(llm, span_inputs(spans, BLOCK_SIZE))
    wanted = np.stack([logits(folder, prompt)[-1] for prompt in prompts])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def logits(folder: Path, tokens: Sequence[int]) -> Matrix:
    """Of each token [T, vocab_size], in float64 and without a cache."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: values.astype(np.float64)
        for name, values in load_file(folder / "model.safetensors").items()
    }
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}."
        if kind == "attention":
            normed = maths.rms_norm(weights, f"{at}input_layernorm", x, eps)
            x = x + attention(config, weights, f"{at}self_attn.", normed)
        normed = maths.rms_norm(weights, f"{at}post_attention_layernorm", x, eps)
        make = experts if kind == "experts" else mlp
        x = x + make(weights, f"{at}mlp.", normed)
    return maths.linear(weights, "lm_head", maths.rms_norm(weights, "model.norm", x, eps))


def attention(config: dict[str, Any], weights: Weights, at: str, x: Matrix) -> Matrix:
    """Causal, of rotated queries and keys."""
    counts = (config["num_attention_heads"], *[config["num_key_value_heads"]] * 2)
    q, k, v = (
        maths.heads(maths.linear(weights, f"{at}{name}_proj", x), count)
        for name, count in zip("qkv", counts, strict=True)
    )
    if config["qk_norm_each"]:  # heads have a factor each: [heads, 1, head_dim]
        factors = {f"{name}.weight": weights[f"{at}{name}.weight"][:, None] for name in NORMS}
        q, k = (
            maths.rms_norm(factors, name, y, 1e-6) for name, y in zip(NORMS, (q, k), strict=True)
        )
    turns = maths.angles(np.arange(len(x), dtype=np.float64), config["head_dim"], 10000.0)
    q, k = (maths.rotate_halves(y, turns) for y in (q, k))
    return maths.linear(weights, f"{at}o_proj", maths.attention(q, k, v, maths.causal(len(x))))


NORMS = ("q_norm", "k_norm")


def mlp(weights: Weights, at: str, x: Matrix) -> Matrix:
    inner = maths.silu(maths.linear(weights, f"{at}gate_proj", x))
    return maths.linear(weights, f"{at}down_proj", inner * maths.linear(weights, f"{at}up_proj", x))


def experts(weights: Weights, at: str, x: Matrix) -> Matrix:
    """Each token's two likeliest experts, by their shares."""
    scores = maths.linear(weights, f"{at}gate", x)
    chosen = np.argsort(-scores, axis=-1)[:, :2]
    out = np.zeros_like(x)
    for row, ids in enumerate(chosen):
        shares = np.exp(scores[row, ids] - scores[row, ids].max())
        for expert, share in zip(ids, shares / shares.sum(), strict=True):
            out[row] += share * mlp(weights, f"{at}experts.{expert}.", x[row : row + 1])[0]
    return out
