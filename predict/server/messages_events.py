"""The Messages API: its answers, as events and as messages."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from predict.server.answer_blocks import Block, BlockEvents, Kind, arguments_of, sealed, signature
from predict.server.answers import to_json
from predict.server.context import Context
from predict.server.errors import ApiError
from predict.server.messages import CountBody
from predict.server.runs import Usage
from predict.server.turns import Ready

# Of each kind of block: its name, its text's name, and the type and the name of its pieces.
_BLOCKS: Mapping[Kind, tuple[str, str, str, str]] = {
    "text": ("text", "text", "text_delta", "text"),
    "thought": ("thinking", "thinking", "thinking_delta", "thinking"),
    "call": ("tool_use", "input", "input_json_delta", "partial_json"),
}


class MessageEvents(BlockEvents):
    """An answer as the Messages API streams it; `message` is the whole one at its end."""

    def __init__(
        self, context: Context, ready: Ready, body: CountBody, request_id: str, max_tokens: int
    ) -> None:
        super().__init__(context, ready.make_reader(), ready.job.usage)
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._is_silent = body.thinking is not None and body.thinking.display == "omitted"
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "role": "assistant",
            "model": ready.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> None:
        self.message["usage"] = _usage_fields(self.usage)
        self._event("message_start", message=self.message)
        self._event("ping")

    def block_begins(self, block: Block) -> None:
        kind, name, delta, piece = _BLOCKS[block.kind]
        begun: dict[str, Any] = {"type": kind, name: {} if block.kind == "call" else ""}
        if block.kind == "call":
            begun.update(id=block.id, name=block.name)
        if block.kind == "thought":
            begun["signature"] = ""
        self._event("content_block_start", index=block.index, content_block=begun)
        block.head = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":' % (
            *(block.index, delta.encode(), piece.encode()),
        )

    def block_grows(self, block: Block, text: str) -> None:
        if block.kind != "thought" or not self._is_silent:
            self.put("content_block_delta", b"%s%s}}" % (block.head, to_json(text)))

    def block_ends(self, block: Block) -> None:
        kind, name, _, _ = _BLOCKS[block.kind]
        whole: dict[str, Any] = {"type": kind, name: block.text}
        if block.kind == "call":
            whole = {"type": kind, "id": block.id, "name": block.name, name: arguments_of(block)}
        if block.kind == "thought":
            whole["signature"] = (sealed if self._is_silent else signature)(block.text)
            whole[name] = "" if self._is_silent else block.text
            delta = {"type": "signature_delta", "signature": whole["signature"]}
            self._event("content_block_delta", index=block.index, delta=delta)
        self.message["content"].append(whole)
        self._event("content_block_stop", index=block.index)

    def end(self) -> None:
        reason, text = self._stop_reason()
        said = {"stop_reason": reason, "stop_sequence": text}
        usage = _usage_fields(self.usage)
        self.message.update(said, usage=usage)
        self._event("message_delta", delta=said, usage=usage)
        self._event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        self.put("error", to_json(error.messages_content(self._request_id)))
        return self.taken()

    def _stop_reason(self) -> tuple[str | None, str | None]:
        """Why the answer has ended, and the stop sequence that did."""
        if self.finish_reason == "length":
            is_asked = self.usage.num_output_tokens >= self._max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded", None
        if self.finish_reason != "stop":
            return None, None
        if self.stopped_by is not None:
            return "stop_sequence", self.stopped_by
        has_calls = any(block.kind == "call" for block in self.blocks)
        return "tool_use" if has_calls else "end_turn", None

    def _event(self, kind: str, **fields: Any) -> None:
        self.put(kind, to_json({"type": kind, **fields}))


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_thought_tokens},
    }
