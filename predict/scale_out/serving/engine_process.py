"""An engine's process whose operators use so many threads: replicas share a machine's cores.

python -m predict.scale_out.serving.engine_process THREADS SOCKET
"""

from __future__ import annotations

import sys

from predict.device import library
from predict.server import engine_process


def main(argv: list[str]) -> int:
    """Serves as predict.server.engine_process does."""
    if library.find() is not None:  # else what needs it says so
        library.require().set_num_threads(int(argv[0]))
    return engine_process.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
