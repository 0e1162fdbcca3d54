"""The files of examples/serving: their commands have flags that exist, and their probes routes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path
from typing import Any

import httpx
import pytest

import build
from predict.server.flags import parse
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "serving"
SECONDS = 600
# An object of the same sources that was made here already is taken; all else is compiled.
COMPILER = """#!/bin/sh
for word; do out=$word; done
case "$out" in
  obj/*.o) cp "{objects}/$out" "$out" && echo "$out:" > "$out.d" && exit ;;
  *.gch) exit 1 ;;
esac
exec "{real}" "$@"
"""


def dockerfile() -> dict[str, list[str]]:
    """The Dockerfile's instructions by their name."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


def words_of(instruction: str) -> list[str]:
    """The words of an instruction in its JSON form."""
    return re.findall(r'"([^"]*)"', instruction)


def container() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def copied() -> list[str]:
    """What .dockerignore lets into the image."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines.index("*") < min(lines.index("predict/lib"), lines.index("**/__pycache__"))
    return [line[1:] for line in lines if line.startswith("!")]


def test_the_image_has_what_a_build_reads_and_nothing_else() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^include = \[(.*)\]$", text, re.MULTILINE)
    read = [*re.findall(r'"(\w+)\*"', packages), "csrc", "pyproject.toml", "setup.py"]
    read += re.findall(r'^readme = "(.*)"$', text, re.MULTILINE)
    read += re.findall(r'^license-files = \["(.*)"\]$', text, re.MULTILINE)
    assert sorted(copied()) == sorted(read)
    assert all((ROOT / name).exists() for name in read)


def test_every_command_has_flags_that_exist() -> None:
    entry = words_of(dockerfile()["ENTRYPOINT"][0])
    assert entry[:2] == ["regatta", "serve"]
    assert parse([*entry[2:], *container()["args"]])["host"] == "0.0.0.0"
    unit = (FOLDER / "regatta.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(start)
    assert (Path(words[0]).name, words[1]) == ("regatta", "serve")
    limit = parse(words[2:])["request_timeout"]
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > limit, "what runs is not finished"


def test_probes_ask_for_health_and_readiness() -> None:
    found = container()
    assert found["livenessProbe"]["httpGet"]["path"] == "/health"
    assert found["readinessProbe"]["httpGet"]["path"] == "/ready"
    start = found["startupProbe"]
    assert start["httpGet"]["path"] == "/ready"
    assert start["periodSeconds"] * start["failureThreshold"] >= 600
    assert "/health" in dockerfile()["HEALTHCHECK"][0]
    context = found["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]


def test_the_unit_is_one_that_systemd_takes() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    checked = subprocess.run(
        ["systemd-analyze", "verify", FOLDER / "regatta.service"], capture_output=True, text=True
    )
    complaints = [
        line
        for line in checked.stderr.splitlines()
        if "is not executable" not in line and "Failed to" not in line
    ]
    assert not complaints


def shared(folder: Path, python: Path) -> dict[str, str]:
    """Variables for an install by `python` that takes Paddle and objects from here, not anew."""
    paddle = build.find_paddle()
    if paddle.has_cuda:  # another package
        return {}
    where = "import sysconfig; print(sysconfig.get_path('platlib'))"
    target = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
    files = importlib.metadata.files("paddlepaddle") or []
    for name in {path.parts[0] for path in files} - {".."}:
        (Path(target.stdout.strip()) / name).symlink_to(paddle.root.parent / name)
    build.build_cpu_library()  # nothing to do where all is up to date
    words = {"objects": build.BUILD_DIR / "cpu", "real": build.find_compiler()}
    compiler = folder / "g++"
    compiler.write_text(COMPILER.format(**words))
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "PIP_NO_COMPILE": "1"}


@pytest.mark.slow
def test_the_dockerfile_s_lines_make_a_server_that_answers(tmp_path: Path) -> None:
    # Without Docker: a copy of the sources and a fresh virtual environment stand for the image, but
    # for Paddle and the sources' objects, which are there already.
    lines = dockerfile()
    packages, install, user = lines["RUN"]
    names = packages.split("--no-install-recommends")[1].split("&&")[0].split()
    assert user.startswith("useradd ")
    if shutil.which("apt-cache") and any(Path("/var/lib/apt/lists").glob("*_Packages*")):
        subprocess.run(["apt-cache", "show", *names], check=True, stdout=subprocess.DEVNULL)
    sources = tmp_path / "regatta"
    sources.mkdir()
    for path in map(ROOT.joinpath, copied()):
        if path.is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "lib")
            shutil.copytree(path, sources / path.name, ignore=left_out)
        else:
            shutil.copy(path, sources)
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    clean = {"PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    clean |= {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    clean |= shared(tmp_path, binaries / "python")
    subprocess.run(install, shell=True, cwd=sources, env=clean, check=True, timeout=3 * SECONDS)
    shutil.rmtree(sources / "predict")  # what runs is what was installed

    words = words_of(lines["ENTRYPOINT"][0])
    words[words.index("--host") + 1] = "127.0.0.1"
    model = str(ROOT / "examples" / "demo_model")
    words += ["--model_name_or_path", model, "--dtype", "float32", "--port", "0"]
    process = subprocess.Popen(words, cwd=tmp_path, env=clean, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "ready: " in line)
        found = re.search(r"http://\S+", said)
        assert found is not None
        asked = {"prompt": "def gcd(a, b):", "temperature": 0, "max_tokens": 40}
        answer = httpx.post(f"{found[0]}/completions", json=asked, timeout=SECONDS).json()
        assert "return" in answer["choices"][0]["text"]
        assert httpx.get(found[0].removesuffix("/v1")).status_code == 200, "the page is there"
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 0
