"""Which experts a run chooses: made for random weights, and counted in any.

A fused operator keeps its choice to itself. So one run of a case besides goes block by block, with
the engine's own operators, and the router's plain twin chooses by the hidden states that each
expert block gets there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.device.place import place_tensor, put_row, to_float32
from predict.engine.runner.networks import DynamicForward, Within
from predict.errors import UserError
from predict.nn import decoder as network
from predict.nn.blocks import BlockStep, Linear, NormWeights
from predict.nn.decoder import StepOutputs
from predict.nn.inputs import StepInputs
from predict.nn.kinds.experts import ExpertBlock, Experts, Router
from predict.ops import composed

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.llm import LLM

Array = npt.NDArray[np.float32]
Routing = Literal["uniform", "skewed"]
ROUTINGS: tuple[Routing, ...] = ("uniform", "skewed")
StepKind = Literal["prompt", "decode"]

# Of the experts by popularity, shares fall as 1 / rank^EXPONENT. Of 64 experts that is 5.7 bits of
# entropy, and the first has 4.3 times the mean; trained models lie on both sides of it.
EXPONENT = 0.5
MOST = 0.45  # of the tokens, to one expert: a logit that is as often below 0 wins at most half
FIT_ROWS, FIT_ROUNDS, FIT_RATE = 4096, 40, 0.2
ROWS_OF_A_THREAD = 512


def check_routing(config: EngineConfig, has_experts: bool) -> None:
    """Raises UserError where the routers cannot be made."""
    if config.model.load_format != "dummy":
        raise UserError(
            "--routing makes routers of random weights, and these are stored ones; add "
            "--load_format dummy, or leave --routing out"
        )
    if config.ranks.tensor_parallel_degree > 1:
        raise UserError(
            "--routing makes routers in this process, and several ranks have their own; leave out "
            "--routing or --tensor_parallel_degree"
        )
    if not has_experts:
        raise UserError(
            f"--routing is of experts, and {config.model.model_name_or_path} has none; leave it out"
        )


def wanted_shares(num_experts: int, top_k: int) -> npt.NDArray[np.float64]:
    """The share of the tokens that each expert gets, the most popular first: they sum to top_k."""
    most = max(MOST, top_k / num_experts)
    falling = np.arange(1, num_experts + 1) ** -EXPONENT
    cut = np.zeros(num_experts, bool)
    while True:  # what is cut off goes to the others
        rest = (top_k - most * np.count_nonzero(cut)) / max(falling[~cut].sum(), 1e-9)
        shares: npt.NDArray[np.float64] = np.where(cut, most, falling * rest)
        if (shares <= most + 1e-9).all():
            return shares
        cut |= shares > most


@cache
def spreads(router: Router) -> tuple[float, ...]:
    """How far each expert's logits spread, so that its share of random tokens is `wanted_shares`'.

    An expert whose logit spreads wider is more often among the largest. Experts by number; the most
    popular ones stand in groups in turn. Found by drawing tokens, choosing, and changing spreads.
    """
    count, groups = router.num_experts, router.num_groups
    rank = np.arange(count).reshape(-1, groups).T.reshape(-1)  # of each expert
    wanted = wanted_shares(count, router.top_k)[rank]
    drawn = np.random.default_rng(0).standard_normal((FIT_ROWS, count)).astype(np.float32)
    plain = replace(router, bias=False, correction=False)
    found = np.ones(count)
    for _ in range(FIT_ROUNDS):
        ids = choose(drawn, plain, np.diag(found).astype(np.float32))
        share = np.bincount(ids.reshape(-1), minlength=count) / FIT_ROWS
        found *= (wanted / np.maximum(share, 1 / FIT_ROWS)) ** FIT_RATE
        found = np.clip(found / np.sqrt(np.mean(found**2)), 1e-3, None)
    return tuple(found.tolist())


def choose(
    rows: Array, router: Router, weight: Array, *biases: Array | None
) -> npt.NDArray[np.int32]:
    """The experts [T, top_k] of rows [T, H] by a router's weight [E, H], on the host.

    biases: its bias and its correction.
    """
    import paddle
    from predict.ops import plain

    none = Linear("dense", (), None, 0, 0, router.num_experts)
    tensors = [_on_host(each) for each in (weight, *(biases or (None, None)))]
    weights = Experts(ExpertBlock(router, 1), tensors[0], none, none, None, *tensors[1:])
    with paddle.no_grad():
        ids: npt.NDArray[np.int32] = plain.route(_on_host(rows), weights)[0].numpy()
    return ids


def _on_host(values: Array | None) -> Tensor | None:
    import paddle

    return None if values is None else paddle.to_tensor(values, place=paddle.CPUPlace())


def skew(llm: LLM, seed: int) -> None:
    """Makes the routers' choice skewed: rows of their weights, in place, as long as `spreads` says.

    Which experts are popular differs from layer to layer. The bias and the correction of random
    weights, which would count for every token alike, are left: they are small.
    """
    assert llm.decoder is not None  # check_routing
    generator = np.random.default_rng(seed)
    for block in llm.decoder.blocks_of(Experts):
        router = block.block.router
        numbers = np.arange(router.num_experts).reshape(router.num_groups, -1)
        order = generator.permuted(generator.permutation(numbers), axis=1).reshape(-1)
        rows = to_float32(block.router.numpy())
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        scale = np.array(spreads(router), np.float32)[order][:, None]
        _replace(block.router, rows / lengths * lengths.mean() * scale, llm)


def _replace(tensor: Tensor, rows: Array, llm: LLM) -> None:
    """Writes rows [N, K] to a tensor, in its memory and its dtype."""
    import paddle

    dtype, gpu = str(tensor.dtype).removeprefix("paddle."), llm.device
    made = paddle.to_tensor(rows).astype(dtype)
    if gpu is not None:
        made = place_tensor(rows, dtype, gpu.place())
    for index in range(len(rows)):
        put_row(tensor, index, made[index], gpu)


@dataclass
class ChosenExperts:
    """Distinct experts of each expert block and step so far."""

    counts: dict[StepKind, list[int]] = field(default_factory=lambda: {"prompt": [], "decode": []})
    counting: StepKind | None = None  # steps of this kind alone; None: of both

    def means(self) -> dict[str, float]:
        """The mean over blocks and steps, of prompts and of decoding, where there were any."""
        return {
            f"{step}_experts": sum(counts) / len(counts)
            for step, counts in self.counts.items()
            if counts
        }


class BlockByBlock:
    """A backend's operators, the layers of which run block by block; experts are counted."""

    def __init__(self, backend: ModuleType, chosen: ChosenExperts):
        self._backend, self._chosen = backend, chosen
        self._ops: Any = self  # what a module is taken for
        self.step: StepKind = "prompt"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def block(self, hidden: Tensor, weights: Any, step: BlockStep) -> tuple[Tensor, list[Tensor]]:
        """The backend's, whose choice of experts is counted."""
        wanted = self._chosen.counting in (None, self.step)
        if wanted and weights.block.costs.num_chosen:
            self._chosen.counts[self.step].append(len(np.unique(chosen_by(hidden, weights))))
        return self._backend.block(hidden, weights, step)

    def layers(self, hidden: Tensor, *given: Any) -> tuple[Tensor, list[Tensor]]:
        layers, caches, ropes, *step = given
        runs = composed.layer_runs(self._ops, zip(layers, caches, strict=True), ropes)
        return composed.in_turn(self._ops, runs, hidden, *step)


def chosen_by(hidden: Tensor, weights: Experts) -> npt.NDArray[np.int32]:
    """The experts [T, top_k] that an expert block chooses for hidden [T, H].

    Many rows go to as many threads as there are CPU cores: plain Paddle takes one for an operator.
    """
    import paddle
    from predict.ops import plain

    def read(tensor: Tensor | None) -> Array | None:
        return None if tensor is None else to_float32(tensor.numpy())

    block, rows, own = weights.block, read(hidden), None
    if weights.norm is not None and block.norm is not None:
        own = NormWeights(*(_on_host(read(x)) for x in (weights.norm.weight, weights.norm.bias)))
    router, *biases = map(read, (weights.router, weights.router_bias, weights.correction))
    assert rows is not None
    assert router is not None

    def part(rows: Array) -> npt.NDArray[np.int32]:
        if own is not None and block.norm is not None:
            with paddle.no_grad():
                # The router reads values of the model's dtype.
                normed = plain.norm(_on_host(rows), own, block.norm)
                rows = normed.astype(hidden.dtype).astype("float32").numpy()
        return choose(rows, block.router, router, *biases)

    parts = np.array_split(rows, -(-len(rows) // ROWS_OF_A_THREAD))
    if len(parts) == 1:
        return part(rows)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return np.concatenate(list(threads.map(part, parts)))


@contextmanager
def counted(llm: LLM) -> Iterator[ChosenExperts]:
    """The engine running block by block, without graphs, and counting."""
    runner: Any = llm.engine.runner
    forward, chosen = runner.network.forward, ChosenExperts()
    inner = forward.forward if isinstance(forward, Within) else forward
    assert isinstance(inner, DynamicForward)  # counts_experts
    operators: Any = BlockByBlock(inner.backend, chosen)

    def run(inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        operators.step = "decode" if int(inputs.max_lens[0]) == 1 else "prompt"
        args = (operators, inner.decoder, inputs, inner.caches, None, None, rows, taps)
        return network.forward(*args)[0]

    graphs = getattr(runner, "graphs", None)
    pool = None if graphs is None else graphs.pool
    runner.network.forward = run
    if graphs is not None:
        graphs.pool = None
    try:
        yield chosen
    finally:
        runner.network.forward = forward
        if graphs is not None:
            graphs.pool = pool


def counts_experts(llm: LLM) -> bool:
    """Whether the network chooses experts, and runs block by block."""
    has_experts = any(llm.spec.blocks_of(ExpertBlock))
    return has_experts and llm.decoder is not None
