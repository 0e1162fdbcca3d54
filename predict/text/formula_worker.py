"""Makes MathML of LaTeX, in the process of predict.text.formulas.

A model may write anything: the process limits the time and the memory that reading it takes. A
request is {"latex", "display"}, a reply {"tree"} or {"error", "message"}. A tree is a list: name,
attributes, and then texts and trees.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

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


def answerer(settings: dict[str, Any]) -> Callable[[dict[str, Any], bytes], Any]:
    """See predict.system.guarded_worker."""
    from latex2mathml.converter import convert_to_element

    def answer(request: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        display = "block" if request["display"] else "inline"
        try:
            return {"tree": tree(convert_to_element(request["latex"], display=display))}, b""
        except MemoryError:
            raise
        except Exception as error:  # whatever the text is no formula for
            said = f"{type(error).__name__}: {error}"[: settings["max_message"]]
            return {"error": "refused", "message": said}, b""

    return answer


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
