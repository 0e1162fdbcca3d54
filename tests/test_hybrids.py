"""Models with a state per request: goldens of transformers, and answers as their lone runs give."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.device import library
from predict.engine.step import Choices, StepTokens
from predict.errors import UserError
from predict.nn.inputs import StepInputs
from tests.support import tiny
from tests.support.adapter_folders import peft_tensors, write_peft
from tests.support.drafts import draft_always
from tests.support.gguf_models import convert
from tests.support.hybrids import (
    CASES,
    FOLDER,
    GOLDEN,
    GREEDY,
    LOGITS,
    PROMPTS,
    config,
    greedy,
    last_logits,
)

LOGIT_TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order
SMALL_STEPS = {"max_num_batched_tokens": 37, "batch_size": 2}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_text_equal_transformers(case: str, operators: dict[str, Any]) -> None:
    llm = LLM(config(case, **operators))
    wanted = LOGITS[f"{case}/logits"]
    found = last_logits(llm, PROMPTS)
    np.testing.assert_allclose(found, wanted, atol=LOGIT_TOLERANCE * np.abs(wanted).max(), rtol=0)
    assert greedy(llm, PROMPTS) == GOLDEN[case]
    assert llm.stats().num_prefix_hit_tokens == 0
    assert greedy(llm, PROMPTS) == GOLDEN[case]
    assert llm.stats().num_prefix_hit_tokens == 64 + 192  # of 65, and of 200 tokens


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "lfm2"])
@pytest.mark.parametrize(
    "changes", [SMALL_STEPS, {"attention": "block"}, {"attention": "reserved"}]
)
def test_how_steps_are_cut_changes_nothing(
    case: str, changes: dict[str, Any], compiled: library.Library
) -> None:
    llm = LLM(config(case, **changes))
    for _ in range(2):
        assert greedy(llm, PROMPTS) == GOLDEN[case]


@pytest.mark.parametrize("method", ["lookahead", "draft_model"])
def test_drafts_change_no_token(method: str, compiled: library.Library, tmp_path: Path) -> None:
    """Where some are rejected, what stands is computed again from the state before them."""
    case = "qwen3_5_text"
    settings: dict[str, Any] = {"speculate_max_ngram_size": 3}
    if method == "draft_model":
        draft = tiny.write(tmp_path / "draft", {"vocab_size": 96, "max_position_embeddings": 512})
        settings = {"draft_model_name_or_path": str(draft)}
    llm = LLM(
        config(
            case,
            speculate_method=method,
            speculate_max_draft_token_num=4,
            **SMALL_STEPS,
            **settings,
        )
    )
    draft_always(llm)
    for _ in range(2):
        assert greedy(llm, PROMPTS) == GOLDEN[case]
    stats = llm.stats()
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens
    assert stats.num_prefix_hit_tokens > 0


def spoil(tensor: Any, slots: Any) -> None:
    """Fills slots of states with NaN, in place."""
    import paddle

    values = tensor.numpy()
    values[slots] = np.nan
    tensor.copy_(paddle.to_tensor(values), True)


@pytest.mark.parametrize("case", ["qwen3_5_text", "lfm2_biases"])
def test_what_released_slots_hold_reaches_no_answer(case: str, operators: dict[str, Any]) -> None:
    llm = LLM(config(case, **operators, **SMALL_STEPS))
    states = [
        tensor
        for cache, kept in zip(llm.parts.caches, llm.spec.states, strict=True)
        for tensor in cache
        if kept
    ]
    for tensor in states:
        spoil(tensor, slice(None))
    assert greedy(llm, PROMPTS[:4]) == GOLDEN[case][:4]
    slots = llm.engine.scheduler._states
    kept = set(slots._kept.values())
    for tensor in states:
        spoil(tensor, [slot for slot in range(tensor.shape[0]) if slot not in kept])
    assert greedy(llm, PROMPTS[:4]) == GOLDEN[case][:4]
    assert llm.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("case", ["qwen3_5_text", "lfm2"])
def test_a_step_that_fails_runs_again_from_the_state_before_it(
    case: str, compiled: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(config(case, **SMALL_STEPS))
    runner, launch, calls = llm.engine.runner, llm.engine.runner.launch, iter(range(1000))

    def failing(inputs: StepInputs, choices: Choices) -> StepTokens:
        made = launch(inputs, choices)  # states are written
        if next(calls) % 4 == 1:
            raise RuntimeError("a fault")
        return made

    monkeypatch.setattr(runner, "launch", failing)
    assert greedy(llm, PROMPTS) == GOLDEN[case]


@pytest.mark.parametrize("case", ["qwen3_5_text", "lfm2"])
def test_random_traffic_gives_each_its_lone_answer(case: str, compiled: library.Library) -> None:
    """Arrivals, aborts, preemptions, hits and evictions; beams beside."""
    rng = random.Random(3)
    texts = [[rng.randrange(96) for _ in range(150)] for _ in range(3)]
    prompts = [
        [*rng.choice(texts)[: rng.randint(1, 150)], *rng.choices(range(96), k=rng.randint(0, 20))]
        for _ in range(24)
    ]
    params = [
        SamplingParams(
            max_new_tokens=rng.randint(1, 12 if index % 6 == 5 else 60),
            num_beams=3 if index % 6 == 5 else 1,
            temperature=0.0,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    lone = LLM(config(case, batch_size=3, prefix_caching=False))
    wanted = [
        list(lone.generate([p], s)[0].token_ids) for p, s in zip(prompts, params, strict=True)
    ]
    budget = 5 * lone.spec.state_bytes
    llm = LLM(
        config(
            *(case,),
            batch_size=4,
            num_cache_blocks=15,
            block_size=16,
            max_num_batched_tokens=50,
            prefix_cache_state_budget=budget,
        )
    )
    samples = [llm.samples(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    requests = [sample.requests[0] for sample in samples]
    engine, waiting, running, aborted = llm.engine, list(requests), [], set()
    while waiting or engine.scheduler.has_unfinished():
        for _ in range(rng.randint(0, 3)):
            if waiting:
                running.append(waiting.pop(0))
                engine.add(running[-1])
        if running and rng.random() < 0.03:
            gone = rng.choice(running)
            if engine.abort(gone.request_id) is not None:
                aborted.add(gone.request_id)
        if engine.scheduler.has_unfinished():
            engine.step()
        engine.scheduler.check()
    for request, answer in zip(requests, wanted, strict=True):
        if request.request_id not in aborted:
            assert request.output_token_ids == answer
    stats = llm.stats()
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "gpu"}, "--device gpu|GPU|gpu"),
        ({"tensor_parallel_degree": 3}, "2 key heads of states do not divide among 3 ranks"),
        ({"pooling": "mean"}, "--pooling mean"),
        (
            {"prefix_cache_state_budget": 9, "attention": "reserved"},
            "prefix_cache_state_budget 9 is for",
        ),
        ({"prefix_cache_state_budget": 1 << 49}, "the states of requests do not fit"),
    ],
)
def test_what_it_does_not_run_with_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        LLM(config("qwen3_next", **changes))


LORA: dict[str, dict[str, tuple[int, int]]] = {  # outputs and inputs
    "qwen3_5_text": {
        "layers.3.self_attn.q_proj": (128, 32),  # queries and gates
        "layers.3.self_attn.o_proj": (32, 64),
        "layers.0.mlp.down_proj": (32, 48),
        "layers.0.linear_attn.in_proj_qkv": (112, 32),
        "layers.1.linear_attn.in_proj_z": (48, 32),
        "layers.1.linear_attn.in_proj_b": (2, 32),
        "layers.2.linear_attn.in_proj_a": (2, 32),
        "layers.2.linear_attn.out_proj": (32, 48),
    },
    "qwen3_next": {
        "layers.0.linear_attn.in_proj_qkvz": (96, 32),
        "layers.1.linear_attn.in_proj_ba": (8, 32),
        "layers.2.linear_attn.out_proj": (32, 32),
    },
    "lfm2": {"layers.0.conv.in_proj": (96, 32), "layers.1.conv.out_proj": (32, 32)},
}


def lora(folder: Path, sizes: dict[str, tuple[int, int]]) -> str:
    generator = np.random.default_rng(0)
    pairs = {
        f"model.{name}": tuple(
            generator.standard_normal(shape, np.float32) for shape in ((4, columns), (rows, 4))
        )
        for name, (rows, columns) in sizes.items()
    }
    return str(write_peft(folder, peft_tensors(pairs)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "operators"),
    [
        ("qwen3_5_text", "reference"),
        ("qwen3_5_text", "fused"),
        ("qwen3_next", "fused"),
        ("lfm2", "fused"),
    ],
    indirect=["operators"],
)
def test_adapters_of_requests_answer_as_merged_ones(
    case: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    path = lora(tmp_path / "lora", LORA[case])
    served = LLM(config(case, lora_modules=(f"a={path}",), **operators))
    merged = LLM(config(case, lora_path=path, **operators))
    params = replace(GREEDY, max_new_tokens=6)
    wanted = greedy(merged, PROMPTS[:4], params)
    assert greedy(served, PROMPTS[:4], replace(params, adapter="a")) == wanted
    plain = greedy(served, PROMPTS[:4], params)
    assert plain == [answer[:6] for answer in GOLDEN[case][:4]] != wanted


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_text", "lfm2_biases"])
def test_an_exported_program_gives_the_same_text_and_logits(
    case: str, compiled: library.Library, tmp_path: Path
) -> None:
    export_model(config(case, inference_model=True), tmp_path / "out")
    llm = LLM(config(tmp_path / "out", mode="static", **SMALL_STEPS))
    wanted = LOGITS[f"{case}/logits"]
    found = last_logits(llm, PROMPTS)
    np.testing.assert_allclose(found, wanted, atol=LOGIT_TOLERANCE * np.abs(wanted).max(), rtol=0)
    for _ in range(2):
        assert greedy(llm, PROMPTS) == GOLDEN[case]
    assert llm.stats().num_prefix_hit_tokens > 0


def test_no_program_is_made_of_plain_operators(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"qwen3_next keeps a state .*--mode static"):
        export_model(config("qwen3_next", inference_model=False), tmp_path / "out")


@pytest.mark.parametrize(
    "case", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"]
)
def test_gguf_files_give_the_same_text_and_logits(
    case: str, compiled: library.Library, tmp_path: Path
) -> None:
    """Value heads of a qwen35moe file lie tiled."""
    llm = LLM(config(convert(FOLDER / case, tmp_path / "x.gguf")))
    wanted = LOGITS[f"{case}/logits"]
    found = last_logits(llm, PROMPTS)
    np.testing.assert_allclose(found, wanted, atol=LOGIT_TOLERANCE * np.abs(wanted).max(), rtol=0)
    assert greedy(llm, PROMPTS) == GOLDEN[case]


@pytest.mark.parametrize(
    ("case", "name", "size"),
    [
        ("qwen3_next", "in_proj_ba", (8, 32)),  # rows key head by key head, and not in the file
        ("qwen3_5_moe_text", "in_proj_b", (4, 32)),  # tiled
    ],
)
@pytest.mark.parametrize("way", ["lora_path", "lora_modules"])
def test_no_adapter_changes_heads_that_a_gguf_file_has_in_another_order(
    case: str, name: str, size: tuple[int, int], way: str, compiled: library.Library, tmp_path: Path
) -> None:
    path = lora(tmp_path / "lora", {f"layers.1.linear_attn.{name}": size})
    given: Any = path if way == "lora_path" else (f"a={path}",)
    model = convert(FOLDER / case, tmp_path / "x.gguf")
    with pytest.raises(UserError, match=f"linear_attn.{name}, whose heads a GGUF file has in"):
        LLM(config(model, **{way: given}))


def test_no_prefix_comes_while_it_runs(compiled: library.Library, tmp_path: Path) -> None:
    np.save(path := tmp_path / "pre_caches.npy", np.ones((1, 2, 2, 3, 16), np.float32))
    llm = LLM(config("qwen3_5_text", allow_adapter_updates=True))
    with pytest.raises(UserError, match="qwen3_5_text keeps something else"):
        llm.load_prefix("tuned", path)
    llm.engine.scheduler.check()


def test_no_vectors_are_made_of_it(compiled: library.Library) -> None:
    with pytest.raises(UserError, match="vectors and scores"):
        LLM(config("lfm2")).embed([[1, 2, 3]])


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {"output_gate_type": "tanh"}, "'output_gate_type' is 'tanh'"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "'layer_types'.*4 of linear"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "one of full_attention"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "do not go together"),
        ("qwen3_next", {"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype'"),
        ("lfm2", {"conv_L_cache": 1}, "'conv_L_cache'"),
    ],
)
def test_what_contradicts_is_refused(
    case: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(FOLDER / case, tmp_path / case))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=says):
        LLM(config(folder))


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4", "a8w8"])
def test_gates_and_convolutions_stay_unrounded(
    case: str, scheme: str, compiled: library.Library
) -> None:
    changes = {"quant_type": scheme, "weightonly_group_size": -1}
    fused = LLM(config(case, **changes))
    assert fused.decoder is not None
    block = next(weights for weights in fused.decoder.blocks() if weights.block.states)
    rounded = {name for name, linear in block.linears().items() if linear.scheme != "dense"}
    assert rounded == {*block.linears()} - {"ba"}
    wanted = last_logits(LLM(config(case, inference_model=False, **changes)), PROMPTS)
    found = last_logits(fused, PROMPTS)
    np.testing.assert_allclose(found, wanted, atol=0.05 * np.abs(wanted).max(), rtol=0)
    assert greedy(fused, PROMPTS[:3], GREEDY) == greedy(fused, PROMPTS[:3], GREEDY)
