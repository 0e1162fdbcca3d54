"""Names that a user may have meant: mistyped ones, and what other tools call ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache

MAX_NAME = 64  # characters that are looked at: each takes time
# Ours, and those of vLLM, llama.cpp, transformers, OpenAI and others. One of theirs may be several
# of ours, of which a command or a file knows one.
OTHER_NAMES: Mapping[str, str] = {
    "src": "prompt messages conversation conversations inputs",
    "model_name_or_path": "model model_path pretrained_model_name_or_path",
    "dtype": "torch_dtype",
    "float16": "fp16 f16 half",
    "bfloat16": "bf16",
    "float32": "fp32 f32",
    "device": "device_map n_gpu_layers gpu_layers ngl",
    "max_new_tokens": "max_tokens max_completion_tokens max_output_tokens max_gen_len max_dec_len "
    "n_predict num_predict",
    "max_length": "max_model_len max_seq_len max_seq_length n_ctx num_ctx ctx_size",
    "batch_size": "max_num_seqs max_batch_size n_parallel parallel",
    "max_num_batched_tokens": "max_num_tokens n_batch max_prefill_tokens",
    "num_cache_blocks": "num_gpu_blocks num_gpu_blocks_override",
    "gpu_memory_utilization": "mem_fraction_static kv_cache_free_gpu_memory_fraction",
    "prefix_caching": "enable_prefix_caching",
    "chunked_prefill": "enable_chunked_prefill",
    "cachekv_int8_type": "kv_cache_dtype cache_type_k cache_type_v type_k type_v",
    "quant_type": "quantization quantization_config load_in_4bit load_in_8bit",
    "speculate_method": "speculative_config speculative_method",
    "speculate_max_draft_token_num": "num_speculative_tokens draft_max",
    "draft_model_name_or_path": "speculative_model draft_model model_draft",
    "lora_modules": "enable_lora lora",
    "served_model_name": "alias",
    "min_length": "min_tokens min_new_tokens min_dec_len",
    "temperature": "temp do_sample",
    "typical_p": "typical",
    "repetition_penalty": "repeat_penalty rep_pen penalty_score",
    "presence_penalty": "presence_score",
    "frequency_penalty": "frequency_score",
    "stop": "stop_words stop_sequences stop_strings stop_str",
    "stop_token_ids": "eos_token_id eos_token_ids",
    "bad_words": "bad_words_ids",
    "logprobs": "top_logprobs num_logprobs",
    "n": "num_return_sequences num_answers num_samples",
    "guide": "guided_decoding structured_outputs",
    "num_beams": "beam_size beam_width",
    "seed": "random_seed",
    "tensor_parallel_degree": "tensor_parallel_size tp_size tp split_mode tensor_split",
    "expert_parallel_degree": "expert_parallel_size enable_expert_parallel ep_size",
    "adapter": "lora lora_name lora_request adapter_name adapter_id",
}
# What others have and nothing here is called, and why.
ABSENT: Mapping[str, str] = {
    "pipeline_parallel_size pipeline_parallel_degree data_parallel_size":
        "layers are not shared out; tensor_parallel_degree cuts each of them",
    "trust_remote_code": "code of a checkpoint is never run; leave it out",
    "enforce_eager": "on a GPU steps are always graphs; leave it out",
    "download_dir cache_dir revision": "nothing is downloaded; give a folder",
    "swap_space cpu_offload_gb": "weights and cache stay on the device; leave it out",
}  # fmt: skip


def nearest(name: str, known: Iterable[str], likeness: float | None = None) -> str | None:
    """The known name that another one stands for, or is mistyped; None where none is likely.

    Case and what is neither letter nor digit do not count: top-k, topK and topk are top_k.
    likeness: of what is mistyped at least, 1 where it is equal.
    """
    ours = list(known)
    plain = _plain(name[:MAX_NAME])
    names = {_plain(each): each for each in reversed(ours)}
    theirs = {other: one for one in ours for other in _others(OTHER_NAMES.get(one, ""))}
    names = {**theirs, **names}
    if not plain or plain in names or plain in _foreign():
        return names.get(plain)
    # One of three letters may be wrong, and as many of twelve.
    likeness = likeness or (0.65 if len(plain) <= 3 else 0.75)
    near = get_close_matches(plain, names, n=1, cutoff=likeness)
    return names[near[0]] if near else None


def hint(name: str, known: Iterable[str], mark: str = "") -> str:
    """The end of a message: the known name that was meant, or why there is none; else empty.

    mark: what stands in front of such a name.
    """
    if guess := nearest(name, known):
        return f"; did you mean {mark}{guess}?"
    plain = _plain(name)
    why = next((why for others, why in ABSENT.items() if plain in _others(others)), None)
    return f"; {why}" if why else ""


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _others(names: str) -> list[str]:
    return [_plain(each) for each in names.split()]


@cache
def _foreign() -> frozenset[str]:
    """Names of others, plain."""
    everywhere = (*OTHER_NAMES.values(), *ABSENT)
    return frozenset(other for names in everywhere for other in _others(names))
