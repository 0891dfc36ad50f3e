"""Point `platform`: the device. Memory, capture and replay, streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    import torch


class PlatformFacts(NamedTuple):
    """What a platform card knows without torch.

    Args:
        device: torch's device string, e.g. "cpu" or "cuda".
        name: for people, e.g. "AMD EPYC, 4 cores".
        dtypes: that it computes in, best first: the first one that can hold the checkpoint's is `auto`'s answer.
        framework: "torch" or "jax".
    """

    device: str
    name: str
    dtypes: tuple[str, ...]
    framework: str = "torch"


@dataclass(frozen=True, kw_only=True)
class PlatformNeed:
    """What the engine asks of a platform.

    Args:
        dtype: the asked-for dtype, or "auto".
    """

    dtype: str = "auto"


CapturesDrafts = Literal["never", "alike", "padded"]
"""Which steps with drafts a platform captures: none; those whose rows all have the same number of tokens; others too,
with rows that have fewer padded up to the most that there can be, where some tokens more cost next to nothing."""


class PlatformCard(Card):
    """Describes a device.

    Attributes:
        worker: names the worker class; None is the core's own torch worker.
        recorder: by what `capture` sees the work that a step launches, a word that other drivers answer with
            `captured_by`: "stream" for everything that is launched on the device's stream (CUDA graphs), or a word of
            its own for what is recorded in another way. None: nothing is captured.
        skips_padding: whether the replay of a step takes the number of rows that count, and may leave out those after
            them, which pad the step up to its bucket.
        captures_drafts: where it is not "never", the body's `buckets` takes the tokens of a row as well.
        captures_mixed: whether it captures steps with prompts in them: `buckets` is asked for their tokens then.
        step_timeout: seconds that no step takes on such a device, whatever the model: a core that says nothing for as
            long is taken for hung, where `--step-timeout` does not say otherwise.
        own_points: points of which `worker` brings its own drivers, such as ops, attention and quantization: none is
            chosen for them, and a user who names one is refused.
    """

    worker: str | None = None
    recorder: str | None = None
    skips_padding: bool = False
    captures_drafts: CapturesDrafts = "never"
    captures_mixed: bool = False
    step_timeout: float = 600.0
    own_points: frozenset[str] = frozenset()

    @classmethod
    def describe(cls) -> PlatformFacts:
        """The facts of this machine. Cheap; called only when `unsupported` gave no reason."""
        raise NotImplementedError

    @classmethod
    def memory(cls) -> int | None:
        """Bytes that a device has, all in all; None: not known. As cheap as `describe`; since minor 2."""
        return None

    @classmethod
    def step_tokens(cls) -> int:
        """The most tokens of a step, where nobody names another number; as cheap as `describe`; since minor 3."""
        return 2048

    @classmethod
    def logits_processors(cls) -> tuple[type[Any], ...]:
        """Where that point is among `own_points`: cards of it, for what `worker` honours itself. Requests may have
        their parameters, and are checked by them; since minor 4."""
        return ()

    @classmethod
    def tokens_per_page(cls, kind: str, block_size: int) -> int:
        """Tokens that a page is to have for layers of a kind, a multiple of the block size: what attention's cards say,
        where attention is among `own_points`."""
        return block_size

    @classmethod
    def page_format(cls, options: Any) -> str:
        """Where attention is among `own_points`: what `AttentionCard.page_format` is elsewhere, and what `worker` does
        with weights; since minor 6."""
        return ""


STREAM = frozenset({"stream"})
"""What a driver's `captured_by` is where it does not say: its work is launched on the device's stream, all of it."""


class Trial(NamedTuple):
    """How to try a step before it serves.

    Args:
        prepare: prepare(0) and prepare(1) fill the step's buffers with two inputs that differ in every value that may
            change from step to step, and put everything else that it reads and writes into the same state. Nothing of
            it is in use by anybody. In the first input no row sees anything of those after it.
        outputs: the tensors that the last run of the step, or of its replayable form, left.
        replace: puts others in their place, on the same memory: for a platform whose captured steps share memory, so
            that what one leaves holds until any of them is replayed. None where nobody can.
    """

    prepare: Callable[[int], None]
    outputs: Callable[[], tuple[torch.Tensor, ...]]
    replace: Callable[[tuple[torch.Tensor, ...]], None] | None = None


class CacheMemory(NamedTuple):
    """What a memory profile found.

    Args:
        pool_bytes: for the KV pool; 0 or less where nothing is left.
        step_bytes: that a largest step takes at its peak, beside weights and pool.
    """

    pool_bytes: int
    step_bytes: int


class CaptureKey(NamedTuple):
    """Which captured step it is; each is captured once.

    Args:
        rows: of its bucket; 0 for work that has no rows.
        tokens_per_row: 1 for decodes; more with drafts; 0: any number, and `rows` are the tokens of all of them.
        of: what runs: "target" is the model's own step.
        variant: what else tells steps of these sizes apart.
    """

    rows: int
    tokens_per_row: int = 1
    of: str = "target"
    variant: tuple[str, ...] = ()


class Platform(Protocol):
    """A device at work, in a worker. Built with a `WorkerContext`, which names this class."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        """Row counts that decode steps are padded up to, ascending; empty: no padding, every size runs as it is.

        tokens_per_row: 1, and where the card says that it `captures_drafts` each number of tokens, a row's last one
        and its drafts, with which steps may be captured. 0, where it `captures_mixed`: the answer is the tokens that
        steps with prompts in them are padded up to, `max_num_batched_tokens` at most.
        """

    def capture(
        self, fn: Callable[[], None], key: CaptureKey | None, trial: Trial | None = None
    ) -> Callable[..., None]:
        """A replayable form of `fn`, which reads and writes fixed buffers only. Called once for each `key`, before
        anything is served. The form is called without arguments, or where the card says `skips_padding` and `key` is no
        None, with the number of rows that count.

        `key` is None for a step that is not to be captured; the answer is then `fn`, as it is where the platform cannot
        capture this one and has said so (a warning). A tensor that `fn` made in its last run while it was captured
        keeps its memory: each replay leaves the new values in it (the runner finds the logits so), until another
        captured step is replayed.

        trial: with it, the platform may run `fn` and its replayable form on both inputs, and compare what they leave.

        Raises ContractError where `fn` does what the platform cannot capture, or its replay gives something else.
        """

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        """What to spend on the KV pool where the user names no number; called once, after the weights are loaded.

        Args:
            largest_step: runs one, and gives all its memory back. The platform measures what it takes at its peak.
            utilization: the share of the device's memory, 0 to 1, that the engine may take: weights, steps and pool;
                None for the platform's default. Ranks that share a device divide it.
        """

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """The KV pool: uint8 [num_pages, page_bytes], zeroed.

        Raises EngineError(KVCacheTooSmallError) with the sizes where the memory cannot be had.
        """

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a host tensor into a device buffer of the same shape, in order with the work queued after it.

        The host tensor may be changed as soon as this returns: a copy that goes on must have staged it.
        """

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> Fetch:
        """Start copying small results back, as the work queued so far leaves them; `Fetch.wait` gives them as host
        tensors. Nothing may write to them before the copy is done: they are the caller's alone."""


class Fetch(Protocol):
    """A copy to the host under way."""

    def done(self) -> bool:
        """True once `wait` would not block."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host, in the order asked."""
