"""What a front and a replica say to each other, inside of Ray's calls: msgpack of typed records.

A client's text is in these bytes alone, so that nothing of what it sends is ever unpickled.
"""

from __future__ import annotations

import msgspec

from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats
from predict.request import RequestOutput, SamplingParams
from predict.server.wire import AnswerMetrics, ModelInfo


class PromptAsk(msgspec.Struct, array_like=True):
    """A prompt to answer."""

    prompt_token_ids: list[int]
    params: SamplingParams
    streamed: bool


class AnswerPieces(msgspec.Struct, tag=True, array_like=True):
    """What is new of the answers."""

    pieces: list[StreamOutput]


class Done(msgspec.Struct, tag=True, array_like=True):
    """The last message of an answer."""

    metrics: AnswerMetrics | None
    output: RequestOutput | None = None  # of one that is not streamed
    refused: str | None = None  # why it never ran: a UserError's text


class ReplicaCounts(msgspec.Struct, array_like=True):
    """What a replica has counted."""

    replica: str
    stats: EngineStats


encode = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(PromptAsk).decode
decode_said = msgspec.msgpack.Decoder(AnswerPieces | Done).decode
decode_counts = msgspec.msgpack.Decoder(ReplicaCounts).decode
decode_info = msgspec.msgpack.Decoder(ModelInfo).decode
