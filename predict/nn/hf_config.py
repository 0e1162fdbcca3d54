"""Typed reading of a checkpoint's config.json, as transformers 4 and transformers 5 spell it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.gguf.described import described_in, read_model_json
from predict.nn.blocks import (
    Activation,
    AttentionBlock,
    ExpertBlock,
    Function,
    MlpBlock,
    Norm,
    Router,
)
from predict.nn.rope import METHODS
from predict.nn.spec import DecoderSpec, HeadSpec, RopeSpec
from predict.system.ranges import Range

# What the field's tools wrote before "rope_type" had settled names.
ROPE_METHOD_ALIASES = {"ntk": "dynamic", "dynamic_ntk": "dynamic", "su": "longrope"}
LLAMA3_FACTOR = 8.0  # where a file says none, as in PaddleNLP
ROPE_TYPES = tuple(method for method in METHODS if method != "dynamic_steps")  # Qwen's has no name
MAX_SHOWN = 40  # characters of a wrong value in a message
MAX_EOS_IDS = 1024


def _whole(high: int, low: int = 1) -> Range:
    return Range(low, high)


def _real(high: float, low: float = 0.0, above: bool = True) -> Range:
    return Range(low, high, whole=False, above=above)


_RANGES: tuple[tuple[str, Range], ...] = (
    ("vocab_size", _whole(1 << 22)),
    ("hidden_size word_embed_proj_dim", _whole(1 << 17)),
    ("intermediate_size moe_intermediate_size shared_expert_intermediate_size", _whole(1 << 20)),
    ("num_hidden_layers moe_layer_freq decoder_sparse_step sliding_window_pattern", _whole(1024)),
    ("max_window_layers first_k_dense_replace moe_layer_start_index", _whole(1024, low=0)),
    ("moe_layer_end_index", _whole(1024, low=-1)),
    ("mlp_only_layers", _whole(1023, low=0)),
    ("num_nextn_predict_layers n_shared_experts", _whole(64, low=0)),
    ("num_attention_heads num_key_value_heads", _whole(4096)),
    ("head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim", _whole(1024)),
    ("q_lora_rank", _whole(1 << 16)),
    ("kv_lora_rank", _whole(1 << 14)),
    ("max_position_embeddings original_max_position_embeddings sliding_window", _whole(1 << 26)),
    ("seq_length", _whole(1 << 26, low=2)),
    ("eos_token_id", _whole((1 << 31) - 1, low=-1)),  # -1 is how some say none
    ("bos_token_id gmask_token_id mask_token_id", _whole((1 << 31) - 1, low=0)),
    ("num_experts n_group topk_group", _whole(512)),  # what csrc/include/regatta/blocks.h holds
    ("num_experts_per_tok", _whole(32)),
    ("rms_norm_eps layer_norm_eps", _real(0.1)),
    ("moe_norm_min", _real(1e-9, above=False)),
    ("softcap", _real(65536.0, above=False)),
    ("multiplier factor low_freq_factor high_freq_factor beta_fast beta_slow", _real(65536.0)),
    ("attention_factor", _real(1024.0)),
    ("mscale mscale_all_dim", _real(1024.0, above=False)),
    ("rope_theta rope_local_base_freq", _real(1e12, low=1.0)),
    ("partial_rotary_factor", _real(1.0)),
)
# Every number that a family reads. The limits are beyond any real model: what exceeds them is a
# damaged or hostile file, and would take minutes and gigabytes before an error.
NUMBERS: dict[str, Range] = {name: range_ for names, range_ in _RANGES for name in names.split()}
# Keys whose aliases must not contradict each other.
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "n_shared_experts")
# Keys that a multimodal model's config.json may have beside its text_config and mean for it.
WHOLE_MODELS = ("eos_token_id", "tie_word_embeddings")
LAYER_TYPES = ("full_attention", "sliding_attention")
# What config.json calls an MLP's function.
_TANH = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_pytorch_tanh")
FUNCTIONS: dict[str, Function] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(_TANH, "gelu_tanh"),
    "relu": "relu",
    "relu2": "relu_squared",
}
# Keys of the rope scaling that RopeSpec has under the same name.
ROPE_NUMBERS = tuple(f.name for f in fields(RopeSpec) if f.name in NUMBERS)

# What folders have that are given beside a model, and by which flag.
BESIDE_MODELS = {
    "adapter_config.json": "--lora_path",
    "lora_config.json": "--lora_path",
    "prefix_config.json": "--prefix_path",
}


class ConfigReader:
    """A config.json with typed getters; every error names the file, the key and what is allowed."""

    def __init__(self, values: Mapping[str, Any], path: Path, inside: str = ""):
        """inside: the key of the object that `values` are, where they are not the whole file."""
        self.values = values
        self.path = path
        self.inside = inside
        self._reads_rope = False

    @classmethod
    def from_dir(cls, directory: str | Path) -> ConfigReader:
        """Reads a directory's config.json, or what a GGUF file says in its place.

        Raises UserError where it is missing or broken.
        """
        path = described_in(directory, "config.json")
        if not path.exists():
            here = (flag for name, flag in BESIDE_MODELS.items() if (path.parent / name).exists())
            flag = next(here, None)
            raise UserError(
                f"{path} does not exist; a model is a directory with config.json, safetensors and "
                "tokenizer files, or a GGUF file"
                + (f". This one is given by {flag}, beside its model" if flag else "")
            )
        # NaN and Infinity are read, so that the message can name the field that has them.
        return cls(read_model_json(directory, "config.json", constants=True), path)

    def text_config(self, defaults: Mapping[str, Any] | None = None) -> ConfigReader:
        """The reader of a multimodal model's `text_config`.

        defaults: of keys that published files leave out. WHOLE_MODELS are read from the whole file
        where text_config lacks them.
        """
        text = self.values.get("text_config")
        if not isinstance(text, dict):
            raise self.wrong("text_config", "an object: the text model's config")
        shared = {key: self.values[key] for key in WHOLE_MODELS if key in self.values}
        given = {
            key: value for key, value in text.items() if value is not None or key not in shared
        }
        return ConfigReader({**(defaults or {}), **shared, **given}, self.path, "text_config")

    def wrong(self, key: str, allowed: object) -> UserError:
        """The error for a key whose value is not allowed."""
        shown = repr(self.values.get(key))
        if len(shown) > MAX_SHOWN:
            shown = shown[:MAX_SHOWN] + "..."
        where = f"{self.inside}: " if self.inside else ""
        return UserError(f"{self.path}: {where}{key!r} is {shown} (allowed: {allowed})")

    def _get(self, key: str, default: Any, required: bool) -> Any:
        """The value, `default` where it is absent or null; UserError where one is needed."""
        value = self.values.get(key)
        if value is None and required:
            where = f"{self.path}: {self.inside}" if self.inside else f"{self.path}"
            raise UserError(f"{where} lacks {key!r}")
        return default if value is None else value

    def _number(self, key: str, default: Any, required: bool, aliases: Sequence[str] = ()) -> Any:
        """The number under the key, or under one of the names that it has elsewhere."""
        names = [name for name in (key, *aliases) if self.values.get(name) is not None]
        found = names[0] if names else key
        for other in names[1:] if key in OF_EXPERTS else ():
            if self.values[other] != self.values[found]:
                raise self.wrong(other, f"{self.values[found]!r:.{MAX_SHOWN}}, as {found!r} is")
        value = self._get(found, default, required)
        if self.values.get(found) is not None and value not in NUMBERS[key]:
            raise self.wrong(found, NUMBERS[key])
        return value

    def get_int(self, key: str, default: int | None = None, aliases: Sequence[str] = ()) -> int:
        """A whole number in the key's range; required without a default."""
        return int(self._number(key, default, default is None, aliases))

    def get_float(
        self, key: str, default: float | None = None, aliases: Sequence[str] = ()
    ) -> float:
        """A number in the key's range; required without a default."""
        return float(self._number(key, default, default is None, aliases))

    def must_be(self, key: str, allowed: Any, default: Any = None) -> None:
        """Raises UserError where the key has another value than the family supports."""
        value = self.values.get(key, default)
        if value is not None and value != allowed:
            raise self.wrong(key, allowed)

    def activation(self, key: str = "hidden_act", default: str | None = "silu") -> Function:
        """The function of an MLP."""
        name = self.get_str(key, default)
        if name not in FUNCTIONS:
            raise self.wrong(key, ", ".join(FUNCTIONS))
        return FUNCTIONS[name]

    def optional_int(self, key: str) -> int | None:
        """A whole number within the key's range, or None when absent or null."""
        value = self._number(key, None, False)
        return None if value is None else int(value)

    def get_ints(self, key: str, most: int) -> tuple[int, ...]:
        """A whole number or a list of at most `most`, as a tuple; empty when absent."""
        value = self._get(key, [], False)
        values = value if isinstance(value, list) else [value]
        if len(values) > most or any(each not in NUMBERS[key] for each in values):
            raise self.wrong(key, f"{NUMBERS[key]}, or a list of at most {most}")
        return tuple(values)

    def get_bool(self, key: str, default: bool) -> bool:
        value = self._get(key, default, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true, false")
        return value

    def get_str(self, key: str, default: str | None = None) -> str:
        """A text; required when no default is given."""
        value = self._get(key, default, default is None)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def get_texts(self, key: str) -> list[str] | None:
        """A list of texts, or None when absent."""
        value = self._get(key, None, False)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
        ):
            raise self.wrong(key, "a list of texts")
        return value

    def windows(self) -> tuple[int, ...]:
        """The window of every layer, sliding_window; none where it is absent or null."""
        window = self.optional_int("sliding_window")
        return (window,) * self.get_int("num_hidden_layers") if window else ()

    def layer_windows(self, window: int, is_windowed: Callable[[int], bool]) -> tuple[int, ...]:
        """The window of every layer: `window` for "sliding_attention", else -1.

        is_windowed: by layer index, where config.json has no layer_types.
        """
        num_layers = self.get_int("num_hidden_layers")
        types = self.get_texts("layer_types")
        if types is None:
            return tuple(window if is_windowed(i) else -1 for i in range(num_layers))
        if len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
            raise self.wrong(
                "layer_types",
                f"{num_layers} of {' and '.join(LAYER_TYPES)}, as num_hidden_layers says",
            )
        return tuple(window if kind == LAYER_TYPES[1] else -1 for kind in types)

    def dtype(self) -> str | None:
        """The checkpoint's own dtype ("dtype" in transformers 5, "torch_dtype" before)."""
        value = self.values.get("dtype") or self.values.get("torch_dtype")
        return None if value is None else str(value).removeprefix("torch.")

    def _longrope(self, count: int) -> dict[str, tuple[float, ...]]:
        """LongRoPE's factors of `count` frequencies, for short and for long contexts."""
        for key in ("short_mscale", "long_mscale"):
            self.must_be(key, None)
        factors = {}
        for key in ("short_factor", "long_factor"):
            values = self._get(key, None, True)
            if not (
                isinstance(values, list)
                and len(values) == count
                and all(value in NUMBERS["factor"] for value in values)
            ):
                raise self.wrong(key, f"a list of {count}, each {NUMBERS['factor']}")
            factors[key] = tuple(map(float, values))
        return factors

    def _paddlenlp_scaling(self, head_dim: int, theta: float) -> dict[str, Any]:
        """PaddleNLP's rope_scaling_type and rope_scaling_factor as rope_scaling has them."""
        kind = self.get_str("rope_scaling_type")
        factor = self.get_float("factor", 1.0, aliases=("rope_scaling_factor",))
        if kind == "ntk":  # another base, whatever the length
            base = self.get_float("rope_theta", theta)
            if head_dim < 4:
                raise self.wrong("rope_scaling_type", "linear, null with heads of 2")
            return {"rope_theta": base * factor ** (head_dim / (head_dim - 2))}
        if kind not in ("linear", "dynamic_ntk"):
            raise self.wrong("rope_scaling_type", "linear, ntk, dynamic_ntk, null")
        return {"rope_type": kind, "factor": factor}

    def _context_factor(self, method: str, original: int | None, nested: ConfigReader) -> float:
        """The context's extension where rope_scaling has no factor."""
        if method == "llama3":
            return LLAMA3_FACTOR
        if method in ("yarn", "longrope") and original is not None:
            return self.get_int("max_position_embeddings") / original
        return nested.get_float("factor")  # which it lacks: raises

    def check_rope_is_read(self) -> None:
        """Raises UserError where a scaling of positions is asked for, and nothing read it."""
        if self._reads_rope:
            return
        for key in ("rope_parameters", "rope_scaling"):
            block = self.values.get(key) or {}
            is_plain = isinstance(block, dict) and all(
                block.get(name) in (None, "default") for name in ("rope_type", "type")
            )
            if not is_plain:
                raise self.wrong(key, f"null: {self.values.get('model_type')} scales no positions")
        self.must_be("rope_scaling_type", None)

    def rope(
        self, head_dim: int, theta: float = 10000.0, partial: float = 1.0, kind: str | None = None
    ) -> RopeSpec:
        """The rotary embedding from rope_parameters, or from rope_theta and rope_scaling.

        theta, partial: where config.json says neither. kind: of the layers that it is for, where
        rope_parameters has one for each.
        """
        self._reads_rope = True
        key = "rope_parameters" if self.values.get("rope_parameters") else "rope_scaling"
        block = self.values.get(key) or {}
        if kind is not None and isinstance(block, dict) and kind in block:
            block = block[kind]
        if not isinstance(block, dict):
            raise self.wrong(key, "an object, null")
        if kind is None and not set(block).isdisjoint(LAYER_TYPES):
            raise self.wrong(key, f"an object without {' and '.join(LAYER_TYPES)}, null")
        if not block and self.values.get("rope_scaling_type") is not None:
            block = self._paddlenlp_scaling(head_dim, theta)
        nested = ConfigReader(block, self.path, key)
        name = "rope_type" if "rope_type" in block else "type"
        method = nested.get_str(name, "default")
        method = ROPE_METHOD_ALIASES.get(method, method)
        if method not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise UserError(f"{self.path}: rope type {method!r} is not supported (known: {known})")
        partial = nested.get_float(
            "partial_rotary_factor", self.get_float("partial_rotary_factor", partial)
        )
        rotary_dim = int(head_dim * partial)
        least = 4 if method == "dynamic" else 2  # its base grows by the power dim / (dim - 2)
        if rotary_dim % 2 or rotary_dim < least:
            raise UserError(
                f"{self.path}: {rotary_dim} of the head_dim {head_dim} dims are rotated "
                f"(partial_rotary_factor {partial}); they must be even, and at least {least}"
            )
        original = nested.optional_int("original_max_position_embeddings")
        given: dict[str, Any] = {
            key: nested.get_float(key) for key in ROPE_NUMBERS if block.get(key) is not None
        }
        if method == "longrope":
            original = original or self.get_int("original_max_position_embeddings")
            given |= nested._longrope(rotary_dim // 2)
        if method != "default" and "factor" not in given:
            given["factor"] = self._context_factor(method, original, nested)
        rope = RopeSpec(
            theta=nested.get_float("rope_theta", self.get_float("rope_theta", theta)),
            method=method,
            rotary_dim=None if partial == 1.0 else rotary_dim,
            original_max_position=original,
            truncate=nested.get_bool("truncate", True),
            **given,
        )
        if method == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise UserError(
                f"{self.path}: {key}: 'high_freq_factor' is {rope.high_freq_factor}; it must be "
                f"above 'low_freq_factor', {rope.low_freq_factor}"
            )
        return rope


def llama_like(
    config: ConfigReader,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    windows: Sequence[int] = (),
    head_dim: int | None = None,
    norm: Norm | None = None,
    activation: Function | None = None,
    partial: float = 1.0,
    theta: float = 10000.0,
    **changes: Any,
) -> DecoderSpec:
    """DecoderSpec of a Llama-shaped config.json.

    attention, mlp: fields of the blocks that are not Llama's. windows: of each layer's attention,
    none for all tokens. head_dim, norm, activation: in place of config.json's. partial: share of a
    head that rotates, theta: the base, where config.json does not say. changes: fields of the spec.
    Raises UserError for a number outside its range, and for numbers that contradict each other.
    """
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    num_kv_heads = config.get_int("num_key_value_heads", num_heads)
    function = activation or config.activation()
    check_groups(config, num_heads, num_kv_heads)
    if head_dim is None:
        head_dim = config.optional_int("head_dim")
    if head_dim is None:
        head_dim = per_head(config, hidden_size, num_heads, ", and head_dim is not given")
    norm = norm or Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    heads, inner = (num_heads, num_kv_heads, head_dim), config.get_int("intermediate_size")
    blocks = blocks_of(heads, inner, Activation(function), False, attention, mlp, norm=norm)
    attention_block, mlp_block = blocks
    num_layers = config.get_int("num_hidden_layers")
    layers = tuple(
        (replace(attention_block, window=window), mlp_block)
        for window in (windows or (-1,) * num_layers)
    )
    return decoder_spec(
        config,
        **{
            "hidden_size": hidden_size,
            "layers": layers,
            "head": HeadSpec(norm=norm),
            **({} if "ropes" in changes else {"ropes": (config.rope(head_dim, theta, partial),)}),
            **changes,
        },
    )


def blocks_of(
    heads: tuple[int, int, int],
    inner: int,
    activation: Activation,
    bias: bool = False,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    **shared: Any,
) -> tuple[AttentionBlock, MlpBlock]:
    """A layer of attention and an MLP.

    heads: num_heads, num_kv_heads, head_dim. inner: intermediate_size. bias: of all matrices.
    shared: fields of both blocks; attention, mlp: fields of one, which come first.
    """
    num_heads, num_kv_heads, head_dim = heads
    of_attention = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "softmax_scale": head_dim**-0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }
    of_mlp = {"intermediate_size": inner, "activation": activation, "up_bias": bias}
    return (
        AttentionBlock(**{**of_attention, **shared, **(attention or {})}),
        MlpBlock(**{**of_mlp, "down_bias": bias, **shared, **(mlp or {})}),
    )


def with_experts(
    spec: DecoderSpec, experts: ExpertBlock, is_sparse: Callable[[int], bool]
) -> DecoderSpec:
    """The spec with an expert block in place of the MLP of each layer for which `is_sparse`."""
    return spec.with_blocks(
        lambda index, block: experts if is_sparse(index) and isinstance(block, MlpBlock) else block
    )


def sparse_like(
    config: ConfigReader,
    dense: DecoderSpec,
    router: Mapping[str, Any],
    inner: int,
    is_sparse: Callable[[int], bool] = lambda index: True,
    **experts: Any,
) -> DecoderSpec:
    """`with_experts` of a Llama-shaped spec, whose activation and norm the experts share.

    router: fields of Router. inner: intermediate_size of an expert. experts: fields of ExpertBlock.
    """
    fields = {"activation": Activation(config.activation()), "norm": dense.head.norm, **experts}
    block = ExpertBlock(router_of(config, **router), inner, **fields)
    return with_experts(dense, block, is_sparse)


def router_of(config: ConfigReader, **fields: Any) -> Router:
    """A Router of these fields.

    Raises UserError where they contradict each other, or config.json's scoring function.
    """
    config.must_be("scoring_func", fields.get("scoring", Router.scoring))
    try:
        return Router(**fields)
    except ValueError as error:
        raise UserError(
            f"{config.path}: numbers of experts, of groups and of those that are chosen do not go "
            f"together: {error}"
        ) from None


def decoder_spec(config: ConfigReader, tied: bool = False, **changes: Any) -> DecoderSpec:
    """DecoderSpec with what every family's config.json spells alike; changes: the other fields.

    tied: whether embedding and head are one where config.json does not say.
    """
    config.must_be("use_long_sequence_strategies", False)  # PaddleNLP's other positions
    config.check_rope_is_read()
    vocab_size = changes.get("vocab_size") or config.get_int("vocab_size")
    values: dict[str, Any] = {
        "model_type": config.get_str("model_type"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.get_bool("tie_word_embeddings", tied),
        # Ids that the model cannot make end nothing: some checkpoints have one beyond their table.
        "eos_token_ids": tuple(
            i for i in config.get_ints("eos_token_id", MAX_EOS_IDS) if 0 <= i < vocab_size
        ),
    }
    if "max_position" not in changes:
        values["max_position"] = config.get_int("max_position_embeddings", 2048)
    return DecoderSpec(**{**values, **changes})


def per_head(config: ConfigReader, hidden_size: int, num_heads: int, more: str = "") -> int:
    """hidden_size / num_heads. Raises UserError, with `more`, unless it is whole and in range."""
    if hidden_size % num_heads or hidden_size // num_heads not in NUMBERS["head_dim"]:
        raise UserError(
            f"{config.path}: hidden_size {hidden_size} over num_attention_heads {num_heads} is "
            f"{hidden_size / num_heads:.15g}{more} (allowed: {NUMBERS['head_dim']})"
        )
    return hidden_size // num_heads


def check_groups(config: ConfigReader, num_heads: int, num_kv_heads: int) -> None:
    """Raises UserError unless each key head has as many query heads."""
    if num_heads % num_kv_heads:
        raise UserError(
            f"{config.path}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
