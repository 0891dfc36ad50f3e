"""The body of the platform `cuda`: a GPU's memory, copies that nobody waits for, and captured decode steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from engine.interfaces.platform import STREAM, CacheMemory, CaptureKey, Trial
from engine.modeling import out_of_memory
from engine.types.errors import ConfigError, ContractError, KVCacheTooSmallError, UnfitDriverError
from engine_cuda.dependents import can_depend
from engine_cuda.platform_cuda.buckets import hidden_tokens, row_buckets, token_buckets
from engine_cuda.platform_cuda.fetch import CudaFetch
from engine_cuda.platform_cuda.graphs import Graphs
from engine_cuda.platform_cuda.late import late_kernels
from engine_cuda.platform_cuda.memory import GRAPH_BYTES, Measured, cache_memory, graph_bytes
from engine_cuda.platform_cuda.staging import RING_BYTES, StagingRing

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.ops import Ops, StepTables
    from engine.interfaces.step import WholeSteps
    from engine.types.start import WorkerStart
    from engine_cuda.platform_cuda.card import CudaPlatformOptions

logger = logging.getLogger(__name__)


def device_index(start: WorkerStart, ranks_per_device: int, num_devices: int) -> tuple[int, int]:
    """The GPU of a rank, and how many ranks have it. Raises ConfigError where there are more ranks than places."""
    rank, ranks = start.seat.device, start.seat.sharers
    if ranks > num_devices * ranks_per_device:
        raise ConfigError(
            f"run {ranks} ranks on GPUs",
            f"{num_devices} visible, for {ranks_per_device} {'rank' if ranks_per_device == 1 else 'ranks'} each",
            "lower --tensor-parallel-size, or the number of stages or cores; tests may raise "
            "--platform.ranks_per_device",
        )
    index = rank // ranks_per_device
    return index, min(ranks_per_device, ranks - index * ranks_per_device)


def most_drafts(start: WorkerStart) -> int:
    """Drafts of a row, by the options of the drafter that was chosen; 0 where there is none."""
    return max((int(c.options.get("num_tokens", 0)) for c in start.choices if c.point == "drafter"), default=0)


def draft_graphs(start: WorkerStart) -> int:
    """Graphs of draft models for each number of rows: of a pass, and of models without features once more with its
    inputs and its draw."""
    return sum(1 if draft.features else 2 for draft in start.drafts)


def most_mixed(start: WorkerStart) -> int:
    """Tokens of the largest step with prompts that is captured; 0 where prompts are of one token, and all steps are as
    decodes are."""
    most = start.max_model_len - 1
    return min(start.max_num_batched_tokens, start.max_num_seqs * most) if most > 1 else 0


AROUND = ("prepare_inputs", "draw", "place_tokens")
"""Operations that a step launches around the model's: its graph holds them where it is captured whole."""


def unrecorded(start: WorkerStart) -> list[str]:
    """Which drivers of these launch something that a graph does not hold, though it holds what models call of them."""
    found: dict[str, list[str]] = {}
    for choice in start.choices:
        if choice.point == "ops" and choice.kind in AROUND:
            module, _, name = choice.value.partition(":")
            if not STREAM & getattr(import_module(module), name).captured_by:
                found.setdefault(choice.driver, []).append(choice.kind)
    return [f"ops '{driver}' ({', '.join(kinds)}) is not recorded by 'stream'" for driver, kinds in found.items()]


class CudaPlatformBody:
    """See `engine.interfaces.platform.Platform`. Work is queued on the current stream of the thread that calls.

    Attributes:
        dependents: whether kernels may begin before the one before has ended, see `engine_cuda.dependents`.

    Raises:
        UnfitDriverError: torch cannot start the device, although it is there.
        ConfigError: there are more ranks than GPUs.
    """

    def __init__(self, context: WorkerContext) -> None:
        options: CudaPlatformOptions = context.options
        self._mode = options.capture
        self._asked_buckets = options.buckets
        self._asked_mixed = options.capture_mixed
        self._whole = options.capture_whole == "auto"
        self._unrecorded = unrecorded(context.start) if self._whole else []
        start = context.start
        self._max_num_seqs = start.max_num_seqs
        self._useful_tokens = hidden_tokens(start.model.hidden_size, start.parallel.tp)
        self._most_mixed = most_mixed(start)
        self._most_drafts = most_drafts(context.start)
        self._draft_graphs = draft_graphs(context.start)
        try:
            torch.cuda.init()
            index, self._ranks = device_index(context.start, options.ranks_per_device, torch.cuda.device_count())
            self._device = torch.device("cuda", index)
            torch.cuda.set_device(self._device)  # kernels that are launched without torch go to the current device
            _give_back()  # or weights would be laid into what an earlier engine's pool left, and none of it came free
            free, total = torch.cuda.mem_get_info(self._device)
        except (RuntimeError, AssertionError) as error:
            raise UnfitDriverError(
                "start a GPU",
                f"torch {torch.__version__} says: {str(error).partition(chr(10))[0]}",
                "see what `nvidia-smi` says, and whether another process has the GPU for itself",
                point="platform",
                driver="cuda",
            ) from error
        self.dependents = options.dependents == "auto" and can_depend(self._device)
        self._outside = total - free - torch.cuda.memory_reserved(self._device)
        self._results = torch.cuda.Stream(self._device)
        self._graphs = Graphs(self._device)
        with torch.inference_mode(False):  # or it could be written to in that mode alone
            buffer = torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._ring = StagingRing(buffer, _event)
        late_kernels.listen()

    @property
    def device(self) -> torch.device:
        """Torch's "cuda:i"."""
        return self._device

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        """See `engine_cuda.platform_cuda.buckets`; none where nothing is to be captured."""
        if self._mode == "never":
            return ()
        if not tokens_per_row:
            mixed = None if self._asked_mixed == "auto" else self._asked_mixed
            return () if mixed == "never" else token_buckets(self._most_mixed, mixed, self._useful_tokens)
        asked = None if self._asked_buckets == "auto" else self._asked_buckets
        return row_buckets(max_num_seqs, asked, tokens_per_row)

    def capture(self, fn: Callable[[], None], key: CaptureKey | None, trial: Trial | None = None) -> Callable[[], None]:
        """A CUDA graph; `fn` itself, with a warning, where that cannot be and the option `capture`
        does not insist. Raises DeviceMemoryError where there is no memory for it."""
        if key is None or self._mode == "never":
            return fn
        try:
            return self._graphs.capture(fn, trial)
        except ContractError as error:
            if self._mode == "always":
                raise
            logger.warning("decode steps are not captured: %s", error.found)
            return fn

    def whole_steps(self, ops: Ops, tables: StepTables, parameters: Any, why_not: Sequence[str]) -> WholeSteps | None:
        """See `engine.interfaces.step.WholeSteps`; None where the option `capture_whole` says so, and, with a warning,
        where it cannot be: no memory is kept for it then. Raises ConfigError there where the option `capture` insists.
        """
        if not self._whole:
            return None
        reasons = ["Triton is not installed"] if find_spec("triton") is None else []
        reasons += ["platform.capture is never"] if self._mode == "never" else [*why_not, *self._unrecorded]
        if not reasons:
            from engine_cuda.platform_cuda.whole import CudaWholeSteps

            insists = self._mode == "always"
            return CudaWholeSteps(self, self._graphs.capture, self._mark, insists, ops, tables, parameters)
        self._whole = False
        if self._mode == "always":
            raise ConfigError(
                "capture decode steps with their inputs and draws (platform.capture_whole=auto)",
                "; ".join(reasons),
                "start with --platform.capture_whole never",
            )
        logger.warning("decode steps are not captured with their inputs and draws: %s", "; ".join(reasons))
        return None

    def _mark(self) -> torch.cuda.Event:
        late_kernels.serving = True  # a step that serves is launched
        return _event(torch.cuda.current_stream(self._device))

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        """See `engine_cuda.platform_cuda.memory`. Raises DeviceMemoryError where the largest step does not fit."""
        device = self._device
        _give_back()
        torch.cuda.reset_peak_memory_stats(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        try:
            largest_step()
            torch.cuda.synchronize(device)
            late_kernels.serving = False  # its draws were fetched, and it is a start's
        except torch.OutOfMemoryError as error:
            remedy = "lower --max-num-batched-tokens or --max-num-seqs, or quantise the weights"
            raise out_of_memory("run a largest step beside the weights", error, remedy) from error
        step = max(
            torch.cuda.max_memory_allocated(device) - allocated,
            torch.cuda.max_memory_reserved(device) - reserved,  # what lies between tensors counts as well
        )
        _give_back()
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        measured = Measured(total, free, held, max(0, total - free - held - self._outside), step)
        widths = {1, 1 + self._most_drafts} if self._most_drafts else {0, 1}
        buckets = {width: self.buckets(self._max_num_seqs, width) for width in widths}
        graphs = graph_bytes(step, buckets, self._max_num_seqs)
        graphs += GRAPH_BYTES * len(buckets[1]) * (self._whole + self._draft_graphs)  # of the same numbers of rows
        return cache_memory(measured, utilization, self._ranks, graphs)

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], zeroed: one allocation. Raises KVCacheTooSmallError."""
        num_bytes = num_pages * page_bytes
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        try:
            if num_bytes > free:  # torch has no number for the largest of sizes
                raise torch.OutOfMemoryError
            return torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise KVCacheTooSmallError(
                f"allocate a KV cache of {num_pages:,} pages of {page_bytes:,} bytes ({num_bytes:,} bytes)",
                f"{free:,} bytes of {self._device} are free",
                "lower --kv-cache-memory, --num-kv-pages or --memory-utilization, or free the GPU's memory",
            ) from error

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Through pinned memory; never waits for the device, but where it is megabytes behind.

        Raises ContractError while a step is recorded: its replay would copy what lies in that memory then.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ContractError(
                "capture a decode step as a CUDA graph",
                "it copies from the host",
                "copy into fixed buffers before the step",
                point="platform",
            )
        assert host.shape == out.shape, f"{tuple(host.shape)} into {tuple(out.shape)}"
        num_bytes = out.numel() * out.element_size()
        if not num_bytes:
            return
        if num_bytes > self._ring.largest:
            staged = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)  # torch keeps it until it was read
        else:
            piece = self._ring.take(num_bytes, torch.cuda.current_stream(self._device))
            staged = piece.view(out.dtype).view(out.shape)
        staged.copy_(host)
        out.copy_(staged, non_blocking=True)

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> CudaFetch:
        """On a stream of their own, behind the work that is queued now; the next step's work does
        not wait for them."""
        late_kernels.serving = True  # a start fetches nothing but the largest step's draws
        self._results.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._results):
            hosts = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
        return CudaFetch(hosts, tensors, _event(self._results))


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _give_back() -> None:
    """What nobody holds any more, and what torch keeps of it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
