"""A model that takes its process down with it: a stand-in for one that meets a fault in a kernel.

In a module of its own, which the replicas import.
"""

import os
import signal
from typing import Any

from predict import LLM
from predict.config.engine import EngineConfig
from predict.engine.samples import Samples

POISON = "regatta-poison"


class PoisonedLLM(LLM):
    """Ends the process, as kill -9 does, when it is to run a prompt with POISON in it."""

    def samples(self, prompt: Any, *arguments: Any, **settings: Any) -> Samples:
        assert self.tokenizer is not None
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        if POISON in text:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().samples(prompt, *arguments, **settings)


def poisoned_llm(config: EngineConfig) -> LLM:
    return PoisonedLLM(config)
