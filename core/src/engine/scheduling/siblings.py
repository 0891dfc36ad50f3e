"""Siblings (n > 1): one of them computes the prompt, the others wait for it and find its pages in the cache.

They are queued when the plan that ends the prompt is made, and may enter that very plan: they share its whole blocks
and compute the few tokens after them. Waiting for the next plan, in which the page with these tokens could be copied,
saved as much as the further step cost (the bundled model, n from 4 to 16), so nobody waits.
"""

from __future__ import annotations

from engine.scheduling.request import Request


class Siblings:
    """For each parent the sibling that leads, and those that are held until its prompt is computed."""

    def __init__(self) -> None:
        self._leaders: dict[str, Request] = {}
        self._held: dict[str, dict[str, Request]] = {}

    def __len__(self) -> int:
        """Requests that are held."""
        return sum(len(held) for held in self._held.values())

    def join(self, request: Request) -> bool:
        """True where the request may be queued: it leads, or has no siblings that wait. False: it is held."""
        parent = request.parent
        if parent is None:
            return True
        if parent not in self._leaders:
            self._leaders[parent] = request
            return True
        self._held.setdefault(parent, {})[request.request_id] = request
        return False

    def prompt_done(self, request: Request) -> list[Request]:
        """The request's prompt is in the cache: if it led, the siblings that may be queued now, in their order."""
        parent = request.parent
        if parent is None or self._leaders.get(parent) is not request:
            return []
        del self._leaders[parent]
        return list(self._held.pop(parent, {}).values())

    def ended(self, request: Request) -> list[Request]:
        """The request ended: if it led, the sibling that leads from now on (none or one), to be queued."""
        parent = request.parent
        if parent is None:
            return []
        held = self._held.get(parent, {})
        held.pop(request.request_id, None)
        if not held:
            self._held.pop(parent, None)
        if self._leaders.get(parent) is not request:
            return []
        if not held:
            del self._leaders[parent]
            return []
        leader = held.pop(next(iter(held)))
        if not held:
            del self._held[parent]
        self._leaders[parent] = leader
        return [leader]
