"""What requests ask: texts of given lengths, texts that begin alike, or the lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from predict.cli.data import read_data_file
from predict.errors import UserError
from predict.text.conversation import conversation_messages

# Short ones, which most tokenizers have as one token.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city name president team minute idea body back parent face level office door health art "
    "war history party result change morning reason research girl guy moment air teacher force"
)
WORDS = tuple(_TEXT.split())
# Makes the content of a prompt of so many tokens: a text, or token ids.
Maker = Callable[[np.random.Generator, int], str | list[int]]


@dataclass(frozen=True)
class Ask:
    """One request, before the server's own words for it."""

    prompt: str | list[int] | list[dict[str, Any]]  # a text, token ids or messages
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)  # more keys of the body


@dataclass(frozen=True)
class Lengths:
    """Sizes of made-up requests, in tokens."""

    input_len: int
    output_len: int
    spread: float  # each length is drawn from len * (1 - spread) to len * (1 + spread)
    prefix_len: int = 0  # of input_len, shared by the requests of a group
    num_prefixes: int = 1  # groups

    def __post_init__(self) -> None:
        if not 0.0 <= self.spread < 1.0:
            raise UserError(f"--len_spread {self.spread} is not supported (allowed: 0 to below 1)")
        if not 0 <= self.prefix_len < self.input_len:
            raise UserError(
                f"--prefix_len {self.prefix_len} leaves no own part of --input_len "
                f"{self.input_len}; make it shorter"
            )
        if self.num_prefixes < 1:
            raise UserError(f"--num_prefixes {self.num_prefixes} is not supported (allowed: 1 up)")

    def draw(self, generator: np.random.Generator, length: int) -> int:
        """A length about `length`, at least 1."""
        low, high = length * (1.0 - self.spread), length * (1.0 + self.spread)
        return max(1, round(generator.uniform(low, high)))


def words(generator: np.random.Generator, count: int) -> str:
    """A text of `count` random words."""
    return " ".join(generator.choice(WORDS, count))


def texts(few: tuple[int, int], many: tuple[int, int]) -> Maker:
    """Makes texts of words, which have about as many tokens as asked for.

    few, many: (words, tokens) of two texts that the server counted: tokens are a multiple of words,
    and a few of a chat template or a text's begin. Raises UserError where they are not.
    """
    slope = (many[1] - few[1]) / (many[0] - few[0])
    if slope <= 0:
        raise UserError(
            f"the server counts {few[1]} tokens in {few[0]} words and {many[1]} in {many[0]}: "
            "lengths cannot be made from that; give --vocab_size, to send token ids"
        )
    overhead = few[1] - slope * few[0]
    return lambda generator, count: words(generator, max(1, round((count - overhead) / slope)))


def token_ids(vocab_size: int) -> Maker:
    """Makes random ids from 0 to below vocab_size."""
    return lambda generator, count: generator.integers(0, vocab_size, count).tolist()


def made_up(maker: Maker, lengths: Lengths, num_requests: int, seed: Sequence[int]) -> list[Ask]:
    """Requests of random content. Those of one group begin with the same `prefix_len` tokens."""
    generator = np.random.default_rng(seed)
    prefixes: list[Any] = []
    if lengths.prefix_len:
        prefixes = [maker(generator, lengths.prefix_len) for _ in range(lengths.num_prefixes)]
    asks = []
    for number in range(num_requests):
        own_len = lengths.draw(generator, lengths.input_len - lengths.prefix_len)
        prompt: Any = maker(generator, own_len)
        if prefixes:
            prefix = prefixes[number % len(prefixes)]
            prompt = f"{prefix} {prompt}" if isinstance(prefix, str) else [*prefix, *prompt]
        asks.append(Ask(prompt, lengths.draw(generator, lengths.output_len)))
    return asks


def asks_of_file(path: str | Path, chat: bool, output_len: int) -> list[Ask]:
    """A data file's prompts, for one of the two endpoints.

    A line's max_new_tokens is its length, else `output_len`; its other sampling keys are sent as
    they are. Raises UserError.
    """
    asks = []
    for item in read_data_file(path):
        sampling = dict(item.sampling)
        max_tokens = sampling.pop("max_new_tokens", output_len)
        prompt: Any = item.src
        if chat:
            prompt = [*conversation_messages(item.src, item.tgt)]
        elif not isinstance(prompt, str):
            raise UserError(f"{item.where}: a conversation needs --endpoint chat")
        asks.append(Ask(prompt, max_tokens, sampling))
    return asks
