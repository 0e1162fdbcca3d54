"""Streams, graphs and late execution over a GPU of ordinary memory, whose operators are the CPU's.

Kernels, and what csrc/cuda makes of them, are tested on a GPU alone: pytest tests/gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import build
from tests.fake_gpu import chosen
from tests.support.paths import ROOT

# Tests of tests/gpu, by file: one of each kind that depends on an order of work. What is new joins
# here when a stream, a graph, a copy or memory that the device writes is new in it.
SMOKE: dict[str, tuple[str, ...]] = {
    "device": (
        "tensor_comes_back_as_it_went",
        "paddle_kernels_fall_back_to_the_cpu_and_return",
        "views_are_read_and_written_by_their_strides",
        "view_can_be_captured",
        "operator_runs_on_the_tensors_device",
        "operator_refuses_tensors_of_two_devices",
        "allocations_never_overlap",
        "memory_statistics_follow_tensors",
        "pinned_copies_keep_their_order",
        "copy_of_another_size_is_refused",
        "graph_replay_equals_eager",
        "graph_memory_is_not_given_to_later_tensors",
        "graph_updates_a_cache_in_place",
        "capture_of_a_cpu_fallback_is_refused_and_harmless",
        "exported_program_equals_dynamic_and_replays",
        "peer_copies_arrive",
        "cuda_library_holds_the_cpu_operators_too",
    ),
    "adapters": (
        "ids_of_rows_are_taken",
        "a_mixed_batch_gives_each_what_it_has_alone[bfloat16-None]",
        "batches_with_and_without_adapters_have_graphs_of_their_own",
        "a_program_answers_as_the_dynamic_model[bfloat16-weight_only_int4]",
        "drafts_change_no_answer_of_a_family[deepseek_v2_lite]",
    ),
    "beams": ("neighbours_in_the_batch_change_nothing", "preempted_searches_find_the_same"),
    "draft_model": (
        "text_is_the_same_with_a_draft_model[preempted]",
        "goldens_with_drafts_of_other_families[qwen2-static]",
        "the_host_waits_once_per_step_and_the_device_for_nothing",
        "drafts_that_cannot_be_drawn_change_nothing",
        "aborts_amid_drafts_lose_no_block_and_change_no_text",
    ),
    "drafts": (
        "logits_of_drafts_equal_numpy[EAGLE-3 of SafeAILab]",
        "text_with_drafts_is_the_text_without[eagle-state-graph]",
        "text_with_drafts_is_the_text_without[medusa-state-graph]",
    ),
    "engine": (
        "greedy_text_equals_transformers[llama_gqa-graph]",
        "greedy_text_equals_transformers[gpt_oss_20b-eager]",
        "greedy_text_equals_transformers[qwen2_moe_a2_7b-static]",
        "batch_composition_changes_nothing[qwen2-tiny chunks]",
        "half_precision_graphs_equal_eager_steps",
        "penalties_see_the_drafts_before_their_row[everything]",
        "a_request_with_many_rules_joins_recorded_graphs",
        "sampling_repeats_with_its_seed",
        "logprobs_equal_those_of_the_cpu[changes2]",
        "rows_without_numbers_end_their_request_alone",
    ),
    "experts": ("graph_replay_equals_eager",),
    "guides": ("guided_tokens_equal_those_of_the_cpu[graph]", "the_network_runs_ahead_of_masks"),
    "images": (
        "operators_of_pictures_equal_the_cpus[bfloat16]",
        "towers_and_text_equal_transformers[qwen2_5_vl]",
    ),
    "isolation": ("a_device_on_which_nothing_runs_ends_all",),
    "kv_formats": (
        "text_is_that_of_the_cpu[dynamic-graph]",
        "batch_composition_changes_no_text[int4-preemption]",
        "half_precision_graphs_equal_eager_steps[static-bfloat16]",
    ),
    "latent": ("engine_gives_the_same_text_with_long_spans[deepseek_v3-append]",),
    "memory": ("what_cannot_fit_is_refused_before_it_is_made",),
    "prefixes": ("answers_equal_attention_over_prefix_and_prompt[llama_gqa, 5 tokens-graph]",),
    "ranks": (
        "choices_are_those_of_one_gpu",
        "greedy_tokens_are_found_without_the_logits_of_all",
        "a_program_of_each_rank_answers_as_transformers",
        "drafts_and_text_are_those_of_one_gpu[eagle]",
        "a_killed_rank_ends_all_in_time[1]",
        "gpus_that_cannot_be_ranks_together_are_refused_by_name",
    ),
    "resting": (
        "the_same_tokens_before_and_after[changes1-1]",
        "memory_goes_back_to_the_driver",
    ),
    "rounding": (
        "checkpoints_are_rounded_by_the_gpu[weight_only_int8-bfloat16]",
        "random_weights_are_made_and_rounded_on_the_gpu",
    ),
    "steps": (
        "embeddings_equal_transformers[gpt2_small]",
        "hidden_states_of_named_layers_are_transformers[graph]",
        "rows_of_any_dtype_reach_graphs",
        "graphs_that_make_room_for_others_change_no_text",
    ),
    "schemes": ("exported_programs_give_the_same_tokens[weight_only_int4 group]",),
    "sparse_caches": ("logits_and_tokens_are_numpys[AEAEAE-graph]",),
    "traffic": ("second_gpu_answers_as_the_first", "engines_on_two_gpus_take_turns"),
    "twins": ("resolve_tokens", "follow_drafts", "sample_step", "adjust_logits[199-2]"),
    "vectors": ("texts_ride_in_the_steps_of_answers_and_neither_changes[graph]",),
    "speculative": ("text_of_a_few_prompts_is_the_same",),
    "window": ("drafts_that_the_device_alone_knows_stand_as_on_the_cpu[follows]",),
}
TESTS = [
    f"tests/gpu/test_{file}.py::test_{name}" for file, names in SMOKE.items() for name in names
]


def test_the_smoke_of_the_gpus_tests_passes(fake_gpu: Path) -> None:
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(build.CSRC)])
    # Late: queued work runs when somebody waits for it.
    environment |= {chosen.ENVIRONMENT: str(fake_gpu), "FAKE_CUDA_LATE": "1"}

    # One core: threads that wait for one another on cores that others use take twice the time.
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        process = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    finally:
        os.sched_setaffinity(0, cores)
    assert process.returncode == 0, process.stdout[-8000:]
