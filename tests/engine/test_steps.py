"""Steps by themselves: hidden states of named layers, embeddings, and who refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.engine.runner.networks import HostNetwork, static_forward
from predict.errors import EngineError, UserError
from predict.loading.program import load_program, save_program
from tests.support.golden import config, golden
from tests.support.hidden import CASES, TAPS, check_embeddings, check_hidden, step_of

FUSED = {"inference_model": True, "attention": "append"}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LAST = golden("llama_gqa")["prompts"][-1:]


@pytest.mark.parametrize("operators", [{}, FUSED], ids=["plain", "fused"])
def test_hidden_states_of_named_layers_come_with_logits_and_without(operators: Any) -> None:
    llm = LLM(config("llama_gqa", batch_size=1, **operators))
    inputs = step_of(LAST)
    outputs = llm.engine.runner.run(inputs, TAPS)
    check_hidden("llama_gqa", outputs)
    plain = llm.engine.runner.run(inputs).logits
    assert plain is not None
    np.testing.assert_allclose(outputs.logits.numpy(), plain.numpy(), atol=1e-5)  # type: ignore[union-attr]
    silent = llm.engine.runner.run(step_of(LAST, 0, len(LAST[0])), TAPS)
    assert silent.logits is None
    check_hidden("llama_gqa", silent)
    with pytest.raises(ValueError, match=r"'layers.2' are not known \(allowed: norm, layers.0 to"):
        llm.engine.runner.run(inputs, ("layers.2",))


def test_a_program_gives_the_hidden_states_that_it_was_traced_with(tmp_path: Path) -> None:
    llm = LLM(config("llama_gqa", batch_size=1, **FUSED))
    assert llm.decoder is not None
    backend, stem = llm.platform.backend, "model"
    save_program(backend, llm.decoder, llm.spec, 32, "float32", tmp_path, stem, taps=TAPS)
    program = load_program(tmp_path, "model", llm.platform.device)
    network = HostNetwork(static_forward(program, llm.parts.caches, taps=TAPS))
    check_hidden("llama_gqa", network.run(step_of(LAST), TAPS))
    with pytest.raises(UserError, match=r"layers.1 are wanted, .* those of norm, layers.0 alone"):
        network.run(step_of(LAST), ("layers.1",))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operators", [{}, FUSED], ids=["plain", "fused"])
def test_embeddings_equal_transformers(case: str, operators: Any) -> None:
    llm = LLM(config(case, batch_size=3, max_length=128, max_num_batched_tokens=24, **operators))
    check_embeddings(case, llm)


def test_embeddings_between_the_steps_of_answers_change_neither() -> None:
    llm = LLM(config("llama_gqa", batch_size=2, **FUSED))
    prompts = golden("llama_gqa")["prompts"][:2]
    alone, wanted = llm.embed(prompts), llm.generate(prompts, GREEDY)
    pieces: list[list[int]] = [[], []]
    for piece in llm.stream(prompts, GREEDY):
        pieces[piece.prompt_index] += piece.token_ids
        np.testing.assert_array_equal(llm.embed(prompts), alone)
    assert pieces == [list(output.token_ids) for output in wanted]


def test_what_cannot_be_embedded_is_refused_and_holds_no_block(tmp_path: Path) -> None:
    llm = LLM(config("llama_gqa", batch_size=1, max_length=64, **FUSED))
    asked: Any = llm.embed
    for prompts, pooling, said in (
        ([[5]], "first", r"pooling is 'first' \(allowed: cls, max"),
        ([], "last", "prompts is empty"),
        ([[5], [6] * 65], "last", r"prompt 1 has 65 tokens \(allowed: 1 to 64"),
    ):
        with pytest.raises(UserError, match=said):
            asked(prompts, pooling)
    held = llm.engine.scheduler.block_manager.allocate(1)
    while llm.engine.scheduler.block_manager.num_free_blocks:
        held += llm.engine.scheduler.block_manager.allocate(1)
    with pytest.raises(UserError, match="needs 1 blocks of the cache, and 0 are free"):
        asked([[5]])
    llm.engine.scheduler.block_manager.free(held)
    assert llm.stats().num_used_blocks == 0


def test_hidden_states_that_are_no_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(config("llama_gqa", batch_size=2, **FUSED))
    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    run = network.run

    def broken(inputs: Any, taps: Any) -> Any:
        outputs = run(inputs, taps)
        outputs.hidden["norm"][-1] = float("nan")
        return outputs

    monkeypatch.setattr(network, "run", broken)
    with pytest.raises(EngineError, match="prompt 1 has hidden states that are no finite numbers"):
        llm.embed([[5, 6], [7]])
    assert llm.stats().num_used_blocks == 0
