"""The commands of PaddleNLP's two pages on inference, with only the model's path changed.

"current" is the page of PaddleNLP 3.0's documentation, "older" that of 2.6, whose commands follow
one another in one folder.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

import export.export_model
import predict.predictor
from quant.run_quantization import main as quantize

LLAMA = "meta-llama/Llama-2-7b-chat"
PREDICT = f"python ./predict/predictor.py --model_name_or_path {LLAMA}"
PTQ = "python ./predict/predictor.py --model_name_or_path checkpoints/llama_ptq_ckpts"
FUSED = "--inference_model --dtype float16 --block_attn"
CURRENT = (
    f"{PREDICT} {FUSED}",
    f"{PREDICT} {FUSED} --device xpu",
    f"{PREDICT} --inference_model --dtype float16 --quant_type weight_only_int8 --block_attn",
    f"{PTQ} {FUSED} --quant_type a8w8",
    f"{PTQ} {FUSED} --quant_type a8w8 --cachekv_int8_type static",
    f"{PREDICT} {FUSED} --cachekv_int8_type dynamic",
)
OLDER = (
    f"python predictor.py --model_name_or_path {LLAMA} --inference_model --dtype float16",
    f"python export_model.py --model_name_or_path {LLAMA} --inference_model "
    "--output_path ./inference --dtype float16",
    "python predictor.py --model_name_or_path ./inference --inference_model "
    '--dtype "float16" --mode "static"',
    f"python predictor.py --model_name_or_path {LLAMA} --inference_model --export_precache true "
    "--prefix_path /path/to/pre_caches --dtype float16",
    f"python export_model.py --model_name_or_path {LLAMA} --inference_model "
    "--export_precache true --output_path ./inference_ptuning --dtype float16",
    "python predictor.py --model_name_or_path ./inference_ptuning --inference_model "
    '--dtype "float16" --export_precache true --prefix_path /path/to/pre_caches --mode "static"',
    f"python predictor.py --model_name_or_path {LLAMA} --inference_model "
    "--quant_type weight_only_int8 --dtype float16",
    f"python export_model.py --model_name_or_path {LLAMA} --inference_model "
    "--quant_type weight_only_int8 --output_path ./inference --dtype float16",
    "python predictor.py --model_name_or_path ./inference --inference_model "
    '--quant_type weight_only_int8 --dtype "float16" --mode "static"',
    "python predictor.py --model_name_or_path checkpoints/llama_ptq_ckpts --dtype float16 "
    '--max_length 1024 --mode "dynamic" --inference_model',
    "python export_model.py --model_name_or_path checkpoints/llama_ptq_ckpts "
    "--output_path ./inference_ptq --dtype float16 --inference_model",
    "python predictor.py --model_name_or_path ./inference_ptq --dtype float16 "
    '--max_length 1024 --mode "static" --inference_model',
)
MAINS = {"predictor.py": predict.predictor.main, "export_model.py": export.export_model.main}


@pytest.fixture(scope="module")
def calibrated(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PTQ of the tiny model writes, with scales of an int8 cache."""
    folder = tmp_path_factory.mktemp("ptq")
    (folder / "text.txt").write_text("some text that is long enough to calibrate with\n" * 9)
    words = ["--model_name_or_path", str(small), "--data_file", str(folder / "text.txt")]
    words += ["--quant_type", "a8w8c8", "--do_ptq", "--ptq_step", "1", "--src_length", "32"]
    assert quantize([*words, "--output_path", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def page(home: Path, small: Path, calibrated: Path) -> Path:
    """The folder that the pages' commands run in."""
    (home / "models" / LLAMA).symlink_to(small)
    (home / "checkpoints").mkdir()
    (home / "checkpoints" / "llama_ptq_ckpts").symlink_to(calibrated)
    prefix = np.random.default_rng(0).normal(0, 0.3, (1, 2, 2, 7, 32)).astype(np.float32)
    (home / "pre_caches").mkdir()
    np.save(home / "pre_caches" / "pre_caches.npy", prefix)
    return home


def run(command: str, page: Path) -> int:
    """Runs a command of a page, which leaves an answer or a program; returns the exit status."""
    _, script, *words = shlex.split(command.replace("/path/to/pre_caches", f"{page}/pre_caches"))
    (page / "output.json").unlink(missing_ok=True)
    status = MAINS[Path(script).name](words)
    assert status or "--output_path" in words or (page / "output.json").stat().st_size
    return status


@pytest.mark.parametrize("command", CURRENT)
def test_commands_of_the_current_page(
    command: str, compiler: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--device xpu" in command:  # Paddle with such devices runs it: tests/fake_device
        assert run(command, page) == 2
        assert "the installed Paddle has no devices of that type" in capsys.readouterr().err
    else:
        assert run(command, page) == 0, capsys.readouterr().err


def test_commands_of_the_older_page_one_after_another(
    compiler: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in OLDER:
        assert run(command, page) == 0, (command, capsys.readouterr().err)
    assert "inference holds an earlier export, which this one replaces" in capsys.readouterr().err


FLAGS = (
    "--inference_model",
    "--block_attn --block_size 16 --batch_size 2",
    "--append_attn --max_length 64 --chat_template none",
    "--avx_model --avx_type fp16",
    "--inference_model --total_max_length 64 --dtype auto",
    "--inference_model --src_length 20 --max_new_tokens 8 --model_prefix other",
    "--inference_model --quant_type weight_only_int4 --weightonly_group_size 32 "
    "--lm_head_quant_type weight_only_int8 --skip_list_names down_proj",
    "--append_attn --quant_type a8w8 --cachekv_int8_type fp8",
    "--append_attn --cachekv_int8_type dynamic --mla_use_matrix_absorption true",
    "--inference_model --decode_strategy beam_search --num_beams 2 --batch_size 2",
    "--inference_model --speculate_method inference_with_reference --seed 3",
    "--dtype float32 --enable_lora false --temperature 0.5 --top_k 0",
    "--dtype bfloat16 --inference_model false",
    "--inference_model --load_format dummy",
)


@pytest.mark.parametrize("flags", FLAGS)
def test_an_export_runs_with_the_flags_that_made_it(
    flags: str, compiler: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_flags = f"--model_name_or_path {LLAMA} {flags} --output_path out"
    assert run(f"python export_model.py {export_flags}", page) == 0, capsys.readouterr().err
    flags = flags.replace("--enable_lora false", "")
    again = f"python predictor.py --model_name_or_path out {flags} --mode static"
    assert run(again, page) == 0, capsys.readouterr().err
