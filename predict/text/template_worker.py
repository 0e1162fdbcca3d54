"""Renders chat templates in a process of its own: a script of jinja2 and the standard library.

Templates come with downloads. Jinja's sandbox keeps them from Python's objects; this process limits
their time and memory, may write no file, and has no secrets. Its one argument is JSON:
{"paths", "memory_bytes", "cpu_seconds", "max_message"}. A request on stdin is two
numbers of 4 bytes, little-endian (the characters that may be printed, and a length), then JSON of
that length; a reply on stdout is a length and JSON. See predict.text.template_process.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
NUM_COMPILED = 32  # templates kept, as PaddleNLP's have several parts


def main() -> int:
    """Answers requests until stdin ends, or until memory does."""
    settings = json.loads(sys.argv[1])
    sys.path += settings["paths"]
    compiled = functools.lru_cache(NUM_COMPILED)(_compile)
    environments = [_environment(keep) for keep in (False, True)]
    _limit(settings["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the parent does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(2 * LENGTH.size):
        # The kernel ends the process when its time is over, whatever C function it is in.
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        going_on = True
        try:
            (most,), (size,) = LENGTH.iter_unpack(head)
            request = json.loads(source.read(size))
            environment = environments[request["keep_trailing_newline"]]
            template_of = functools.partial(compiled, environment)
            reply = _render(request["parts"], template_of, most, settings["max_message"])
        except MemoryError:
            reply, going_on = {"error": "memory"}, False
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sink, reply)
        if not going_on:
            return 1
    return 0


def _send(sink: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode("ascii")
    sink.write(LENGTH.pack(len(body)) + body)
    sink.flush()


def _limit(memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


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


if __name__ == "__main__":
    sys.exit(main())
