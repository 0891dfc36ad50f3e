"""Point `evictor`: the order in which cached pages are given up. Matching and counting are the KV manager's.

Minor version 1 added `hashes` to `Evictor.on_commit`; 2 the reuse of what is no prefix (`ReusingEvictor`); 3 retention
(`RetainingEvictor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from engine.interfaces.context import CoreContext, WorkerContext
from engine.plugin import Card

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.communicator import Group
    from engine.interfaces.model import Model
    from engine.types.start import CoreStart


class EvictorCard(Card):
    """Describes an evictor. Needs nothing of the device: `unsupported` gets None."""

    reuses: ClassVar[bool] = False
    """Whether its body is a `ReusingEvictor`. Then `bodies` has a half "worker": a `engine.interfaces.step.StepPart`,
    built with a `ReuseContext`, whose listener hears the plans that have `StepPlan.reuse` and does with their tokens
    what the driver is for. Attention is asked for the feature "kv_index"."""

    @classmethod
    def conflicts(cls, start: CoreStart) -> list[str]:
        """The reasons why nothing can be reused in an engine of these settings, a sentence each. Asked by the launcher
        where `reuses` is True, before anything is built; the core itself refuses what its own part cannot do."""
        return []


class Evictor(Protocol):
    """Keeps the order of pages whose content is cached and that nobody holds.

    Pages are int32 numpy arrays. Each method is called at most once a step and KV table. A page that a request
    holds, or that an unfinished step names, is never a candidate: it was not released, or was touched since.
    """

    def __init__(self, context: CoreContext) -> None: ...

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        """These pages now hold cached content.

        Args:
            pages, parents: int32 [m]; parents[i] is the page before pages[i] in its sequence, 0 for none.
            hashes: m of them; hashes[i] names what pages[i] holds: the keys and values of one KV table for these
                tokens after those before them. No two cached pages have the same. What was given up and is computed
                again has the hash that it had, on whichever page: so an evictor can tell what comes back from what is
                new (the ghost lists of 2Q and ARC). One that keeps hashes of pages that it gave up keeps a bounded
                number of them.

        A page that was committed before and is no candidate may be committed anew: what it held was not to be trusted,
        and its holders gave it back without a release that is told here.
        """

    def on_touch(self, pages: np.ndarray) -> None:
        """A request found these committed pages and holds them: no candidates (any more) until they are released."""

    def on_release(self, pages: np.ndarray) -> None:
        """Nobody holds these committed pages any more: they are candidates, the last in the array to go first."""

    def victims(self, n: int, table: int) -> np.ndarray:
        """Up to n candidates to give up, first the one to go first. They are forgotten by this call.

        table: the KV table that wants pages (any table's candidates may be given).
        """

    def __len__(self) -> int:
        """The number of candidates."""

    def reset(self) -> None:
        """Forget everything."""

    def check_integrity(self) -> None:
        """Raise AssertionError where the inner state contradicts itself. For tests and idle moments."""


class Reuse(NamedTuple):
    """Tokens of a request that a cached sequence has too, behind others or at another place.

    Args:
        start, end: their positions in the request: start .. end - 1.
        position: of the first of them in the sequence that was computed.
        hashes: of the blocks that hold them there, in order, as `remember` had them: the first one has that token.
            By these the pages are found, so that nobody gets what is not cached any more; what is not is computed.
    """

    start: int
    end: int
    position: int
    hashes: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class ReuseContext(WorkerContext):
    """For the half in a worker.

    Args:
        model: with its weights.
        ranks: those that share its layers; None where this one has them whole.
    """

    model: Model
    ranks: Group | None


class ReusingEvictor(Evictor, Protocol):
    """Finds cached keys and values for tokens behind a request's cached prefix. Their pages are kept until the last
    step that reads them is done. Nothing of such a request is cached behind its prefix: what it has is approximate.
    """

    def remember(self, root: bytes, tokens: np.ndarray, hashes: Sequence[bytes]) -> None:
        """A sequence's whole blocks are cached. Told when its prompt is computed, and when it ends.

        Args:
            root: sequences with another one share nothing with it (`cache_salt`).
            tokens: int32 [n]; from its start, whole blocks.
            hashes: of these blocks.
        """

    def reuse(self, root: bytes, tokens: np.ndarray, start: int) -> Sequence[Reuse]:
        """What may be reused of a request with these tokens, int32 [n], from `start` on: ascending, none twice."""


class RetainingEvictor(Evictor, Protocol):
    """One that keeps retained pages beyond its own order. Without `retain` an engine refuses requests that ask for it.

    A page is retained while `CoreContext.clock` is before its time. Of the candidates those go first that are not
    retained, then those of a lower priority before those of a higher one, and within each the order is the evictor's
    own. It may keep a candidate longer only while cached pages go on from it. Where `n` victims are asked for and there
    are `n` candidates, it gives them, retained or not. What a page is retained for ends with its content: when it is
    given up, committed anew, or with `reset`.
    """

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        """What holds from now on of these committed pages, held or candidates, in place of what was said before.

        Called when a request with `kv_retention` ends, and when what one had asked for ends early; those before a page
        in its sequence are retained at least as long as it is, by no lower priority.

        Args:
            pages: int32 [n].
            priorities: int32 [n]; at least 0.
            until: float64 [n]; seconds of the clock. 0: not retained; infinite: until it is said otherwise.
        """
