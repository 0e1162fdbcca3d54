"""Limits of a step and of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from predict.system.options import Checked, option
from predict.system.ranges import BATCH, LENGTH, MAX_LENGTH, SECONDS, Range

DEFAULT_MAX_LENGTH = 2048
CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET = 512, 8192


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig(Checked):
    """Limits of a step and of a sequence. Raises UserError for other values."""

    # fmt: off
    batch_size: int = option(1,
        "Sequences decoded together; a finished one is replaced at once.",
        group="Lengths and batch", allowed=BATCH)
    src_length: int = option(1024,
        "Longest prompt in tokens; a longer one keeps its first src_length tokens, with a warning.",
        allowed=LENGTH)
    max_length: int | None = option(None,
        "Longest sequence in tokens, prompt and output together; at most the exported model's in "
        "static mode. When not given, 2048, or the learned positions of a model that has fewer.",
        allowed=Range(2, MAX_LENGTH), flag_default=DEFAULT_MAX_LENGTH)
    max_num_batched_tokens: int | None = option(None,
        "Tokens computed per step; when not given, 512 on the CPU and 8192 on a GPU.",
        allowed=LENGTH)
    priority_aging: float = option(60.0,
        "Seconds of waiting that make up for one of a request's priority: with 60, a request of "
        "priority 1 goes before one of priority 0 that comes a minute later.",
        allowed=SECONDS)
    chunked_prefill: bool = option(True,
        "Split long prompts over several steps, so that decoding neighbours do not wait.",
        group="Operators and cache")
    # fmt: on

    def token_budget(self, device: str) -> int:
        """Tokens per step: every decoding sequence gets one, the rest goes to prompts.

        The default keeps GEMMs large enough to be bound by arithmetic and short enough that a
        decoding neighbour does not wait for a whole long prompt.
        """
        from predict.device.devices import kind_of  # slow, and --help needs none

        if self.max_num_batched_tokens is not None:
            return max(self.max_num_batched_tokens, self.batch_size)
        if not self.chunked_prefill:
            return self.max_length or DEFAULT_MAX_LENGTH
        default = GPU_TOKEN_BUDGET if kind_of(device) == "gpu" else CPU_TOKEN_BUDGET
        return max(default, self.batch_size)
