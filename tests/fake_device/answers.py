"""Prints what engines answer on the device "pretend" and on the CPU, as one JSON object.

python -m tests.fake_device.answers, with CUSTOM_DEVICE_ROOT: Paddle looks there when it is
imported, so this is a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from predict import LLM, Guide, SamplingParams
from predict.device import devices
from predict.doctor import collect, render
from predict.errors import UserError
from predict.loading.platform import platform_of
from predict.system.notes import printed
from tests.support.golden import GOLDEN, config
from tests.support.paths import DEMO

PROMPTS = [[5, 9, 17, 2, 90, 33, 5, 9, 17, 2], [100, 3, 3, 3, 3], list(range(40, 63))]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_p=0.9, seed=3)
PENALIZED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, bad_words=((7,),))
SETTINGS: dict[str, dict[str, Any]] = {
    "append": {},
    "reserved": {"attention": "reserved"},
    "chunks": {"max_num_batched_tokens": 7},
    "bfloat16": {"dtype": "bfloat16"},
    "random weights": {"load_format": "dummy"},
    "int8 weights": {"quant_type": "weight_only_int8"},
    "int4 weights": {"quant_type": "weight_only_int4"},
    "a8w8": {"quant_type": "a8w8"},
    "float8": {"quant_type": "a8w8_fp8"},
    "int8 cache": {"cachekv_int8_type": "dynamic"},
    "int4 cache": {"cachekv_int8_type": "int4"},
    "n-gram drafts": {
        "speculate_method": "inference_with_reference",
        "speculate_max_draft_token_num": 4,
        "speculate_max_ngram_size": 2,
    },
    "draft model": {
        "speculate_method": "draft_model",
        "speculate_max_draft_token_num": 3,
        "draft_model_name_or_path": str(GOLDEN / "llama_gqa"),
    },
}
REFUSED: dict[str, Callable[[], Any]] = {
    "another type": lambda: platform_of("npu", inference_model=False),
    "a spelling": lambda: platform_of("pretent:0", inference_model=False),
    "an index": lambda: platform_of("pretend:2", inference_model=False),
}


def answers(device: str, changes: dict[str, Any]) -> list[Any]:
    """Token ids of all samples, and logprobs of the first prompt's, rounded."""
    values = {"batch_size": 4, "block_size": 16, "attention": "append", **changes}
    llm = LLM(config("llama_gqa", device=device, **{"max_length": 64, **values}))
    params = [replace(GREEDY, logprobs=1), replace(DRAWN, n=2), PENALIZED]
    outputs = llm.generate(PROMPTS, params)
    likely = [
        {token: round(each.logprob, 3) for token, each in place.items()}
        for place in outputs[0].outputs[0].logprobs or ()
    ]
    return [[[list(each.token_ids) for each in o.outputs] for o in outputs], likely]


def texts(device: str) -> list[str]:
    """What a guide and a beam search make of a prompt of the demo model."""
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "attention": "append"}
    settings["inference_model"] = False
    llm = LLM(DEMO, device=device, max_length=32, batch_size=4, **settings)
    params = [
        SamplingParams(temperature=0.0, max_new_tokens=3, guide=Guide(regex="[a-f]{3,6}")),
        SamplingParams(num_beams=2, max_new_tokens=3),
    ]
    return [output.text for output in llm.generate(["def gcd(a, b):"] * 2, params)]


def out_of_memory() -> None:
    """Asks for more than the device has."""
    import paddle

    platform = platform_of("pretend:1", inference_model=False)
    platform.make_current()
    with platform.explained_out_of_memory("lower --batch_size"):
        paddle.empty([5 << 30], "uint8")


def refusal(function: Callable[[], Any]) -> str:
    """The message of the UserError that is raised; empty where none is."""
    try:
        function()
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    """See the module."""
    both = ("pretend:1", "cpu")  # in one process, and the CPU behind the other device
    found: dict[str, Any] = {
        name: [answers(device, changes) for device in both] for name, changes in SETTINGS.items()
    }
    found["guide and beams"] = [texts(device) for device in both]
    found["refused"] = {name: refusal(function) for name, function in REFUSED.items()}
    found["refused"]["memory"] = refusal(out_of_memory)
    llm = LLM(config("llama_gqa", device="pretend", inference_model=True))
    found["with --inference_model"] = [llm.platform.device.flag, llm.platform.backend.__name__]
    placed = llm.decoder.head.linear.tensors[0] if llm.decoder else None
    found["place"] = str(placed.place) if placed is not None else ""
    found["peak"] = devices.peak_bytes(llm.platform.device)
    report = collect()
    found["doctor"] = [report["paddle"]["devices"], render(report)]
    print(json.dumps(found))


if __name__ == "__main__":
    with printed():
        main()
