"""The bodies of requests: their fields, those that are ignored, those that are refused.

The types of sampling parameters are for the OpenAPI document; SamplingParams checks the values, as
for the command line and the Python API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from predict.config.adapters import MAX_NAME as MAX_ADAPTER_NAME
from predict.errors import quoted
from predict.names import hint
from predict.server.errors import ApiError, invalid
from predict.system.files import MAX_PATH, json_type

MAX_MESSAGES = 2048
MAX_NAME = 256  # characters of names and ids in messages
TAG = "\0"  # in front of the tags of types, which stand in no field's place

ModelT = TypeVar("ModelT", bound="Body")


def _optional(*kinds: Mapping[str, Any]) -> WithJsonSchema:
    """The type in the document of a field that may be null or left out."""
    return WithJsonSchema({"anyOf": [*kinds, {"type": "null"}], "default": None})


_TEXT: Mapping[str, Any] = {"type": "string"}
_FULL_TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
_IDS: Mapping[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS: Mapping[str, Any] = {"type": "array", "items": _FULL_TEXT}
_PART: Mapping[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}


def whole(value: Any) -> Any:
    """4 for 4.0, which JSON does not tell apart."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if exact else value


# Fields that may be null, and whose values are checked where they are used.
NumberField = Annotated[Any, _optional({"type": "number"})]
Integer = Annotated[Any, BeforeValidator(whole), _optional({"type": "integer"})]
Boolean = Annotated[Any, _optional({"type": "boolean"})]
Text = Annotated[Any, _optional(_TEXT)]
Texts = Annotated[Any, _optional(_TEXTS)]
TextOrTexts = Annotated[Any, _optional(_FULL_TEXT, _TEXTS)]
Object = Annotated[Any, _optional({"type": "object"})]
Objects = Annotated[Any, _optional({"type": "array", "items": {"type": "object"}})]
Schema = Annotated[Any, _optional({"type": "object"}, {"type": "boolean"})]
SchemaOrText = Annotated[Any, _optional({"type": "object"}, {"type": "boolean"}, _FULL_TEXT)]
TokenIds = Annotated[Any, _optional(_IDS)]
Biases = Annotated[
    Any,
    _optional(
        {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "propertyNames": {"pattern": "^[0-9]+$"},
        }
    ),
]
Words = Annotated[Any, _optional({"type": "array", "items": {"anyOf": [_FULL_TEXT, _IDS]}})]
Early = Annotated[Any, _optional({"enum": [True, False, "never"]})]
Content = Annotated[Any, _optional(_TEXT, {"type": "array", "items": _PART})]
PromptsField = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}}]}),
]
ToolChoice = Annotated[Any, _optional({"enum": ["none", "auto", "required"]}, {"type": "object"})]
Name = Annotated[str, Field(max_length=MAX_NAME)]
FullName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
ModelName = Annotated[str, Field(max_length=1024)]
AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
AdapterPath = Annotated[str, Field(min_length=1, max_length=MAX_PATH)]


class FirstOnly(FailFast):
    """Stops at the first wrong entry of a list, which may have many."""

    def __hash__(self) -> int:
        return 0


class Body(BaseModel):
    """An object of a request. Unknown fields are refused, with the name of the nearest known one.

    ignored: OpenAI's fields without an effect here. refused: fields that would change the answer,
    each with the values that would not, and the reason.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, value: Any) -> Any:
        return cls._known_fields(value)

    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        """The fields that are taken. Raises for one that is not."""
        if not isinstance(value, dict) or value.keys() <= cls.known:
            return value
        kept: dict[str, Any] = {}
        for name, given in value.items():
            if name in cls.known:
                kept[name] = given
            elif name in cls.refused:
                neutral, why = cls.refused[name]
                if given is not None and given not in neutral:
                    raise _field_error(name, f"is not supported: {why}")
            elif name not in cls.ignored:
                said = hint(name, cls.known) or "; leave it out"
                raise _field_error(name, f"is not a known field{said}")
        return kept


class TypedBody(Body):
    """An object that says its type, which is told ahead of its unknown fields where it is wrong."""

    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        field = cls.model_fields["type"]
        is_other = isinstance(value, dict) and value.get("type", field.default) not in get_args(
            field.annotation
        )
        return value if is_other else super()._known_fields(value)


def by_kind(allowed: str, kind_of: Callable[[Any], str | None]) -> Discriminator:
    """Chooses among tagged types of objects; `allowed` is told where a value is none of them."""
    return _by("kind", allowed, kind_of)


def text_or_list(allowed: str) -> Discriminator:
    """Chooses among the tags text and list; `allowed` is told where a value is neither."""
    shapes: Mapping[type, str] = {str: "text", list: "list"}
    return _by("shape", allowed, lambda value: shapes.get(type(value)))


def _by(error: str, allowed: str, kind_of: Callable[[Any], str | None]) -> Discriminator:
    def tag(value: Any) -> str | None:
        kind = kind_of(value)
        return None if kind is None else TAG + kind

    return Discriminator(tag, custom_error_type=error, custom_error_message=allowed)


def type_of(value: Any) -> str | None:
    """The type that an object says."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def tagged(kind: str) -> Tag:
    """The tag of a type that `by_kind` chooses."""
    return Tag(TAG + kind)


def _field_error(name: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{text}", {"field": name[:80], "text": text})


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None  # a last chunk with the counts of tokens
    continuous_usage_stats: bool | None = None  # with it: the counts so far in all other chunks
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class JsonSchemaFormat(Body):
    """A schema that the answer fits."""

    name: Name = "answer"
    description: str | None = None
    schema_: Schema = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Objects = None
    triggers: Texts = None
    at_least_one: Boolean = None
    stop_after_first: Boolean = None


class StructuredOutputs(Body):
    """vLLM's field for the form of the answer."""

    json_: SchemaOrText = Field(default=None, alias="json")
    json_object: Boolean = None
    regex: Text = None
    choice: Texts = None
    grammar: Text = None
    structural_tag: SchemaOrText = None


class GenerationBody(Body):
    """The fields of all requests for text: model, sampling parameters, guide."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer = None  # tokens of an answer, at most
    n: Integer = None
    stop: TextOrTexts = None
    seed: Integer = None
    temperature: NumberField = None
    top_p: NumberField = None
    presence_penalty: NumberField = None
    frequency_penalty: NumberField = None
    logit_bias: Biases = None
    # ours: fields of SamplingParams
    best_of: Integer = None
    max_new_tokens: Integer = None  # the same as max_tokens
    max_length: Integer = None  # tokens of prompt and answer
    min_length: Integer = None  # tokens of an answer, at least
    min_tokens: Integer = None  # the same as min_length
    top_k: Integer = None
    min_p: NumberField = None
    typical_p: NumberField = None
    repetition_penalty: NumberField = None
    no_repeat_ngram_size: Integer = None
    bad_words: Words = None
    ignore_eos: Boolean = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: Boolean = None
    prompt_logprobs: Integer = None
    num_beams: Integer = None
    length_penalty: NumberField = None
    early_stopping: Early = None
    priority: Integer = None  # smaller numbers run first, and may preempt; 0 where none is given
    # what the answer must be: one of these
    guide: Object = None  # what the text must be: a Guide
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: Text = None
    guided_choice: Texts = None
    guided_grammar: Text = None

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "store",
            "metadata",
            "service_tier",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "guided_decoding_backend",
            "spaces_between_special_tokens",
        }
    )
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "skip_special_tokens": ((True,), "the text of an answer leaves special tokens out"),
        "truncate_prompt_tokens": ((), "a prompt that is too long is refused; cut it yourself"),
        "allowed_token_ids": ((), "use a guide, or logit_bias"),
        "cache_salt": ((), "the prefix cache is shared by all requests"),
        "use_beam_search": ((False,), "use num_beams"),
        "guided_whitespace_pattern": ((), "use guided_regex or guided_grammar"),
        "logits_processors": (([],), "no code of a request is run; use logit_bias or a guide"),
        "return_token_ids": ((False,), "/tokenize has the ids of a text"),
        "return_tokens_as_token_ids": ((False,), "logprobs have the texts of tokens"),
        "detokenize": ((True,), "an answer is a text"),
        "request_id": ((), "send the header X-Request-Id"),
    }


class CompletionBody(GenerationBody):
    """A request for the continuation of texts."""

    prompt: PromptsField  # a text, token ids, or a list of these
    logprobs: Integer = None  # so many likeliest tokens beside each
    echo: bool | None = None  # the text begins with the prompt
    add_special_tokens: bool | None = None  # None: as the tokenizer's files say

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **GenerationBody.refused,
        "suffix": (("",), "models of this server do not fill in; write it into the prompt"),
        "prompt_embeds": ((), "a prompt is a text or token ids"),
    }


class FunctionCall(Body):
    """The function of an earlier answer's call."""

    name: FullName
    arguments: str | None = "{}"


class ToolCall(Body):
    """A call of an earlier answer."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], FirstOnly(), Field(max_length=256)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by its newer name
    refusal: str | None = None  # what an assistant said in place of a content

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations"})
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "audio": ((), "this model reads text only"),
        "function_call": ((), "use tool_calls"),
    }


class FunctionTool(Body):
    """A function that the model may call."""

    name: FullName
    description: str | None = None
    parameters: Object = None  # a JSON schema of its arguments
    strict: bool | None = None


class ToolBody(Body):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: FunctionTool

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "custom": ((), "give a function, or a guide for the content"),
        **dict.fromkeys(FunctionTool.model_fields, ((), "write it into function")),
    }


ChatField = Annotated[list[ChatMessage], FirstOnly(), Field(min_length=1, max_length=MAX_MESSAGES)]


# vLLM's and SGLang's, and those that Qwen's and DeepSeek's own services have.
_REASONING_SWITCHES = ("include_reasoning", "separate_reasoning", "stream_reasoning")
_TEMPLATE_SWITCHES = ("enable_thinking", "thinking")


class ChatBody(GenerationBody):
    """A request for the next turn of a conversation."""

    messages: ChatField
    max_completion_tokens: Integer = None  # the same as max_tokens
    logprobs: bool | None = None
    top_logprobs: Integer = None
    tools: Annotated[list[ToolBody], FirstOnly()] | None = None
    tool_choice: ToolChoice = None  # none, auto, required, or a tool by name
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: Object = None  # values that the chat template takes

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **GenerationBody.refused,
        "audio": ((), "this server makes text only"),
        "modalities": ((["text"],), "this server makes text only"),
        "functions": (([],), "use tools"),
        "function_call": (("none", "auto"), "use tool_choice"),
        "web_search_options": ((), "this server searches nothing"),
        "verbosity": (("medium",), "no model of this server knows it"),
        "chat_template": ((), "templates run code: start the server with --chat_template"),
        "add_generation_prompt": ((True,), "an answer is a turn of its own"),
        "continue_final_message": ((False,), "an answer is a turn of its own; use completions"),
        "echo": ((False,), "use completions"),
        "documents": (([],), "write them into a message"),
        "mm_processor_kwargs": ((), "this model reads text only"),
        "add_special_tokens": ((False,), "the chat template writes special tokens"),
        **dict.fromkeys(_REASONING_SWITCHES, ((True,), "thoughts come, as reasoning_content")),
        **dict.fromkeys(_TEMPLATE_SWITCHES, ((), "write it into chat_template_kwargs")),
        "reasoning": ((), "use reasoning_effort"),
    }


class TokenizeBody(Body):
    """A text or a conversation to tokenize."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: ChatField | None = None
    tools: Annotated[list[ToolBody], FirstOnly()] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Object = None

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "add_generation_prompt": ((True,), "an answer is a turn of its own"),
        "continue_final_message": ((False,), "an answer is a turn of its own"),
        "chat_template": ((), "templates run code: start the server with --chat_template"),
    }


class DetokenizeBody(Body):
    """Token ids to detokenize."""

    model: ModelName | None = None
    tokens: Annotated[Any, WithJsonSchema(dict(_IDS))]


_DIGESTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}


class LoadAdapterBody(Body):
    """An adapter to load."""

    lora_name: AdapterName  # what requests will call it, as their model
    lora_path: AdapterPath  # its folder, absolute or from the server's --adapter_root on

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "load_inplace": ((False,), "unload the adapter first"),
    }


class UnloadAdapterBody(Body):
    """An adapter to unload."""

    lora_name: AdapterName
    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})


class UpdateWeightsBody(Body):
    """Weights to run with from now on."""

    path: AdapterPath  # their folder, absolute or from the server's --weights_root on
    digests: Annotated[Any, WithJsonSchema(_DIGESTS)]  # SHA-256 of each file with weights, by name
    mode: Literal["wait", "abort"] = "wait"  # what runs ends first, or is ended


class LoadPrefixBody(Body):
    """A tuned prefix to load."""

    prefix_name: AdapterName  # what requests will call it, as their model
    prefix_path: AdapterPath  # its folder or .npy file, as the path of an adapter


class UnloadPrefixBody(Body):
    """A tuned prefix to unload."""

    prefix_name: AdapterName


def parsed(model: type[ModelT], value: Mapping[str, Any]) -> ModelT:
    """A body as its model. Raises ApiError 400 that names the first field at fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise _explained(first)


_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true, false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _explained(error: ErrorDetails) -> ApiError:
    context = error.get("ctx", {})
    kind = error["type"]
    param = path(error["loc"])
    if kind == "field":
        param = path((*error["loc"], context["field"]))
        return invalid(param, f"{param} {context['text']}", "unknown_field")
    if kind == "kind":
        found = error["input"]
        if isinstance(found, dict):
            param, found = f"{param}.type", found.get("type")
        message = f"{param} is {_shown(found)} (allowed: {error['msg']})"
        return invalid(param, message, "unsupported_content")
    if kind == "missing":
        return invalid(param, f"{param} is missing; write it", "missing_field")
    if kind == "literal_error":
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
    elif kind in ("too_long", "too_short", "string_too_long", "string_too_short"):
        most, least = context.get("max_length"), context.get("min_length")
        allowed = f"at most {most}" if most is not None else f"at least {least}"
        unit = "characters" if kind.startswith("string") else "entries"
        return invalid(param, f"{param} has too {kind[-5:].lstrip('_')} a value: {allowed} {unit}")
    else:
        allowed = _ALLOWED.get(kind, error["msg"])
    return invalid(param, f"{param} is {_shown(error['input'])} (allowed: {allowed})")


def _shown(value: Any) -> str:
    return json_type(value) if isinstance(value, (dict, list)) else quoted(value)


def path(location: tuple[int | str, ...]) -> str:
    """A field's place in a body: messages[0].content."""
    named = (part for part in location if isinstance(part, int) or not part.startswith(TAG))
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    return "".join(parts).removeprefix(".")
