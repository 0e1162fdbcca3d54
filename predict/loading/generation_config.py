"""generation_config.json: how the model's maker would have answers sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.gguf.files import ENDING
from predict.request import SamplingParams
from predict.system.files import read_json_object

FILE = "generation_config.json"
# Fields of SamplingParams that the file has under the same name; the first say which tokens are
# drawn from, and mean nothing to greedy decoding.
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
SAMPLING = (*DRAWING, "repetition_penalty", "no_repeat_ngram_size")
# Keys that change no answer here, or are read elsewhere: ends of a text, the chat format.
_UNREAD = """
    do_sample decode_strategy max_new_tokens eos_token_id bos_token_id pad_token_id chat_format
    user_token_id assistant_token_id decoder_start_token_id max_window_size transformers_version
    paddlenlp_version _from_model_config _commit_hash assistant_ensemble_weight max_cache_len
    max_length max_time num_return_sequences length_penalty early_stopping use_cache
    cache_implementation cache_config return_legacy_cache return_dict_in_generate output_attentions
    output_hidden_states output_scores output_logits remove_invalid_values renormalize_logits
    low_memory compile_config disable_compile prefill_chunk_size continuous_batching_config
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind is_assistant
    prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp"""
MAX_NAMED = 12  # keys in a message
_ONE = ("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty")
# Greedy or not: Hugging Face's key, and PaddleNLP's.
_GREEDY: tuple[tuple[str, Mapping[Any, bool]], ...] = (
    ("do_sample", {True: False, False: True}),
    ("decode_strategy", {"sampling": False, "greedy_search": True}),
)


@dataclass(frozen=True)
class Recommended:
    """What a generation_config.json says of sampling, each value within its range."""

    path: Path
    greedy: bool | None  # None: it does not say
    values: Mapping[str, Any]  # fields of SamplingParams; none of DRAWING when greedy
    max_new_tokens: int | None = None
    left_out: tuple[str, ...] = ()  # keys that would change answers, and are not taken

    @property
    def note(self) -> list[str]:
        """A line on what is not taken, where there is any."""
        if not self.left_out:
            return []
        keys = ", ".join(map(quoted, self.left_out[:MAX_NAMED]))
        return [
            f"{self.path} has {keys}, which would change answers, and is not taken from there; "
            "flags and parameters of requests say what can be had"
        ]

    @property
    def samples(self) -> bool:
        """Whether it would have tokens drawn: it says so, or says how."""
        return self.greedy is False or any(name in self.values for name in DRAWING)

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request that says nothing itself."""
        values = {**self.values, "max_new_tokens": self.max_new_tokens}
        if self.greedy:
            values["temperature"] = 0.0
        return SamplingParams(**values)


def read_recommended(path: str | Path) -> Recommended | None:
    """What a generation_config.json, or the one of a folder, recommends; None when there is none.

    A GGUF file has none. Raises UserError naming file and key.
    """
    path = Path(path)
    if path.suffix == ENDING and path.is_file():
        return None
    if path.is_dir():
        path = path / FILE
        if not path.exists():
            return None
    read = read_json_object(path)
    given = {name: value for name, value in read.items() if value is not None}
    values = {name: _checked(path, name, given[name]) for name in SAMPLING if name in given}
    greedy = _is_greedy(path, given)
    if greedy:
        values = {name: value for name, value in values.items() if name not in DRAWING}
    length = given.get("max_new_tokens")
    if length is not None:
        length = _checked(path, "max_new_tokens", length)
    known = {*SAMPLING, *_UNREAD.split()}
    left_out = (
        name
        for name, value in given.items()
        if name not in known and value and not (name in _ONE and value == 1)
    )
    return Recommended(path, greedy, values, length, tuple(left_out))


def _is_greedy(path: Path, given: Mapping[str, Any]) -> bool | None:
    for key, meanings in _GREEDY:
        if key in given:
            value = given[key]
            if isinstance(value, (str, bool)) and value in meanings:
                return meanings[value]
            allowed = ", ".join(str(word).lower() for word in meanings)
            raise UserError(f"{path}: {key} {value!r} is not supported (allowed: {allowed})")
    return None


def _checked(path: Path, name: str, value: Any) -> Any:
    try:
        return getattr(SamplingParams(**{name: value}), name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
