"""Checks of KV pages (`--kv-canary`), on each rank: marks are written and read. See `engine_kit.kv_canary`."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from engine.interfaces.kv_connector import KVConnectorWorker
from engine.process import wire
from engine.types.kv import MARK_BYTES
from engine_kit.kv_canary import CanaryNews, CanarySection, PageList

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

logger = logging.getLogger(__name__)

_MARK = struct.Struct("<QQ8sIHH")
assert _MARK.size == MARK_BYTES
_AT_ONCE = 64
"""Pages that are brought to the host together, where the pool is a device's."""
_LOGGED = 20
"""Mismatches that are told one by one; then they are counted alone."""


class Mark(NamedTuple):
    """What stands at a page's end.

    Args:
        what: a hash of the engine's identity, the rank, the table and the block's key.
        checksum: XXH3-64 of the page's other bytes.
        key: the key's first bytes, for whoever reads the log, as the others.
        number: of the block in its request.
        table, rank: whose the page is.
    """

    what: int
    checksum: int
    key: bytes
    number: int
    table: int
    rank: int

    def __str__(self) -> str:
        return f"block {self.number} ({self.key.hex()}) of table {self.table}, rank {self.rank}"


class CanaryWorker(KVConnectorWorker):
    """See the module. A mode for finding faults: it waits for the device."""

    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.start.place.rank
        self._decode = wire.decoder(CanarySection).decode
        self._section: CanarySection | None = None
        self._failed: list[int] = []
        self._counts: Counter[str] = Counter()
        self._num_logged = 0

    def register(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def begin(self, step_id: int, section: bytes | None) -> None:
        """Before other connectors read pages, and before anything is computed."""
        self._section = None if section is None or not self._pool.shape[1] else self._decode(section)
        if self._section is not None:
            self._stamp(self._section)
            self._check(step_id, self._section.identity, self._section.left)

    def end(self, step_id: int) -> None:
        """All is loaded, and nobody may have written to whole blocks."""
        section, self._section = self._section, None
        if section is not None:
            self._check(step_id, section.identity, section.held)
            self._check_copies(step_id, section)

    def news(self) -> bytes | None:
        if not self._failed and not self._counts:
            return None
        told = CanaryNews(failed=np.array(self._failed, np.int32), counts=dict(self._counts))
        self._failed = []
        self._counts.clear()
        return wire.encode(told)

    def _stamp(self, section: CanarySection) -> None:
        marks = [_MARK.pack(*mark) for _, mark, _, _ in self._expected(section.identity, section.stamp)]
        if marks:
            data = torch.frombuffer(bytearray(b"".join(marks)), dtype=torch.uint8).view(-1, MARK_BYTES)
            self._pool[self._places(section.stamp.pages), -MARK_BYTES:] = data.to(self._pool.device)
            self._counts["stamped"] += len(marks)

    def _places(self, pages: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._pool.device)

    def _check(self, step_id: int, identity: bytes, listed: PageList) -> None:
        for page, expected, found, why in self._expected(identity, listed):
            self._counts["checked"] += 1
            if found != expected:
                self._mismatch(step_id, page, why, expected, found)

    def _mismatch(self, step_id: int, page: int, why: str, expected: Mark, found: Mark) -> None:
        self._failed.append(page)
        self._counts["mismatches"] += 1
        self._num_logged += 1
        if self._num_logged <= _LOGGED:
            same = found.what == expected.what
            logger.error(
                "KV page %d (%s, step %d) does not hold what it should: expected %s, found %s",
                page,
                why,
                step_id,
                expected,
                "its mark with other bytes" if same else found,
            )

    def _check_copies(self, step_id: int, section: CanarySection) -> None:
        """A copy has its source's mark. Of one that has not, the source is copied no more."""
        sources, copies = section.source.tolist(), section.destination.tolist()
        marks = zip(self._marks(section.source), self._marks(section.destination), strict=True)
        for source, copy, (of_source, of_copy) in zip(sources, copies, marks, strict=True):
            self._counts["checked"] += 1
            if of_source != of_copy:
                self._mismatch(step_id, copy, "copied", of_source, of_copy)
                self._failed.append(source)

    def _marks(self, pages: np.ndarray) -> list[Mark]:
        rows = self._pool[self._places(pages), -MARK_BYTES:].cpu().numpy()
        return [Mark(*_MARK.unpack(row.tobytes())) for row in rows]

    def _expected(self, identity: bytes, listed: PageList) -> Iterator[tuple[int, Mark, Mark, str]]:
        """(page, the mark that it should have, with the checksum of what is there; the mark that it has; why)."""
        pages = listed.pages
        facts = zip(listed.table.tolist(), listed.number.tolist(), listed.keys, listed.why, strict=True)
        for first in range(0, pages.size, _AT_ONCE):
            some = pages[first : first + _AT_ONCE]
            rows = self._pool[self._places(some)].cpu().numpy()
            for page, row in zip(some.tolist(), rows, strict=True):
                table, number, key, why = next(facts)
                place = b"%d %d %d " % (self._rank, table, len(identity))
                what = xxh3_64_intdigest(place + identity + key)
                checksum = xxh3_64_intdigest(row[:-MARK_BYTES].data)
                expected = Mark(what, checksum, key[:8].ljust(8, b"\0"), number, table, self._rank)
                yield page, expected, Mark(*_MARK.unpack(row[-MARK_BYTES:].tobytes())), why
