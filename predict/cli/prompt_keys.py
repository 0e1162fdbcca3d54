"""Keys of a prompt that are not read, and the known keys that their writer may have meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import islice

from predict.errors import quoted
from predict.request import SAMPLING_KEYS

MAX_KEYS = 500  # looked at, of those that differ: each takes some ms
MAX_WARNINGS = 10
# num_return_sequences is n, as the flag is called.
KNOWN_KEYS = ("src", "tgt", "num_return_sequences", *SAMPLING_KEYS)

# What other tools call our keys.
OTHER_NAMES: Mapping[str, str] = {
    "src": "prompt messages conversation conversations inputs",
    "max_new_tokens": "max_tokens max_completion_tokens max_output_tokens max_gen_len max_dec_len "
    "n_predict num_predict",
    "max_length": "max_model_len max_seq_len",
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
    "n": "num_answers num_samples",
    "num_beams": "beam_size beam_width",
    "seed": "random_seed",
    "adapter": "lora lora_name lora_request adapter_name adapter_id",
}
# Asked for elsewhere, and not here.
UNSUPPORTED = (
    "functions guided_choice guided_grammar guided_json guided_regex image images response_format "
    "tool_choice tools"
)


def meant(key: str) -> str | None:
    """The key that a mistyped one, or another tool's, stands for; None for one that is like none.

    Case and what is neither letter nor digit do not count: top-k, topK and topk are top_k.
    """
    plain = _plain(key)
    names = {_plain(name): name for name in KNOWN_KEYS}
    names |= {_plain(name): ours for ours, theirs in OTHER_NAMES.items() for name in theirs.split()}
    if plain in names:
        return names[plain]
    # A key of two letters is near to everything.
    near = get_close_matches(plain, names, n=1, cutoff=0.8) if len(plain) > 2 else []
    return names[near[0]] if near else None


def key_warnings(keys_of: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """One line for each key that was probably meant for us.

    keys_of: (where it stands, its keys that are not KNOWN_KEYS) of every prompt. A key that is like
    none of ours belongs to the file's owner, and nothing is said of it.
    """
    places: dict[str, list[str]] = {}
    for where, keys in keys_of:
        for key in keys:
            places.setdefault(key, []).append(where)
    warnings = []
    for key, wheres in islice(places.items(), MAX_KEYS):
        count = "1 prompt has" if len(wheres) == 1 else f"{len(wheres)} prompts have"
        said = f"{count} the key {quoted(key)}, which nothing reads ({wheres[0]}"
        said += ")" if len(wheres) == 1 else " first)"
        if key in UNSUPPORTED.split():
            warnings.append(f"{said}; this release has no such feature")
        elif (ours := meant(key)) is not None:
            warnings.append(f"{said}; did you mean {ours!r}?")
    rest = len(warnings) - MAX_WARNINGS
    return warnings[:MAX_WARNINGS] + [f"{rest} more keys are read by nothing"] * (rest > 0)


def _plain(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())
