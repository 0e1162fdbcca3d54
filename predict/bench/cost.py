"""What a run must read and compute at least, from the network's shape and the sizes of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from predict.bench.cases import Case
from predict.config.engine import EngineConfig
from predict.config.model import DTYPE_BYTES
from predict.nn.spec import DecoderSpec

if TYPE_CHECKING:
    from predict.nn.decoder import Decoder


@dataclass(frozen=True)
class Cost:
    """Work of one forward pass, from the network's shape."""

    weight_bytes: int  # of all matrices of layers and LM head
    layer_flops_per_token: int
    head_flops_per_row: int
    attention_flops_per_pair: int  # per (query token, visible token) of a prompt, over all layers
    decode_flops_per_pair: int  # the same of tokens that are decoded
    cache_bytes_per_token: int
    # The share of the weights that a step of so many tokens reads, where experts are chosen.
    read_share: Callable[[int], float] = lambda num_tokens: 1.0

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: str, kv_format: str = "dense") -> Cost:
        """The work of a network whose weights have `dtype`, and its cache `kv_format`."""
        head = spec.vocab_size * spec.hidden_size
        return cls(
            weight_bytes=spec.num_matmul_weights * DTYPE_BYTES[dtype],
            layer_flops_per_token=2 * (spec.num_active_weights - head),
            head_flops_per_row=2 * head,
            attention_flops_per_pair=sum(block.costs.pair_flops for block in spec.attention),
            decode_flops_per_pair=sum(block.costs.decode_pair_flops for block in spec.attention),
            cache_bytes_per_token=spec.cache_format(kv_format).bytes_per_token(
                spec.kept, DTYPE_BYTES[dtype]
            ),
            read_share=lambda count: spec.read_weights(count) / spec.num_matmul_weights,
        )

    def choosing(self, spec: DecoderSpec, num_experts: float | None) -> Cost:
        """The same where a layer's step was seen to choose so many experts; None: as it is."""
        if num_experts is None:
            return self
        share = spec.weights_of_experts(num_experts) / spec.num_matmul_weights
        return replace(self, read_share=lambda num_tokens: share)

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens must read."""
        return self.weight_bytes * self.read_share(num_tokens)

    def decode_bytes(self, batch_size: int, context_len: float) -> float:
        """Bytes that one decode step must read."""
        return self.read_bytes(batch_size) + batch_size * context_len * self.cache_bytes_per_token

    def prefill_flops(self, batch_size: int, input_len: int) -> float:
        """Operations of `batch_size` prompts, one logit row each."""
        pairs = input_len * (input_len + 1) / 2
        per_prompt = (
            input_len * self.layer_flops_per_token
            + self.head_flops_per_row
            + pairs * self.attention_flops_per_pair
        )
        return batch_size * per_prompt

    def run_bytes(self, case: Case, batch_size: int) -> float:
        """Bytes that all requests of a case must read, at most `batch_size` in one step.

        Every step reads the weights once, every token after the first the cache before it.
        """
        num_steps = -(-case.num_requests * case.output_len // batch_size)
        num_later = case.num_requests * (case.output_len - 1)
        weights = num_steps * self.read_bytes(min(batch_size, case.num_requests))
        return weights + num_later * case.mean_context * self.cache_bytes_per_token

    def run_flops(self, case: Case) -> float:
        num_later = case.num_requests * (case.output_len - 1)
        per_token = (
            self.layer_flops_per_token
            + self.head_flops_per_row
            + case.mean_context * self.decode_flops_per_pair
        )
        return self.prefill_flops(case.num_requests, case.input_len) + num_later * per_token


def linear_bytes(decoder: Decoder) -> int:
    """Bytes of the matrices that a decode step multiplies by, as their schemes store them."""
    found = [*decoder.head.linear.tensors]
    for block in decoder.blocks():
        found += block.matrices()
    return sum(tensor.size * tensor.element_size() for tensor in found)


def program_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """Bytes of an exported program's parameters but for an embedding that is not the head's too.

    Those are the matrices that a decode step multiplies by, and at most a few percent more.
    """
    folder = Path(config.model.model_name_or_path)
    stored = (folder / f"{config.model.model_prefix}.pdiparams").stat().st_size
    if spec.tie_word_embeddings:
        return stored
    return stored - spec.vocab_size * spec.hidden_size * DTYPE_BYTES[config.model.dtype]
