"""Limits of a step and of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from predict.config.checks import check_fields
from predict.device.devices import kind_of

CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET = 512, 8192


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig:
    """Limits of a step and of a sequence, in tokens but for batch_size. Raises UserError."""

    batch_size: int = 1  # sequences decoded together
    src_length: int = 1024  # tokens of the prompt
    max_length: int = 2048  # tokens of the prompt and the output together
    max_num_batched_tokens: int | None = None  # tokens per step; None: `token_budget` decides
    chunked_prefill: bool = True  # a prompt may take several steps

    def __post_init__(self) -> None:
        check_fields(self, choices={})

    def token_budget(self, device: str) -> int:
        """Tokens per step: every decoding sequence gets one, the rest goes to prompts.

        The default keeps GEMMs large enough to be bound by arithmetic and short enough that a
        decoding neighbour does not wait for a whole long prompt.
        """
        if self.max_num_batched_tokens is not None:
            return max(self.max_num_batched_tokens, self.batch_size)
        default = GPU_TOKEN_BUDGET if kind_of(device) == "gpu" else CPU_TOKEN_BUDGET
        return max(default, self.batch_size) if self.chunked_prefill else self.max_length
