"""Renders chat templates, in the process of predict.text.template_process.

Templates come with downloads. Jinja's sandbox keeps them from Python's objects; the process limits
their time and memory, may write no file, and has no secrets. A request is {"parts",
"keep_trailing_newline", "most"}, the last one the characters that may be printed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

NUM_COMPILED = 32  # templates kept, as PaddleNLP's have several parts


def answerer(settings: dict[str, Any]) -> Callable[[dict[str, Any], bytes], Any]:
    """See predict.system.guarded_worker."""
    compiled = functools.lru_cache(NUM_COMPILED)(_compile)
    environments = [_environment(keep) for keep in (False, True)]

    def answer(request: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        environment = environments[request["keep_trailing_newline"]]
        template_of = functools.partial(compiled, environment)
        most, max_message = request["most"], settings["max_message"]
        return _render(request["parts"], template_of, most, max_message), b""

    return answer


def _compile(environment: Any, source: str) -> Any:
    return environment.from_string(source)


def _render(
    parts: list[dict[str, Any]], template_of: Any, max_output: int, max_message: int
) -> dict[str, Any]:
    """{"text": of all parts}, or {"error": kind, "message", "part": its index, "line"}."""
    import jinja2

    pieces: list[str] = []
    size = 0
    for index, part in enumerate(parts):
        where = {"part": index}
        try:
            template = template_of(part["source"])
            for piece in template.generate(**part["values"]):
                size += len(piece)
                if size > max_output:
                    return {"error": "output", **where}
                pieces.append(piece)
        except jinja2.exceptions.TemplateSyntaxError as error:
            return {"error": "syntax", "message": error.message, "line": error.lineno, **where}
        except jinja2.exceptions.TemplateError as error:
            said = str(error.message or type(error).__name__)
            return {"error": "refused", "message": said[:max_message], **where}
        except MemoryError:
            raise
        except Exception as error:  # whatever a template's own expressions raise
            said = f"{type(error).__name__}: {error}"
            return {"error": "failed", "message": said[:max_message], **where}
    return {"text": "".join(pieces)}


def _environment(keep_trailing_newline: bool) -> Any:
    """A jinja environment that keeps templates, which come with downloads, from the process.

    The settings and the few extra names are those that Hugging Face's templates are written for.
    """
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message: str) -> str:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML, which a prompt must not have
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's text for training; here it only passes it on."""

        tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=keep_trailing_newline,
        extensions=[jinja2.ext.loopcontrols, Generation],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
