"""Decodes and resizes pictures, in the process of predict.images.decoding.

A request is {"where", "pixels"} and a file's bytes; a reply is {"shape"} and the pixels, or
{"error"}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def answerer(settings: dict[str, Any]) -> Callable[[dict[str, Any], bytes], Any]:
    """See predict.system.guarded_worker."""
    from predict.errors import UserError
    from predict.images.decoding import decoded, made_of

    def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            values = decoded(data, made_of(request["pixels"]), request["where"])
        except UserError as error:
            return {"error": str(error)}, b""
        return {"shape": values.shape}, values.tobytes()

    return answer
