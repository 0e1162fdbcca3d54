"""The server's flags: which it takes, what becomes of them, and which it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict.cli.flags import FLAGS as PREDICTOR
from predict.errors import UserError
from predict.server.config import ServerConfig
from predict.server.flags import FLAGS, parse
from predict.server.from_flags import SAMPLING, server_config
from tests.support import tiny
from tests.support.processes import run_python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


def configured(model: Path, *words: str, **environment: str) -> tuple[ServerConfig, str]:
    """What a command line makes, and its notes."""
    base = ["--model_name_or_path", str(model), "--dtype", "float32", "--device", "cpu"]
    config, notes = server_config(parse([*base, *words]), environment)
    return config, "\n".join(notes)


def test_every_flag_of_the_predictor_is_taken_or_refused_by_name() -> None:
    known = {flag.name: flag for flag in FLAGS}
    assert len(known) == len(FLAGS)
    assert {flag.name for flag in PREDICTOR} <= set(known)
    for name in ("data_file", "output_file", "resume", "benchmark", "num_return_sequences"):
        with pytest.raises(UserError, match=f"--{name} has no place here"):
            parse([f"--{name}=1"])


def test_a_value_of_a_flag_may_be_refused_alone(model: Path) -> None:
    with pytest.raises(UserError, match="--decode_strategy beam_search has no place here"):
        configured(model, "--decode_strategy", "beam_search")
    config, _ = configured(model, "--decode_strategy", "greedy_search")
    assert config.params({}).greedy


def test_what_is_not_given_suits_a_server_and_is_told(model: Path) -> None:
    config, notes = configured(model)
    assert config.engine.scheduling.batch_size == 32
    assert config.engine.cache.attention == "append"
    assert config.engine.model.inference_model is None  # as the weights need it
    assert config.host == "127.0.0.1"
    assert "--batch_size is 32" in notes
    assert "--append_attn is on" in notes
    config, notes = configured(model, "--batch_size", "4", "--inference_model", "false")
    assert config.engine.scheduling.batch_size == 4
    assert config.engine.cache.attention == "reserved"
    assert not config.engine.model.inference_model
    assert notes == ""


def test_sampling_flags_are_for_requests_that_do_not_say_it(model: Path) -> None:
    config, _ = configured(model, "--temperature", "0.5", "--stop", "x", "--max_new_tokens", "7")
    params = config.params({"temperature": 2.0})
    assert (params.temperature, params.max_new_tokens, params.stop) == (2.0, 7, ("x",))
    assert config.params({}).temperature == 0.5
    assert config.engine.scheduling.max_length == 2048  # an answer's length is none of an engine
    assert set(SAMPLING) <= {flag.name for flag in FLAGS}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}),
        (("--top_k", "5"), {"temperature": 0.6, "top_k": 5, "max_new_tokens": 9}),
        (("--generation_config", "none"), {}),
        (("--decode_strategy", "greedy_search"), {"temperature": 0.0, "max_new_tokens": 9}),
    ],
)
def test_generation_config_is_below_what_flags_say(
    tmp_path: Path, words: tuple[str, ...], expected: dict[str, Any]
) -> None:
    model = tiny.write(tmp_path / "model")
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 9}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    config, _ = configured(model, *words)
    assert config.sampling_defaults == expected


def test_a_broken_generation_config_is_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    (model / "generation_config.json").write_text('{"top_p": 7}')
    config, notes = configured(model)
    assert config.sampling_defaults == {}
    assert "top_p" in notes
    with pytest.raises(UserError, match="top_p"):
        configured(model, "--generation_config", "auto")


def test_a_json_file_of_flags_stands_first_and_others_change_it(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "server.json"
    settings = {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "device": "cpu",
        "port": 9,
        "batch_size": 2,
        "stop": ["a,b", "c"],
        "logit_bias": {"3": 1.5},
        "append_attn": True,
        "api_key": None,
    }
    file.write_text(json.dumps(settings))
    config, _ = server_config(parse([str(file), "--port", "10"]), {})
    assert (config.port, config.engine.scheduling.batch_size) == (10, 2)
    params = config.params({})
    assert params.stop == ("a,b", "c")
    assert params.logit_bias == {3: 1.5}
    file.write_text('{"prot": 3}')
    with pytest.raises(UserError, match="did you mean --port"):
        parse([str(file)])
    file.write_text('{"port": {"a": 1}}')
    with pytest.raises(UserError, match="'port' has an object"):
        parse([str(file)])


def test_keys_come_from_the_flag_or_the_environment_and_stay_hidden(model: Path) -> None:
    assert configured(model)[0].api_keys == ()
    config, _ = configured(model, REGATTA_API_KEY="secret")
    assert config.api_keys == ("secret",)
    assert "secret" not in repr(config)
    config, _ = configured(model, "--api_key", "one,two", REGATTA_API_KEY="secret")
    assert config.api_keys == ("one", "two")
    with pytest.raises(UserError, match="visible ASCII"):
        configured(model, REGATTA_API_KEY="with space")


def test_an_open_server_without_a_key_is_told(model: Path) -> None:
    assert "lets other machines in" in configured(model, "--host", "0.0.0.0")[1]
    assert "lets other" not in configured(model, "--host", "0.0.0.0", "--api_key", "k")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "65536"), "--port: 65536"),
        (("--max_queue", "-1"), "--max_queue"),
        (("--request_timeout", "0"), "--request_timeout"),
        (("--max_schema_bytes", "999999"), "--max_schema_bytes"),
        (("--root_path", "llm"), "--root_path"),
        (("--allowed_origins", "example.org"), "--allowed_origins"),
        (("--tool_call_parser", "nonsense"), "tool_call_parser 'nonsense' is not known"),
        (("--reasoning_parser", "nonsense"), "reasoning_parser 'nonsense' is not known"),
        (("--temperature", "-1"), "temperature"),
        (("--decode_strategy", "greedy_search", "--top_k", "5"), "--top_k cannot change it"),
        (("--max_prompt_tokns", "5"), "did you mean --max_prompt_tokens"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    model: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        configured(model, *words)


def test_the_longest_prompt_is_the_tightest_limit(model: Path) -> None:
    for words, expected in (
        ((), 2047),
        (("--src_length", "100"), 100),
        (("--max_prompt_tokens", "50", "--src_length", "100"), 50),
        (("--max_prompt_tokens", "5000", "--max_length", "128"), 127),
    ):
        assert configured(model, *words)[0].max_prompt_length == expected


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from predict.server.__main__ import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    heavy = {'paddle', 'numpy', 'fastapi', 'pydantic', 'uvicorn', 'msgspec'}\n"
        "    print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    process = run_python("-c", code)
    assert (process.returncode, process.stderr.strip()) == (0, "[]")
    for flag in ("--model_name_or_path", "--max_queue", "--append_attn"):
        assert flag in process.stdout
    assert "--data_file" not in process.stdout
