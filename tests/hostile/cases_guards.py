"""Damaged or hostile configs, tokenizers, chat templates and sizes."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

from tests.hostile.case import Case, Prepare, Sandbox
from tests.support.paths import ROOT

DAMAGED = ROOT / "tests" / "data" / "damaged_tokenizers"
COUNT, END = "{% for i in range(99999) %}", "{% endfor %}"
OWN_TEMPLATE = ("--chat_template", "{folder}/template.jinja")


def edited(name: str, **changes: Any) -> Prepare:
    """Changes keys of a JSON file of the model; `...` takes one out."""
    return lambda sandbox: sandbox.edit_json(name, **changes)


def config(label: str, says: tuple[str, ...], command: str = "predict", **changes: Any) -> Case:
    """A run with changed keys of config.json."""
    return Case(
        f"config: {label}",
        command,
        prepare=edited("config.json", **changes),
        says=("config.json", *says),
    )


def rope(label: str, says: tuple[str, ...], **scaling: Any) -> Case:
    """A run with a rope_scaling."""
    return config(f"rope_scaling, {label}", says, rope_scaling=scaling)


def damaged_tokenizer(name: str) -> Prepare:
    """Puts keys of tests/data/damaged_tokenizers into the model's tokenizer.json."""
    changes = json.loads((DAMAGED / f"{name}.json").read_text(encoding="utf-8"))
    return edited("tokenizer.json", **changes)


def sentencepiece(**changes: Any) -> Prepare:
    """Gives the model a sentencepiece tokenizer, with changed keys of its tokenizer_config.json."""

    def prepare(sandbox: Sandbox) -> None:
        (sandbox.model / "tokenizer.json").unlink()
        for path in (ROOT / "tests/data/tokenizers/sentencepiece").iterdir():
            shutil.copy(path, sandbox.model / path.name)
        sandbox.edit_json("tokenizer_config.json", **changes)

    return prepare


def tokenizer(label: str, says: tuple[str, ...], prepare: Prepare) -> Case:
    """A run with a damaged tokenizer."""
    return Case(
        f"tokenizer: {label}",
        "predict",
        prepare=prepare,
        says=says,
        never_says=("Traceback", "REGATTA_TRACEBACK", "panicked at", "RUST_BACKTRACE"),
    )


def template(label: str, source: str, says: tuple[str, ...]) -> Case:
    """A run with a chat template of its own."""
    return Case(
        f"template: {label}",
        "predict",
        OWN_TEMPLATE,
        prepare=lambda sandbox: _write(sandbox, source),
        says=("chat template", *says),
    )


def _write(sandbox: Sandbox, source: str) -> None:
    (sandbox.folder / "template.jinja").write_text(source)


def _cut(sandbox: Sandbox) -> None:
    path = sandbox.model / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:2000])


def _draft(sandbox: Sandbox) -> None:
    shutil.copytree(sandbox.model, sandbox.folder / "draft")
    path = sandbox.folder / "draft" / "config.json"
    values = json.loads(path.read_text()) | {"num_hidden_layers": 10**9}
    path.write_text(json.dumps(values))


def _huge_token_id(sandbox: Sandbox) -> None:
    values = json.loads((sandbox.model / "tokenizer.json").read_text(encoding="utf-8"))
    values["model"]["vocab"]["h"] = 10**9
    values["model"]["merges"] = []
    sandbox.edit_json("tokenizer.json", **values)


def _paddle_template(sandbox: Sandbox) -> None:
    parts = {"query": "{{ query }}" + COUNT + COUNT + "{{ query * 100 }}" + END + END}
    (sandbox.model / "chat_template.json").write_text(json.dumps(parts))


HUGE = {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1024}

CASES = [
    config(
        "a billion layers", ("'num_hidden_layers' is 1000000000", "1024"), num_hidden_layers=10**9
    ),
    config(
        "a billion layers, exported",
        ("'num_hidden_layers' is 1000000000",),
        "export",
        num_hidden_layers=10**9,
    ),
    config(
        "a billion layers, quantized",
        ("'num_hidden_layers' is 1000000000",),
        "quantize",
        num_hidden_layers=10**9,
    ),
    config(
        "a billion of hidden size", ("'hidden_size' is 1000000000", "131072"), hidden_size=10**9
    ),
    config("a billion of inner size", ("'intermediate_size'", "1048576"), intermediate_size=10**9),
    config("a billion heads", ("'num_attention_heads'", "4096"), num_attention_heads=10**9),
    config("a billion tokens", ("'vocab_size'", "4194304"), vocab_size=10**9),
    config(
        "a billion positions",
        ("'max_position_embeddings'", "67108864"),
        max_position_embeddings=10**9,
    ),
    config("heads of a million dims", ("'head_dim' is 1000000", "1024"), head_dim=10**6),
    config("heads of odd dims", ("33 of the head_dim 33 dims are rotated", "even"), head_dim=33),
    config("no head", ("'num_attention_heads' is 0",), num_attention_heads=0),
    config("fewer than no head", ("'num_key_value_heads' is -2",), num_key_value_heads=-2),
    config(
        "heads that share nothing",
        ("4 is not a multiple of num_key_value_heads 3",),
        num_key_value_heads=3,
    ),
    config("a norm of NaN", ("'rms_norm_eps' is nan", "a number above 0"), rms_norm_eps=math.nan),
    config("a norm of NaN, exported", ("'rms_norm_eps' is nan",), "export", rms_norm_eps=math.nan),
    config("a norm of zero", ("'rms_norm_eps' is 0", "above 0 to 0.1"), rms_norm_eps=0),
    config("a norm of one", ("'rms_norm_eps' is 1.0",), rms_norm_eps=1.0),
    config("no rotation", ("'rope_theta' is 0", "above 1"), rope_theta=0),
    config("a rotation without end", ("'rope_theta' is inf",), rope_theta=math.inf),
    config("a part of no rotation", ("'partial_rotary_factor' is 0",), partial_rotary_factor=0),
    config("true for a size", ("'hidden_size' is True",), hidden_size=True),
    config("a list for a size", ("'hidden_size' is [64]",), hidden_size=[64]),
    config("a text for a number", ("'rms_norm_eps' is '1e-5'",), rms_norm_eps="1e-5"),
    config(
        "a size with a fraction",
        ("'intermediate_size' is 96.5", "a whole number"),
        intermediate_size=96.5,
    ),
    config("no size", ("lacks 'hidden_size'",), hidden_size=...),
    config(
        "a text for a switch",
        ("'tie_word_embeddings' is 'no'", "true, false"),
        tie_word_embeddings="no",
    ),
    config("ends that are texts", ("eos_token_id", "</s>"), eos_token_id=["</s>"]),
    config(
        "a negative window", ("'sliding_window' is -5",), model_type="mistral", sliding_window=-5
    ),
    config(
        "one layer type for two layers",
        ("'layer_types'", "2 of full_attention"),
        model_type="qwen2",
        use_sliding_window=True,
        layer_types=["full_attention"],
    ),
    config(
        "more layers than the tensors",
        ("num_hidden_layers is 1000", "those of 2 layers"),
        num_hidden_layers=1000,
    ),
    config(
        "more layers than the tensors, exported",
        ("those of 2 layers",),
        "export",
        num_hidden_layers=1000,
    ),
    config(
        "more layers than the tensors, quantized",
        ("those of 2 layers",),
        "quantize",
        num_hidden_layers=3,
    ),
    config("more tokens than the embedding", ("[100000, 64]", "[512, 64]"), vocab_size=100_000),
    rope("a factor of zero", ("rope_scaling: 'factor' is 0",), type="linear", factor=0),
    rope("a factor of NaN", ("rope_scaling: 'factor' is nan",), type="yarn", factor=math.nan),
    rope("a factor that is a text", ("rope_scaling: 'factor' is '2'",), type="linear", factor="2"),
    rope(
        "an original length of zero",
        ("'original_max_position_embeddings' is 0",),
        type="yarn",
        factor=2.0,
        original_max_position_embeddings=0,
    ),
    rope(
        "frequencies without a span",
        ("'high_freq_factor'", "above 'low_freq_factor'"),
        type="llama3",
        factor=8.0,
        low_freq_factor=4.0,
        high_freq_factor=4.0,
    ),
    config("rope_scaling is a list", ("'rope_scaling' is [1]", "an object"), rope_scaling=[1]),
    Case(
        "draft: a billion layers",
        "predict",
        (
            "--speculate_method",
            "draft_model",
            "--append_attn",
            "--draft_model_name_or_path",
            "{folder}/draft",
        ),
        prepare=_draft,
        says=("draft/config.json", "'num_hidden_layers' is 1000000000"),
    ),
    Case(
        "sizes: made-up weights beyond the memory",
        "predict",
        ("--load_format", "dummy"),
        prepare=edited("config.json", **HUGE),
        says=("weights do not fit", "MiB", "are free"),
    ),
    Case(
        "sizes: made-up weights beyond the memory, exported",
        "export",
        ("--load_format", "dummy"),
        prepare=edited("config.json", **HUGE),
        says=("weights do not fit", "MiB"),
    ),
    tokenizer(
        "panics when loaded",
        ("tokenizer.json", "its library panicked", "copy it again"),
        damaged_tokenizer("panics_at_load"),
    ),
    tokenizer(
        "panics on every text",
        ("tokenizer.json", "chunk size", "copy it again"),
        damaged_tokenizer("panics_at_encode"),
    ),
    tokenizer(
        "panics on its own ends",
        ("tokenizer.json", "its library panicked"),
        damaged_tokenizer("panics_on_special_tokens"),
    ),
    tokenizer(
        "panics when it decodes",
        ("tokenizer.json", "index out of bounds"),
        damaged_tokenizer("panics_at_decode"),
    ),
    tokenizer(
        "replaces nothing by something",
        ("tokenizer.json", "index out of bounds"),
        damaged_tokenizer("panics_on_empty_pattern"),
    ),
    tokenizer("is cut short", ("tokenizer.json", "cut short"), _cut),
    tokenizer("makes ids beyond the vocabulary", ("1000000000", "vocabulary"), _huge_token_id),
    tokenizer(
        "an added id of a billion",
        ("added_tokens_decoder", "1000000000", "4194303"),
        sentencepiece(added_tokens_decoder={"1000000000": {"content": "<x>"}}),
    ),
    tokenizer(
        "an added id below zero",
        ("added_tokens_decoder", "'-1'"),
        sentencepiece(added_tokens_decoder={"-1": {"content": "<x>"}}),
    ),
    tokenizer(
        "an added token without its text",
        ("added_tokens_decoder", "content is null"),
        sentencepiece(added_tokens_decoder={"300": {}}),
    ),
    tokenizer(
        "a switch that is a text",
        ("add_bos_token is a text", "true, false"),
        edited("tokenizer_config.json", add_bos_token="yes"),
    ),
    tokenizer(
        "an end that is a number",
        ("eos_token is a number", "allowed: a text"),
        edited("tokenizer_config.json", eos_token=2),
    ),
    tokenizer(
        "generation_config.json ends at 1.5",
        ("generation_config.json", "eos_token_id"),
        edited("generation_config.json", eos_token_id=1.5),
    ),
    template(
        "prints without end",
        COUNT + COUNT + "{{ 'a' * 900 }}" + END + END,
        ("was stopped", "4194304 characters"),
    ),
    template("counts without end", COUNT * 4 + END * 4, ("was stopped", "2 s of CPU time")),
    template("multiplies a text", "{{ 'a' * 10**10 }}", ("was stopped", "512 MiB of memory")),
    template("pads a text", "{{ 'a'|center(10**10) }}", ("was stopped", "512 MiB of memory")),
    template(
        "calls itself",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ("failed", "RecursionError"),
    ),
    template(
        "is nested deeply",
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        ("failed", "RecursionError"),
    ),
    template("has two million characters", "a" * 2_000_000, ("2000000 characters", "1048576")),
    template("opens files", "{{ cycler.__init__.__globals__.open('/etc/passwd') }}", ("unsafe",)),
    Case(
        "template: PaddleNLP's prints without end",
        "predict",
        ("--chat_template", "{model}/chat_template.json"),
        prepare=_paddle_template,
        says=("chat_template.json", "4194304 characters"),
    ),
]
