"""What a CUDA source is compiled for, by its name, against what its code and its callers say.

Read from the sources, and from the table of select.cu as compiled for a CPU: no nvcc and no GPU.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import build
from tests.support.gemm_choices import GemmChoices

# By their names in csrc/.
SOURCES = {str(path.relative_to(build.CSRC)): path for path in build.cuda_sources()}
FILES = {
    str(path.relative_to(build.CSRC)): path
    for folder in ("cuda", "blocks")
    for path in (build.CSRC / folder).rglob("*.*")  # headers too
}
# Of GPUs that nvcc 13 knows, each as code of its own is named.
EVERY = ("75", "80", "86", "87", "89", "90a", "100a", "103", "110", "120a", "121")
BUILDS = [("75",), ("80",), ("89",), ("90a",), ("80", "90a"), ("75", "80", "86", "89"), EVERY]


def number(architecture: str) -> int:
    return int(architecture.rstrip("a"))


def text_of(name: str) -> str:
    return FILES[name].read_text(encoding="utf-8")


def code_of(name: str) -> str:
    return re.sub(r"//.*", "", text_of(name))


@cache
def included(name: str) -> frozenset[str]:
    """The file and all of csrc/cuda and csrc/blocks that it includes, on the way too."""
    found = {name}
    for header in re.findall(r'#include "([\w./]+)"', text_of(name)):
        for each in (header, f"{Path(name).parent}/{header}"):
            found |= included(each) if each in FILES else set()
    return frozenset(found)


def stated(name: str) -> str | None:
    """The suffix that the words behind "Architectures:" call for, "" for none; None without."""
    header = re.split(r"^(?!//)", text_of(name), maxsplit=1, flags=re.MULTILINE)[0]
    words = re.search(r"Architectures: ([^.,;(]*)", re.sub(r"\n// *", " ", header))
    if words is None:
        return None
    if words[1].startswith(("all", "those of cuBLASLt")):
        return ""
    named = re.fullmatch(r"sm_(\d+)a?( and later)?", words[1].strip())
    assert named, f"{name}: Architectures: {words[1]}"
    if named[2] and named[1] == build.CUDA_ARCHITECTURES[0]:
        return ""
    alone = f"{named[1]}a" in build.CUDA_ARCHITECTURES
    assert alone != bool(named[2]), f"{name}: compiled for {'one' if alone else 'more than one'}"
    return named[1]


@cache
def home_of(function: str) -> str | None:
    definition = re.compile(rf"^\w[\w:*& ]*[ *]{function}\([^;{{]*\{{", re.MULTILINE)
    found = [name for name in SOURCES if definition.search(code_of(name))]
    assert len(found) <= 1, f"{function} is defined in {found}"
    return found[0] if found else None


def test_names_say_what_the_headers_say() -> None:
    wrong = {
        name: stated(name)
        for name, path in SOURCES.items()
        if stated(name) not in (None, build.oldest_architecture(path))
    }
    assert not wrong, f"file and the suffix that its first lines call for: {wrong}"
    assert sum(stated(name) is not None for name in SOURCES) > 25


def test_products_are_compiled_where_their_candidates_run_and_nowhere_else(
    gemm_choices: GemmChoices,
) -> None:
    admitted: dict[str, set[str]] = {}
    for row in gemm_choices.table():
        home = home_of(row.kernel)
        if home is None or row.kernel == "gemm_blas":
            continue
        own = {each for each in EVERY if row.min_arch <= number(each) <= row.max_arch}
        admitted[home] = admitted.get(home, set()) | own
    assert len(admitted) >= 12
    for home, architectures in admitted.items():
        compiled = set(build.source_architectures(SOURCES[home], EVERY))
        assert compiled == architectures, home


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_attention_is_compiled_where_its_candidate_accepts(
    architecture: str, select_kernels: Path
) -> None:
    calls = "\n".join(f"attention arch={number(n)} force=sm{architecture}" for n in EVERY)
    said = subprocess.run([select_kernels], input=calls, capture_output=True, text=True, check=True)
    answers = zip(EVERY, said.stdout.splitlines(), strict=True)
    accepted = [name for name, answer in answers if answer.startswith("sm")]
    own = [
        path
        for name, path in SOURCES.items()
        if f"launch_attention_decode_sm{architecture}(" in code_of(name)
        and path.name != "attention.cu"
    ]
    assert own
    for path in own:
        assert list(build.source_architectures(path, EVERY)) == accepted, path.name


def test_sources_with_kernels_of_one_architecture_are_named_for_it() -> None:
    for name, path in SOURCES.items():
        named = {re.search(r"_sm(\d+)\.cuh$", header) for header in included(name)}
        needs = {match[1] for match in named if match}
        # hopper.cuh alone has it around wrappers, which are empty elsewhere.
        if any(
            "ifdef REGATTA_SM90A" in text_of(part) for part in included(name) - {"cuda/hopper.cuh"}
        ):
            needs.add("90")
        assert needs <= {build.oldest_architecture(path)}, name


@pytest.mark.parametrize("architectures", BUILDS)
def test_builds_compile_no_source_for_what_its_name_leaves_out(
    architectures: tuple[str, ...],
) -> None:
    targets = build.cuda_targets(architectures)
    missing = set()
    for path in SOURCES.values():
        oldest = build.oldest_architecture(path)
        compiled = re.findall(r"code=sm_(\w+)", targets.get(path, ""))
        if not oldest:
            assert compiled == list(architectures)
        for architecture in compiled:
            assert number(architecture) >= int(oldest or 0)
            assert oldest != "90" or architecture == "90a"
        if not compiled:
            missing.add(oldest)
    absent = targets.get(build.CSRC / "cuda" / build.ABSENT_NAME, "")
    assert set(re.findall(r"REGATTA_WITHOUT_SM(\d+)", absent)) == missing


def test_all_that_others_call_of_a_source_is_defined_where_it_is_left_out() -> None:
    parts = re.findall(
        r"^#ifdef REGATTA_WITHOUT_SM(\d+)\n(.*?)^#endif",
        code_of(f"cuda/{build.ABSENT_NAME}"),
        re.DOTALL | re.MULTILINE,
    )
    defined = {oldest: set(re.findall(r"\b(\w+)\([^)]*\) \{", body)) for oldest, body in parts}
    by_level: dict[str, list[str]] = {}
    for name, path in SOURCES.items():
        by_level.setdefault(build.oldest_architecture(path), []).append(name)
    assert set(defined) == set(by_level) - {""}
    headers = (
        build.CSRC / "include" / "regatta" / "gemm.h",
        FILES["cuda/attention/attention.cuh"],
        FILES["cuda/attention/latent/latent_attention.cuh"],
        FILES["cuda/attention/latent/latent.h"],
        FILES["cuda/experts/experts.h"],
        FILES["cuda/states/delta_net.h"],
    )
    declared = {
        function
        for header in headers
        for function in re.findall(r"^\w[\w* ]*[ *](\w+)\(", header.read_text(), re.MULTILINE)
    }
    for oldest, names in by_level.items():
        if not oldest:
            continue
        others = "".join(code_of(name) for name in SOURCES if name not in names)
        others = re.sub(r'"[^"\n]*"', '""', others)
        called = {
            function
            for function in declared
            if home_of(function) in names and re.search(rf"\b{function}\b", others)
        }
        assert called == defined[oldest], f"absent.cu, sm_{oldest}"
