"""The body of communicator `custom_allreduce`: sums alone, of small tensors. The other collectives are others'."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from engine_cuda.communicator_custom_allreduce.kernels import one_shot_kernel, two_shot_kernel
from engine_cuda.communicator_custom_allreduce.layout import DATA, MOST_RANKS, SEGMENT, STATE, Layout, cut
from engine_cuda.communicator_custom_allreduce.memory import DeviceMemory, HostMemory, SharedMemory
from engine_cuda.interpreter import interpreted
from engine_cuda.peers import Peers

if TYPE_CHECKING:
    from engine.interfaces.communicator import Collective
    from engine.interfaces.context import WorkerContext
    from engine_cuda.communicator_custom_allreduce.card import CustomAllReduceOptions

logger = logging.getLogger(__name__)

NAME = "custom_allreduce"
MIB = 1 << 20
MAX_BYTES = {2: 8 * MIB, 4: 4 * MIB, 8: 2 * MIB}
ONE_SHOT_BYTES = {2: 1 << 30, 4: MIB // 2, 8: MIB // 4}
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
TRIAL_SECONDS = 60.0
"""That the first sums may take, with the kernels' compilation on every rank."""
LINGER = 1.0
"""Seconds that a rank which closes waits for the others to do so."""
INTERPRETED = interpreted()


class CustomAllReduceBody:
    """See `engine.interfaces.communicator.Communicator`.

    A call queues one kernel on the current stream and returns; nothing is allocated where the tensor is contiguous.
    Where a rank was lost, kernels that wait for it end soon, with nothing of use, and the next call raises.

    Raises:
        RuntimeError: the ranks do not meet, or see no memory of each other and the user named this driver. Where `auto`
            chose it, it accepts nothing then, on all ranks.
    """

    def __init__(self, context: WorkerContext) -> None:
        start, group = context.start, context.group
        assert group is not None
        options: CustomAllReduceOptions = context.options
        self._rank = group.rank
        self._size = group.size
        self._device = context.device or torch.device("cpu")
        self._max_bytes = options.max_bytes or MAX_BYTES[self._size]
        self._one_shot_bytes = options.one_shot_bytes or ONE_SHOT_BYTES[self._size]
        self._layout = Layout(self._size)
        self._gone = ""
        self._released = False
        self._memory: SharedMemory | None = None
        self._peers = Peers(group.rendezvous, NAME, self._rank, self._size, options.timeout)
        try:
            kind = DeviceMemory if self._device.type == "cuda" else HostMemory
            self._memory = kind(self._layout.nbytes, self._rank, self._peers.exchange)
            addresses = self._memory.addresses
            self._addresses = torch.tensor(addresses, dtype=torch.int64).to(self._device)
            troubles = [text.decode() for text in self._peers.exchange(self._trial().encode()) if text]
            if troubles:
                raise RuntimeError("; ".join(troubles))
        except (RuntimeError, OSError) as error:
            self.close()
            asked = {c.asked for c in start.choices if c.point == "communicator" and c.driver == NAME}
            if asked != {False}:
                raise RuntimeError(
                    f"ranks cannot sum in each other's memory: {error}; name another --communicator"
                ) from error
            logger.warning("communicator %s takes nothing: %s", NAME, error)
            return
        self._peers.watch(self._lost, self._release)

    def accepts(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        """Sums that are not too large, of floats that are summed in float32."""
        if op != "all_reduce" or dtype not in DTYPES or self._memory is None:
            return False
        count = 1
        for length in shape:
            count *= length
        return 0 < count * dtype.itemsize <= self._max_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place where `x` is contiguous. In order of rank, in float32."""
        if self._gone:
            raise RuntimeError(self._gone)
        x = x.contiguous()
        self._launch(x, self._one_shot_bytes)
        if INTERPRETED and self._released:
            raise RuntimeError(self._gone)  # the kernel has ended, perhaps before its time
        return x

    def _launch(self, x: torch.Tensor, one_shot_bytes: int) -> None:
        count, layout = x.numel(), self._layout
        how = cut(count, x.itemsize, self._size, one_shot_bytes)
        common = (
            x, x, self._addresses, count, self._rank, self._size, how.block, layout.slot, STATE, DATA, MOST_RANKS
        )  # fmt: skip
        if how.one_shot:
            one_shot_kernel[(how.programs,)](*common, num_warps=how.warps)
        else:
            two_shot_kernel[(how.programs,)](*common, layout.results, SEGMENT, num_warps=how.warps)

    def _trial(self) -> str:
        """Both ways once, before anything rests on them; what is wrong, "" for nothing. Nobody waits for ever."""
        expected = self._size * (self._size + 1) / 2
        for one_shot_bytes in (1 << 30, 0):
            x = torch.full((1000,), float(self._rank + 1), device=self._device)
            self._launch(x, one_shot_bytes)
            if self._device.type == "cuda" and not self._done():
                return f"rank {self._rank}: a sum came to no end within {TRIAL_SECONDS:.0f} s"
            if not bool((x == expected).all()):
                return f"rank {self._rank}: a sum came out wrong"
        return ""

    def _done(self) -> bool:
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + TRIAL_SECONDS
        while not event.query():
            if time.monotonic() > deadline or self._peers.gone() is not None:
                assert self._memory is not None
                self._memory.release()
                torch.cuda.synchronize(self._device)
                return False
            time.sleep(0.0005)
        return True

    def _lost(self, why: str) -> None:
        """On the watching thread, as `_release`."""
        self._gone = why

    def _release(self) -> None:
        self._released = True
        if self._memory is not None:
            self._memory.release()

    def close(self) -> None:
        """Kernels that wait for others end first. Memory goes when the others have let go of it too, or a second later:
        their last sums may still be reading it."""
        memory = self._memory
        self._memory = None
        self._gone = self._gone or "the communicator is closed"
        if memory is not None:
            memory.release()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self._peers.close(LINGER if self._device.type == "cuda" else 0.0)
        if memory is not None:
            memory.close()

    # -- what others do ----------------------------------------------------------------------------------------------
    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Not accepted, as all below."""
        self._refuse("all_gather")

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        self._refuse("reduce_scatter")

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        self._refuse("all_to_all")

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        self._refuse("broadcast")

    def send(self, x: torch.Tensor, to: int) -> None:
        self._refuse("send")

    def recv(self, x: torch.Tensor, source: int) -> None:
        self._refuse("recv")

    def barrier(self) -> None:
        self._refuse("barrier")

    def _refuse(self, op: str) -> NoReturn:
        raise RuntimeError(f"{NAME} does no {op}: `accepts` says so")
