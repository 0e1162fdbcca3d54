"""The Responses API: its answers, as events and as objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from predict.request import SamplingParams
from predict.server.answer_blocks import Block, BlockEvents, Kind, sealed
from predict.server.answers import to_json
from predict.server.context import Context
from predict.server.errors import ApiError
from predict.server.responses import SEALED, ResponsesBody, new_id
from predict.server.runs import Usage
from predict.server.turns import Ready

# finish_reason -> status of the answer.
_STATUS: Mapping[str | None, str] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
    None: "cancelled",
}
# Of each kind of block: the event of its pieces, and what else that has.
_DELTAS: Mapping[Kind, tuple[str, dict[str, Any]]] = {
    "text": ("response.output_text", {"content_index": 0, "logprobs": []}),
    "thought": ("response.reasoning_text", {"content_index": 0}),
    "call": ("response.function_call_arguments", {}),
}


class ResponseEvents(BlockEvents):
    """An answer as the Responses API streams it; `response` is the object as it is so far."""

    def __init__(
        self,
        context: Context,
        ready: Ready,
        body: ResponsesBody,
        is_stored: bool,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """changed: called when the answer has begun, and when it has ended."""
        super().__init__(context, ready.make_reader(), ready.job.usage)
        self.response = _begun(ready.model, ready.job.params, body, is_stored)
        self.changed = changed
        self._is_sealed = SEALED in (body.include or ())
        self._num_events = 0
        self._ids: dict[int, str] = {}  # of blocks

    def begin(self) -> None:
        self._event("response.created", response=self.response)
        self.response["status"] = "in_progress"
        self._event("response.in_progress", response=self.response)
        self.changed()

    def block_begins(self, block: Block) -> None:
        prefix = {"text": "msg", "thought": "rs", "call": "fc"}[block.kind]
        self._ids[block.index] = new_id(prefix)
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            self._part_event("added", block)
        kind, more = _DELTAS[block.kind]
        fields = {"type": f"{kind}.delta", **self._place(block), **more}
        block.head = to_json(fields)[:-1] + b',"delta":'

    def block_grows(self, block: Block, text: str) -> None:
        kind, _ = _DELTAS[block.kind]
        number = self._next_number()
        self.put(
            f"{kind}.delta", b'%s%s,"sequence_number":%d}' % (block.head, to_json(text), number)
        )

    def block_ends(self, block: Block) -> None:
        kind, more = _DELTAS[block.kind]
        name = "arguments" if block.kind == "call" else "text"
        said = {name: block.text, **({"name": block.name} if block.kind == "call" else {})}
        self._event(f"{kind}.done", **self._place(block), **more, **said)
        if block.kind != "call":
            self._part_event("done", block)
        is_whole = self.finish_reason in (None, "stop")
        item = self._item(block, "completed" if is_whole else "incomplete")
        self.response["output"].append(item)
        self._event("response.output_item.done", output_index=block.index, item=item)

    def end(self) -> None:
        self._ended(_STATUS[self.finish_reason])

    def fail(self, error: ApiError) -> bytes:
        self.opened()
        kind = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response["error"] = {"code": kind, "message": error.message}
        self._ended("failed")
        return self.taken()

    def _ended(self, status: str) -> None:
        response = self.response
        response["status"] = status
        response["usage"] = _usage_fields(self.usage)
        if status == "completed":
            response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status != "cancelled":  # whoever cancels has gone, or asks for the object
            self._event(f"response.{status}", response=response)
        self.changed()

    def _event(self, kind: str, **fields: Any) -> None:
        number = self._next_number()
        self.put(kind, to_json({"type": kind, **fields, "sequence_number": number}))

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._ids[block.index], "output_index": block.index}

    def _part_event(self, kind: str, block: Block) -> None:
        place = {**self._place(block), "content_index": 0}
        self._event(f"response.content_part.{kind}", **place, part=_part(block))

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._ids[block.index]}
        if block.kind == "text":
            item.update(type="message", role="assistant", content=[_part(block)])
        elif block.kind == "call":
            item.update(type="function_call", call_id=block.id, name=block.name)
            item["arguments"] = block.text
        else:
            item.update(type="reasoning", summary=[], content=[_part(block)])
            if self._is_sealed:
                item["encrypted_content"] = sealed(block.text)
        return {**item, "status": status}


def _part(block: Block) -> dict[str, Any]:
    """The content of a text or a thought."""
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage_fields(usage: Usage) -> dict[str, Any]:
    counts = (usage.num_prompt_tokens, usage.num_output_tokens)
    return {
        "input_tokens": counts[0],
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": counts[1],
        "output_tokens_details": {"reasoning_tokens": usage.num_thought_tokens},
        "total_tokens": sum(counts),
    }


def _begun(
    model: str, params: SamplingParams, body: ResponsesBody, is_stored: bool
) -> dict[str, Any]:
    """The object of an answer that has not begun."""
    given = body.model_dump(
        include={"reasoning", "text", "tools"}, exclude_none=True, by_alias=True
    )
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        "service_tier": "default",
        "store": is_stored,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_tool(tool) for tool in given.get("tools", ())],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": False, **tool}
