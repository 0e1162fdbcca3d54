import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.text.detokenizer import Detokenizer
from predict.text.tokenizer import Tokenizer
from tests.support.texts import REPLACEMENT, TOKENIZERS, byte_fallback


class Backend:
    """Any decoder as a tokenizer backend; counts the tokens it decoded."""

    def __init__(self, vocab_size: int, decode: Callable[[list[int], bool], str]) -> None:
        self.vocab_size = vocab_size
        self.num_decoded = 0
        self._decode = decode

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def encode_inside(self, text: str) -> list[int]:
        raise NotImplementedError

    encode_literal = encode_inside

    def encode_pair(
        self, text: str, second: str | None, most: int | None
    ) -> tuple[list[int], int | None]:
        raise NotImplementedError

    def for_guides(self, eos_token_id: int) -> object:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return self._decode(list(token_ids), skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return None

    def vocabulary(self) -> dict[str, int]:
        raise NotImplementedError


def tokenizer_of(vocab_size: int, decode: Callable[[list[int], bool], str]) -> Tokenizer:
    return Tokenizer(Backend(vocab_size, decode), {})


def backend_of(tokenizer: Tokenizer) -> Backend:
    backend = tokenizer.backend
    assert isinstance(backend, Backend)
    return backend


def bytes_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 is special, 257 an ordinary word."""

    def decode(ids: list[int], skip: bool) -> str:
        parts = {256: b"" if skip else b"<end>", 257: b"word"}
        return b"".join(parts.get(i, bytes([i % 256])) for i in ids).decode(errors="replace")

    return tokenizer_of(258, decode)


def split(rng: random.Random, token_ids: Sequence[int]) -> list[list[int]]:
    """The tokens in groups of one to three, as steps with accepted drafts give them."""
    groups, rest = [], list(token_ids)
    while rest:
        size = rng.choice([1, 1, 1, 2, 3])
        groups.append(rest[:size])
        rest = rest[size:]
    return groups


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), skip=st.booleans())
def test_pieces_join_to_the_text_of_the_whole(name: str, seed: int, skip: bool) -> None:
    """For random tokens, so mostly text that is no text: broken bytes, stray specials, spaces."""
    tokenizer, rng = TOKENIZERS[name](), random.Random(seed)
    # Few different tokens: runs of bytes and of spaces become likely.
    choice = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice([2, 5, 300]))]
    token_ids = rng.choices(choice, k=rng.randrange(40))
    prompt = rng.choices(choice, k=rng.choice([0, 0, 3, 9]))
    stream = Detokenizer(tokenizer, skip).stream(prompt)
    pieces = [stream.append(group) for group in split(rng, token_ids)]
    assert stream.text == "".join(pieces)
    pieces.append(stream.finish())
    whole = tokenizer.decode_continuation(prompt, token_ids, skip)
    assert stream.text == whole
    assert "".join(pieces) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=30), seed=st.integers(0, 2**16))
def test_valid_text_streams_without_replacement_characters(name: str, text: str, seed: int) -> None:
    tokenizer = TOKENIZERS[name]()
    first_byte = 0 if name == "byte_level" else 3
    token_ids = [first_byte + byte for byte in f"a{text}".encode()]
    if name == "byte_level":
        spelled = {tokenizer.decode([i]): i for i in range(tokenizer.vocab_size)}
        token_ids = [spelled[letter] for letter in text if letter in spelled]
    stream = Detokenizer(tokenizer).stream()
    for group in split(random.Random(seed), token_ids):
        piece = stream.append(group)
        assert REPLACEMENT not in piece or REPLACEMENT in text
    stream.finish()
    assert stream.text == tokenizer.decode(token_ids)


def test_a_character_is_held_back_until_its_last_byte() -> None:
    stream = Detokenizer(bytes_tokenizer()).stream()
    assert [stream.append([byte]) for byte in "a中b".encode()] == ["a", "", "", "中", "b"]


def test_an_incomplete_character_comes_out_at_the_end() -> None:
    stream = Detokenizer(bytes_tokenizer()).stream()
    assert stream.append([97, 0xE4, 0xB8]) == ""
    assert stream.finish() == f"a{REPLACEMENT}"
    assert stream.text == f"a{REPLACEMENT}"


def test_a_broken_character_comes_out_with_the_next_whole_one() -> None:
    stream = Detokenizer(bytes_tokenizer()).stream()
    assert [stream.append([i]) for i in (97, 0xE4, 98)] == ["a", "", f"{REPLACEMENT}b"]


def test_special_tokens_are_left_out_or_shown() -> None:
    for skip, text in ((True, "ab"), (False, "a<end>b")):
        stream = Detokenizer(bytes_tokenizer(), skip_special_tokens=skip).stream()
        assert stream.append([97, 256]) + stream.append([98]) == text


def test_a_leading_space_is_dropped_only_at_the_beginning() -> None:
    tokenizer = byte_fallback()
    the = next(i for i in range(tokenizer.vocab_size) if tokenizer.decode([97 + 3, i]) == "a the")
    stream = Detokenizer(tokenizer).stream()
    assert [stream.append([i]) for i in (1, the, 2, the)] == ["", "the", "", " the"]
    continued = Detokenizer(tokenizer).stream(prompt_token_ids=[1, the])
    assert continued.append([the]) == " the"


@pytest.mark.parametrize("num_ahead", [0, 3000])
def test_bytes_that_a_later_byte_would_spoil_wait(num_ahead: int) -> None:
    """tokenizers' ByteFallback turns a whole run of bytes into U+FFFD when one of them is wrong."""
    tokenizer, first = byte_fallback(num_ahead), 3 + num_ahead
    newline, broken, word = first + 0x0A, first + 0xE4, first + 260
    assert tokenizer.decode([word, newline, broken]).endswith(REPLACEMENT * 2)
    stream = Detokenizer(tokenizer).stream()
    assert [stream.append([i]) for i in (word, newline)][1] == ""
    assert stream.append([word]).startswith("\n")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answer_does_not_begin_with_the_end_of_its_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    for text in (f"a{REPLACEMENT}", f"a{REPLACEMENT * 3}", REPLACEMENT):
        prompt, answer = tokenizer.encode(text, False), tokenizer.encode("ab", False)[-2:]
        stream = Detokenizer(tokenizer).stream(prompt)
        assert "".join(stream.append([i]) for i in answer) + stream.finish() == "ab"
    # Bytes of a character that the answer ends are the answer's; broken ones are the prompt's.
    prompt = tokenizer.encode("a🙂", False)[:-1]
    assert tokenizer.decode(prompt).endswith(REPLACEMENT)
    assert tokenizer.decode_continuation(prompt, tokenizer.encode("a🙂", False)[-1:]) == "🙂"
    assert tokenizer.decode_continuation(prompt, answer) == "ab"


@pytest.mark.parametrize(
    ("name", "token_ids"),
    [
        ("text", [257]),
        ("spaces", [32]),
        ("special", [256]),
        ("broken bytes", [0xE4]),
        ("text and special", [97, 256, 256]),
        ("characters", list("中".encode())),
    ],
)
def test_decoding_costs_a_bounded_number_of_tokens_per_token(
    name: str, token_ids: list[int]
) -> None:
    tokenizer = bytes_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.stream()  # looks at the vocabulary once
    backend, num_tokens = backend_of(tokenizer), 3000
    before = backend.num_decoded
    stream = detokenizer.stream([97, 98, 99])
    for i in range(num_tokens):
        stream.append([token_ids[i % len(token_ids)]])
    stream.finish()
    assert backend.num_decoded - before < 25 * num_tokens, name


def test_the_vocabulary_is_looked_at_once() -> None:
    tokenizer = bytes_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert backend_of(tokenizer).num_decoded == 0
    detokenizer.stream()
    once = backend_of(tokenizer).num_decoded
    detokenizer.stream()
    assert 0 < once == backend_of(tokenizer).num_decoded


def test_a_vocabulary_without_visible_tokens_still_works() -> None:
    stream = Detokenizer(tokenizer_of(2, lambda ids, skip: " " * len(ids))).stream()
    assert "".join(stream.append([0]) for _ in range(50)) + stream.finish() == " " * 50


def test_a_decoder_that_changes_earlier_text_ends_with_the_right_text() -> None:
    """Like a cleanup that joins " ." to "." behind the fact."""

    def decode(ids: list[int], skip: bool) -> str:
        return "".join("ab ."[i] for i in ids).replace(" .", ".")

    stream = Detokenizer(tokenizer_of(4, decode)).stream()
    for token_id in (0, 2, 3, 1):
        stream.append([token_id])
    stream.finish()
    assert stream.text == "a.b"
