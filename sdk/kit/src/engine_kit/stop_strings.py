"""Stop strings, found as the text comes in, however it is cut into tokens (entry-point group `engine_parts`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found.

    Args:
        stop: the string.
        text: what of the text so far has not been given out and stands before the string.
    """

    stop: str
    text: str


class StopStrings:
    """Some stop strings, compiled: an Aho-Corasick automaton (Aho, Corasick: "Efficient string matching", 1975).

    Its state is the longest end of the text that begins some stop string, which is also what must be held back. The
    work is constant for each character, whatever the number and the length of the strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def scanner(self) -> StopScanner:
        """Looks for them in one text."""
        return StopScanner(self)

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self.children[node].get(character)
            if child is None:
                child = len(self.children)
                self.children[node][character] = child
                self.children.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.match.append(None)
            node = child
        self.match[node] = stop

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                self.fail[child] = self.step(self.fail[node], character)
                # The longest of the strings that end here: a node's own is longer than those of its fail link.
                if self.match[child] is None:
                    self.match[child] = self.match[self.fail[child]]
                queue.append(child)

    def step(self, node: int, character: str) -> int:
        """The state after one more character."""
        while True:
            child = self.children[node].get(character)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fail[node]


class StopScanner:
    """Looks for stop strings in one text.

    The string that is complete first ends the text; of those that are complete at the same character, the longest.
    So the answer does not depend on how the text is cut.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str | StopMatch:
        """Take more text.

        Args:
            armed: False while `min_tokens` is not reached: strings that are complete now do not count.

        Returns:
            The text that can be given out (what may be the beginning of a stop string is held back), or a match.
        """
        stops, node = self._stops, self._node
        step, match = stops.step, stops.match
        for place, character in enumerate(text):
            node = step(node, character)
            if armed and (stop := match[node]) is not None:
                before = self._held + text[: place + 1]
                return StopMatch(stop, before[: len(before) - len(stop)])
        self._node = node
        window = self._held + text
        shown = len(window) - stops.depth[node]
        self._held = window[shown:]
        return window[:shown]

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held = self._held
        self._held = ""
        self._node = 0
        return held
