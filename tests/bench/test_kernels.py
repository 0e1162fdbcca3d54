"""The operator benchmark's command line and cases; its times need a quiet machine."""

from __future__ import annotations

import pytest

from predict.bench import operators
from predict.bench.kernels import parse
from predict.device.library import Library
from predict.errors import UserError

SHAPE = operators.ModelShape(64, 96, 4, 2, 32, 128)


def test_models_and_tokens_may_be_left_out() -> None:
    assert parse([])["shapes"] == ["qwen2.5-0.5b", "llama-1b"]
    assert parse(["--shapes", "llama-1b", "--num_tokens", "3"])["num_tokens"] == [3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops", "gemm"], "gemm"),
        (["--num_tokens", "0"], "a whole number from 1 to"),
        (["--shapes", "llama-9b"], "llama-9b"),
        (["--kv_format", "dense,int3"], "int3"),
    ],
)
def test_unknown_names_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(words)


@pytest.mark.parametrize("op", operators.CASES)
def test_every_case_runs(compiled: Library, op: str) -> None:
    for case in operators.CASES[op](operators.Sizes(SHAPE, 2, 100, "float32")):
        compiled.op(f"regatta_{op}")(*case.copies[0])


def test_attention_has_a_case_for_each_format(compiled: Library) -> None:
    sizes = operators.Sizes(SHAPE, 2, 100, "bfloat16", ("dense", "int8_static", "int4"))
    for make in (
        operators.CASES["paged_attention"],
        operators.CASES["rope_and_cache_write"],
        operators.attention_block_cases,
    ):
        cases = list(make(sizes))
        assert [case.name.rpartition(", ")[2] for case in cases[1:]] == ["int8_static", "int4"]
        sizes_read = [case.num_bytes for case in cases]
        assert sizes_read == sorted(sizes_read, reverse=True)
        for case in cases:
            compiled.op(f"regatta_{case.op}")(*case.copies[0])
