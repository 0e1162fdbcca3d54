"""DeepSeek V2 and V2-Lite, their Coders too: latent attention, and experts behind dense layers."""

from collections.abc import Callable
from dataclasses import replace

from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, decoder_spec, router_of, with_experts
from predict.nn.kinds.experts import ExpertBlock, Router
from predict.nn.kinds.latent_attention import LatentAttentionBlock
from predict.nn.kinds.mlp import MlpBlock
from predict.nn.rope import yarn_mscale
from predict.nn.spec import DecoderSpec, HeadSpec, RopeSpec

LATENT_NORM = Norm(epsilon=1e-6)  # whatever rms_norm_eps is


def latent_attention(
    config: ConfigReader, norm: Norm, rope: RopeSpec, interleaved: bool = True
) -> LatentAttentionBlock:
    """The attention of all layers. rope: of qk_rope_head_dim values."""
    num_heads = config.get_int("num_attention_heads")
    config.must_be("num_key_value_heads", num_heads)
    rank, bias = config.optional_int("q_lora_rank") or 0, config.get_bool("attention_bias", False)
    if bias and not rank:
        raise config.wrong("attention_bias", "false, where q_lora_rank is null")
    own, rotated = config.get_int("qk_nope_head_dim", 128), config.get_int("qk_rope_head_dim", 64)
    # YaRN's attention temperature: of the scores here, and of the rotary table besides.
    mscale = rope.mscale_all_dim if rope.method != "default" else None
    return LatentAttentionBlock(
        num_heads=num_heads,
        kv_lora_rank=config.get_int("kv_lora_rank", 512),
        qk_nope_head_dim=own,
        qk_rope_head_dim=rotated,
        v_head_dim=config.get_int("v_head_dim", 128),
        softmax_scale=(own + rotated) ** -0.5 * yarn_mscale(rope.factor, mscale or 0.0) ** 2,
        q_lora_rank=rank,
        norm=norm,
        q_a_norm=LATENT_NORM if rank else None,
        kv_a_norm=LATENT_NORM,
        positions=Positions(interleaved=interleaved),
        a_bias=bias,
        out_bias=bias,
    )


def deepseek_like(
    config: ConfigReader,
    router: Router | None,
    interleaved: bool = True,
    is_sparse: Callable[[int], bool] | None = None,
) -> DecoderSpec:
    """The network with this router; None: all layers have MLPs.

    interleaved: rotary pairs. is_sparse: which layers have experts, in place of config.json's.
    """
    config.must_be("mlp_bias", False)
    norm, function = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6)), config.activation()
    rope = config.rope(config.get_int("qk_rope_head_dim", 64))
    attention = latent_attention(config, norm, rope, interleaved)
    rotary_dim = rope.rotary_dim or attention.qk_rope_head_dim
    mlp = MlpBlock(config.get_int("intermediate_size"), Activation(function), norm)
    spec = decoder_spec(
        config,
        hidden_size=config.get_int("hidden_size"),
        layers=((attention, mlp),) * config.get_int("num_hidden_layers"),
        head=HeadSpec(norm=norm),
        ropes=(replace(rope, rotary_dim=rotary_dim),),
    )
    if router is None:
        return spec
    inner = config.get_int("moe_intermediate_size")
    experts = ExpertBlock(
        router=router,
        intermediate_size=inner,
        activation=Activation(function),
        norm=norm,
        shared_size=inner * config.get_int("n_shared_experts", 0),
    )
    first = config.get_int("first_k_dense_replace", 0)
    step = config.get_int("moe_layer_freq", 1)
    behind = is_sparse or (lambda index: index >= first and index % step == 0)
    return with_experts(spec, experts, behind)


def spec(config: ConfigReader) -> DecoderSpec:
    return deepseek_like(config, _router(config))


def _router(config: ConfigReader) -> Router | None:
    if config.values.get("n_routed_experts", 0) is None:
        return None
    method = config.get_str("topk_method", "greedy")
    methods = ("greedy", "group_limited_greedy")
    if method not in methods:
        raise config.wrong("topk_method", ", ".join(methods))
    grouped = method != "greedy"
    top_k = config.get_int("num_experts_per_tok")
    # As DeepSeek's own code has it: what is divided by its sum is not scaled.
    renormalize = config.get_bool("norm_topk_prob", False) and top_k > 1
    scale = config.get_float("multiplier", 1.0, aliases=("routed_scaling_factor",))
    return router_of(
        config,
        num_experts=config.get_int("num_experts", 64, aliases=("n_routed_experts",)),
        top_k=top_k,
        renormalize=renormalize,
        scale=1.0 if renormalize else scale,
        num_groups=config.get_int("n_group") if grouped else 1,
        top_groups=config.get_int("topk_group") if grouped else 1,
    )
