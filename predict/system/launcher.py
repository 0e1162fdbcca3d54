"""What Paddle's launcher says to each process that it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from predict.errors import UserError

NUM, ID, HOSTS = "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "PADDLE_NNODES"


def num_launched(environ: Mapping[str, str] = os.environ) -> int:
    """Processes that the launcher has started; 1 where it has not started this one."""
    num, number = (environ.get(name, "") for name in (NUM, ID))
    return max(int(num), 1) if num.isdecimal() and number.isdecimal() else 1


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Raises UserError in each of several processes: one run is started once."""
    if (num := num_launched(environ)) > 1:
        raise UserError(
            f"the launcher started {num} processes ({NUM}), and each would load a whole model; "
            f"start the script without it: tensor_parallel_degree={num} starts the processes of "
            f"one model itself. For {num} models, take {NUM} out of the environment"
        )
