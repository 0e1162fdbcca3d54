import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from predict.engine.request_state import Request
from predict.engine.samples import Samples
from predict.engine.stopping import finish_reason, max_total_tokens, suppressed_token_ids
from predict.errors import UserError
from predict.request import CompletionOutput, RequestMetrics, SamplingParams

EOS = (2,)


def test_defaults_sample_from_the_unchanged_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)
    assert not params.greedy


@pytest.mark.parametrize("values", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}])
def test_zero_temperature_top_k_one_and_top_p_zero_are_greedy(values: dict[str, float]) -> None:
    assert SamplingParams(**values).greedy  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_new_tokens", 0, "an integer of at least 1 and at most 2147483647, or None"),
        ("max_length", -1, "an integer of at least 1 and at most 2147483647, or None"),
        ("min_length", -1, "an integer >= 0"),
        ("temperature", -0.1, "a finite number from 1e-30 to 1e+30"),
        ("temperature", math.nan, "0, which is greedy"),
        ("top_k", -2, "0 turns it off"),
        ("top_p", 1e-40, "0, which is greedy, or a number from 1e-30 to 1"),
        ("typical_p", 0, "above 0 and up to 1"),
        ("min_p", 1, "0 to below 1"),
        ("no_repeat_ngram_size", -1, "0 turns it off"),
        ("repetition_penalty", 0, "above 0"),
        ("seed", -(2**63) - 1, "-2**63 to 2**63 - 1"),
        ("ignore_eos", 1, "True, False"),
        ("stop_token_ids", "2", "a sequence of token ids >= 0"),
        ("stop_token_ids", (3, -1), "a sequence of token ids >= 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert allowed in str(caught.value)
    shown = value[1] if isinstance(value, tuple) else value
    assert repr(shown) in str(caught.value) or str(shown) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "got", "allowed"),
    [
        ({"logit_bias": [1]}, "[1]", "a mapping from token ids"),
        ({"logit_bias": {-1: 2.0}}, "-1", "a mapping from token ids"),
        ({"logit_bias": {"one": 2.0}}, "'one'", "a mapping from token ids"),
        ({"logit_bias": {3: math.inf}}, "inf", "numbers from -1e+30 to 1e+30"),
        ({"logit_bias": {3: 1e31}}, "1e+31", "a token that must never come goes into bad_words"),
        ({"logit_bias": {3: "much"}}, "'much'", "a mapping from token ids"),
        ({"bad_words": "word"}, "'word'", "a sequence of words"),
        ({"bad_words": [[]]}, "[]", "none empty"),
        ({"bad_words": ["a", " "]}, "' '", "none empty"),
        ({"bad_words": [3]}, "3", "a sequence of words"),
        ({"bad_words": [[3, -4]]}, "-4", "a sequence of words"),
    ],
    ids=str,
)
def test_wrong_biases_and_words_are_refused_with_what_is_allowed(
    values: dict[str, Any], got: str, allowed: str
) -> None:
    with pytest.raises(UserError, match=r"logit_bias|bad_words") as caught:
        SamplingParams(**values)
    assert got in str(caught.value)
    assert allowed in str(caught.value)


def test_biases_and_words_become_plain_numbers() -> None:
    values: dict[str, Any] = {"logit_bias": {"5": np.float32(2), 6: 1}}
    values["bad_words"] = ["a b", np.array([3, 4])]
    params = SamplingParams(**values)
    assert params.logit_bias == {5: 2.0, 6: 1.0}
    assert params.bad_words == ("a b", (3, 4))
    assert json.dumps(params.logit_bias)
    assert hash(params) == hash(SamplingParams(bad_words=["a b", [3, 4]]))


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
def test_a_min_length_above_the_limit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"min_length 9 is more than {name} 8"):
        SamplingParams(min_length=9, **{name: 8})  # type: ignore[arg-type]


def test_numpy_scalars_become_python_numbers() -> None:
    values: dict[str, Any] = {
        "max_new_tokens": np.int64(5),
        "temperature": np.float32(0.5),
        "stop_token_ids": [np.int32(3)],
    }
    params = SamplingParams(**values)
    assert type(params.max_new_tokens) is int
    assert params.stop_token_ids == (3,)
    assert json.dumps([params.max_new_tokens, params.temperature, params.stop_token_ids])


def test_a_new_request_has_its_prompt_and_no_output() -> None:
    prompt = [4, 5, 6]
    request = Request(7, prompt, SamplingParams())
    request.token_ids.append(9)
    assert request.prompt_token_ids == prompt == [4, 5, 6]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 1, 4)
    assert request.output_token_ids == [9]
    assert "prompt=3, output=1" in repr(request)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "no tokens"), ([1, -3], "token id -3"), ([1, 2**31], "token id 2147483648")],
)
def test_a_prompt_that_cannot_be_embedded_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(0, prompt, SamplingParams())


def test_metrics_derive_latencies_from_token_times() -> None:
    metrics = RequestMetrics(
        arrival_time=10.0, first_scheduled_time=10.5, token_times=(11.0, 11.2, 11.8), finish_time=12
    )
    assert metrics.first_token_time == 11.0
    assert metrics.time_to_first_token == 1.0
    assert metrics.time_per_output_token == pytest.approx(0.4)
    assert metrics.inter_token_latencies == pytest.approx((0.2, 0.6))


def test_metrics_without_tokens_are_none() -> None:
    metrics = Request(0, [1], SamplingParams(), arrival_time=3.0).metrics
    assert metrics.arrival_time == 3.0
    assert metrics.first_token_time is None
    assert metrics.time_to_first_token is None
    assert metrics.time_per_output_token is None
    assert metrics.inter_token_latencies == ()


def test_an_output_is_a_snapshot() -> None:
    ids = iter([3])
    samples = Samples([1, 2], SamplingParams(), lambda: next(ids), None, None)
    (request,) = samples.requests
    request.token_ids += [8, 9]
    request.token_times += [1.0, 2.0]
    output = samples.output()
    request.token_ids.append(10)
    request.token_times.append(3.0)
    assert output.prompt_token_ids == (1, 2)
    assert output.token_ids == (8, 9)
    assert output.metrics.token_times == (1.0, 2.0)
    assert (output.request_id, output.text, output.finish_reason) == (3, "", None)
    assert output.outputs == (CompletionOutput(0, "", (8, 9), None),)


@pytest.mark.parametrize(
    ("max_new_tokens", "max_length", "expected"),
    [(None, None, 100), (5, None, 15), (None, 20, 20), (5, 20, 15), (50, 20, 20), (500, 500, 100)],
)
def test_the_tightest_limit_wins(
    max_new_tokens: int | None, max_length: int | None, expected: int
) -> None:
    params = SamplingParams(max_new_tokens=max_new_tokens, max_length=max_length)
    assert max_total_tokens(10, params, max_length=100) == expected


@pytest.mark.parametrize(
    ("max_length", "message"),
    [(None, "10 tokens, the engine's max_length is 10"), (9, "10 tokens, max_length is 9")],
)
def test_a_prompt_without_room_for_output_is_refused(max_length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        max_total_tokens(10, SamplingParams(max_length=max_length), max_length=10)


def reason(token_id: int, num_output: int, params: SamplingParams, limit: int = 99) -> str | None:
    return finish_reason(token_id, num_output, 10 + num_output, limit, params, EOS)


def test_eos_and_stop_tokens_stop() -> None:
    params = SamplingParams(stop_token_ids=(7,))
    assert reason(2, 1, params) == "stop"
    assert reason(7, 1, params) == "stop"
    assert reason(3, 1, params) is None


def test_ignore_eos_keeps_stop_tokens() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    assert reason(2, 1, params) is None
    assert reason(7, 1, params) == "stop"


def test_the_length_limit_ends_as_length_unless_the_token_stops() -> None:
    assert reason(3, 5, SamplingParams(), limit=15) == "length"
    assert reason(2, 5, SamplingParams(), limit=15) == "stop"


def test_no_stop_before_min_length_tokens() -> None:
    params = SamplingParams(min_length=3, stop_token_ids=(7,))
    for num_output in range(1, 4):
        # num_output - 1 tokens came before this one.
        allowed = num_output - 1 >= params.min_length
        assert (reason(2, num_output, params) == "stop") == allowed
        assert (suppressed_token_ids(num_output - 1, params, EOS) == ()) == allowed
    assert reason(2, 4, params) == "stop"
    assert suppressed_token_ids(0, params, EOS) == (2, 7)
    assert suppressed_token_ids(3, params, EOS) == ()


def test_ignored_eos_is_not_suppressed() -> None:
    params = SamplingParams(min_length=3, ignore_eos=True, stop_token_ids=(7,))
    assert suppressed_token_ids(0, params, EOS) == (7,)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, 0.0, 1e-30, 1e30, np.float64(0.7), np.float16(2)]),
        ("top_k", [0, 2**31 - 1, np.int64(7)]),
        ("top_p", [1e-30, 1, np.float32(0.5)]),
        ("min_p", [0, 0.9999999]),
        ("repetition_penalty", [1e-6, 1e6]),
        ("frequency_penalty", [-1e30, 1e30]),
        ("length_penalty", [-10, 10.0]),
        ("min_length", [2**31 - 1]),
        ("no_repeat_ngram_size", [2**31 - 1]),
        ("seed", [2**63 - 1]),
    ],
)
def test_values_at_the_limits_are_taken(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [1e300, 1e-45, 1e-31, 10**400, True, "1", Fraction(1, 2), Decimal("0.5")]),
        ("top_k", [2**31, 2**63, 10**5000, 1.0, False, np.float64(2)]),
        ("top_p", [1e-50, True, 1.01, math.inf]),
        ("typical_p", [1e-50, 1.5]),
        ("min_p", [1 - 1e-12]),
        ("repetition_penalty", [1e-7, 1e7, -1, math.inf]),
        ("presence_penalty", [1e31, math.nan]),
        ("frequency_penalty", [-1e31]),
        ("length_penalty", [300, math.inf]),
        ("max_new_tokens", [2**31, 1.5, -(10**5000)]),
        ("max_length", [2**31, True]),
        ("seed", [2**63]),
        ("min_length", [2**31]),
        ("no_repeat_ngram_size", [2**31, 1.5]),
        ("num_beams", [0, 2**31, 2.0]),
        ("stop_token_ids", [2, [2**31], [True], [1.0], ["5"], {3: 1}, range(10**9), [10**5000]]),
        ("stop", [[["a"]], {"a": 1}, ["x"] * 257, "x" * 16385, [None]]),
        ("bad_words", [[[2**31]], [[True]], [{}], ["x"] * 10000, [[1] * 70000], {"a": 1}]),
        ("logit_bias", [{2**31: 1}, {"9" * 5000: 1}, {5: True}, dict.fromkeys(range(20000), 1)]),
        ("early_stopping", ["ever", 1, None, np.zeros(2)]),
    ],
)
def test_what_no_operator_could_take_is_refused_in_a_short_message(
    name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(UserError, match=name) as caught:
            SamplingParams(**{name: value})
        assert "allowed" in str(caught.value)
        assert len(str(caught.value)) < 400


def test_a_token_that_is_biased_twice_is_refused() -> None:
    with pytest.raises(UserError, match="names token 5 twice"):
        SamplingParams(logit_bias={5: 1.0, "5": 2.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("token", [1.5, 1.0, True, "5", None, [1]])
def test_prompts_hold_whole_numbers_only(token: Any) -> None:
    with pytest.raises(UserError, match="token 1 of a prompt is"):
        Request(0, [3, token], SamplingParams())


def test_prompts_may_be_arrays() -> None:
    request = Request(0, np.array([3, 4], np.uint16), SamplingParams())  # type: ignore[arg-type]
    assert [type(token) for token in request.token_ids] == [int, int]
