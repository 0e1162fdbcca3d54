"""/metrics: what is counted, under which names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from predict.engine.stats import EngineStats
from predict.server.metrics import Metrics
from predict.server.wire import AnswerMetrics, ModelInfo

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_steps=10,
    num_prompt_tokens=80,
    num_output_tokens=40,
    num_prefix_hit_tokens=20,
    num_preemptions=1,
    num_draft_tokens=8,
    num_accepted_draft_tokens=6,
    num_accepted_by_position=(4, 2),
    num_draft_spans=4,
    num_cache_blocks=50,
    num_used_blocks=10,
    peak_memory_bytes=1 << 20,
    rank_memory_bytes=(600, 700),
    num_adapters=5,
    num_adapter_pages=16,
    num_used_adapter_pages=6,
    num_adapters_written=9,
)
INFO = ModelInfo(
    model_type="llama",
    dtype="bfloat16",
    device="cpu",
    mode="dynamic",
    vocab_size=100,
    max_length=64,
    batch_size=4,
    num_cache_blocks=50,
    block_size=16,
    eos_token_ids=(2,),
    quant_type=None,
    kv_format="dense",
    speculate_method=None,
    startup_seconds=1.0,
)


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample, its labels behind its name."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        sample.name
        + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_the_engines_counts_are_shown_as_it_told_them() -> None:
    metrics = Metrics()
    metrics.engine_said(STATS, INFO, ("name", "alias"))
    metrics.engine_said(STATS, INFO, ("name", "alias"))  # told twice, counted once
    found = values(metrics)
    for name, value in {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "prompt_tokens_total": 80,
        "generation_tokens_total": 40,
        "num_preemptions_total": 1,
        "kv_cache_usage_perc": 0.2,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 20,
        "prefix_cache_hit_rate": 0.25,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 6,
        "spec_decode_num_accepted_tokens_per_pos_total position=0": 4,
        "spec_decode_num_accepted_tokens_per_pos_total position=1": 2,
        "spec_decode_draft_acceptance_rate": 0.75,
        "rank_peak_memory_bytes rank=1": 700,
        "adapters_loaded": 5,
        "adapter_pages": 16,
        "adapter_used_pages": 6,
        "adapters_written_total": 9,
        "engine_up": 1,
    }.items():
        assert found[f"regatta_{name}"] == value
    shown = "device=cpu dtype=bfloat16 model_name=alias model_type=llama quantization=none"
    assert found[f"regatta_model_info {shown}"] == 1


def test_a_dead_engine_is_down_and_has_no_counts() -> None:
    metrics = Metrics()
    metrics.engine_said(None, None)
    found = values(metrics)
    assert found["regatta_engine_up"] == 0
    assert "regatta_num_requests_running" not in found


def test_answers_are_counted_with_their_times() -> None:
    metrics = Metrics()
    metrics.answer_ended(AnswerMetrics(10, 6, 0, 0, 0.01, 0.1, 0.02, 0.3, ("stop", "length")))
    metrics.answer_ended(AnswerMetrics(10, 0, 0, 0, None, None, None, 0.1, ("abort",)))
    found = values(metrics)
    assert found["regatta_time_to_first_token_seconds_count"] == 1
    assert found["regatta_time_to_first_token_seconds_sum"] == 0.1
    assert found["regatta_time_per_output_token_seconds_sum"] == 0.02
    assert found["regatta_e2e_request_latency_seconds_count"] == 2
    assert found["regatta_request_generation_tokens_sum"] == 6
    for reason in ("stop", "length", "abort"):
        assert found[f"regatta_request_success_total finished_reason={reason}"] == 1


def test_requests_and_errors_are_counted_by_route() -> None:
    metrics = Metrics()
    metrics.request_began("/v1/completions")
    metrics.request_began("/v1/completions")
    metrics.request_ended("/v1/completions", 429, 0.01, "rate_limit")
    found = values(metrics)
    assert found["regatta_http_requests_in_flight route=/v1/completions"] == 1
    assert found["regatta_http_requests_total route=/v1/completions status=429"] == 1
    assert found["regatta_http_request_errors_total kind=rate_limit route=/v1/completions"] == 1
    assert found["regatta_http_request_duration_seconds_count route=/v1/completions"] == 1
