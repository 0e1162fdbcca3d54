"""Guides compiled for vocabularies of all kinds: what they allow, force and refuse."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from predict.errors import UserError
from predict.guide import Guide
from predict.text.guides import (
    MAX_CACHED,
    Guides,
    GuideState,
    MaskFiller,
    MaskRows,
    pieces,
    structural_grammar,
)
from predict.text.tokenizer import Tokenizer
from tests.support.paths import DEMO, ROOT

VOCAB = 5120


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEMO)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer, VOCAB, [1])


def start(guides: Guides, **values: Any) -> GuideState:
    return guides.compiled(Guide(**values)).result().start()


def accepts(state: GuideState, token_ids: list[int]) -> bool:
    """Whether the tokens are a whole answer."""
    try:
        for token_id in token_ids:
            state.accept(token_id)
    except UserError:
        return False
    return bool(state.matcher.is_accepting())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


SCHEMA = {
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    "type": "object",
    "properties": {
        "kind": {"anyOf": [{"const": "ä"}, {"enum": [1, None, "🙂"]}]},
        "tree": {"$ref": "#/$defs/tree"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        "size": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    },
    "required": ["kind", "tree"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"kind": "ä", "tree": []}, True),
        ({"kind": "🙂", "tree": [[], [[], []]], "code": "AB-12", "size": 9.5}, True),
        ({"kind": None, "tree": [], "size": 0.25}, True),
        ({"kind": 2, "tree": []}, False),
        ({"kind": 1, "tree": [[], [], []]}, False),
        ({"kind": 1, "tree": [], "code": "ab-1"}, False),
        ({"kind": 1, "tree": [], "size": 0}, False),
        ({"kind": 1, "tree": [], "other": 1}, False),
        ({"tree": []}, False),
    ],
)
def test_json_fits_its_schema(
    guides: Guides, tokenizer: Tokenizer, value: dict[str, Any], fits: bool
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert accepts(start(guides, json_schema=SCHEMA), encode(tokenizer, text)) == fits


def test_booleans_are_schemas(guides: Guides, tokenizer: Tokenizer) -> None:
    assert accepts(start(guides, json_schema=True), encode(tokenizer, "[1, 2]"))
    with pytest.raises(UserError, match=r"guide\.json_schema cannot be compiled"):
        start(guides, json_schema=False)


@pytest.mark.parametrize(
    "guide",
    [
        {"choice": ["<|end_of_text|>b"]},
        {"json_schema": {"const": "a<|pad|>"}},
        {"grammar": 'start: /[ab]/ "<|pad|>"'},
    ],
)
def test_the_text_of_a_special_token_is_written_in_ordinary_ones(
    guides: Guides, tokenizer: Tokenizer, guide: dict[str, Any]
) -> None:
    state = start(guides, **guide)
    ids: list[int] = []
    while not state.matcher.is_stopped():
        mask = np.zeros((1, VOCAB // 32), np.int32)
        MaskFiller().fill([MaskRows(state, 0, [])], mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids.append(next(iter(state.forced()), int(allowed[-1])))
        state.accept(ids[-1])
    assert "<|" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("guide", "text", "fits"),
    [
        ({"json_object": True}, '{"a": [1]}', True),
        ({"json_object": True}, "[1]", False),
        ({"regex": "a|b+"}, "bbb", True),
        ({"regex": "a|b+"}, "ab", False),
        ({"choice": ['say "hi"', "né\\n"]}, "né\\n", True),
        ({"choice": ['say "hi"', "né\\n"]}, 'say "hi"', True),
        ({"choice": ["a", "ab"]}, "abc", False),
        ({"grammar": 'start: "(" start ")" | "x"'}, "((x))", True),
        ({"grammar": 'start: "(" start ")" | "x"'}, "((x)", False),
    ],
)
def test_texts_fit_guides(
    guides: Guides, tokenizer: Tokenizer, guide: dict[str, Any], text: str, fits: bool
) -> None:
    assert accepts(start(guides, **guide), encode(tokenizer, text)) == fits


def structures(**changes: Any) -> dict[str, Any]:
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    return {
        "structures": [
            {"begin": "<f=one>", "schema": number, "end": "</f>"},
            {"begin": "<f=two>", "schema": True, "end": "</f>"},
            {"begin": "!go ", "schema": {"const": 1}, "end": ""},
        ],
        "triggers": ["<f=", "!go"],
        **changes,
    }


ONE, TWO = '<f=one>{"n": 4}</f>', "<f=two>[1]</f>"


@pytest.mark.parametrize(
    ("changes", "text", "fits"),
    [
        ({}, "some text", True),
        ({}, f"so: {ONE}\n{TWO} and !go 1 done", True),
        ({}, '<f=one>{"m": 4}</f>', False),
        ({}, "<f=three>", False),
        ({"at_least_one": True}, "some text", False),
        ({"at_least_one": True}, f"some {ONE} text", True),
        ({"stop_after_first": True}, f"some {ONE} text", False),
        ({"stop_after_first": True}, f"some {ONE}", True),
        ({"stop_after_first": True}, "some", True),
        ({"stop_after_first": True, "at_least_one": True}, "some", False),
        ({"stop_after_first": True, "at_least_one": True}, TWO, True),
    ],
    ids=str,
)
def test_structural_tags_hold_json_in_text(
    guides: Guides, tokenizer: Tokenizer, changes: dict[str, Any], text: str, fits: bool
) -> None:
    state = start(guides, structural_tag=structures(**changes))
    assert accepts(state, encode(tokenizer, text)) == fits


def test_special_tokens_in_tags_are_tokens() -> None:
    special = {"<|call|>": 7, "<|call|>x": 8, "<|end|>": 9}
    assert pieces("a<|call|>xb<|end|>", special) == ["a", "<|call|>x", "b", "<|end|>"]
    tag = {
        "structures": [{"begin": "<|call|>f", "schema": {"x-guidance": {}}, "end": "!<|end|>"}],
        "triggers": ["<|call|>"],
        "at_least_one": False,
        "stop_after_first": False,
    }
    assert structural_grammar(tag, special).splitlines() == [
        "start: (tag_0)* TEXT",
        'tag_0: TEXT <[7]>  ("f" %json {"x-guidance": {}} "!" <[9]>)',
        r"TEXT: /(.|\n)*/",
    ]


def test_special_tokens_of_the_vocabulary_come_only_where_they_are_named(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    bos = tokenizer.bos_token_id
    assert bos is not None
    text = tokenizer.decode([bos], skip_special_tokens=False)
    tag = {
        "structures": [{"begin": text, "schema": {"const": 1}, "end": ""}],
        "triggers": [text],
    }
    one = encode(tokenizer, "1")
    assert accepts(start(guides, structural_tag=tag), [*encode(tokenizer, "a"), bos, *one])
    assert not accepts(start(guides, structural_tag=tag), [bos, *encode(tokenizer, "2")])
    assert not accepts(start(guides, regex="(.|\n)*"), [bos])


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"json_schema": {"type": "objectt"}}, "Invalid type: objectt"),
        ({"json_schema": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
        ({"json_schema": {"$ref": "#"}}, "no text fits it"),
        ({"json_schema": {"$ref": "http://localhost/a.json"}}, "is not present in a registry"),
        (
            {"json_schema": ENDLESS},
            "cannot be compiled",
        ),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, r"at 1\(8\): unknown name"),
        ({"grammar": "begin: /a/"}, "start"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_place(
    guides: Guides, guide: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        start(guides, **guide)
    assert f"guide.{next(iter(guide))} cannot be compiled" in str(caught.value)


def test_forced_tokens_and_valid_drafts(guides: Guides, tokenizer: Tokenizer) -> None:
    state = start(guides, json_schema=SCHEMA)
    forced = state.forced()
    assert tokenizer.decode(forced).startswith('{"kind":')
    wrong = [*forced, *encode(tokenizer, "true")]
    assert list(state.valid(wrong)) == forced
    assert list(state.valid([5])) == []
    state = start(guides, choice=["ab"])
    for token in encode(tokenizer, "ab")[:-1]:
        assert not state.accept(token)
    assert state.accept(encode(tokenizer, "ab")[-1])
    assert (state.forced(), list(state.valid([5]))) == ([], [])


def test_masks_of_drafts_are_those_behind_them(guides: Guides, tokenizer: Tokenizer) -> None:
    drafts = encode(tokenizer, "ab-")
    masks = np.full((len(drafts) + 3, VOCAB // 32), -1, np.int32)
    states = [start(guides, regex="ab-[0-9]x"), start(guides, regex="[xy]z")]
    MaskFiller().fill([MaskRows(states[0], 1, drafts), MaskRows(states[1], 0, ())], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    for row, state in ((0, states[1]), (1, states[0])):
        single = np.zeros((1, VOCAB // 32), np.int32)
        MaskFiller().fill([MaskRows(state, 0, ())], single)
        np.testing.assert_array_equal(masks[row], single[0])
    allowed = {tokenizer.decode([int(token)]) for token in np.flatnonzero(bits[len(drafts) + 1])}
    assert allowed >= set("0123456789")
    assert all(text[0].isdigit() for text in allowed)
    assert (masks[-1] == -1).all()


def test_compiled_guides_are_kept_and_the_oldest_forgotten(tokenizer: Tokenizer) -> None:
    guides = Guides(tokenizer, VOCAB, [1])
    first = guides.compiled(Guide(choice=["a"]))
    assert guides.compiled(Guide(choice=["a"])) is first
    for number in range(MAX_CACHED):
        guides.compiled(Guide(choice=[str(number)]))
    assert guides.compiled(Guide(choice=["a"])) is not first
    assert guides.compiled(Guide(choice=[str(number)])).result().start().forced()


def test_a_model_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="needs a model with an end-of-text token"):
        Guides(tokenizer, VOCAB, []).compiled(Guide(regex="a")).result()


def test_sentencepiece_tokens_have_their_bytes() -> None:
    tokenizer = Tokenizer.from_dir(ROOT / "tests" / "data" / "tokenizers" / "sentencepiece")
    guides = Guides(tokenizer, tokenizer.vocab_size + 9, tokenizer.eos_token_ids)
    text = '{"a b": "é🙂\t"}'
    ids = tokenizer.backend.encode_inside(text)
    assert accepts(start(guides, regex=r'\{"a b": ".*"\}'), ids)
    assert not accepts(start(guides, regex=r'\{"a c": ".*"\}'), ids)
    state = start(guides, choice=["hello there"])
    while not state.matcher.is_stopped():
        forced = state.forced()
        assert forced
        for token in forced:
            state.accept(token)
