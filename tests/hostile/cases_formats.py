"""Weights of other formats that claim, hide or run something, through the commands that read them.

Every payload by itself is in tests/loading.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file

from tests.hostile.case import Case, Prepare, Sandbox
from tests.support.pickles import PAYLOADS
from tests.support.stored_formats import (
    WEIGHTS,
    Tensors,
    as_paddle,
    paddle_file,
    state_pickle,
    tensor_pickle,
    torch_file,
    torch_zip,
    write_parts,
)

TORCH = "pytorch_model.bin"
PART = "model_state.tp01.pdparams"
MARKER = "marker"
SAID = {"eval": "builtin__.eval", "stack_global": "posix.system", "persistent id": "not for a stor"}
HUGE = tensor_pickle("0", "FloatStorage", 1 << 30, (1 << 15, 1 << 15), (1 << 15, 1))
REPEATED = tensor_pickle("0", "FloatStorage", 6, (1 << 15, 1 << 15), (0, 0))


def written(name: str, make: Callable[[Path, Tensors], bytes]) -> Prepare:
    """The model's tensors in another file, which `make` makes of the folder and of them."""

    def prepare(sandbox: Sandbox) -> None:
        tensors = load_file(sandbox.model / WEIGHTS)
        (sandbox.model / WEIGHTS).unlink()
        (sandbox.model / name).write_bytes(make(sandbox.folder, tensors))

    return prepare


def torch(pickled: bytes, **entries: bytes) -> Prepare:
    """A file of torch.save with this pickle."""
    made = torch_zip({"data.pkl": pickled, **entries})
    return written(TORCH, lambda folder, tensors: made)


def payload_in_torch(name: str) -> Prepare:
    return written(
        TORCH, lambda folder, _: torch_zip({"data.pkl": PAYLOADS[name].made(folder / MARKER)})
    )


def payload_in_part(name: str) -> Prepare:
    """Two parts, of which the second one would write a file."""

    def prepare(sandbox: Sandbox) -> None:
        tensors = as_paddle(load_file(sandbox.model / WEIGHTS))
        (sandbox.model / WEIGHTS).unlink()
        write_parts(sandbox.model, tensors, 2, 1)
        (sandbox.model / PART).write_bytes(PAYLOADS[name].made(sandbox.folder / MARKER))

    return prepare


def escaping(folder: Path, tensors: Tensors) -> bytes:
    """An archive that would write beside the folder if anything unpacked it."""
    data = torch_zip({"data.pkl": b"\x80\x02}.", "data/0": b"x"})
    return data.replace(b"archive/data/0", b"../../" + MARKER.encode().ljust(8, b"x"))


def over_a_file(sandbox: Sandbox) -> None:
    """Somebody's file where the folder is to be."""
    sandbox.out.write_text("mine")


CASES = [
    *(
        Case(
            f"PyTorch's pickle by {command}: {name}",
            command,
            prepare=payload_in_torch(name),
            says=(TORCH, said),
            untouched=(MARKER,),
        )
        for command in ("predict", "convert")
        for name, said in SAID.items()
    ),
    *(
        Case(
            f"a rank's pickle by {command}",
            command,
            prepare=payload_in_part("eval"),
            says=(PART, PAYLOADS["eval"].says),
            untouched=(MARKER,),
        )
        for command in ("predict", "convert")
    ),
    Case(
        "a zip that leads out of its folder",
        "convert",
        prepare=written(TORCH, escaping),
        says=(TORCH, "an entry of the name b'../../marker"),
        untouched=(MARKER,),
    ),
    Case(
        "a storage of 4 GB in 1 KB",
        "predict",
        prepare=torch(state_pickle({"a": HUGE}), **{"data/0": b"12345678"}),
        says=(TORCH, "should have 4294967296 bytes, and its entry has 8"),
    ),
    Case(
        "24 bytes that stand for 4 GB",
        "convert",
        prepare=torch(state_pickle({"a": REPEATED}), **{"data/0": bytes(24)}),
        says=(TORCH, "takes 4294967296 bytes, and its storage has 24"),
    ),
    Case(
        "a pickle of Paddle called PyTorch's",
        "predict",
        prepare=written(TORCH, lambda folder, tensors: paddle_file(tensors)),
        says=(TORCH, "it is no zip archive"),
    ),
    Case(
        "a file of torch.save",
        "predict",
        prepare=written(TORCH, lambda folder, tensors: torch_file(tensors)),
        code=0,
        writes_output=True,
    ),
    Case("a good conversion", "convert", code=0, writes_output=True),
    Case(
        "a conversion into the model's folder",
        "convert",
        ("--format", "paddle"),
        prepare=lambda sandbox: (sandbox.folder / "out.json").symlink_to(sandbox.model),
        says=("TO", "is the folder of FROM"),
    ),
    Case(
        "a conversion over a file",
        "convert",
        prepare=over_a_file,
        says=("TO", "is a file; give the name of a folder"),
    ),
]
