"""What the documentation says is true: commands run, flags exist, tables and links are current.

In the pages a block of `bash` or `python` stands behind a line that says what happens to it here:

    <!-- run -->           it is run, in the order of its page
    <!-- slow -->          it is run with --slow
    <!-- not run: WHY -->  it is not run; the flags of our own commands are still checked

A block of `text` behind `<!-- output -->` is what the block before it prints. `...` stands for
lines that are left out, and numbers may differ.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from predict.cli.flags import Flag, parse_flags
from tests.support.pages import (
    COMMANDS,
    FOLDERS,
    Block,
    blocks,
    commands,
    named,
    own_command,
    script,
)
from tests.support.paths import ROOT

PAGES = (
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
)


def flag_table(command: str) -> Sequence[Flag]:
    maker = script("docs/make_flags.py")
    tables = {name: maker.named(path) for name, (path, _) in maker.COMMANDS.items()}
    takes_all = ("export/export_model.py", "predict.bench.throughput", "predict.server")
    shared = tables["predict/predictor.py"] if command in takes_all else ()
    names = {flag.name for flag in tables[command]}
    return [*tables[command], *(flag for flag in shared if flag.name not in names)]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the repository's root and takes what a page's commands write."""
    for path in ROOT.iterdir():
        if path.name in FOLDERS or path.suffix in (".md", ".toml"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_command(words)
    assert own is not None, f"{' '.join(words)} is not a command that this test can run"
    name, arguments = own
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    if name in COMMANDS:
        main: Callable[..., int | None] = importlib.import_module(COMMANDS[name]).main
        takes_words = main.__code__.co_argcount > 0
        assert (main(arguments) if takes_words else main()) in (0, None)
        return
    code: object = 0
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    except SystemExit as end:
        code = end.code
    assert code in (0, None)


def run_block(block: Block, monkeypatch: pytest.MonkeyPatch) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if block.language == "python":
            exec(compile(block.body, "page", "exec"), {"__name__": "page"})
        else:
            for words in commands(block):
                run_command(words, monkeypatch)
    return printed.getvalue()


def check_output(expected: str, printed: str) -> None:
    """Every line of the page's output was printed, in its order.

    Numbers may differ, and what limits a machine: its bandwidth, or its products.
    """

    def shape(line: str) -> str:
        return " ".join(re.sub(r"\d[\d.,]*|(?<=of )(bandwidth|products)\b", "#", line).split())

    lines = iter([shape(line) for line in printed.splitlines()])
    for line in map(shape, expected.splitlines()):
        if line not in ("", "..."):
            assert any(line == other for other in lines), f"not printed: {line!r}\n{printed}"


def run_page(page: Path, marks: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(page):
        if block.mark in marks:
            printed = run_block(block, monkeypatch)
            if block.output is not None:
                check_output(block.output, printed)


def with_mark(*marks: str) -> list[Path]:
    return [page for page in PAGES if any(block.mark in marks for block in blocks(page))]


@pytest.mark.usefixtures("compiled", "scratch")
@pytest.mark.parametrize("page", with_mark("run"), ids=named)
def test_the_commands_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, ["run"], monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled", "scratch")
@pytest.mark.parametrize("page", with_mark("slow"), ids=named)
def test_the_slow_commands_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, ["slow"], monkeypatch)  # they need nothing of the others


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        known = block.mark in ("run", "slow") or re.fullmatch(r"not run: \S.*", block.mark)
        assert known, f"mark this block as this test's docstring says:\n{block.body}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_that_are_not_run_have_flags_that_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language != "bash" or not block.mark.startswith("not run"):
            continue
        for words in commands(block):
            own = own_command(words)
            if own is None or own[0] not in COMMANDS or own[0] == "predict.doctor":
                assert own is None or own[0] in COMMANDS or (ROOT / own[0]).is_file(), words
                continue
            command, arguments = own
            while arguments and arguments[0].endswith(".json"):
                arguments = arguments[1:]
            parse_flags(arguments, flag_table(command), command, "")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pages_are_read_without_mkdocs_too(page: Path) -> None:
    own = re.findall(
        r"^ *(?:--8<--|:::|!!!|\?\?\?|```+ *\{).*$", page.read_text("utf-8"), re.MULTILINE
    )
    assert not own, "GitHub shows these lines as they are"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_in_pages_exist(page: Path) -> None:
    pattern = rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`"
    for path in re.findall(pattern, page.read_text(encoding="utf-8")):
        assert path.startswith("predict/lib") or (ROOT / path).exists(), path


def test_the_page_for_paddlenlp_s_users_says_of_each_flag_what_it_does() -> None:
    text = (ROOT / "docs" / "from-paddlenlp.md").read_text(encoding="utf-8")
    predictor, quantization = text.split("## Quantized checkpoints")
    begins = {"not yet": ("refused",), "no effect": ("no effect",)}
    for part, command in (
        (predictor.split("## Flag by flag")[1], "export/export_model.py"),
        (quantization, "quant/run_quantization.py"),
    ):
        flags = {name: flag for flag in flag_table(command) for name in (flag.name, *flag.aliases)}
        for names, state in re.findall(r"^\| (`[^|]*`\)?) \| ([^|]*) \|$", part, re.MULTILINE):
            for name in re.findall(r"`(\w+)`", names):
                found = flags[name].availability
                level = "works" if found.values else found.level  # refused for some values only
                said = next(
                    (key for key, starts in begins.items() if state.startswith(starts)), "works"
                )
                assert said == level, f"{name}: {state}"


def test_flags_and_fields_of_the_pages_are_current() -> None:
    assert script("docs/make_flags.py").main(["--check"]) == 0, "run: python docs/make_flags.py"


def test_the_tables_of_numbers_are_current() -> None:
    stale = script("benchmarks/make_tables.py").stale_pages()
    assert not stale, "run: python benchmarks/make_tables.py"


def test_every_table_has_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in script("benchmarks/make_tables.py").TABLES:
        assert f"<!-- table: {name} -->" in text, name


def test_pictures_are_small() -> None:
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 100_000, picture
