"""What a body is built with: one frozen context per process kind. It may grow; a body takes nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.types.kv import KVLayout
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.parallel import GroupPlace, Parallel
from engine.types.start import WorkerStart

if TYPE_CHECKING:
    import torch

    from engine.interfaces.nodes import Nodes
    from engine.interfaces.ops import Ops
    from engine.interfaces.platform import Platform


Answers = Callable[[], list[Any] | None]
"""Of all workers, of each what it says, or the first error; None as long as some have not answered."""


class Clock(Protocol):
    """Time in an engine core, which need not be the machine's."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def sleep(self, seconds: float) -> None:
        """Let so many of them pass."""


class SystemClock:
    """The machine's time."""

    def monotonic(self) -> float:
        """See `time.monotonic`: setting the machine's date changes nothing."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See `time.sleep`."""
        time.sleep(seconds)


@dataclass(frozen=True, kw_only=True)
class FrontContext:
    """For bodies in the frontend's process (tokenizer, tool_parser, reasoning_parser).

    Args:
        options: the driver's validated `Options`, or None where its card declares none.
        folder: where the tokenizer's files lie (the model's folder unless the user named another).
        files: the checkpoint.
        model: what the model is.
    """

    folder: str
    files: CheckpointFiles
    model: ModelDescription
    options: Any = None


@dataclass(frozen=True, kw_only=True)
class RouterContext:
    """For bodies of point router, in the frontend's process. Built when all ranks are ready.

    Args:
        options: the driver's validated `Options`, or None where its card declares none.
        num_ranks: engine cores; they are called 0 .. num_ranks - 1.
        max_num_seqs: most sequences that run at once on one rank.
        block_size: tokens whose KV cache is found, or not, as one.
        cached_tokens: how many tokens' KV cache fits into one rank, the smallest.
    """

    num_ranks: int
    max_num_seqs: int
    block_size: int
    cached_tokens: int
    options: Any = None


@dataclass(frozen=True, kw_only=True)
class CoreContext:
    """For bodies in the engine core's process (executor, evictor, scheduling_policy, kv_connector's scheduler half).

    Args:
        options: the driver's validated `Options`, or None where its card declares none.
        layout: the KV pool's form; `page_bytes` of the rank with the largest pages.
        num_pages: pages of the pool, the null page included; 0 while the executor is built, which finds it out.
        max_num_seqs, max_num_batched_tokens, max_model_len: limits of a step and of a request.
        worker: "pkg.mod:Class" of the `Worker` that executors start.
        swap_space: bytes of host memory for swapped pages, on each rank.
        step_timeout: seconds after which whoever waits for the core takes it for hung.
        parallel: over how many workers the model is divided.
        clock: by which requests are timed and end; a simulation has its own.
        identity: of what pages hold beside tokens: the same over restarts, and another where weights, config, dtypes,
            page formats, layout, or the drivers of checkpoint, model and quantization differ. What the keys begin with
            of a store that outlives the engine. b"" where no connector is at work.
        tell: for adapters: calls `told` of the halves in the workers, and does not wait (minor 2).
        nodes: for an executor: the machines on which its workers have seats; None: they run on this one.
        vocabulary: for an evictor, see `GrammarContext.vocabulary`. encode: a text's ids, without special tokens added.
    """

    layout: KVLayout
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int = 0
    worker: str = ""
    swap_space: int = 0
    step_timeout: float = 600.0
    parallel: Parallel = field(default_factory=Parallel)
    clock: Clock = field(default_factory=SystemClock)
    identity: bytes = b""
    tell: Callable[..., Answers] | None = None
    nodes: Nodes | None = None
    vocabulary: Callable[[], Sequence[bytes | None]] = tuple
    encode: Callable[[str], list[int]] | None = None
    options: Any = None


@dataclass(frozen=True, kw_only=True)
class GrammarContext:
    """For the grammar's body, in the engine core's process.

    Args:
        options: the driver's validated `Options`, or None where its card declares none.
        vocab_size: of the model's logits, which may be more than the tokenizer knows.
        vocabulary: the bytes that each id stands for, as `Tokenizer.vocabulary` has them. The first call builds the
            tokenizer, which takes a while: call it from `compile`, not when the body is built. Thread-safe; raises
            TokenizerError.
        prepare: begin at once, beside the loading of the model, with what a first `compile` waits for and another
            process can do: to import a library there, say.
    """

    vocab_size: int
    vocabulary: Callable[[], Sequence[bytes | None]]
    options: Any = None
    prepare: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """For bodies in a worker's process (platform, communicator, ops, attention, quantization, experts, checkpoint,
    drafter, logits_processor, kv_connector's worker half).

    Bodies are built in this order, and each sees those before it.

    Args:
        start: the start message.
        options: the driver's validated `Options`, or None where its card declares none.
        device, dtype: where and in what the model computes; None while the platform itself is built.
        group: for a communicator, whose ranks it connects; else None.
    """

    start: WorkerStart
    options: Any = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    group: GroupPlace | None = None
    platform: Platform | None = None
    ops: Ops | None = None
