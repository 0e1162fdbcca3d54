"""What weights, workspace and cache take of a memory, and whether they fit together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from predict.config.adapters import AdaptersConfig
from predict.config.engine import EngineConfig
from predict.config.model import DTYPE_BYTES
from predict.config.schemes import scheme_info
from predict.device.devices import kind_of
from predict.errors import UserError
from predict.nn.adapter_pages import paged_slots
from predict.nn.cache_formats import kv_format_of
from predict.nn.inputs import bucket_size
from predict.nn.rope import num_tables
from predict.nn.spec import DecoderSpec
from predict.system.host import available_memory_bytes

if TYPE_CHECKING:
    from predict.device.devices import MemoryInfo
    from predict.nn.plans import LinearPlan, WeightPlan


LESS_MEMORY = (
    "use a smaller --dtype, lower --max_length or --batch_size, or end other processes on this "
    "device"
)
KEPT_STATES = 64  # that prompts leave behind, where no flag says how many bytes they take
KEPT_SHARE = 4  # of the memory for the cache: they take no more than one part of so many
CPU_DRAFT_ROWS, GPU_DRAFT_ROWS = 64, 256  # drafts of a step, at most
SLACK_BYTES = 512 << 20  # of a step, for what is not counted by itself
# A shared pool larger than this many times the running sequences' need only feeds the prefix cache.
PREFIX_CACHE_SHARE = 2
# Of a rotary table's element while it is made: float64 angles, cosines, sines and their copies.
ROPE_BYTES = 32


def bytes_per_token(
    config: EngineConfig, spec: DecoderSpec, draft: DecoderSpec | None = None
) -> int:
    """Bytes of cache that one token takes over all layers, those of a draft model included."""
    own = spec.cache_format(config.kv_format)
    total = own.bytes_per_token(spec.kept, DTYPE_BYTES[config.model.dtype])
    return total if draft is None else total + _draft_bytes_per_token(config, draft)


def _draft_bytes_per_token(config: EngineConfig, draft: DecoderSpec) -> int:
    return kv_format_of("dense").bytes_per_token(draft.kept, DTYPE_BYTES[config.model.dtype])


def num_state_slots(config: EngineConfig, spec: DecoderSpec, free_bytes: int) -> int:
    """Slots for states of requests (predict.engine.states): two for each sequence, and kept ones.

    Raises UserError with the arithmetic when they do not fit into free_bytes.
    """
    each, batch = spec.state_bytes, config.scheduling.batch_size
    if not each:
        return 0
    budget = int(free_bytes * config.cache.gpu_memory_utilization)
    kept = 0
    if config.cache.shares_prefixes:
        asked = config.cache.prefix_cache_state_budget
        most = min(KEPT_STATES, budget // KEPT_SHARE // each)
        kept = most if asked is None else asked // each
    count = 2 * batch + kept
    if count * each > budget:
        raise UserError(
            f"the states of requests do not fit: two for each of --batch_size {batch} and {kept} "
            f"that prompts leave behind, of {each} bytes each, are {mib(count * each)} MiB, and "
            f"{config.cache.gpu_memory_utilization:.0%} of the {mib(free_bytes)} MiB of free "
            f"memory are {mib(budget)} MiB; lower --batch_size or --prefix_cache_state_budget"
        )
    return count


def num_cache_blocks(
    config: EngineConfig,
    spec: DecoderSpec,
    free_bytes: int | None = None,
    draft: DecoderSpec | None = None,
    num_pinned: int = 0,
) -> int:
    """Blocks to allocate after the weights are in place.

    Enough for `batch_size` sequences of `max_length` tokens; with blocks that grow on demand, as
    much of that as the free memory allows. free_bytes: memory for cache and workspace; default the
    machine's available memory. draft: a second model with a cache for the same tokens. num_pinned:
    blocks of prefixes, besides. Raises UserError with the arithmetic when too little fits.
    """
    per_token = bytes_per_token(config, spec, draft)
    per_block = per_token * config.cache.block_size
    if free_bytes is None:
        free_bytes = available_memory_bytes()
    free_bytes -= num_state_slots(config, spec, free_bytes) * spec.state_bytes
    asked = config.cache.num_cache_blocks
    if asked is not None:
        if asked * per_block > free_bytes:
            raise UserError(
                f"the KV cache does not fit: --num_cache_blocks {asked} of "
                f"{config.cache.block_size} tokens x {per_token} bytes are "
                f"{mib(asked * per_block)} MiB, and {mib(free_bytes)} MiB of memory are free; "
                "lower it, or leave it out"
            )
        return asked
    budget = int(free_bytes * config.cache.gpu_memory_utilization)
    fits = budget // per_block
    wanted, least = _wanted_blocks(config, num_pinned)
    if fits < least:
        share = f"{config.cache.gpu_memory_utilization:.0%}"
        way_out = f"lower --max_length ({config.max_length})"
        if config.cache.reserve_full:
            way_out += (
                f" or --batch_size ({config.scheduling.batch_size}), or use --append_attn, which "
                "takes blocks as sequences grow"
            )
        raise UserError(
            f"the KV cache does not fit: {least} blocks of {config.cache.block_size} tokens x "
            f"{per_token} bytes are {mib(least * per_block)} MiB, and {share} of the "
            f"{mib(free_bytes)} MiB of free memory are {mib(budget)} MiB; {way_out}"
        )
    return min(wanted, fits)


def _wanted_blocks(config: EngineConfig, num_pinned: int) -> tuple[int, int]:
    """Blocks that all sequences could use, a prefix cache too, and the least to run at all."""
    per_seq = config.max_blocks_per_seq
    wanted = config.scheduling.batch_size * per_seq
    least = num_pinned + (wanted if config.cache.reserve_full else per_seq)
    return num_pinned + wanted * (PREFIX_CACHE_SHARE if config.cache.shares_prefixes else 1), least


def num_gpu_cache_blocks(
    config: EngineConfig,
    spec: DecoderSpec,
    memory: MemoryInfo,
    workspace_bytes: int,
    draft: DecoderSpec | None = None,
    num_pinned: int = 0,
) -> int:
    """`num_cache_blocks` for a GPU whose weights are in place.

    memory: the GPU's now, in bytes. workspace_bytes: what one step needs besides.
    Raises UserError with the arithmetic when too little fits.
    """
    from predict.device.devices import cache_capacity

    if config.cache.num_cache_blocks is not None:
        return config.cache.num_cache_blocks
    wanted, least = _wanted_blocks(config, num_pinned)
    capacity = cache_capacity(
        memory.total,
        memory.free + memory.held,
        weight_bytes=memory.in_use,
        workspace_bytes=workspace_bytes,
        bytes_per_token=bytes_per_token(config, spec, draft),
        num_tokens=least * config.cache.block_size,
        utilization=config.cache.gpu_memory_utilization,
    )
    return min(wanted, capacity // config.cache.block_size)


class GpuRoom(NamedTuple):
    """What a GPU's memory has room for: blocks of the cache, and slots for states."""

    num_blocks: int
    num_slots: int


def gpu_room(
    config: EngineConfig,
    spec: DecoderSpec,
    memory: MemoryInfo,
    draft: DecoderSpec | None = None,
    num_pinned: int = 0,
    pass_bytes: int = 0,
) -> GpuRoom:
    """The room on a GPU whose weights are in place, as num_gpu_cache_blocks() counts it.

    pass_bytes: of a pass over pictures, beside the workspace.
    """
    workspace = workspace_bytes(config, spec, draft) + pass_bytes
    num_slots = _gpu_state_slots(config, spec, memory, workspace)
    workspace += num_slots * spec.state_bytes
    num_blocks = num_gpu_cache_blocks(config, spec, memory, workspace, draft, num_pinned)
    return GpuRoom(num_blocks, num_slots)


def _gpu_state_slots(
    config: EngineConfig, spec: DecoderSpec, memory: MemoryInfo, used_bytes: int
) -> int:
    """Slots beside what is in use and used_bytes; 0 where these alone do not fit."""
    free = memory.free + memory.held - memory.in_use - used_bytes
    return num_state_slots(config, spec, free) if free > 0 else 0


def check_gpu_memory(
    config: EngineConfig,
    spec: DecoderSpec,
    memory: MemoryInfo,
    weight_bytes: int,
    draft: DecoderSpec | None = None,
    loading_bytes: int = 0,
) -> None:
    """Raises UserError with the arithmetic when weights, workspace and cache cannot fit together.

    Before any weight is read. memory: the GPU's now. The cache counted is the least that the flags
    need: all sequences where each reserves its own, else one. draft: a second model, whose weights
    are in weight_bytes. loading_bytes: what making the weights takes beside them; the cache and the
    workspace are made later, so it counts where it is more than both.
    """
    from predict.device.devices import cache_capacity

    _, least = _wanted_blocks(config, 0)
    num_tokens = (config.cache.num_cache_blocks or least) * config.cache.block_size
    per_token = bytes_per_token(config, spec, draft)
    workspace = workspace_bytes(config, spec, draft)
    num_slots = _gpu_state_slots(config, spec, memory, weight_bytes + workspace)
    workspace += num_slots * spec.state_bytes
    cache_capacity(
        memory.total,
        memory.free + memory.held - memory.in_use,
        weight_bytes=weight_bytes,
        workspace_bytes=max(workspace, loading_bytes - num_tokens * per_token),
        bytes_per_token=per_token,
        num_tokens=num_tokens,
        utilization=config.cache.gpu_memory_utilization,
    )


def check_page_memory(config: AdaptersConfig, num_bytes: int, available: int) -> None:
    """Raises UserError where the pages of adapters alone are more than `available` bytes."""
    if num_bytes > available:
        raise UserError(
            f"the pages of adapters do not fit: --max_loras {config.max_loras} of --max_lora_rank "
            f"{config.max_lora_rank} take {mib(num_bytes)} MiB, and {mib(available)} MiB of memory "
            "are free; lower one of the two"
        )


def check_cpu_memory(
    config: EngineConfig,
    spec: DecoderSpec,
    available: int,
    weight_bytes: int,
    draft: DecoderSpec | None = None,
    with_cache: bool = True,
) -> None:
    """Raises UserError with the arithmetic when weights and cache cannot fit into `available`.

    Before any weight is read. The cache counted is the least that the flags need, or what
    --num_cache_blocks says. draft: a second model, whose weights are in weight_bytes.
    """
    if weight_bytes > available:
        raise UserError(
            f"the weights do not fit: they take {mib(weight_bytes)} MiB, and {mib(available)} MiB "
            "of memory are free; use a smaller --dtype, or end other processes"
        )
    free = available - weight_bytes
    length = config.max_length
    width = sum(
        dim * num_tables(rope, length)
        for dim, rope in zip(spec.rotary_dims, spec.ropes, strict=True)
    )
    table = length * width * ROPE_BYTES
    if table > free:
        raise UserError(
            f"the rotary table of {config.max_length} positions does not fit: making it "
            f"takes {mib(table)} MiB, and {mib(free)} MiB of memory are free beside the weights; "
            "lower --max_length"
        )
    if not with_cache:
        return
    # Raises by itself where the number of blocks is not given.
    num_blocks = num_cache_blocks(config, spec, free, draft)
    free -= num_state_slots(config, spec, free) * spec.state_bytes
    needed = num_blocks * config.cache.block_size * bytes_per_token(config, spec, draft)
    if draft is not None:  # its cache has a block more for each sequence
        num_tokens = config.scheduling.batch_size * config.cache.block_size
        needed += num_tokens * _draft_bytes_per_token(config, draft)
    if needed > free:
        raise UserError(
            f"the KV cache does not fit: {num_blocks} blocks of {config.cache.block_size} tokens "
            f"are {mib(needed)} MiB, and {mib(free)} MiB of memory are free beside the weights; "
            f"lower --num_cache_blocks, --max_length ({config.max_length}) or "
            f"--batch_size ({config.scheduling.batch_size})"
        )


def weight_bytes(plan: WeightPlan, scheme: Callable[[LinearPlan], str], dtype: str) -> int:
    """Bytes of all weights, scales of codes apart; scheme: of each linear."""
    element = DTYPE_BYTES[dtype]

    def linear_bytes(linear: LinearPlan) -> int:
        if parts := linear.head_parts:  # see predict.nn.blocks.HeadMatrices
            rows = linear.out_features * (sum(parts) + parts[0]) // sum(parts)
            return rows * linear.in_features * element
        info = scheme_info(scheme(linear))
        bits = 8 * element if info.codes is None else info.bits
        return linear.out_features * linear.in_features * bits // 8

    values = sum(math.prod(shape) for _, shape in plan.small_tensors())
    for name, (rows, columns) in plan.matrices():
        if name != plan.embedding or not plan.spec.tie_word_embeddings:
            values += rows * columns
    linears = (*plan.linears(), *plan.projections(), plan.head)
    values += sum(each.out_features for each in linears if each.has_bias)
    return values * element + sum(map(linear_bytes, linears))


def loading_bytes(
    plan: WeightPlan, scheme: Callable[[LinearPlan], str], stored_bytes: Callable[[LinearPlan], int]
) -> int:
    """Bytes of a GPU that are in use beside the weights while these are made, roughly.

    One linear at a time: its values as stored, once more where they change places, and its codes.
    What the allocator cannot use again comes on top. stored_bytes: of one of a linear's values.
    """

    def linear_bytes(linear: LinearPlan) -> int:
        copies = 2 if linear.is_stored_otherwise else 1
        return linear.out_features * linear.in_features * (copies * stored_bytes(linear) + 1)

    linears = (*plan.linears(), *plan.projections(), plan.head)
    return max((linear_bytes(each) for each in linears if scheme(each) != "dense"), default=0)


def workspace_bytes(
    config: EngineConfig, spec: DecoderSpec, draft: DecoderSpec | None = None
) -> int:
    """Bytes that one step's activations and logits take at most, roughly, on a GPU.

    With a draft model they are its own too, and its cache blocks that the target's lacks.
    """
    # Logits: graphs of each size keep theirs; those of steps with drafts share.
    num_rows = graph_rows(config.scheduling.batch_size) + max_draft_rows(config)
    total = _step_bytes(config, spec, num_rows)
    if config.adapters.is_used:
        # What adapters add to gate and up, and to the widest of the others.
        others = (sum(s.part_sizes) for s in paged_slots(spec) if not s.name.endswith("gate_up"))
        values = 2 * spec.intermediate_size + max(others, default=0)
        total += _num_step_tokens(config) * values * DTYPE_BYTES[config.model.dtype]
    if draft is not None:
        total += _step_bytes(config, draft, graph_rows(config.scheduling.batch_size))
        num_tokens = config.scheduling.batch_size * config.cache.block_size
        total += num_tokens * _draft_bytes_per_token(config, draft)
    return total


def graph_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """The bound of what a GPU's graphs keep: logits as counted for a step, and half the slack."""
    return 4 * spec.vocab_size * graph_rows(config.scheduling.batch_size) + SLACK_BYTES // 2


def graph_rows(batch_size: int) -> int:
    """Rows of logits that the graphs of plain steps keep, one graph of each size; at least 3 B.

    The least is for graphs of other kinds, as those that penalties need.
    """
    sizes = {bucket_size(num_seqs) for num_seqs in range(1, batch_size + 1)}
    return max(sum(sizes), 3 * batch_size)


def token_values(spec: DecoderSpec) -> int:
    """Values of the model's dtype that a token takes in a step, at most, roughly."""
    costs = [block.costs for block in spec.blocks()]
    values = 4 * spec.hidden_size + max(each.step_values for each in costs)
    values += 4 * spec.intermediate_size
    chosen = max(each.num_chosen for each in costs)
    return values + chosen * (2 * spec.hidden_size + 4 * spec.intermediate_size)  # rows by expert


def _step_bytes(config: EngineConfig, spec: DecoderSpec, num_rows: int) -> int:
    logits = num_rows * spec.vocab_size * 4
    step = _num_step_tokens(config) * token_values(spec) * DTYPE_BYTES[config.model.dtype]
    scratch = max(block.costs.scratch_bytes for block in spec.blocks())
    return step + logits + SLACK_BYTES + scratch


def _num_step_tokens(config: EngineConfig) -> int:
    return max(config.token_budget, config.max_length)


def max_draft_rows(config: EngineConfig) -> int:
    """Drafts of a step, at most."""
    if config.speculation.speculate_method is None:
        return 0
    limit = GPU_DRAFT_ROWS if kind_of(config.model.device) == "gpu" else CPU_DRAFT_ROWS
    return min(
        config.scheduling.batch_size * config.speculation.speculate_max_draft_token_num, limit
    )


def mib(num_bytes: int) -> int:
    """Whole mebibytes."""
    return num_bytes >> 20
