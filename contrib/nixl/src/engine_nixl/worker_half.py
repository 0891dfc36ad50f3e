"""The worker half of `nixl`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine_connectors.tcp.worker_half import TCPWorker
from engine_nixl.agent import Agent
from engine_nixl.reads import NixlExchange

if TYPE_CHECKING:
    import torch

    from engine_connectors.tcp.messages import Offer
    from engine_nixl.card import NixlOptions


class NixlWorker(TCPWorker):
    """Says what `tcp` says, and lets the library move the pages."""

    def exchange(self, pool: torch.Tensor, address: str, secret_key: str | None) -> NixlExchange:
        """Registers the pool first."""
        agent = Agent(pool, cast("NixlOptions", self._options))
        timeouts = {"timeout": self._options.timeout, "push_timeout": self._options.push_timeout}
        try:
            return NixlExchange(agent, pool, self._rank, address, secret_key=secret_key, **timeouts)
        except BaseException:
            agent.close()
            raise

    def _stage_marks(self, offer: Offer) -> None:
        """None go ahead: they are read with their pages."""
