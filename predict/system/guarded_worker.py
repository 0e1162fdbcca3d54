"""The program of a guarded process: it sets limits, then answers requests.

Its one argument is JSON: {"script", "paths", "memory_bytes", "cpu_seconds"} and what the script
reads. `script` is a file whose `answerer(settings)` is called ahead of the limits, and returns what
gives a request's reply. Requests and replies are frames: two lengths (4 bytes each,
little-endian), JSON of the first, and bytes of the second. See predict.system.guarded.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from importlib import import_module
from typing import Any

LENGTHS = struct.Struct("<II")


def main() -> int:
    """Answers requests until stdin ends, or until memory does."""
    settings = json.loads(sys.argv[1])
    sys.path += settings["paths"]
    answer = _answerer(settings)
    _limit(settings["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the parent does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(LENGTHS.size):
        # The kernel ends the process when its time is over, whatever C function it is in.
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        asked, size = LENGTHS.unpack(head)
        going_on = True
        try:
            request = json.loads(source.read(asked))
            reply, data = answer(request, source.read(size))
        except MemoryError:
            reply, data, going_on = {"error": "memory"}, b"", False
        signal.setitimer(signal.ITIMER_PROF, 0)
        words = json.dumps(reply).encode("ascii")
        sink.write(LENGTHS.pack(len(words), len(data)) + words)
        sink.write(data)
        sink.flush()
        if not going_on:
            return 1
    return 0


def _answerer(settings: dict[str, Any]) -> Any:
    folder, name = os.path.split(settings["script"])
    sys.path.append(folder)  # for that file alone: its neighbours have names of other modules
    module = import_module(name.removesuffix(".py"))
    sys.path.pop()
    return module.answerer(settings)


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
