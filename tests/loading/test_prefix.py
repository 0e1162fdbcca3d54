"""Files of prefix tuning: what PaddleNLP saves is read, anything else refused before any work."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM
from predict.errors import UserError
from predict.loading.model import read_spec
from predict.loading.prefix import read_prefix
from predict.nn.spec import DecoderSpec
from tests.golden.prefixes import random_prefix
from tests.support.prefixes import (
    encoded,
    encoder_weights,
    save_params,
    split_weights,
    trained,
    write_config,
)

SHAPE, LENGTH = (2, 2, 32), 5  # of tests.support.tiny
VALUES = random_prefix(SHAPE, LENGTH, 0)


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> DecoderSpec:
    return read_spec(str(tiny_model), None)[0]


def read(path: Path, spec: DecoderSpec, dtype: str = "float32", max_length: int = 64) -> Any:
    return read_prefix(path, spec, dtype, max_length).values


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_numpy_is_read(
    tmp_path: Path, spec: DecoderSpec, dtype: Any, order: Any
) -> None:
    path = tmp_path / "any name.npy"
    path.write_bytes(npy(np.asarray(VALUES.astype(dtype), order=order)))
    np.testing.assert_array_equal(read(path, spec), VALUES)


def test_paddles_bfloat16_is_read(tmp_path: Path, spec: DecoderSpec) -> None:
    bits = (VALUES.view(np.uint32) >> 16).astype(np.uint16)
    np.save(tmp_path / "pre_caches.npy", bits)
    np.testing.assert_array_equal(read(tmp_path, spec), VALUES)


@pytest.mark.parametrize("inner", [None, 24])
def test_the_encoders_weights_make_the_prefix(
    tmp_path: Path, spec: DecoderSpec, inner: int | None
) -> None:
    weights = encoder_weights(SHAPE, LENGTH, inner)
    save_params(tmp_path / "prefix_model_state.pdparams", weights)
    write_config(
        tmp_path, num_prefix_tokens=LENGTH, prefix_projection=inner is not None, dtype="float16"
    )
    np.testing.assert_allclose(read(tmp_path, spec), encoded(weights, SHAPE), rtol=1e-5, atol=1e-5)


def write_parts(
    folder: Path, weights: dict[str, Any], num_ranks: int, degree: int | None = None
) -> None:
    """What the ranks of a training save, without merging."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, part in enumerate(split_weights(weights, num_ranks)):
        save_params(folder / f"prefix_model_state.tp{rank:02d}.pdparams", part)
    write_config(
        folder,
        num_prefix_tokens=len(weights["0.weight"]),
        prefix_projection="1.weight" in weights,
        tensor_parallel_degree=num_ranks if degree is None else degree,
    )


@pytest.mark.parametrize("inner", [None, 24])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parts_of_ranks_make_what_each_rank_had_in_training(
    tmp_path: Path, spec: DecoderSpec, inner: int | None, num_ranks: int
) -> None:
    weights = encoder_weights(SHAPE, 6, inner)
    write_parts(tmp_path, weights, num_ranks)
    wanted = trained(weights, SHAPE, num_ranks)
    np.testing.assert_allclose(read(tmp_path, spec), wanted, rtol=1e-5, atol=1e-5)
    assert (num_ranks == 1) == np.allclose(wanted, encoded(weights, SHAPE), atol=1e-5)
    # What PaddleNLP writes beside them is of one rank's order.
    alone = tmp_path / "pre_caches.npy"
    np.save(alone, encoded(weights, SHAPE))
    np.testing.assert_allclose(read(tmp_path, spec), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(read(alone, spec), encoded(weights, SHAPE))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, spec: DecoderSpec) -> None:
    def refused(name: str, said: str) -> None:
        with pytest.raises(UserError, match=said):
            read(tmp_path / name, spec)

    weights = encoder_weights(SHAPE, 6, 24)
    part = split_weights(weights, 2)[1]

    def with_second(name: str, **changes: Any) -> None:
        write_parts(tmp_path / name, weights, 2)
        own = {key: value for key, value in {**part, **changes}.items() if value is not None}
        save_params(tmp_path / name / "prefix_model_state.tp01.pdparams", own)

    write_parts(tmp_path / "missing", weights, 2)
    (tmp_path / "missing" / "prefix_model_state.tp00.pdparams").unlink()
    refused("missing", r"lacks prefix_model_state.tp00.pdparams; complete the copy")
    write_parts(tmp_path / "fewer", weights, 2, degree=4)
    refused("fewer", "tensor_parallel_degree is 4, and there are parts of 2 ranks")
    write_parts(tmp_path / "more", weights, 3, degree=2)
    refused("more", "tensor_parallel_degree is 2, and there are parts of 3 ranks")
    write_parts(tmp_path / "heads", weights, 3)
    refused("heads", "parts of 3 ranks, and this model has 2 heads of keys")
    with_second("bias", **{"3.bias": part["3.bias"] + 1})
    refused("bias", "hold different values of 3.bias")
    with_second("names", **{"1.bias": None})
    refused("names", "do not hold the same tensors; only one has 1.bias")
    with_second("sizes", **{"1.weight": part["1.weight"][:-1]})
    refused("sizes", "1.weight cannot be merged: its parts do not fit together")
    write_parts(tmp_path / "dims", {**weights, "1.weight": weights["1.bias"]}, 2)
    refused("dims", r"1.weight has shape \[24\]")
    write_parts(tmp_path / "two", weights, 2)
    save_params(tmp_path / "two" / "prefix_model_state.pdparams", weights)
    refused("two", "which are of two savings; keep one of them")
    write_parts(tmp_path / "short", weights, 2)
    write_config(tmp_path / "short", num_prefix_tokens=5, prefix_projection=True)
    refused("short", r"0.weight has shape \[6, 64\].*\[5, 64\]")


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


HOSTILE = {
    "a pickle": (pickle.dumps(Runs()), "does not begin as one of version 1, 2 or 3"),
    "an array of objects": (npy(np.array([Runs(), 1], object)), r"dtype '\|O', Python's objects"),
    "whole numbers": (npy(np.zeros((2, 2, 2, 5, 32), np.int32)), "has dtype I32; an adapter"),
    "four dimensions": (npy(VALUES[0]), r"shape \[2, 2, 5, 32\], and this model takes \[2, 2, 2,"),
    "other layers": (npy(np.concatenate([VALUES, VALUES])), "trained for another model"),
    "query heads": (npy(np.tile(VALUES, (1, 1, 2, 1, 1))), r"\[2, 2, 4, 5, 32\].*another model"),
    "other head_dim": (npy(VALUES[..., :16]), "trained for another model"),
    "no tokens": (npy(VALUES[:, :, :, :0]), "a prefix of 0 tokens"),
    "too many tokens": (npy(np.tile(VALUES, (1, 1, 1, 13, 1))), r"of 65 tokens, and max_length is"),
    "NaN": (npy(np.where(VALUES > 2, np.nan, VALUES)), "values that are not finite"),
    "infinity": (npy(np.where(VALUES > 2, np.inf, VALUES)), "values that are not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_are_refused_before_any_work(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content, said = HOSTILE[name]
    (tmp_path / "pre_caches.npy").write_bytes(content)
    refuse_to_work(monkeypatch)
    for path in (tmp_path, tmp_path / "pre_caches.npy"):
        with pytest.raises(UserError, match=said):
            LLM(tiny_model, max_length=64, prefix_path=path)


def refuse_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("work began")

    for place in ("build.open_weights", "build.allocate_caches", "engine.addons.write_rows"):
        monkeypatch.setattr(f"predict.{place}", fail)
    monkeypatch.setattr(os, "system", fail)


@pytest.mark.parametrize(
    ("changes", "config", "said"),
    [
        ({"0.weight": None, "1.weight": np.zeros(1)}, {}, "0.weight is not there"),
        ({"0.weight": np.zeros((5, 9), np.float32)}, {}, r"0.weight has shape \[5, 9\]"),
        ({"0.weight": np.full((5, 256), np.nan, np.float32)}, {}, "values that are not finite"),
        ({"0.weight": np.zeros((5, 256), np.int64)}, {}, "has dtype I64"),
        ({}, {"num_prefix_tokens": None}, "has no num_prefix_tokens"),
        ({}, {"num_prefix_tokens": 6}, r"0.weight has shape \[5, 256\].*\[6, 256\]"),
        ({}, {"num_prefix_tokens": 1 << 62}, "max_length is 64"),
        ({}, {"num_prefix_tokens": -1}, "a prefix of -1 tokens"),
        ({}, {"num_prefix_tokens": "5"}, "num_prefix_tokens is '5'"),
        ({}, {"prefix_projection": True}, "lacks 1.bias"),
        (
            {},
            {"prefix_scale": 2.0},
            r"prefix_config\.json: prefix_scale is 2.0, which is not known",
        ),
    ],
)
def test_hostile_weights_are_refused_before_any_work(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    config: dict[str, Any],
    said: str,
) -> None:
    weights = {**encoder_weights(SHAPE, LENGTH, None), **changes}
    stored = {name: value for name, value in weights.items() if value is not None}
    save_params(tmp_path / "prefix_model_state.pdparams", stored)
    values = {"num_prefix_tokens": LENGTH, "prefix_projection": False, **config}
    write_config(tmp_path, **values)
    refuse_to_work(monkeypatch)
    with pytest.raises(UserError, match=said):
        LLM(tiny_model, max_length=64, prefix_path=tmp_path)


def test_a_pickle_that_runs_something_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefix_model_state.pdparams").write_bytes(pickle.dumps({"0.weight": Runs()}))
    write_config(tmp_path, num_prefix_tokens=LENGTH)
    refuse_to_work(monkeypatch)
    with pytest.raises(UserError, match="not a file of arrays that Paddle saved"):
        LLM(tiny_model, max_length=64, prefix_path=tmp_path)


def test_values_beyond_the_models_dtype_are_refused(tmp_path: Path, spec: DecoderSpec) -> None:
    np.save(tmp_path / "pre_caches.npy", VALUES * 1e5)
    read(tmp_path, spec, "bfloat16")
    with pytest.raises(UserError, match=r"values up to .*float16 ends at 65504"):
        read(tmp_path, spec, "float16")


def test_folders_without_a_whole_prefix_are_refused(tmp_path: Path, spec: DecoderSpec) -> None:
    with pytest.raises(UserError, match=r"neither pre_caches.npy nor prefix_model_state.pdparams"):
        read(tmp_path, spec)
    os.mkfifo(tmp_path / "pre_caches.npy")
    with pytest.raises(UserError, match="it is a pipe"):
        read(tmp_path, spec)
