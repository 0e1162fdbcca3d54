"""The process in which llama.cpp is timed: see predict.bench.cpu_peer.sides.

Of llama-cpp-python it takes the bindings alone, not their Llama class, which copies logits and
samples in Python. Tokens are chosen greedily, by NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predict.bench.cases import Case, parse_cases
from predict.bench.cpu_peer.sides import serve
from predict.errors import UserError

MICRO_BATCH = 512  # tokens of a pass: llama.cpp's own default
CONTEXT_STEP = 256  # llama.cpp rounds a sequence's context up to so many tokens
WARM_UP_TOKENS = 4  # as predict.bench.throughput has it


class Peer:
    """Answers of the process, by what is asked."""

    def __init__(self) -> None:
        self._runs: dict[Case, CaseRun] = {}
        self._model: Any = None
        self._settings: Mapping[str, Any] = {}

    def answer(self, question: dict[str, Any]) -> Mapping[str, Any]:
        """Loads a file, or times a case."""
        if "file" in question:
            return self._load(question)
        (case,) = parse_cases([question["case"]])
        if case not in self._runs:
            self._runs[case] = CaseRun(self._model, case, self._settings)
        return self._runs[case].timed(question["turn"])

    def _load(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        import llama_cpp

        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        _never_map(llama_cpp, params)
        self._model = llama_cpp.llama_model_load_from_file(question["file"].encode(), params)
        if not self._model:
            raise UserError("llama.cpp cannot load the file")
        self._settings = question
        return {
            "num_parameters": int(llama_cpp.llama_model_n_params(self._model)),
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "features": llama_cpp.llama_print_system_info().decode(),
        }


def _never_map(llama_cpp: Any, params: Any) -> None:
    """Makes weights be read into memory, where they may be laid out anew, under either name."""
    if hasattr(params, "use_mmap"):
        params.use_mmap = False
    if hasattr(params, "load_mode"):
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE


class CaseRun:
    """A context for the requests of one case."""

    def __init__(self, model: Any, case: Case, settings: Mapping[str, Any]) -> None:
        """settings: num_threads, cache_type (a name of GGML's)."""
        import llama_cpp

        self._api = llama_cpp
        self._case = case
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        num_prompt_tokens = case.num_requests * case.input_len
        length = -(-(case.input_len + case.output_len) // CONTEXT_STEP) * CONTEXT_STEP
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = case.num_requests * length, case.num_requests
        params.n_batch, params.n_ubatch = max(num_prompt_tokens, MICRO_BATCH), MICRO_BATCH
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        cache_type = getattr(llama_cpp, f"GGML_TYPE_{settings['cache_type']}")
        params.type_k = params.type_v = cache_type
        params.offload_kqv = params.op_offload = False
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise UserError(f"llama.cpp makes no context for {case}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(num_prompt_tokens, 0, 1)

    def timed(self, turn: int) -> dict[str, float | None]:
        """TTFT, TPOT and rates of the case, as predict.bench.throughput defines them."""
        case = self._case
        generator = np.random.default_rng((turn, case.num_requests, case.input_len))

        def run(output_len: int) -> float:
            size = (case.num_requests, case.input_len)
            prompts = generator.integers(0, self._vocab_size, size).tolist()
            self._api.llama_memory_clear(self._memory, True)
            start = time.perf_counter()
            self._answer(prompts, output_len)
            return time.perf_counter() - start

        run(min(case.output_len, WARM_UP_TOKENS))
        first = run(1)
        whole = run(case.output_len) if case.output_len > 1 else first
        steps = case.output_len - 1
        return {
            "ttft_ms": 1e3 * first,
            "tpot_ms": 1e3 * (whole - first) / steps if steps else None,
            "input_tokens_per_s": case.num_requests * case.input_len / whole,
            "output_tokens_per_s": case.num_requests * case.output_len / whole,
        }

    def _answer(self, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        """Reads the prompts in one call, then decodes; every request gets all its tokens."""
        length, numbers = self._case.input_len, range(len(prompts))
        places = [
            (prompt[at], at, request, at == length - 1)
            for request, prompt in enumerate(prompts)
            for at in range(length)
        ]
        self._decode(places)
        tokens = [self._greedy((request + 1) * length - 1) for request in numbers]
        for step in range(output_len - 1):
            self._decode([(tokens[request], length + step, request, True) for request in numbers])
            tokens = [self._greedy(request) for request in numbers]

    def _decode(self, places: Sequence[tuple[int, int, int, bool]]) -> None:
        """One call of (token, position, request, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(places)
        for at, (token, position, request, wanted) in enumerate(places):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, request
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise UserError(f"llama_decode ends with status {status}")
        self._api.llama_synchronize(self._context)

    def _greedy(self, at: int) -> int:
        """The token after the one that stood at a place of the batch."""
        logits = self._api.llama_get_logits_ith(self._context, at)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(Peer().answer)
