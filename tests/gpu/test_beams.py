"""Beam search on the GPU: transformers' goldens, and its operators against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.ops import compiled as ops
from tests.support.beams import check_all, check_neighbours
from tests.support.golden import config, golden
from tests.support.gpu_engines import FORMS, SETTINGS
from tests.support.gpu_operands import Operands


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["llama_gqa", "mistral_window"])
def test_searches_find_what_transformers_finds(gpu: devices.Device, case: str, form: str) -> None:
    check_all(FORMS[form](LLM(config(case, batch_size=16, block_size=16, **SETTINGS))), case)


def test_preempted_searches_find_the_same(gpu: devices.Device) -> None:
    llm = LLM(config("llama_gqa", batch_size=20, block_size=16, num_cache_blocks=26, **SETTINGS))
    check_all(llm, "llama_gqa")
    assert llm.stats().num_preemptions > 0


def test_neighbours_in_the_batch_change_nothing(gpu: devices.Device) -> None:
    check_neighbours(LLM(config("llama_gqa", batch_size=12, block_size=16, **SETTINGS)))


def test_processors_change_log_probabilities_as_on_the_cpu(gpu: devices.Device) -> None:
    prompts = golden("llama_gqa")["prompts"]
    llm = LLM(config("llama_gqa", batch_size=12, block_size=16, **SETTINGS))
    first = llm.generate(prompts[:1], SamplingParams(num_beams=4, max_new_tokens=8))[0].token_ids
    params = [
        SamplingParams(num_beams=4, max_new_tokens=12, bad_words=(first[:1], first[1:3])),
        SamplingParams(num_beams=3, max_new_tokens=12, no_repeat_ngram_size=1, n=3),
        SamplingParams(num_beams=4, max_new_tokens=12, logit_bias={7: 3.0, 9: -2.5}),
        SamplingParams(num_beams=2, max_new_tokens=12, frequency_penalty=0.7, min_length=4),
        SamplingParams(num_beams=4, max_new_tokens=12, repetition_penalty=1.4, n=2),
    ]
    found = llm.generate(prompts, params)
    devices_apart = {**SETTINGS, "device": "cpu"}
    wanted = LLM(config("llama_gqa", batch_size=12, **devices_apart)).generate(prompts, params)
    for on_gpu, on_cpu in zip(found, wanted, strict=True):
        assert [each.token_ids for each in on_gpu.outputs] == [
            each.token_ids for each in on_cpu.outputs
        ]


@pytest.mark.parametrize("num_copies", [1, 7, 400])
def test_copied_blocks_are_equal_and_others_untouched(gpu: devices.Device, num_copies: int) -> None:
    operands = Operands(gpu, "float32")
    shapes = [(900, 2, 16, 20), (900, 2, 16, 2), (900, 1, 32, 8)] * 50  # over two launches
    tensors = [operands.generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    caches = [operands.placed(values) for values in tensors[:149]]
    codes = operands.generator.integers(0, 255, (900, 48)).astype(np.uint8)
    caches.append(operands.placed(codes))
    before = [cache.numpy() for cache in caches]
    order = operands.generator.permutation(900)
    copies = [(int(order[i % 300]), int(order[300 + i])) for i in range(num_copies)]
    ops.copy_blocks(caches, copies)
    for cache, expected in zip(caches, before, strict=True):
        for source, target in copies:
            expected[target] = expected[source]
        np.testing.assert_array_equal(cache.numpy(), expected)
