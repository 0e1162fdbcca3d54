"""The operator benchmark's command line and arithmetic; its times need a quiet machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from predict.bench import gpu_kernels, kernels, operators
from predict.bench.kernels import parse
from predict.bench.operators import Case
from predict.device.library import Library
from predict.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_models_and_tokens_are_those_usual_on_the_device() -> None:
    cpu, gpu = parse([]), parse(["--device", "gpu:1"])
    assert (cpu.device, gpu.device) == ("cpu", "gpu:1")
    assert cpu.shapes == ("qwen2.5-0.5b", "llama-1b")
    assert gpu.shapes == ("llama-8b",)
    assert max(cpu.num_tokens) < max(gpu.num_tokens)
    assert parse(["--device", "gpu", "--shapes", "llama-1b", "--num_tokens", "3"]).num_tokens == (
        3,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "tpu"),
        (["--ops", "gemm"], "gemm"),
        (["--num_tokens", "0"], "a whole number from 1 to"),
        (["--shapes", "llama-9b"], "llama-9b"),
        (["--kv_format", "dense,int3"], "int3"),
    ],
)
def test_unknown_names_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(words)


def test_share_is_that_of_the_tighter_limit() -> None:
    limits = {"read_bytes_per_s": 4e12, "flops_per_s": 800e12}
    memory = Case("linear", "K x N", (), num_bytes=8e6, num_flops=1e6)
    timed = gpu_kernels.Timed(memory, "llama-8b", "bfloat16", 1, [4e-6, 4e-6, 4e-6])
    result = gpu_kernels.result_of(timed, limits, (8e-6, "cuBLAS"))
    assert (result.bound, result.share, result.gbs) == ("memory", 0.5, 2000.0)
    assert "50% of 4.00 TB/s" in gpu_kernels.row(result)
    assert gpu_kernels.row(result).endswith("8.0   2.00  cuBLAS")
    compute = Case("linear", "K x N", (), num_bytes=8, num_flops=1.6e9)
    timed = gpu_kernels.Timed(compute, "llama-8b", "bfloat16", 512, [2e-6] * 3)
    result = gpu_kernels.result_of(timed, limits, None)
    assert (result.bound, result.share) == ("compute", 1.0)
    assert len(gpu_kernels.row(result)) <= len(gpu_kernels.HEADER)


def test_attention_has_a_case_for_each_format(compiled: Library) -> None:
    asked = parse(["--kv_format", "dense,int8_static,int4"]).kv_formats
    shape = operators.ModelShape(64, 96, 4, 2, 32, 128)
    sizes = operators.Sizes(shape, 2, 100, "bfloat16", kernels.HostOperands(), asked)
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


def test_every_case_names_an_operator() -> None:
    assert set(operators.CASES) <= {path.stem for path in (ROOT / "csrc" / "paddle").glob("*.cc")}


def test_pytorch_half_imports_no_paddle() -> None:
    program = "import sys, predict.bench.torch_kernels; assert 'paddle' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert process.returncode == 0


def test_what_cases_are_knows_no_device() -> None:
    program = (
        "import sys, predict.bench.operators\n"
        "known = {'predict.bench.kernels', 'predict.bench.gpu_kernels', 'paddle'}\n"
        "assert not known & set(sys.modules), known & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert process.returncode == 0


def test_the_gpu_s_half_does_not_import_the_command_line() -> None:
    program = (
        "import sys, predict.bench.gpu_kernels\nassert 'predict.bench.kernels' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert process.returncode == 0
