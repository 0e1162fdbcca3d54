"""The command `regatta`, and the package of that name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import predict
import regatta
from regatta import __main__ as command
from tests.support.paths import ROOT


def test_the_package_has_what_predict_has() -> None:
    assert set(predict.__all__) <= set(dir(regatta))
    for name in regatta.__all__:
        assert getattr(regatta, name) is getattr(predict, name)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        regatta.LMM  # type: ignore[attr-defined]  # noqa: B018


def test_names_versions_and_help_come_without_anything_slow() -> None:
    program = "import sys; from regatta.__main__ import main; import regatta\n"
    program += "assert main(['--version']) == main([]) == main(['bench']) == 0\n"
    program += "assert not {'paddle', 'numpy', 'argparse'} & sys.modules.keys(), sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"regatta {regatta.__version__}\nusage: regatta COMMAND")
    for name in command.COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "usage: regatta bench COMMAND" in done.stdout


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_shows_its_own_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["regatta"])
    with pytest.raises(SystemExit) as ended:
        command.main([*name.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: regatta {name} ")


def test_words_and_the_exit_status_are_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []

    def main(words: list[str]) -> int:
        got.append(words)
        return 7

    monkeypatch.setattr(sys, "argv", ["regatta"])
    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(main=main))
    assert command.main(["bench", "kernels", "--a", "b"]) == command.main(["export", "--help"]) == 7
    assert got == [["--a", "b"], ["--help"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["srve"], "'srve' is no command of regatta (there are: serve, "),
        (["srve"], "did you mean serve?"),
        (["bench", "kernel"], "did you mean bench kernels?"),
        (["mergelora", "--x"], "did you mean merge-lora?"),
        (["predict", "--batchsize", "3"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["export", "--zzz"], "unknown flag --zzz; regatta export --help lists the flags"),
    ],
)
def test_wrong_words_end_with_2_and_say_what_there_is(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["regatta"])
    assert command.main(words) == 2
    assert said in capsys.readouterr().err


def test_names_of_before_say_the_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    scripts = dict(re.findall(r'^(regatta[a-z-]*) = "([\w.]+:\w+)"$', text, re.MULTILINE))
    assert scripts.pop("regatta") == "regatta.__main__:main"
    assert len(scripts) == 8
    for script, target in scripts.items():
        assert target == "regatta.__main__:alias"
        monkeypatch.setattr(sys, "argv", [str(Path("/x/bin") / script), "--help"])
        with pytest.raises(SystemExit):
            command.alias()
        shown = capsys.readouterr()
        name = script.removeprefix("regatta-")
        assert shown.err == f"note: {script} is `regatta {name}` now\n"
        assert shown.out.startswith(f"usage: regatta {name} ")
