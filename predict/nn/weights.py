"""From checkpoint names to the decoder's layers: what is expected, how it is read or made up."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.nn.spec import DecoderSpec

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device
    from predict.loading.checkpoint import Checkpoint
    from predict.schemes import Quantized, Scheme


@dataclass(frozen=True)
class WeightNames:
    """Names in a family's checkpoints. Linears by prefix (".weight" and ".bias" follow).

    Where a linear has several prefixes, they are stacked along the output features.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: tuple[str, ...] = ("self_attn.o_proj",)
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class LinearPlan:
    """One linear of the network: its parts in the checkpoint and its sizes."""

    prefixes: tuple[str, ...]
    part_sizes: tuple[int, ...]  # output features of each part
    in_features: int
    has_bias: bool

    @property
    def out_features(self) -> int:
        """Output features of all parts."""
        return sum(self.part_sizes)


@dataclass(frozen=True)
class LayerPlan:
    """Names and linears of one layer."""

    attention_norm: str
    qkv: LinearPlan
    q_norm: str | None
    k_norm: str | None
    out: LinearPlan
    mlp_norm: str
    gate_up: LinearPlan
    down: LinearPlan


@dataclass(frozen=True)
class WeightPlan:
    """Every tensor that a network needs, by checkpoint name."""

    spec: DecoderSpec
    embedding: str
    final_norm: str
    head: LinearPlan  # with tied embeddings its weight is the embedding's
    layers: tuple[LayerPlan, ...]
    ignored: tuple[str, ...]

    def linears(self) -> Iterator[LinearPlan]:
        """The layers' linears, the head apart."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Names and lengths of the norm weights."""
        yield self.final_norm, self.spec.hidden_size
        for layer in self.layers:
            yield layer.attention_norm, self.spec.hidden_size
            yield layer.mlp_norm, self.spec.hidden_size
            for name in (layer.q_norm, layer.k_norm):
                if name:
                    yield name, self.spec.head_dim


def check_sizes(spec: DecoderSpec, names: WeightNames, checkpoint: Checkpoint) -> None:
    """Raises UserError where config.json's main sizes are not those of the checkpoint's tensors.

    Before a plan is made of them: the plan's own check would list thousands of names, one by one.
    """
    before, after = map(re.escape, names.layer.split("{layer}"))
    layer = re.compile(f"{before}([0-9]+){after}")
    found = {match[1] for match in map(layer.match, checkpoint.tensors) if match}
    embedding = checkpoint.tensors.get(names.embedding)
    problems = []
    if len(found) != spec.num_layers:
        problems.append(
            f"num_hidden_layers is {spec.num_layers}, and the tensors are those of {len(found)} "
            "layers"
        )
    wanted = (spec.vocab_size, spec.hidden_size)
    if embedding is not None and embedding.shape != wanted:
        problems.append(
            f"vocab_size x hidden_size is {list(wanted)}, and {names.embedding} has the shape "
            f"{list(embedding.shape)}"
        )
    if problems:
        raise UserError(
            f"{checkpoint.directory}: the tensors do not fit config.json: {'; '.join(problems)}; "
            "the two do not belong to one model, or the download is not complete"
        )


def plan_weights(spec: DecoderSpec, names: WeightNames) -> WeightPlan:
    """Resolves a family's names for every layer of a spec."""
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def linear(
        prefix: str, parts: tuple[str, ...], sizes: tuple[int, ...], in_features: int, bias: bool
    ) -> LinearPlan:
        return LinearPlan(tuple(prefix + part for part in parts), sizes, in_features, bias)

    def layer(index: int) -> LayerPlan:
        at = names.layer.format(layer=index)
        qkv_sizes = (query, key_value, key_value) if len(names.qkv) == 3 else (spec.qkv_size,)
        gate_up_sizes = (inner, inner) if len(names.gate_up) == 2 else (2 * inner,)
        return LayerPlan(
            attention_norm=at + names.attention_norm,
            qkv=linear(at, names.qkv, qkv_sizes, hidden, spec.qkv_bias),
            q_norm=at + names.q_norm if spec.qk_norm else None,
            k_norm=at + names.k_norm if spec.qk_norm else None,
            out=linear(at, names.out, (hidden,), query, spec.out_bias),
            mlp_norm=at + names.mlp_norm,
            gate_up=linear(at, names.gate_up, gate_up_sizes, hidden, spec.mlp_bias),
            down=linear(at, names.down, (hidden,), inner, spec.mlp_bias),
        )

    head = names.embedding.removesuffix(".weight") if spec.tie_word_embeddings else names.head
    return WeightPlan(
        spec=spec,
        embedding=names.embedding,
        final_norm=names.final_norm,
        head=LinearPlan((head,), (spec.vocab_size,), hidden, False),
        layers=tuple(layer(i) for i in range(spec.num_layers)),
        # A tied checkpoint may still carry its head; it is the embedding.
        ignored=names.ignored + ((names.head,) if spec.tie_word_embeddings else ()),
    )


class WeightSource(Protocol):
    """Gives tensors by name: from a checkpoint, or made up."""

    def vector(self, name: str, size: int) -> npt.NDArray[Any]:
        """[size]."""

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Any:
        """`shape`, the named matrices one below the other; an array, or a tensor in its place."""

    def host_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """As `matrix`, always an array: what is rounded is rounded by the host."""

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        """[size], the named vectors one after another."""

    def close(self) -> None:
        """Ends reading; what was given stays."""


def place_tensor(values: Any, dtype: str, place: Any) -> Tensor:
    """`values` (an array, bfloat16 as uint16; or a tensor already there) at a GPU's `place`.

    Converted to `dtype` on the host.
    """
    import paddle

    if not isinstance(values, np.ndarray):
        return values
    tensor = paddle.to_tensor(values, place=paddle.CPUPlace())
    return tensor.astype(dtype)._copy_to(place, True)


class CheckpointSource:
    """Weights of a checkpoint, as stored ([out, in], bfloat16 as uint16)."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def vector(self, name: str, size: int) -> npt.NDArray[Any]:
        """See WeightSource."""
        return self.checkpoint.read_float((name,))

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """See WeightSource."""
        return self.checkpoint.read_float(names)

    def host_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """See WeightSource."""
        return self.checkpoint.read_float(names)

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        """See WeightSource."""
        return self.checkpoint.read_float(names)

    def close(self) -> None:
        """See WeightSource."""


class RandomSource:
    """Seeded random weights of the right shapes, for timing without a checkpoint.

    Values repeat with a long period: drawing billions of normals would take longer than the run.
    """

    PERIOD = (1 << 20) + 7  # odd, so that rows of a power-of-two matrix differ

    def __init__(self, seed: int):
        generator = np.random.default_rng(seed)
        self.values = generator.standard_normal(self.PERIOD, dtype=np.float32)
        self.values *= np.float32(0.02)
        self.used = 0

    def vector(self, name: str, size: int) -> npt.NDArray[Any]:
        """See WeightSource."""
        return np.ones(size, np.float32)

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """See WeightSource."""
        count = shape[0] * shape[1]
        start = self.used % self.PERIOD
        self.used += count
        return np.resize(np.roll(self.values, -start), shape)

    def host_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """See WeightSource."""
        return RandomSource.matrix(self, names, shape)

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        """See WeightSource."""
        return self.matrix(names, (1, size))[0]

    def close(self) -> None:
        """See WeightSource."""

    def quantized(self, scheme: Scheme, group_size: int, shape: tuple[int, int]) -> Quantized:
        """A linear [N, K] of random codes: some rows are rounded, and repeated to all N."""
        num_rows = min(shape[0], max(1, self.PERIOD // shape[1]))
        sample = scheme.quantize(self.host_matrix((), (num_rows, shape[1])), group_size)

        def repeated(values: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
            if values is None:
                return None
            rows_per_scale = -(-num_rows // len(values))
            return np.resize(values, (-(-shape[0] // rows_per_scale), *values.shape[1:]))

        return replace(
            sample,
            codes=self.codes(sample.codes, shape),
            scale=repeated(sample.scale),
            zero=repeated(sample.zero),
        )

    def codes(self, rows: npt.NDArray[Any], shape: tuple[int, int]) -> Any:
        """The rows, repeated to `shape`."""
        return np.resize(rows, shape)


class DeviceRandomSource(RandomSource):
    """Random weights for a GPU, made there: one pattern goes up, and copies of it fill matrices."""

    PERIOD = (1 << 23) + 9  # odd, so that rows of a power-of-two matrix differ

    def __init__(self, seed: int, dtype: str, device: Device):
        super().__init__(seed)
        self.device = device
        self.dtype = dtype

    @functools.cached_property
    def pattern(self) -> Tensor:
        """The values on the GPU; made when first needed, after the memory was found to suffice."""
        return place_tensor(self.values, self.dtype, self.device.place())

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Tensor:
        """See WeightSource."""
        import paddle
        from predict.device import cuda

        result = paddle.empty(list(shape), self.pattern.dtype)
        cuda.fill_with(result, self.pattern, cuda.current_stream(self.device))
        return result

    def codes(self, rows: npt.NDArray[Any], shape: tuple[int, int]) -> Tensor:
        """The rows, repeated to `shape` on the GPU."""
        import paddle
        from predict.device import cuda

        cpu = paddle.to_tensor(rows, place=paddle.CPUPlace())
        pattern = cpu._copy_to(self.device.place(), True)
        result = paddle.empty(list(shape), pattern.dtype)
        cuda.fill_with(result, pattern, cuda.current_stream(self.device))
        paddle.device.synchronize(self.device.place())  # the pattern goes away
        return result

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        """See WeightSource."""
        start = self.used % (self.PERIOD - size)
        self.used += size
        return self.values[start : start + size]
