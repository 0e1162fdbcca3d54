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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from predict.config.quantization import QuantSettings
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.layouts.online import Online
from predict.loading.sources import WeightSource
from predict.nn.blocks import (
    Activation,
    Block,
    BlockStep,
    BlockWeights,
    HeadMatrices,
    Linear,
    NormWeights,
)
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import RowKind, StepInputs, max_lens_of, to_tensors
from predict.nn.kinds.attention import Attention, AttentionBlock
from predict.nn.kinds.experts import ExpertBlock, Experts
from predict.nn.kinds.latent_attention import LatentAttention
from predict.nn.plans import (
    BlockPlan,
    ExpertsPlan,
    LinearPlan,
    NormPlan,
    SlotPlan,
    TablePlan,
    WeightPlan,
)
from predict.nn.spec import DecoderSpec, EmbeddingSpec
from predict.ops import plain
from quant.grids import Array

if TYPE_CHECKING:
    from paddle import Tensor

Kind = TypeVar("Kind", bound=Block)
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
    if not plain or not all(block.can_be_calibrated for block in spec.blocks()):
        raise UserError(
            f"{reader.path}: layers of {spec.model_type} cannot be calibrated (allowed: those of "
            "llama, mistral, qwen2, qwen3, and of the families with experts); round them while "
            "loading, with --quant_type"
        )


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

    def block_of(self, kind: type[Kind]) -> Kind | None:
        """The layer's block of a kind; None without one."""
        return next((p.block for p in self.plan if isinstance(p.block, kind)), None)

    @property
    def experts(self) -> ExpertBlock | None:
        """The layer's expert block; None without one."""
        return self.block_of(ExpertBlock)

    @property
    def attention_name(self) -> str:
        """What the names of the attention's linears begin with."""
        return self.linears["out"].plan.prefixes[0].rpartition(".")[0]

    def norm_of(self, key: str) -> str | None:
        """The norm whose output a linear reads; None where it reads another linear's."""
        slot = kind_of(key).removeprefix(EXPERT)
        plan = next(plan for plan in self.plan if slot in plan.slots)
        norm = plan.block.reads.get(slot)
        return None if norm is None else dict(plan.norms())[norm].weight

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
        block = self.block_of(AttentionBlock)
        if key != "out" or block is None or block.num_heads == block.num_kv_heads:
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
            block = self.block_of(AttentionBlock)
            assert block is not None
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

        def slot(name: str, stored: SlotPlan) -> Any:
            if isinstance(stored, ExpertsPlan):
                one, count = stored.experts[0], len(stored.experts)
                return Linear("dense", (), None, one.in_features, one.out_features, count)
            if isinstance(stored, LinearPlan):
                return (
                    self._head_matrices(name) if stored.head_parts else self.linear(name, compiled)
                )
            if isinstance(stored, TablePlan):
                with on_host() if name in ROUTING else nullcontext():
                    return paddle.to_tensor(self.tables[name].values)
            assert isinstance(stored, NormPlan)  # can_be_calibrated
            return NormWeights(paddle.to_tensor(self.vectors[stored.weight]))

        return RunnableLayer(
            tuple(
                plan.block.weights(
                    {n: slot(n, part) for n, part in plan.slots.items()}, "dense", None
                )
                for plan in self.plan
            ),
            lambda kind, expert: self.linear(f"{EXPERT}{kind}.{expert}", compiled),
        )

    def _head_matrices(self, key: str) -> HeadMatrices:
        """Of heads, as the plain operators take them."""
        import paddle

        linear = self.linears[key]
        keys, values = linear.plan.head_parts
        heads = linear.weight.reshape(-1, keys + values, linear.plan.in_features)
        with on_host():
            return HeadMatrices(
                paddle.to_tensor(heads[:, :keys]), paddle.to_tensor(heads[:, keys:])
            )


ROUTING = ("router", "router_bias", "correction", "shared_gate")  # computed on the host


@dataclass(frozen=True)
class RunnableLayer:
    """A layer whose experts' linears are made when their rows are computed."""

    blocks: tuple[BlockWeights, ...]  # linears of experts without tensors
    expert: Callable[[str, int], Linear]  # of a slot's name and an expert


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

    ops: Any = _CapturingOps(backend, layer, lengths)  # what a module is taken for
    with paddle.no_grad():
        x = paddle.to_tensor(hidden)
        for block in layer.blocks:
            x, _ = block.run(ops, x, BlockStep(ropes=ropes))
    return Captured(
        inputs={key: tensor.numpy() for key, tensor in ops.inputs.items()},
        keys=ops.keys,
        values=ops.values,
        output=x.numpy(),
        routed=ops.routed,
    )


class _CapturingOps:
    """A backend's operators over whole sequences, which keep what `Captured` has.

    Experts and latents have no operators of their own but plain ones: these run on the host. Caches
    are those of a sequence each, one after another.
    """

    def __init__(self, backend: ModuleType, layer: RunnableLayer, lengths: Sequence[int]):
        self._backend, self._expert = backend, layer.expert
        ends = np.cumsum(lengths).tolist()
        self._spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        linears = (pair for block in layer.blocks for pair in block.linears().items())
        self._keys = {id(linear): key for key, linear in linears}
        self.inputs: dict[str, Tensor] = {}
        self.keys: Array | None = None
        self.values: Array | None = None
        self.routed: Routed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        self.inputs[self._keys[id(weights)]] = x
        return self._backend.linear(x, weights)

    def rope_and_cache_write(
        self, qkv: Tensor, attention: Attention, cache: Any, ropes: Sequence[Tensor], inputs: Any
    ) -> tuple[Tensor, list[_Sequence]]:
        block = attention.block
        heads, size = block.num_kv_heads, block.head_dim
        turned, sequences = [], []
        for span in self._spans:
            cache, step = _one_sequence(span.stop - span.start, heads, [size] * 2, qkv.place)
            q, written = self._backend.rope_and_cache_write(
                qkv[span], attention, cache, ropes, step
            )
            turned.append(q)
            sequences.append(_Sequence(tuple(written), step, span))
        self.keys, self.values = (
            np.concatenate([each.rows(which) for each in sequences]) for which in (0, 1)
        )
        return _joined(turned), sequences

    def paged_attention(
        self, q: Tensor, attention: Attention, cache: Sequence[_Sequence], *given: Any
    ) -> Tensor:
        attend = self._backend.paged_attention
        return _joined([attend(q[one.span], attention, one.cache, one.step) for one in cache])

    def split(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return plain.split(x, size)

    def turn_and_keep_latents(
        self,
        q: Tensor,
        latents: Tensor,
        attention: LatentAttention,
        cache: Any,
        ropes: Sequence[Tensor],
        inputs: Any,
    ) -> tuple[Tensor, list[_Sequence]]:
        turned, sequences = [], []
        with on_host():
            q, latents, *tables = map(_to_host, (q, latents, *ropes))
            norm = NormWeights(_to_host(attention.kv_a_norm.weight))
            weights = replace(attention, kv_a_norm=norm)
            for span in self._spans:
                size = [attention.block.latent_size]
                cache, step = _one_sequence(span.stop - span.start, 1, size, q.place)
                one, kept = plain.turn_and_keep_latents(
                    q[span], latents[span], weights, cache, tables, step
                )
                turned.append(one)
                sequences.append(_Sequence(tuple(kept), step, span))
            return _joined(turned), sequences

    def latent_attention(
        self, q: Tensor, attention: LatentAttention, cache: Sequence[_Sequence], *given: Any
    ) -> Tensor:
        import paddle

        attend = plain.latent_attention
        with on_host():
            mixed = [attend(q[one.span], attention, one.cache, one.step) for one in cache]
        return paddle.to_tensor(_joined(mixed).numpy())

    def route(self, x: Tensor, weights: Experts) -> tuple[Array, Array]:
        with on_host():
            ids, shares = (part.numpy() for part in plain.route(_to_host(x), weights))
        self.routed = Routed(x.numpy(), ids)
        return ids, shares

    def experts(self, x: Tensor, ids: Array, shares: Array, weights: Experts) -> Tensor:
        import paddle

        rows: Array = x.numpy()
        total = np.zeros_like(rows)
        for expert in np.unique(ids):
            row, choice = np.nonzero(ids == expert)
            gate_up, down = (self._expert(name, expert) for name in ("gate_up", "down"))
            inner = expert_inner(self._backend, gate_up, weights.block, rows[row])
            made = self._backend.linear(inner, down).numpy()
            total[row] += made * shares[row, choice][:, None]
        return paddle.to_tensor(total)

    def gate(self, x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
        import paddle

        with on_host():
            logits = paddle.matmul(_to_host(by), weight.T).numpy()
        return paddle.to_tensor(x.numpy() / (1.0 + np.exp(-logits)))


class _Sequence(NamedTuple):
    """One sequence's cache, its step, and its rows among those of all."""

    cache: tuple[Tensor, ...]
    step: StepInputs
    span: slice

    def rows(self, which: int) -> Array:
        """Of a kind of the cache's rows, those of the sequence's tokens [T, heads, D]."""
        by_slot = self.cache[which].numpy().transpose(0, 2, 1, 3)
        rows: Array = by_slot.reshape(-1, *by_slot.shape[2:])[: self.span.stop - self.span.start]
        return rows


def _to_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor where `on_host` makes them."""
    import paddle

    return paddle.to_tensor(tensor.numpy())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Sequences one below the other.

    Computed one at a time: plain Paddle's scores are as large as its longest context squared, and
    padding would multiply that by the batch.
    """
    import paddle

    return paddle.concat(parts) if len(parts) > 1 else parts[0]


def expert_inner(backend: ModuleType, gate_up: Linear, block: ExpertBlock, rows: Array) -> Tensor:
    """What an expert's second product reads, [n, inner], of its rows [n, H]."""
    import paddle

    with paddle.no_grad():
        made = backend.linear(paddle.to_tensor(np.ascontiguousarray(rows)), gate_up)
        inner: Tensor = backend.activate(made, block.activation)
    return inner


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
