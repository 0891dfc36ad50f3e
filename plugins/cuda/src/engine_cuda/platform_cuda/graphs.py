"""Capture: a step's launches as a CUDA graph, tried on two inputs, and launched again in one call.

All graphs of a worker share one pool of memory: they never run at the same time, so one may use what another has used.
What a step leaves is handed back to it as tensors that do not own their memory; otherwise each bucket's logits would be
kept apart, gigabytes for large vocabularies. (vLLM found both, in its `weak_ref_tensor`.) Captured from the largest
down, each later graph finds its memory in what the first one took.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet

import torch

from engine.interfaces.platform import Trial
from engine.modeling import out_of_memory
from engine.types.errors import ContractError
from engine_cuda.platform_cuda.trial import compare, culprit, what_stopped

Tensors = tuple[torch.Tensor, ...]


class Replay:
    """A captured step.

    Args:
        graph: its launches.
        kept: whatever owns the buffers that they read and write.
    """

    __slots__ = ("_graph", "_kept")

    def __init__(self, graph: torch.cuda.CUDAGraph, kept: object) -> None:
        self._graph = graph
        self._kept = kept

    def __call__(self) -> None:
        """Launch them on the current stream."""
        self._graph.replay()


class Graphs:
    """Captures the steps of one device.

    Args:
        device: with its index; the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._in_pool: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def capture(self, fn: Callable[[], None], trial: Trial | None) -> Replay:
        """Run `fn` to warm it up, record it, and with a trial compare what it leaves, run and replayed, on both inputs.

        Everything is done on a stream of its own: nothing can be recorded on the default one, and libraries keep a
        workspace for each stream, which must be there before.

        Raises:
            ContractError: `fn` does what a graph cannot hold, or its replay leaves something else.
            DeviceMemoryError: there is no memory for it.
        """
        with self._apart():
            try:
                expected = self._warm_up(fn, trial)
                if trial is not None:
                    trial.prepare(0)
                replay = Replay(self._record(fn), fn)
                if trial is not None:
                    for number, of_input in enumerate(expected):
                        trial.prepare(number)
                        replay()
                        compare(trial.outputs(), of_input, number)
                    if trial.replace is not None:
                        trial.replace(tuple(map(unowned, trial.outputs())))
            except torch.OutOfMemoryError as error:
                remedy = "lower --memory-utilization or --max-num-seqs, or name fewer --platform.buckets"
                raise out_of_memory("capture a decode step", error, remedy) from error
        return replay

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """On the stream for captures, after all work before and before all work behind; what it cached is given back,
        since memory that was freed on one stream serves no other."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)
            self._stream.synchronize()
            torch.cuda.empty_cache()

    @staticmethod
    def _warm_up(fn: Callable[[], None], trial: Trial | None) -> list[Tensors]:
        """What it leaves of each input. The first run compiles kernels and makes workspaces: no graph can hold that."""
        if trial is None:
            fn()
            return []
        expected = []
        for number in (0, 1):
            trial.prepare(number)
            fn()
            expected.append(tuple(tensor.clone() for tensor in trial.outputs()))
        return expected

    def _record(self, fn: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what it would free in the middle may be what a recording stream must not touch
        try:
            # Other threads (connectors) may go on with the device meanwhile.
            if not self._in_pool:  # torch gives a pool up with its last graph, and records to it no more
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                fn()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
            self._in_pool.add(graph)
        except (ContractError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise ContractError(
                "capture a decode step as a CUDA graph",
                f"{what_stopped(str(error))} at {culprit(error)}",
                "let a driver compute it that can be captured, or start with --platform.capture never",
                point="platform",
            ) from error
        finally:
            if collects:
                gc.enable()
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed.

        Where CUDA has given it up, `capture_end` raises before it tells torch's allocators. The device's is told here.
        That of pinned memory cannot be: it goes on asking this graph whose memory to use, so the graph is kept, and it
        refuses to record to the same pool again, so later recordings have another one.
        """
        with suppress(RuntimeError):
            graph.capture_end()
            return
        self._failed.append(graph)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)  # as this graph's end would: it has none
        self._in_pool = WeakSet()  # none is in the next recording's pool yet
        self._end_well()

    @staticmethod
    def _end_well() -> None:
        """Record nothing at all: torch's own generator of random numbers (until 2.11 at least) takes itself to be
        recorded after a recording that failed, and draws no more until one ends well."""
        graph = torch.cuda.CUDAGraph()
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is empty
            graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            graph.capture_end()


class _Memory:
    """A piece of a device's memory, by the protocol that torch and other libraries read it by."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not keep it from being used again."""
    if not tensor.numel():
        return tensor
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (1 + sum(spans)) * tensor.element_size()
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), num_bytes), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
