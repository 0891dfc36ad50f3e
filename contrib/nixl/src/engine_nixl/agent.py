"""The library's agent over one rank's pool: what others need to read its pages, and reads of theirs."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.types.errors import ConfigError
from engine_nixl.card import PACKAGES

if TYPE_CHECKING:
    import torch

    from engine_nixl.card import NixlOptions

log = logging.getLogger("engine.connectors.nixl")  # records must not keep errors: their frames keep the library's agent

DONE, UNDER_WAY, FAILED = "DONE", "PROC", "ERR"
"""States of a read, in the library's words."""
DRAIN_SECONDS = 5.0
"""How long an end waits for reads under way: the library may still write what they bring."""


class Where(msgspec.Struct, frozen=True):
    """Pages of a pool that others may read.

    Args:
        metadata: of the agent, as the library hands it out: how it is reached, and the right to read its pool.
        address: of the pool, on `device` ("DRAM" or "VRAM") number `index`.
        page_bytes: of one page.
        pages: which.
    """

    metadata: bytes
    address: int
    device: str
    index: int
    page_bytes: int
    pages: list[int]


class Agent:
    """See the module. After `__init__` one thread calls it, and `close` when that has ended.

    Raises ConfigError where the library cannot be loaded, lacks the backend, or cannot register the pool.

    Args:
        pool: uint8 [num_pages, page_bytes], in host memory or a GPU's.
    """

    def __init__(self, pool: torch.Tensor, options: NixlOptions) -> None:
        asked = f"let other engines read the KV pool by NIXL's backend {options.backend}"
        on_host = pool.device.type == "cpu"
        self._page_bytes = pool.shape[1]
        self._address = pool.data_ptr()
        self._device = "DRAM" if on_host else "VRAM"
        self._index = 0 if on_host else (pool.device.index or 0)
        self._others: dict[bytes, str] = {}  # agents by their metadata
        self._reads: set[Any] = set()
        try:
            library = _library()
        except ImportError as error:
            raise ConfigError(asked, f"the library does not load: {error}", "install what it names") from error
        config = library.nixl_agent_config(backends=[options.backend], num_threads=options.backend_threads)
        try:
            self._agent = library.nixl_agent(uuid.uuid4().hex, config)
            if options.backend not in self._agent.backends:
                found = f"this build has {', '.join(self._agent.plugin_list)}"
                raise ConfigError(asked, found, "name one of these: --kv-connector.backend NAME")
            region = [(self._address, pool.numel(), self._index, "")]
            self._region = self._agent.register_memory(region, self._device)
            self._metadata = self._agent.get_agent_metadata()
        except ConfigError:
            raise
        except Exception as error:  # the library's own classes, which have no common one
            remedy = "see its log (NIXL_LOG_LEVEL=DEBUG), or use --kv-connector tcp"
            raise ConfigError(asked, f"{type(error).__name__}: {error}", remedy) from error

    def where(self, pages: Sequence[int]) -> Where:
        """What another agent needs to read these."""
        return Where(self._metadata, self._address, self._device, self._index, self._page_bytes, list(pages))

    def read(self, there: Where, pages: Sequence[int]) -> Any:
        """Begin to fill these pages with those; a handle for `state`. Raises ConnectionError where nobody is there."""
        here = self.where(pages)
        handle = None
        try:
            if (name := self._others.get(there.metadata)) is None:
                name = self._others[there.metadata] = self._agent.add_remote_agent(there.metadata)
            local, remote = self._descriptors(here), self._descriptors(there)
            handle = self._agent.initialize_xfer("READ", local, remote, name)
            self._reads.add(handle)
            self._agent.transfer(handle)
        except Exception as error:
            if handle is not None:
                self._let_go(handle)
            self._forget(there.metadata)
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        return handle

    def state(self, handle: Any) -> str:
        """DONE, UNDER_WAY, or FAILED. A read that has ended writes nothing any more, and its handle is let go."""
        try:
            state = str(self._agent.check_xfer_state(handle))
        except Exception as error:
            log.warning("a read has failed: %s", str(error))
            state = FAILED
        if state != UNDER_WAY:
            self._let_go(handle)
        return state

    def close(self) -> None:
        """Wait for reads under way, and take the pool back. Idempotent."""
        until = time.monotonic() + DRAIN_SECONDS
        while self._reads and time.monotonic() < until:
            for handle in list(self._reads):
                self.state(handle)
            time.sleep(0.001)
        if self._reads:
            log.warning("%d reads have not ended in %g s", len(self._reads), DRAIN_SECONDS)
        for handle in list(self._reads):
            self._let_go(handle)
        if (agent := self.__dict__.pop("_agent", None)) is None:
            return
        for metadata in list(self._others):
            self._forget(metadata, agent)
        try:
            agent.deregister_memory(self._region)
        except Exception as error:
            log.warning("the pool stays registered: %s", str(error))

    def _descriptors(self, one: Where) -> Any:
        """One for each page: the library joins those that lie in a row."""
        pages = np.array(one.pages, np.uint64)
        found = np.empty((len(pages), 3), np.uint64)
        found[:, 0] = np.uint64(one.address) + pages * np.uint64(one.page_bytes)
        found[:, 1] = one.page_bytes
        found[:, 2] = one.index
        return self._agent.get_xfer_descs(found, one.device)

    def _let_go(self, handle: Any) -> None:
        self._reads.discard(handle)
        try:
            handle.release()
        except Exception as error:
            log.warning("a read cannot be let go: %s", str(error))

    def _forget(self, metadata: bytes, agent: Any = None) -> None:
        """An agent that has gone. One of the same engine is another one."""
        if (name := self._others.pop(metadata, None)) is not None:
            try:
                (agent or self._agent).remove_remote_agent(name)
            except Exception as error:
                log.debug("agent %r had gone: %s", name, str(error))


def _library() -> Any:
    """The build for this torch, where there are several. Raises ImportError."""
    import torch

    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # or each agent tells of its start
    wanted = f"nixl_cu{torch.version.cuda.partition('.')[0]}" if torch.version.cuda else ""
    there = [name for name in PACKAGES if find_spec(name)]
    return import_module(f"{wanted if wanted in there else there[0]}._api")
