"""Where clients may have adapters loaded from: one folder, and nothing that links lead out to."""

from __future__ import annotations

import os

from predict.errors import UserError
from predict.server.errors import ApiError, invalid
from predict.system.files import check_name

PARAM = "lora_path"


def adapter_folder(root: str, path: str) -> str:
    """The folder of an adapter, links followed; path: absolute, or from `root` on.

    Raises ApiError: 403 for what lies outside of `root`, whether or not it is there, 404 for no
    folder.
    """
    try:
        check_name(PARAM, path)
    except UserError as error:
        raise invalid(PARAM, str(error)) from None
    root = os.path.realpath(root)
    folder = os.path.realpath(os.path.join(root, path))
    if not _lies_below(folder, root):
        raise _outside(path)
    if not os.path.isdir(folder):
        raise ApiError(
            404, f"{PARAM} {path!r} is no folder below the server's --adapter_root", param=PARAM
        )
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if not _lies_below(os.path.realpath(entry.path), root):
            raise _outside(os.path.join(path, entry.name))
        if not (entry.is_file() or entry.is_dir()):  # a pipe would be waited for
            raise invalid(PARAM, f"{PARAM}: {entry.name!r} of {path!r} is no file")
    return folder


def _lies_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _outside(path: str) -> ApiError:
    return ApiError(
        403,
        f"{PARAM} {path!r} leads out of the folder that this server loads adapters from; give a "
        "path below --adapter_root",
        param=PARAM,
    )
