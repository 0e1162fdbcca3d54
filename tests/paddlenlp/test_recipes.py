"""The quantization recipes of PaddleNLP's llm/config/llama/, byte for byte in their keys."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from predict import LLM, SamplingParams
from predict.errors import UserError
from predict.nn.decoder import layer_schemes
from quant.config import QuantConfig, parse_command_line
from quant.run_quantization import main
from tests.support.paths import DEMO

NAME = "meta-llama/Meta-Llama-3-8B"  # in every recipe


class Recipe(NamedTuple):
    """What a recipe makes: where, what its linears and its cache are, and what is said of it."""

    output: str
    scheme: str
    cache: str | None = None
    says: tuple[str, ...] = ()


RECIPES = {
    "ptq": Recipe("llama_ptq_ckpts", "a8w8"),
    "ptq_c8": Recipe("llama_ptq_c8_ckpts", "a8w8", cache="static"),
    "gptq": Recipe("gptq_ckpts", "weight_only_int4", says=("--do_gptq without --quant_type",)),
    "awq": Recipe("ptq_ckpts", "weight_only_int4"),
    "fp8_ptq": Recipe(
        "llama_ptq_ckpts", "a8w8_fp8", says=("--cachekv_quant_method has no effect here",)
    ),
}
SAID = ("--eval_accumulation_steps has no effect here",)


def recipe_file(name: str) -> Path:
    return Path(__file__).parent / "recipes" / f"{name}_argument.json"


# ptq_c8 searches and rounds as ptq does, which takes most of a minute on the demo model.
SIZES = [
    *((name, "small") for name in RECIPES),
    *(pytest.param(n, "demo", marks=pytest.mark.slow) for n in RECIPES if n != "ptq_c8"),
]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_recipes_calibrate_to_the_end_and_what_they_write_answers(
    name: str, size: str, small: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPES[name]
    (home / "models" / NAME).symlink_to(DEMO if size == "demo" else small)
    assert main([str(recipe_file(name))]) == 0
    said = capsys.readouterr().err
    assert all(each in said for each in (*recipe.says, *SAID)), said
    written = home / "checkpoints" / recipe.output
    assert (written / "cachekv_scales.json").exists() == (recipe.cache is not None)
    fused = "fp8" not in name  # which has compiled operators on GPUs alone
    llm = LLM(written, cachekv_int8_type=recipe.cache, max_length=64, inference_model=fused)
    assert llm.decoder is not None
    assert layer_schemes(llm.decoder) == recipe.scheme
    (answer,) = llm.generate(["def gcd(a, b):"], SamplingParams(temperature=0, max_new_tokens=12))
    assert answer.token_ids
    assert size == "small" or answer.text.startswith("\n    "), answer.text  # a function's body


def config_of(home: Path, *words: str) -> QuantConfig:
    given = ("--model_name_or_path", str(DEMO), "--output_dir", "out", "--data_file", "data")
    return QuantConfig.from_flags(parse_command_line([*given, *words]))


@pytest.mark.parametrize(
    ("words", "quant_type"),
    [
        ((), "a8w8"),
        (("--do_gptq",), "weight_only_int4"),
        (("--do_gptq", "--quant_type", "wint8"), "wint8"),
        (("--use_fp8", "WA"), "a8w8_fp8"),
        (("--use_fp8", "aw", "--quant_type", "W8A8C8"), "a8w8_fp8c8"),
        (("--use_fp8", "WA", "--quant_type", "a8w8_fp8"), "a8w8_fp8"),
    ],
    ids=" ".join,
)
def test_the_type_that_flags_leave_open_is_paddlenlps(
    words: tuple[str, ...], quant_type: str, home: Path
) -> None:
    assert config_of(home, *words).quant_type == quant_type


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--use_fp8", "W"), "--use_fp8 W with --quant_type a8w8 is not available"),
        (("--use_fp8", "WAC", "--quant_type", "a8w8c8"), "--cachekv_int8_type fp8"),
        (("--use_fp8", "WA", "--quant_type", "wint8"), "--use_fp8 WA with --quant_type wint8"),
        (
            ("--quant_type", "a8w8c8", "--cachekv_quant_method", "abs_max"),
            "abs_max has one scale for all heads.*; use abs_max_headwise",
        ),
    ],
    ids=str,
)
def test_what_is_not_here_is_refused_by_name(words: tuple[str, ...], said: str, home: Path) -> None:
    with pytest.raises(UserError, match=said):
        config_of(home, *words)
