"""Flags and the configs they become."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import predict
from predict.cli.flags import FLAGS, Flag, parse_flags, with_file
from predict.cli.run_config import RULES, PredictorConfig
from predict.config.engine import TOPIC_OF, TOPICS, EngineConfig
from predict.device import devices
from predict.errors import UserError
from predict.loading.generation_config import read_recommended
from predict.request import SamplingParams
from predict.system.options import flags_of
from tests.support.manifests import MANIFEST
from tests.support.processes import run_python


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


def config_of(model: Path, *argv: str, dtype: str | None = "float32") -> PredictorConfig:
    words = ["--model_name_or_path", str(model), *argv]
    if dtype is not None:
        words += ["--dtype", dtype]
    return PredictorConfig.from_flags(parse_flags(words))


def test_booleans_take_no_value_or_one() -> None:
    for words in ("--benchmark", "--benchmark true", "--benchmark=1", "--benchmark --resume"):
        assert parse_flags(words.split())["benchmark"] is True
    for words in ("--benchmark false", "--benchmark=0", ""):
        assert parse_flags(words.split())["benchmark"] is False


def test_dashes_equals_signs_and_null_words_are_understood() -> None:
    flags = parse_flags(["--batch-size=3", "--data-file", "a-b.json", "--quant_type", "None"])
    assert flags["batch_size"] == 3
    assert flags["data_file"] == "a-b.json"
    assert flags["quant_type"] is None
    assert flags.given("batch_size", "data_file")
    assert not flags.given("quant_type")
    assert not flags.given("benchmark")
    assert parse_flags(["--chat_template", "none"])["chat_template"] == "none"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batchsize", "3"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["--zzz"], "unknown flag --zzz; predictor.py --help lists the flags"),
        (["--max_model_len", "9"], "unknown flag --max_model_len; did you mean --max_length?"),
        (["--pipeline-parallel-size", "2"], "size; layers are not shared out"),
        (["--tensor_ranks", "2"], "unknown flag --tensor_ranks; predictor.py --help"),
        (["--batch_size", "two"], "--batch_size: 'two' is not an integer"),
        (["--benchmark", "maybe"], "--benchmark: 'maybe' is not true or false"),
        (["--dtype"], "--dtype: expected one argument"),
        (
            ["--dtype", "fp16"],
            r"float32, bfloat16, float16, auto\); did you mean float16?",
        ),
    ],
)
def test_wrong_words_are_refused_with_the_nearest_right_one(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        parse_flags(words)


def test_features_of_later_releases_are_refused_by_name() -> None:
    for words, today in (
        ("--reft_path x", "--lora_path"),
        ("--model_type llama-img2txt", "gemma3 and mistral3"),
    ):
        with pytest.raises(UserError, match=rf"{words}?.* is not available .*{today}"):
            parse_flags(words.split())


def test_asking_for_what_is_the_default_anyway_is_no_request() -> None:
    parse_flags(["--speculate_max_draft_token_num", "1", "--reft", "false"])


def test_adapters_may_stand_behind_one_flag_or_several_in_either_spelling() -> None:
    wanted = ["sql=a/sql", "chat=b=c"]
    for words in (
        ["--lora_modules", *wanted, "--max_loras", "3"],
        ["--lora-modules", wanted[0], "--max-loras=3", f"--lora-modules={wanted[1]}"],
    ):
        flags = parse_flags(words)
        assert (flags["lora_modules"], flags["max_loras"]) == (wanted, 3)
    assert parse_flags([])["lora_modules"] is None


def test_a_file_of_flags_lists_adapters(tmp_path: Path) -> None:
    file = tmp_path / "flags.json"
    file.write_text('{"lora_modules": ["sql=a,b", "chat=c"], "max_loras": 2}')
    flags = parse_flags(with_file([str(file)], FLAGS), FLAGS)
    assert (flags["lora_modules"], flags["max_loras"]) == (["sql=a,b", "chat=c"], 2)


def test_flags_without_effect_are_accepted_with_a_note() -> None:
    notes = parse_flags(["--use_flash_attention", "--output_via_mq", "true"]).notes
    assert len(notes) == 1
    assert notes[0].startswith("--use_flash_attention has no effect here: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max_length", "9", "--total_max_length", "8"], "more than --total_max_length"),
        (["--inference_model", "false", "--block_attn"], "--inference_model false turns off"),
        (["--prefix_caching"], "add --append_attn"),
        (["--avx_type", "bf16"], "does not agree with --dtype float32"),
        (["--avx_cachekv_type", "fp16"], "does not agree with --dtype float32"),
        (["--decode_strategy", "greedy_search", "--top_p", "0.7"], "leave them out"),
        (["--decode_strategy", "beam_search", "--top_p", "0.7"], "neither samples nor"),
        (["--num_beams", "4"], "add --decode_strategy beam_search"),
        (["--early_stopping", "true"], "add --decode_strategy beam_search"),
        (["--decode_strategy", "beam_search", "--benchmark"], "one sequence each"),
        (["--benchmark", "--stop", "x"], "leave --stop out"),
        (
            ["--benchmark", "--num_return_sequences", "2", "--top_k", "0"],
            "leave --num_return_sequences",
        ),
        (["--num_return_sequences", "2"], "n 2 with greedy decoding"),
        (["--best_of", "1", "--n", "2", "--top_k", "0"], "best_of 1 is less than n 2"),
        (["--decode_strategy", "beam_search", "--num_beams", "0"], "num_beams 0"),
        (
            ["--decode_strategy", "beam_search", "--num_return_sequences", "5"],
            "n 5 is more than num_beams 4",
        ),
        (["--top_p", "1.5"], "top_p 1.5"),
        (["--benchmark_file", "x"], "needs --benchmark"),
        (["--export_precache", "true"], "needs --prefix_path"),
        (["--benchmark", "--max_length", "1024"], "no room for output"),
        (["--block_size", "24"], "block_size 24 is not supported"),
        (["--max_length", "10", "--min_length", "20"], "min_length 20"),
        (["--device", "cpuu"], "device 'cpuu'"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_the_model_is_looked_for(
    tmp_path: Path, words: list[str], said: str
) -> None:
    rule_breaks = any(said in rule.message for rule in RULES)
    directory = tmp_path / "no such model" if rule_breaks else tmp_path
    with pytest.raises(UserError, match=said):
        config_of(directory, *words)


def test_model_is_needed() -> None:
    with pytest.raises(UserError, match="--model_name_or_path is needed"):
        PredictorConfig.from_flags(parse_flags(["--dtype", "float32"]))


@pytest.mark.parametrize(
    ("words", "inference_model", "attention"),
    [
        ([], None, "reserved"),
        (["--inference_model", "false"], False, "reserved"),
        (["--inference_model"], True, "reserved"),
        (["--block_attn"], None, "block"),
        (["--append_attn"], None, "append"),
        (["--append_attn", "--block_attn", "--inference_model"], True, "append"),
        (["--avx_model", "--device", "cpu"], None, "reserved"),
        (["--avx_mode", "--avx_type", "fp16"], None, "reserved"),
    ],
)
def test_operators_are_left_open_unless_a_flag_names_them(
    model: Path, words: list[str], inference_model: bool | None, attention: str
) -> None:
    engine = config_of(model, *words, dtype="float16").engine
    assert (engine.model.inference_model, engine.cache.attention) == (inference_model, attention)
    assert engine.cache.reserve_full == (attention == "reserved")
    assert engine.cache.shares_prefixes == (attention != "reserved")


@pytest.mark.parametrize(
    ("words", "greedy", "top_k", "top_p", "temperature"),
    [
        ([], True, 1, 1.0, 1.0),
        (["--decode_strategy", "greedy_search"], True, 0, 1.0, 0.0),
        (["--top_p", "0"], True, 0, 1.0, 0.0),
        (["--temperature", "0", "--top_k", "0"], True, 0, 1.0, 0.0),
        (["--top_k", "0", "--top_p", "0.7"], False, 0, 0.7, 1.0),
        (["--top_k", "5", "--temperature", "0.95"], False, 5, 1.0, 0.95),
    ],
)
def test_sampling_flags_become_sampling_params(
    model: Path, words: list[str], greedy: bool, top_k: int, top_p: float, temperature: float
) -> None:
    params = config_of(model, *words).sampling_params
    assert params.greedy == greedy
    assert (params.top_k, params.top_p, params.temperature) == (top_k, top_p, temperature)


def test_beam_flags_become_sampling_params(model: Path) -> None:
    words = ["--decode_strategy", "beam_search", "--batch_size", "8", "--num_beams", "6"]
    params = config_of(model, *words, "--length_penalty", "0.6").sampling_params
    assert (params.num_beams, params.length_penalty, params.early_stopping) == (6, 0.6, False)
    words += ["--early_stopping", "never", "--num_return_sequences", "2"]
    params = config_of(model, *words).sampling_params
    assert (params.n, params.early_stopping) == (2, "never")
    assert config_of(model).sampling_params.num_beams == 1


@pytest.mark.parametrize(
    ("words", "max_length", "max_new_tokens"),
    [
        (["--max_length", "1024"], 1024, None),
        (["--total_max_length", "4096"], 4096, None),
        (["--total_max_length", "4096", "--max_length", "1024"], 1024, None),
        (["--max_new_tokens", "16", "--src_length", "100"], 116, 16),
        (["--max_new_tokens", "16", "--src_length", "100", "--max_length", "64"], 64, 16),
        (["--max_new_tokens", "16", "--src_length", "100", "--max_length", "400"], 116, 16),
        (["--max_new_tokens", "16", "--total_max_length", "64"], 64, 16),
    ],
)
def test_lengths(model: Path, words: list[str], max_length: int, max_new_tokens: int) -> None:
    config = config_of(model, *words)
    assert config.engine.scheduling.max_length == max_length
    assert config.sampling_params.max_length == max_length
    assert config.sampling_params.max_new_tokens == max_new_tokens


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--top_p", "0.7"], "add --top_k 0 to sample"),
        (["--max_length", "8", "--total_max_length", "9"], "prompt and output together"),
    ],
)
def test_what_may_surprise_is_said(model: Path, words: list[str], note: str) -> None:
    assert any(note in said for said in config_of(model, *words).notes)
    assert config_of(model, "--device", "cpu").notes == ()


@pytest.mark.parametrize(
    ("words", "usable", "present", "device", "note"),
    [
        (["--append_attn"], True, True, "gpu", ""),
        (["--append_attn"], False, False, "cpu", "no NVIDIA GPU here; --device cpu says so"),
        (["--append_attn"], False, True, "cpu", "running on cpu: the driver is too old"),
        (["--append_attn", "--device", "cpu"], True, True, "cpu", ""),
        (["--append_attn", "--device", "gpu:1"], False, True, "gpu:1", ""),
        (["--avx_model"], True, True, "cpu", ""),
        (["--device", "cpu"], True, True, "cpu", ""),
        ([], True, True, "gpu", ""),
        (["--inference_model", "false"], True, True, "cpu", "false runs there, and not on a GPU"),
    ],
)
def test_device_is_a_usable_gpu_unless_told(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    usable: bool,
    present: bool,
    device: str,
    note: str,
) -> None:
    def choose(name: str) -> None:
        if not usable:
            raise UserError("the driver is too old")

    monkeypatch.setattr(devices, "choose", choose)
    monkeypatch.setattr(devices, "is_gpu_present", lambda: present)
    config = config_of(model, *words)
    assert config.engine.model.device == device
    notes = [said for said in config.notes if "--device" in said]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


def test_a_benchmark_does_not_measure_the_prefix_cache_unless_asked(model: Path) -> None:
    words = ("--append_attn", "--benchmark")
    assert not config_of(model, *words).engine.cache.shares_prefixes
    assert config_of(model, *words, "--prefix_caching").engine.cache.shares_prefixes
    assert config_of(model, *words, "--batch_size", "3").num_requests == 3
    assert config_of(model, *words, "--total_request_num", "5").num_requests == 5
    assert config_of(model, *words).max_new_tokens == 1024


def test_hub_names_are_found_in_local_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REGATTA_MODEL_DIR", "HF_HOME", "HF_HUB_CACHE", "PPNLP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-2-7b-chat"

    def found() -> str:
        return config_of(Path(name)).engine.model.model_name_or_path

    with pytest.raises(UserError, match="not downloaded: download the checkpoint yourself"):
        found()
    paddle = tmp_path / ".paddlenlp/models" / name
    paddle.mkdir(parents=True)
    assert found() == str(paddle)
    repository = tmp_path / ".cache/huggingface/hub/models--meta-llama--Llama-2-7b-chat"
    for snapshot in ("aaa", "bbb"):
        (repository / "snapshots" / snapshot).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("aaa\n")
    assert found() == str(repository / "snapshots/aaa")
    monkeypatch.setenv("REGATTA_MODEL_DIR", str(tmp_path / "mine"))
    mine = tmp_path / "mine" / name
    mine.mkdir(parents=True)
    assert found() == str(mine)
    assert any(str(mine) in note for note in config_of(Path(name)).notes)
    (tmp_path / name).mkdir(parents=True)
    assert found() == name


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UserError, match="is a file; pass the directory"):
        config_of(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocksize", "; did you mean block_size?"),
        ("max_model_len", "; did you mean max_length?"),
        ("max_num_seqs", "; did you mean batch_size?"),
        ("n_gpu_layers", "; did you mean device?"),
        ("kv_cache_dtype", "; did you mean cachekv_int8_type?"),
        ("max_tokens", "; it is of SamplingParams, as max_new_tokens, which generate takes"),
        ("temperature", "; it is of SamplingParams, as temperature, which generate takes"),
        ("min_length", "; it is of SamplingParams, as min_length, which generate takes"),
        ("tensor_parallel_size", "; did you mean tensor_parallel_degree?"),
        ("tensor_ranks", " (known: model_name_or_path, dtype"),
    ],
)
def test_a_wrong_setting_is_told_the_right_name(name: str, said: str) -> None:
    values: dict[str, Any] = {"model_name_or_path": "x", name: 16}
    with pytest.raises(UserError, match=re.escape(f"no field {name!r}{said}")):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_tokens", "; did you mean max_new_tokens?"),
        ("repeat_penalty", "; did you mean repetition_penalty?"),
        ("temprature", "; did you mean temperature?"),
        ("batch_size", " (known: max_new_tokens, max_length"),
    ],
)
def test_a_wrong_parameter_is_told_the_right_name(name: str, said: str) -> None:
    values: dict[str, Any] = {name: 16}
    with pytest.raises(UserError, match=re.escape(f"SamplingParams has no field {name!r}{said}")):
        SamplingParams(**values)


def test_engine_config_needs_a_model() -> None:
    with pytest.raises(UserError, match="needs model_name_or_path"):
        EngineConfig(block_size=16)  # type: ignore[call-arg]


def test_settings_of_a_config_make_it_again_and_change_one_by_one() -> None:
    config = EngineConfig(model_name_or_path="x", block_size=16, speculate_method="lookahead")
    assert EngineConfig(**config.settings) == config
    assert hash(EngineConfig(**config.settings)) == hash(config)
    changed = config.changed(block_size=32)
    assert (config.cache.block_size, changed.cache.block_size) == (16, 32)
    assert {**changed.settings, "block_size": 16} == config.settings
    with pytest.raises(UserError, match="block_size 17"):
        config.changed(block_size=17)
    assert "block_size=16" in repr(config)


def test_no_two_topics_of_a_config_have_a_setting_of_the_same_name() -> None:
    names = [field.name for topic in TOPICS.values() for field in fields(topic)]
    assert len(names) == len(set(names)) == len(TOPIC_OF)


@pytest.mark.parametrize(
    ("values", "budget", "blocks"),
    [
        ({}, 512, 32),
        ({"max_num_batched_tokens": 8, "batch_size": 16}, 16, 32),
        ({"chunked_prefill": False, "max_length": 100, "block_size": 16}, 100, 7),
        ({"device": "gpu:1"}, 8192, 32),
    ],
)
def test_derived_sizes(values: dict[str, Any], budget: int, blocks: int) -> None:
    config = EngineConfig(model_name_or_path="x", **values)
    assert (config.token_budget, config.max_blocks_per_seq) == (budget, blocks)


def test_nothing_here_imports_paddle() -> None:
    code = (
        "import sys, predict, predict.config.engine, predict.cli.prompts, predict.cli.data\n"
        "import predict.text.tokenizer\n"
        "import predict.text.chat_template, predict.predictor, predict.bench.padded\n"
        "bad = {'paddle', 'numpy', 'jinja2', 'tokenizers', 'sentencepiece'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr


PAGE_COMMANDS = [
    "--inference_model --dtype float16 --block_attn --device xpu",
    "--dtype float16 --max_length 1024 --mode static --inference_model",
    "--inference_model --dtype float16 --block_attn --quant_type a8w8",
    "--inference_model --export_precache true --prefix_path /p --dtype float16",
]


@pytest.mark.parametrize("command", PAGE_COMMANDS)
def test_commands_pasted_from_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    name = "meta-llama/Llama-2-7b-chat"
    exported(tmp_path / name, dtype="float16")
    monkeypatch.setenv("REGATTA_MODEL_DIR", str(tmp_path))
    words = ["--model_name_or_path", name, *command.split()]
    config = PredictorConfig.from_flags(parse_flags(words))
    assert config.engine.model.inference_model
    assert config.engine.model.dtype == "float16"


def exported(directory: Path, **changes: Any) -> Path:
    """A folder with the manifest of an export, and nothing else."""
    directory.mkdir(parents=True)
    changes = {"dtype": "bfloat16", "block_size": 16, "max_length": 1024, **changes}
    replace(MANIFEST, **changes).save(directory)
    return directory


def test_static_mode_takes_what_was_not_given_from_the_manifest(tmp_path: Path) -> None:
    directory = exported(tmp_path / "export")
    engine = config_of(directory, "--mode", "static", dtype=None).engine
    assert (engine.model.dtype, engine.model.inference_model) == ("bfloat16", True)
    assert (engine.cache.block_size, engine.scheduling.max_length) == (16, 1024)
    words = ("--mode", "static", "--block_size", "64", "--max_length", "2048")
    engine = config_of(directory, *words, dtype="float32").engine
    assert (engine.model.dtype, engine.cache.block_size) == ("float32", 64)
    assert engine.scheduling.max_length == 2048
    with pytest.raises(UserError, match="no room for output below --max_length 1024"):
        config_of(directory, "--mode", "static", "--benchmark", dtype=None)
    plain = exported(tmp_path / "plain", library_abi=None)
    assert not config_of(plain, "--mode", "static", dtype=None).engine.model.inference_model


def test_static_mode_needs_an_export(model: Path) -> None:
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        config_of(model, "--mode", "static", dtype=None)


def test_the_package_gives_its_names_on_demand() -> None:
    assert predict.SamplingParams(temperature=0).greedy
    assert predict.EngineConfig is EngineConfig
    assert "LLM" in dir(predict)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = predict.LLMM  # type: ignore[attr-defined]


def test_batch_size_counts_prompts_where_each_has_beams(model: Path) -> None:
    search = ["--decode_strategy", "beam_search", "--num_beams", "3"]
    assert config_of(model, "--batch_size", "2", *search).engine.scheduling.batch_size == 6
    assert config_of(model, "--batch_size", "2").engine.scheduling.batch_size == 2


@pytest.mark.parametrize(
    ("words", "max_length"),
    [
        (("--max_new_tokens", "8"), 64),
        (("--max_new_tokens", "8", "--src_length", "20"), 28),
        (("--total_max_length", "4096"), 64),
        (("--max_length", "32", "--max_new_tokens", "8"), 32),
        ((), 64),
    ],
)
def test_static_mode_asks_for_no_more_than_was_exported(
    tmp_path: Path, words: tuple[str, ...], max_length: int
) -> None:
    directory = exported(tmp_path / "export", max_length=64)
    engine = config_of(directory, "--mode", "static", *words, dtype=None).engine
    assert engine.scheduling.max_length == max_length


def test_an_output_that_no_exported_sequence_can_hold_is_refused(tmp_path: Path) -> None:
    directory = exported(tmp_path / "export", max_length=64)
    with pytest.raises(UserError, match=r"--max_new_tokens 64 leaves no room .* for 64 tokens"):
        config_of(directory, "--mode", "static", "--max_new_tokens", "64", dtype=None)


def all_flags() -> list[Flag]:
    from predict.bench.kernels import FLAGS as KERNELS
    from predict.bench.throughput import OWN_FLAGS
    from quant.config import FLAGS as QUANTIZE
    from quant.evaluate import FLAGS as EVALUATE

    return [*FLAGS, *QUANTIZE, *EVALUATE, *KERNELS, *OWN_FLAGS]


def test_every_number_of_a_command_line_has_a_range() -> None:
    # SamplingParams has the ranges of some, and the others have a few values each.
    elsewhere = {flag.name for flag in flags_of(SamplingParams)}
    elsewhere |= {"block_size", "weightonly_group_size", "weight_block_size"}
    for flag in all_flags():
        if flag.kind in ("int", "float", "ints") and flag.availability.level == "works":
            assert flag.range is not None or flag.name in elsewhere, flag.name
            assert flag.range is None or flag.default is None or flag.default in flag.range


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.range], ids=lambda f: f.name)
@pytest.mark.parametrize("text", ["nan", "1e400", "-1", "1" + "0" * 30, "9" * 5000, "x", "\udcff"])
def test_a_number_out_of_range_is_refused_by_its_flag(flag: Flag, text: str) -> None:
    with pytest.raises(UserError, match=rf"--{flag.name}\b") as caught:
        parse_flags([f"--{flag.name}", text])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": 0}, "batch_size 0 .*a whole number from 1 to 1048576"),
        ({"batch_size": "8"}, "batch_size '8' .*a whole number"),
        ({"batch_size": True}, "batch_size True"),
        ({"batch_size": 2.0}, "batch_size 2.0"),
        ({"max_length": 10**30}, "max_length 1000.*to 16777216"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization nan"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization '0.5' .*a number"),
        ({"inference_model": "false"}, "inference_model 'false' .*True, False"),
        ({"prefix_caching": 1}, "prefix_caching 1 .*True, False"),
        ({"skip_list_names": "lm_head"}, "skip_list_names 'lm_head' .*a tuple of texts"),
        ({"skip_list_names": (1,), "quant_type": "a8w8"}, "skip_list_names .*a tuple of texts"),
        ({"dtype": None}, "dtype None .*a text"),
        ({"dtype": ["float32"]}, "dtype .*a text"),
        ({"model_name_or_path": ""}, "model_name_or_path is empty"),
        ({"model_name_or_path": 3}, "model_name_or_path 3"),
        ({"model_name_or_path": "a\0b"}, "model_name_or_path .*NUL"),
        ({"chat_template": "x" * 300}, "chat_template .*too long"),
        ({"num_cache_blocks": 2**31}, "num_cache_blocks 2147483648"),
        ({"speculate_max_draft_token_num": 16}, "speculate_max_draft_token_num 16"),
    ],
)
def test_engine_config_refuses_wrong_types_and_ranges(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EngineConfig(**{"model_name_or_path": "x", **values})


def test_engine_config_takes_paths_lists_and_numpys_numbers() -> None:
    import numpy as np

    values: dict[str, Any] = {"batch_size": np.int64(4), "gpu_memory_utilization": np.float32(0.5)}
    config = EngineConfig(
        model_name_or_path=Path("x"), quant_type="a8w8", skip_list_names=["head"], **values
    )
    assert config.model.model_name_or_path == "x"
    assert config.quantization.skip_list_names == ("head",)
    assert type(config.scheduling.batch_size) is int
    assert type(config.cache.gpu_memory_utilization) is float


RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}


def with_recommended(model: Path, **values: Any) -> Path:
    (model / "generation_config.json").write_text(json.dumps(values))
    return model


@pytest.mark.parametrize("words", [(), ("--generation_config", "auto")])
def test_what_no_flag_takes_of_a_recommendation_is_said(
    model: Path, words: tuple[str, ...]
) -> None:
    neutral = {"num_beams": 1, "guidance_scale": 1.0, "min_length": 0, "suppress_tokens": []}
    with_recommended(model, max_length=20, bos_token_id=1, use_cache=True, **neutral)
    assert config_of(model, "--device", "cpu", *words).notes == ()
    with_recommended(model, suppress_tokens=[7], num_beams=4, forced_bos_token_id=5)
    (note,) = config_of(model, "--device", "cpu", *words).notes
    named = "'suppress_tokens', 'num_beams', 'forced_bos_token_id'"
    assert f"generation_config.json has {named}, which would change answers" in note


def test_what_the_model_recommends_is_left_out_with_one_line(model: Path) -> None:
    with_recommended(model, **RECOMMENDED)
    config = config_of(model, "--device", "cpu")
    assert config.sampling_params == config_of(model, "--generation_config", "none").sampling_params
    assert config.sampling_params.greedy
    (note,) = config.notes
    assert "recommends temperature 0.6, top_p 0.9, repetition_penalty 1.05, which" in note
    assert "--generation_config auto" in note
    words = ("--device", "cpu", "--generation_config", "none")
    assert config_of(model, *words).notes == ()
    given = ("--temperature", "1", "--top_p", "1", "--top_k", "0", "--repetition_penalty", "1.2")
    assert config_of(model, "--device", "cpu", *given).notes == ()


@pytest.mark.parametrize(
    ("values", "words", "expected"),
    [
        (RECOMMENDED, (), (0.6, 0, 0.9, 1.05)),
        (RECOMMENDED, ("--temperature", "0.1", "--top_k", "9"), (0.1, 9, 0.9, 1.05)),
        (RECOMMENDED, ("--decode_strategy", "greedy_search"), (0.0, 0, 1.0, 1.05)),
        ({"top_k": 20}, (), (1.0, 20, 1.0, 1.0)),
        ({"do_sample": True}, (), (1.0, 0, 1.0, 1.0)),
        ({"do_sample": False, "temperature": 0.6}, (), (1.0, 1, 1.0, 1.0)),
        ({"decode_strategy": "greedy_search", "top_p": 0.6}, (), (1.0, 1, 1.0, 1.0)),
        ({"temperature": None, "eos_token_id": 2}, (), (1.0, 1, 1.0, 1.0)),
    ],
)
def test_what_the_model_recommends_is_taken_when_asked(
    model: Path, values: dict[str, Any], words: tuple[str, ...], expected: tuple[float, ...]
) -> None:
    with_recommended(model, **values)
    for source in ("auto", str(model), str(model / "generation_config.json")):
        config = config_of(model, "--device", "cpu", "--generation_config", source, *words)
        params = config.sampling_params
        got = (params.temperature, params.top_k, params.top_p, params.repetition_penalty)
        assert got == expected
        assert config.notes == ()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": "hot"}, "generation_config.json: temperature 'hot'"),
        ({"top_k": 0.5}, "generation_config.json: top_k 0.5"),
        ({"top_p": 2}, "generation_config.json: top_p 2"),
        ({"do_sample": "maybe"}, "do_sample 'maybe' .*allowed: true, false"),
        ({"do_sample": [1]}, r"do_sample \[1\]"),
    ],
)
def test_a_wrong_recommendation_is_refused_when_asked_for(
    model: Path, values: dict[str, Any], said: str
) -> None:
    with_recommended(model, **values)
    with pytest.raises(UserError, match=said):
        config_of(model, "--generation_config", "auto")
    assert config_of(model, "--device", "cpu").notes == ()


def test_a_recommendation_that_is_not_there(model: Path, tmp_path: Path) -> None:
    (note,) = config_of(model, "--device", "cpu", "--generation_config", "auto").notes
    assert note == "--generation_config auto: there is no generation_config.json"
    with pytest.raises(UserError, match=r"cannot read .*nothing.json"):
        config_of(model, "--generation_config", str(tmp_path / "nothing.json"))


def test_default_params_are_the_recommended_ones(model: Path) -> None:
    with_recommended(model, **RECOMMENDED, max_new_tokens=99, top_k=20)
    found = read_recommended(model)
    assert found is not None
    assert found.params == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_new_tokens=99
    )
    with_recommended(model, do_sample=False, temperature=0.6)
    found = read_recommended(model)
    assert found is not None
    assert found.params == SamplingParams(temperature=0.0)
