"""Writes docs/flags.md from the flag tables of the commands.

python docs/make_flags.py          # writes the page
python docs/make_flags.py --check  # leaves with 1 where the page is not what it would write
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from predict.cli.flags import FLAGS, Flag, markdown_table  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
HEAD = """\
# Every flag

<!-- Made by docs/make_flags.py: do not edit. -->

`--flag`, `--flag true` and `--flag=false` all work. `--help` of each command lists its flags too.
A flag that is marked "Not in this release" is known and refused by name. A flag that is marked
"No effect" is accepted, and a note on stderr says why nothing changes.

A wrong spelling is an error that names the nearest flag.
"""


def sections() -> list[tuple[str, str, Sequence[Flag]]]:
    """Command, what it is for, and its own flags."""
    from export.export_model import OWN_FLAGS as EXPORT
    from predict.batch_ray import OWN_FLAGS as BATCH_RAY
    from predict.bench.compare import FLAGS as COMPARE
    from predict.bench.kernels import FLAGS as KERNELS
    from predict.bench.peer import FLAGS as PEER
    from predict.bench.serving.__main__ import FLAGS as SERVING
    from predict.bench.throughput import OWN_FLAGS
    from predict.convert import FLAGS as CONVERT
    from predict.flask_server import OWN_FLAGS as FLASK_SERVER
    from predict.merge_lora_params import FLAGS as MERGE
    from predict.serve_ray import OWN_FLAGS as SERVE_RAY
    from predict.server.flags import OWN_FLAGS as SERVER
    from quant.config import FLAGS as QUANTIZE
    from quant.evaluate import FLAGS as EVALUATE

    return [
        ("predict/predictor.py", "Answers the prompts of a data file.", FLAGS),
        (
            "predict.server",
            "Answers requests over HTTP. Takes the flags of the predictor that make an engine or "
            "say how to sample, and these. The first argument may be a JSON file of flags. Flags "
            "about files, benchmarks and beams are refused by name.",
            SERVER,
        ),
        (
            "predict/flask_server.py",
            "PaddleNLP's command for a server. Takes the flags of the server, and these.",
            FLASK_SERVER,
        ),
        (
            "predict.batch_ray",
            "Answers a data file with many replicas, on Ray. Takes the flags of the predictor but "
            "for the benchmark's, and these.",
            BATCH_RAY,
        ),
        (
            "predict.serve_ray",
            "Answers requests over HTTP with many replicas, on Ray. Takes the flags of the server, "
            "and these.",
            SERVE_RAY,
        ),
        (
            "export/export_model.py",
            "Writes a static model. Takes the flags of the predictor, and these.",
            EXPORT,
        ),
        (
            "quant/run_quantization.py",
            "Quantizes with calibration data. The first argument may be a JSON file of flags.",
            QUANTIZE,
        ),
        (
            "predict.convert",
            "Writes a checkpoint in another layout. The folders to read and to write come first.",
            CONVERT,
        ),
        (
            "predict/merge_lora_params.py",
            "Writes a model with a LoRA adapter merged. Takes PaddleNLP's flags.",
            MERGE,
        ),
        ("quant/evaluate.py", "Measures what quantization costs.", EVALUATE),
        (
            "predict.bench.throughput",
            "Measures an engine run. Takes the flags of the predictor, and these.",
            OWN_FLAGS,
        ),
        (
            "predict.bench.compare",
            "Says what became faster or slower: between two files of numbers, which come first, or "
            "two commands that take turns.",
            COMPARE,
        ),
        ("predict.bench.peer", "Measures llama.cpp beside Regatta on a CPU.", PEER),
        ("predict.bench.kernels", "Measures single operators.", KERNELS),
        ("predict.bench.serving", "Puts load on a server that speaks OpenAI's API.", SERVING),
    ]


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command, purpose, flags in sections():
        # No links are meant; what stands between backticks is shown as it is.
        table = re.sub(
            r"`[^`]*`|\[", lambda m: m[0] if m[0] != "[" else r"\[", markdown_table(flags)
        )
        parts.append(f"\n## {command}\n\n{purpose}\n\n{table}\n")
    return "".join(parts)


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it."""
    text = page()
    if "--check" in words:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current; run: python docs/make_flags.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
