"""Outputs that would destroy something, journals that somebody damaged or made, folders in use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from tests.hostile.case import COMMANDS, Case, Prepare, Sandbox, link, lock_out

JOURNAL = "out.json.journal"
STATE = "out.json/calibration/state.json"


def hard_link(name: str, target: str) -> Prepare:
    return lambda sandbox: os.link(sandbox.folder / target, sandbox.folder / name)


def has(**files: str) -> Prepare:
    """Writes files of the sandbox; "__" in a name stands for a dot."""
    return all_of(*(holds(name.replace("__", "."), text) for name, text in files.items()))


def write(sandbox: Sandbox, name: str, content: str | bytes) -> None:
    path = sandbox.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def holds(name: str, content: str) -> Prepare:
    """Writes one file of the sandbox."""
    return lambda sandbox: write(sandbox, name, content)


def all_of(*steps: Prepare) -> Prepare:
    def prepare(sandbox: Sandbox) -> None:
        for step in steps:
            step(sandbox)

    return prepare


def other_model(*names: str) -> Prepare:
    """Another folder with files of these names."""
    return all_of(*(holds(f"other/{name}", "{}") for name in names))


def draft_here(sandbox: Sandbox) -> None:
    other_model("config.json", "model.safetensors")(sandbox)


DRAFT = (
    *("--speculate_method", "draft_model", "--draft_model_name_or_path", "{folder}/other"),
    *("--append_attn", "--inference_model"),
)


def header(sandbox: Sandbox, *words: str) -> dict[str, Any]:
    """The header of the journal that the case's own command would write."""
    from predict.cli.flags import parse_flags
    from predict.cli.identity import run_inputs
    from predict.cli.run_config import PredictorConfig
    from predict.cli.work import prepare

    argv = [sandbox.fill(word) for word in (*COMMANDS["predict"][1], *words)]
    config = PredictorConfig.from_flags(parse_flags(argv))
    work = prepare(config)
    inputs = run_inputs(config, work.items, work.token_ids)
    return {"regatta_journal": 1, "num_prompts": len(work.items), "inputs": inputs}


def answer(index: int, **more: Any) -> bytes:
    result = {"src": ("hello", "you")[index % 2], "tgt": "", "output": "kept", **more}
    return b'{"index": %d, "result": %s}\n' % (index, json.dumps(result).encode())


Lines = list[bytes]


def journal(
    change: Callable[[Lines], Any] = lambda lines: None, *indices: int, words: tuple[str, ...] = ()
) -> Prepare:
    """A journal with answers to these prompts (the first one), and a change to its lines."""

    def prepare(sandbox: Sandbox) -> None:
        first = json.dumps(header(sandbox, *words)).encode() + b"\n"
        lines = [first, *map(answer, indices or (0,))]
        change(lines)
        write(sandbox, JOURNAL, b"".join(lines))

    return prepare


def appended(line: bytes) -> Prepare:
    return journal(lambda lines: lines.append(line))


def header_has(**changes: Any) -> Prepare:
    def change(lines: Lines) -> None:
        lines[0] = json.dumps(json.loads(lines[0]) | changes).encode() + b"\n"

    return journal(change)


def input_was(**changes: Any) -> Prepare:
    def change(lines: Lines) -> None:
        values = json.loads(lines[0])
        values["inputs"] |= changes
        lines[0] = json.dumps(values).encode() + b"\n"

    return journal(change)


def to(path: str, *more: str) -> tuple[str, ...]:
    return ("--output_file", path, *more)


def measured(path: str) -> tuple[str, ...]:
    """A benchmark beside the answers."""
    return ("--benchmark", "--benchmark_file", path, "--max_length", "68")


def refused_journal(name: str, prepare: Prepare, *says: str) -> Case:
    """A journal that no run goes on from, and that stays."""
    return Case(name, "predict", ("--resume",), prepare, says=says, untouched=(JOURNAL,))


def resumed(name: str, prepare: Prepare | None, *says: str, words: tuple[str, ...] = ()) -> Case:
    """A run that goes on and ends well."""
    argv = ("--resume", *words)
    return Case(name, "predict", argv, prepare, code=0, says=says, writes_output=True)


MODEL_SAYS = ("lies in the folder of --model_name_or_path", "choose another --output_file")
DATA_SAYS = ("is the file of --data_file, too",)
IN_MODEL = "lies in the folder of --model_name_or_path"

# fmt: off
CASES = [
    # Models and adapters.
    Case("output over the weights", "predict", to("{model}/model.safetensors"), says=MODEL_SAYS),
    Case("output beside the weights", "predict", to("{model}/new.json"), says=MODEL_SAYS),
    Case("output over config.json by dots", "predict", to("{model}/../model/config.json"),
         says=MODEL_SAYS),
    Case("output through a link to the model", "predict", to("{folder}/link/x.json"),
         link("link", "model"), says=MODEL_SAYS),
    Case("output that is a link to the weights", "predict", to("{folder}/link"),
         link("link", "model/model.safetensors"), says=MODEL_SAYS),
    Case("output that is a hard link to the weights", "predict", to("{folder}/hard"),
         hard_link("hard", "model/model.safetensors"), says=MODEL_SAYS, untouched=("hard",)),
    Case("output in the draft model", "predict", to("{folder}/other/x.json", *DRAFT), draft_here,
         says=("lies in the folder of --draft_model_name_or_path",), untouched=("other",)),
    Case("output that is the draft's weights by a hard link", "predict",
         to("{folder}/hard", *DRAFT),
         all_of(draft_here, hard_link("hard", "other/model.safetensors")),
         says=("lies in the folder of --draft_model_name_or_path",), untouched=("other", "hard")),
    Case("output in some other model", "predict", to("{folder}/other/x.json"),
         other_model("config.json", "model-00001-of-00002.safetensors"),
         says=("holds a model (config.json)",), untouched=("other",)),
    Case("output in an export", "predict", to("{folder}/other/x.json"),
         other_model("manifest.json", "model.pdiparams"),
         says=("holds a model (manifest.json)",), untouched=("other",)),
    Case("output in an adapter", "predict", to("{folder}/other/x.json"),
         other_model("adapter_config.json", "adapter_model.safetensors"),
         says=("holds a model (adapter_config.json)",), untouched=("other",)),
    Case("benchmark file in the model", "predict", measured("{model}/config.json"),
         says=(IN_MODEL, "choose another --benchmark_file")),
    # Inputs and other outputs.
    Case("output over the data file", "predict", to("{data}"), says=DATA_SAYS),
    Case("output over the data file by dots", "predict", to("{model}/../prompts.jsonl"),
         says=DATA_SAYS),
    Case("output that is a link to the data file", "predict", to("{folder}/link"),
         link("link", "prompts.jsonl"), says=DATA_SAYS),
    Case("output that is a hard link to the data file", "predict", to("{folder}/hard"),
         hard_link("hard", "prompts.jsonl"), says=DATA_SAYS, untouched=("hard",)),
    Case("output whose journal is the data file", "predict",
         ("--data_file", "{folder}/out.json.journal"),
         holds(JOURNAL, '{"src": "a"}\n'),
         says=("out.json.journal is the file of --data_file",), untouched=(JOURNAL,)),
    Case("output over the chat template", "predict", to("{folder}/t.jinja", "--chat_template",
         "{folder}/t.jinja"), has(t__jinja="{{ messages[0]['content'] }}"),
         says=("is the file of --chat_template, too",), untouched=("t.jinja",)),
    Case("output that is the benchmark file", "predict", measured("{out}"),
         says=("--benchmark_file", "is the file of --output_file, too")),
    Case("benchmark file that is the journal", "predict", measured("{out}.journal"),
         says=("out.json.journal is the file of --benchmark_file",)),
    Case("benchmark file over the data file", "predict", measured("{data}"), says=DATA_SAYS),
    # Paths.
    Case("output that is a folder", "predict", to("{folder}"), says=("is a directory",)),
    Case("output without a name", "predict", ("--output_file=",), says=("--output_file",)),
    Case("output that is the folder above", "predict", to("{folder}/.."), says=("is a directory",)),
    Case("output in no folder", "predict", to("{folder}/no/such/x.json"),
         says=("no/such does not exist; create it first",)),
    Case("output below a file", "predict", to("{data}/x.json"), says=("does not exist",)),
    Case("output where nothing can be made", "predict", to("/proc/regatta.json"),
         says=("--output_file /proc/regatta.json cannot be",)),
    Case("output with too long a name", "predict", to("{folder}/" + 255 * "x"),
         says=("File name too long",)),
    Case("output with a name too long to be written beside", "predict",
         to("{folder}/" + 245 * "x"), says=("File name too long",)),
    Case("output with a control sequence in its name", "predict", to("{folder}/a\x1b[2J.json"),
         code=0, says=("results are in", "a\\x1b[2J.json"), never_says=("\x1b",)),
    Case("output that is a link to nothing yet", "predict", to("{folder}/link"),
         link("link", "new.json"), code=0, says=("2 of 2 results",)),
    Case("output that is the null device", "predict", to("/dev/null"), code=0,
         says=("2 of 2 results are in /dev/null",)),
    Case("output that another process writes", "predict", (), lock_out,
         says=("being written by process 4711",)),
    Case("lock of a process that died", "predict", (), has(__out__json__lock="4711\n"), code=0,
         says=("2 of 2 results",), writes_output=True),
    Case("lock that is a link", "predict", (), link(".out.json.lock", "prompts.jsonl"),
         says=("cannot be locked",)),
    # What lies where the journal goes.
    Case("journal that is a folder", "predict", (),
         lambda sandbox: (sandbox.folder / JOURNAL).mkdir(), says=("is a directory",)),
    Case("journal that is a link to the data file", "predict", ("--resume",),
         link(JOURNAL, "prompts.jsonl"), says=("is the file of --data_file",)),
    Case("journal that is a link to something", "predict", (),
         all_of(has(precious="x\ny\n"), link(JOURNAL, "precious")),
         says=("is a link, a folder or a device",), untouched=("precious",)),
    Case("journal that is a hard link to something", "predict", ("--resume",),
         all_of(has(precious="x\ny\n"), hard_link(JOURNAL, "precious")),
         says=("is a link, a folder or a device",), untouched=("precious",)),
    Case("journal that is a pipe", "predict", ("--resume",),
         lambda sandbox: os.mkfifo(sandbox.folder / JOURNAL),
         says=("journal",)),
    Case("file of somebody else's at the journal's place", "predict", (),
         has(out__json__journal="my notes\n"), code=0,
         says=("they are kept in", "out.json.journal.1"), writes_output=True),
    Case("journal with answers and no --resume", "predict", (), journal(), code=0,
         says=("out.json.journal.1", "--resume would have gone on"), writes_output=True),
    Case("journal that is kept beside two others", "predict", (),
         all_of(journal(), has(out__json__journal__1="x", out__json__journal__2="y")), code=0,
         says=("out.json.journal.3",), untouched=("out.json.journal.1", "out.json.journal.2"),
         writes_output=True),
    # Journals to go on from.
    resumed("journal of one answer", journal(), "1 of 2 results are kept", "1 prompts run"),
    resumed("journal of all answers", journal(lambda lines: None, 1, 0), "2 of 2 results"),
    resumed("journal with a torn line", journal(lambda lines: lines.append(answer(1)[:-9])),
            "1 of 2 results are kept"),
    resumed("journal torn behind its header", journal(lambda lines: lines.__setitem__(1, b'{"in')),
            "holds no answers; all 2 prompts run"),
    resumed("journal torn in its header", journal(lambda lines: lines.__setitem__(slice(0, 9),
            [lines[0][:30]])), "holds no answers"),
    resumed("journal that ends in zeros", journal(lambda lines: lines.append(bytes(4096))),
            "1 of 2 results are kept"),
    resumed("journal that is empty", has(out__json__journal=""), "holds no answers"),
    resumed("journal that is not there", None, "there is no", "all 2 prompts run"),
    resumed("journal with a failed answer", appended(answer(1, error="it broke")),
            "1 of them failed before"),
    resumed("journal of a run with another batch", journal(), "1 of 2 results are kept",
            words=("--batch_size", "2")),
    refused_journal("journal of other flags", input_was(temperature=0.25),
                    "--temperature was 0.25 and is 1.0", "leave --resume out"),
    refused_journal("journal of another seed and top_k", input_was(seed=3, top_k=9),
                    "--seed was 3 and is 0", "--top_k was 9"),
    refused_journal("journal of another data file", input_was(**{"prompts of --data_file": "x"}),
                    "the prompts of --data_file changed"),
    refused_journal("journal of another model",
                    input_was(**{"content of --model_name_or_path": "x"}),
                    "the content of --model_name_or_path changed"),
    refused_journal("journal of another tokenizer",
                    input_was(**{"tokenizer or its chat template": "x"}), "tokenizer"),
    refused_journal("journal of more prompts", header_has(num_prompts=3), "had 3 prompts"),
    refused_journal("journal without inputs", header_has(inputs=None), "is of another run"),
    refused_journal("journal of a newer format", header_has(regatta_journal=2), "has format 2"),
    refused_journal("journal whose format is a text", header_has(regatta_journal="1"),
                    "is not the journal of a run"),
    refused_journal("journal that begins with an answer", journal(lambda lines: lines.pop(0)),
                    "is not the journal of a run"),
    refused_journal("journal that is a list", has(out__json__journal="[1]\n{}\n"),
                    "is not the journal of a run"),
    refused_journal("journal that is no JSON", has(out__json__journal="hello\n"),
                    "line 1 of", "not valid JSON"),
    refused_journal("journal with an index beyond the prompts", appended(answer(7)),
                    "line 3 of", "prompt 7, and there are 2"),
    refused_journal("journal with a negative index", appended(answer(-1)), "of prompt -1"),
    refused_journal("journal with an index of many digits",
                    appended(b'{"index": ' + 999 * b"1" + b', "result": {}}\n'), "999 digits"),
    refused_journal("journal with an answer twice", appended(answer(0)), "is in the journal twice"),
    refused_journal("journal with a damaged line in the middle",
                    journal(lambda lines: lines.insert(1, b'{"index": 1, "resu\n')), "line 2 of"),
    refused_journal("journal with zeros in the middle",
                    journal(lambda lines: lines.insert(1, bytes(64) + b"\n")), "line 2 of"),
    refused_journal("journal with bytes that are no text",
                    appended(b'{"index": 1, "result": {"\xff": 1}}\n'), "not UTF-8"),
    refused_journal("journal nested without end", appended(b'{"index": ' + 9999 * b"[" + b"\n"),
                    "line 3 of"),
    refused_journal("journal with a key twice", appended(b'{"index": 1, "index": 0}\n'), "twice"),
    Case("resume to a device", "predict", to("/dev/null", "--resume"),
         says=("/dev/null is none; leave --resume out",)),
    # Evaluation and quantization.
    Case("table in the model", "evaluate", to("{model}/table.json"), says=MODEL_SAYS),
    Case("table over the data file", "evaluate", to("{data}"), says=DATA_SAYS),
    Case("table over the calibration file", "evaluate",
         to("{folder}/c.txt", "--calibration_file", "{folder}/c.txt"), has(c__txt="some text"),
         says=("is the file of --calibration_file, too",), untouched=("c.txt",)),
    Case("table in a checkpoint that is measured", "evaluate",
         to("{folder}/other/t.json", "--quant_type", "{folder}/other"),
         other_model("config.json", "model.safetensors"),
         says=("holds a model (config.json)",), untouched=("other",)),
    Case("table that is a hard link into a checkpoint that is measured", "evaluate",
         to("{folder}/hard", "--quant_type", "{folder}/other"),
         all_of(draft_here, hard_link("hard", "other/model.safetensors")),
         says=("lies in the folder of --quant_type",), untouched=("other", "hard")),
    Case("quantization over its model", "quantize", ("--output_path", "{model}"),
         says=("is the folder of --model_name_or_path",)),
    Case("quantization into its model", "quantize", ("--output_path", "{model}/q"),
         says=(IN_MODEL,)),
    Case("quantization around its model", "quantize", ("--output_path", "{folder}"),
         says=("holds the folder of --model_name_or_path",)),
    Case("quantization through a link into its model", "quantize",
         ("--output_path", "{folder}/link/q"), link("link", "model"), says=(IN_MODEL,)),
    Case("quantization to a file", "quantize", ("--output_path", "{data}"),
         says=("is a file; give the name of a folder",)),
    Case("quantization where another process quantizes", "quantize", (), lock_out,
         says=("being written by process 4711",)),
    Case("quantization over a finished checkpoint", "quantize", (),
         holds("out.json/config.json", "{}"),
         says=("holds a finished checkpoint", "--overwrite_output_dir")),
    Case("quantization beside its data", "quantize",
         ("--data_file", "{out}/text.txt", "--do_gptq"),
         holds("out.json/text.txt", "text"),
         says=("holds the --data_file",)),
    Case("state of a run that is cut short", "quantize", (),
         holds(STATE, '{"format": 1, "inp'),
         says=("state.json is not valid JSON", "--overwrite_output_dir to begin anew")),
    Case("state of a run that claims a million layers", "quantize", (),
         holds(STATE, '{"format": 1, "inputs": {}, "num_done": 1000000}'),
         says=("is not a state that this version wrote",)),
    Case("state of a run with other inputs", "quantize", (),
         holds(STATE, '{"format": 1, "inputs": {"model": "x"}, "num_done": 0}'),
         says=("interrupted run with other inputs: model was 'x'",)),
    Case("state that is a link", "quantize", ("--overwrite_output_dir",),
         all_of(lambda sandbox: sandbox.out.mkdir(),
                link("out.json/calibration", "model")),
         says=("is no folder",)),
]
# fmt: on
