"""GLM-4.7-Flash: DeepSeek V3's latent attention, and GLM's experts behind some dense layers."""

from collections.abc import Callable

from predict.models.deepseek_v2 import deepseek_like
from predict.models.deepseek_v3 import noaux_router, weights
from predict.nn.hf_config import ConfigReader, router_of
from predict.nn.spec import DecoderSpec

__all__ = ("spec", "weights")
TYPES = "mlp_layer_types"


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("topk_method", "noaux_tc")
    config = config.with_defaults(
        rms_norm_eps=1e-5, n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1
    )
    router = noaux_router(config, num_experts=64, scale=1.8, num_groups=1, top_groups=1)
    interleaved = config.get_bool("rope_interleave", True)
    return deepseek_like(config, router_of(config, **router), interleaved, _sparse_layers(config))


def _sparse_layers(config: ConfigReader) -> Callable[[int], bool] | None:
    """Which layers have experts, where config.json has a type of each."""
    types, count = config.get_texts(TYPES), config.get_int("num_hidden_layers")
    if types is None:
        return None
    if len(types) != count or not set(types) <= {"dense", "sparse"}:
        raise config.wrong(TYPES, f"{count} of dense and sparse, as num_hidden_layers says")
    return lambda index: types[index] == "sparse"
