"""The command line as one table: parsing, --help, refusals and docs/flags.md come from it.

Most rows are fields of configs (predict.system.options); the others stand here. Imports no Paddle
and nothing slow: --help must answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from predict.cli.launched import DEGREE, with_launched
from predict.config.engine import TOPICS
from predict.errors import UserError, quoted
from predict.names import hint
from predict.request import SamplingParams
from predict.system.files import json_type, read_json_object
from predict.system.flag import KINDS, FlagKind, no_effect, not_yet
from predict.system.flag import Flag as Flag
from predict.system.options import Checked, flags_of, option
from predict.system.ranges import COUNT, MAX_LENGTH, Range


@dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """What one run of the command line reads, writes and measures."""

    # fmt: off
    data_file: str | None = option(None,
        'Prompts: JSON lines {"src": ..., "tgt": ...} or one JSON list of them; src is a text '
        "or a conversation. Without it a built-in prompt runs.",
        group="Input and output")
    output_file: str = option("output.json",
        'Results: JSON lines {"src", "tgt", "output"} in input order. The file is replaced once '
        "all are there; until then OUTPUT_FILE.journal has each answer that is finished.")
    resume: bool = option(False,
        "Go on after an interrupted run of the same command: answers in its journal are kept, "
        "and the other prompts run.")
    task: str = option("generate",
        "generate answers prompts; embed writes the vectors of texts (src) to --output_file, as "
        "JSON lines {\"src\", \"embedding\"}, or as rows of a .npy file. An export for it gives "
        "hidden states, too.",
        allowed=("generate", "embed"))
    benchmark: bool = option(False,
        "Measure speed: every prompt padded to src_length, decoded to max_length without an "
        "early stop, warm-up apart. A data file is answered first when given.",
        group="Benchmark")
    benchmark_file: str | None = option(None,
        "Write the benchmark's numbers as JSON; needs --benchmark.")
    num_requests: int = option(1,
        "Requests of the benchmark, or copies of the built-in prompt; when not given, batch_size.",
        name="total_request_num", flag_default=None, allowed=COUNT)
    # fmt: on


COMPAT = "Known from PaddleNLP"


def without_effect(*rows: tuple[str, FlagKind, Any, str, str]) -> tuple[Flag, ...]:
    """Flags of PaddleNLP that change nothing here: name, kind, default, help, and why not."""
    return tuple(
        Flag(COMPAT, name, kind, default, text, availability=no_effect(why))
        for name, kind, default, text, why in rows
    )


_GROUPS = (
    "Model",
    "Input and output",
    "Device and mode",
    "Several processes",
    "Operators and cache",
    "Lengths and batch",
    "Sampling",
    "Answers",
    "Quantization",
    "Speculative decoding",
    "Adapters",
    "Pictures",
    "Benchmark",
    COMPAT,
)
_RUN, _, _FUSED, _LENGTHS, _SAMPLING = _GROUPS[2:7]
_SPECULATE, _ADAPTERS = _GROUPS[9:11]
_NO_REFT = not_yet(
    "ReFT edits hidden states of chosen tokens of a prompt, which is no change of weights and no "
    "operator here does: PaddleNLP's reft_predictor.py runs it. LoRA adapters run: --lora_path."
)

# fmt: off
# Flags that are no field of a config: they stand for several, or for none.
_OTHERS = (
    Flag(_RUN, "avx_model", "bool", False,
         "PaddleNLP's name for the compiled operators on the CPU.",
         aliases=("avx_mode",)),
    Flag(_RUN, "avx_type", "str", None,
         "Type the CPU computes in; must agree with --dtype.",
         choices=("fp16", "bf16", "fp16_int8"),
         availability=not_yet("--avx_type fp16 and bf16 work.", "fp16_int8")),
    Flag(_RUN, "avx_cachekv_type", "str", None,
         "Type of the KV cache on the CPU: fp16 with --dtype float16; int8 is "
         "--cachekv_int8_type dynamic.",
         choices=("fp16", "int8")),
    Flag(_FUSED, "block_attn", "bool", False,
         "Paged KV cache: blocks are taken as a sequence grows, and shared by equal prefixes. "
         "Prompts and decoding sequences take turns. Without it a sequence reserves its whole "
         "cache."),
    Flag(_FUSED, "append_attn", "bool", False,
         "As --block_attn, which it replaces, with prompts and decoding sequences in one step."),
    Flag(_LENGTHS, "total_max_length", "int", None,
         "Upper limit on --max_length, which it stands for when given alone.",
         allowed=Range(2, MAX_LENGTH)),
    Flag(_SAMPLING, "decode_strategy", "str", "sampling",
         "sampling; greedy_search for the most likely token each time; or beam_search for a likely "
         "sequence, as Hugging Face transformers searches.",
         choices=("sampling", "greedy_search", "beam_search")),
    Flag(_SAMPLING, "generation_config", "str", "none",
         "auto samples as the model's generation_config.json recommends, but for what a flag or a "
         "key of the prompt says; the name of such a file, or of its folder, likewise; none leaves "
         "it out."),
    Flag(_SPECULATE, "return_full_hidden_states", "bool", False,
         "For an export: its program gives the hidden states that the --speculate_method reads, "
         "eagle, mtp or medusa. A run needs no such flag."),
    Flag(_ADAPTERS, "export_precache", "bool", False,
         "As PaddleNLP's: --prefix_path is to be there. An export takes any prefix without it."),
    Flag(_ADAPTERS, "reft", "bool", False,
         "Use a ReFT adapter.",
         availability=_NO_REFT),
    Flag(_ADAPTERS, "reft_path", "str", None,
         "Directory of a ReFT adapter.",
         availability=_NO_REFT),
    *without_effect(
        ("use_flash_attention", "bool", False, "Attention kernel of PaddleNLP's plain models.",
         "the operators of --inference_model have their own."),
        ("dynamic_insert", "bool", False, "Replace finished sequences at once.",
         "finished sequences are always replaced at once."),
        ("output_via_mq", "bool", True, "Tokens leave through a message queue.",
         "tokens never pass through a message queue."),
        ("enable_memory_optim", "bool", True, "Memory reuse in the static predictor.",
         "the runtime plans its own memory."),
        ("init_fleet_worker", "bool", True, "Join a fleet of processes.",
         "one process runs the model.")),
)
# fmt: on


def _sorted(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    return tuple(sorted(flags, key=lambda flag: _GROUPS.index(flag.group)))


# SamplingParams checks its numbers itself: some flags may have others, as --top_p 0.
FLAGS = _sorted(
    [
        *flags_of(*TOPICS.values(), RunOptions),
        *(replace(flag, allowed=None) for flag in flags_of(SamplingParams)),
        *_OTHERS,
    ]
)


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


class Clash(NamedTuple):
    """Values that do not go together; `message` may name any of them in braces."""

    broken: Callable[[Any], bool]
    message: str


def check_rules(rules: Iterable[Clash], given: Any, values: Mapping[str, Any]) -> None:
    """Raises UserError where `given`, whose values these are, breaks a rule."""
    for rule in rules:
        if rule.broken(given):
            raise UserError(rule.message.format(**values))


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are UserErrors in place of usage dumps."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists the flags")


USAGE = "--model_name_or_path DIR [--flag [VALUE] ...]"


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
            **KINDS[flag.kind].num_words,
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
    if sys.argv[0].startswith("regatta "):  # see regatta.__main__
        prog = sys.argv[0]
    parser = build_parser(flags, prog, description, usage)
    namespace, unknown = parser.parse_known_args([_underscored(word) for word in argv])
    if unknown:
        raise _unknown_error(unknown[0], flags, prog)
    given = vars(namespace)
    if any(flag.name == DEGREE for flag in flags):
        given = dict(with_launched(given))
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


def _word_of(value: Any, kind: FlagKind, path: Path, name: str) -> str:
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
    number = "Some" if flag.kind == "strs" else "One"
    if flag.choices and (len(flag.choices) > 3 or number == "Some" or not with_default):
        text += f" {number} of {', '.join(flag.choices)}."
    if with_default and flag.default is not None:
        text += f" Default: {_shown(flag.default)}."
    values = ", ".join(value.strip("*") for value in availability.values)
    if availability.level == "not yet":
        text += f" Not in this release{': ' if values else ''}{values}."
    elif availability.level == "not here" and values:
        text += f" Not here: {values}."
    elif availability.level == "no effect":
        text += f" No effect: {availability.sentence}"
    return text


def _metavar(flag: Flag) -> str:
    if flag.choices and flag.kind != "strs":
        return "{" + ",".join(flag.choices) + "}" if len(flag.choices) <= 3 else "NAME"
    return KINDS[flag.kind].metavar


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


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
    said = hint(name, [known for flag in flags for known in (flag.name, *flag.aliases)], "--")
    return UserError(f"unknown flag --{name}{said or f'; {prog} --help lists the flags'}")
