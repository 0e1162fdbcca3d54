"""Typed reading of a checkpoint's config.json, as transformers 4 and transformers 5 spell it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.gguf.described import described_in, read_model_json
from predict.nn.blocks import Activation, Function, Norm, Positions
from predict.nn.config_keys import ROPE_UNREAD, changes_results, is_known, says_something
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.experts import ExpertBlock, Router
from predict.nn.kinds.mlp import MlpBlock
from predict.nn.rope import METHODS
from predict.nn.spec import DecoderSpec, HeadSpec, RopeSpec
from predict.system.ranges import Range

# What the field's tools wrote before "rope_type" had settled names.
ROPE_METHOD_ALIASES = {"ntk": "dynamic", "dynamic_ntk": "dynamic", "su": "longrope"}
LLAMA3_FACTOR = 8.0  # where a file says none, as in PaddleNLP
ROPE_TYPES = tuple(method for method in METHODS if method != "dynamic_steps")  # Qwen's has no name
MAX_SHOWN = 40  # characters of a wrong value in a message
MAX_EOS_IDS = 1024
ORIGINAL = "original_max_position_embeddings"
BY_ORIGINAL = ("llama3", "yarn", "longrope")  # rope types that read ORIGINAL
ROPE_BLOCKS = ("rope_scaling", "rope_parameters")
ROPE_KINDS = ("rope_type", "type")  # names of the key that says which
MAX_NAMED = 24  # keys in a message


def _whole(high: int, low: int = 1) -> Range:
    return Range(low, high)


def _real(high: float, low: float = 0.0, above: bool = True) -> Range:
    return Range(low, high, whole=False, above=above)


_RANGES: tuple[tuple[str, Range], ...] = (
    ("vocab_size", _whole(1 << 22)),
    ("hidden_size word_embed_proj_dim", _whole(1 << 17)),
    ("intermediate_size moe_intermediate_size shared_expert_intermediate_size", _whole(1 << 20)),
    ("n_inner ffn_hidden_size", _whole(1 << 20)),
    ("fullatt_block_indexes deepstack_visual_indexes", _whole(1023, low=0)),
    (
        "depth num_hidden_layers moe_layer_freq decoder_sparse_step sliding_window_pattern",
        _whole(1024),
    ),
    ("max_window_layers first_k_dense_replace moe_layer_start_index", _whole(1024, low=0)),
    ("moe_layer_end_index", _whole(1024, low=-1)),
    ("mlp_only_layers full_attn_idxs", _whole(1023, low=0)),
    ("mtp_num_hidden_layers", _whole(64, low=0)),
    ("linear_num_key_heads linear_num_value_heads", _whole(4096)),
    ("linear_key_head_dim linear_value_head_dim full_attention_interval", _whole(1024)),
    ("linear_conv_kernel_dim conv_L_cache", _whole(64, low=2)),
    ("block_ffn_dim_multiplier", _real(1024.0)),
    ("num_nextn_predict_layers n_shared_experts", _whole(64, low=0)),
    ("num_attention_heads num_key_value_heads num_heads", _whole(4096)),
    ("head_dim rotary_dim qk_nope_head_dim qk_rope_head_dim v_head_dim", _whole(1024)),
    ("q_lora_rank", _whole(1 << 16)),
    ("kv_lora_rank", _whole(1 << 14)),
    ("max_position_embeddings original_max_position_embeddings sliding_window", _whole(1 << 26)),
    ("seq_length", _whole(1 << 26, low=2)),
    ("eos_token_id", _whole((1 << 31) - 1, low=-1)),  # -1 is how some say none
    ("bos_token_id gmask_token_id mask_token_id", _whole((1 << 31) - 1, low=0)),
    ("num_experts n_group topk_group", _whole(512)),  # what csrc/blocks/experts holds
    ("num_experts_per_tok", _whole(32)),
    ("rms_norm_eps layer_norm_eps norm_eps", _real(0.1)),
    ("router_jitter_noise", _real(1.0, above=False)),
    ("moe_norm_min", _real(1e-9, above=False)),
    ("softcap", _real(65536.0, above=False)),
    (
        "multiplier factor alpha low_freq_factor high_freq_factor beta_fast beta_slow",
        _real(65536.0),
    ),
    ("attention_factor short_mscale long_mscale", _real(1024.0)),
    ("mscale mscale_all_dim llama_4_scaling_beta", _real(1024.0, above=False)),
    ("rope_theta rope_local_base_freq", _real(1e12, low=1.0)),
    ("partial_rotary_factor downsample_ratio", _real(1.0)),
)
# Numbers that families read. The limits are beyond any real model: what exceeds them is a
# damaged or hostile file, and would take minutes and gigabytes before an error.
NUMBERS: dict[str, Range] = {name: range_ for names, range_ in _RANGES for name in names.split()}
OWN = _whole(1 << 20)  # of other keys, which one family alone has
# Keys whose aliases may differ: lengths that a model was made for, and was trained on.
OF_LENGTH = ("max_position_embeddings", "seq_length")
# Keys that a multimodal model's config.json may have beside its text_config and mean for it.
WHOLE_MODELS = ("eos_token_id", "tie_word_embeddings")
LAYER_TYPES = GLOBAL_LAYERS, LOCAL_LAYERS = "full_attention", "sliding_attention"
# What config.json calls an MLP's function.
_TANH = (
    "gelu_tanh",
    "gelu_new",
    "gelu_fast",
    "gelu_accurate",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
)
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


def as_whole(value: Any, allowed: Range) -> Any:
    """A value, as an int where it is a whole number that the file writes as a float."""
    is_whole = allowed.whole and isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


class Noted(dict[str, Any]):
    """A mapping that notes in `read` which keys it was asked for."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


class ConfigReader:
    """A config.json with typed getters; every error names the file, the key and what is allowed."""

    def __init__(self, values: Mapping[str, Any], path: Path, inside: str = ""):
        """inside: the key of the object that `values` are, where they are not the whole file."""
        self.values = Noted(values)
        self.path = path
        self.inside = inside
        self.parts: list[ConfigReader] = []  # of objects inside that were read
        self.notes: list[str] = []  # for who runs the model: what is not as the file may mean it
        self._reads_rope = False

    def part(self, values: Mapping[str, Any], inside: str) -> ConfigReader:
        """The reader of an object inside."""
        made = ConfigReader(values, self.path, inside)
        made.notes = self.notes
        self.parts.append(made)
        return made

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """The same file, and these values where it lacks the keys, or has null."""
        return self.with_values(
            **{key: value for key, value in defaults.items() if self.values.get(key) is None}
        )

    def with_values(self, **values: Any) -> ConfigReader:
        """The same file, and these values in place of its own."""
        made = ConfigReader({**self.values, **values}, self.path, self.inside)
        made.values.read, made.parts, made.notes = self.values.read, self.parts, self.notes
        return made

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
        return self.part({**(defaults or {}), **shared, **given}, "text_config")

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
        allowed = NUMBERS.get(key, OWN)
        names = [name for name in (key, *aliases) if self.values.get(name) is not None]
        found = names[0] if names else key
        for other in names[1:] if key not in OF_LENGTH else ():
            if self.values[other] != self.values[found]:
                raise self.wrong(other, f"{self.values[found]!r:.{MAX_SHOWN}}, as {found!r} is")
        value = self._get(found, default, required)
        if self.values.get(found) is not None:
            value = as_whole(value, allowed)
            if value not in allowed:
                raise self.wrong(found, allowed)
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
        values = [as_whole(each, NUMBERS[key]) for each in values]
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
        return tuple(window if kind == LOCAL_LAYERS else -1 for kind in types)

    def dtype(self) -> str | None:
        """The checkpoint's own dtype ("dtype" in transformers 5, "torch_dtype" before)."""
        value = self.values.get("dtype") or self.values.get("torch_dtype")
        return None if value is None else str(value).removeprefix("torch.")

    def _longrope(self, count: int) -> dict[str, tuple[float, ...]]:
        """LongRoPE's factors of `count` frequencies, for short and for long contexts."""
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
            if head_dim < 4:
                raise self.wrong("rope_scaling_type", "linear, null with heads of 2")
            return {"rope_theta": theta * factor ** (head_dim / (head_dim - 2))}
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
        for key in ROPE_BLOCKS:
            block = self.values.get(key) or {}
            is_plain = isinstance(block, dict) and all(
                block.get(name) in (None, "default") for name in ROPE_KINDS
            )
            if not is_plain:
                raise self.wrong(key, f"null: {self.values.get('model_type')} scales no positions")
        self.must_be("rope_scaling_type", None)

    def _rope_block(self, kind: str | None) -> tuple[dict[str, Any], str]:
        """How positions turn, and the key of that; as transformers has it where there are two.

        rope_scaling stands in place of rope_parameters. kind: as `rope` has it; where there is one,
        rope_scaling changes what rope_parameters say of GLOBAL_LAYERS.
        """
        scaling, whole = self.values.get("rope_scaling"), self.values.get("rope_parameters")
        for key, block in (("rope_scaling", scaling), ("rope_parameters", whole)):
            if not isinstance(block, (dict, type(None))):
                raise self.wrong(key, "an object, null")
            if block and kind is None and not set(block).isdisjoint(LAYER_TYPES):
                raise self.wrong(key, f"an object without {' and '.join(LAYER_TYPES)}, null")
        if kind is not None:
            own = (whole or {}).get(kind) or {}
            if not isinstance(own, dict) or (whole and set(whole).isdisjoint(LAYER_TYPES)):
                raise self.wrong("rope_parameters", f"an object of {' and '.join(LAYER_TYPES)}")
            changes = (scaling or {}) if kind == GLOBAL_LAYERS else {}
            return {**own, **changes}, "rope_parameters" if own else "rope_scaling"
        if not scaling or not whole:
            return dict(scaling or whole or {}), "rope_scaling" if scaling else "rope_parameters"
        lost = {key: value for key, value in whole.items() if key not in (*scaling, *ROPE_KINDS)}
        if lost:
            said = ", ".join(f"{key} {value!r:.{MAX_SHOWN}}" for key, value in lost.items())
            self.notes.append(
                f"{self.path}: rope_scaling stands in place of rope_parameters, as in "
                f"transformers, and does not say {said}; write into rope_scaling what it shall keep"
            )
        return dict(scaling), "rope_scaling"

    def _original_context(self, method: str, nested: ConfigReader) -> int | None:
        """The tokens that positions were trained on; those of the file's top level come first."""
        inner, outer = nested.optional_int(ORIGINAL), self.optional_int(ORIGINAL)
        if method not in BY_ORIGINAL:  # "dynamic" counts from max_position_embeddings
            return None
        if None not in (inner, outer) and inner != outer:
            self.notes.append(
                f"{self.path}: {ORIGINAL} is {outer}, and {inner} in {nested.inside}; the first "
                "counts, as in transformers: make the two the same"
            )
        return outer or inner

    def check_unread(self, unread: Collection[str]) -> None:
        """Notes the keys that nothing read and nobody knows, of the file and of its parts.

        unread: the family's, besides config_keys'. Raises UserError for one that may change
        results: by its name, and all of those that say how positions turn.
        """
        said = {key: value for key, value in self.values.items() if says_something(key, value)}
        is_of_rope = self.inside in ROPE_BLOCKS
        left = said.keys() - self.values.read - {*(ROPE_UNREAD if is_of_rope else unread)}
        unknown = sorted(key for key in left if is_of_rope or not is_known(key))
        for key in unknown:
            if is_of_rope or changes_results(key):
                raise self.wrong(
                    key,
                    f"null; no {self.values.get('model_type', 'model')} here reads it, and it may "
                    "change results: take it out if it does not",
                )
        if unknown:
            where = f"{self.inside} of {self.path}" if self.inside else f"{self.path}"
            self.notes.append(
                f"{where} has keys that are not known here, and stay unread: "
                f"{', '.join(quoted(key) for key in unknown[:MAX_NAMED])}"
            )
        for part in self.parts:
            part.check_unread(unread)

    def rope(
        self,
        head_dim: int,
        theta: float = 10000.0,
        partial: float = 1.0,
        kind: str | None = None,
        also: Mapping[str, str] | None = None,
    ) -> RopeSpec:
        """The rotary embedding from rope_parameters, or from rope_theta and rope_scaling.

        theta, partial: where config.json says neither. kind: of the layers that it is for, where
        rope_parameters has one for each. also: fields of RopeSpec by keys that the
        family reads besides.
        """
        self._reads_rope = True
        block, key = self._rope_block(kind)
        if kind != LOCAL_LAYERS:
            theta = self.get_float("rope_theta", theta)
        if not block and kind != LOCAL_LAYERS and self.values.get("rope_scaling_type") is not None:
            block = self._paddlenlp_scaling(head_dim, theta)
        nested = self.part(block, key)
        name = "rope_type" if "rope_type" in block else "type"
        method = nested.get_str(name, "default")
        if len({nested.get_str(each, method) for each in ROPE_KINDS}) > 1:
            self.notes.append(
                f"{self.path}: {key}: rope_type is {method!r}, and type {block['type']!r:.40}; the "
                "first counts, as in transformers: take the other out"
            )
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
        original = self._original_context(method, nested)
        given: dict[str, Any] = {
            key: nested.get_float(key) for key in ROPE_NUMBERS if block.get(key) is not None
        }
        given |= {
            field: nested.get_float(key)
            for key, field in (also or {}).items()
            if block.get(key) is not None
        }
        if method == "longrope":
            original = original or nested.get_int(ORIGINAL)
            given |= nested._longrope(rotary_dim // 2)
        if method != "default" and "factor" not in given:
            given["factor"] = self._context_factor(method, original, nested)
        rope = RopeSpec(
            theta=nested.get_float("rope_theta", theta),
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


def with_positions(
    spec: DecoderSpec, positions: Positions, applies: Callable[[int, AttentionBlock], bool]
) -> DecoderSpec:
    """The spec with these positions in the attention for which `applies`, by layer and block."""
    return spec.with_blocks(
        AttentionBlock,
        lambda index, block: (
            replace(block, positions=positions) if applies(index, block) else block
        ),
    )


def with_experts(
    spec: DecoderSpec, experts: ExpertBlock, is_sparse: Callable[[int], bool]
) -> DecoderSpec:
    """The spec with an expert block in place of the MLP of each layer for which `is_sparse`."""
    return spec.with_blocks(MlpBlock, lambda index, block: experts if is_sparse(index) else block)


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
