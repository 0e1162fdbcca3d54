"""What people write: data lines, flags, recipes, recommendations, texts to measure."""

from __future__ import annotations

import json
from typing import Any

from tests.hostile.case import GOOD_LINES, Case, Prepare, Sandbox

HUGE = "1" + "0" * 30
DIGITS = "9" * 5000
LONG = "x" * 300
NOT_UTF8 = "\udcff"  # how Python has a byte of the command line that is none


def data(second: str | bytes) -> Prepare:
    """A good line, then this one."""
    content = second.encode() if isinstance(second, str) else second

    def prepare(sandbox: Sandbox) -> None:
        sandbox.data.write_bytes(GOOD_LINES[0].encode() + b"\n" + content + b"\n")

    return prepare


def message(**fields: Any) -> Prepare:
    """A good line, then a conversation of one message."""
    return data(json.dumps({"src": [{"role": "user", **fields}]}))


def whole(content: str) -> Prepare:
    """The whole data file."""
    return at("prompts.jsonl", content)


def at(name: str, content: str) -> Prepare:
    """A file of the sandbox."""

    def prepare(sandbox: Sandbox) -> None:
        (sandbox.folder / name).write_text(content)

    return prepare


def recommends(**values: Any) -> Prepare:
    """The model's generation_config.json."""
    return lambda sandbox: sandbox.edit_json("generation_config.json", **values)


def recipe(content: str) -> Prepare:
    """A JSON file of quantization flags; {model} and {folder} as in argv."""

    def prepare(sandbox: Sandbox) -> None:
        (sandbox.folder / "recipe.json").write_text(sandbox.fill(content))

    return prepare


def link_to_nowhere(sandbox: Sandbox) -> None:
    (sandbox.folder / "link").symlink_to(sandbox.folder / "nowhere")


PICTURE = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}}]
AUTO = ("--generation_config", "auto")
RECIPE = '"model_name_or_path": "{model}", "output_path": "{folder}/out.json"'

DATA = [
    Case("data: content null", "predict", prepare=message(content=None), says=("line 2", "null")),
    Case(
        "data: a picture",
        "predict",
        prepare=message(content=PICTURE),
        says=("line 2", "cannot read", "no such file"),
    ),
    Case(
        "data: content of a number",
        "predict",
        prepare=message(content=5),
        says=("line 2", "a number as content"),
    ),
    Case(
        "data: a role of nothing",
        "predict",
        prepare=message(role=None, content="x"),
        says=("line 2", "the role null"),
    ),
    Case(
        "data: text parts",
        "predict",
        prepare=message(content=[{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]),
        code=0,
        says=("2 of 2 results",),
        writes_output=True,
    ),
    Case("data: NaN", "predict", prepare=data('{"src": "a", "seed": NaN}'), says=("line 2", "NaN")),
    Case(
        "data: a number beyond float64",
        "predict",
        prepare=data('{"src": "a", "temperature": 1e999}'),
        says=("line 2", "1e999", "float64"),
    ),
    Case(
        "data: a key twice",
        "predict",
        prepare=data('{"src": "a", "src": "b"}'),
        says=("line 2", "'src' twice"),
    ),
    Case(
        "data: half a surrogate pair",
        "predict",
        prepare=data('{"src": "\\ud83d"}'),
        says=("line 2", "\\ud83d", "surrogate"),
    ),
    Case(
        "data: not UTF-8",
        "predict",
        prepare=data(b'{"src": "\xff"}'),
        says=("line 2", "not UTF-8", "0xff"),
    ),
    Case(
        "data: nested without end",
        "predict",
        prepare=data('{"src": ' + "[" * 100_000),
        says=("line 2", "nested too deeply"),
    ),
    Case(
        "data: 5,000 digits",
        "predict",
        prepare=data(f'{{"src": "a", "top_k": {DIGITS}}}'),
        says=("line 2", "5000 digits"),
    ),
    Case(
        "data: cut short",
        "predict",
        prepare=data('{"src": "hel'),
        says=("line 2", "not valid JSON", "cut short"),
    ),
    Case(
        "data: prompt for src",
        "predict",
        prepare=data('{"prompt": "a"}'),
        says=("line 2", "src in place of 'prompt'"),
    ),
    Case(
        "data: src null", "predict", prepare=data('{"src": null}'), says=("line 2", '"src" is null')
    ),
    Case(
        "data: tgt of a number",
        "predict",
        prepare=data('{"src": "a", "tgt": 0}'),
        says=("line 2", '"tgt" is a number'),
    ),
    Case(
        "data: every wrong line is counted",
        "predict",
        prepare=data("\n".join(["{}"] * 10)),
        says=("line 2", "line 6", "and 4 more"),
    ),
    Case(
        "data: a list with a text in it",
        "predict",
        prepare=whole('[{"src": "a"}, "b"]'),
        says=("item 2", "it is a text"),
    ),
    Case("data: an empty list", "predict", prepare=whole("[]"), says=("empty JSON list",)),
    Case("data: blank", "predict", prepare=whole(" \n\n"), says=("is empty", "one JSON object")),
    Case("data: a folder", "predict", ("--data_file", "{model}"), says=("a directory",)),
    Case("data: a device", "predict", ("--data_file", "/dev/zero"), says=("is a device",)),
    Case(
        "data: a link to nowhere",
        "predict",
        ("--data_file", "{folder}/link"),
        link_to_nowhere,
        says=("cannot read --data_file", "no such file"),
    ),
    Case(
        "data: a mistyped key",
        "predict",
        prepare=data('{"src": "a", "temprature": 0.5}'),
        code=0,
        says=("1 prompt has the key 'temprature'", "'temperature'"),
        writes_output=True,
    ),
    Case(
        "data: another tool's key",
        "predict",
        prepare=data('{"src": "a", "max_tokens": 5}\n{"src": "b", "max_tokens": 5}'),
        code=0,
        says=("2 prompts have the key 'max_tokens'", "line 2", "'max_new_tokens'"),
        writes_output=True,
    ),
    Case(
        "data: a key with a terminal's orders",
        "predict",
        prepare=data('{"src": "a", "top_k\\u001b[2J": 1}'),
        code=0,
        says=("\\x1b[2J", "'top_k'"),
        never_says=("\x1b", "Traceback"),
        writes_output=True,
    ),
    Case(
        "data: keys without end",
        "predict",
        prepare=data(json.dumps({f"top_k{i}{LONG}": i for i in range(300)})),
        says=("line 2", 'no "src"', "and 295 more"),
    ),
    Case(
        "data: a parameter out of range",
        "predict",
        prepare=data('{"src": "a", "top_p": 2}'),
        says=("line 2", "top_p 2", "1e-30 to 1"),
    ),
    Case(
        "data: a parameter of a text",
        "predict",
        prepare=data('{"src": "a", "top_k": "many"}'),
        says=("line 2", "top_k 'many'"),
    ),
]

FLAGS = [
    Case("flag: batch_size 0", "predict", ("--batch_size", "0"), says=("--batch_size", "from 1")),
    Case(
        "flag: src_length beyond memory",
        "predict",
        ("--src_length", "1000000000"),
        says=("--src_length", "to 16777216"),
    ),
    Case("flag: 31 digits", "predict", ("--max_new_tokens", HUGE), says=("--max_new_tokens",)),
    Case("flag: 5,000 digits", "predict", ("--top_k", DIGITS), says=("--top_k", "5000 digits")),
    Case("flag: a fraction", "predict", ("--batch_size", "1.5"), says=("'1.5'", "an integer")),
    Case(
        "flag: a share of NaN",
        "predict",
        ("--gpu_memory_utilization", "nan"),
        says=("--gpu_memory_utilization", "above 0 to 1"),
    ),
    Case("flag: seed beyond int64", "predict", ("--seed", str(2**63)), says=("--seed", "from 0")),
    Case(
        "flag: blocks beyond int32",
        "predict",
        ("--num_cache_blocks", str(2**31)),
        says=("--num_cache_blocks", "2147483647"),
    ),
    Case(
        "flag: blocks beyond memory",
        "predict",
        ("--num_cache_blocks", "1000000000"),
        says=("--num_cache_blocks 1000000000", "MiB of memory are free"),
    ),
    Case(
        "flag: temperature of infinity",
        "predict",
        ("--temperature", "inf", "--top_k", "0"),
        says=("temperature inf",),
    ),
    Case(
        "flag: top_k beyond int32",
        "predict",
        ("--top_k", str(2**31)),
        says=("top_k 2147483648", "allowed"),
    ),
    Case("flag: stop of no UTF-8", "predict", ("--stop", NOT_UTF8), says=("--stop", "not UTF-8")),
    Case("flag: stop cut short", "predict", ("--stop", '["a"'), says=("--stop", "not valid JSON")),
    Case("flag: stop of a number", "predict", ("--stop", '["a", 5]'), says=("stop 5",)),
    Case(
        "flag: logit_bias of NaN",
        "predict",
        ("--logit_bias", '{"5": NaN}'),
        says=("--logit_bias", "NaN"),
    ),
    Case("flag: logit_bias of a list", "predict", ("--logit_bias", "[1]"), says=("a mapping",)),
    Case(
        "flag: bad_words without end",
        "predict",
        ("--bad_words", "[" * 3000),
        says=("--bad_words", "nested too deeply"),
    ),
    Case("flag: bad_words of a number", "predict", ("--bad_words", "5"), says=("bad_words 5",)),
    Case("flag: an empty name", "predict", ("--output_file", ""), says=("--output_file", "empty")),
    Case(
        "flag: a name too long",
        "predict",
        ("--output_file", LONG),
        says=("--output_file", "too long", "255 bytes"),
    ),
    Case("flag: a path too long", "predict", ("--data_file", "a/" * 3000), says=("4095",)),
    Case(
        "flag: a NUL in a name",
        "predict",
        ("--model_name_or_path", "a\0b"),
        says=("--model_name_or_path", "NUL"),
    ),
    Case("flag: mistyped", "predict", ("--batchsize", "3"), says=("did you mean --batch_size",)),
    Case("flag: 5,000 characters", "predict", ("--" + "x" * 5000,), says=("unknown flag",)),
    Case("flag: a word alone", "predict", ("prompts.jsonl",), says=("follows no flag",)),
    Case(
        "flag: both limits of length",
        "predict",
        ("--max_length", "40"),
        code=0,
        says=("2 of 2 results",),
        writes_output=True,
    ),
    Case(
        "recommended: a temperature of text",
        "predict",
        AUTO,
        recommends(temperature="hot"),
        says=("generation_config.json", "temperature 'hot'"),
    ),
    Case(
        "recommended: do_sample of a list",
        "predict",
        AUTO,
        recommends(do_sample=[True]),
        says=("generation_config.json", "do_sample [True]", "true, false"),
    ),
    Case(
        "recommended: a file that is not there",
        "predict",
        ("--generation_config", "{folder}/none.json"),
        says=("none.json", "no such file"),
    ),
    Case(
        "recommended: left out",
        "predict",
        prepare=recommends(temperature=0.5, top_p=0.9),
        code=0,
        says=("temperature 0.5, top_p 0.9", "--generation_config auto"),
        writes_output=True,
    ),
    Case(
        "recommended: taken",
        "predict",
        AUTO,
        recommends(temperature=0.5, top_p=0.9),
        code=0,
        never_says=("recommends", "Traceback"),
        writes_output=True,
    ),
]

OTHERS = [
    Case("recipe: a list", "recipe", ("{folder}/recipe.json",), recipe("[]"), says=("a list",)),
    Case(
        "recipe: an object in it",
        "recipe",
        ("{folder}/recipe.json",),
        recipe(f'{{{RECIPE}, "quant_type": {{"a": 1}}}}'),
        says=("recipe.json", "'quant_type'", "an object"),
    ),
    Case(
        "recipe: a key twice",
        "recipe",
        ("{folder}/recipe.json",),
        recipe(f'{{{RECIPE}, "shift": true, "shift": false}}'),
        says=("recipe.json", "'shift' twice"),
    ),
    Case(
        "recipe: mistyped",
        "recipe",
        ("{folder}/recipe.json",),
        recipe(f'{{{RECIPE}, "do_gtpq": true}}'),
        says=("--do_gtpq", "do_gptq"),
    ),
    Case("recipe: not there", "recipe", ("{folder}/recipe.json",), says=("recipe.json",)),
    Case(
        "recipe: a value like a flag",
        "recipe",
        ("{folder}/recipe.json",),
        recipe(f'{{{RECIPE}, "quant_type": "--wint8"}}'),
        says=("quant_type", "'--wint8'"),
    ),
    Case("quantize: 31 digits", "quantize", ("--batch_size", HUGE), says=("--batch_size",)),
    Case(
        "quantize: least above most",
        "quantize",
        ("--search_alpha_min", "0.9"),
        says=("--search_alpha_min 0.9", "--search_alpha_max 0.8"),
    ),
    Case("quantize: a NUL", "quantize", ("--output_path", "a\0b"), says=("--output_path", "NUL")),
    Case(
        "quantize: a blank text",
        "quantize",
        ("--do_gptq", "--data_file", "{folder}/blank.txt"),
        at("blank.txt", " \n\n"),
        says=("blank.txt", "is blank"),
    ),
    Case(
        "evaluate: a blank text",
        "evaluate",
        ("--data_file", "{folder}/blank.txt"),
        at("blank.txt", " \n\n"),
        says=("blank.txt", "is blank"),
    ),
    Case(
        "evaluate: a text of one token",
        "evaluate",
        ("--data_file", "{folder}/one.txt"),
        at("one.txt", "a"),
        code=0,
        says=("one.txt has 2 tokens", "less than one window", "say little"),
        writes_output=True,
    ),
    Case("evaluate: windows of 1", "evaluate", ("--src_length", "1"), says=("needs 2 tokens",)),
    Case("evaluate: a billion", "evaluate", ("--src_length", "1000000000"), says=("--src_length",)),
    Case("evaluate: over the model", "evaluate", ("--output_file", "{model}/x"), says=("model",)),
    Case("evaluate: a row too long", "evaluate", ("--quant_type", LONG), says=("--quant_type",)),
    Case("kernels: unknown", "kernels", ("--ops", "gemm"), says=("--ops", "'gemm'", "linear")),
    Case("kernels: NaN seconds", "kernels", ("--seconds", "nan"), says=("--seconds", "above 0")),
    Case(
        "throughput: a case of words", "throughput", ("--cases", "axb"), says=("--cases", "'axb'")
    ),
    Case("throughput: a share of 2", "throughput", ("--copy_edits", "2"), says=("--copy_edits",)),
]

CASES = [*DATA, *FLAGS, *OTHERS]
