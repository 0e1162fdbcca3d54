"""The process in which llama.cpp is timed: see predict.bench.cpu_peer.sides.

Of llama-cpp-python it takes the bindings alone, not their Llama class, which copies logits and
samples in Python. Tokens are chosen greedily, by NumPy, but random ones are read next: a network of
random weights may choose the same ones in all requests, and then the same experts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predict.bench.cases import Case, parse_cases
from predict.bench.cpu_peer.sides import serve
from predict.errors import UserError

MICRO_BATCH = 512  # tokens of a pass: llama.cpp's own default
CONTEXT_STEP = 256  # llama.cpp rounds a sequence's context up to so many tokens
WARM_UP_TOKENS = 4  # as predict.bench.throughput has it
COUNTED_TOKENS = 9  # of a run in which experts are counted: the prompt's, and eight steps
SORTED_EXPERTS = b"ffn_moe_argsort"  # llama.cpp's name for a layer's experts, the best first


class Peer:
    """Answers of the process, by what is asked."""

    def __init__(self) -> None:
        self._runs: dict[Case, CaseRun] = {}
        self._model: Any = None
        self._settings: Mapping[str, Any] = {}

    def answer(self, question: dict[str, Any]) -> Mapping[str, Any]:
        """Loads a file, counts the experts of a case, or times one."""
        if "file" in question:
            return self._load(question)
        if "experts_of" in question:
            (case,) = parse_cases([question["experts_of"]])
            counter = ExpertCounter(question["num_experts"], question["top_k"])
            CaseRun(self._model, case, self._settings, counter).count()
            return counter.means()
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


class ExpertCounter:
    """Distinct experts of each layer and step, from what llama.cpp shows of its graph."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        import llama_cpp

        self._num_experts, self._top_k = num_experts, top_k
        self._counts: dict[str, list[int]] = {"prompt_experts": [], "decode_experts": []}
        self._ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
        for name, result in (("name", "char_p"), ("data", "void_p")):
            function = getattr(self._ggml, f"ggml_get_{name}")
            function.restype, function.argtypes = getattr(ctypes, f"c_{result}"), [ctypes.c_void_p]
        self._ggml.ggml_nelements.restype = ctypes.c_int64
        self._ggml.ggml_nelements.argtypes = [ctypes.c_void_p]
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._see)  # kept alive here
        self.step = "prompt_experts"

    def means(self) -> dict[str, float]:
        """Over layers and steps, of prompts and of decoding, where there were any."""
        return {step: float(np.mean(counts)) for step, counts in self._counts.items() if counts}

    def _see(self, tensor: int, is_question: bool, _: Any) -> bool:
        """Called for each tensor ahead of its making, to say whether it is wanted, and behind."""
        if not self._ggml.ggml_get_name(tensor).startswith(SORTED_EXPERTS):
            return not is_question
        if not is_question:
            size = self._ggml.ggml_nelements(tensor)
            data = ctypes.cast(self._ggml.ggml_get_data(tensor), ctypes.POINTER(ctypes.c_int32))
            experts = np.ctypeslib.as_array(data, shape=(size,)).reshape(-1, self._num_experts)
            self._counts[self.step].append(len(np.unique(experts[:, : self._top_k])))
        return True


class CaseRun:
    """A context for the requests of one case."""

    def __init__(
        self,
        model: Any,
        case: Case,
        settings: Mapping[str, Any],
        counter: ExpertCounter | None = None,
    ) -> None:
        """settings: num_threads, cache_type (a name of GGML's). counter: for `count` alone."""
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
        self._counter = counter
        if counter is not None:
            params.cb_eval = counter.callback
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise UserError(f"llama.cpp makes no context for {case}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(num_prompt_tokens, 0, 1)

    def timed(self, turn: int) -> dict[str, float | None]:
        """TTFT, TPOT and rates of the case, as predict.bench.throughput defines them."""
        case = self._case
        generator = self._generator(turn)

        def run(output_len: int) -> float:
            return self._run(generator, output_len)

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

    def count(self) -> None:
        """Answers prompts of the case's kind, untimed."""
        self._run(self._generator(0), min(self._case.output_len, COUNTED_TOKENS))

    def _generator(self, turn: int) -> np.random.Generator:
        return np.random.default_rng((turn, self._case.num_requests, self._case.input_len))

    def _run(self, generator: np.random.Generator, output_len: int) -> float:
        """Seconds of answering as many prompts of random token ids."""
        size = (self._case.num_requests, self._case.input_len)
        prompts = generator.integers(0, self._vocab_size, size).tolist()
        self._api.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        self._answer(prompts, output_len, generator)
        return time.perf_counter() - start

    def _answer(
        self, prompts: Sequence[Sequence[int]], output_len: int, generator: np.random.Generator
    ) -> None:
        """Reads the prompts in one call, then decodes; every request gets all its tokens."""
        length, numbers = self._case.input_len, range(len(prompts))
        places = [
            (prompt[at], at, request, at == length - 1)
            for request, prompt in enumerate(prompts)
            for at in range(length)
        ]
        self._decode(places)
        for request in numbers:
            self._greedy((request + 1) * length - 1)
        if self._counter is not None:
            self._counter.step = "decode_experts"
        for step in range(output_len - 1):
            tokens = generator.integers(0, self._vocab_size, len(prompts)).tolist()
            self._decode([(tokens[request], length + step, request, True) for request in numbers])
            for request in numbers:
                self._greedy(request)

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
