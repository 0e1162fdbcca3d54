"""The wheel that holds the compiled library: its tag, what is in it, what it does not need."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import build
from predict.device import library
from tests.support import checkout
from tests.support.paths import DEMO, ROOT

# What auditwheel says of a library whose names are those of Paddle's wheel: it knows none of them.
AUDITED = re.compile(r'constrains the platform tag to\s+"([^"]+)"')
PROGRAM = """
import sys
from regatta import LLM, SamplingParams
from predict.device import library
assert library.require().path.is_relative_to(sys.prefix)
llm = LLM(sys.argv[1], dtype="float32", inference_model=True, attention="append", device="cpu")
(output,) = llm.generate(["def gcd(a, b):"], SamplingParams(temperature=0.0, max_new_tokens=8))
print(repr(output.text))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree's sources and of its library as it is, compiled by nobody here."""
    built = build.LIBRARY_DIR / library.LIBRARY_NAME
    if not built.is_file():
        pytest.skip("the library is not built")
    root = tmp_path_factory.mktemp("wheel")
    listed = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc/*.py", "csrc/flags.txt"]
    listed += ["regatta/*", "predict/**/*", "export/**/*.py", "quant/**/*.py"]
    for pattern in listed:
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                (root / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    program = "import sys; sys.path.insert(0, 'csrc'); import backend\n"
    program += "backend._compile = lambda: None\nbackend.build_wheel('dist')\n"
    process = checkout.run(root, "-c", program)
    assert process.returncode == 0, process.stdout
    (made,) = (root / "dist").glob("*.whl")
    return made


def test_wheel_holds_the_library_and_is_tagged_for_what_it_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"predict/lib/libregatta_cpu.so", "predict/lib/libregatta_cpu.json"} <= set(names)
    assert {"regatta/__main__.py", "regatta/py.typed", "predict/py.typed"} <= set(names)
    assert not [name for name in names if "libpaddle" in name or name.startswith(("csrc", "tests"))]
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    audited = AUDITED.search(" ".join(shown.stdout.split()))
    assert audited is not None, shown.stdout
    assert wheel.stem.endswith(f"-py3-none-{audited[1]}")


@pytest.mark.slow
def test_wheel_answers_a_prompt_where_no_compiler_is(wheel: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    python = fresh / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True)
    # What it depends on is this interpreter's, and nothing is downloaded.
    (packages,) = (fresh / "lib").glob("python3*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join([*others, ""]))
    process = subprocess.run(
        [python, "-c", PROGRAM, DEMO],
        cwd=tmp_path,
        env={"PATH": str(fresh / "bin")},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == repr("\n    while a:\n        a")
