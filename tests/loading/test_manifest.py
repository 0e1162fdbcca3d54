"""An export that does not fit the run is refused with every reason."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.loading.manifest import (
    ADAPTERS,
    FILE_NAME,
    FileDigest,
    check_files,
    check_manifest,
    load_manifest,
)
from tests.support.manifests import MANIFEST

CONFIG = EngineConfig(
    model_name_or_path="exported",
    dtype="float32",
    mode="static",
    inference_model=True,
    max_length=256,
)


def test_fitting_export_passes_and_survives_the_disk(tmp_path: Path) -> None:
    MANIFEST.save(tmp_path)
    assert load_manifest(tmp_path) == MANIFEST
    check_manifest(MANIFEST, CONFIG, "3.3.1", 1)


@pytest.mark.parametrize(
    ("config", "paddle_version", "abi", "message"),
    [
        ({"dtype": "bfloat16"}, "3.3.1", 1, "dtype is float32, --dtype asks for bfloat16"),
        ({"block_size": 16}, "3.3.1", 1, "block_size is 64, --block_size asks for 16"),
        ({"max_length": 512}, "3.3.1", 1, "max_length is 256 tokens, --max_length asks for 512"),
        ({}, "3.2.0", 1, "traced with Paddle 3.3.1, and 3.2.0 is installed"),
        ({}, "3.3.1", 2, "operators of ABI 1, and the library has 2"),
        ({}, "3.3.1", None, "not built here"),
        ({"inference_model": False}, "3.3.1", 1, "pass --inference_model true"),
        ({"lora_modules": ("a=x",)}, "3.3.1", 1, "it takes no adapters .* with --enable_lora"),
        ({"quant_type": "wint8"}, "3.3.1", 1, "weights is dense, --quant_type asks for weight_o"),
        ({"lm_head_quant_type": "wint8"}, "3.3.1", 1, "LM head is dense, --lm_head_quant_type"),
    ],
)
def test_misfit_is_named(
    config: dict[str, Any], paddle_version: str, abi: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_manifest(MANIFEST, CONFIG.changed(**config), paddle_version, abi)


def test_rounding_of_an_export_is_checked_where_it_is_given() -> None:
    rounded = {"scheme": "weight_only_int4", "group_size": 64, "skip": ["down_proj"]}
    manifest = dataclasses.replace(MANIFEST, scheme="weight_only_int4", rounded=rounded)
    check_manifest(manifest, CONFIG, "3.3.1", 1)
    same = CONFIG.changed(
        quant_type="wint4", weightonly_group_size=64, skip_list_names=("down_proj",)
    )
    check_manifest(manifest, same, "3.3.1", 1)
    other = same.changed(weightonly_group_size=128, skip_list_names=("up_proj",))
    with pytest.raises(UserError, match=r"group_size is 64, .* asks for 128; .*skip_list_names"):
        check_manifest(manifest, other, "3.3.1", 1)


def test_all_misfits_come_in_one_message() -> None:
    config = CONFIG.changed(dtype="float16", block_size=16)
    with pytest.raises(UserError, match=r"dtype is .*; block_size is .*; it was traced with"):
        check_manifest(MANIFEST, config, "3.0.0", 1)


@pytest.mark.parametrize("text", [None, "{", '{"format": 99}', '{"format": 2, "dtype": "x"}'])
def test_missing_or_foreign_manifest_names_the_way_out(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"export|manifest\.json is not valid JSON"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("max_length", 999), ("digest", "0" * 64)])
def test_an_edit_of_a_manifest_is_noticed(tmp_path: Path, name: str, value: Any) -> None:
    MANIFEST.save(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UserError, match="was edited"):
        check_files(load_manifest(tmp_path), tmp_path)


def test_every_part_of_a_large_file_is_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predict.loading.manifest.PART_BYTES", 1000)
    path = tmp_path / "weights"
    data = bytes(range(256)) * 10
    path.write_bytes(data)
    made = FileDigest.of(path)
    assert made.num_bytes == 2560
    parts = [data[:1000], data[1000:2000], data[2000:]]
    assert made.sha256 == tuple(hashlib.sha256(part).hexdigest() for part in parts)
    manifest = dataclasses.replace(MANIFEST, files={"weights": made})
    manifest = dataclasses.replace(manifest, digest=manifest.own_digest)
    check_files(manifest, tmp_path)
    path.write_bytes(data[:2100] + b"!" + data[2101:])
    with pytest.raises(UserError, match="is not as it was exported: its SHA-256"):
        check_files(manifest, tmp_path)


def test_adapters_stand_in_a_manifest_that_takes_them_alone(tmp_path: Path) -> None:
    MANIFEST.save(tmp_path)
    assert "adapters" not in (tmp_path / FILE_NAME).read_text()
    manifest = dataclasses.replace(MANIFEST, adapters=ADAPTERS)
    manifest.save(tmp_path)
    assert load_manifest(tmp_path) == manifest
    check_manifest(manifest, CONFIG.changed(lora_modules=("a=x",)), "3.3.1", 1)
    check_manifest(manifest, CONFIG, "3.3.1", 1)
