"""libregatta_runtime through its C interface: as others build with it, and what bad input gives."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from export.export_runtime import export_runtime
from predict import LLM, SamplingParams
from tests.support import cmake_packages, text_library, tiny
from tests.support import runtime_library as library
from tests.support.cmake_packages import run
from tests.support.damage import changed_bytes

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "built"),
]

HEADER = library.SOURCE / "api" / "include" / "regatta.h"
PROMPT = (5, 9, 7)
OK, BAD_FOLDER = 0, 2  # regatta_status
LENGTH, ERROR = 2, 4  # regatta_finish
DESCRIPTION, WEIGHTS = "regatta.json", "model.safetensors"
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    checkpoint = tiny.write_with_tokenizer(tmp_path_factory.mktemp("runtime") / "checkpoint")
    return LLM(str(checkpoint), dtype="float32", device="cpu", attention="append")


@pytest.fixture(scope="module")
def folder(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runtime") / "folder"
    export_runtime(llm.config, made)
    return made


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[int]:
    """16 greedy tokens behind PROMPT, by Python."""
    return list(llm.generate([list(PROMPT)], GREEDY)[0].token_ids)


def answers(program: Path, folder: Path, **settings: str) -> list[int]:
    return list(map(int, run(program, folder, *map(str, PROMPT), **settings).split()))


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_others_find_the_package_by_cmake(
    kind: str, llm: LLM, folder: Path, answer: list[int], tmp_path: Path
) -> None:
    """Static: a table that registers itself and is not linked would be missed."""
    where = [f"-DCMAKE_PREFIX_PATH={library.prefixes()[kind]}", "-DCMAKE_BUILD_TYPE=Debug"]
    run("cmake", "-S", library.EXAMPLES, "-B", tmp_path, *where)
    run("cmake", "--build", tmp_path, *([] if kind == "shared" else ["--target", "ids"]))
    assert answers(tmp_path / "ids", folder) == answer
    needed = run("ldd", tmp_path / "ids")
    assert ("libregatta_runtime" in needed) == (kind == "shared")
    assert not re.search("python|paddle|cuda", needed)
    if kind == "shared" and not text_library.missing():
        prompt = "def gcd(a, b):"
        options = ["--temperature", "0", "--max_new_tokens", "16", "--stream"]
        text = run(tmp_path / "regatta-run", folder, "--prompt", prompt, *options)
        assert text == llm.generate([prompt], GREEDY)[0].text + "\n"


def test_a_compiler_without_python_makes_the_example(
    folder: Path, answer: list[int], tmp_path: Path
) -> None:
    for name in ("cc", "as", "ld"):  # all that GCC calls: nothing else is on PATH
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name}"))
    alone, program = {"PATH": str(tmp_path)}, tmp_path / "ids"
    run(
        "cc",
        library.EXAMPLES / "ids.c",
        "-o",
        program,
        *library.flags(library.prefixes()["shared"]),
        **alone,
    )
    assert answers(program, folder, **alone) == answer


@pytest.mark.parametrize("source", [library.SOURCE, text_library.SOURCE], ids=["runtime", "text"])
@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_other_systems_are_refused_by_name(system: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"is built for Linux only, not for {system}"):
        run("cmake", "-S", source, "-B", tmp_path, f"-DCMAKE_SYSTEM_NAME={system}")


def test_a_missing_json_library_is_named_ahead_of_compiling(tmp_path: Path) -> None:
    nowhere = ["-DCMAKE_FIND_ROOT_PATH=/nowhere", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY"]
    nowhere += ["-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON", "-DREGATTA_TEXT=OFF"]
    with pytest.raises(AssertionError, match="install nlohmann-json3-dev"):
        run("cmake", "-S", library.SOURCE, "-B", tmp_path, *nowhere)


def test_only_the_functions_of_the_header_are_exported() -> None:
    declared = set(re.findall(r"^REGATTA_API [^;(]*?(regatta_\w+)\(", HEADER.read_text(), re.M))
    assert len(declared) > 10
    shared = library.prefixes()["shared"] / "lib" / "libregatta_runtime.so.1"
    archive = library.prefixes()["static"] / "lib" / "libregatta_runtime.a"
    for names in (
        run("nm", "-D", "--defined-only", shared),
        run("nm", "--defined-only", "--extern-only", archive),
    ):
        rows = [line.split() for line in names.splitlines() if " " in line]
        # "u": of the kernels' objects, which are the operators' library's here.
        found = {row[-1].partition("@")[0] for row in rows if row[-2] != "u"}
        assert found - {"REGATTA_1"} == declared
    assert "Library soname: [libregatta_runtime.so.1]" in run("readelf", "-d", shared)


# Fields that a header may have got after a program was compiled.
LATER = ("log", "log_user", "num_cached_tokens", "include_stop", "num_logprobs")


def test_a_program_of_an_older_header_runs(folder: Path, answer: list[int], tmp_path: Path) -> None:
    older = HEADER.read_text()
    for name in LATER:
        older, count = re.subn(rf"^  [^;\n]*\b{name}\b[^;\n]*;.*\n", "", older, flags=re.M)
        assert count == 1, name
    (tmp_path / "regatta.h").write_text(older)
    program = library.compiled(library.EXAMPLES / "ids.c", tmp_path, f"-I{tmp_path}")
    assert answers(program, folder) == answer


def test_wrong_calls_callbacks_and_many_threads(folder: Path, tmp_path: Path) -> None:
    program = library.compiled(library.NATIVE / "runtime_calls.cc", tmp_path)
    assert run(program, folder) == "all is as promised\n"


class Opener:
    """Opens folders by runtime_opens.cc, which has to live through all of them."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )

    def open(self, folder: Path) -> tuple[int, int, str]:
        """regatta_status, regatta_finish, and what was said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        status, finish, said = self._process.stdout.readline().split(" ", 2)
        return int(status), int(finish), said.strip()

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@contextmanager
def opener(folder: Path) -> Iterator[Opener]:
    made = Opener(library.compiled(library.NATIVE / "runtime_opens.cc", folder))
    yield made
    made.close()


def edited(folder: Path, target: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy of a folder with one file changed, whose size is as regatta.json says."""
    if not target.is_dir():
        shutil.copytree(folder, target)
    data = change((folder / name).read_bytes())
    (target / name).write_bytes(data)
    if name != DESCRIPTION:
        said = json.loads((folder / DESCRIPTION).read_text())
        said["files"][name]["num_bytes"] = len(data)
        (target / DESCRIPTION).write_text(json.dumps(said))
    return target


def with_nan(data: bytes) -> bytes:
    """The weights with a last norm of NaN."""
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + size])
    (name,) = (name for name in header if re.fullmatch(r"head_?.*norm.*weight", name))
    begin, end = (8 + size + at for at in header[name]["data_offsets"])
    return data[:begin] + struct.pack("<f", math.nan) * ((end - begin) // 4) + data[end:]


def test_numbers_that_are_none_end_a_request_by_name(folder: Path, tmp_path: Path) -> None:
    broken = edited(folder, tmp_path / "folder", WEIGHTS, with_nan)
    with opener(tmp_path) as opened:
        status, finish, said = opened.open(broken)
        assert (status, finish) == (OK, ERROR)
        assert "no finite largest logit" in said
        assert opened.open(folder) == (OK, LENGTH, "")


def changing(dice: random.Random, header: int) -> Callable[[bytes], bytes]:
    """Damages the first `header` bytes of a file mostly, else what is behind them."""

    def change(data: bytes) -> bytes:
        if dice.random() < 0.8:
            return changed_bytes(data[:header], dice) + data[header:]
        return data[:header] + changed_bytes(data[header:], dice)

    return change


def damage(folder: Path, tmp_path: Path, opened: Opener, count: int, seed: int) -> set[int]:
    """Opens a folder so often, each time with one file damaged, and runs what opens."""
    dice, statuses = random.Random(seed), set()
    header = 8 + struct.unpack_from("<Q", (folder / WEIGHTS).read_bytes())[0]
    for number in range(count):
        name = (DESCRIPTION, WEIGHTS)[number % 2]
        end = header if name == WEIGHTS else (folder / name).stat().st_size
        target = tmp_path / "damaged"
        edited(folder, target, name, changing(dice, end))
        if name == DESCRIPTION:
            shutil.copy(folder / WEIGHTS, target / WEIGHTS)
        status, finish, said = opened.open(target)
        assert said or (status, finish) in ((OK, LENGTH), (OK, 1)), (status, finish)
        statuses.add(status)
    return statuses


def test_whatever_is_damaged_opening_and_steps_break_nothing(folder: Path, tmp_path: Path) -> None:
    with opener(tmp_path) as opened:
        assert {OK, BAD_FOLDER} == damage(folder, tmp_path, opened, 200, 52) | {OK}


def test_a_byte_that_was_changed_is_told_by_its_file(folder: Path, tmp_path: Path) -> None:
    verify = library.prefixes()["shared"] / "bin" / "regatta_verify"
    assert "every file is as it was written" in run(verify, folder)
    for name in (WEIGHTS, DESCRIPTION):
        copy = Path(shutil.copytree(folder, tmp_path / name))
        data = bytearray((copy / name).read_bytes())
        data[-200] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises(AssertionError, match=rf"{name} was edited or damaged"):
            run(verify, copy)


SANITIZED = "-O1 -g1 -D_GLIBCXX_ASSERTIONS -fno-sanitize-recover=all -fsanitize=address,undefined"


@pytest.mark.slow
def test_calls_and_damage_are_clean_under_sanitizers(folder: Path, tmp_path: Path) -> None:
    """All but the kernels, which tests/csrc/test_sanitizers.py has."""
    options = [*library.QUICK, f"-DREGATTA_FLAGS={SANITIZED}"]
    (prefix,) = cmake_packages.installed(library.SOURCE, library.INPUTS, options)
    native, example = library.NATIVE, library.EXAMPLES / "regatta_run.cc"
    calls, opens, runs = (
        library.compiled(source, tmp_path, *SANITIZED.split(), prefix=prefix)
        for source in (native / "runtime_calls.cc", native / "runtime_opens.cc", example)
    )
    # The engine closes behind the refusal, and tells the request ahead of it.
    (tmp_path / "lines").write_text('{"ids": [5]}\n{"ids": [-1]}\n')
    with pytest.raises(AssertionError, match="outside the vocabulary") as refused:
        run(runs, folder, "--data_file", tmp_path / "lines")
    assert "AddressSanitizer" not in str(refused.value)
    assert run(calls, folder) == "all is as promised\n"
    opened = Opener(opens)
    damage(folder, tmp_path, opened, 2000, 7)
    opened.close()
