"""Whether the Python that runs has what the commands need; the usual mistake is another Python."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Modules that are imported somewhere, and the packages that bring them.
_ALIKE = ("numpy", "jinja2", "safetensors", "sentencepiece", "tokenizers", "tqdm")
PACKAGES = {"paddle": "paddlepaddle"} | {name: name for name in _ALIKE}
# Modules that only some commands need, and the extra of this package that installs them.
_SERVER = ("fastapi", "httptools", "msgspec", "prometheus_client", "pydantic", "uvicorn", "uvloop")
EXTRAS = {"ray": "ray", **dict.fromkeys(("aiohttp", "gguf", "matplotlib"), "bench")}
EXTRAS |= dict.fromkeys(_SERVER, "server")


def missing_packages() -> list[str]:
    """The packages that this Python lacks; nothing is imported."""
    return [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]


def explained_absence(module: str | None) -> str | None:
    """A line on the import of `module` that failed; None when it is none of ours."""
    name = "" if module is None else module.partition(".")[0]
    checkout = Path(__file__).resolve().parents[2]
    wanted = f"-e {checkout}" if (checkout / "pyproject.toml").is_file() else "regatta"
    version = ".".join(map(str, sys.version_info[:3]))
    if name in EXTRAS:
        return (
            f"{sys.executable} (Python {version}) has no {name}, which this command needs; "
            f"install it there: {sys.executable} -m pip install '{wanted}[{EXTRAS[name]}]'"
        )
    if name not in PACKAGES:
        return None
    missing = ", ".join(missing_packages()) or PACKAGES[name]
    return (
        f"{sys.executable} (Python {version}) has no {missing}; run this with the Python that "
        f"Regatta is installed in, or install it there: {sys.executable} -m pip install {wanted}"
    )


def check_interpreter() -> None:
    """Ends a script with that line, before it imports at its top what is missing."""
    for module in PACKAGES:
        if importlib.util.find_spec(module) is None:
            sys.exit(f"error: {explained_absence(module)}")
