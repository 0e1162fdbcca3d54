"""Makes MathML of LaTeX in a process of its own: a script of latex2mathml and the standard library.

A model may write anything: this process limits the time and the memory that reading it takes. Its
argument and its frames are those of predict/text/template_worker.py; a request is {"latex",
"display"}, a reply {"tree"} or {"error", "message"}. A tree is a list: name, attributes, and then
texts and trees.
"""

from __future__ import annotations

import html
import json
import re
import resource
import signal
import struct
import sys
from typing import Any
from xml.etree import ElementTree

LENGTH = struct.Struct("<I")
MAX_NODES, MAX_DEPTH = 2000, 48
# Of MathML Core, and what it is made with. No links, no styles, no events, no HTML.
_NAMES = """
math mrow mi mn mo mtext mspace msup msub msubsup mfrac msqrt mroot munder mover munderover mtable
mtr mtd mstyle mpadded mphantom mmultiscripts mprescripts none
"""
_ATTRIBUTES = """
display displaystyle scriptlevel stretchy fence form lspace rspace accent accentunder columnalign
rowalign columnlines rowlines mathvariant linethickness minsize maxsize movablelimits largeop
symmetric separator width height depth voffset
"""
NAMES, ATTRIBUTES = frozenset(_NAMES.split()), frozenset(_ATTRIBUTES.split())
VALUE = re.compile(r"[\w .%+-]{1,64}", re.ASCII)


def main() -> int:
    """Answers requests until stdin ends, or until memory does."""
    settings = json.loads(sys.argv[1])
    sys.path += settings["paths"]
    from latex2mathml.converter import convert_to_element

    limits = {
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(2 * LENGTH.size):
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        going_on = True
        _, (size,) = LENGTH.iter_unpack(head)
        request = json.loads(source.read(size))
        try:
            display = "block" if request["display"] else "inline"
            reply: dict[str, Any] = {
                "tree": tree(convert_to_element(request["latex"], display=display))
            }
        except MemoryError:
            reply, going_on = {"error": "memory"}, False
        except Exception as error:  # whatever the text is no formula for
            said = f"{type(error).__name__}: {error}"[: settings["max_message"]]
            reply = {"error": "refused", "message": said}
        signal.setitimer(signal.ITIMER_PROF, 0)
        body = json.dumps(reply).encode("ascii")
        sink.write(LENGTH.pack(len(body)) + body)
        sink.flush()
        if not going_on:
            return 1
    return 0


def tree(root: ElementTree.Element) -> list[Any]:
    """An element as lists, of names and attributes that are allowed. Raises ValueError."""
    count = 0

    def made(element: ElementTree.Element, depth: int) -> list[Any]:
        nonlocal count
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_NODES} elements, or {MAX_DEPTH} within one another")
        name = element.tag.rpartition("}")[2]
        if name not in NAMES:
            raise ValueError(f"the element {name[:40]} is not drawn")
        attributes = {
            key: value
            for key, value in element.attrib.items()
            if key in ATTRIBUTES and VALUE.fullmatch(value)
        }
        children: list[Any] = [made(each, depth + 1) for each in element]
        if element.text:
            children.insert(0, html.unescape(element.text))  # as in &#x0002B;
        return [name, attributes, *children]

    return made(root, 0)


if __name__ == "__main__":
    sys.exit(main())
