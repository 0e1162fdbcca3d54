"""Makes the golden checkpoints and what Hugging Face transformers computes with them.

Needs torch, transformers 5, safetensors and pytest; the tests that read the files need only the
last:

    python -m tests.golden.make                  # everything
    python -m tests.golden.make demo_model       # some cases by name, "demo_model" and "tokenizer"

One folder per case: a tiny random checkpoint, and

- golden.json: "prompts" and "greedy", lists of token id lists (greedy: `NUM_NEW_TOKENS` new ones,
  no end of text), "tail_prompt", the index of the prompt that golden.npz holds more of,
  "min_margin", the smallest lead of the largest logit over the next in all greedy steps, "seed";
- golden.npz: "last_logits" [num_prompts, vocab_size], of each prompt's last position, and
  "tail_logits" [4, vocab_size], of the tail prompt's last four positions; float32.

transformers writes and computes what it has a class for (families.py): on the CPU, in float32, with
eager attention unless the case names another, from the files as written; of float8 in blocks, from
the values that codes stand for. Other families are computed in NumPy, in float64
(numpy_families.py), and compared with transformers in what it has (twins.py). Seeds are searched
until no greedy step is close, and no router's choice of experts, so that another order of summation
picks the same tokens; every case with special features also checks that its logits change without
each of them.

demo_model.json holds the same for examples/demo_model and the prompts of examples/prompts.jsonl,
tokenizer.json the ids of its tokenizer and chat templates as transformers renders them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.golden.families import CASES
from tests.golden.golden import Array, Source
from tests.golden.hf_models import HFModel, HFSource
from tests.golden.numpy_families import NUMPY_CASES
from tests.golden.numpy_source import NumpySource
from tests.support.packed import pack_weights

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"

NUM_NEW_TOKENS = 32
NUM_TAIL_LOGITS = 4
MIN_MARGIN = 1e-2  # float32 sums in another order differ by about 1e-5 here
MIN_EFFECT = 0.05  # largest change of a logit without one of the case's features
MAX_SEEDS = 500
DEMO_NEW_TOKENS = 64

SOURCES: dict[str, Source] = {
    **{name: HFSource(case) for name, case in CASES.items()},
    **{name: NumpySource(case) for name, case in NUMPY_CASES.items()},
}


def last_logits(source: Source, folder: Path, tokens: list[int]) -> Iterator[Array]:
    """Logits after `tokens` of the model without each of its features."""
    for model in source.without(folder):
        yield model.logits(tokens)[-1]


def attempt(source: Source, folder: Path, seed: int) -> dict[str, Any] | None:
    """Write the checkpoint and goldens of one seed; None if a choice is too close."""
    source.write(folder, seed)
    model = source.load(folder)
    prompts = source.prompts(model.vocab_size, seed)
    greedy = []
    for prompt in prompts:
        greedy.append(model.generate(prompt, NUM_NEW_TOKENS))
        if greedy[-1].min_margin < MIN_MARGIN:
            return None
        if model.has_close_choice(prompt + greedy[-1].token_ids):
            return None
    distinct = np.mean([len(set(g.token_ids)) / NUM_NEW_TOKENS for g in greedy])
    if distinct < source.min_distinct:
        return None
    logits = [model.logits(prompt) for prompt in prompts]
    for of_prompt, continuation in zip(logits, greedy, strict=True):
        np.testing.assert_allclose(of_prompt[-1], continuation.logits[0], rtol=1e-4, atol=1e-4)
    golden: dict[str, Any] = {
        "seed": seed,
        "min_margin": min(g.min_margin for g in greedy),
        "distinct_share": float(distinct),
        **source.made_with,
        "prompts": prompts,
        "greedy": [g.token_ids for g in greedy],
        "tail_prompt": len(prompts) - 1,
    }
    whole = prompts[-1] + greedy[-1].token_ids
    with_all = model.logits(whole)[-1]
    effects = [float(np.abs(with_all - w).max()) for w in last_logits(source, folder, whole)]
    if effects:
        golden["feature_effect"] = min(effects)
        if golden["feature_effect"] < MIN_EFFECT:
            return None
    np.savez_compressed(
        folder / "golden.npz",
        last_logits=np.stack([of_prompt[-1] for of_prompt in logits]),
        tail_logits=logits[-1][-NUM_TAIL_LOGITS:],
    )
    return golden


def make_case(name: str, source: Source) -> None:
    """Search a seed and leave its checkpoint and goldens in the case's folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        for seed in range(MAX_SEEDS):
            golden = attempt(source, folder, seed)
            if golden is not None:
                break
        else:
            raise SystemExit(f"{name}: no seed below {MAX_SEEDS} has a margin of {MIN_MARGIN}")
        (folder / "golden.json").write_text(to_json(golden), encoding="utf-8")
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(folder, HERE / name, copy_function=shutil.copyfile)
        pack_weights(HERE / name)
    size = sum(path.stat().st_size for path in (HERE / name).iterdir())
    print(
        f"{name:24} {size / 1000:6.1f} kB  seed {golden['seed']:3d}  margin "
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
    model = HFModel(
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    )
    cases = []
    for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)["src"]
        ids = tokenizer(prompt)["input_ids"]
        greedy = model.generate(ids, DEMO_NEW_TOKENS)
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
    names = [*SOURCES, *others]
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(names)}")
    chosen = parser.parse_args().names or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"no golden named {', '.join(unknown)} (known: {', '.join(names)})")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in the same order everywhere
    for name in chosen:
        if name in SOURCES:
            make_case(name, SOURCES[name])
        else:
            others[name]()
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"all goldens: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
