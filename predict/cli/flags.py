"""The command line as one table: parsing, --help, refusals and docs/flags.md come from it.

`docs/make_flags.py` writes that page. Imports no Paddle and nothing slow: --help must
answer at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NoReturn

from predict.config.cache import CACHE_TYPES
from predict.config.quantization import FP8_WINT4
from predict.config.schemes import SCHEMES
from predict.errors import UserError, nearest, quoted
from predict.system.files import (
    MAX_JSON_DIGITS,
    MAX_NAME,
    check_name,
    json_type,
    parse_json,
    read_json_object,
)
from predict.system.ranges import RANGES, check_range

Kind = Literal["str", "int", "float", "bool", "ints", "strs", "json", "texts", "pairs"]


@dataclass(frozen=True)
class Availability:
    """Whether a flag does something in this release, and what to do where it does not.

    `values`: patterns of the values concerned; empty: any value that differs from the default. One
    that is "not here" is another command's: any value is refused.
    """

    level: Literal["works", "not yet", "no effect", "not here"]
    sentence: str = ""
    values: tuple[str, ...] = ()

    def concerns(self, value: Any, default: Any) -> bool:
        """Whether an explicitly given value meets this refusal or note."""
        if self.level == "works":
            return False
        if self.values:
            return any(fnmatchcase(str(value), pattern) for pattern in self.values)
        return bool(value != default) or self.level == "not here"


WORKS = Availability("works")


def not_yet(today: str, *values: str) -> Availability:
    """Refused by name; `today` says what works in this release."""
    return Availability("not yet", today, values)


def no_effect(why: str) -> Availability:
    """Accepted from PaddleNLP scripts, with a note that says why nothing changes."""
    return Availability("no effect", why)


def not_here(instead: str, *values: str) -> Availability:
    """Refused by name, as another command's; `instead` says what there is for it here."""
    return Availability("not here", instead, values)


@dataclass(frozen=True)
class Flag:
    """One row: how a flag is written, what it means, and whether it works in this release."""

    group: str
    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    availability: Availability = WORKS
    aliases: tuple[str, ...] = ()
    null_words: tuple[str, ...] = field(default=("none", ""))  # texts that mean "not given"

    def parse(self, text: str) -> Any:
        """The value that a command line's `text` stands for.

        Raises argparse.ArgumentTypeError saying what is allowed.
        """
        if self.default is None and text.lower() in self.null_words:
            return None
        try:
            if self.kind == "str":
                return self._choose(text)
            _check_text(text, self.kind)
            value = _PARSERS[self.kind](text)
            if self.kind in ("strs", "pairs"):  # some name folders
                for part in value if self.kind == "strs" else (value,):
                    check_name("", part)
            if self.name in RANGES:
                for number in value if self.kind == "ints" else (value,):
                    check_range("", number, self.name)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{quoted(text)} is not {_KIND_WORDS[self.kind]}"
            ) from None
        return value

    def _choose(self, text: str) -> str:
        if self.choices and text not in self.choices:
            guess = nearest(text.lower()[:MAX_NAME], self.choices)
            hint = f"; did you mean {guess}?" if guess else ""
            raise UserError(
                f"{quoted(text)} is not known (allowed: {', '.join(self.choices)}){hint}"
            )
        check_name("", text)
        return text


def _check_text(text: str, kind: str) -> None:
    """Raises UserError for bytes that are not UTF-8, which no tokenizer takes, and for NUL."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{quoted(text)} is not UTF-8 text (character {error.start + 1}); write it in UTF-8"
        ) from None
    if "\0" in text and kind != "texts":
        raise UserError(f"{quoted(text)} has a NUL character; leave it out")


_TRUE, _FALSE = ("true", "1", "yes", "y", "t", "on"), ("false", "0", "no", "n", "f", "off")
_KIND_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "ints": "integers separated by commas",
    "strs": "names separated by commas",
    "json": "JSON",
    "texts": 'a text or a JSON list of texts, ["...", ...]',
    "pairs": "a name and a folder, as name=path",
}


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _parse_json(text: str) -> Any:
    return parse_json(text, quoted(text, 80))


def _parse_int(text: str) -> int:
    if len(text) > MAX_JSON_DIGITS:
        raise UserError(f"{quoted(text)} has {len(text)} digits (allowed: {MAX_JSON_DIGITS})")
    return int(text)


def _parse_ints(text: str) -> list[int]:
    values = [_parse_int(part) for part in text.strip("[] ").replace(",", " ").split()]
    if not values:
        raise ValueError(text)
    return values


def _parse_pair(text: str) -> str:
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError(text)
    return text


_PARSERS: Mapping[str, Any] = {
    "int": _parse_int,
    "float": float,
    "bool": _parse_bool,
    "ints": _parse_ints,
    "strs": lambda text: text.strip("[] ").replace(",", " ").split(),
    "json": _parse_json,
    # A text may begin with a bracket; a list of texts begins with two characters.
    "texts": lambda text: _parse_json(text) if text.startswith('["') else [text],
    "pairs": _parse_pair,  # one of the words behind the flag
}


_MODEL = "Model"
_FILES = "Input and output"
_RUN = "Device and mode"
_FUSED = "Operators and cache"
_LENGTHS = "Lengths and batch"
_SAMPLING = "Sampling"
_ANSWERS = "Answers"
_QUANT = "Quantization"
_SPECULATE = "Speculative decoding"
_ADAPTERS = "Adapters"
_BENCH = "Benchmark"
_COMPAT = "Known from PaddleNLP"

# PaddleNLP's names, the short ones of its tools, and w4a8.
_ALIASES = tuple(alias for row in SCHEMES.values() for alias in row.aliases)
QUANT_TYPES = (*SCHEMES, "a8w8c8", "a8w8c8_fp8", FP8_WINT4, *_ALIASES)
_NO_EAGLE = not_yet("inference_with_reference, lookahead and draft_model work.")
_NO_REFT = not_yet(
    "ReFT edits hidden states of chosen tokens of a prompt, which is no change of weights and no "
    "operator here does: PaddleNLP's reft_predictor.py runs it. LoRA adapters run: --lora_path."
)

# fmt: off
FLAGS: tuple[Flag, ...] = (
    Flag(_MODEL, "model_name_or_path", "str", None,
         "Directory of the checkpoint, a GGUF file or, with --mode static, directory of the "
         "exported model. A hub name "
         "is found in $REGATTA_MODEL_DIR and in the local Hugging Face and PaddleNLP caches; "
         "nothing is downloaded. Required."),
    Flag(_MODEL, "dtype", "str", None,
         "Type of weights, activations and KV cache. Required, but in static mode it is the "
         "exported model's.",
         choices=("float32", "bfloat16", "float16")),
    Flag(_MODEL, "load_format", "str", "auto",
         "auto reads the checkpoint; dummy makes seeded random weights from config.json alone.",
         choices=("auto", "dummy")),
    Flag(_MODEL, "model_prefix", "str", "model",
         "Stem of the exported program's files, in static mode."),
    Flag(_MODEL, "model_type", "str", None,
         "Family of the model, where its config.json has no model_type.",
         choices=("gpt-3", "ernie-3.5-se", "llama-img2txt", "qwen-img2txt", "opt-img2txt"),
         availability=not_yet("Text models run, and the text models of gemma3 and mistral3.",
                              "*-img2txt")),
    Flag(_MODEL, "chat_template", "str", None,
         "The tokenizer's own template, or its family's, when not given; none turns it off; else a "
         "template file, a directory with one, or the name of a published format.",
         null_words=()),
    Flag(_FILES, "data_file", "str", None,
         'Prompts: JSON lines {"src": ..., "tgt": ...} or one JSON list of them; src is a text '
         "or a conversation. Without it a built-in prompt runs."),
    Flag(_FILES, "output_file", "str", "output.json",
         'Results: JSON lines {"src", "tgt", "output"} in input order. The file is replaced once '
         "all are there; until then OUTPUT_FILE.journal has each answer that is finished."),
    Flag(_FILES, "resume", "bool", False,
         "Go on after an interrupted run of the same command: answers in its journal are kept, "
         "and the other prompts run."),
    Flag(_RUN, "device", "str", "gpu",
         "cpu, gpu, gpu:N, or another type that the installed Paddle has (xpu, npu, npu:1, ...), "
         "which runs the plain operators. When not given: gpu where one is usable and the compiled "
         "operators run, else cpu; an exported model runs where it was exported for."),
    Flag(_RUN, "mode", "str", "dynamic",
         "dynamic runs the checkpoint; static runs what export/export_model.py wrote.",
         choices=("dynamic", "static")),
    Flag(_RUN, "avx_model", "bool", False,
         "PaddleNLP's name for the CPU path: selects the compiled operators (--inference_model) "
         "on the CPU.",
         aliases=("avx_mode",)),
    Flag(_RUN, "avx_type", "str", None,
         "Type the CPU computes in; must agree with --dtype.",
         choices=("fp16", "bf16", "fp16_int8"),
         availability=not_yet("--avx_type fp16 and bf16 work.", "fp16_int8")),
    Flag(_RUN, "avx_cachekv_type", "str", None,
         "Type of the KV cache on the CPU: fp16 with --dtype float16; int8 is "
         "--cachekv_int8_type dynamic.",
         choices=("fp16", "int8")),
    Flag(_FUSED, "inference_model", "bool", False,
         "Use the compiled, fused operators; without it the plain-Paddle ones run. In static "
         "mode it is the exported model's."),
    Flag(_FUSED, "block_attn", "bool", False,
         "Paged KV cache: blocks are taken as a sequence grows, and shared by equal prefixes. "
         "Prompts and decoding sequences take turns. Implies --inference_model. Without it a "
         "sequence reserves its whole cache."),
    Flag(_FUSED, "append_attn", "bool", False,
         "As --block_attn, which it replaces, with prompts and decoding sequences in one step."),
    Flag(_FUSED, "block_size", "int", 64,
         "Tokens per block of the KV cache (16, 32, 64 or 128); in static mode it is the "
         "exported model's."),
    Flag(_FUSED, "prefix_caching", "bool", True,
         "Keep the blocks of finished prompts and share them; needs --block_attn or "
         "--append_attn. Off under --benchmark unless given."),
    Flag(_FUSED, "chunked_prefill", "bool", True,
         "Split long prompts over several steps, so that decoding neighbours do not wait."),
    Flag(_FUSED, "batch_invariant", "bool", False,
         "On a GPU, give a request the same text to the last bit whatever is beside it, with and "
         "without drafts, at some cost; the compiled operators of the CPU always do."),
    Flag(_FUSED, "mla_use_matrix_absorption", "bool", None,
         "DeepSeek's attention over latents themselves (true), or over keys and values that are "
         "made of them (false); when not given, whichever takes fewer products, but over latents "
         "with --batch_invariant. On a GPU false is as when not given: long spans alone, on "
         "Hopper. In static mode it is the exported model's."),
    Flag(_FUSED, "num_cache_blocks", "int", None,
         "Blocks of the KV cache; when not given, what the batch needs or the memory holds."),
    Flag(_FUSED, "gpu_memory_utilization", "float", 0.9,
         "Share of the device's memory for weights and KV cache."),
    Flag(_LENGTHS, "batch_size", "int", 1,
         "Sequences decoded together; a finished one is replaced at once."),
    Flag(_LENGTHS, "src_length", "int", 1024,
         "Longest prompt in tokens; a longer one keeps its first src_length tokens, with a "
         "warning."),
    Flag(_LENGTHS, "max_length", "int", 2048,
         "Longest sequence in tokens, prompt and output together; at most the exported model's "
         "in static mode."),
    Flag(_LENGTHS, "max_new_tokens", "int", None,
         "Longest output in tokens, in place of --max_length; with both, whichever is reached "
         "first."),
    Flag(_LENGTHS, "min_length", "int", 0,
         "Output tokens before an end-of-text token may end it."),
    Flag(_LENGTHS, "total_max_length", "int", None,
         "Upper limit on --max_length, which it stands for when given alone."),
    Flag(_LENGTHS, "max_num_batched_tokens", "int", None,
         "Tokens computed per step; when not given, 512 on the CPU and 8192 on a GPU."),
    Flag(_SAMPLING, "decode_strategy", "str", "sampling",
         "sampling; greedy_search for the most likely token each time; or beam_search for a likely "
         "sequence, as Hugging Face transformers searches.",
         choices=("sampling", "greedy_search", "beam_search")),
    Flag(_SAMPLING, "num_beams", "int", 4,
         "Beams of beam_search, of each of the --batch_size prompts."),
    Flag(_SAMPLING, "length_penalty", "float", 1.0,
         "beam_search divides a sum of log-probabilities by length to this power: above 0 favours "
         "long answers."),
    Flag(_SAMPLING, "early_stopping", "str", "false",
         "When beam_search ends, with num_beams answers finished: true, at once; false, when no "
         "beam would score better if it ended now; never, when none could at any length.",
         choices=("false", "true", "never")),
    Flag(_SAMPLING, "top_k", "int", 1,
         "Sample among this many most likely tokens; 1 is greedy, 0 takes all."),
    Flag(_SAMPLING, "top_p", "float", 1.0,
         "Sample among the most likely tokens that together reach this probability; 1 takes all."),
    Flag(_SAMPLING, "min_p", "float", 0.0,
         "Leave out tokens less likely than this times the likeliest; 0 takes all."),
    Flag(_SAMPLING, "typical_p", "float", 1.0,
         "Sample among the tokens whose surprise is nearest to the expected one that together "
         "reach this probability; 1 takes all."),
    Flag(_SAMPLING, "temperature", "float", 1.0,
         "Divides the logits before sampling; 0 is greedy."),
    Flag(_SAMPLING, "repetition_penalty", "float", 1.0,
         "Above 1 makes tokens that were already seen less likely."),
    Flag(_SAMPLING, "presence_penalty", "float", 0.0,
         "Taken off the logits of tokens that the output has."),
    Flag(_SAMPLING, "frequency_penalty", "float", 0.0,
         "Taken off the logit of a token for each time that the output has it."),
    Flag(_SAMPLING, "no_repeat_ngram_size", "int", 0,
         "No n-gram of this size comes twice in prompt and output; 0 turns it off."),
    Flag(_SAMPLING, "logit_bias", "json", None,
         'Added to logits: {"TOKEN_ID": AMOUNT, ...}.'),
    Flag(_SAMPLING, "bad_words", "json", None,
         'Never completed: ["a word", [TOKEN_ID, ...], ...]; a word with and without a space in '
         "front."),
    Flag(_SAMPLING, "generation_config", "str", "none",
         "auto samples as the model's generation_config.json recommends, but for what a flag or a "
         "key of the prompt says; the name of such a file, or of its folder, likewise; none leaves "
         "it out."),
    Flag(_SAMPLING, "seed", "int", 0,
         "Same seed and flags, same output."),
    Flag(_ANSWERS, "stop", "texts", None,
         'Ends the output before this text, or before any of ["...", ...].',
         null_words=()),
    Flag(_ANSWERS, "include_stop_str_in_output", "bool", False,
         "Ends the output behind the text of --stop."),
    Flag(_ANSWERS, "stop_token_ids", "ints", None,
         "Tokens that end the output, besides end-of-text tokens."),
    Flag(_ANSWERS, "num_return_sequences", "int", 1,
         'Answers to each prompt, samples or the best of --num_beams beams: above 1 the result has '
         '"outputs" too.',
         aliases=("n",)),
    Flag(_ANSWERS, "best_of", "int", None,
         "Samples, of which the --num_return_sequences likeliest are returned."),
    Flag(_ANSWERS, "logprobs", "int", None,
         "Adds to each result the logprobs of its tokens and of so many likeliest ones, 0 to 20."),
    Flag(_ANSWERS, "prompt_logprobs", "int", None,
         "Likewise, of the prompt's tokens."),
    Flag(_QUANT, "quant_type", "str", None,
         "Round the weights of a checkpoint while it is read, without calibration; a quantized "
         "checkpoint says its own type. c8 in a name adds the static int8 cache; _wint4 has "
         "experts in 4 bits.",
         choices=QUANT_TYPES),
    Flag(_QUANT, "cachekv_int8_type", "str", None,
         "KV cache in 8 bits: dynamic (int8, a scale per head and token), static (int8, scales "
         "of cachekv_scales.json), fp8, which latents take too; or in 4: int4.",
         choices=CACHE_TYPES),
    Flag(_QUANT, "weightonly_group_size", "int", -1,
         "Input features per scale of weight-only types (32, 64 or 128); -1 is one group. "
         "weight_only_mxfp4 has 32 always."),
    Flag(_QUANT, "weight_block_size", "ints", None,
         "128,128: a scale per block of a8w8_fp8; when not given, per output feature."),
    Flag(_QUANT, "lm_head_quant_type", "str", None,
         "Round the LM head too; when not given, it stays in --dtype.",
         choices=tuple(SCHEMES)),
    Flag(_QUANT, "skip_list_names", "strs", None,
         "Linears with one of these in their name stay in --dtype."),
    Flag(_QUANT, "moe_quant_type", "str", None,
         "Likewise, of experts alone; when not given, --quant_type is theirs too.",
         choices=(*SCHEMES, FP8_WINT4, *_ALIASES)),
    Flag(_QUANT, "use_fake_parameter", "bool", False,
         "To measure speed: scales that a calibrated checkpoint, or --cachekv_int8_type static, "
         "would read from files and does not find are made up. Answers mean nothing then."),
    Flag(_SPECULATE, "speculate_method", "str", None,
         "Where draft tokens come from.",
         choices=("inference_with_reference", "lookahead", "draft_model", "eagle", "mtp"),
         availability=not_yet(
             "inference_with_reference, lookahead and draft_model work.", "eagle", "mtp")),
    Flag(_SPECULATE, "speculate_max_draft_token_num", "int", 1,
         "Draft tokens per sequence and step, 1 to 15."),
    Flag(_SPECULATE, "speculate_max_ngram_size", "int", 1,
         "Longest n-gram that is looked up in prompt and output."),
    Flag(_SPECULATE, "speculate_verify_window", "int", None,
         "PaddleNLP's TopP + window verification: a second-best draft stands when this many "
         "behind it are the likeliest; 2 when only the next flag is given. Text that is sampled "
         "is not exact then."),
    Flag(_SPECULATE, "speculate_max_candidate_len", "int", None,
         "The same: a draft stands when it is among this many likeliest tokens within top_p, 2 to "
         "10; 5 when only the flag above is given."),
    Flag(_SPECULATE, "draft_model_name_or_path", "str", None,
         "Directory, or GGUF file, of the draft model: a smaller checkpoint with the same tokens."),
    Flag(_SPECULATE, "draft_model_quant_type", "str", None,
         "Rounds the draft model's weights while they are read; --quant_type is the model's.",
         choices=QUANT_TYPES),
    Flag(_SPECULATE, "return_full_hidden_states", "bool", False,
         "Hidden states of all positions, for eagle and mtp.",
         availability=_NO_EAGLE),
    Flag(_ADAPTERS, "lora_path", "str", None,
         "Directory of a LoRA adapter, PaddleNLP's or PEFT's: added to the weights while they are "
         "read, ahead of any rounding."),
    Flag(_ADAPTERS, "lora_modules", "pairs", None,
         "LoRA adapters that requests may name, each with its folder, as sql=adapters/sql "
         "chat=adapters/chat: requests of one batch may each have their own.",
         null_words=()),
    Flag(_ADAPTERS, "max_loras", "int", 8,
         "Adapters of --max_lora_rank that lie on the device at once; requests with others wait "
         "until there is room."),
    Flag(_ADAPTERS, "max_lora_rank", "int", 16,
         "Largest rank of an adapter that requests may name."),
    Flag(_ADAPTERS, "max_cpu_loras", "int", 64,
         "Adapters whose values stay in the host's memory; others are read again when they are "
         "needed."),
    Flag(_ADAPTERS, "prefix_path", "texts", None,
         "A tuned prefix: the folder that PaddleNLP saved, or a .npy file. A JSON list has "
         "several: a path alone for requests that name none, name=path for those that name it as "
         "their adapter. --max_length counts it."),
    Flag(_ADAPTERS, "export_precache", "bool", False,
         "As PaddleNLP's: --prefix_path is to be there. An export takes any prefix without it."),
    Flag(_ADAPTERS, "reft", "bool", False,
         "Use a ReFT adapter.",
         availability=_NO_REFT),
    Flag(_ADAPTERS, "reft_path", "str", None,
         "Directory of a ReFT adapter.",
         availability=_NO_REFT),
    Flag(_BENCH, "benchmark", "bool", False,
         "Measure speed: every prompt padded to src_length, decoded to max_length without an "
         "early stop, warm-up apart. A data file is answered first when given."),
    Flag(_BENCH, "benchmark_file", "str", None,
         "Write the benchmark's numbers as JSON; needs --benchmark."),
    Flag(_BENCH, "total_request_num", "int", None,
         "Requests of the benchmark, or copies of the built-in prompt; when not given, "
         "batch_size."),
    Flag(_COMPAT, "use_flash_attention", "bool", False,
         "Attention kernel of PaddleNLP's plain models.",
         availability=no_effect("--inference_model selects the attention kernel.")),
    Flag(_COMPAT, "dynamic_insert", "bool", False,
         "Replace finished sequences at once.",
         availability=no_effect("finished sequences are always replaced at once.")),
    Flag(_COMPAT, "output_via_mq", "bool", True,
         "Tokens leave through a message queue.",
         availability=no_effect("tokens never pass through a message queue.")),
    Flag(_COMPAT, "enable_memory_optim", "bool", True,
         "Memory reuse in the static predictor.",
         availability=no_effect("the runtime plans its own memory.")),
    Flag(_COMPAT, "init_fleet_worker", "bool", True,
         "Join a fleet of processes.",
         availability=no_effect("one process runs the model.")),
)
# fmt: on


@dataclass(frozen=True)
class FlagValues:
    """Parsed flags: `flags["name"]` is the value, default included."""

    values: Mapping[str, Any]
    explicit: frozenset[str]  # names that the command line gave, with more than "none"
    notes: tuple[str, ...] = ()  # one line each, for stderr

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def given(self, *names: str) -> bool:
        """Whether the command line gave every one of these."""
        return self.explicit.issuperset(names)


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are UserErrors in place of usage dumps."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists the flags")


USAGE = "--model_name_or_path DIR --dtype TYPE [--flag [VALUE] ...]"


def build_parser(
    flags: Sequence[Flag] = FLAGS,
    prog: str = "predictor.py",
    description: str = "",
    usage: str = USAGE,
) -> argparse.ArgumentParser:
    """The argparse parser of a flag table; its result lacks the values that were not given."""
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage=f"{prog} {usage}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
    )
    groups: dict[str, Any] = {}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        groups[flag.group].add_argument(
            *(f"--{name}" for name in (flag.name, *flag.aliases)),
            dest=flag.name,
            type=flag.parse,
            help=_help_text(flag).replace("%", "%%") if _is_listed(flag) else argparse.SUPPRESS,
            metavar=_metavar(flag),
            **_NUM_WORDS.get(flag.kind, {}),
        )
    return parser


def parse_flags(
    argv: Sequence[str],
    flags: Sequence[Flag] = FLAGS,
    prog: str = "predictor.py",
    description: str = "",
    usage: str = USAGE,
) -> FlagValues:
    """The flags of a command line.

    Accepts `--flag value`, `--flag=value`, `--flag` alone for booleans, and `-` for `_` in names.
    Raises UserError for unknown flags, values out of range and features that are not there yet;
    raises SystemExit(0) after printing --help.
    """
    parser = build_parser(flags, prog, description, usage)
    namespace, unknown = parser.parse_known_args([_underscored(word) for word in argv])
    if unknown:
        raise _unknown_error(unknown[0], flags, prog)
    given = vars(namespace)
    notes = []
    for flag in flags:
        availability = flag.availability
        if flag.name not in given or not availability.concerns(given[flag.name], flag.default):
            continue
        if availability.level == "not yet":
            shown = "" if flag.kind == "bool" else f" {given[flag.name]}"
            raise UserError(
                f"--{flag.name}{shown} is not available in this release. {availability.sentence}"
            )
        if availability.level == "not here":
            shown = f" {given[flag.name]}" if availability.values else ""
            raise UserError(f"--{flag.name}{shown} has no place here: {availability.sentence}")
        notes.append(f"--{flag.name} has no effect here: {availability.sentence}")
    values = {flag.name: given.get(flag.name, flag.default) for flag in flags}
    explicit = frozenset(name for name, value in given.items() if value is not None)
    return FlagValues(values, explicit, tuple(notes))


def with_file(argv: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """A command line whose first word may be a .json file of flags, which the others may change.

    Raises UserError.
    """
    words = list(argv)
    if not words or not words[0].endswith(".json") or words[0].startswith("-"):
        return words
    kinds = {name: flag.kind for flag in flags for name in (flag.name, *flag.aliases)}
    path, found = Path(words[0]), []
    for name, value in read_json_object(path).items():
        if value is None:
            continue
        kind = kinds.get(name, "str")
        each = value if kind == "pairs" and isinstance(value, list) else [value]
        found += [f"--{name}={_word_of(one, kind, path, name)}" for one in each]
    return [*found, *words[1:]]


def _word_of(value: Any, kind: Kind, path: Path, name: str) -> str:
    """How a command line writes a value of a JSON file."""
    if kind in ("json", "texts") and not isinstance(value, str):
        return json.dumps(value)
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, (dict, list)) or part is None:
            raise UserError(
                f"{path}: {quoted(name)} has {json_type(part)}; a flag takes a text, a number, a "
                "boolean or a list of them"
            )
    return ",".join(str(part).lower() if isinstance(part, bool) else str(part) for part in parts)


def markdown_table(flags: Sequence[Flag] = FLAGS) -> str:
    """A table of flags for a page."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    group = ""
    for flag in flags:
        if flag.group != group:
            group = flag.group
            rows.append(f"| **{group}** | | |")
        default = "" if flag.default is None else f"`{_shown(flag.default)}`"
        rows.append(f"| `--{flag.name}` | {default} | {_help_text(flag, with_default=False)} |")
    return "\n".join(rows)


def _is_listed(flag: Flag) -> bool:
    return flag.availability.level != "not here" or bool(flag.availability.values)


def _help_text(flag: Flag, with_default: bool = True) -> str:
    availability = flag.availability
    text = flag.help
    if len(flag.choices) > 3 or (flag.choices and not with_default):
        text += f" One of {', '.join(flag.choices)}."
    if with_default and flag.default is not None:
        text += f" Default: {_shown(flag.default)}."
    if availability.level == "not yet" and availability.values:
        values = ", ".join(value.strip("*") for value in availability.values)
        text += f" Not in this release: {values}."
    elif availability.level == "not yet":
        text += " Not in this release."
    elif availability.level == "not here" and availability.values:
        text += f" Not here: {', '.join(availability.values)}."
    elif availability.level == "no effect":
        text += f" No effect: {availability.sentence}"
    return text


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "{" + ",".join(flag.choices) + "}" if len(flag.choices) <= 3 else "NAME"
    return _METAVARS[flag.kind]


# Words behind a flag, where it is not one; a flag of pairs may come again.
_NUM_WORDS: Mapping[str, Mapping[str, Any]] = {
    "bool": {"nargs": "?", "const": True},
    "pairs": {"nargs": "+", "action": "extend"},
}
_METAVARS: Mapping[str, str] = {
    "str": "TEXT",
    "int": "N",
    "float": "X",
    "bool": "true|false",
    "ints": "N,N",
    "strs": "NAME,NAME",
    "json": "JSON",
    "texts": "TEXT",
    "pairs": "NAME=PATH",
}


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, list) else str(default)


def _underscored(word: str) -> str:
    """--batch-size as --batch_size; the value after = stays."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return "--" + name.replace("-", "_") + equals + value


def _unknown_error(word: str, flags: Sequence[Flag], prog: str) -> UserError:
    if not word.startswith("-"):
        return UserError(
            f"{quoted(word)} follows no flag that takes a value; write each value as --flag VALUE "
            "(quote a value with spaces)"
        )
    name = quoted(word.lstrip("-").partition("=")[0])[1:-1]
    guess = nearest(name, [known for flag in flags for known in (flag.name, *flag.aliases)])
    hint = f"did you mean --{guess}?" if guess else f"{prog} --help lists the flags"
    return UserError(f"unknown flag --{name}; {hint}")


if __name__ == "__main__":
    print(markdown_table())
