"""Whose fault a failing step is: one request's, which then ends alone, or the engine's.

What fails for one request is found where its own work is done (RequestError), or by running the
requests of a call apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from predict.engine.request_state import Request
from predict.errors import UserError

T = TypeVar("T")

# What a module, or a function of it, does for a request.
STAGES: dict[str | tuple[str, str], str] = {
    "predict.text.tokenizer": "detokenize",
    "predict.text.answer_text": "detokenize",
    "predict.text.guides": "guide",
    "predict.text.detokenizer": "detokenize",
    "predict.text.stop_strings": "detokenize",
    "predict.engine.batch": "schedule",
    "predict.engine.beams": "beams",
    "predict.engine.block_manager": "schedule",
    "predict.engine.gpu_beams": "beams",
    "predict.engine.gpu_runner": "forward",
    ("predict.engine.gpu_runner", "_choose"): "sample",
    ("predict.engine.gpu_runner", "_measure"): "logprobs",
    ("predict.engine.gpu_runner", "_write_wanted"): "sample",
    ("predict.engine.gpu_runner", "write_choices"): "sample",
    "predict.engine.logits_processors": "adjust",
    "predict.engine.logprobs": "logprobs",
    "predict.engine.runner": "forward",
    "predict.engine.sampler": "sample",
    ("predict.engine.sampler", "_adjusted"): "adjust",
    ("predict.engine.sampler", "_adjustment"): "adjust",
    "predict.engine.scheduler": "schedule",
    ("predict.engine.engine", "_record_logprobs"): "logprobs",
    ("predict.engine.engine", "_stand"): "verify",
    "predict.engine.stopping": "schedule",
    "predict.engine.token_history": "adjust",
    "predict.engine.samples": "detokenize",
    "predict.speculative": "verify",
    "predict.speculative.draft_model": "draft",
    "predict.speculative.inference_with_reference": "draft",
    "predict.speculative.lookahead": "draft",
    "predict.engine.draft_policy": "draft",
    "predict.engine.window": "verify",
}


class RequestError(Exception):
    """One request's part of a call failed; its cause says how."""

    def __init__(self, request: Request):
        super().__init__(f"request {request.request_id}")
        self.request = request


def stage_of(error: BaseException) -> str:
    """What was being done for a request when `error` came: the innermost of STAGES."""
    stage, entry = "step", error.__traceback__
    while entry is not None:
        code = entry.tb_frame
        module = code.f_globals.get("__name__", "")
        stage = STAGES.get((module, code.f_code.co_name), STAGES.get(module, stage))
        # A draft model's steps are the drafts' business, whatever they do.
        if stage == "draft":
            break
        entry = entry.tb_next
    return stage


def explained(request: Request, error: BaseException) -> str:
    """What went wrong with a request, and in which stage."""
    if isinstance(error, RequestError) and error.__cause__ is not None:
        error = error.__cause__
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    words = " ".join(str(error).split()) or "no further detail"
    return f"request {request.owner.request_id} failed in stage {stage_of(error)}: {kind}{words}"


def apart(
    items: Sequence[T], call: Callable[[Sequence[T]], None], failed: Callable[[T, Exception], None]
) -> None:
    """Calls `call` with all items, and where it raises with half of them each, and so on.

    failed: takes what raises alone.
    """
    try:
        call(items)
    except Exception as error:
        if len(items) == 1:
            failed(items[0], error)
            return
        middle = len(items) // 2
        apart(items[:middle], call, failed)
        apart(items[middle:], call, failed)
