"""What ranks of two engines tell each other, and what the connector's two halves do. No torch.

Whoever is to have pages asks for them (`Want`), block by block of a KV table; whoever has them sends them (`Data`), or
says which it lacks (`Lacking`); when all is there, or wanted no more, it hears `Done`. Where pages are pushed, it says
what there is first (`Ready`), and is asked as above, once there is room; so it does where it was told before that
somebody waits (`Follow`). What a step has computed of one layer can be had at once, as a part of pages; whether that
stands, and what else there is, is said when the prompt is computed. So a frame that is lost, late, doubled, out of
order or damaged is seen by whom it concerns: it fills exactly the blocks that it names, of the question that it names,
and is looked at before it is written anywhere.
"""

from __future__ import annotations

import msgspec
import numpy as np

Blocks = list[tuple[int, int, int]]
"""(table, first block, count) each."""
WHOLE = -1
"""All layers."""


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Send these blocks.

    Args:
        transfer: its name, unique among those of the engine that has the pages.
        question: a number that the answers carry.
        identity: of both engines, see `CoreContext.identity`.
        part: which layer's, see `Exchange`; WHOLE: whole pages.
    """

    transfer: str
    question: int
    identity: bytes
    blocks: Blocks
    part: int = WHOLE


class Data(msgspec.Struct, frozen=True, tag="data"):
    """Pages; the parts that follow hold them, one after the other in the order of `blocks`.

    Args:
        number: of the frame within the answer, from 0.
        checksum: XXH3-64 of all parts.
    """

    transfer: str
    question: int
    number: int
    blocks: Blocks
    checksum: int
    part: int = WHOLE


class Lacking(msgspec.Struct, frozen=True, tag="lacking"):
    """These blocks are not there, or not any more."""

    transfer: str
    question: int
    blocks: Blocks
    part: int = WHOLE


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """These blocks can be asked for.

    Args:
        last: there will be no more.
        part: of each, which layer's.
        anew: what was told before does not stand: all is to be asked for again.
    """

    transfer: str
    identity: bytes
    blocks: Blocks
    last: bool
    part: int = WHOLE
    anew: bool = False


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Tell me what of this transfer is there, now and whenever there is more."""

    transfer: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Nothing of this transfer is wanted any more."""

    transfer: str


Message = Want | Data | Lacking | Ready | Follow | Done


# -- between the halves ------------------------------------------------------------------------------------------------
class TablePages(msgspec.Struct, frozen=True):
    """Pages of one table: pages[i], int32, holds block first + i."""

    table: int
    first: int
    pages: np.ndarray


class Offer(msgspec.Struct, frozen=True):
    """Pages that another engine may ask for.

    Args:
        address: whom to tell, where they are pushed.
        last: all are there.
        anew: what a step computed of them before does not stand.
    """

    transfer: str
    pages: list[TablePages]
    address: str = ""
    last: bool = True
    anew: bool = False


class Fetch(msgspec.Struct, frozen=True):
    """Pages that are to be filled. `address`: whom to ask; "": it will tell. `follows`: they are being computed."""

    request_id: str
    transfer: str
    pages: list[TablePages]
    address: str = ""
    follows: bool = False


class ExchangeSection(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the scheduler half has decided.

    Args:
        chunks: pages that this step computes, for others.
        withdrawn: transfers whose pages nobody may read any more.
        cancelled: requests whose fetch is to end.
        unwanted: (address, transfer, ranks there): whom to tell that nothing is fetched; "": who pushes it.
        identity: of the engine.
        engine_id: what the names of its transfers begin with.
    """

    chunks: list[Offer] = []
    offers: list[Offer] = []
    fetches: list[Fetch] = []
    withdrawn: list[str] = []
    cancelled: list[str] = []
    unwanted: list[tuple[str, str, int]] = []
    identity: bytes = b""
    engine_id: str = ""


class ExchangeNews(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rank has to tell.

    Args:
        rank: which.
        fetched: requests whose fetch has ended.
        failed: pages that were not filled.
        sent: transfers that are wanted no more.
        counts: since it last told: see `engine_connectors.tcp.exchange.Exchange`.
    """

    rank: int
    fetched: list[str] = []
    failed: list[int] = []
    sent: list[str] = []
    counts: dict[str, int] = {}
