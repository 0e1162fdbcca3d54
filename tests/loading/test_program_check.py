"""A stranger's exported program: only operators of exports, only whole files, reach Paddle."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.device import devices, library
from predict.errors import UserError
from predict.loading.manifest import FileDigest, load_manifest
from predict.loading.parameter_file import check_parameters
from predict.loading.program import load_program
from predict.loading.program_check import (
    COMMON,
    COMPILED,
    PARAMETER,
    PLAIN,
    TensorType,
    read_program,
)
from predict.nn.inputs import empty_example, to_tensors
from tests.support import tiny
from tests.support.golden import GOLDEN
from tests.support.quantized_caches import SHAPES, model


def config(directory: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"dtype": "float32", "max_length": 64, "block_size": 16}
    values["batch_size"] = 2
    values |= {"inference_model": False, **changes}
    return EngineConfig(model_name_or_path=str(directory), **values)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A small export, by whether it calls the compiled operators; not to be changed."""
    folder = tmp_path_factory.mktemp("exports")
    source = tiny.write(folder / "source")
    kinds = [False] if library.find() is None else [False, True]
    for compiled in kinds:
        export_model(config(source, inference_model=compiled), folder / str(compiled))
    return {compiled: folder / str(compiled) for compiled in kinds}


@pytest.fixture(scope="module")
def parameters(exports: dict[bool, Path]) -> dict[str, TensorType]:
    """Those of the export that calls Paddle's operators."""
    return read_program(exports[False] / "model.json", compiled=False).parameters


@pytest.fixture
def plain(exports: dict[bool, Path], tmp_path: Path) -> Path:
    """A copy of the export that calls Paddle's operators, to be spoiled."""
    return Path(shutil.copytree(exports[False], tmp_path / "export"))


def operators(program: Any) -> list[dict[str, Any]]:
    return list(program["program"]["regions"][0]["blocks"][0]["ops"])


def variants(folder: Path, compiled: bool) -> Iterator[EngineConfig]:
    """Exports that call every operator between them; each of any test checks its own program."""
    source = model(folder / "window", SHAPES["window, head_dim 20"])
    for cache_type in ("fp8", "int4"):
        yield config(source, cachekv_int8_type=cache_type, inference_model=compiled)
    source = tiny.write(folder / "tied", {"tie_word_embeddings": True})
    scheme = {"quant_type": "a8w8_fp8", "weight_block_size": (128, 128)}
    scheme = {"quant_type": "a8w8"} if compiled else scheme
    yield config(source, inference_model=compiled, dtype="float16", **scheme)
    # Sums normed and GELU, norms of all heads at once; groups of experts; sinks.
    for case in ("falcon_7b", "cohere_35b", "glm4_moe_355b", "gpt_oss_20b", "opt_350m"):
        yield config(GOLDEN / case, inference_model=compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_list_holds_what_exports_call_and_nothing_else(tmp_path: Path, compiled: bool) -> None:
    if compiled and library.find() is None:
        pytest.skip("no compiled operators")
    called: set[str] = set()
    exports = [(variant, False) for variant in variants(tmp_path, compiled)]
    exports.append((config(GOLDEN / "chatglm_6b", inference_model=compiled), True))
    for number, (variant, enable_lora) in enumerate(exports):
        out = tmp_path / str(number)
        export_model(variant, out, enable_lora=enable_lora)  # checks its program itself
        called |= {op["#"] for op in operators(json.loads((out / "model.json").read_text()))}
    assert called == {PARAMETER, *COMMON, *(COMPILED if compiled else PLAIN)}


def save_operators(number: int, value: int, kind: Any, marker: Path) -> list[dict[str, Any]]:
    """pd_op.save_combine as Paddle's own programs have it, with nothing as its output."""
    flags = {"overwrite": True, "save_as_fp16": False, "save_to_memory": False}
    attributes = [{"AT": {"#": "0.a_str", "D": str(marker)}, "N": "file_path"}] + [
        {"AT": {"#": "0.a_bool", "D": flag}, "N": name} for name, flag in flags.items()
    ]
    stop = [{"AT": {"#": "0.a_array", "D": [{"#": "0.a_bool", "D": True}]}, "N": "stop_gradient"}]
    listed = {"%": number, "TT": {"#": "0.t_vec", "D": [kind]}}
    nothing = {"%": number + 1, "TT": {"#": "NULL"}}
    return [
        {"#": "0.combine", "A": [], "I": [{"%": value}], "O": [listed], "OA": stop},
        {"#": "1.save_combine", "A": attributes, "I": [{"%": number}], "O": [nothing], "OA": stop},
    ]


def plant(program: dict[str, Any], marker: Path) -> dict[str, Any]:
    """The program, which now writes its first parameter to `marker` in each run."""
    planted = copy.deepcopy(program)
    block = planted["program"]["regions"][0]["blocks"][0]
    first = block["ops"][0]["O"]
    at = next(i for i, op in enumerate(block["ops"]) if op["#"] == "1.fetch")
    block["ops"][at:at] = save_operators(90_000, first["%"], first["TT"], marker)
    return planted


def test_program_that_would_write_a_file_is_refused_before_it_is_loaded(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paddle

    path, marker = plain / "model.json", tmp_path / "written by the program"
    path.write_text(json.dumps(plant(json.loads(path.read_text()), marker)))
    # Paddle alone would load and run it.
    loaded = load_program(plain, "model", devices.choose("cpu"))
    caches = [paddle.zeros([4, 2, 16, 32]) for _ in range(4)]
    loaded.run([*to_tensors(empty_example(), paddle.CPUPlace()).given, *caches])
    assert marker.stat().st_size > 0
    marker.unlink()

    # Digests that fit show nothing to be trusted: the attacker makes them as we do.
    manifest = load_manifest(plain)
    manifest.files["model.json"] = FileDigest.of(path)
    manifest.save(plain)
    monkeypatch.setattr("predict.build.load_program", None)
    with pytest.raises(UserError, match=r"model\.json calls the operator 'pd_op\.save_combine'"):
        LLM(config(plain, mode="static"))
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["1.py_func", "1.save", "1.load_combine", "1.read_file", "1.print", "1.run_program",
             "1.assert", "2.yield", "1.if", "1.while", "1.pylayer", "3.regatta_copy_blocks",
             "3.somebody_elses", "1.memcpy_h2d", "4.shard_tensor", "1.share_data_", "pd_op.add"],
)  # fmt: skip
def test_operator_that_no_export_calls_is_named(plain: Path, name: str) -> None:
    path = plain / "model.json"
    program = json.loads(path.read_text())
    operators(program)[-1]["#"] = name
    path.write_text(json.dumps(program))
    shown = name.replace("1.", "pd_op.").replace("3.", "custom_op.").replace("2.", "cf.")
    with pytest.raises(UserError, match=f"calls the operator '{shown}'"):
        read_program(path, compiled=False)


def test_compiled_and_plain_operators_do_not_mix(exports: dict[bool, Path]) -> None:
    for compiled, folder in exports.items():
        read_program(folder / "model.json", compiled)
        with pytest.raises(UserError, match="is not on the list"):
            read_program(folder / "model.json", not compiled)


def test_what_operators_of_ours_believe_is_checked(
    exports: dict[bool, Path], tmp_path: Path, compiled: library.Library
) -> None:
    """A list where they take a tensor, or nothing where they need one, crashed them."""
    program = json.loads((exports[True] / "model.json").read_text())
    by_name = {op["#"]: op for op in operators(program)}
    first = next(op for op in operators(program) if op["#"] == "3.regatta_blocks_")
    weights = first["I"][1]["%"]
    path = tmp_path / "model.json"
    for name, place, value, words in (
        ("3.regatta_blocks_", 0, weights, "a list where exports have a tensor"),
        ("3.regatta_embedding", 0, 0, r"takes the value \{'%': 0\}"),
        ("3.regatta_logits", 2, by_name["1.data"]["O"][0]["%"], "or the other way, at 2"),
    ):
        spoilt = copy.deepcopy(program)
        op = next(op for op in operators(spoilt) if op["#"] == name)
        op["I"][place]["%"] = value
        path.write_text(json.dumps(spoilt))
        with pytest.raises(UserError, match=words):
            read_program(path, compiled=True)


def test_a_dim_that_paddle_believes_is_checked(tmp_path: Path) -> None:
    """take_along_axis read far behind the shape's end."""
    export_model(config(GOLDEN / "mixtral_8x7b"), tmp_path / "export")
    path = tmp_path / "export" / "model.json"
    program = json.loads(path.read_text())
    taking = next(op for op in operators(program) if op["#"] == "1.take_along_axis")
    for dim in (-1, 9, 1_000_000):
        taking["A"][0]["AT"]["D"] = dim
        path.write_text(json.dumps(program))
        with pytest.raises(UserError, match=rf"has the attribute axis of no dim: \[{dim}\]"):
            read_program(path, compiled=False)


def hide(program: dict[str, Any]) -> None:
    """Puts an operator into a block of another operator's."""
    inner = {"#": "region_0", "blocks": [{"#": "block_0", "args": [], "ops": [{"#": "1.save"}]}]}
    operators(program)[-1]["regions"] = [inner]


def name_a_file(program: dict[str, Any]) -> None:
    """Gives the last operator a text that no operator of an export has."""
    text = {"AT": {"#": "0.a_str", "D": "/tmp/x"}, "N": "file_path"}
    operators(program)[-1]["A"].append(text)


SPOILT: dict[str, tuple[Any, str]] = {
    "a block within": (hide, "holds operators of its own"),
    "a second region": (lambda p: p["program"]["regions"].append({}), "has other regions"),
    "a version": (lambda p: p["base_code"].update(version=99), "is of another version"),
    "a value from nowhere": (lambda p: operators(p)[-1]["I"][0].update({"%": 77_777}), "77777"),
    "a value from below": (lambda p: operators(p)[-1]["I"][0].update({"%": -1}), "-1"),
    "a file's name": (name_a_file, "another attribute 'file_path'"),
    "an attribute": (lambda p: operators(p)[-1]["A"].pop(), "another attribute 'col'"),
    "a kind": (lambda p: operators(p)[-1]["A"][1]["AT"].update({"#": "0.a_pointer"}), "'col'"),
    "a shape": (lambda p: operators(p)[0]["O"]["TT"]["D"].__setitem__(1, [-7]), "another kind"),
    "elements": (
        lambda p: operators(p)[0]["O"]["TT"]["D"].__setitem__(0, {"#": []}), "another kind"),
    "an axis below the first": (
        lambda p: next(op for op in operators(p) if op["#"] == "1.slice")["A"][0]["AT"].update(
            D=[{"#": "0.a_i64", "D": -2}]), "axes of no dim"),
    "parts below one": (
        lambda p: next(op for op in operators(p) if op["#"] == "1.split_with_num")["A"][0][
            "AT"].update(D=-1), "num of no number of parts"),
    "no operators": (lambda p: operators(p) and p["program"]["regions"][0]["blocks"][0].update(
        ops=[]), "returns nothing"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_program_is_refused_by_what_is_wrong_with_it(plain: Path, what: str) -> None:
    path = plain / "model.json"
    program = json.loads(path.read_text())
    spoil, words = SPOILT[what]
    spoil(program)
    path.write_text(json.dumps(program))
    with pytest.raises(UserError, match=words):
        read_program(path, compiled=False)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


@pytest.fixture(scope="module")
def kinds(exports: dict[bool, Path]) -> dict[bool, tuple[str, list[tuple[Any, ...]]]]:
    """Each export's program, with one operator of each kind, and the places of its values."""
    made = {}
    for compiled, folder in exports.items():
        program = json.loads((folder / "model.json").read_text())
        block = program["program"]["regions"][0]["blocks"][0]
        block["ops"] = [*{op["#"]: op for op in operators(program)}.values()]
        made[compiled] = (json.dumps(program), list(places(program))[1:])
    return made


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_only_our_errors_leave_the_reader_of_programs(
    data: st.DataObject, kinds: dict[bool, tuple[str, list[tuple[Any, ...]]]], tmp_path: Path
) -> None:
    compiled = data.draw(st.sampled_from(list(kinds)))
    text, all_places = kinds[compiled]
    program = at = json.loads(text)
    where = data.draw(st.sampled_from(all_places))
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = data.draw(ANYTHING)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(program))
    with contextlib.suppress(UserError):
        read_program(path, compiled)


def test_parameter_file_is_checked_to_its_last_byte(
    plain: Path, parameters: dict[str, TensorType]
) -> None:
    path = plain / "model.pdiparams"
    whole = path.read_bytes()
    check_parameters(path, parameters)
    for data, words in (
        (whole[:-1], "is cut short"),
        (whole[: len(whole) // 2], "is cut short"),
        (whole[:10], "no header of a tensor at byte 0"),
        (b"", "no header of a tensor at byte 0"),
        (whole + b"\0", "its tensors end at byte"),
        (b"\1" + whole[1:], "no header of a tensor at byte 0"),
        (whole[:4] + b"\xff" * 8 + whole[12:], "no header of a tensor at byte 0"),  # LoD levels
        (whole[:16] + b"\xff\xff\xff\x7f" + whole[20:], "no header of a tensor at byte 0"),
        (whole[:21] + b"\x06" + whole[22:], "where embedding_table .* is to be"),  # float64
        (whole[:23] + b"\xff\xff\xff\x7f" + whole[27:], "no header of a tensor at byte 0"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=words):
            check_parameters(path, parameters)
