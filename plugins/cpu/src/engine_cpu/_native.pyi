"""The native module, as Python sees it. Addresses are `Tensor.data_ptr()`; sizes are in bytes unless said so."""

from collections.abc import Sequence

def levels() -> list[str]:
    """The levels of processor features that are compiled in and run here, lowest first."""

def sum(level: str, dtype: int, out: int, sources: Sequence[int], count: int) -> None:
    """out[i] = sources[0][i] + sources[1][i] + ..., `count` elements of a dtype (`engine_cpu.dtypes`)."""

def shm_bytes(size: int) -> int:
    """Shared memory that a group of `size` ranks needs."""

class ShmGroup:
    """Collectives over shared memory. Calls raise RuntimeError where a rank has gone."""

    def __init__(
        self, memory: int, rank: int, size: int, peers: Sequence[int], timeout: float, level: str = "auto"
    ) -> None:
        """memory: a descriptor, not kept. peers: by rank a descriptor that hangs up with it, -1 for ours; owned."""

    def barrier(self) -> None: ...
    def all_reduce(self, x: int, count: int, dtype: int) -> None: ...
    def all_gather(self, x: int, out: int, outer: int, inner: int, lengths: Sequence[int]) -> None: ...
    def reduce_scatter(self, x: int, out: int, outer: int, inner: int, lengths: Sequence[int], dtype: int) -> None: ...
    def all_to_all(self, x: int, out: int, send: Sequence[int], recv: Sequence[int]) -> None: ...
    def broadcast(self, x: int, size: int, root: int) -> None: ...
    def send(self, x: int, size: int, to: int) -> None: ...
    def recv(self, x: int, size: int, source: int) -> None: ...
    def close(self) -> None: ...
