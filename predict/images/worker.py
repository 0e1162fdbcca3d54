"""Decodes and resizes pictures in a process of its own, with limits on its time and memory.

Its one argument is JSON: {"paths", "memory_bytes", "cpu_seconds"}. A request on stdin is two
lengths, JSON {"where", "pixels"} of the first, and a file's bytes of the second; a reply on stdout
is a length, and JSON {"shape"} or {"error"} on a line, then the pixels. See
predict.images.decoding.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any

LENGTH = struct.Struct("<I")


def main() -> int:
    """Answers requests until stdin ends, or until memory does."""
    settings = json.loads(sys.argv[1])
    sys.path[:0] = settings["paths"]
    from predict.errors import UserError
    from predict.images.decoding import decoded, made_of

    _limit(settings["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the parent does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(2 * LENGTH.size):
        # The kernel ends the process when its time is over, whatever C function it is in.
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        pixels, going_on = b"", True
        reply: dict[str, Any] = {}
        try:
            (asked,), (size,) = LENGTH.iter_unpack(head)
            request = json.loads(source.read(asked))
            values = decoded(source.read(size), made_of(request["pixels"]), request["where"])
            reply, pixels = {"shape": values.shape}, values.tobytes()
        except UserError as error:
            reply = {"error": str(error)}
        except MemoryError:
            reply, going_on = {"error": "memory"}, False
        signal.setitimer(signal.ITIMER_PROF, 0)
        words = json.dumps(reply).encode("ascii") + b"\n"
        sink.write(LENGTH.pack(len(words) + len(pixels)) + words)
        sink.write(pixels)
        sink.flush()
        if not going_on:
            return 1
    return 0


def _limit(memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
