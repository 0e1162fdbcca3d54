"""Which kind of adapter a folder holds."""

from __future__ import annotations

from pathlib import Path

from predict.errors import UserError
from predict.loading.adapters import paddlenlp, peft
from predict.loading.adapters.record import Adapter

READERS = {peft.CONFIG: peft.read, paddlenlp.CONFIG: paddlenlp.read}
# Config files of other methods, and what to do with them.
OTHERS = {
    "vera_config.json": (
        "a VeRA adapter, whose file has two vectors for each linear and no matrices: PaddleNLP "
        "makes those from the base model; merge it with PaddleNLP's merge_vera_params.py and pass "
        "the merged model"
    ),
    "lokr_config.json": (
        "a LoKr adapter; merge it with PaddleNLP's merge_lokr_params.py and pass the merged model"
    ),
    "prefix_config.json": "prefix tuning, which --prefix_path takes",
}


def read_adapter(directory: str | Path) -> Adapter:
    """The LoRA adapter of a folder, PaddleNLP's or PEFT's, its shapes consistent in themselves.

    Reads headers alone. Raises UserError where there is none, or one that is not supported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; an adapter is one, with {_allowed()} in it")
    found = [name for name in READERS if (directory / name).exists()]
    for name, what in OTHERS.items():
        if not found and (directory / name).exists():
            raise UserError(f"{directory} holds {what}")
    if len(found) != 1:
        got = "both" if found else "neither"
        raise UserError(
            f"{directory} holds {got} of {_allowed()}; a LoRA adapter is a folder with one of them"
        )
    adapter = READERS[found[0]](directory)
    if not adapter.linears and not adapter.replaced:
        raise UserError(f"{directory}: the adapter's files hold no tensors; save it again")
    return adapter


def _allowed() -> str:
    return " and ".join(READERS)
