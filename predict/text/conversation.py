"""Role messages of every form in which data files and callers write a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from predict.errors import UserError, quoted, unknown_key
from predict.system.files import json_type

# A part of a content: of text, or {"type": "image"}, where a picture stands.
Part = dict[str, str]
# {"role": "system" | "user" | "assistant" | ..., "content": a text or a list of text parts, ...}
Message = dict[str, Any]
TextPart = dict[str, str]  # {"type": "text", "text": ...}

# Types of the text parts of a content that is a list, and of pictures' with the key of these.
TEXT_PARTS = ("text", "input_text", "output_text")
PICTURE_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
MARK = "<image>"  # in a data file's texts, for each of its line's `images`
BESIDE = ("detail", "cache_control")  # keys of a picture's part beside the picture
DETAILS = (None, "auto", "low", "high")
URL_KEYS = ("url", "detail", "min_pixels", "max_pixels", "min_pixel", "max_pixel")


def text_part(text: str) -> TextPart:
    """A part of a content."""
    return {"type": "text", "text": text}


def content_text(content: str | list[TextPart]) -> str:
    """A content as one text: its parts are joined as they are. Raises UserError for a picture."""
    if isinstance(content, str):
        return content
    if any("text" not in part for part in content):
        raise UserError(
            "the chat template has no place for pictures; give one with --chat_template that reads "
            'parts of the type "image"'
        )
    return "".join(part["text"] for part in content)


def with_marked(
    messages: Sequence[Message], own: Sequence[PicturePart], images: Sequence[Any]
) -> tuple[list[Message], list[PicturePart]]:
    """Messages with a part for each MARK in their texts, and all pictures in order.

    own: those of the messages' parts. images: sources, one for each MARK. Raises UserError where
    there are not as many.
    """
    left, others, pictures = iter(images), iter(own), list[PicturePart]()
    if not images:
        return list(messages), list(own)
    count = sum(part.get("text", "").count(MARK) for m in messages for part in _parts(m["content"]))
    if count != len(images):
        raise UserError(
            f"the texts have {count} times {MARK}, and images has {len(images)} pictures; write "
            f"{MARK} where each of them stands"
        )
    made: list[Message] = []
    for message in messages:
        parts: list[Part] = []
        for part in _parts(message["content"]):
            if "text" not in part:
                parts.append(part)
                pictures.append(next(others))
                continue
            first, *rest = part["text"].split(MARK)
            parts += [text_part(first)] if first or not rest else []
            for text in rest:
                parts += [{"type": "image"}, *([text_part(text)] if text else [])]
                pictures.append(PicturePart(next(left)))
        made.append({**message, "content": parts})
    return made, pictures


def _parts(content: str | list[Part]) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content


def content_size(content: str | list[Part]) -> int:
    """Characters of a content's texts."""
    return sum(len(part.get("text", "")) for part in _parts(content))


class PicturePart(NamedTuple):
    """A picture that a part of a content brings, and its own options."""

    source: Any
    options: Mapping[str, int] = MappingProxyType({})
    is_low: bool = False  # `detail` is low: few tokens, where the model's pictures may have fewer


def is_picture_part(part: object) -> TypeGuard[dict[str, Any]]:
    """Whether a part of a content, as a stranger wrote it, brings a picture."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in PICTURE_PARTS


def picture_part(part: Mapping[str, Any]) -> PicturePart:
    """The picture of a part whose type is one of PICTURE_PARTS. Raises UserError without a place.

    {"type": "image_url", "image_url": {"url": ..., "min_pixels": ..., "max_pixels": ...}}, or the
    url alone. `detail` stands beside the url, or beside the key.
    """
    kind = part["type"]
    key = PICTURE_PARTS[kind]
    for name in part:
        if name not in ("type", key, *BESIDE):
            raise unknown_key(f"a part {kind}", name, ["type", key, *BESIDE])
    given, detail = part.get(key), part.get("detail")
    options: dict[str, int] = {}
    if isinstance(given, Mapping):
        for name in given:
            if name not in URL_KEYS:
                raise unknown_key(key, name, URL_KEYS)
        for name in ("min_pixel", "max_pixel"):  # DashInfer's names
            for spelled in (name, f"{name}s"):
                if given.get(spelled) is not None:
                    options[f"{name}s"] = given[spelled]
        detail = given.get("detail", detail)
        given = given.get("url")
    if detail not in DETAILS:
        raise UserError(f"detail is {quoted(detail)} (allowed: auto, low, high)")
    if given is None:
        raise UserError(f'{key} is missing; write {{"type": "{kind}", "{key}": ...}}')
    return PicturePart(given, options, detail == "low")


def conversation_messages(
    src: Any, tgt: Any, pictures: list[PicturePart] | None = None
) -> list[Message]:
    """Role messages of one data line's `src` and `tgt`.

    pictures: where they may have some: those that parts bring are added, and {"type": "image"}
    stands in their places.

    `src` is a text, a list of role objects, or a list of questions (then `tgt` lists the answers to
    all but the last), or PaddleNLP's pairs [[question, answer], ..., [question]]. Raises UserError
    for any other form.
    """
    if isinstance(src, str):
        return [{"role": "user", "content": src}]
    if not isinstance(src, list) or not src:
        raise UserError("src must be a text or a list that is not empty")
    if all(isinstance(turn, dict) for turn in src):
        return [_message(turn, f"message {number}", pictures) for number, turn in enumerate(src, 1)]
    if all(isinstance(turn, str) for turn in src):
        answers = tgt if isinstance(tgt, list) else []
        pairs = [[q, *answers[i : i + 1]] for i, q in enumerate(src)]
        pairs[-1] = pairs[-1][:1]  # its answer is what is asked for
    elif all(isinstance(turn, list) for turn in src):
        pairs = src
    else:
        raise UserError("src mixes texts, pairs and messages; use one form")
    if len(pairs[-1]) != 1 or any(len(pair) != 2 for pair in pairs[:-1]):
        raise UserError(
            f"src asks {len(pairs)} questions, so {len(pairs) - 1} answers must be given (in tgt, "
            "or as [question, answer] pairs with a lone last question)"
        )
    texts = [text for pair in pairs for text in pair]
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"src has {json_type(text)} among questions and answers; write texts")
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def _message(
    turn: dict[Any, Any], where: str, pictures: list[PicturePart] | None = None
) -> Message:
    """A role object with its content checked; its other fields are for the template."""
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        got = f"the role {json_type(role)}" if "role" in turn else "no role"
        raise UserError(f'{where} has {got}; write a text such as "user"')
    where = f"{where} ({quoted(role)[1:-1]})"
    content = turn.get("content")
    if content is None and role == "assistant" and isinstance(turn.get("refusal"), str):
        content = turn["refusal"]
    if content is None:
        if role != "assistant" or not turn.get("tool_calls"):
            got = "the content null" if "content" in turn else "no content"
            raise UserError(
                f"{where} has {got}; write a text (only an assistant's message with "
                "tool_calls may go without)"
            )
        # Templates print what is there: null would stand in the prompt as Python's "None".
        content = ""
    elif isinstance(content, list):
        content = [_part_of(part, where, pictures) for part in content]
    elif not isinstance(content, str):
        raise UserError(
            f"{where} has {json_type(content)} as content; write a text or a list of text parts"
        )
    return {**turn, "content": content}


def _part_of(part: Any, where: str, pictures: list[PicturePart] | None) -> Part:
    if pictures is None or not is_picture_part(part):
        return text_part(_part(part, where))
    try:
        pictures.append(picture_part(part))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return {"type": "image"}


def _part(part: Any, where: str) -> str:
    """The text of one part of a content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UserError(f"{where} has {json_type(part)} as a part of its content; write texts")
    kind = part.get("type", "text")
    if kind not in TEXT_PARTS:
        raise UserError(
            f"{where} has a part of type {quoted(kind)}, and this model reads texts only (allowed: "
            '{"type": "text", "text": "..."})'
        )
    text = part.get("text")
    if not isinstance(text, str):
        got = f"has {json_type(text)} as text" if "text" in part else "has no text"
        raise UserError(
            f'{where}: a part of its content {got}; write {{"type": "text", "text": "..."}}'
        )
    return text
