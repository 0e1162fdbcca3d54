"""Stop strings: the automaton, the text of a request, and whole runs of the demo model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict import LLM, EngineConfig, SamplingParams
from predict.errors import UserError
from predict.text.answer_text import AnswerText
from predict.text.detokenizer import LONGEST_CHARACTER, MANY_PENDING, Detokenizer
from predict.text.params import hidden_in, with_token_ids
from predict.text.stop_strings import ROOT, Match, StopStrings
from predict.text.tokenizer import Tokenizer
from tests.support import tiny
from tests.support.demo import demo_config
from tests.support.drafts import draft_always
from tests.support.texts import PROMPTS, REPLACEMENT, TEXTS, TOKENIZERS
from tests.support.tiny import TOKENIZER

strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=6)


def first_match(text: str, stops: Sequence[str], first: int = 0) -> Match | None:
    """The match that ends first, the longest of those: by trying every place."""
    for end in range(first + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return Match(end - max(map(len, ending)), end)
    return None


def test_a_stop_is_a_token_where_texts_leave_that_out() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]()

    def ids(stop: str) -> tuple[int, ...]:
        params = SamplingParams(stop=stop)
        return tuple(with_token_ids(params, tokenizer, tokenizer.vocab_size).stop_token_ids)

    assert ids("</s>") == (tokenizer.token_to_id("</s>"),)
    assert ids("▁") == (), "the mark of a space is the token of each space"
    assert ids("ing") == ()
    assert ids("a</s>") == ()


@given(strings, st.text("abc", max_size=30), st.integers(0, 30), st.integers(0, 6))
def test_scanning_in_pieces_finds_what_trying_every_place_finds(
    stops: list[str], text: str, cut: int, first: int
) -> None:
    found = StopStrings(stops)
    node, match = found.scan(ROOT, text[:cut], first)
    if match is None:
        _, match = found.scan(node, text[cut:], max(first - cut, 0))
        if match is not None:
            cut = min(cut, len(text))
            match = Match(match.begin + cut, match.end + cut)
    assert match == first_match(text, stops, first)


@given(strings, st.text("abc", max_size=20))
def test_the_depth_is_the_longest_end_that_may_become_a_string(stops: list[str], text: str) -> None:
    found = StopStrings(stops)
    node = ROOT
    for character in text:  # beyond matches too
        node, _ = found.scan(node, character)
    ends = (text[i:] for i in range(len(text) + 1))
    expected = next(end for end in ends if not end or any(s.startswith(end) for s in stops))
    assert found.depth(node) == len(expected)


def run(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], **options: Any) -> Any:
    """(text, joined pieces, tokens used) of an answer."""
    include, min_length = options.get("include", False), options.get("min_length", 0)
    answer = AnswerText(Detokenizer(tokenizer).stream(), tuple(stop), include)
    pieces: list[str] = []
    for number, token_id in enumerate(ids, 1):
        if answer.append(token_id, number > min_length, number == len(ids)):
            break
        pieces.append(answer.take())
    answer.finish()
    pieces.append(answer.take())
    assert answer.take() == ""
    return answer.text, "".join(pieces), number


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, len(TEXTS) - 1), st.booleans())
def test_text_ends_at_the_first_stop_string_whatever_the_tokens(
    name: str, seed: int, which: int, include: bool
) -> None:
    tokenizer, rng = TOKENIZERS[name](), random.Random(seed)
    source = TEXTS[which] * 2
    cuts = sorted(rng.sample(range(len(source) + 1), min(5, len(source))))
    ids: list[int] = []
    for begin, end in zip([0, *cuts], [*cuts, len(source)], strict=True):
        ids += tokenizer.encode(source[begin:end], add_special_tokens=False)
    whole = tokenizer.decode_continuation((), ids)
    stops = []
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(whole))
        stops.append(whole[begin : begin + rng.randint(1, 6)] + rng.choice(["", "", "!"]))
    stops = [stop for stop in stops if REPLACEMENT not in stop] or ["!!"]
    text, joined, num_tokens = run(tokenizer, ids, stops, include=include)
    match = first_match(whole, stops)
    expected = whole if match is None else whole[: match.end if include else match.begin]
    assert (text, joined) == (expected, expected)
    if match is not None:
        # Not a token more than the stop string needs, but in long runs of byte tokens.
        num_needed = next(
            number
            for number in range(1, len(ids) + 1)
            if first_match(
                tokenizer.decode_continuation((), ids[:number]).rstrip(REPLACEMENT), stops
            )
        )
        slack = num_tokens // 4 + LONGEST_CHARACTER - 1 if num_tokens > MANY_PENDING else 0
        assert num_needed <= num_tokens <= num_needed + slack


def test_incomplete_utf8_matches_nothing_and_completes_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]()
    ids = [tokenizer.token_to_id(piece) for piece in ("a", "<0xE6>", "<0x97>", "<0xA5>", "b")]
    text, joined, num_tokens = run(tokenizer, ids, ["日"])  # type: ignore[arg-type]
    assert (text, joined, num_tokens) == ("a", "a", 4)
    text, _, num_tokens = run(tokenizer, ids[:3], [REPLACEMENT])  # type: ignore[arg-type]
    assert (text.rstrip(REPLACEMENT), num_tokens) == ("a", 3)


def test_stop_strings_count_from_min_length_on() -> None:
    tokenizer = TOKENIZERS["byte_level"]()
    ids = [tokenizer.encode(text)[0] for text in ("a", "b", "a", "b")]
    assert run(tokenizer, ids, ["ab"])[:1] == ("",)
    assert run(tokenizer, ids, ["ab"], min_length=2)[:1] == ("ab",)
    assert run(tokenizer, ids, ["b"], min_length=4)[:1] == ("abab",)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(demo_config(max_length=128, batch_size=3))


SETTINGS: dict[str, dict[str, Any]] = {
    "drafts": {
        "speculate_method": "lookahead",
        "speculate_max_draft_token_num": 8,
        "speculate_max_ngram_size": 3,
    },
    "chunks": {"max_num_batched_tokens": 4},
    "preemption": {"num_cache_blocks": 6},
    "turns": {"attention": "block"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_stopped_text_is_the_beginning_of_the_whole_text(plain: LLM, name: str) -> None:
    other = LLM(demo_config(max_length=128, batch_size=3, **SETTINGS[name]))
    draft_always(other)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    wholes = plain.generate(PROMPTS, greedy)
    rng = random.Random(name)
    for turn in range(2):
        stops: list[tuple[str, ...]] = []
        for index, whole in enumerate(wholes):
            begin = rng.randrange(10, len(whole.text) - 8)
            stop = whole.text[begin : begin + rng.randint(1, 8)]
            # One of them runs to its end.
            stops.append(("no such text",) if index == turn else (stop, "no such text"))
        params = [replace(greedy, stop=stop) for stop in stops]
        outputs = other.generate(PROMPTS, params)
        for output, whole, mine in zip(outputs, wholes, stops, strict=True):
            match = first_match(whole.text, mine)
            assert output.text == whole.text[: match.begin if match else None]
            assert output.finish_reason == ("stop" if match else "length")
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert other.stats().num_used_blocks == 0
    if name == "preemption":
        assert other.stats().num_preemptions > 0
    if name == "drafts":
        assert other.stats().num_accepted_draft_tokens > 0


def test_streams_hold_back_what_may_become_a_stop_string(plain: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    whole = plain.generate(PROMPTS[:1], greedy)[0]
    stop = whole.text[30:42]
    params = SamplingParams(
        temperature=0.0, max_new_tokens=40, stop=stop, include_stop_str_in_output=True
    )
    pieces = list(plain.stream(PROMPTS[0], params))
    assert "".join(piece.text for piece in pieces) == whole.text[: whole.text.index(stop)] + stop
    assert pieces[-1].finish_reason == "stop"
    almost = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, stop=stop + "\0")
    pieces = list(plain.stream(PROMPTS[0], almost))
    assert "".join(piece.text for piece in pieces) == whole.text
    held = [piece.text for piece in pieces if not piece.text and piece.token_ids]
    assert held


@pytest.mark.parametrize("stop", ["", ("a", ""), 7, (b"a",), b"a", ("a", None)])
def test_stop_strings_that_are_none_are_refused(stop: Any) -> None:
    with pytest.raises(UserError, match="none of them empty"):
        SamplingParams(stop=stop)


def test_stops_that_the_model_cannot_meet_are_refused_before_any_work(
    plain: LLM, tmp_path: Any
) -> None:
    steps = plain.stats().num_steps
    outside = SamplingParams(stop_token_ids=(3, plain.spec.vocab_size))
    with pytest.raises(UserError, match=r"stop_token_ids has token id .* outside"):
        plain.generate(PROMPTS, [SamplingParams(), SamplingParams(), outside])
    assert plain.stats().num_steps == steps
    bare = LLM(EngineConfig(model_name_or_path=str(tiny.write(tmp_path)), max_length=32))
    with pytest.raises(UserError, match="without a tokenizer; use stop_token_ids"):
        bare.generate([[1]], SamplingParams(stop="x"))


@pytest.mark.parametrize(
    ("stop", "text", "with_stop", "num_tokens"),
    [
        ("<|user|>né", "a", "ané", 5),
        ("a<|user|>", "", "a", 2),
        ("a<|user|>n", "", "an", 3),
        ("<|user|><|end|>", "ané", "ané", 7),
        ("né<|user|>", "a", "ané", 6),
        ("é<|end|>", "an", "ané", 7),  # the other one is in no stop string
    ],
)
def test_special_tokens_amid_a_stop_string_have_their_place(
    stop: str, text: str, with_stop: str, num_tokens: int
) -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    ids = tokenizer.encode("a<|user|>né", False)
    ids += tokenizer.encode("<|user|>", False) + tokenizer.encode("<|end|>b<|end|>", False)
    hidden = hidden_in([stop], tokenizer)
    assert hidden
    for include, said in ((False, text), (True, with_stop)):
        stream = Detokenizer(tokenizer).stream([5])
        answer = AnswerText(stream, (stop, "zz"), include, hidden)
        taken = ""
        for number, token_id in enumerate(ids, 1):
            ended = answer.append(token_id, True, number == len(ids))
            taken += answer.take()
            if ended:
                break
        assert (answer.text, taken, number) == (said, said, num_tokens)


def test_special_tokens_stop_though_they_have_no_text(plain: LLM) -> None:
    assert plain.tokenizer is not None
    name = "<|end_of_text|>"
    token_id = plain.tokenizer.token_to_id(name)
    assert token_id is not None
    params = SamplingParams(
        temperature=0.0, max_new_tokens=9, ignore_eos=True, stop=name, logit_bias={token_id: 100.0}
    )
    (output,) = plain.generate(PROMPTS[:1], params)
    assert (output.text, output.token_ids, output.finish_reason) == ("", (token_id,), "stop")
