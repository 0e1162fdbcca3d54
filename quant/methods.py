"""Which methods of calibration have a meaning for a network's blocks."""

from __future__ import annotations

from predict.errors import UserError
from predict.nn.kinds.experts import ExpertBlock
from predict.nn.kinds.latent_attention import LatentAttentionBlock
from predict.nn.plans import BlockPlan, ExpertsPlan, WeightPlan
from quant.config import QuantConfig
from quant.layer import passes_scale


def check_methods(config: QuantConfig, plan: WeightPlan) -> list[str]:
    """Notes on the config's methods. plan: of the names that are written.

    Raises UserError for a method that has no meaning for the network.
    """
    experts = list(plan.spec.blocks_of(ExpertBlock))
    latents = any(plan.spec.blocks_of(LatentAttentionBlock))
    kind = plan.spec.model_type
    if config.cachekv and latents:
        raise UserError(
            f"an int8 cache (c8) has a static scale for each head of keys and of values, and "
            f"{kind} keeps latents, one for all heads; leave c8 out of --quant_type"
        )
    if config.shift and (experts or latents):
        readers = "experts and their router" if experts else "latents"
        raise UserError(
            "--shift is written in PaddleNLP's layout, where a norm with a bias feeds one product; "
            f"in {kind} it feeds {readers}; use --smooth"
        )
    notes: list[str] = []
    if not all(passes_scale(block.activation) for block in experts):
        why = (
            f"the experts of {kind} clamp what up makes and add to it, so that no scale of its "
            "rows divides what down reads"
        )
        if config.smooth_all_linears:
            raise UserError(f"--smooth_all_linears: {why}; leave it out: --smooth does the others")
        if config.do_awq:
            notes.append(f"{why}: AWQ scales all linears but those")
    if experts and config.static_activations:
        notes.append(
            "static activation scales of experts run on a CPU alone"
            if config.static_experts
            else "experts' activation scales are found at run time, so that GPUs run the "
            "checkpoint too; --static_experts calibrates them, for CPUs"
        )
    if experts and config.scatters_groups:
        notes.append(
            "--gptq_static_groups false gives each expert an order of columns of its own, which "
            "runs on a CPU alone"
        )
    for block in plan.blocks():
        _check_skipped(config, block)
    return notes


def _check_skipped(config: QuantConfig, block: BlockPlan) -> None:
    """Raises UserError where some experts of a layer would be quantized, and some not."""
    for experts in block.slots.values():
        if not isinstance(experts, ExpertsPlan):
            continue
        kept = [each for each in experts.experts if config.skips(each.prefixes)]
        if kept and len(kept) < len(experts.experts):
            raise UserError(
                f"--skip_list_names {','.join(config.skip_list_names)} keeps {kept[0].prefixes[0]} "
                "in floating point, and not the other experts of its layer, which are stored "
                "together; skip all experts of a layer, or none"
            )
