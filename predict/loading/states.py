"""What networks with a state per request do not run with yet."""

from __future__ import annotations

from predict.config.engine import EngineConfig
from predict.device.devices import kind_of
from predict.errors import UserError
from predict.nn.spec import DecoderSpec

# Who drafts on a GPU: nobody who reads what the network's layers made.
GPU_DRAFTS = ("inference_with_reference", "lookahead", "draft_model")


def check_states(
    config: EngineConfig, spec: DecoderSpec, is_compiled: bool, exports: bool = False
) -> None:
    """Raises UserError for what a network with states, or one without, does not run with.

    is_compiled: whether operators are the library's. exports: whether a program is to be made.
    """
    budget = config.cache.prefix_cache_state_budget
    if budget is not None and not (any(spec.states) and config.cache.shares_prefixes):
        raise UserError(
            f"prefix_cache_state_budget {budget} is for states that prompts leave behind, and "
            f"{spec.model_type} leaves none here (allowed: models of docs/hybrid_models.md, with "
            "--append_attn or --block_attn and prefix caching); leave it out"
        )
    rounds = config.cache.state_dtype != "float32"
    is_gpu = kind_of(config.model.device) == "gpu"
    if rounds and not (is_gpu and any(each.may_round for layer in spec.states for each in layer)):
        raise UserError(
            f"mamba_ssm_cache_dtype {config.cache.mamba_ssm_cache_dtype} is for states of delta "
            f"nets on GPUs, and this is {spec.model_type} with --device {config.model.device}; "
            "leave it out"
        )
    if rounds and config.model.batch_invariant:
        raise UserError(
            f"mamba_ssm_cache_dtype {config.cache.mamba_ssm_cache_dtype} rounds a state wherever "
            "a step ends, and batch_invariant is to give the same bits; leave one of the two out"
        )
    if not any(spec.states):
        return
    model, drafts = config.model, config.speculation.speculate_method
    is_static = exports or model.mode == "static"
    asked = {
        f"--device {model.device}": kind_of(model.device) not in ("cpu", "gpu"),
        "--mode static": is_static and is_gpu,
        "--mode static --inference_model false": is_static and not is_compiled,
        f"--tensor_parallel_degree {config.ranks.tensor_parallel_degree} on GPUs": (
            is_gpu and config.ranks.tensor_parallel_degree > 1
        ),
        f"--batch_invariant with --speculate_method {drafts}": (
            model.batch_invariant and drafts is not None and is_gpu
        ),
        f"--speculate_method {drafts} on a GPU": is_gpu and drafts not in (None, *GPU_DRAFTS),
        "--lora_modules on a GPU": (
            is_gpu
            and config.adapters.is_used
            and not all(block.adapts_on_gpus for block in spec.blocks())
        ),
        "--prefix_path": bool(config.adapters.prefixes),
        f"--pooling {model.pooling}": model.pooling is not None,
    }
    found = [flag for flag, is_there in asked.items() if is_there]
    if found:
        raise UserError(
            f"{spec.model_type} keeps a state of each request beside its KV cache, and does not "
            f"run with {' and '.join(found)} yet (allowed: --device cpu, one process, "
            f"programs of compiled operators, on GPUs drafts by {', '.join(GPU_DRAFTS)}; no "
            "prefix, no vectors)"
        )
