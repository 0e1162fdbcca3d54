"""The dialects of ChatGLM's sentencepiece models: of the first one, and of 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.files import json_type
from predict.text.backends.added import CONFIG_FILE, MAX_TOKEN_ID
from predict.text.backends.sentencepiece_model import FamilyDialect

NUM_IMAGE_TOKENS = 20000  # where the config does not say
MAX_BLANKS = 80  # spaces in one token
LINE, TAB = "<n>", "<|tab|>"
BLANKS = {f"<|blank_{count}|>": " " * count for count in range(2, MAX_BLANKS + 1)}
# Switches that change texts before they are encoded; no known checkpoint turns them on.
OFF = ("do_lower_case", "remove_space")


def second() -> FamilyDialect:
    """ChatGLM2's and 3's: special tokens behind the pieces, two of them in front of a text."""
    return FamilyDialect(
        appended=(
            *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        followers={"[gMASK]": "sop", "[sMASK]": "sop"},
        unseen=("sop", "eop"),
        ends=(("[gMASK]", "sop"), ()),
    )


def first(folder: Path, config: Mapping[str, Any]) -> FamilyDialect:
    """ChatGLM-6B's: tokens of images in front, its own signs for whitespace, ends at the end."""
    for switch in OFF:
        if config.get(switch):
            raise UserError(
                f"{folder / CONFIG_FILE}: {switch} is {config[switch]!r}, which this tokenizer "
                "does not do (allowed: false); change the texts yourself, and the switch to false"
            )
    number = config.get("num_image_tokens", NUM_IMAGE_TOKENS)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MAX_TOKEN_ID:
        got = number if isinstance(number, int) else json_type(number)
        raise UserError(
            f"{folder / CONFIG_FILE}: num_image_tokens is {got} (allowed: a whole number from 0 to "
            f"{MAX_TOKEN_ID - 1})"
        )
    return FamilyDialect(
        num_other_ids=number,
        roles={
            "bos_token": "<sop>",
            "eos_token": "<eop>",
            "mask_token": "[MASK]",
            "gmask_token": "[gMASK]",
            "end_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        },
        spelled={LINE: "\n", TAB: "\t", **BLANKS},
        prepare=_with_signs,
        ends=((), ("[gMASK]", "<sop>")),
    )


def _with_signs(text: str) -> str:
    """The text with line ends, tabs and runs of spaces as the tokens that stand for them."""
    text = text.replace("\n", LINE).replace("\t", TAB)
    for sign, blanks in reversed(BLANKS.items()):
        text = text.replace(blanks, sign)
    return text
