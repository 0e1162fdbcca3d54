"""What rounding loses: chosen by a flag, refused where nothing changes, said once while loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.device.library import Library
from predict.errors import UserError
from tests.support import tiny
from tests.support.cpu_kernels import force
from tests.support.golden import greedy
from tests.support.schemes import logits_of, relative_error

INT8 = {"quant_type": "weight_only_int8", "dtype": "bfloat16", "inference_model": True}
SAID = "round activations to int8 in blocks of 32; --weight_only_activations float"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "m")


@pytest.fixture
def vectors(compiled: Library) -> Iterator[None]:
    """The operators without tiles."""
    if compiled.info()["instruction_set"] == "amx":
        force(compiled, "avx512_bf16")
    yield
    force(compiled, "")


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4"])
def test_floats_are_nearer_to_the_values_than_int8(model: Path, scheme: str) -> None:
    settings = {"quant_type": scheme, "inference_model": True}
    exact = logits_of(model, dtype="float32", **settings)
    errors = {
        how: relative_error(
            logits_of(model, dtype="bfloat16", weight_only_activations=how, **settings), exact
        )
        for how in ("int8", "float")
    }
    assert errors["float"] < errors["int8"]
    np.testing.assert_array_equal(
        logits_of(model, dtype="bfloat16", **settings),
        logits_of(model, dtype="bfloat16", weight_only_activations="int8", **settings),
    )


@pytest.mark.usefixtures("compiled")
def test_an_export_keeps_its_activations(model: Path, tmp_path: Path) -> None:
    def config(path: Path, **changes: Any) -> EngineConfig:
        values = {**INT8, "weight_only_activations": "float", **changes}
        return EngineConfig(model_name_or_path=str(path), max_length=64, **values)

    export_model(config(model), tmp_path / "out")
    static = {"mode": "static", "quant_type": None}
    prompts = [[5, 6, 7, 8], [9, 30, 100]]
    got = greedy(LLM(config(tmp_path / "out", **static)), prompts, 12)
    assert got == greedy(LLM(config(model)), prompts, 12)
    with pytest.raises(UserError, match=r"codes is float, --weight_only_activations asks for int8"):
        LLM(config(tmp_path / "out", **static, weight_only_activations="int8"))


@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4"])
def test_tiles_take_bfloat16_as_it_is(
    compiled: Library, model: Path, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    if compiled.info()["instruction_set"] != "amx":
        pytest.skip("products here are not by AMX")
    settings = {**INT8, "quant_type": scheme}
    with caplog.at_level("INFO", "regatta"):
        asked = {
            how: logits_of(model, weight_only_activations=how, **settings)
            for how in ("int8", "float")
        }
    np.testing.assert_array_equal(asked["int8"], asked["float"])
    assert not any(SAID in line for line in caplog.messages)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(
    ("changes", "times"),
    [({}, 1), ({"weight_only_activations": "float"}, 0), ({"dtype": "float32"}, 0)],
)
def test_what_int8_activations_lose_is_said_once(
    model: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], times: int
) -> None:
    with caplog.at_level("INFO", "regatta"):
        LLM(str(model), max_length=64, **{**INT8, **changes})
    assert sum(SAID in line for line in caplog.messages) == times


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quant_type": None}, "int8 changes nothing: no linear here is weight_only_int8 or"),
        ({"quant_type": "a8w8"}, "no linear here is weight_only_int8 or weight_only_int4"),
        ({"dtype": "float32"}, "float32 is multiplied as it is"),
        ({"inference_model": False}, "it is of the compiled operators of a CPU"),
    ],
)
def test_a_flag_that_changes_nothing_is_refused(
    model: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        LLM(str(model), max_length=64, **{**INT8, "weight_only_activations": "int8", **changes})


@pytest.mark.parametrize(
    ("changes", "times"),
    [({}, 1), ({"weightonly_group_size": 32}, 0), ({"quant_type": "weight_only_int8"}, 0)],
)
def test_one_scale_per_output_feature_says_what_groups_would_save(
    model: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], times: int
) -> None:
    with caplog.at_level("INFO", "regatta"):
        LLM(str(model), max_length=64, **{"quant_type": "weight_only_int4", **changes})
    found = [line for line in caplog.messages if "--weightonly_group_size 32 would" in line]
    assert len(found) == times
    for line in found:
        losses = [float(word.rstrip("%")) for word in line.split() if word.endswith("%")]
        assert line.startswith("8 linears become weight_only_int4 with one scale")
        assert 5 < losses[1] < losses[0] < 20


def test_an_engine_names_the_ways_to_take_activations(model: Path) -> None:
    with pytest.raises(UserError, match=r"weight_only_activations 'int4'.*int8, float"):
        LLM(str(model), weight_only_activations="int4")
