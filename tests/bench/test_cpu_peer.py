"""llama.cpp beside ours: the same network on both sides, turns, and the tables made of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from predict.bench import compare
from predict.bench.cases import Case
from predict.bench.cpu_peer import __main__ as cpu_peer
from predict.bench.cpu_peer import others
from predict.bench.cpu_peer.gguf_file import architecture, write_gguf
from predict.bench.cpu_peer.kinds import Kind
from predict.bench.cpu_peer.shapes import (
    check_peer_has,
    experts_of,
    folder_of,
    known_shapes,
    num_parameters,
    sizes_of,
)
from predict.bench.cpu_peer.sides import Program, started
from predict.bench.cpu_peer.turns import (
    OURS,
    PEER,
    Beside,
    experts_line,
    side_rows,
    table,
    take_turns,
    turn_line,
)
from predict.bench.peers import Peer, Work, read_peers
from predict.device import library
from predict.errors import UserError
from predict.loading.model import read_spec
from predict.nn.blocks import Norm
from predict.nn.spec import DecoderSpec, RopeSpec
from tests.support.records import llama_spec

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
SPEC = llama_spec(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=4096,
    norm_eps=1e-5,
)


def with_changes(changed: dict[str, Any]) -> DecoderSpec:
    """SPEC with other fields, of the spec or of its attention."""
    attention, mlp = SPEC.layers[0]
    names = {field.name for field in dataclasses.fields(attention)}
    layer = dataclasses.replace(attention, **{k: v for k, v in changed.items() if k in names}), mlp
    rest = {key: value for key, value in changed.items() if key not in names}
    return dataclasses.replace(SPEC, layers=(layer,) * SPEC.num_layers, **rest)


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, **FAMILIES[request.param]}))
    return folder


def test_types_stand_beside_types_of_as_many_bits() -> None:
    int4 = Kind.parse("weight_only_int4_g64", "bfloat16", "weight_only_int8")
    assert (int4.gguf_type, int4.gguf_head_type, int4.gguf_cache_type) == ("Q4_0", "Q8_0", "F16")
    assert int4.settings == {
        "dtype": "bfloat16",
        "quant_type": "weight_only_int4",
        "lm_head_quant_type": "weight_only_int8",
        "weightonly_group_size": 64,
    }
    int8 = Kind.parse("wint8", "bfloat16", None)
    assert (int8.gguf_type, int8.gguf_head_type) == ("Q8_0", "BF16")
    none = Kind.parse("none", "float32", "weight_only_int8")  # the head's type is of quantized ones
    assert (none.gguf_type, none.gguf_head_type, none.gguf_cache_type) == ("F32", "F32", "F32")
    assert none.settings == {"dtype": "float32", "quant_type": None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a8w8_fp8", "none, weight_only_int8, a8w8, weight_only_int4"),
        ("weight_only_int4_g48", "allowed behind _g: 32, 64, 128"),
        ("int5", "not known|not supported"),
    ],
)
def test_types_that_the_peer_has_nothing_alike_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Kind.parse(name, "bfloat16", None)


@pytest.mark.parametrize(
    ("shape", "num_weights"),
    [
        ("experts-64-top-6", 1_003_776_512),
        ("experts-8-top-2", 999_427_072),
        ("gemma-3-1b", 999_885_952),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
    ],
)
def test_shapes_have_as_many_weights_as_they_should(shape: str, num_weights: int) -> None:
    assert shape in known_shapes()
    spec, _ = read_spec(folder_of(shape))
    check_peer_has(spec, shape)
    assert num_parameters(spec) == num_weights


def test_a_shape_is_a_name_or_a_folder(tiny: Path) -> None:
    assert folder_of(str(tiny)) == tiny
    with pytest.raises(UserError, match="qwen3-30b-a3b, a folder with a config"):
        folder_of("qwen-9t")


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "tie_word_embeddings": True}, "qwen2"),
        ({"qk_norm": Norm()}, "qwen3"),
        ({"ropes": (RopeSpec(method="llama3", factor=8.0, original_max_position=1024),)}, "llama"),
    ],
    ids=str,
)
def test_the_peers_file_has_the_networks_weights(
    changed: dict[str, Any], name: str, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -e '.[bench]'")
    spec = with_changes(changed)
    assert architecture(spec) == name
    path = tmp_path / "x.gguf"
    write_gguf(path, spec, "Q4_0", "Q8_0", "BF16")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    frequencies = found.pop("rope_freqs.weight", None)
    assert (frequencies is not None) == (spec.ropes[0].method == "llama3")
    assert sum(int(tensor.n_elements) for tensor in found.values()) == num_parameters(spec)
    assert found["blk.1.ffn_down.weight"].shape.tolist() == [256, 128]
    assert found["blk.1.ffn_down.weight"].tensor_type.name == "Q4_0"
    head = "token_embd.weight" if spec.tie_word_embeddings else "output.weight"
    assert found[head].tensor_type.name == "Q8_0"
    values = gguf.quants.dequantize(
        found["blk.0.attn_q.weight"].data, gguf.GGMLQuantizationType.Q4_0
    )
    assert 0.01 < values.std() < 0.03


def test_the_peers_file_says_which_layers_of_a_gemma_have_windows(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -e '.[bench]'")
    spec, _ = read_spec(folder_of("gemma-3-1b"))
    spec = dataclasses.replace(spec, vocab_size=512, layers=spec.layers[:7])
    assert architecture(spec) == "gemma3"
    path = tmp_path / "x.gguf"
    write_gguf(path, spec, "Q4_0", "Q8_0", "BF16")
    reader = gguf.GGUFReader(path)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == num_parameters(spec)
    found = {
        name: reader.get_field(f"gemma3.{name}").contents()
        for name in (
            *("attention.sliding_window", "attention.sliding_window_pattern"),
            *("rope.freq_base", "rope.freq_base_swa"),
        )
    }
    assert list(found.values()) == [512, [True] * 5 + [False, True], 1e6, 1e4]


@pytest.mark.parametrize("tiny", ["mixtral", "qwen3_moe"], indirect=True)
def test_the_peers_file_has_the_experts(tiny: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -e '.[bench]'")
    spec, _ = read_spec(tiny)
    experts = experts_of(spec)
    assert experts is not None
    check_peer_has(spec, "tiny")
    path = tmp_path / "x.gguf"
    write_gguf(path, spec, "Q4_0", "Q8_0", "BF16")
    reader = gguf.GGUFReader(path)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == num_parameters(spec)
    # Our own reader finds the same network in it.
    again, _ = read_spec(path)
    assert again.layers == spec.layers
    name = architecture(spec)
    found = reader.get_field(f"{name}.expert_used_count").contents()
    assert found == experts.router.top_k


@pytest.mark.parametrize("tiny", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize("changed", [{"norm_topk_prob": False}, {"mlp_only_layers": [1]}], ids=str)
def test_experts_that_the_peer_would_compute_otherwise_are_refused(
    tiny: Path, changed: dict[str, Any]
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(UserError, match="is not measured beside"):
        check_peer_has(read_spec(tiny)[0], "tiny")


@pytest.mark.parametrize(
    "changed",
    [
        {"out_bias": True},
        {"window": 8},
        {"softcap": 30.0},
        {"softmax_scale": 0.5},
        {"hidden_size": 144},
        {"ropes": (RopeSpec(method="linear", factor=8.0),)},
        {"model_type": "gemma2"},
    ],
    ids=str,
)
def test_networks_without_a_layout_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not measured beside"):
        check_peer_has(with_changes(changed), "x")


class Sides:
    """Both sides on a clock of their own; ours is twice as fast, and the machine gets slower."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ours(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if "limits_of" in question:
            return {"read_bytes_per_s": 40e9}
        self.asked.append(OURS)
        return self.values(question, 1.0)

    def peer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(PEER)
        return self.values(question, 2.0)

    def values(self, question: Mapping[str, Any], ms: float) -> dict[str, Any]:
        slowed = ms * 2.0 ** question["turn"]
        rate = 1000.0 / slowed
        decodes = not question["case"].endswith("x1")
        return {
            "ttft_ms": 10 * slowed,
            "tpot_ms": slowed if decodes else None,
            "input_tokens_per_s": rate,
            "output_tokens_per_s": rate,
        }


def measured(
    num_turns: int, kind: str = "none", shape: str = "qwen2.5-0.5b"
) -> tuple[list[Beside], Sides]:
    sides = Sides()
    cases = [
        Beside(shape, Kind.parse(kind, "bfloat16", "weight_only_int8"), case, sizes_of(SPEC))
        for case in (Case(1, 128, 65), Case(8, 128, 65), Case(1, 512, 1))
    ]
    loaded = {"decode_weight_bytes": 1000, "cache_bytes_per_token": 8}
    take_turns(cases, sides.ours, sides.peer, num_turns, loaded, lambda beside, turn: None)
    return cases, sides


def test_the_side_that_begins_changes_every_turn() -> None:
    _, sides = measured(2)
    assert sides.asked == [OURS, PEER] * 3 + [PEER, OURS] * 3


def test_the_ratio_is_that_of_turns_on_a_machine_that_slows_down() -> None:
    cases, _ = measured(7)
    for metric in cases[0].metrics():
        ratio = cases[0].times_as_good(metric, 0.95)
        assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    head, first, *rest = table(cases, 0.95).splitlines()
    assert len(rest) == 3 + 3 + 2 - 1
    assert len(head) == len(first)
    assert "2.00 to 2.00" in first
    assert turn_line(cases[2], 6, 7) == (
        "turn 7 of 7  qwen2.5-0.5b, none, 1x512x1: TTFT 640.00 / 1,280.00 ms, 2.00; "
        "out 15.6 / 7.8 tokens/s, 2.00"
    )
    assert cases[0].times_as_good("tpot_ms", 0.999).low is None


def test_experts_are_said_of_both_sides_and_written() -> None:
    cases, _ = measured(2)
    counts = {"prompt_experts": 7.96, "decode_experts": 2.0}
    cases[0].experts = {OURS: counts, PEER: {**counts, "decode_experts": 2.25}}
    assert experts_line(cases[0]).endswith("ours / llama.cpp: prompt 8.0 / 8.0, decode 2.0 / 2.2")
    first, second, _ = side_rows(cases, PEER)
    assert first["values"]["decode_experts"] == 2.25
    assert "decode_experts" not in second["values"]


def test_what_others_take_of_the_processors_is_neither_ours_nor_idle() -> None:
    ticks = others.TICKS_PER_S
    assert others.busy_seconds(f"cpu {ticks} 0 {ticks} 900 900 0 0 {ticks} 5 5\ncpu0 1") == 3.0
    fields = ["S", *"0" * 10, str(ticks), str(2 * ticks), "0"]
    assert others.process_seconds(f"1 (a) b) {' '.join(fields)}") == 3.0


def test_a_process_that_is_measured_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0))
    busy, own = iter((10.0, 13.0)), iter((4.0, 6.0))
    monkeypatch.setattr(others, "busy_seconds", lambda text: next(busy))
    monkeypatch.setattr(others, "process_seconds", lambda text: next(own))
    assert others.Others((), lambda: next(clock)).taken() == pytest.approx(0.5)


def test_without_a_system_that_tells_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "STAT", Path("/nowhere"))
    assert others.Others(()).taken() is None


def test_a_busy_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases, _ = measured(2)
    monkeypatch.setattr(cpu_peer, "check_packages", lambda: None)
    monkeypatch.setattr(cpu_peer, "run", lambda plan, scratch: (cases, {}))
    assert cpu_peer.main([]) == 0
    assert "say nothing" not in capsys.readouterr().err
    cases[1].others[PEER] = [0.0, 1.25]
    assert cpu_peer.main([]) == 0
    assert "took up to 1.2 processors beside a turn" in capsys.readouterr().err


def test_a_difference_of_times_that_is_noise_has_no_ratio() -> None:
    cases, _ = measured(2)
    cases[0].samples[PEER]["tpot_ms"][0] = -0.1
    assert list(cases[0].metrics()) == ["ttft_ms", "output_tokens_per_s"]
    assert cases[0].lacks_ratio
    assert not cases[1].lacks_ratio
    assert not cases[2].lacks_ratio


def results_of(cases: list[Beside]) -> dict[str, Any]:
    flags, _ = cpu_peer.parse([])
    device = {"name": "AMD EPYC", "family": 25, "model": 17, "num_threads": 2, "features": []}
    said = {
        OURS: {"device": device, "versions": {"regatta": "0.1.0"}},
        PEER: {"version": "1.2", "features": "AVX512 = 1"},
    }
    return cpu_peer.results(cases, said, flags, "the command")


def tables_script() -> ModuleType:
    found = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks/make_tables.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_tables_compare_and_peers_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "turns.json"
    cases, _ = measured(7)
    cases += measured(7, "weight_only_int4_g32")[0]
    made = results_of(cases)
    path.write_text(json.dumps(made))
    assert made["versions"][PEER] == "1.2"

    plain, by_kind = tables_script().tables_of_turns(path)
    assert plain.splitlines()[2] == (
        "| Qwen2.5-0.5B shape, decode, batch 1 | 125.0 (40 GB/s) | 62.5 (40 GB/s) "
        "| 2.00 (2.00 to 2.00) |"
    )
    assert plain.splitlines()[-1].startswith(
        "| Qwen2.5-0.5B shape, prompt of 512 | 6,400 | 3,200 |"
    )
    assert by_kind.splitlines()[0] == "| tokens/s, ours / llama.cpp (ratio) | int4 g32 |"
    assert "decode, batch 8 | 1,000 / 500.0 (2.00) |" in by_kind

    recorded = compare.read_recorded(path)
    changes = compare.compare(recorded, recorded, 0.95, 0.02)
    assert {change.verdict for change in changes} == {"same"}
    assert {change.case.partition(":")[0] for change in changes} == {OURS, PEER, "ratios"}

    work = Work(made["device"], SPEC, "bfloat16", "none", "dense")
    assert read_peers(path, work) == {
        "1x128x65": Peer(PEER, "tpot_ms", 16.0),
        "8x128x65": Peer(PEER, "tpot_ms", 16.0),
        "1x512x1": Peer(PEER, "ttft_ms", 160.0),
    }


OURS_ALONE = Program("ours", ("-m", "predict.bench.cpu_peer.ours"))


def test_a_side_that_ends_says_why() -> None:
    program = Program("the side", ("-m", "predict.bench.nowhere"))
    with (
        started(program, num_threads=1) as (side,),
        pytest.raises(UserError, match=r"the side ended: .*No module named"),
    ):
        side.ask({"case": "1x2x3"})


def test_sides_end_with_the_block() -> None:
    with started(OURS_ALONE, num_threads=1) as (side,):
        assert side.is_running
    assert not side.is_running


def test_a_missing_package_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(cpu_peer, "run", lambda *words: pytest.fail("was measured"))
    assert cpu_peer.main([]) == 2
    assert "has no gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "0"], "allowed: 1 to 100"),
        (["--num_threads", "101"], "allowed: 1 to 100"),
        (["--shapes", "llama-1b,llama-1b"], "--shapes has one twice"),
        (["--quant_types", ""], "--quant_types is empty"),
        (["--cases", "1x2"], "REQUESTSxINPUTxOUTPUT"),
        (["--output_file", "nowhere/x.json"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cpu_peer.parse(words)


@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_ours_is_timed_in_a_process_of_its_own(compiled: library.Library, tiny: Path) -> None:
    _, plan = cpu_peer.parse(["--cases", "2x16x3,1x16x1"])
    kind = Kind.parse("weight_only_int4_g32", "bfloat16", "weight_only_int8")
    with started(OURS_ALONE, num_threads=1) as (side,):
        loaded = side.ask({"settings": plan.settings(tiny, kind), "num_threads": 1})
        assert loaded["num_parameters"] == num_parameters(read_spec(tiny)[0])
        assert loaded["device"]["num_threads"] == 1
        assert side.ask({"limits_of": 1 << 20})["read_bytes_per_s"] > 0
        values = side.ask({"case": "2x16x3", "turn": 0})
        assert all(values[name] > 0 for name in ("ttft_ms", "output_tokens_per_s"))
        assert (
            values["tpot_ms"] is not None
        )  # a difference of two times: anything on a busy machine
        assert side.ask({"case": "1x16x1", "turn": 0})["tpot_ms"] is None


@pytest.mark.slow
def test_both_sides_take_turns(
    compiled: library.Library, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install -e '.[bench]'")
    path = tmp_path / "turns.json"
    words = ["--shapes", str(tiny), "--cases", "2x16x5,1x40x1", "--turns", "2"]
    words += ["--quant_types", "none,weight_only_int8,weight_only_int4_g32"]
    assert cpu_peer.main([*words, "--output_file", str(path)]) == 0
    assert "llama.cpp" in capsys.readouterr().out
    made = json.loads(path.read_text())
    for suite in (OURS, PEER, "ratios"):
        assert len(made["suites"][suite]["rows"]) == 6
    # Of so small a network a TPOT, a difference of two times, may be nothing.
    prompts = [each for each in tables_script().read_turns(path) if each.work == "prompt of 40"]
    assert [each.kind for each in prompts] == ["none", "int8", "int4 g32"]
