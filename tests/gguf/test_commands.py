"""The predictor, an export and quantization, given a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from export.export_model import main as export_main
from predict.convert import main as convert_main
from predict.predictor import main as predict_main
from quant.run_quantization import main as quantize_main
from tests.support import tiny
from tests.support.gguf_blocks import Types
from tests.support.gguf_models import convert
from tests.support.gguf_tokens import add_byte_level, add_sentencepiece
from tests.support.texts import PROMPTS

EOS = 1  # of the tokenizer
FLAGS = ("--dtype", "float32", "--device", "cpu", "--max_length", "64", "--src_length", "40")


def safetensors(folder: Path) -> Path:
    directory = tiny.write_with_tokenizer(folder)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": EOS}))
    return directory


def outputs(model: Path, out: Path, *words: str) -> list[str]:
    """The texts that the predictor writes for PROMPTS."""
    data = out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps({"src": text, "tgt": ""}) + "\n" for text in PROMPTS))
    argv = ["--model_name_or_path", str(model), "--data_file", str(data), *FLAGS, *words]
    argv += ["--output_file", str(out), "--decode_strategy", "greedy_search"]
    assert predict_main(argv) == 0
    return [json.loads(line)["output"] for line in out.read_text().splitlines()]


def converted(folder: Path, kind: str, tokenizer: str = "byte_level") -> Path:
    """The model of `safetensors` as a GGUF file, its matrices of a type, with a tokenizer."""
    tokens = tiny.TOKENIZER.parent / tokenizer
    return convert(
        safetensors(folder / "m"),
        folder / "x.gguf",
        Types[kind],
        lambda writer: (
            add_byte_level(writer, tokens, "gpt-2")
            if tokenizer == "byte_level"
            else add_sentencepiece(writer, tokens)
        ),
    )


def test_the_predictor_writes_the_texts_of_the_safetensors(tmp_path: Path) -> None:
    path = converted(tmp_path, "F32")
    wanted = outputs(tmp_path / "m", tmp_path / "a.json", "--inference_model")
    assert outputs(path, tmp_path / "b.json", "--inference_model") == wanted
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "x.gguf")
    assert outputs(folder, tmp_path / "c.json", "--inference_model") == wanted


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece_legacy"])
def test_an_export_runs_as_the_file_does(kind: str, tokenizer: str, tmp_path: Path) -> None:
    path = converted(tmp_path, kind, tokenizer)
    words = ("--inference_model", "--weightonly_group_size", "-1")
    wanted = outputs(path, tmp_path / "a.json", *words)
    exported = tmp_path / "export"
    argv = ["--model_name_or_path", str(path), "--output_path", str(exported), *FLAGS, *words]
    assert export_main(argv) == 0
    assert outputs(exported, tmp_path / "b.json", "--mode", "static", *words) == wanted


@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece_legacy"])
def test_a_converted_file_is_a_checkpoint_of_hugging_face(tokenizer: str, tmp_path: Path) -> None:
    path = converted(tmp_path, "Q4_0", tokenizer)
    made = tmp_path / "made"
    assert convert_main([str(path), str(made), "--format", "hf"]) == 0
    assert (made / "model.safetensors").is_file()
    words = ("--inference_model",)
    wanted = outputs(path, tmp_path / "a.json", *words)
    assert outputs(made, tmp_path / "b.json", *words) == wanted


def test_quantization_takes_no_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = convert(tiny.write(tmp_path / "m"), tmp_path / "x.gguf")
    argv = ["--model_name_or_path", str(path), "--quant_type", "weight_only_int4"]
    assert quantize_main([*argv, "--output_path", str(tmp_path / "out"), "--dtype", "float32"]) == 2
    assert "is GGUF" in capsys.readouterr().err
