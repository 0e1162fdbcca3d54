"""The messages between the front and the engine: length-prefixed msgpack of typed records.

Both ends are ours, and of one version: the engine's process is started by the front's.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from predict.config.adapters import Change
from predict.config.rest import Rest
from predict.engine.embedding import Text
from predict.engine.retrieval import Rules
from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats
from predict.request import RequestOutput, SamplingParams

T = TypeVar("T")
_LENGTH = struct.Struct("<I")  # bytes of the message behind it


class ModelInfo(msgspec.Struct, frozen=True):
    """The loaded model."""

    model_type: str  # of config.json
    dtype: str
    device: str  # cpu, gpu:0
    mode: str  # dynamic, static
    vocab_size: int
    max_length: int  # tokens of prompt and answer together
    batch_size: int  # sequences at once
    num_cache_blocks: int
    block_size: int  # tokens of a block
    eos_token_ids: tuple[int, ...]
    quant_type: str | None
    kv_format: str
    speculate_method: str | None
    startup_seconds: float
    rules: Rules | None = None  # how texts for vectors and scores are written
    makes_text: bool = True


class AnswerMetrics(msgspec.Struct, frozen=True, gc=False):
    """Measures of the answers to one prompt; times in seconds, None where they did not happen."""

    num_prompt_tokens: int
    num_output_tokens: int  # of all answers
    num_cached_tokens: int  # of the prompt, taken from the prefix cache
    num_preemptions: int
    queue_seconds: float | None  # from `add` to the first step
    time_to_first_token: float | None  # from `add`
    time_per_output_token: float | None  # after the first, of the first answer
    seconds: float  # from `add` to the end
    finish_reasons: tuple[str, ...]  # of each sample
    num_draft_tokens: int = 0  # of all answers, as many as were verified
    num_accepted_draft_tokens: int = 0
    guide_seconds: float | None = None  # from `add` until its guide was compiled
    text_seconds: float = 0.0  # that making its text took, all steps together


# From the front to the engine.


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: what the engine is made from."""

    settings: dict[str, Any]  # of EngineConfig
    asks: bool = False  # says Needs first, and loads behind Go


class Go(msgspec.Struct, tag=True, array_like=True):
    """There is room for the model: it may load."""


class SentPicture(msgspec.Struct, array_like=True):
    """A picture of a prompt, resized."""

    start: int  # of its tokens
    digest: bytes
    shape: tuple[int, ...]  # of pixels or, of several tiles, of these
    values: bytes  # of uint8


class Add(msgspec.Struct, tag=True, array_like=True):
    """A prompt to answer."""

    request_id: int  # the front's
    prompt_token_ids: list[int]
    params: SamplingParams
    streamed: bool
    sent_at: float  # time.perf_counter(), which all processes of a machine share
    pictures: list[SentPicture] = []  # whose tokens the prompt has


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for an answer any more."""

    request_id: int


class AskStats(msgspec.Struct, tag=True, array_like=True):
    """A question that Told answers."""

    question: int


class AskChange(msgspec.Struct, tag=True, array_like=True):
    """Asks for a change of adapters or prefixes; Changed answers it.

    Messages behind it may name what it loads, and may not name what it unloads.
    """

    question: int
    change: Change


class AskRest(msgspec.Struct, tag=True, array_like=True):
    """Asks for sleep, wake-up or other weights; Changed answers it, once that is done."""

    question: int
    rest: Rest


class AskVectors(msgspec.Struct, tag=True, array_like=True):
    """Texts whose vectors or scores are wanted; Vectors answers it."""

    question: int
    texts: list[Text]
    scores: bool  # else vectors
    adapter: str | None


class DropVectors(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for an AskVectors' answer any more."""

    question: int


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The last message: the engine's process leaves with 0."""


_Questions = AskStats | AskChange | AskRest | AskVectors
FromFront = Start | Go | Add | Abort | _Questions | DropVectors | Stop

# From the engine to the front.


class Needs(msgspec.Struct, tag=True, array_like=True):
    """What the model will take, of a Start that asks."""

    num_bytes: int  # of its weights and its cache


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The first message: the model is loaded."""

    info: ModelInfo


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The last message, where the model cannot be loaded or the engine has failed."""

    message: str
    exit_code: int  # EXIT_USAGE: a wrong flag, file or model


class Ended(msgspec.Struct, array_like=True):
    """An answer's end."""

    request_id: int
    metrics: AnswerMetrics | None
    output: RequestOutput | None = None  # of one that is not streamed
    refused: str | None = None  # why it never ran: a UserError's text


class StepNews(msgspec.Struct, tag=True, array_like=True):
    """New text and ends of all answers: one message for each step of the engine."""

    pieces: list[tuple[int, list[StreamOutput]]]  # of streamed ones, by the front's ids
    ended: list[Ended]  # behind their pieces


class Told(msgspec.Struct, tag=True, array_like=True):
    """The counts that were asked for."""

    question: int
    stats: EngineStats


class Changed(msgspec.Struct, tag=True, array_like=True):
    """The result of an AskChange or AskRest; one that was refused has changed nothing.

    is_sleeping: whether the model sleeps now.
    """

    question: int
    refused: str | None = None  # a UserError's text
    failed: str | None = None  # another error's
    is_sleeping: bool = False


class Vectors(msgspec.Struct, tag=True, array_like=True):
    """The result of an AskVectors: float32 rows of `size` values, or why there are none."""

    question: int
    rows: bytes = b""
    size: int = 0
    refused: str | None = None  # a UserError's text
    failed: str | None = None  # another error's


FromEngine = Needs | Ready | Failed | StepNews | Told | Changed | Vectors

_ENCODER = msgspec.msgpack.Encoder()


def frame(message: FromFront | FromEngine) -> bytes:
    """A message as it goes over the socket, its length in front."""
    buffer = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


class Messages(Generic[T]):
    """Takes what a socket brings and gives the messages that are whole."""

    def __init__(self, kind: Any):
        """kind: FromFront or FromEngine, which is T."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._data = bytearray()
        self._needed = _LENGTH.size  # bytes before there is anything to do

    def take(self, data: bytes) -> list[T]:
        """The messages that these bytes complete, in order.

        Raises msgspec.DecodeError for what is none.
        """
        held = self._data
        held += data
        found: list[T] = []
        start = 0
        with memoryview(held) as view:
            while len(held) - start >= self._needed:
                (size,) = _LENGTH.unpack_from(view, start)
                end = start + _LENGTH.size + size
                if len(held) < end:
                    self._needed = end - start
                    break
                found.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                start, self._needed = end, _LENGTH.size
        del held[:start]
        return found
