"""Makes the golden checkpoints and what Hugging Face transformers computes with them.

Needs torch, transformers 5 and safetensors; the tests that read the files need none of them:

    python tests/golden/make.py                  # everything
    python tests/golden/make.py demo_model       # some cases by name, "demo_model" and "tokenizer"

One folder per case: a tiny random checkpoint, as transformers writes it, and

- golden.json: "prompts" and "greedy", lists of token id lists (greedy: `NUM_NEW_TOKENS` new ones,
  no end of text), "tail_prompt", the index of the prompt that golden.npz holds more of,
  "min_margin", the smallest lead of the largest logit over the next in all greedy steps, "seed";
- golden.npz: "last_logits" [num_prompts, vocab_size], of each prompt's last position, and
  "tail_logits" [4, vocab_size], of the tail prompt's last four positions; float32.

Everything is computed on the CPU in float32 with eager attention from the files as written. Seeds
are searched until no greedy step is close, so that another order of summation picks the same
tokens; every case with a special feature also checks that its logits change without the feature.

demo_model.json holds the same for examples/demo_model and the prompts of examples/prompts.jsonl,
tokenizer.json the ids of its tokenizer and chat templates as transformers renders them.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"

NUM_NEW_TOKENS = 32
NUM_TAIL_LOGITS = 4
MIN_MARGIN = 1e-2  # float32 sums in another order differ by about 1e-5 here
MIN_DISTINCT = 0.3  # share of different tokens in the greedy continuations
MIN_EFFECT = 0.05  # largest change of a logit without the case's feature
MAX_SEEDS = 500
DEMO_NEW_TOKENS = 64

CONFIG_CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
# The smallest shape: used where the case is not about shapes.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """A rope_parameters object."""
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One golden checkpoint; `without` are config values that switch its special feature off."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"  # of the stored weights
    spelling: int = 5  # major version of transformers whose config.json it imitates
    shard_size: str = "1GB"
    prompt_lens: tuple[int, ...] = (1, 5, 17, 67, 103)


CASES: dict[str, Case] = {
    "llama_mha": Case(
        family="llama",
        config={
            "hidden_size": 64,
            "intermediate_size": 40,
            "num_key_value_heads": 2,
            "head_dim": None,
            "tie_word_embeddings": False,
        },
        spelling=4,
    ),
    "llama_gqa": Case(
        family="llama",
        config={
            "hidden_size": 64,
            "intermediate_size": 48,
            "head_dim": None,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", rope_theta=500000.0),
        },
        without={"rope_parameters": PLAIN_ROPE},
    ),
    "llama_head_dim": Case(
        family="llama",
        config={
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        },
    ),
    "llama_deep_float32": Case(
        family="llama",
        config={"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3},
        dtype="float32",
        spelling=4,
    ),
    "llama_rope_llama3": Case(
        family="llama",
        config={
            "rope_parameters": rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        },
        without={"rope_parameters": PLAIN_ROPE},
        spelling=4,
    ),
    "llama_rope_linear": Case(
        family="llama",
        config={"rope_parameters": rope("linear", factor=4.0)},
        without={"rope_parameters": PLAIN_ROPE},
        spelling=4,
    ),
    "llama_rope_dynamic": Case(  # every prompt is within the original context, two grow past it
        family="llama",
        config={
            "rope_parameters": rope("dynamic", factor=4.0),
            "max_position_embeddings": 96,
        },
        without={"rope_parameters": PLAIN_ROPE},
        prompt_lens=(1, 5, 17, 67, 90),
    ),
    "llama_rope_yarn": Case(
        family="llama",
        config={"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=64)},
        without={"rope_parameters": PLAIN_ROPE},
        dtype="float16",
    ),
    "llama_biases": Case(
        family="llama",
        config={"attention_bias": True, "mlp_bias": True},
        without={"attention_bias": False, "mlp_bias": False},
    ),
    "llama_sharded": Case(family="llama", config={"tie_word_embeddings": False}, shard_size="40KB"),
    "mistral_window": Case(
        family="mistral", config={"sliding_window": 12}, without={"sliding_window": None}
    ),
    "mistral_full": Case(
        family="mistral",
        config={"sliding_window": None, "num_attention_heads": 3},
        spelling=4,
    ),
    "qwen2": Case(
        family="qwen2",
        config={
            "hidden_size": 64,
            "intermediate_size": 48,
            "head_dim": None,
            "tie_word_embeddings": False,
        },
        spelling=4,
    ),
    "qwen2_tied": Case(family="qwen2", config={"hidden_size": 64, "head_dim": None}),
    "qwen3": Case(
        family="qwen3",
        config={"head_dim": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        spelling=4,
    ),
    "qwen3_tied": Case(family="qwen3", config={"num_attention_heads": 4, "num_key_value_heads": 2}),
}


# ---- checkpoints


def hf_config(case: Case, changes: Mapping[str, Any]) -> Any:
    """The transformers config of a case."""
    values = SMALL | dict(case.config) | dict(changes)
    if values["head_dim"] is None:
        del values["head_dim"]
    values.setdefault("rope_parameters", PLAIN_ROPE)
    return CONFIG_CLASSES[case.family](**values, attn_implementation="eager")


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that give distinct logits: every part of a layer moves the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("bias"):
            values *= 0.5
        elif tensor.dim() == 1:
            values = 1 + 0.2 * values
        elif "embed_tokens" in name or "lm_head" in name:
            values *= 3 / tensor.shape[1] ** 0.5
        else:
            values *= 1.5 / tensor.shape[1] ** 0.5
        tensor.copy_(values)


def write_checkpoint(case: Case, folder: Path, seed: int) -> None:
    """Write config.json and safetensors of a random model."""
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(hf_config(case, {}))
    with torch.no_grad():
        randomize(model, seed)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard_size)
    if case.spelling == 4:
        path = folder / "config.json"
        path.write_text(json.dumps(spell_4(json.loads(path.read_text())), indent=2) + "\n")


def spell_4(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers 4 wrote: rope_theta, rope_scaling and torch_dtype."""
    config = dict(config)
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    config["torch_dtype"] = config.pop("dtype")
    del config["transformers_version"]
    return dict(sorted(config.items()))


def load(folder: Path, **changes: Any) -> Any:
    """The checkpoint in float32 with eager attention, ready for inference."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **changes
    )
    return model.eval()


# ---- what transformers computes


@dataclass(frozen=True)
class Greedy:
    """One greedy continuation; logits [num_new_tokens, vocab_size] before each choice."""

    token_ids: list[int]
    logits: npt.NDArray[np.float32]

    @property
    def min_margin(self) -> float:
        """The smallest lead of the chosen logit over the next."""
        top = np.sort(self.logits, axis=1)[:, -2:]
        return float((top[:, 1] - top[:, 0]).min())


def generate(model: Any, prompt: Sequence[int], num_new_tokens: int) -> Greedy:
    """Greedy continuation by transformers' generate, up to an end-of-text token if there is one."""
    # a copy: dynamic rotary scaling keeps what earlier sequences made of it
    result = copy.deepcopy(model).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = result.sequences[0, len(prompt) :].tolist()
    return Greedy(token_ids, torch.stack(result.logits)[:, 0].float().numpy())


def prompt_logits(model: Any, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits [len(prompt), vocab_size] of one pass over the prompt."""
    logits = copy.deepcopy(model)(torch.tensor([prompt])).logits[0]
    return np.asarray(logits.float().numpy(), dtype=np.float32)


def random_prompts(case: Case, vocab_size: int, seed: int) -> list[list[int]]:
    """One prompt of random token ids per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in case.prompt_lens]


def feature_effect(case: Case, folder: Path, prompts: list[list[int]]) -> float:
    """Largest change of a logit, at the end of the longest continuation, without the feature."""
    assert case.without is not None
    model = load(folder)
    plain_config = hf_config(case, case.without)
    plain = AutoModelForCausalLM.from_config(plain_config).float().eval()
    state = model.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    prompt = prompts[-1] + generate(model, prompts[-1], NUM_NEW_TOKENS).token_ids
    return float(np.abs(prompt_logits(model, prompt) - prompt_logits(plain, prompt))[-1].max())


def attempt(case: Case, folder: Path, seed: int) -> dict[str, Any] | None:
    """Write the checkpoint and goldens of one seed; None if a greedy choice is too close."""
    write_checkpoint(case, folder, seed)
    model = load(folder)
    prompts = random_prompts(case, model.config.vocab_size, seed)
    greedy = []
    for prompt in prompts:
        greedy.append(generate(model, prompt, NUM_NEW_TOKENS))
        if greedy[-1].min_margin < MIN_MARGIN:
            return None
    distinct = np.mean([len(set(g.token_ids)) / NUM_NEW_TOKENS for g in greedy])
    if distinct < MIN_DISTINCT:
        return None
    logits = [prompt_logits(model, prompt) for prompt in prompts]
    for of_prompt, continuation in zip(logits, greedy, strict=True):
        np.testing.assert_allclose(of_prompt[-1], continuation.logits[0], rtol=1e-4, atol=1e-4)
    golden: dict[str, Any] = {
        "seed": seed,
        "min_margin": min(g.min_margin for g in greedy),
        "distinct_share": float(distinct),
        "transformers": transformers.__version__,
        "prompts": prompts,
        "greedy": [g.token_ids for g in greedy],
        "tail_prompt": len(prompts) - 1,
    }
    if case.without is not None:
        golden["feature_effect"] = feature_effect(case, folder, prompts)
        if golden["feature_effect"] < MIN_EFFECT:
            return None
    np.savez_compressed(
        folder / "golden.npz",
        last_logits=np.stack([of_prompt[-1] for of_prompt in logits]),
        tail_logits=logits[-1][-NUM_TAIL_LOGITS:],
    )
    return golden


def make_case(name: str, case: Case) -> None:
    """Search a seed and leave its checkpoint and goldens in the case's folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        for seed in range(MAX_SEEDS):
            golden = attempt(case, folder, seed)
            if golden is not None:
                break
        else:
            raise SystemExit(f"{name}: no seed below {MAX_SEEDS} has a margin of {MIN_MARGIN}")
        (folder / "golden.json").write_text(to_json(golden), encoding="utf-8")
        (folder / "generation_config.json").unlink(missing_ok=True)
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(folder, HERE / name, copy_function=shutil.copyfile)
    size = sum(path.stat().st_size for path in (HERE / name).iterdir())
    print(
        f"{name:20} {size / 1000:6.1f} kB  seed {golden['seed']:3d}  margin "
        f"{golden['min_margin']:.4f}  distinct {golden['distinct_share']:.2f}  "
        f"effect {golden.get('feature_effect', float('nan')):.2f}",
        flush=True,
    )


# ---- the demo model and its tokenizer

TEXTS = (
    "",
    " ",
    "\n",
    "def f(x):\n    return x\n",
    "class A:\n\tpass\n\n\n    x  =  1\n",
    "for i in range(10, 2048):\n        total += i ** 2  # sum",
    "if x:\r\n    y = 1\r\n",
    "naïve café 你好 🙂 ½ ²",
    "before<|end_of_text|>after",
    "__init__ self.assertEqual('a\\n', \"b\")",
    "trailing space and newline \n",
)
CHAT_TEMPLATES = {
    # header lines around every message, in the manner of Llama 3
    "headers": (
        "{{- bos_token }}"
        "{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{- message['content'] | trim + '<|eot_id|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{%- endif %}"
    ),
    # ChatML with a default system message, in the manner of Qwen 2.5
    "chatml": (
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
        "{%- else %}\n"
        "    {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}\n"
        "{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) "
        "or (message.role == 'assistant' and not message.tool_calls) %}\n"
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' "
        "+ '\\n' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "{%- endif %}\n"
    ),
    # strictly alternating turns, in the manner of Mistral: others raise
    "turns": (
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content'] %}\n"
        "    {%- set turns = messages[1:] %}\n"
        "{%- else %}\n"
        "    {%- set turns = messages %}\n"
        "{%- endif %}\n"
        "{{- bos_token }}\n"
        "{%- for message in turns %}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('user and assistant must take turns') }}\n"
        "    {%- endif %}\n"
        "    {%- if message['role'] == 'user' %}\n"
        "        {%- if loop.last and system is defined %}\n"
        "            {{- '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}\n"
        "        {%- else %}\n"
        "            {{- '[INST] ' + message['content'] + ' [/INST]' }}\n"
        "        {%- endif %}\n"
        "    {%- else %}\n"
        "        {{- ' ' + message['content'] + eos_token }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
    ),
}
CONVERSATIONS = (
    [{"role": "user", "content": "  What is 2 + 2?\n"}],
    [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Bonjour"},
        {"role": "user", "content": "<b>Bye</b> & 你好"},
    ],
)


def make_tokenizer() -> None:
    """Write tokenizer.json: ids and texts of the demo tokenizer, and rendered chat templates."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_model")
    encodings = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        encodings.append(
            {
                "text": text,
                "ids": ids,
                "plain_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                "decoded_all": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    templates = [
        {
            "name": name,
            "source": source,
            "messages": messages,
            "text": tokenizer.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=True
            ),
        }
        for name, source in CHAT_TEMPLATES.items()
        for messages in CONVERSATIONS
    ]
    golden = {
        "special_tokens": {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token},
        "encodings": encodings,
        "templates": templates,
    }
    (HERE / "tokenizer.json").write_text(to_json(golden), encoding="utf-8")
    print(f"tokenizer: {len(encodings)} texts, {len(templates)} rendered conversations")


def make_demo_model() -> None:
    """Write demo_model.json: greedy ids and texts of examples/demo_model for its prompts."""
    folder = EXAMPLES / "demo_model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    cases = []
    for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)["src"]
        ids = tokenizer(prompt)["input_ids"]
        greedy = generate(model, ids, DEMO_NEW_TOKENS)
        ended = greedy.token_ids[-1] == tokenizer.eos_token_id
        cases.append(
            {
                "prompt": prompt,
                "prompt_ids": ids,
                "greedy": greedy.token_ids,  # with the end-of-text token where one was reached
                "finish_reason": "stop" if ended else "length",
                "text": tokenizer.decode(greedy.token_ids, skip_special_tokens=True),
                "min_margin": greedy.min_margin,
            }
        )
    golden = {
        "num_new_tokens": DEMO_NEW_TOKENS,
        "min_margin": min(case["min_margin"] for case in cases),
        "transformers": transformers.__version__,
        "cases": cases,
    }
    (HERE / "demo_model.json").write_text(to_json(golden), encoding="utf-8")
    print(f"demo_model: {len(cases)} prompts, margin {golden['min_margin']:.5f}")


def to_json(value: Mapping[str, Any]) -> str:
    """JSON with one line per item of the top level and of the lists in it."""
    return "".join(json_lines(value))


def json_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """The pieces of to_json."""
    yield "{\n"
    for index, (key, item) in enumerate(value.items()):
        comma = ",\n" if index < len(value) - 1 else "\n"
        if isinstance(item, list):
            rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in item)
            yield f' "{key}": [\n{rows}\n ]{comma}'
        else:
            yield f' "{key}": {json.dumps(item, ensure_ascii=False)}{comma}'
    yield "}\n"


@torch.no_grad()
def main() -> None:
    """Make the named goldens, all by default."""
    others = {"tokenizer": make_tokenizer, "demo_model": make_demo_model}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*CASES, *others]
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(names)}")
    chosen = parser.parse_args().names or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"no golden named {', '.join(unknown)} (known: {', '.join(names)})")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in the same order everywhere
    for name in chosen:
        if name in CASES:
            make_case(name, CASES[name])
        else:
            others[name]()
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"all goldens: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
