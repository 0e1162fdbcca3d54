"""One model over several processes of a machine: how many, and how long one may hang."""

from __future__ import annotations

from dataclasses import dataclass

from predict.errors import UserError
from predict.system.options import Checked, option
from predict.system.ranges import Range

# Of ranks, by kind; "gpu" once tests/gpu/test_ranks.py has passed on two GPUs.
DEVICES: tuple[str, ...] = ("cpu",)
RANKS = Range(1, 64)  # of kMaxRanks in csrc/include/regatta/communicator.h


@dataclass(frozen=True, kw_only=True)
class RanksConfig(Checked):
    """The ranks of one model. Raises UserError for other values."""

    # fmt: off
    tensor_parallel_degree: int = option(1,
        "Processes that run one model together, each with its part of the weights and the cache. "
        "Ranks on the CPU run; with --device gpu only 1.",
        group="Several processes", allowed=RANKS, aliases=("tensor_parallel_size",))
    expert_parallel_degree: int | None = option(None,
        "1 gives each rank a part of every expert, tensor_parallel_degree whole experts; when not "
        "given, 1.",
        allowed=RANKS)
    rank_timeout: float = option(10.0,
        "Seconds after which a rank that makes no progress ends the run; loading is progress.",
        allowed=Range(0.5, 86400, whole=False))
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        degree, experts = self.tensor_parallel_degree, self.expert_parallel_degree
        if experts not in (None, 1, degree):
            raise UserError(
                f"expert_parallel_degree {experts} is not supported with tensor_parallel_degree "
                f"{degree} (allowed: 1, which cuts each expert, or {degree}, whole experts)"
            )

    @property
    def has_whole_experts(self) -> bool:
        """Whether ranks share experts out instead of cutting each."""
        return self.tensor_parallel_degree > 1 and (self.expert_parallel_degree or 1) > 1
