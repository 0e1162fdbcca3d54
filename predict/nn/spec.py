"""DecoderSpec: what a decoder-only transformer looks like, as data. A family makes one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding (Su et al. 2021) with a context-extension method.

    method: "default", "linear" (Chen et al. 2023), "dynamic" (NTK by length), "llama3", "yarn"
    (Peng et al. 2023). Fields that a method does not use keep their defaults.
    """

    theta: float = 10000.0
    method: str = "default"
    factor: float = 1.0
    rotary_dim: int | None = None  # None: the whole head; else its first rotary_dim dims
    original_max_position: int | None = None  # tokens of the unscaled training context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn (DeepSeek's spelling)
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ramp's borders to whole dims


@dataclass(frozen=True)
class DecoderSpec:
    """Shapes and switches of one network; sizes in elements, positions in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens the checkpoint was made for
    norm_eps: float
    rope: RopeSpec = field(default_factory=RopeSpec)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotation
    tie_word_embeddings: bool = False
    windows: tuple[int, ...] = ()  # per layer: visible tokens, -1 all; empty: all layers -1
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")

    @property
    def qkv_size(self) -> int:
        """Output features of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def max_context(self) -> int:
        """Tokens that the checkpoint was made for, its context extension included."""
        extended = (self.rope.original_max_position or 0) * self.rope.factor
        if self.rope.method in ("linear", "dynamic"):
            extended = self.max_position * self.rope.factor
        return max(self.max_position, int(extended))

    @property
    def softmax_scale(self) -> float:
        """Factor on query-key products."""
        return self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Tokens that a layer's attention sees, -1 for all."""
        return self.windows[layer] if self.windows else -1

    @property
    def num_matmul_weights(self) -> int:
        """Elements of all matrices that a decode step multiplies by (layers and LM head)."""
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size
