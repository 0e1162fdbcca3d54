"""Adapters merged on their way to a GPU: their linears by way of the host, the others as stored."""

from __future__ import annotations

import pytest

from predict import LLM
from predict.device import devices
from tests.support.adapter_folders import ADAPTERS, golden
from tests.support.golden import config, greedy
from tests.support.gpu_engines import SETTINGS


@pytest.mark.parametrize("case", ["llama_patterns", "llama_dora", "tied_head", "gpt2", "mixtral"])
def test_merged_adapter_gives_the_text_of_peft(gpu: devices.Device, case: str) -> None:
    wanted = golden(case)
    settings = config(wanted["base"], lora_path=str(ADAPTERS / case), max_length=144, **SETTINGS)
    assert greedy(LLM(settings), wanted["prompts"], len(wanted["greedy"][0])) == wanted["greedy"]
