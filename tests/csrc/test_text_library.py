"""Regatta::text (csrc/text): the ids and texts of Python's library, and what damaged files give."""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from export import text_layout as layout
from export.export_text import export_text, text_file
from predict.text import tokenizer as ours
from predict.text.detokenizer import MANY_PENDING, Detokenizer
from tests.support import cmake_packages
from tests.support import text_library as library
from tests.support import text_tokenizers as made
from tests.support.cmake_packages import run
from tests.support.damage import changed_bytes
from tests.support.paths import DEMO, ROOT
from tests.support.text_library import Text, TextError

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "built")

DATA = ROOT / "tests" / "data"
FOLDERS = {"demo": DEMO, "byte_level": DATA / "tokenizers" / "byte_level"}
PIECES: tuple[str, ...] = ("tokenizers/sentencepiece", "tokenizers/sentencepiece_legacy")
PIECES += ("families/internlm2", "families/baichuan_2")
NAMES = [*made.BUILDERS, *FOLDERS]
NUM_STRINGS = 300
REFUSED = (library.BAD_FILE, library.UNSUPPORTED)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    if name in FOLDERS:
        return Tokenizer.from_file(str(FOLDERS[name] / "tokenizer.json"))
    return made.BUILDERS[name]()


@functools.cache
def file_of(name: str) -> bytes:
    return exported(tokenizer(name))


def exported(tokens: Tokenizer) -> bytes:
    return text_file(made.python_of(tokens), Path("made"))


def ids_of(name: str, *tokens: str) -> list[int]:
    vocabulary = tokenizer(name).get_vocab()
    return [vocabulary[token] for token in tokens]


def strings(name: str, count: int = NUM_STRINGS) -> list[str]:
    return [*made.strings(made.python_of(tokenizer(name)), count, len(name))]


def test_a_build_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def fails(*command: Any) -> str:
        tried.append(command)
        raise AssertionError("no such compiler")

    monkeypatch.setattr(cmake_packages, "run", fails)
    monkeypatch.setattr(cmake_packages, "BUILDS", tmp_path)
    for _ in range(2):
        with pytest.raises(AssertionError, match="no such compiler"):
            library.installed("-DNOTHING=1")
    assert len(tried) == 1


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_tokenizers(name: str) -> None:
    text, wanted = Text(file_of(name)), tokenizer(name)
    for string in strings(name):
        for flags in (0, library.ADD_SPECIAL):
            ids = wanted.encode(string, add_special_tokens=bool(flags)).ids
            assert text.encode(string, flags) == ids, ascii(string)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_text_where_that_is_asked(name: str) -> None:
    text, wanted = Text(file_of(name)), Tokenizer.from_str(tokenizer(name).to_str())
    wanted.encode_special_tokens = True
    for string in strings(name):
        ids = wanted.encode(string, add_special_tokens=False).ids
        assert text.encode(string, library.LITERAL) == ids, ascii(string)


def id_lists(name: str, count: int) -> list[list[int]]:
    """Ids of texts, and random ones: most are no UTF-8 together."""
    dice, tokens = random.Random(3), tokenizer(name)
    most = tokens.get_vocab_size() + 3
    lists = [tokens.encode(string).ids for string in strings(name, count)]
    for _ in range(count):
        ends = (most, 260, most)[dice.randrange(3)]
        lists.append([dice.randrange(ends) for _ in range(dice.randrange(12))])
    return lists


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_tokenizers_and_pieces_join_to_them(name: str) -> None:
    text, wanted = Text(file_of(name)), tokenizer(name)
    for ids in id_lists(name, NUM_STRINGS):
        for flags in (0, library.SKIP_SPECIAL):
            whole = wanted.decode(ids, skip_special_tokens=bool(flags))
            assert text.decode(ids, flags) == whole, ids
            pieces = [piece.decode() for piece in text.pieces(ids, flags=flags)]
            assert "".join(pieces) == whole, ids


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_goes_on_behind_its_prompt(name: str) -> None:
    text, tokens = Text(file_of(name)), tokenizer(name)
    num_seen = 0
    for string in strings(name, 100):
        ids = tokens.encode(string, add_special_tokens=False).ids
        whole = tokens.decode(ids, skip_special_tokens=False)
        for cut in {0, 1, len(ids) // 2}:
            before = tokens.decode(ids[:cut], skip_special_tokens=False)
            if whole.startswith(before) and "\ufffd" not in before:
                got = b"".join(text.pieces(ids[cut:], ids[:cut])).decode()
                assert before + got == whole, (ids, cut)
                num_seen += 1
    assert num_seen > 200


@pytest.mark.parametrize("folder", PIECES)
def test_a_sentencepiece_model_gives_what_its_library_gives(folder: str) -> None:
    python, dice = ours.Tokenizer.from_dir(DATA / folder), random.Random(4)
    text = Text(text_file(python, DATA / folder))
    for string in made.strings(python, NUM_STRINGS):
        wanted = python.encode(string)
        assert text.encode(string, library.ADD_SPECIAL) == wanted, ascii(string)
        assert text.encode(string) == python.encode(string, False), ascii(string)
        for ids in (wanted, [dice.randrange(python.vocab_size + 3) for _ in range(12)]):
            for flags in (0, library.SKIP_SPECIAL):
                whole = python.decode(ids, bool(flags))
                assert text.decode(ids, flags) == whole, ids
                assert b"".join(text.pieces(ids, flags=flags)).decode() == whole


def test_a_character_that_begins_in_the_prompt_comes_with_its_last_byte() -> None:
    text = Text(file_of("gpt2"))
    ids = ids_of("gpt2", *"ä½łA")  # 你, A
    assert [*text.pieces(ids[1:], ids[:1])] == [b"", "你".encode(), b"A", b""]
    assert [*text.pieces(ids[3:], ids[:1])] == [b"A", b""]
    assert [*text.pieces(ids[:2])] == [b"", b"", "\ufffd".encode()]


def test_a_run_of_byte_tokens_waits_for_the_token_behind_it() -> None:
    text = Text(file_of("gemma"))
    e, acute, a = ids_of("gemma", "<0xC3>", "<0xA9>", "a")
    assert [*text.pieces([e, acute, a])] == [b"", b"", "éa".encode(), b""]
    assert [*text.pieces([e, acute, e, a])] == [b"", b"", b"", "\ufffd\ufffd\ufffda".encode(), b""]


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_a_stream_goes_on_behind_its_finish(name: str) -> None:
    first, second, a = ids_of(name, *("ä½A" if name == "gpt2" else ("<0xE4>", "<0xBD>", "a")))
    text, finish, broken = Text(file_of(name)), library.FINISH, "\ufffd".encode()
    # The prompt's byte ends with the finish, and what comes then is broken by itself.
    found = b"".join(text.pieces([finish, second, finish, first, finish, a], [first]))
    assert found == broken * 2 + (b"A" if name == "gpt2" else b"a")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pending_is_what_python_would_scan_for_stops(name: str) -> None:
    text, streams = Text(file_of(name)), Detokenizer(made.python_of(tokenizer(name)))
    for whole in id_lists(name, 40):
        ids, wanted = whole[:MANY_PENDING], streams.stream()
        for i, (certain, pending) in zip(ids, text.so_far(ids, library.SKIP_SPECIAL), strict=True):
            wanted.append([i])
            broken = "\ufffd"  # at the end Python waits with it
            found = (certain + pending).decode().rstrip(broken)
            assert found == (wanted.text + wanted.pending).rstrip(broken), ids


def test_a_word_of_many_characters_takes_no_quadratic_time() -> None:
    string = "ab" * 200_000
    assert len(Text(file_of("gpt2")).encode(string)) < len(string)


@pytest.mark.parametrize("end", ["lstrip", "rstrip"])
def test_spaces_beside_many_added_tokens_take_no_quadratic_time(end: str) -> None:
    tokens = made.gpt2()
    tokens.add_tokens([AddedToken("\t", **{end: True}), AddedToken("\n"), AddedToken("\v")])
    tokens.add_tokens([AddedToken("x", single_word=True)])
    text = Text(exported(tokens))
    for string in ("\t" * 9, " \t \n \t\t\v \n x \t", "\n\t\t a\t \n\t x\tx a"):
        assert text.encode(string) == tokens.encode(string, add_special_tokens=False).ids
    assert len(text.encode(("\t" if end == "rstrip" else "\n\t") * 200_000)) >= 200_000


def test_arguments_that_are_wrong_are_named() -> None:
    text = Text(file_of("gpt2"))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: text.encode(b"ab\xff"), "the text is no UTF-8 at byte 2"),
        (lambda: text.encode("a", 4), "flags are 4"),
        (lambda: text.decode([1, -1]), "id 1 is -1"),
        (lambda: text.decode([1], 1), "flags are 1"),
        (lambda: [*text.pieces([-5])], "id 0 is -5"),
    ]
    for call, message in cases:
        with pytest.raises(TextError, match=message) as error:
            call()
        assert error.value.status == library.INVALID
    assert library.library().regatta_text_open(None, None) == library.INVALID


def test_a_file_that_is_cut_anywhere_is_refused() -> None:
    data = file_of("byte_level")
    dice = random.Random(5)
    for end in {*range(200), len(data) - 1, *(dice.randrange(len(data)) for _ in range(300))}:
        with pytest.raises(TextError, match="text file") as error:
            Text(data[:end])
        assert error.value.status in REFUSED
    with pytest.raises(TextError, match="cut or joined"):
        Text(data + b"x")


def test_more_bytes_than_a_file_may_have_are_refused_unread() -> None:
    size = (1 << 29) + 1
    with mmap.mmap(-1, size) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        handle = ctypes.byref(ctypes.c_void_p())
        read = library.library().regatta_text_read
        assert read(ctypes.c_void_p(address), ctypes.c_size_t(size), handle) == library.BAD_FILE
    said = library.library().regatta_text_error().decode()
    assert f"it has {size} bytes (allowed: at most {size - 1})" in said


@pytest.mark.parametrize("name", ["byte_level", "mistral"])
def test_a_damaged_file_is_refused_or_works(name: str) -> None:
    data, dice, string = file_of(name), random.Random(7), made.SCRIPTS[3] + made.SCRIPTS[8]
    statuses: list[int] = []
    for _ in range(1500):
        changed = changed_bytes(data, dice)
        # The size, as the header has it, so that what is behind it is read.
        changed = changed[:16] + len(changed).to_bytes(4, "little") + changed[20:]
        try:
            text = Text(changed)
            [*text.pieces(text.encode(string, library.ADD_SPECIAL))]
        except TextError as error:
            statuses.append(error.status if str(error) else library.OK)
    assert len(statuses) > 500
    assert {*statuses} <= {*REFUSED, library.FAILED}


def file_with(steps: list[layout.Step]) -> bytes:
    """A file whose tokens are the bytes."""
    letters = {bytes([i]): i for i in range(256)}
    texts = {i: (layout.TEXT, letter) for letter, i in letters.items()}
    held: Any = (layout.BYTE_LEVEL, None, ((), ()), steps, {}, texts, letters, {})
    return layout.TextFile(*held).data()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(a+)+$", "gave up on a text of 3001 bytes"),
        ("(" * 5000 + "a" + ")" * 5000, "is none: parse depth limit over"),
        (r"\g<0>", "is none: never ending recursion"),
    ],
)
def test_an_expression_that_would_not_end_is_refused(pattern: str, message: str) -> None:
    steps = [layout.Step(layout.SPLIT_REGEX, a=pattern)]
    with pytest.raises(TextError, match=message):
        Text(file_with(steps)).encode("a" * 3000 + "c")


def test_expressions_share_what_they_may_try_in_a_text() -> None:
    """One stretch is quick enough, and many together are not."""
    text = Text(file_with([layout.Step(layout.SPLIT_REGEX, a="(a+)+b| ")]))
    slow = "a" * 18 + " "
    assert len(text.encode(slow * 3)) == 57
    with pytest.raises(TextError, match=r"gave up on a text of \d+ bytes"):
        text.encode(slow * 60)


GROWING = [
    layout.Step(layout.PREFIX_SPACE, a="xy"),
    layout.Step(layout.SPLIT_REGEX, a="."),
]


@pytest.mark.parametrize(
    "steps",
    [
        [layout.Step(layout.REPLACE, a="a", b="a" * 16)] * 6,
        GROWING * 32,
        [*(GROWING * 31), layout.Step(layout.SPLIT_REGEX, 1, a=".")],
    ],
    ids=["replacements", "pieces", "pieces that are removed"],
)
def test_steps_that_grow_a_text_without_end_are_refused(steps: list[layout.Step]) -> None:
    with pytest.raises(TextError, match="make the text more than 16 times as long"):
        Text(file_with(steps)).encode("aaa")


def test_a_long_error_is_whole_utf8() -> None:
    """The text of an error with a long path, or a long expression, ends with a character."""
    opened = library.library().regatta_text_open
    handle = ctypes.c_void_p()
    for name in ("é" * 600, "aé" * 400):
        assert opened(name.encode(), ctypes.byref(handle)) == library.BAD_FILE
        assert library.library().regatta_text_error().decode().startswith("cannot read")
    for pattern in ("é" * 150 + "(", "a" + "é" * 150 + "("):
        with pytest.raises(TextError, match="é is none: end pattern with unmatched"):
            Text(file_with([layout.Step(layout.SPLIT_REGEX, a=pattern)]))


def test_a_folder_is_exported_with_the_ends_that_its_config_asks_for(tmp_path: Path) -> None:
    tokens = made.llama3()
    tokens.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, object] = {"add_bos_token": True, "add_eos_token": True}
    settings |= {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    export_text(tmp_path, tmp_path / "text.bin")
    first, last = map(tokens.get_vocab().get, ("<|begin_of_text|>", "<|eot_id|>"))
    text = Text((tmp_path / "text.bin").read_bytes())
    assert text.encode("", library.ADD_SPECIAL) == [first, last]
    assert ours.Tokenizer.from_dir(tmp_path).encode("") == [first, last]


def test_only_the_functions_of_the_header_are_exported() -> None:
    path = library.installed() / "lib" / "libregatta_text.so.1"
    names = {line.split()[-1] for line in run("nm", "-D", "--defined-only", path).splitlines()}
    names = {name.partition("@")[0] for name in names} - {"REGATTA_TEXT_1"}
    header = (library.SOURCE / "include" / "regatta_text.h").read_text()
    assert names
    assert all(name.startswith("regatta_text_") and f" {name}(" in header for name in names)
    assert "libregatta_text.so.1" in run("readelf", "-d", path)


CONSUMER = """cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C CXX)
find_package(Regatta 1 REQUIRED COMPONENTS text)
foreach(language c cc)
  add_executable(use_${language} ${SOURCES}/text_use.${language})
  target_link_libraries(use_${language} PRIVATE Regatta::text)
endforeach()
"""
NATIVE = ROOT / "tests" / "native"


def uses(program: Path, folder: Path) -> None:
    """Runs a program on a file that is one and on one that is none."""
    (folder / "text.bin").write_bytes(file_of("qwen"))
    string = "naïve 你好"
    wanted = tokenizer("qwen").encode(string).ids
    printed = run(program, folder / "text.bin", string)
    assert printed == " ".join(map(str, wanted)) + f" {string}\n"
    with pytest.raises(AssertionError, match=r"cannot read .*absent: No such file"):
        run(program, folder / "absent", string)


@pytest.mark.parametrize(
    "kind", ["ON", pytest.param("OFF", marks=pytest.mark.slow)], ids=["shared", "static"]
)
def test_others_find_the_package_by_cmake(kind: str, tmp_path: Path) -> None:
    options = [] if kind == "ON" else ["-DBUILD_SHARED_LIBS=OFF"]
    prefix = library.installed(*options)
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER)
    where = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DSOURCES={NATIVE}"]
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", *where)
    run("cmake", "--build", tmp_path / "build")
    for language in ("c", "cc"):
        program = tmp_path / "build" / f"use_{language}"
        uses(program, tmp_path)
        assert ("libregatta_text" in run("ldd", program)) == (kind == "ON")
        assert "python" not in run("ldd", program)


def test_the_header_is_c99_and_pkg_config_knows_the_library(tmp_path: Path) -> None:
    prefix = library.installed()
    path = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "regatta_text", **path).split()
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    program = tmp_path / "use"
    run("cc", *strict, NATIVE / "text_use.c", "-o", program, *flags, f"-Wl,-rpath,{prefix}/lib")
    uses(program, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_hostile_files_break_nothing_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    flags = f"-fsanitize={sanitizers} -fno-sanitize-recover=all -O1 -g1 -D_GLIBCXX_ASSERTIONS"
    options = ["-DBUILD_SHARED_LIBS=OFF", f"-DCMAKE_CXX_FLAGS={flags}", "-DCMAKE_BUILD_TYPE=None"]
    prefix = library.installed(*options)
    path = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    needs = run("pkg-config", "--static", "--cflags", "--libs", "regatta_text", **path)
    program = tmp_path / "fuzz"
    source = NATIVE / "text_fuzz.cc"
    run("c++", "-std=c++17", *flags.split(), source, "-o", program, *needs.split())
    for name in ("byte_level", "mistral", "behaviors", "added", "llama3"):
        (tmp_path / name).write_bytes(file_of(name))
        count = "3000" if name == "byte_level" else "800"
        printed = run(program, tmp_path / name, count, "11")
        assert int(printed.split()[0]) > 0
