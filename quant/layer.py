"""One decoder layer in float32: its weights as NumPy arrays, and its forward pass with captures.

T tokens of a batch of whole sequences, H hidden size. The forward pass is the engine's own: the
functions of `predict.ops.compiled` or `predict.ops.plain` over `predict.nn.decoder`'s records.
Experts are computed one after another, each of the rows that the router sends to it.

Linears have keys: their slot's name in predict.nn.blocks, of an expert "expert_gate_up.3",
"expert_down.3". What is in front of the dot is the key's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from predict.config.quantization import QuantSettings
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.layouts.online import Online
from predict.loading.sources import WeightSource
from predict.nn.blocks import (
    Activation,
    AttentionBlock,
    Block,
    ExpertBlock,
    LatentAttentionBlock,
    LinearSlot,
    MlpBlock,
    Norm,
    Residual,
)
from predict.nn.decoder import (
    Attention,
    BlockWeights,
    Experts,
    HeadMatrices,
    LatentAttention,
    Linear,
    Mlp,
    NormWeights,
)
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import RowKind, StepInputs, max_lens_of, to_tensors
from predict.nn.spec import DecoderSpec, EmbeddingSpec
from predict.nn.weights import BlockPlan, ExpertsPlan, LinearPlan, TablePlan, WeightPlan
from predict.ops import composed
from quant.grids import Array

if TYPE_CHECKING:
    from paddle import Tensor

EXPERT = "expert_"  # what kinds of routed experts begin with
BLOCK_SIZE = 64  # of the cache that one forward pass uses


def kind_of(key: str) -> str:
    """The key of a linear without the number of its expert."""
    return key.partition(".")[0]


def expert_of(key: str) -> int | None:
    """The expert of a linear; None for a linear of all tokens."""
    return int(key.partition(".")[2]) if key.startswith(EXPERT) else None


def check_layers(plan: WeightPlan, reader: ConfigReader) -> None:
    """Raises UserError where calibration does not know the network's layers.

    It moves scales between a norm and the product behind it, and between products of Llama's form,
    whose matrices it reads as they lie; experts' may lie otherwise.
    """
    spec = plan.spec
    plain = spec.embedding == EmbeddingSpec() and spec.head.width is None
    plain = plain and not any(
        linear.is_stored_otherwise for linear in plan.linears() if not linear.is_expert
    )
    if not plain or not all(map(_is_known, spec.blocks())):
        raise UserError(
            f"{reader.path}: layers of {spec.model_type} cannot be calibrated (allowed: those of "
            "llama, mistral, qwen2, qwen3, and of the families with experts); round them while "
            "loading, with --quant_type"
        )


def _is_known(block: Block) -> bool:
    norm = block.norm
    if norm is None or norm != Norm(epsilon=norm.epsilon) or block.post_norm is not None:
        return False
    if isinstance(block, MlpBlock) and (block.activation != Activation() or block.parallel):
        return False
    if isinstance(block, AttentionBlock) and (
        block.positions.kind != "rotary"
        or block.positions.two_dimensional
        or block.prefix_mask
        or block.qk_norm_each
    ):
        return False
    return block.residual == Residual()


def passes_scale(activation: Activation) -> bool:
    """Whether dividing the rows of up divides the activation's output."""
    return activation.gated and not activation.clamp and not activation.up_offset


@dataclass
class LinearWeights:
    """A linear in float32."""

    plan: LinearPlan
    weight: Array  # [N, K]
    bias: Array | None  # [N]


@dataclass
class Table:
    """A tensor that no scheme stores, in float32."""

    plan: TablePlan
    values: Array


@dataclass
class LayerWeights:
    """A layer in float32; calibration changes it in place. Names are those that are written."""

    index: int
    spec: DecoderSpec
    plan: tuple[BlockPlan, ...]
    vectors: dict[str, Array] = field(default_factory=dict)  # norms by checkpoint name
    tables: dict[str, Table] = field(default_factory=dict)  # by slot
    linears: dict[str, LinearWeights] = field(default_factory=dict)  # by key, as they are computed

    @classmethod
    def read(
        cls, index: int, plan: WeightPlan, source: WeightSource, written: WeightPlan | None = None
    ) -> LayerWeights:
        """Reads one layer of a checkpoint. written: its names there; None: those of `plan`."""
        written = written or plan
        layer = cls(index, plan.spec, written.layers[index])
        online = Online(source, QuantSettings(), plan)

        def linear(stored: LinearPlan, kept: LinearPlan) -> LinearWeights:
            weight, bias = to_float32(online.read(stored).codes), online.bias(stored)
            weight = np.array(weight, np.float32)  # of its own: it is changed in place
            return LinearWeights(kept, weight, None if bias is None else to_float32(bias))

        for before, after in zip(plan.layers[index], layer.plan, strict=True):
            for (_, norm), (_, kept) in zip(before.norms(), after.norms(), strict=True):
                layer.vectors[kept.weight] = to_float32(source.vector(norm.weight, norm.size))
            for name, slot in before.slots.items():
                kept_slot = after.slots[name]
                if isinstance(slot, LinearPlan) and isinstance(kept_slot, LinearPlan):
                    layer.linears[name] = linear(slot, kept_slot)
                elif isinstance(slot, ExpertsPlan) and isinstance(kept_slot, ExpertsPlan):
                    pairs = zip(slot.experts, kept_slot.experts, strict=True)
                    for expert, (stored, kept_one) in enumerate(pairs):
                        layer.linears[f"{EXPERT}{name}.{expert}"] = linear(stored, kept_one)
                elif isinstance(slot, TablePlan) and isinstance(kept_slot, TablePlan):
                    rows = (slot.shape[0] if len(slot.shape) > 1 else 1, slot.shape[-1])
                    values = to_float32(source.host_matrix((slot.name,), rows))
                    layer.tables[name] = Table(kept_slot, values.reshape(slot.shape))
        return layer

    def storable(self) -> list[str]:
        """Keys of the linears that a scheme may store."""
        return [key for key, linear in self.linears.items() if not linear.plan.head_parts]

    def _block(self, *kinds: type[Any]) -> BlockPlan | None:
        return next((plan for plan in self.plan if isinstance(plan.block, kinds)), None)

    @property
    def experts(self) -> ExpertBlock | None:
        """The layer's expert block; None without one."""
        blocks = (plan.block for plan in self.plan)
        return next((block for block in blocks if isinstance(block, ExpertBlock)), None)

    @property
    def attention_name(self) -> str:
        """What the names of the attention's linears begin with."""
        return self.linears["out"].plan.prefixes[0].rpartition(".")[0]

    def norm_of(self, key: str) -> str | None:
        """The norm whose output a linear reads; None where it reads another linear's."""
        attention = self._block(AttentionBlock, LatentAttentionBlock)
        mlp = self._block(MlpBlock, ExpertBlock)
        plan, slot = {
            "qkv": (attention, "norm"),
            "qkv_a": (attention, "norm"),
            "q_b": (attention, "q_a_norm"),
            "gate_up": (mlp, "norm"),
            "shared_gate_up": (mlp, "norm"),
            "expert_gate_up": (mlp, "norm"),
        }.get(kind_of(key), (None, ""))
        return None if plan is None else dict(plan.norms())[slot].weight

    def scales_input(self, key: str) -> bool:
        """Whether a linear's input can be divided by channel in the weights that make it."""
        experts = self.experts
        if kind_of(key) not in ("expert_down", "shared_down") or experts is None:
            return True
        return passes_scale(experts.activation)

    def sharing(self, key: str) -> npt.NDArray[np.int64] | None:
        """Which input channels of a linear must have one scale: [K] -> number of their set.

        Every query head of a group reads the same value head. None: each channel its own.
        """
        plan = self._block(AttentionBlock)
        if key != "out" or plan is None or not isinstance(plan.block, AttentionBlock):
            return None
        block = plan.block
        if block.num_heads == block.num_kv_heads:
            return None
        group = block.num_heads // block.num_kv_heads
        head, channel = np.divmod(np.arange(block.q_size), block.head_dim)
        return head // group * block.head_dim + channel

    def _maker(self, key: str) -> tuple[str, npt.NDArray[np.int64]]:
        """The linear, and its rows, that make the input of a linear without a norm before it."""
        if key == "out" and "kv_b" in self.linears:
            before = self.linears["kv_b"].plan
            keys, values = before.head_parts
            heads = np.arange(before.out_features).reshape(-1, keys + values)
            return "kv_b", heads[:, keys:].reshape(-1)
        name = "qkv" if key == "out" else key.replace("down", "gate_up")
        rows = self.linears[name].weight.shape[0]
        if key == "out":
            block = self.plan[0].block
            assert isinstance(block, AttentionBlock)
            return name, np.arange(rows - block.kv_size, rows)
        return name, np.arange(rows // 2, rows)

    def scale_input(self, key: str, scale: Array) -> None:
        """Divides a linear's input by scale [K] and multiplies its columns: the same function.

        The weights that make the input are divided: the norm's, the value rows of qkv or kv_b, or
        the up rows. All readers of an expert block's norm, the router too, are scaled together.
        """
        norm = self.norm_of(key)
        if norm is not None:
            self.vectors[norm] = self.vectors[norm] / scale
            for reader, linear in self.linears.items():
                if self.norm_of(reader) == norm:
                    linear.weight *= scale
            if self.experts is not None and kind_of(key) in ("shared_gate_up", "expert_gate_up"):
                for name in ("router", "shared_gate"):
                    if name in self.tables:
                        self.tables[name].values = self.tables[name].values * scale
            return
        self.linears[key].weight *= scale
        name, rows = self._maker(key)
        sets = self.sharing(key)
        if sets is not None:
            scale = scale[np.unique(sets, return_index=True)[1]]
        before = self.linears[name]
        before.weight[rows] /= scale[:, None]
        if before.bias is not None:
            before.bias[rows] /= scale

    def linear(self, key: str, compiled: ModuleType | None) -> Linear:
        """A linear as the operators take it, float32."""
        import paddle

        weights = self.linears[key]
        matrix = paddle.to_tensor(weights.weight)
        if compiled is not None:
            matrix = compiled.pack_dense(matrix, "float32")
        bias = None if weights.bias is None else paddle.to_tensor(weights.bias)
        rows, columns = weights.weight.shape
        return Linear("dense", (matrix,), bias, columns, rows)

    def records(self, compiled: ModuleType | None) -> RunnableLayer:
        """The layer as the operators take it, float32.

        compiled: predict.ops.compiled; None for plain operators.
        """
        import paddle

        def block(plan: BlockPlan) -> BlockWeights | RoutedExperts:
            slots: dict[str, Any] = {}
            for name, stored in plan.slots.items():
                if isinstance(stored, LinearPlan) and not stored.head_parts:
                    slots[name] = self.linear(name, compiled)
                elif isinstance(stored, TablePlan):
                    with on_host() if name in ROUTING else nullcontext():
                        slots[name] = paddle.to_tensor(self.tables[name].values)
            for name, norm in plan.norms():
                slots[name] = NormWeights(paddle.to_tensor(self.vectors[norm.weight]))
            if isinstance(plan.block, AttentionBlock):
                return Attention(plan.block, **slots)
            if isinstance(plan.block, LatentAttentionBlock):
                return LatentAttention(plan.block, kv_b=self._head_matrices(), **slots)
            if isinstance(plan.block, MlpBlock):
                return Mlp(plan.block, **slots)
            for slot in plan.block.slots(self.spec.hidden_size):
                if isinstance(slot, LinearSlot) and slot.num_experts:
                    sizes = slot.in_features, slot.out_features, slot.num_experts
                    slots[slot.name] = Linear("dense", (), None, *sizes)
            return RoutedExperts(
                Experts(plan.block, **slots),
                lambda kind, expert: self.linear(f"{EXPERT}{kind}.{expert}", compiled),
            )

        return tuple(map(block, self.plan))

    def _head_matrices(self) -> HeadMatrices:
        """Of kv_b, as the plain operators take them."""
        import paddle

        linear = self.linears["kv_b"]
        keys, values = linear.plan.head_parts
        heads = linear.weight.reshape(-1, keys + values, linear.plan.in_features)
        with on_host():
            return HeadMatrices(
                paddle.to_tensor(heads[:, :keys]), paddle.to_tensor(heads[:, keys:])
            )


ROUTING = ("router", "router_bias", "correction", "shared_gate")  # computed on the host


@dataclass(frozen=True)
class RoutedExperts:
    """An expert block whose experts' linears are made when their rows are computed."""

    weights: Experts  # gate_up and down without tensors
    linear: Callable[[str, int], Linear]  # of a slot's name and an expert


RunnableLayer: TypeAlias = tuple[BlockWeights | RoutedExperts, ...]


@dataclass(frozen=True)
class Routed:
    """Rows of an expert block, and where the router sends them."""

    inputs: Array  # [T, H], what the block's norm made
    ids: npt.NDArray[np.int32]  # [T, top_k]


@dataclass(frozen=True)
class Captured:
    """The values that a layer computed for one batch."""

    inputs: dict[str, Array]  # of each linear by key, [T, K]; those of routed experts apart
    keys: Array | None  # [T, num_kv_heads, head_dim], rotated, as the cache takes them
    values: Array | None  # [T, num_kv_heads, head_dim]
    output: Array  # [T, H]
    routed: Routed | None = None  # of an expert block


@contextmanager
def on_host() -> Iterator[None]:
    """Makes tensors on the CPU in its block, for operators that only plain Paddle has."""
    import paddle

    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def run_layer(
    backend: ModuleType,
    layer: RunnableLayer,
    hidden: Array,
    lengths: Sequence[int],
    ropes: Sequence[Tensor],
) -> Captured:
    """One forward pass of whole sequences, one after another in hidden [T, H].

    lengths: tokens of each sequence. ropes: the engine's rotary tables.
    """
    import paddle

    inputs: dict[str, Tensor] = {}
    keys: Array | None = None
    values: Array | None = None
    routed: Routed | None = None
    with paddle.no_grad():
        x = paddle.to_tensor(hidden)
        for block in layer:
            if isinstance(block, Attention):
                x, keys, values = _run_attention(backend, block, x, lengths, ropes, inputs)
            elif isinstance(block, LatentAttention):
                x = _run_latent_attention(backend, block, x, lengths, ropes, inputs)
            elif isinstance(block, Mlp):
                inputs["gate_up"] = composed.normed(backend, x, block.norm, block.block.norm)
                gate_up = backend.linear(inputs["gate_up"], block.gate_up)
                inputs["down"] = backend.activate(gate_up, block.block.activation)
                x = x + backend.linear(inputs["down"], block.down)
            else:
                assert isinstance(block, RoutedExperts)
                x, routed = _run_experts(backend, block, x, inputs)
    return Captured(
        inputs={key: tensor.numpy() for key, tensor in inputs.items()},
        keys=keys,
        values=values,
        output=x.numpy(),
        routed=routed,
    )


def _run_experts(
    backend: ModuleType, experts: RoutedExperts, x: Tensor, inputs: dict[str, Tensor]
) -> tuple[Tensor, Routed]:
    """The block's output, and its routed rows."""
    import paddle
    from predict.ops import plain

    weights = experts.weights
    block = weights.block
    normed = composed.normed(backend, x, weights.norm, block.norm)
    rows: Array = normed.numpy()
    with on_host():
        on_cpu = paddle.to_tensor(rows)
        ids, shares = (part.numpy() for part in plain.route(on_cpu, weights))
        gate = None if weights.shared_gate is None else paddle.matmul(on_cpu, weights.shared_gate.T)
    total = np.zeros_like(rows)
    for expert in np.unique(ids):
        row, choice = np.nonzero(ids == expert)
        inner = expert_inner(backend, experts.linear("gate_up", expert), block, rows[row])
        made = backend.linear(inner, experts.linear("down", expert)).numpy()
        total[row] += made * shares[row, choice][:, None]
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        inputs["shared_gate_up"] = normed
        gate_up = backend.linear(normed, weights.shared_gate_up)
        inputs["shared_down"] = backend.activate(gate_up, block.activation)
        shared = backend.linear(inputs["shared_down"], weights.shared_down).numpy()
        if gate is not None:
            shared = shared / (1.0 + np.exp(-gate.numpy()))
        total += shared
    return x + paddle.to_tensor(total), Routed(rows, ids)


def expert_inner(backend: ModuleType, gate_up: Linear, block: ExpertBlock, rows: Array) -> Tensor:
    """What an expert's second product reads, [n, inner], of its rows [n, H]."""
    import paddle

    with paddle.no_grad():
        made = backend.linear(paddle.to_tensor(np.ascontiguousarray(rows)), gate_up)
        inner: Tensor = backend.activate(made, block.activation)
    return inner


def _run_attention(
    backend: ModuleType,
    attention: Attention,
    x: Tensor,
    lengths: Sequence[int],
    ropes: Sequence[Tensor],
    inputs: dict[str, Tensor],
) -> tuple[Tensor, Array, Array]:
    """The block's output, and the keys and values [T, kv_heads, D] of the cache."""
    block = attention.block
    inputs["qkv"] = composed.normed(backend, x, attention.norm, block.norm)
    qkv = backend.linear(inputs["qkv"], attention.qkv)
    keys: list[Array] = []
    values: list[Array] = []

    def attend(start: int, length: int) -> Tensor:
        span = qkv[start : start + length]
        cache, step = _one_sequence(length, block.num_kv_heads, [block.head_dim] * 2, span.place)
        q, (key_cache, value_cache) = backend.rope_and_cache_write(
            span, attention, cache, ropes, step
        )
        for kept, written in ((keys, key_cache), (values, value_cache)):
            by_slot = written.numpy().transpose(0, 2, 1, 3)
            kept.append(by_slot.reshape(-1, block.num_kv_heads, block.head_dim)[:length])
        mixed: Tensor = backend.paged_attention(q, attention, (key_cache, value_cache), step)
        return mixed

    inputs["out"] = _by_sequence(attend, lengths)
    made = backend.linear(inputs["out"], attention.out)
    return x + made, np.concatenate(keys), np.concatenate(values)


def _run_latent_attention(
    backend: ModuleType,
    attention: LatentAttention,
    x: Tensor,
    lengths: Sequence[int],
    ropes: Sequence[Tensor],
    inputs: dict[str, Tensor],
) -> Tensor:
    """The block's output. Latents have no operators of their own but plain ones: on the host."""
    import paddle
    from predict.ops import plain

    block = attention.block
    inputs["qkv_a"] = composed.normed(backend, x, attention.norm, block.norm)
    q, latents = plain.split(backend.linear(inputs["qkv_a"], attention.qkv_a), block.latent_size)
    q = composed.normed(backend, q, attention.q_a_norm, block.q_a_norm)
    if attention.q_b is not None:
        inputs["q_b"] = q
        q = backend.linear(q, attention.q_b)
    with on_host():
        q, latents = paddle.to_tensor(q.numpy()), paddle.to_tensor(latents.numpy())
        tables = [paddle.to_tensor(rope.numpy()) for rope in ropes]
        norm = NormWeights(paddle.to_tensor(attention.kv_a_norm.weight.numpy()))
        weights = replace(attention, kv_a_norm=norm)

        def attend(start: int, length: int) -> Tensor:
            span = slice(start, start + length)
            cache, step = _one_sequence(length, 1, [block.latent_size], q.place)
            turned, kept = plain.turn_and_keep_latents(
                q[span], latents[span], weights, cache, tables, step
            )
            return plain.latent_attention(turned, weights, tuple(kept), step)

        mixed = _by_sequence(attend, lengths).numpy()
    inputs["out"] = paddle.to_tensor(mixed)
    return x + backend.linear(inputs["out"], attention.out)


def _by_sequence(attend: Callable[[int, int], Tensor], lengths: Sequence[int]) -> Tensor:
    """The results of `attend` for each sequence's start and length, one below the other.

    One at a time: plain Paddle's scores are as large as its longest context squared, and padding
    would multiply that by the batch.
    """
    import paddle

    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    mixed = [attend(start, length) for start, length in zip(starts, lengths, strict=True)]
    return paddle.concat(mixed) if len(mixed) > 1 else mixed[0]


def _one_sequence(
    length: int, num_heads: int, sizes: Sequence[int], place: Any
) -> tuple[tuple[Tensor, ...], StepInputs]:
    """An empty cache of rows of `sizes` values, and the step of one sequence from its begin."""
    import paddle

    step = first_step(np.zeros(length, np.int32), BLOCK_SIZE)
    num_blocks = step.block_tables.size
    cache = tuple(
        paddle.zeros([num_blocks, num_heads, BLOCK_SIZE, size], "float32") for size in sizes
    )
    return cache, to_tensors(step, place)


def first_step(token_ids: npt.NDArray[np.int32], block_size: int) -> StepInputs:
    """All tokens of one sequence in one step, the logits of each, and the first blocks of a cache.

    token_ids: [n].
    """
    length = len(token_ids)
    positions = np.arange(length, dtype=np.int32)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=np.array([0, length], np.int32),
        context_lens=np.array([length], np.int32),
        block_tables=np.arange(-(-length // block_size), dtype=np.int32)[None],
        logit_indices=positions,
        max_lens=max_lens_of([length], [length], RowKind.ALL),
    )
