"""What `pytest --quick` runs: of every room the tests that say most in a second.

Whole files where they need no model, single tests of the others; within 90 s on two cores. Every
room of tests has a row, unless it takes minutes or needs a GPU (tests/house/test_ci.py).
"""

from __future__ import annotations

GOLDEN = "tests/test_golden.py::test_text_and_logits_equal_transformers"
KILLED = "tests/hostile/test_kill.py::test_answers_are_kept_and_a_resumed_run_ends_with_the_same"

QUICK = (
    "tests/adapters/test_pool.py",
    "tests/bench/test_compare.py",
    "tests/cli/test_data.py",
    "tests/config/test_config.py",
    "tests/csrc/test_source_architectures.py",
    "tests/device/test_library.py",
    "tests/docs/test_docs.py::test_links_to_files_lead_somewhere",
    "tests/docs/test_docs.py::test_paths_in_pages_exist",
    "tests/engine/test_batch.py",
    "tests/engine/test_block_manager.py",
    "tests/engine/test_sampler.py",
    "tests/engine/test_scheduler.py",
    "tests/engine/test_window.py",
    "tests/gguf/test_reader.py",
    f"{KILLED}_bytes[SIGKILL-0.6]",
    "tests/house/test_no_code_from_files.py",
    "tests/images/test_opening.py",
    "tests/loading/test_checkpoint.py",
    "tests/loading/test_pdparams.py",
    "tests/nn/test_config_fields.py",
    "tests/nn/test_inputs.py",
    "tests/nn/test_places.py",
    "tests/nn/test_rope.py",
    "tests/ops/test_block_records.py",
    "tests/ops/test_ops.py",
    "tests/paddlenlp/test_recipes.py::test_the_type_that_flags_leave_open_is_paddlenlps",
    "tests/quant/test_observers.py",
    "tests/ranks/test_messages.py",
    "tests/schemes/test_rounding.py",
    "tests/server/test_answers.py",
    "tests/server/test_openai_client.py::test_chat_whole_and_streamed_say_the_same",
    "tests/server/test_openai_client.py::test_completions_are_those_of_the_python_api",
    "tests/server/test_wire.py",
    "tests/speculative/test_speculative.py::test_steps_count_the_tokens_that_came",
    "tests/system/test_host.py",
    f"{GOLDEN}[llama_gqa-fused]",
    f"{GOLDEN}[qwen2-fused]",
    "tests/test_request.py",
    "tests/text/test_chat_template.py",
    "tests/text/test_guides.py",
    "tests/text/test_tokenizer.py",
    "tests/text/tool_calls/test_parsers.py",
)
