"""Exports to where they may not go and of what is broken; runs of exports that strangers made."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from export.export_model import export_model
from predict.config.engine import EngineConfig
from predict.device import library
from tests.hostile.case import Case, Prepare, Sandbox, link, lock_out
from tests.support import tiny

ABSENT: Any = ...  # takes a key out


@cache
def template(compiled: bool) -> Path:
    """An export of the model of every sandbox; not to be changed."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-export-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = tiny.write_with_tokenizer(folder / "model")
    config = EngineConfig(
        model_name_or_path=str(model), max_length=64, block_size=16, inference_model=compiled
    )
    export_model(config, folder / "export")
    return folder / "export"


def has_export(sandbox: Sandbox, compiled: bool = False) -> Path:
    """Puts a good export into the sandbox."""
    return Path(shutil.copytree(template(compiled), sandbox.folder / "export"))


def edited(name: str = "manifest.json", compiled: bool = False, **changes: Any) -> Prepare:
    """Changes keys of a JSON file of the export."""

    def prepare(sandbox: Sandbox) -> None:
        path = has_export(sandbox, compiled) / name
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ABSENT}))

    return prepare


def rewritten(name: str, change: Callable[[bytes], bytes | None]) -> Prepare:
    """Changes the bytes of a file of the export; None removes it."""

    def prepare(sandbox: Sandbox) -> None:
        path = has_export(sandbox) / name
        data = change(path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)

    return prepare


def operators(change: Callable[[list[Any]], None]) -> Prepare:
    """Changes the list of operators of the export's program."""

    def prepare(sandbox: Sandbox) -> None:
        path = has_export(sandbox) / "model.json"
        program = json.loads(path.read_text())
        change(program["program"]["regions"][0]["blocks"][0]["ops"])
        path.write_text(json.dumps(program))

    return prepare


def renamed(name: str) -> Prepare:
    """Makes the last operator another one."""
    return operators(lambda ops: ops[-1].update({"#": name}))


def writes(**files: str) -> Prepare:
    """Writes files of the model; "__" in a name stands for a dot."""

    def prepare(sandbox: Sandbox) -> None:
        for name, text in files.items():
            (sandbox.model / name.replace("__", ".")).write_text(text)

    return prepare


def config_has(**changes: Any) -> Prepare:
    """Changes keys of the model's config.json."""
    return lambda sandbox: sandbox.edit_json("config.json", **changes)


def out_holds(*names: str) -> Prepare:
    """Makes the output a folder with files of these names."""

    def prepare(sandbox: Sandbox) -> None:
        for name in names:
            (sandbox.out / name).parent.mkdir(parents=True, exist_ok=True)
            (sandbox.out / name).write_text("precious")

    return prepare


def earlier_export(more: str = "", without: str = "") -> Prepare:
    """Makes the output an export, with or without a file."""

    def prepare(sandbox: Sandbox) -> None:
        shutil.copytree(template(compiled=False), sandbox.out)
        if more:
            (sandbox.out / more).write_text("precious")
        if without:
            (sandbox.out / without).unlink()

    return prepare


def cut_weights(sandbox: Sandbox) -> None:
    path = sandbox.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def model_beside(sandbox: Sandbox) -> None:
    (sandbox.folder / "config.json").write_text("{}")
    (sandbox.folder / "model.safetensors").write_text("")


def good_export(sandbox: Sandbox) -> None:
    has_export(sandbox)


def out_is_file(sandbox: Sandbox) -> None:
    sandbox.out.write_text("precious")


def params_folder(sandbox: Sandbox) -> None:
    path = has_export(sandbox) / "model.pdiparams"
    path.unlink()
    path.mkdir()


def draft_here(sandbox: Sandbox) -> None:
    shutil.copytree(sandbox.model, sandbox.folder / "draft")


DRAFT = ("--speculate_method", "draft_model", "--draft_model_name_or_path", "{folder}/draft")


def to(path: str, *more: str) -> tuple[str, ...]:
    return ("--output_path", path, *more)


EXPORTS = [
    Case("export without --output_path", "export", ("--output_path", ""),
         says=("--output_path is needed",)),
    Case("export with --mode static", "export", ("--mode", "static"), says=("leave --mode out",)),
    Case(
        "export with adapters of requests",
        "export",
        ("--lora_modules", "sql={model}"),
        says=("add it, merge one adapter with --lora_path",),
    ),
    Case("export that takes adapters of requests", "export", ("--enable_lora",), code=0,
         writes_output=True),
    Case("export for adapters, --lora_modules of no folder", "export",
         ("--enable_lora", "--lora_modules", "sql={folder}/none"), says=("is no folder",)),
    Case("export, flag mistyped", "export", ("--overwrit",), says=("did you mean --overwrite",)),
    Case("export into a full folder", "export", prepare=out_holds("notes.txt"),
         says=("is not empty", "--overwrite")),
    Case("export over an earlier one, unasked", "export", prepare=out_holds("manifest.json"),
         says=("is not empty", "--overwrite")),
    Case("export over an earlier one that is whole, unasked", "export",
         prepare=earlier_export(), code=0, writes_output=True,
         says=("holds an earlier export, which this one replaces",)),
    Case("export over an earlier one beside somebody's file", "export",
         prepare=earlier_export("notes.json"), says=("is not empty", "--overwrite")),
    Case("export over an earlier one that lacks a file", "export",
         prepare=earlier_export(without="model.pdiparams"), says=("is not empty", "--overwrite")),
    Case("export over an earlier one, asked", "export", ("--overwrite",),
         prepare=out_holds("manifest.json", "model.pdiparams"), code=0, writes_output=True),
    Case("--overwrite of no export", "export", ("--overwrite",), prepare=out_holds("thesis.json"),
         says=("holds none", "manifest.json")),
    Case("--overwrite with somebody's file", "export", ("--overwrite",),
         prepare=out_holds("manifest.json", "thesis.tex"), says=("thesis.tex", "no export wrote")),
    Case("--overwrite with a folder inside", "export", ("--overwrite",),
         prepare=out_holds("manifest.json", "src/a.json"), says=("out.json/src", "move it away")),
    Case("export to a file", "export", prepare=out_is_file,
         says=("is a file",)),
    Case("export into an empty folder", "export", prepare=lambda s: s.out.mkdir(), code=0,
         writes_output=True),
    Case("export into new folders", "export", to("{folder}/a/b/c"), code=0),
    Case("export over its model", "export", to("{model}", "--overwrite"),
         says=("folder of --model_name_or_path",)),
    Case("export into its model", "export", to("{model}/static"), says=("lies in the folder of",)),
    Case("export around its model", "export", to("{folder}", "--overwrite"),
         says=("holds the folder of",)),
    Case("export through a link into its model", "export", to("{folder}/link/static"),
         prepare=link("link", "model"), says=("lies in the folder of --model_name_or_path",)),
    Case("export to a link that leads nowhere", "export", to("{folder}/link"), code=0,
         prepare=link("link", "gone/there")),
    Case("export to a link to itself", "export", to("{folder}/link"), prepare=link("link", "link"),
         says=("leads nowhere",)),
    Case("export over the draft model", "export", to("{folder}/draft/x", *DRAFT),
         prepare=draft_here, says=("folder of --draft_model_name_or_path",), untouched=("draft",)),
    Case("export beside a model's config", "export", prepare=model_beside,
         says=("holds a model (config.json)",)),
    Case("export below a file", "export", to("{data}/out"), says=("is a file, not a folder",)),
    Case("export where nothing can be made", "export", to("/proc/regatta"),
         says=("--output_path /proc/regatta",)),
    Case("export that another process writes", "export", prepare=lock_out,
         says=("being written by process 4711",)),
    Case("prefix with folders", "export", ("--model_prefix", "../../model"),
         says=("--model_prefix", "without folders")),
    Case("prefix of nothing", "export", ("--model_prefix", ""), says=("--model_prefix",)),
    Case("flags of a run in an export", "export", ("--data_file", "x.jsonl", "--top_p", "0.9"),
         code=0, says=("--data_file", "--top_p", "no effect here"), writes_output=True),
    Case("export of a model with a program's name", "export", prepare=writes(model__json="{}"),
         code=0, writes_output=True),
    Case("export of dummy weights", "export", ("--load_format", "dummy"), code=0,
         writes_output=True),
    Case("export, block size", "export", ("--block_size", "24"), says=("block_size 24", "16, 32")),
    Case("export, device unknown", "export", ("--device", "tpu"), says=("tpu",)),
    Case("export, scheme unknown", "export", ("--quant_type", "wint3"), says=("wint3",)),
    Case("export, groups that do not divide", "export",
         ("--quant_type", "wint4", "--weightonly_group_size", "128"),
         says=("group size 128 does not divide",)),
    Case("export, skipped names unknown", "export",
         ("--quant_type", "wint8", "--skip_list_names", "dwon"), says=("dwon",)),
    Case("export, static cache without scales", "export", ("--cachekv_int8_type", "static"),
         says=("cachekv_scales.json",)),
    Case("export, scales that are no JSON", "export", ("--cachekv_int8_type", "static"),
         prepare=writes(cachekv_scales__json="{"), says=("cachekv_scales.json",)),
    Case("export of weights cut short", "export", prepare=cut_weights,
         says=("model.safetensors",)),
    Case("export without weights", "export",
         prepare=lambda s: (s.model / "model.safetensors").unlink(), says=("safetensors",)),
    Case("export, more layers than weights", "export", prepare=config_has(num_hidden_layers=3),
         says=("num_hidden_layers is 3",)),
    Case("export, other vocabulary than weights", "export", prepare=config_has(vocab_size=600),
         says=("600",)),
    Case("export of an unknown family", "export", prepare=config_has(model_type="gpt9"),
         says=("gpt9",)),
    Case("export of an unknown quantization", "export",
         prepare=config_has(quantization_config={"quant_method": "magic"}), says=("magic",)),
    Case("export of an export", "export", ("--model_name_or_path", "{folder}/export"),
         prepare=good_export, says=("safetensors",)),
]  # fmt: skip

STATIC = [
    Case("a good static run", "static", prepare=good_export, code=0,
         says=("2 of 2 results",), writes_output=True),
    Case("static mode without an export", "static", says=("manifest.json",),
         prepare=lambda s: (s.folder / "export").mkdir()),
    Case("manifest: a list", "static", prepare=rewritten("manifest.json", lambda _: b"[1]"),
         says=("holds a list", "manifest.json")),
    Case("manifest: cut short", "static", prepare=rewritten("manifest.json", lambda d: d[:90]),
         says=("manifest.json is not valid JSON",)),
    Case("manifest: an older format", "static", prepare=edited(format=1),
         says=("format 1, not 2", "export it again")),
    Case("manifest: a key too many", "static", prepare=edited(blok_size=16),
         says=("blok_size", "did you mean block_size")),
    Case("manifest: a key missing", "static", prepare=edited(head_dim=ABSENT),
         says=("lacks the field 'head_dim'",)),
    Case("manifest: num_layers", "static", prepare=edited(num_layers=3),
         says=("num_layers is 3 in manifest.json and 2 in config.json",)),
    Case("manifest: num_layers beyond all", "static", prepare=edited(num_layers=10**9),
         says=("num_layers is 1000000000 (allowed",)),
    Case("manifest: num_kv_heads", "static", prepare=edited(num_kv_heads=4),
         says=("num_kv_heads is 4",)),
    Case("manifest: head_dim", "static", prepare=edited(head_dim=64), says=("head_dim is 64",)),
    Case("manifest: vocab_size", "static", prepare=edited(vocab_size=513),
         says=("vocab_size is 513 in manifest.json and 512",)),
    Case("manifest: eos_token_ids", "static", prepare=edited(eos_token_ids=[7]),
         says=("eos_token_ids is [7] in manifest.json",)),
    Case("manifest: eos_token_ids of texts", "static", prepare=edited(eos_token_ids=["</s>"]),
         says=("eos_token_ids is a list (allowed: a list of token ids)",)),
    Case("manifest: model_type", "static", prepare=edited(model_type="mistral"),
         says=("model_type is mistral in manifest.json",)),
    Case("manifest: block_size", "static", prepare=edited(block_size=32),
         says=("key_cache_0", "block_size 32")),
    Case("manifest: block_size of none", "static", prepare=edited(block_size=24),
         says=("block_size is 24 (allowed: one of 16",)),
    Case("manifest: a longer max_length", "static", prepare=edited(max_length=128),
         says=("rotary table has 64 rows, and max_length is 128",)),
    Case("manifest: max_length of a text", "static", prepare=edited(max_length="64"),
         says=('max_length is "64"',)),
    Case("manifest: dtype", "static", prepare=edited(dtype="float16"),
         says=("dtype float16", "key_cache_0")),
    Case("manifest: dtype unknown", "static", prepare=edited(dtype="int3"),
         says=('dtype is "int3" (allowed',)),
    Case("manifest: kv_format", "static", prepare=edited(kv_format="int8_dynamic"),
         says=("kv_format int8_dynamic", "12 inputs")),
    Case("manifest: adapters that it does not take", "static",
         prepare=edited(adapters={"slots": ["qkv", "out", "gate_up", "down"], "page_ranks": 8}),
         says=("it takes 12 inputs", "with adapters, make 30")),
    Case("manifest: adapters of other pages", "static", prepare=edited(adapters={"page_ranks": 9}),
         says=("adapters is an object (allowed: null, or",)),
    Case("adapters of a program without", "static", ("--lora_modules", "sql={model}"),
         prepare=good_export, says=("it takes no adapters of requests", "--enable_lora")),
    Case("manifest: device", "static", ("--device", "cpu"), prepare=edited(device="gpu"),
         says=("device is gpu",)),
    Case("manifest: compiled, and is not", "static", prepare=edited(library_abi=99),
         says=("ABI 99",) if library.find() else ("not built here",)),
    Case("manifest: paddle_version", "static", prepare=edited(paddle_version="2.0.0"),
         says=("traced with Paddle 2.0.0",)),
    Case("manifest: scheme", "static", prepare=edited(scheme="a8w8"), says=("was edited",)),
    Case("manifest: scheme unknown", "static", prepare=edited(scheme="dense,zip"),
         says=("scheme is", "allowed")),
    Case("manifest: head_scheme", "static", prepare=edited(head_scheme="a8w8"),
         says=("was edited",)),
    Case("manifest: rounded", "static", prepare=edited(rounded={"group_size": 64}),
         says=("was edited",)),
    Case("manifest: rounded of no field", "static", prepare=edited(rounded={"bits": 3}),
         says=("rounded is an object (allowed",)),
    Case("manifest: a file elsewhere", "static",
         prepare=edited(files={"../model/config.json": {"num_bytes": 1, "sha256": ["0" * 64]}}),
         says=("files is an object (allowed", "without folders")),
    Case("manifest: no files", "static", prepare=edited(files={}),
         says=("has no model.json and no model.pdiparams",)),
    Case("program: writes files", "static", prepare=renamed("1.save_combine"),
         says=("pd_op.save_combine", "not on the list")),
    Case("program: runs Python", "static", prepare=renamed("1.py_func"), says=("pd_op.py_func",)),
    Case("program: branches", "static", prepare=renamed("1.if"), says=("pd_op.if",)),
    Case("program: a control character in a name", "static", prepare=renamed("\x1b[2J"),
         says=(r"\x1b[2j", "not on the list"), never_says=("Traceback", "\x1b")),
    Case("program: cut short", "static", prepare=rewritten("model.json", lambda d: d[:9999]),
         says=("model.json is not valid JSON",)),
    Case("program: nested without end", "static",
         prepare=rewritten("model.json", lambda _: b"[" * 100_000), says=("nested too deeply",)),
    Case("program: gone", "static", prepare=rewritten("model.json", lambda _: None),
         says=("lacks", "model.json")),
    Case("program: under another name", "static", ("--model_prefix", "other"),
         prepare=good_export, says=("no other.json", "--model_prefix")),
    Case("program: another prefix's path", "static", ("--model_prefix", "../export/model"),
         prepare=good_export, says=("--model_prefix",)),
    Case("weights: cut short", "static", prepare=rewritten("model.pdiparams", lambda d: d[:-9]),
         says=("model.pdiparams", "cut short")),
    Case("weights: longer", "static", prepare=rewritten("model.pdiparams", lambda d: d + b"\0"),
         says=("model.pdiparams", "end at byte")),
    Case("weights: a header's lie", "static",
         prepare=rewritten("model.pdiparams", lambda d: d[:16] + b"\xff\xff\xff\x7f" + d[20:]),
         says=("no header of a tensor at byte 0",)),
    Case("weights: one bit", "static",
         prepare=rewritten("model.pdiparams", lambda d: d[:-1] + bytes([d[-1] ^ 1])),
         says=("model.pdiparams is not as it was exported",)),
    Case("weights: a folder", "static", prepare=params_folder,
         says=("model.pdiparams is not a file",)),
    Case("export's config: more layers", "static",
         prepare=edited("config.json", num_hidden_layers=3),
         says=("num_layers is 2 in manifest.json and 3 in config.json",)),
    Case("export's config: another hidden_size", "static",
         prepare=edited("config.json", hidden_size=128), says=("hidden_size",)),
    Case("export's config: another epsilon", "static",
         prepare=edited("config.json", rms_norm_eps=0.01),
         says=("config.json", "not as it was exported")),
    Case("export's tokenizer: gone", "static", prepare=rewritten("tokenizer_config.json",
         lambda _: None), says=("tokenizer_config.json is missing",)),
]  # fmt: skip

if library.find() is not None:
    STATIC += [
        Case("compiled program as plain", "static", ("--inference_model", "false"),
             prepare=edited(compiled=True), says=("pass --inference_model true",)),
        Case("compiled program: scheme", "static", prepare=edited(compiled=True, scheme="a8w8"),
             says=("its layers are dense, and scheme is a8w8",)),
        Case("compiled program: not said to be", "static",
             prepare=edited(compiled=True, library_abi=None),
             says=("custom_op.regatta_embedding", "not on the list")),
    ]  # fmt: skip

CASES = [*EXPORTS, *(replace(case, untouched=("export",)) for case in STATIC)]
