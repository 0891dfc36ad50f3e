"""Two engines around a connector that takes pages from one to the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch

from engine.interfaces.kv_connector import LATER, Found, Pages
from engine_sdk.conformance.kv_connector.store import SECONDS, TOKENS, Asked, Store

T = TypeVar("T")

Trouble = Literal["lost", "damaged", "doubled", "late", "reordered"]
TROUBLES: tuple[Trouble, ...] = ("lost", "damaged", "doubled", "late", "reordered")
LATE = 4
"""Frames that pass one that is late."""


class Disturbance(Generic[T]):
    """What becomes of the frames of pages that an engine sends: every third is in trouble, the first as well.

    Args:
        trouble: which.
        damage: another frame of the same form with some other byte in its pages.
    """

    def __init__(self, trouble: Trouble, damage: Callable[[T], T]) -> None:
        self._trouble = trouble
        self._damage = damage
        self._number = 0
        self._kept: list[tuple[int, T]] = []

    def __call__(self, frame: T) -> list[T]:
        """What is sent in its place, in order."""
        number, self._number = self._number, self._number + 1
        due = [kept for until, kept in self._kept if until <= number]
        self._kept = [one for one in self._kept if one[0] > number]
        if number % 3 or self._trouble == "lost":
            return [*([frame] if number % 3 else []), *due]
        if self._trouble == "damaged":
            return [self._damage(frame)]
        if self._trouble == "doubled":
            return [frame, frame]
        self._kept.append((number + (LATE if self._trouble == "late" else 1), frame))
        return due


class Pair:
    """See the module.

    Args:
        holder: the engine that computes prompts, and holds their pages for the other.
        taker: the engine that goes on.
        receiver: the taker's options.
    """

    def __init__(self, holder: Store, taker: Store, receiver: Mapping[str, Any]) -> None:
        self.holder = holder
        self.taker = taker
        self.receiver = receiver
        self.living = [holder, taker]

    def until(self, true: Callable[[], bool], otherwise: str) -> None:
        """Step both until something is true."""
        deadline = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < deadline, otherwise
            for engine in self.living:
                engine.step()
            time.sleep(0.001)

    def until_sent(self, request: Asked) -> None:
        """Until nobody wants the pages that are held for this request any more, as it is told once."""
        name = request.request_id
        self.until(lambda: name in self.holder.sent, f"the pages held for {name!r} are never given back")
        assert self.holder.sent.count(name) == 1, "the end of a hold is told twice"

    def until_loaded(self, request: Asked) -> None:
        """Until its load has ended on all ranks, as it is told once."""
        name = request.request_id
        self.until(lambda: name in self.taker.loaded, f"the end of the load of {name!r} is never told")
        assert self.taker.loaded.count(name) == 1, "the end of a load is told twice"

    def computes(self, request: Asked, pages: Sequence[int], first: int = 0) -> list[torch.Tensor]:
        """A step of the holder computes blocks from `first` on into these pages. Returns what they hold."""
        of_table = [Pages(0, first, np.array(pages, np.int32))]
        end = (first + len(pages)) * TOKENS
        if self.holder.layerwise:
            self.holder.core.allocated(request, of_table, first * TOKENS, min(end, request.num_prompt_tokens))
        self.holder.step(computes=pages)
        if self.holder.mark_bytes:
            self.holder.mark(pages)
        whole = min(len(pages), request.blocks - first)
        of_table = [Pages(0, first, np.array(pages[:whole], np.int32))]
        self.holder.core.computed(request, of_table, (first + whole) * TOKENS)
        return self.holder.content(pages)

    def finishes(self, request: Asked, pages: Sequence[int]) -> dict[str, Any] | None:
        """The request has ended well, and the holder keeps its pages. Returns what is told to the taker."""
        held = self.holder.core.finished(request, [Pages(0, 0, np.array(pages, np.int32))])
        assert held.seconds > 0, "the pages of a request that another engine is to go on with are not held"
        self.holder.step()
        return held.params

    def prefilled(self, request: Asked, pages: Sequence[int]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The holder computes a prompt, and a part of its last block, and ends. What pages hold, and what is told."""
        kept = self.computes(request, pages)
        params = self.finishes(request, pages)
        assert params, "nothing is told to the engine that goes on"
        return kept, params

    def finds(self, request: Asked, num_local: int = 0) -> Found | None:
        """What the taker hears of a request."""
        deadline = time.monotonic() + SECONDS
        while (found := self.taker.core.lookup(request, num_local)) == LATER:
            assert time.monotonic() < deadline, "lookup says LATER for ever"
            for engine in self.living:
                engine.step()
            time.sleep(0.001)
        return found

    def makes_room(self, request: Asked, pages: Sequence[int], first: int = 0) -> None:
        """The taker's pages for blocks from `first` on of a request that it has found: they arrive by themselves."""
        found = self.finds(request, first * TOKENS)
        assert found is not None, "nothing is found of a prompt that another engine computes"
        assert found.num_tokens == len(pages) * TOKENS, f"{found.num_tokens} tokens found of {len(pages)} blocks"
        assert found.asynchronous, "what another engine has is not there within a step"
        places = [Pages(0, first, np.array(pages, np.int32))]
        self.taker.core.allocated(request, places, first * TOKENS, (first + len(pages)) * TOKENS)

    def compare(self, pages: Sequence[int], kept: Sequence[torch.Tensor], first: int = 0) -> None:
        """The taker's pages, but for those that are told as failed, hold what the holder's did."""
        for rank, there in enumerate(self.taker.content(pages)):
            for place, page in enumerate(pages):
                right = page in self.taker.failed or torch.equal(there[place], kept[rank][first + place])
                assert right, f"page {page} of rank {rank} holds other bytes than were computed"
