"""Merges a LoRA adapter into its model: one checkpoint, in the layout of the model's own.

    python predict/merge_lora_params.py --model_name_or_path DIR --lora_path DIR --output_path OUT

Takes PaddleNLP's flags. One tensor is in memory at a time; products are added in float32, and
rounded to the dtype that the model's tensor has. A run that was interrupted goes on where it was
when the same command is given again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from predict.system.flag import no_effect
from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

from predict.cli.command import command
from predict.cli.flags import Flag, parse_flags
from predict.cli.identity import folder_digest
from predict.cli.writing import INTERRUPTED, write_checkpoint, writing_flags
from predict.config.adapters import ADAPTER_FILES
from predict.errors import UserError
from predict.system.console import say
from predict.system.files import find_model_dir
from predict.system.outputs import check_place
from predict.system.signals import Signals

PROG = "merge_lora_params.py"
USAGE = "--model_name_or_path DIR --lora_path DIR --output_path OUT [--flag [VALUE] ...]"
GROUP = "Merging"
NEEDED = ("model_name_or_path", "lora_path", "output_path")
# fmt: off
FLAGS = (
    Flag(GROUP, "model_name_or_path", "str", None,
         "Directory of the model that the adapter was trained on, not quantized. Needed."),
    Flag(GROUP, "lora_path", "str", None,
         "Directory of the LoRA adapter, PaddleNLP's or PEFT's. Needed."),
    Flag(GROUP, "output_path", "str", None,
         "Directory to write the merged model to. Needed.", aliases=("merge_lora_model_path",)),
    Flag(GROUP, "dtype", "str", None,
         "What tensors of floating point become. Default: those that the model has.",
         choices=("float32", "bfloat16", "float16")),
    *writing_flags(GROUP),
    Flag(GROUP, "device", "str", "cpu",
         "Where PaddleNLP computes.",
         availability=no_effect("products are added on the CPU, as files are read.")),
    Flag(GROUP, "low_gpu_mem", "bool", False,
         "PaddleNLP's switch to spare the GPU.",
         availability=no_effect("one tensor is in memory at a time, and none on a GPU.")),
    Flag(GROUP, "safe_serialization", "bool", True,
         "PaddleNLP's choice of safetensors files.",
         availability=no_effect("safetensors files are written, which PaddleNLP reads.")),
)
# fmt: on


@command(INTERRUPTED)
def main(argv: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit status."""
    from predict.loading.adapters.model import Merging
    from predict.loading.conversion import parse_size

    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "", USAGE)
    missing = [f"--{name}" for name in NEEDED if flags[name] is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; write {PROG} {USAGE}")
    for note in flags.notes:
        say(f"note: {note}")
    source = find_model_dir(flags["model_name_or_path"])
    adapter = find_model_dir(flags["lora_path"], "lora_path", ADAPTER_FILES)
    target = Path(flags["output_path"])
    check_place("output_path", target, {"model_name_or_path": source, "lora_path": adapter})
    merging = Merging(
        source,
        adapter,
        parse_size(flags["max_shard_size"]),
        flags["dtype"],
        {"adapter": folder_digest(adapter, is_small=True)},
    )
    write_checkpoint(merging, "output_path", target, signals, flags["progress"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
