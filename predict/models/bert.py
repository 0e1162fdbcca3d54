"""BERT: an encoder with learned positions and norms behind its blocks."""

from typing import Any

from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, decoder_spec, per_head
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec
from predict.nn.weights import WeightNames

# Heads of other tasks, and the classification head, which predict.loading.pooling reads.
HEADS = ("pooler.", "classifier.", "cls.", "lm_head.", "qa_outputs.", "position_ids")
WEIGHTS = WeightNames(
    base="bert.",
    embedding="bert.embeddings.word_embeddings.weight",
    positions="bert.embeddings.position_embeddings.weight",
    types="bert.embeddings.token_type_embeddings.weight",
    embedding_norm="bert.embeddings.LayerNorm.weight",
    layer="bert.encoder.layer.{layer}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out=("attention.output.dense",),
    attention_post_norm="attention.output.LayerNorm.weight",
    gate_up=("intermediate.dense",),
    down=("output.dense",),
    mlp_post_norm="output.LayerNorm.weight",
    head="no_head",
    ignored=HEADS,
)


def spec(config: ConfigReader) -> DecoderSpec:
    return bert_like(config)


def bert_like(config: ConfigReader, offset: int = 0) -> DecoderSpec:
    """DecoderSpec of BERT's shape. offset: of position 0 in the table of positions."""
    config.must_be("position_embedding_type", "absolute")
    config.must_be("is_decoder", False)
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-12), True)
    behind: dict[str, Any] = {"norm": None, "post_norm": norm, "post_norm_of": "sum"}
    layer = blocks_of(
        (num_heads, num_heads, per_head(config, hidden_size, num_heads)),
        config.get_int("intermediate_size"),
        Activation(config.activation(default="gelu"), gated=False),
        bias=True,
        attention={"positions": Positions("none"), "prefix_mask": True},
        **behind,
    )
    num_positions = config.get_int("max_position_embeddings", 512)
    return encoder_spec(
        config,
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers"),
        max_position=num_positions - offset,
        embedding=EmbeddingSpec(
            num_positions=num_positions,
            position_offset=offset,
            num_types=config.get_int("type_vocab_size", 2),
            norm=norm,
        ),
        head=HeadSpec(norm=None),
    )


def encoder_spec(config: ConfigReader, **changes: Any) -> DecoderSpec:
    """DecoderSpec of an encoder: its table of tokens stands where a decoder has its head."""
    return decoder_spec(config, **{"tie_word_embeddings": True, "makes_text": False, **changes})
