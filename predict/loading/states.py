"""What networks with a state per request do not run with yet."""

from __future__ import annotations

from predict.config.engine import EngineConfig
from predict.device.devices import kind_of
from predict.errors import UserError
from predict.nn.spec import DecoderSpec

RUNS_ON_GPUS = False  # until tests/gpu/test_hybrids.py has passed on one


def _runs_on(kind: str) -> bool:
    return kind == "cpu" or (kind == "gpu" and RUNS_ON_GPUS)


def check_states(config: EngineConfig, spec: DecoderSpec, exports: bool = False) -> None:
    """Raises UserError for what a network with states, or one without, does not run with.

    exports: whether a program is to be made.
    """
    budget = config.cache.prefix_cache_state_budget
    if budget is not None and not (any(spec.states) and config.cache.shares_prefixes):
        raise UserError(
            f"prefix_cache_state_budget {budget} is for states that prompts leave behind, and "
            f"{spec.model_type} leaves none here (allowed: models of docs/hybrid_models.md, with "
            "--append_attn or --block_attn and prefix caching); leave it out"
        )
    if not any(spec.states):
        return
    model, drafts = config.model, config.speculation.speculate_method
    asked = {
        f"--device {model.device}": not _runs_on(kind_of(model.device)),
        "--mode static": exports or model.mode == "static",
        f"--tensor_parallel_degree {config.ranks.tensor_parallel_degree}": (
            config.ranks.tensor_parallel_degree > 1
        ),
        f"--speculate_method {drafts}": drafts is not None,
        "--prefix_path": bool(config.adapters.prefixes),
        f"--pooling {model.pooling}": model.pooling is not None,
    }
    found = [flag for flag, is_there in asked.items() if is_there]
    if found:
        raise UserError(
            f"{spec.model_type} keeps a state of each request beside its KV cache, and does not "
            f"run with {' and '.join(found)} yet (allowed: --device cpu --mode dynamic, one "
            "process, no drafts, no prefix, no vectors)"
        )
