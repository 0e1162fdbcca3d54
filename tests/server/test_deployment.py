"""The files of examples/serving: their commands have flags that exist, and their probes routes."""

from __future__ import annotations

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

from predict.server.flags import parse
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "serving"
SECONDS = 600


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


def test_every_command_has_flags_that_exist() -> None:
    entry = words_of(dockerfile()["ENTRYPOINT"][0])
    assert entry[:3] == ["python", "-m", "predict.server"]
    assert parse([*entry[3:], *container()["args"]])["host"] == "0.0.0.0"
    unit = (FOLDER / "regatta.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(start)
    assert words[1:3] == ["-m", "predict.server"]
    limit = parse(words[3:])["request_timeout"]
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > limit, "what runs is not finished"


def test_probes_ask_for_health_and_readiness() -> None:
    found = container()
    assert found["livenessProbe"]["httpGet"]["path"] == "/health"
    assert found["readinessProbe"]["httpGet"]["path"] == "/ready"
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


@pytest.mark.slow
def test_the_dockerfile_s_lines_make_a_server_that_answers(tmp_path: Path) -> None:
    # Without Docker: a copy of the sources and a fresh virtual environment stand for the image.
    lines = dockerfile()
    packages, install, user = lines["RUN"]
    names = packages.split("--no-install-recommends")[1].split("&&")[0].split()
    assert user.startswith("useradd ")
    if shutil.which("apt-cache") and any(Path("/var/lib/apt/lists").glob("*_Packages*")):
        subprocess.run(["apt-cache", "show", *names], check=True, stdout=subprocess.DEVNULL)
    sources = tmp_path / "regatta"
    # What git ignores was made here; a copy of the sources need not have git.
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    left_out = [*(name for name in ignored if "/" not in name), ".git", "lib"]
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*left_out))
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    clean = {"PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    clean |= {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    clean["CXXFLAGS"] = "-O1"  # the same lines, minutes earlier
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
