"""A pytest plugin: leaves out what does not fit a GPU of ordinary memory and plain loops.

`pytest -p tests.fake_gpu.fitting`.
"""

from __future__ import annotations

import pytest

# Words in the names of tests that need real kernels or memory, start processes without the fake,
# or take long in plain loops.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "gpu/test_adapters.py": ("layers_of",),  # as gpu/test_ops.py
    "gpu/test_batch_invariant.py": ("",),
    "gpu/test_beams.py": ("copied_blocks",),
    "gpu/test_device.py": ("out_of_memory", "process_ends", "another_streams_event"),
    "gpu/test_evaluate.py": ("weights",),
    "gpu/test_experts.py": ("forced",),
    "gpu/test_isolation.py": ("draft model",),
    "gpu/test_kernels.py": ("",),  # compiles with nvcc
    "gpu/test_kv_formats.py": (
        "attention",
        "long_contexts",
        "rows_are_quantized",
        "logits_are_near",
    ),
    # The plain twin takes long where more than a few heads meet long spans.
    "gpu/test_latent.py": (
        *(f"prefill_spans-{heads}" for heads in ("16", "32", "128", "queries")),
        *("published", "long_contexts", "says_whether"),
    ),
    "gpu/test_memory.py": ("share_that_is_asked_for",),
    "gpu/test_ops.py": ("",),
    "gpu/test_paddle_graphs.py": ("",),
    "gpu/test_sanitizer.py": ("",),
    "gpu/test_speculative.py": ("fifty",),
    "gpu/test_twins.py": ("128256", "151936"),
    # These stand in for the engine's forward pass, or are about what GPUs refuse.
    "test_adapters.py": ("mixed_batch", "False"),  # logits on the CPU, operators of the CPU
    "test_async_llm.py": ("cannot_be_drawn",),
    "engine/test_samples.py": ("keep_the_schedulers_promises",),
    "speculative/test_speculative.py": ("draft_model", "False"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the rows of LEFT_OUT."""
    left_out = [item for item in items if not fits(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if fits(item)]


def fits(item: pytest.Item) -> bool:
    """Whether no row names a test."""
    path, _, name = item.nodeid.partition("::")
    return not any(word in name for word in LEFT_OUT.get(path.removeprefix("tests/"), ()))
