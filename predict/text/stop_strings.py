"""Finds the first of many strings in a text that comes in pieces: one look per character.

Aho and Corasick 1975: a tree of all strings, whose nodes link to the longest proper suffix of their
path in the tree. The depth of the node at the end of a text is the number of characters that may
yet become a string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

ROOT = 0


class Match(NamedTuple):
    """Where a string stands in a text, in characters."""

    begin: int
    end: int


class StopStrings:
    """A set of strings, none of them empty. Immutable: requests may share one."""

    def __init__(self, strings: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matches = [0]  # characters of the longest string that the node's path ends with
        for string in strings:
            node = ROOT
            for character in string:
                found = self._next[node].get(character)
                if found is None:
                    found = self._next[node][character] = len(self._next)
                    self._next.append({})
                    self._depths.append(self._depths[node] + 1)
                    self._matches.append(0)
                node = found
            self._matches[node] = len(string)
        self._shorter = self._link()

    def _link(self) -> list[int]:
        """Per node that of the longest proper suffix of its path which is a path too."""
        shorter = [ROOT] * len(self._next)
        waiting = deque(self._next[ROOT].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                link = shorter[node]
                while link and character not in self._next[link]:
                    link = shorter[link]
                shorter[child] = self._next[link].get(character, ROOT)
                self._matches[child] = self._matches[child] or self._matches[shorter[child]]
                waiting.append(child)
        return shorter

    def scan(self, node: int, text: str, first: int = 0) -> tuple[int, Match | None]:
        """Goes on from `node` with `text`, to its end or to the first match.

        The match that ends first, the longest of those, among the ones that end behind the first
        `first` characters of `text`. Its begin is negative where it lies in earlier text.
        """
        for index, character in enumerate(text, 1):
            while node and character not in self._next[node]:
                node = self._shorter[node]
            node = self._next[node].get(character, ROOT)
            length = self._matches[node]
            if length and index > first:
                return node, Match(index - length, index)
        return node, None

    def depth(self, node: int) -> int:
        """Characters at the end of the text that may be the beginning of a string."""
        return self._depths[node]


@lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """StopStrings of `strings`; one for all requests that have the same."""
    return StopStrings(strings)
