"""The worker half: the pool, and the exchange that moves its pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from engine.interfaces.kv_connector import KVConnectorWorker
from engine.process import wire
from engine.types.errors import ConfigError
from engine_connectors.tcp.exchange import Exchange
from engine_connectors.tcp.messages import ExchangeSection, Offer

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext
    from engine.types.kv import KVLayout
    from engine_connectors.tcp.card import TCPOptions

KEY_CHARACTERS = 40


class TCPWorker(KVConnectorWorker):
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._options = cast("TCPOptions", context.options)
        self._start = context.start
        self._rank = context.start.place.rank
        self._decode = wire.decoder(ExchangeSection).decode
        self._exchange: Exchange | None = None
        self._decided: ExchangeSection | None = None
        self._chunks: list[Offer] = []
        self._parts, self._place_of_site = parts_of(self._start.layout)

    def register(self, pool: torch.Tensor) -> None:
        if self._start.data_parallel_size > 1:
            raise ConfigError(
                f"let {self._start.data_parallel_size} engine cores of one server exchange pages with other servers",
                "others reach one core by a server's address",
                "start a server for each core, with a --kv-connector.port of its own, behind `engine route`",
            )
        address = address_of_rank(f"{self._options.host}:{self._options.port}", self._rank)
        self._exchange = self.exchange(pool, address, read_key(self._options.key_file))

    def exchange(self, pool: torch.Tensor, address: str, secret_key: str | None) -> Exchange:
        """This rank's end of all transfers, over the pool, listening at an address."""
        self._pool = pool.numpy()
        timeouts = {"timeout": self._options.timeout, "push_timeout": self._options.push_timeout}
        return Exchange(self._pool, self._rank, address, secret_key=secret_key, parts=self._parts, **timeouts)

    def begin(self, step_id: int, section: bytes | None) -> None:
        self._decided = decided = None if section is None else self._decode(section)
        if decided is None:
            return
        assert self._exchange is not None
        self._exchange.identity = decided.identity
        self._exchange.engine_id = decided.engine_id
        for transfer in decided.withdrawn:
            self._exchange.withdraw(transfer)
        for offer in decided.offers:
            address = address_of_rank(offer.address, self._rank) if offer.address else ""
            offer = replace(offer, address=address)
            if self._start.layout.mark_bytes and not offer.anew:
                self._stage_marks(offer)
            self._exchange.offer(offer)
        for chunk in decided.chunks:
            address = address_of_rank(chunk.address, self._rank) if chunk.address else ""
            if self._exchange.reserve(chunk.transfer, sum(of.pages.size for of in chunk.pages) * self._pool.shape[1]):
                self._chunks.append(replace(chunk, address=address))
        for first, transfer, ranks in decided.unwanted:
            if not first:
                self._exchange.release("", transfer)
            for rank in range(self._rank, ranks, self._start.parallel.world) if first else ():
                self._exchange.release(address_of_rank(first, rank), transfer)

    def load(self, step_id: int) -> None:
        """Pages are written from now on: what others take out of them with this step, they have taken."""
        if self._decided is None:
            return
        assert self._exchange is not None
        for fetch in self._decided.fetches:
            address = address_of_rank(fetch.address, self._rank) if fetch.address else ""
            self._exchange.fetch(replace(fetch, address=address))
        for request_id in self._decided.cancelled:
            self._exchange.cancel(request_id)

    def after_layer(self, site: int) -> None:
        """Copies of what the step has computed of it: the pages may be another request's before all is told."""
        if not self._chunks or site not in self._place_of_site:
            return
        assert self._exchange is not None
        table, part = self._place_of_site[site]
        for chunk in self._chunks:
            for of_table in chunk.pages:
                if of_table.table == table and of_table.pages.size:
                    content = self._pool[of_table.pages, self._parts[table][part]]
                    self._exchange.stage(chunk, table, part, of_table.first, content)

    def _stage_marks(self, offer: Offer) -> None:
        """What is behind the layers, which is there when all is computed. Nothing where no layer was staged."""
        assert self._exchange is not None
        for of_table in offer.pages:
            if (parts := self._parts.get(of_table.table)) and of_table.pages.size:
                content = self._pool[of_table.pages, parts[-1]]
                self._exchange.stage(offer, of_table.table, len(parts) - 1, of_table.first, content)

    def end(self, step_id: int) -> None:
        self._chunks = []

    def news(self) -> bytes | None:
        assert self._exchange is not None
        news = self._exchange.news()
        return None if news is None else wire.encode(news)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def parts_of(layout: KVLayout) -> tuple[dict[int, list[slice]], dict[int, tuple[int, int]]]:
    """The layers' bytes in the pages of each KV table, and behind them, where pages are marked, the rest; and the
    (table, part) of each site. Tables with layers of draft models, of which nobody says when they are computed, go as a
    whole."""
    parts: dict[int, list[slice]] = {}
    places: dict[int, tuple[int, int]] = {}
    whole = {group.table for group in layout.groups if group.model}
    for group in layout.groups:
        if group.table is None or group.table in whole:
            continue
        of_table = parts.setdefault(group.table, [])
        for i, site in enumerate(group.sites):
            places[site] = group.table, len(of_table)
            start = group.offset + i * group.layer_bytes
            of_table.append(slice(start, start + group.layer_bytes))
    for of_table in parts.values() if layout.mark_bytes else ():
        of_table.append(slice(max(part.stop for part in of_table), layout.page_bytes))
    return parts, places


def address_of_rank(first: str, rank: int) -> str:
    """Where a rank listens, by the first one's "host:port"."""
    host, _, port = first.rpartition(":")
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{host}:{int(port) + rank}"


def read_key(path: str | None) -> str | None:
    """The secret key in a file; None where there is none. Raises ConfigError for a file that holds none."""
    if path is None:
        return None
    asked, remedy = (
        f"read the key of the connector in {path!r}",
        "write 40 characters as zmq.curve_keypair() makes them",
    )
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(asked, str(error), remedy) from error
    if len(key) != KEY_CHARACTERS:
        raise ConfigError(asked, f"it holds {len(key)} characters", remedy)
    return key
