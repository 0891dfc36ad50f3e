"""Results on their way to the host."""

from __future__ import annotations

import torch


class CudaFetch:
    """Copies into pinned memory, queued on a stream of their own. See `engine.interfaces.platform.Fetch`.

    Args:
        hosts: where they go.
        sources: what is copied: kept until it is done, so that its memory is nobody else's meanwhile.
        event: behind the copies.
    """

    __slots__ = ("_event", "_hosts", "_sources")

    def __init__(
        self, hosts: tuple[torch.Tensor, ...], sources: tuple[torch.Tensor, ...], event: torch.cuda.Event
    ) -> None:
        self._hosts = hosts
        self._sources = sources
        self._event: torch.cuda.Event | None = event

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            self._sources = ()
        return self._hosts
