"""A communicator of a device with a queue, for scenarios that give and take the processor's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.interfaces.communicator import Collective, Communicator


class OnDevice:
    """Tensors go to the device with their strides, and come back when the work is done. Implements `Communicator`."""

    queued = True
    """A call returns before its work is done: a rank that has gone may be the error of a later one."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device

    def accepts(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        """The communicator's own answer."""
        return self._communicator.accepts(op, shape, dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """There and back, as all below."""
        return self._communicator.all_reduce(self._there(x)).cpu()

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return self._back(self._communicator.all_gather(self._there(x), dim, sizes))

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return self._communicator.reduce_scatter(self._there(x), dim, sizes).cpu()

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        return self._communicator.all_to_all(self._there(x), send_sizes, recv_sizes).cpu()

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        there = self._there(x)
        self._communicator.broadcast(there, root)
        x.copy_(there)

    def send(self, x: torch.Tensor, to: int) -> None:
        self._communicator.send(self._there(x), to)
        torch.accelerator.synchronize()

    def recv(self, x: torch.Tensor, source: int) -> None:
        there = self._there(x)
        self._communicator.recv(there, source)
        x.copy_(there)

    def barrier(self) -> None:
        self._communicator.barrier()

    def close(self) -> None:
        self._communicator.close()

    def _there(self, x: torch.Tensor) -> torch.Tensor:
        """With the same strides, which a plain copy keeps of dense tensors alone."""
        span = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
        if not x.numel():
            return x.to(self._device)
        there = torch.empty(span, dtype=x.dtype, device=self._device).as_strided(x.shape, x.stride())
        there.copy_(x)
        return there

    @staticmethod
    def _back(found: torch.Tensor) -> torch.Tensor:
        assert found.is_contiguous(), "what was gathered is not contiguous"
        return found.cpu()
