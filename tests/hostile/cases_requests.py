"""What a prompt may ask of its answer, in a data file and on the command line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.hostile.case import GOOD_LINES, Case, Prepare, Sandbox

# Keys of a data line, and the words that the message must have.
WRONG: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("too hot", {"temperature": 1e300}, ("temperature 1e+300", "from 1e-30 to 1e+30")),
    ("a subnormal temperature", {"temperature": 1e-45}, ("temperature 1e-45", "1e-30")),
    ("below absolute zero", {"temperature": -1}, ("temperature -1", "greedy")),
    ("a temperature in words", {"temperature": "hot"}, ("temperature 'hot'",)),
    ("a temperature as text", {"temperature": "0.7"}, ("temperature '0.7'",)),
    ("a true temperature", {"temperature": True}, ("temperature True",)),
    ("a list of temperatures", {"temperature": [0.5]}, ("temperature [0.5]",)),
    ("top_k of 2**31", {"top_k": 2**31}, ("top_k 2147483648", "at most 2147483647")),
    ("a negative top_k", {"top_k": -2}, ("top_k -2", "0 turns it off")),
    ("half a top_k", {"top_k": 1.5}, ("top_k 1.5",)),
    ("a top_p below nothing", {"top_p": -1}, ("top_p -1", "1e-30 to 1")),
    ("a top_p that float32 takes for 0", {"top_p": 1e-50}, ("top_p 1e-50", "1e-30")),
    ("a top_p above all", {"top_p": 1.5}, ("top_p 1.5",)),
    ("a min_p that float32 takes for 1", {"min_p": 1 - 1e-12}, ("min_p", "below 1")),
    ("a typical_p of nothing", {"typical_p": 0}, ("typical_p 0",)),
    ("a repetition penalty of 0", {"repetition_penalty": 0}, ("repetition_penalty 0", "above 0")),
    ("a huge repetition penalty", {"repetition_penalty": 1e300}, ("1e-06 to 1e+06",)),
    ("a huge presence penalty", {"presence_penalty": 1e39}, ("presence_penalty 1e+39", "1e+30")),
    ("a huge frequency penalty", {"frequency_penalty": -1e39}, ("frequency_penalty -1e+39",)),
    ("endless n-grams", {"no_repeat_ngram_size": 2**31}, ("no_repeat_ngram_size 2147483648",)),
    ("no new tokens", {"max_new_tokens": 0}, ("max_new_tokens 0", "at least 1")),
    ("2**31 new tokens", {"max_new_tokens": 2**31}, ("max_new_tokens 2147483648",)),
    ("a length of 2**40", {"max_length": 2**40}, ("max_length 1099511627776",)),
    ("a negative min_length", {"min_length": -1}, ("min_length -1",)),
    ("a min_length above all", {"min_length": 9, "max_new_tokens": 3}, ("min_length 9", "raise")),
    ("a seed of 2**63", {"seed": 2**63}, ("seed 9223372036854775808", "2**63 - 1")),
    ("a seed below -2**63", {"seed": -(2**63) - 1}, ("seed -9223372036854775809",)),
    ("no answers", {"n": 0}, ("n 0", "from 1 to 1024")),
    ("too many answers", {"n": 1025, "temperature": 1.0}, ("n 1025", "1024")),
    ("the same answer twice", {"n": 2, "temperature": 0}, ("n 2 with greedy decoding",)),
    ("fewer samples than answers", {"n": 3, "best_of": 2}, ("best_of 2 is less than n 3",)),
    ("no beams", {"num_beams": 0}, ("num_beams 0",)),
    ("2**31 beams", {"num_beams": 2**31}, ("num_beams 2147483648", "at most 1024")),
    ("more beams than the batch", {"num_beams": 900, "temperature": 0}, ("num_beams 900", "batch")),
    ("an overflowing length penalty", {"length_penalty": 300}, ("length_penalty 300", "-10 to 10")),
    ("stopping soon", {"early_stopping": "soon"}, ("early_stopping 'soon'", "'never'")),
    ("an empty stop", {"stop": ""}, ("stop ''", "none of them empty")),
    ("a stop in a list in a list", {"stop": [["a"]]}, ("stop ['a']",)),
    ("a mapping of stops", {"stop": {"a": 1}}, ("stop {'a': 1}",)),
    ("300 stops", {"stop": [str(i) for i in range(300)]}, ("stop has more than 256",)),
    ("a stop of 20000 characters", {"stop": "x" * 20000}, ("stop has 20000 characters",)),
    ("a stop token above int32", {"stop_token_ids": [2**31]}, ("token id 2147483648",)),
    ("a stop token as text", {"stop_token_ids": ["5"]}, ("token id '5'",)),
    ("half a stop token", {"stop_token_ids": [1.5]}, ("token id 1.5",)),
    ("2000 stop tokens", {"stop_token_ids": [5] * 2000}, ("stop_token_ids has more than 1024",)),
    ("a stop token of another model", {"stop_token_ids": [512]}, ("outside the vocabulary", "511")),
    ("one bad word for a list", {"bad_words": "word"}, ("bad_words 'word'",)),
    ("an empty bad word", {"bad_words": [[]]}, ("bad_words has []", "none empty")),
    ("a negative bad word", {"bad_words": [[-1]]}, ("bad_words", "-1")),
    ("9000 bad words as texts", {"bad_words": ["x"] * 9000}, ("bad_words has 9000 words", "twice")),
    ("a bad word of another model", {"bad_words": [[1, 512]]}, ("bad_words has token id 512",)),
    ("a bias of a negative token", {"logit_bias": {"-1": 1}}, ("logit_bias of token '-1'",)),
    ("an infinite bias", {"logit_bias": {"5": 1e31}}, ("token 5: 1e+31", "bad_words")),
    ("a list of biases", {"logit_bias": [5]}, ("logit_bias [5]", "a mapping")),
    ("a bias in another vocabulary", {"logit_bias": {"512": 1}}, ("token id 512", "511")),
    ("too many logprobs", {"logprobs": 21}, ("logprobs 21", "from 0 to 20")),
    ("logprobs of prompts, yes", {"prompt_logprobs": "yes"}, ("prompt_logprobs 'yes'",)),
    ("ignoring the end a little", {"ignore_eos": 1}, ("ignore_eos 1", "True, False")),
)


def third_line(keys: dict[str, Any], src: str = "me too") -> Prepare:
    """Two good prompts, and a third one with these keys."""

    def prepare(sandbox: Sandbox) -> None:
        line = json.dumps({"src": src, "tgt": "", **keys})
        sandbox.data.write_text("\n".join([*GOOD_LINES, line]) + "\n")

    return prepare


def poisoned_token(sandbox: Sandbox) -> None:
    """A model whose embedding of one token is no number, and a third prompt that has it."""
    from predict.text.tokenizer import Tokenizer

    third_line({}, src="~")(sandbox)
    path = sandbox.model / "model.safetensors"
    tensors = load_file(path)
    for token in Tokenizer.from_dir(sandbox.model).encode("~"):
        tensors["model.embed_tokens.weight"][token] = np.nan
    save_file(tensors, path)


ONE_BAD = ("line 3 of prompts.jsonl", "no finite largest logit", "3 of 3 results")

CASES = [
    *(
        Case(
            f"a request: {name}",
            "predict",
            prepare=third_line(keys),
            says=("line 3 of prompts.jsonl", *says),
        )
        for name, keys, says in WRONG
    ),
    *(
        Case(
            f"a request that fails as it runs, {name}",
            "predict",
            argv=argv,
            prepare=poisoned_token,
            code=1,
            says=ONE_BAD,
            writes_output=True,
        )
        for name, argv in (
            ("greedy", ()),
            ("one by one", ("--batch_size", "1")),
            ("sampled", ("--decode_strategy", "sampling", "--top_p", "0.9")),
            ("among beams", ("--decode_strategy", "beam_search", "--num_beams", "2")),
            ("with drafts", ("--speculate_method", "inference_with_reference")),
        )
    ),
]
