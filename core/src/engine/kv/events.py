"""Writes down what happens to the prefix cache, where somebody listens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.types.kv import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class KVEventLog:
    """Events since they were last taken.

    Args:
        num_pages: of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._events: list[KVEvent] = []
        self._removed: dict[int, list[bytes]] = {}
        self._told: list[tuple[int, bytes] | None] = [None] * num_pages  # (group, hash) of each page that was told

    def stored(
        self,
        group: int,
        blocks: Sequence[tuple[int, bytes]],
        parent: bytes | None,
        tokens: np.ndarray,
        block_size: int,
        lora_id: str | None,
    ) -> None:
        """Blocks, (page, hash) each, were committed one after another; tokens: int32 [len(blocks) * block_size]."""
        self._flush_removed()
        for page, hashed in blocks:
            self._told[page] = (group, hashed)
        self._events.append(
            BlockStored(
                block_hashes=[hashed for _, hashed in blocks],
                parent_block_hash=parent,
                token_ids=tokens.tolist(),
                block_size=block_size,
                group=group,
                lora_id=lora_id,
            )
        )

    def removed(self, pages: np.ndarray) -> None:
        """The content of these pages was given up."""
        for page in pages.tolist():
            told = self._told[page]
            if told is not None:
                self._told[page] = None
                self._removed.setdefault(told[0], []).append(told[1])

    def cleared(self) -> None:
        """Everything was."""
        self._flush_removed()
        self._told = [None] * len(self._told)
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        removed, self._removed = self._removed, {}
        self._events += [BlockRemoved(block_hashes=hashes, group=group) for group, hashes in removed.items()]
