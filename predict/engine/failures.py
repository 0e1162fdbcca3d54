"""Which request makes a step fail; it then ends alone.

A request that fails in its own work is known at once (RequestError); others are found by running
the requests of a call apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from predict.engine.request_state import Request
from predict.errors import EngineError, UserError

T = TypeVar("T")

# Stages of a request, by the modules and functions ("module:name") that do their work.
_WORK = {
    "detokenize": "text.tokenizer text.answer_text text.answer_parts text.detokenizer "
    "text.stop_strings text.markup text.reasoning engine.samples",
    "guide": "text.guides",
    "schedule": "engine.admission engine.appending engine.batch engine.block_manager engine.queue "
    "engine.resources engine.scheduled engine.scheduler engine.searches engine.stopping",
    "beams": "engine.beams engine.runner.gpu_chooser:find",
    "forward": "engine.runner.networks engine.runner.gpu engine.runner.gpu_network "
    "engine.runner.graphs engine.runner.buffers",
    "sample": "engine.sampler engine.runner.host_chooser engine.runner.gpu_chooser",
    "logprobs": "engine.logprobs engine.runner.gpu_chooser:measure engine.engine:_record_logprobs",
    "adjust": "engine.logits_processors engine.token_history engine.runner.host_chooser:_apply "
    "engine.sampler:_adjusted engine.sampler:_adjusted_row engine.sampler:_adjustment",
    "verify": "speculative engine.window engine.speculation:_accepted",
    "draft": "speculative._chain speculative.draft_model speculative.inference_with_reference "
    "speculative.lookahead speculative.medusa nn.drafters "
    "engine.draft_policy engine.guesses",
}
STAGES = {f"predict.{place}": stage for stage, text in _WORK.items() for place in text.split()}


class RequestError(Exception):
    """One request's part of a call failed; its cause says how."""

    def __init__(self, request: Request):
        super().__init__(f"request {request.request_id}")
        self.request = request


def stage_of(error: BaseException) -> str:
    """The innermost of STAGES in the traceback of `error`."""
    stage, entry = "step", error.__traceback__
    while entry is not None:
        code = entry.tb_frame
        module = code.f_globals.get("__name__", "")
        stage = STAGES.get(f"{module}:{code.f_code.co_name}", STAGES.get(module, stage))
        # Everything that a draft model's step calls belongs to the drafts.
        if stage == "draft":
            break
        entry = entry.tb_next
    return stage


def explained(request: Request, error: BaseException) -> str:
    """The message of a request's error: its stage and its cause."""
    if isinstance(error, RequestError) and error.__cause__ is not None:
        error = error.__cause__
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    words = " ".join(str(error).split()) or "no further detail"
    return f"request {request.owner.request_id} failed in stage {stage_of(error)}: {kind}{words}"


def device_failure(when: str, error: Exception) -> EngineError:
    """What ends the engine where its device fails."""
    return EngineError(f"the device failed {when}: {type(error).__name__}: {error}")


def apart(
    items: Sequence[T], call: Callable[[Sequence[T]], None], failed: Callable[[T, Exception], None]
) -> None:
    """Calls `call` with all items; where it raises, with each half of them, and so on.

    failed: called with each single item for which `call` raises.
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
