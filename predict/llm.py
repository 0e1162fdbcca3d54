"""LLM: a checkpoint (or an exported program) with an engine around it; prompts in, outputs out."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from predict import library
from predict.config import EngineConfig
from predict.engine.detokenizer import Detokenizer
from predict.engine.engine import Engine
from predict.engine.kv_cache import (
    allocate_caches,
    check_gpu_memory,
    num_cache_blocks,
    num_gpu_cache_blocks,
    weight_bytes,
    workspace_bytes,
)
from predict.engine.program import load_program
from predict.engine.runner import (
    Forward,
    HostRunner,
    Runner,
    dynamic_forward,
    static_forward,
)
from predict.engine.sampler import Sampler
from predict.engine.scheduler import Scheduler, SchedulerConfig
from predict.errors import UserError
from predict.formats import Layout, layout_of, with_stored_cache
from predict.formats.online import Online
from predict.host import peak_memory_bytes
from predict.kv_formats import head_scales, kv_format_of
from predict.manifest import check_manifest, load_manifest
from predict.models import family_of
from predict.nn.decoder import Decoder, build_decoder, expected_tensors
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import LayerCache
from predict.nn.paddle_checkpoint import open_checkpoint
from predict.nn.spec import DecoderSpec
from predict.nn.weights import (
    CheckpointSource,
    DeviceRandomSource,
    RandomSource,
    WeightSource,
    plan_weights,
)
from predict.quantization import check_support
from predict.request import Request, RequestOutput, SamplingParams
from predict.speculative import Proposer, SpeculativeConfig, proposer_of
from predict.speculative.policy import DraftPolicy
from predict.tokenizer import Tokenizer

if TYPE_CHECKING:
    from predict.device import Device
    from predict.engine.detokenizer import TextStream

Prompt = str | Sequence[int]
# Rows of a decode step, drafts included, that cost little more than one: reading weights bounds it.
CPU_FREE_ROWS, GPU_FREE_ROWS = 16, 64


@dataclass(frozen=True)
class EngineStats:
    """Counts since the LLM was made; sizes in bytes, prefix hits in tokens."""

    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_draft_spans: int  # decode spans with drafts: each yields its accepted drafts and one more
    num_cache_blocks: int
    num_used_blocks: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class StreamOutput:
    """A piece of a streamed answer: the new text and tokens, and the reason when it is the last."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


def choose_backend(inference_model: bool) -> ModuleType:
    """`predict.ops` with --inference_model where its library is built, else `predict.reference`."""
    if inference_model and library.load() is not None:
        from predict import ops

        return ops
    library.import_paddle()
    from predict import reference

    return reference


def is_compiled(backend: ModuleType) -> bool:
    """Whether a backend is the compiled operators."""
    return backend.__name__ == "predict.ops"


def load_decoder(
    config: EngineConfig,
    spec: DecoderSpec,
    reader: ConfigReader,
    backend: ModuleType,
    device: Device | None = None,
) -> Decoder:
    """Reads the checkpoint of `config` into a decoder; names and shapes are checked first.

    device: the GPU for its weights; None for the CPU.
    """
    compiled = is_compiled(backend)
    settings = config.quantization
    plan = plan_weights(spec, family_of(reader).WEIGHTS)
    source: WeightSource
    place = None if device is None else device.place()
    if config.load_format == "dummy":
        source = (
            RandomSource(config.seed)
            if device is None
            else DeviceRandomSource(config.seed, config.dtype, device)
        )
        layout: Layout = Online(source, settings, plan)
        expected_tensors(plan, layout)  # whether the group size divides
    else:
        checkpoint = open_checkpoint(config.model_name_or_path)
        source = CheckpointSource(checkpoint)
        if device is not None and checkpoint.in_file_order:
            from predict.nn.upload import DeviceCheckpointSource

            source = DeviceCheckpointSource(checkpoint, config.dtype, device)
        layout = layout_of(reader, checkpoint, source, settings, plan)
        checkpoint.check(expected_tensors(plan, layout), (*plan.ignored, *layout.ignored))
    capability = None
    if device is not None:
        from predict.device import driver_info, memory_info

        capability = driver_info().gpus[device.index].capability
        needed = weight_bytes(plan, layout.scheme, config.dtype)
        check_gpu_memory(config, spec, memory_info(device), needed)
    for linear in (*plan.linears(), plan.head):
        check_support(
            layout.scheme(linear),
            config.device,
            compiled,
            config.dtype,
            capability,
            layout.group_size(linear),
            linear.in_features,
        )
    try:
        return build_decoder(
            plan,
            source,
            layout,
            config.dtype,
            compiled,
            config.max_length,
            place=place,
            kv_format=config.kv_format,
        )
    finally:
        source.close()


def choose_gpu(config: EngineConfig) -> Device | None:
    """The GPU that `config` names, activated; None for the CPU.

    Raises UserError when it cannot be used, before Paddle is imported.
    """
    if config.device == "cpu":
        return None
    if not config.inference_model:
        raise UserError(
            f"device {config.device} runs the compiled operators only; add --append_attn, "
            "--block_attn or --inference_model"
        )
    from predict import device as devices

    device = devices.choose(config.device)
    devices.activate(device)
    return device


def read_spec(directory: str | Path) -> tuple[DecoderSpec, ConfigReader]:
    """The network that a directory's config.json describes."""
    reader = ConfigReader.from_dir(directory)
    return family_of(reader).spec(reader), reader


class LLM:
    """Answers prompts with one model.

    Raises UserError (a ValueError) before any weight is read when the directory, the flags and the
    machine do not fit together. Not thread-safe.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None = None):
        """tokenizer: the model's, when the caller has it already; else read from its directory."""
        started = time.perf_counter()
        self.device = choose_gpu(config)
        self.spec, reader = read_spec(config.model_name_or_path)
        self.config = config = with_stored_cache(config, reader)
        kv_format = kv_format_of(config.kv_format)
        kv_format.check_device(config.device)
        kv_scales = head_scales(kv_format, config.model_name_or_path, self.spec)
        if config.max_length > self.spec.max_context:
            print(
                f"regatta: --max_length is {config.max_length}, and the model was made for "
                f"{self.spec.max_context} positions; text beyond them is likely to be poor",
                file=sys.stderr,
            )
        self.tokenizer = tokenizer or self._load_tokenizer()
        eos_token_ids = self.spec.eos_token_ids
        self._detokenizer = None
        if self.tokenizer is not None:
            self._check_vocabulary(self.tokenizer)
            self._detokenizer = Detokenizer(self.tokenizer)
            eos_token_ids = self.tokenizer.eos_token_ids or eos_token_ids

        self.backend = choose_backend(config.inference_model)
        self.decoder: Decoder | None = None  # in dynamic mode
        self._make_current()
        with self._explained_out_of_memory():
            network = self._load_network(reader)
        num_blocks = self._num_cache_blocks()
        with self._explained_out_of_memory():
            caches = allocate_caches(
                self.spec, num_blocks, config.block_size, config.dtype, config.kv_format, kv_scales
            )
        runner: Runner = HostRunner(network(caches))
        if self.device is not None:
            from predict.engine.gpu_runner import GpuRunner

            runner = GpuRunner(
                network(caches),
                self.device,
                config.max_length,
                config.batch_size,
                config.block_size,
                self.spec.vocab_size,
            )
        if is_compiled(self.backend):
            # From here on the step's own tensors come and go; the weights are in place.
            library.require().keep_freed_memory()
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.batch_size,
                max_num_batched_tokens=config.token_budget,
                max_length=config.max_length,
                block_size=config.block_size,
                num_blocks=num_blocks,
                reserve_full=config.reserve_full,
                prefix_caching=config.effective_prefix_caching,
                chunked_prefill=config.chunked_prefill,
                separate_steps=config.attention == "block",
            )
        )
        sampler = Sampler(self.backend, config.seed, eos_token_ids)
        proposer, policy = self._speculation()
        self.engine = Engine(scheduler, runner, sampler, eos_token_ids, proposer, policy)
        self._ids = itertools.count()
        self.startup_seconds = time.perf_counter() - started

    def _load_network(self, reader: ConfigReader) -> Callable[[Sequence[LayerCache]], Forward]:
        """The network with its weights in place; it runs over the caches that it is given."""
        import paddle

        config = self.config
        if config.mode == "dynamic":
            decoder = load_decoder(config, self.spec, reader, self.backend, self.device)
            self.decoder = decoder
            return lambda caches: dynamic_forward(self.backend, decoder, caches)
        manifest = load_manifest(config.model_name_or_path)
        loaded = library.require() if is_compiled(self.backend) else None
        abi = None if loaded is None else loaded.metadata.abi
        check_manifest(manifest, config, paddle.__version__, abi)
        directory = Path(config.model_name_or_path)
        program = load_program(directory, config.model_prefix, self.device)
        return lambda caches: static_forward(program, caches)

    def _speculation(self) -> tuple[Proposer | None, DraftPolicy | None]:
        config = self.config
        if config.speculate_method is None:
            return None, None
        proposer = proposer_of(
            SpeculativeConfig(
                method=config.speculate_method,
                max_draft_token_num=config.speculate_max_draft_token_num,
                max_ngram_size=config.speculate_max_ngram_size,
            )
        )
        free_rows = CPU_FREE_ROWS if self.device is None else GPU_FREE_ROWS
        return proposer, DraftPolicy(config.speculate_max_draft_token_num, free_rows)

    def _make_current(self) -> None:
        """Makes this model's device Paddle's default; another LLM may have set its own since."""
        import paddle

        paddle.set_device("cpu" if self.device is None else self.device.name)

    def _num_cache_blocks(self) -> int:
        if self.device is None:
            return num_cache_blocks(self.config, self.spec)
        from predict.device import memory_info

        return num_gpu_cache_blocks(
            self.config,
            self.spec,
            memory_info(self.device),
            workspace_bytes(self.config, self.spec),
        )

    def _explained_out_of_memory(self) -> AbstractContextManager[None]:
        if self.device is None:
            return nullcontext()
        from predict.device import explained_out_of_memory

        return explained_out_of_memory(
            "use a smaller --dtype, lower --max_length or --batch_size, or end other processes on "
            "this GPU"
        )

    def _peak_memory_bytes(self) -> int:
        if self.device is None:
            return peak_memory_bytes()
        from predict.device import memory_info

        return memory_info(self.device).peak_in_use

    def _load_tokenizer(self) -> Tokenizer | None:
        config = self.config
        if not Tokenizer.exists(config.model_name_or_path):
            return None
        return Tokenizer.from_dir(config.model_name_or_path, config.chat_template)

    def _check_vocabulary(self, tokenizer: Tokenizer) -> None:
        if tokenizer.vocab_size > self.spec.vocab_size:
            raise UserError(
                f"{self.config.model_name_or_path}: the tokenizer has {tokenizer.vocab_size} "
                f"tokens and config.json says vocab_size {self.spec.vocab_size}; they do not "
                "belong to one model"
            )

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            largest = max(prompt, default=0)
            if largest >= self.spec.vocab_size:
                raise UserError(
                    f"token id {largest} in a prompt is outside the vocabulary "
                    f"(allowed: 0 to {self.spec.vocab_size - 1})"
                )
            return prompt
        if self.tokenizer is None:
            raise UserError("this model was loaded without a tokenizer; pass token ids")
        return self.tokenizer.encode(prompt)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        return Request(next(self._ids), self._token_ids(prompt), params)

    def _output(self, request: Request) -> RequestOutput:
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode_continuation(
                request.prompt_token_ids, request.output_token_ids
            )
        return RequestOutput.from_request(request, text)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        on_output: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the prompts' order.

        prompts: text, or token ids. sampling_params: for all, or one for each. on_output(index,
        output) is called the moment a request finishes, in any order. on_step(prompt_tokens,
        output_tokens) is called after each step with the tokens that it handled.
        Raises UserError or ValueError, with nothing queued, when a prompt can never run. When a
        step fails or is interrupted, the unfinished requests are aborted.
        """
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        requests = [
            self._request(prompt, params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]
        indices = {request.request_id: index for index, request in enumerate(requests)}
        outputs: list[RequestOutput | None] = [None] * len(requests)
        self._make_current()
        try:
            for request in requests:
                self.engine.add(request)
            while True:
                batch, finished = self.engine.step()
                if batch is None:
                    break
                if on_step:
                    num_samples = sum(span.samples for span in batch.spans)
                    on_step(batch.num_tokens - num_samples, num_samples)
                for request in finished:
                    output = self._output(request)
                    outputs[indices[request.request_id]] = output
                    if on_output:
                        on_output(indices[request.request_id], output)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
        return [output for output in outputs if output is not None]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams
    ) -> Generator[StreamOutput, None, None]:
        """Yields the answer to one prompt as it grows; joined texts equal `generate`'s.

        Leaving the iterator early aborts the request.
        """
        request = self._request(prompt, sampling_params)
        text: TextStream | None = None
        if self._detokenizer is not None:
            text = self._detokenizer.stream(request.prompt_token_ids)
        self.engine.add(request)
        sent = 0
        try:
            while request.finish_reason is None:
                self._make_current()
                self.engine.step()
                new = tuple(request.output_token_ids[sent:])
                if not new:
                    continue
                sent += len(new)
                piece = text.append(new) if text else ""
                if request.finish_reason is not None and text:
                    piece += text.finish()
                yield StreamOutput(piece, new, request.finish_reason)
        finally:
            self.engine.abort(request.request_id)

    def stats(self) -> EngineStats:
        """Counts so far."""
        scheduler = self.engine.scheduler
        return EngineStats(
            num_steps=scheduler.stats.num_steps,
            num_prompt_tokens=scheduler.stats.num_prompt_tokens,
            num_output_tokens=scheduler.stats.num_output_tokens,
            num_prefix_hit_tokens=scheduler.stats.num_prefix_hit_tokens,
            num_preemptions=scheduler.stats.num_preemptions,
            num_draft_tokens=self.engine.draft_stats.num_drafts,
            num_accepted_draft_tokens=self.engine.draft_stats.num_accepted,
            num_draft_spans=self.engine.draft_stats.num_spans,
            num_cache_blocks=scheduler.config.num_blocks,
            num_used_blocks=scheduler.block_manager.num_used_blocks,
            peak_memory_bytes=self._peak_memory_bytes(),
        )

    def __repr__(self) -> str:
        config = self.config
        return f"LLM({config.model_name_or_path!r}, {config.dtype}, {config.mode})"
