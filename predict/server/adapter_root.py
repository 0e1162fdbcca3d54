"""The check of paths that clients may load from: all lie below one folder, links followed."""

from __future__ import annotations

import os

from predict.errors import UserError
from predict.server.errors import ApiError, invalid
from predict.system.files import check_name


def below_root(
    root: str,
    path: str,
    param: str,
    takes_files: bool = False,
    flag: str = "--adapter_root",
    what: str = "adapters",
) -> str:
    """The folder of an adapter or prefix, links followed; path: absolute, or from `root` on.

    param: the field with the path. takes_files: it may be a file instead. flag, what: the root's
    flag, and what lies below it. Raises ApiError: 403 for
    what lies outside of `root`, whether or not it is there, 404 for nothing of the kind.
    """
    try:
        check_name(param, path)
    except UserError as error:
        raise invalid(param, str(error)) from None
    root = os.path.realpath(root)
    found = os.path.realpath(os.path.join(root, path))
    if not _lies_below(found, root):
        raise _outside(param, path, flag, what)
    if takes_files and os.path.isfile(found):
        return found
    if not os.path.isdir(found):
        kinds = "file and no folder" if takes_files else "folder"
        raise ApiError(
            404, f"{param} {path!r} is no {kinds} below the server's {flag}", param=param
        )
    with os.scandir(found) as scanned:
        entries = list(scanned)
    for entry in entries:
        if not _lies_below(os.path.realpath(entry.path), root):
            raise _outside(param, os.path.join(path, entry.name), flag, what)
        if not (entry.is_file() or entry.is_dir()):  # reading a pipe would block
            raise invalid(param, f"{param}: {entry.name!r} of {path!r} is no file")
    return found


def _lies_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _outside(param: str, path: str, flag: str, what: str) -> ApiError:
    return ApiError(
        403,
        f"{param} {path!r} leads out of the folder that this server loads {what} from; give a "
        f"path below {flag}",
        param=param,
    )
