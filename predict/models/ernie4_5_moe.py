"""ERNIE 4.5 with experts: the dense model's attention, experts in a range of its layers."""

from predict.models.ernie4_5 import spec as ernie4_5
from predict.nn.hf_config import ConfigReader, sparse_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    correction="mlp.moe_statics.e_score_correction_bias",
    correction_is_row=True,
    drafting=(".mtp_",),
)
UNREAD = (  # of training
    *("moe_capacity", "moe_gate", "moe_group", "moe_use_aux_free", "multi_token_pred_lambda"),
    *("moe_aux_loss_lambda", "moe_orthogonal_loss_lambda", "moe_z_loss_lambda"),
)


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("use_bias", False)
    config.must_be("moe_gate_act", "softmax")
    config.get_float("moe_norm_min", 0.0)  # so small that no sum of shares is below it
    dense = ernie4_5(config)
    inner = config.get_int("moe_intermediate_size", 1536)
    num_shared = config.get_int("n_shared_experts", 2, aliases=("moe_num_shared_experts",))
    router = {
        "num_experts": config.get_int("num_experts", 64, aliases=("moe_num_experts",)),
        "top_k": config.get_int("num_experts_per_tok", 6, aliases=("moe_k",)),
        "renormalize": True,
        "correction": True,
    }
    first = config.get_int("moe_layer_start_index", 1)
    end = config.get_int("moe_layer_end_index", -1)
    step = config.get_int("decoder_sparse_step", 1, aliases=("moe_layer_interval",))
    last = dense.num_layers - 1 if end < 0 else end
    return sparse_like(
        config,
        dense,
        router,
        inner,
        lambda index: first <= index <= last and (index + 1) % step == 0,
        shared_size=inner * num_shared,
    )
