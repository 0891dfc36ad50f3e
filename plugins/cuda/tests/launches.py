"""What a step launches, seen without a GPU: torch's device "meta", whose tensors have shapes and no values, and
Triton's launches, which are noted and not run.

    worker = MetaWorker("dummy:0.6B", max_num_seqs=4)
    worker.enter(rows=1, temperature=0.0)
    step = worker.step()          # the launches of one decode step, in order
    step.captured, step.outside   # names: of Triton's kernels, and of torch's operations that launch one

Everything else is the engine's own: the model, the runner, the sampler, and the bodies of the drivers `triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.interfaces.attention import AttentionNeed
from engine.interfaces.checkpoint import CheckpointCard
from engine.interfaces.context import WorkerContext
from engine.interfaces.ops import OPERATIONS, Ops, OpsNeed, StepTables
from engine.interfaces.platform import CaptureKey, Trial
from engine.interfaces.quantization import QuantizationNeed
from engine.kv.layout import make_layout
from engine.plugin import Candidate, Registry
from engine.runner.results import FailedStep
from engine.runner.worker import TorchWorker
from engine.types.model import CheckpointFiles
from engine.types.params import SamplingParams
from engine.types.plan import NewBlocks, NewSlot, StepPlan
from engine.types.start import Choice, WorkerStart
from engine_cuda.attention_triton import body as attention_body
from engine_cuda.attention_triton.card import TritonAttention, TritonAttentionOptions
from engine_cuda.ops_triton.card import TritonOps
from engine_cuda.ops_triton_gemv.card import TritonGemv
from engine_cuda.platform_cuda.whole import CudaWholeSteps
from engine_cuda.quantization_fp8.body import Fp8Body
from engine_cuda.quantization_fp8.card import Fp8Options, Fp8Quantization
from engine_reference.checkpoint_dummy.sizes import config_of, shapes_of
from engine_reference.models.llama_card import Llama, Qwen3
from engine_reference.platform_host.card import HostPlatform
from engine_reference.platform_host.platform import HostPlatformBody

PROMPT, BLOCK = 4, 16
COSTS_NOTHING = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "detach", "alias", "_unsafe_view", "_reshape_alias"}
)
"""Operations of torch that launch nothing, beside views."""


@dataclass
class Launches:
    """Of one step, in order, by the names of kernels and operations.

    Args:
        captured: within the graph that is replayed: one launch of the host, these of the device.
        outside: before and after it; copies to and from the host are "to_device" and "to_host".
    """

    captured: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[list[str]]:
        """Those of each layer but the first and the last: between two writes to the cache, from one to the next."""
        at = [place for place, name in enumerate(self.captured) if name == "rotated_write_kernel"]
        return [self.captured[first:last] for first, last in pairwise(at)]


class _Noted:
    """Where launches go."""

    now: ClassVar[Launches | None] = None
    within: ClassVar[bool] = False

    @classmethod
    def take(cls, name: str) -> None:
        if cls.now is not None:
            (cls.now.captured if cls.within else cls.now.outside).append(name)


class _Operations(TorchDispatchMode):
    """Notes torch's operations on the device's tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outs = out if isinstance(out, (tuple, list)) else (out,)
        on_device = any(isinstance(x, torch.Tensor) and x.is_meta for x in outs)
        same = any(out is arg for arg in args) and not name.endswith("_")  # contiguous() of what is
        if on_device and not (func.is_view or name in COSTS_NOTHING or same):
            _Noted.take(name)
        return out


class MetaPlatform(HostPlatform):
    """Torch's device "meta", with steps that are captured."""

    recorder = "stream"
    body = "launches:MetaPlatformBody"


class MetaPlatformBody(HostPlatformBody):
    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        return (max_num_seqs,) if tokens_per_row == 1 else ()

    def capture(self, fn: Callable[[], None], key: CaptureKey | None, trial: Trial | None = None) -> Callable[[], None]:
        if key is None:
            return fn

        def replay() -> None:
            _Noted.within = True
            try:
                fn()
            finally:
                _Noted.within = False

        return replay

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=self.device)

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        _Noted.take("to_device")

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        for _ in tensors:
            _Noted.take("to_host")
        return SimpleNamespace(done=lambda: False)


class MetaWholePlatform(MetaPlatform):
    """And decode steps whole."""

    requires_minor = 7
    body = "launches:MetaWholePlatformBody"


class MetaWholePlatformBody(MetaPlatformBody):
    def whole_steps(self, ops: Ops, tables: StepTables, parameters: Any, why_not: Sequence[str]) -> CudaWholeSteps:
        assert not why_not, why_not

        def record(fn: Callable[[], None], trial: Trial | None) -> Callable[[], None]:
            return self.capture(fn, CaptureKey(1), trial)

        mark: Any = SimpleNamespace
        return CudaWholeSteps(self, record, mark, True, ops, tables, parameters)


class MetaOps(TritonOps):
    """The operations `triton`, whatever the device."""

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        return []


class MetaGemv(TritonGemv):
    """The products of few rows, whatever the device."""

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        return []


class MetaAttention(TritonAttention):
    """The attention `triton`, whatever the device."""

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        return []


class MetaFp8(Fp8Quantization):
    """The quantization `fp8`, whatever the device."""

    body = "launches:MetaFp8Body"

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        return []


class MetaFp8Body(Fp8Body):
    def _try(self, device: torch.device, dtype: torch.dtype) -> None:
        """There are no numbers to compare."""


class MetaCheckpoint(CheckpointCard):
    """Shapes alone."""

    body = "launches:MetaWeights"


class MetaWeights:
    def __init__(self, context: WorkerContext) -> None:
        self._config = context.start.files.config

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes_of(self._config).items():
            yield name, torch.empty(shape, dtype=torch.bfloat16, device="meta")


@contextmanager
def noted() -> Iterator[None]:
    """Within, Triton's kernels are not run, and a GPU with 132 multiprocessors of compute capability 9.0 seems to be
    there."""

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        _Noted.take(kernel.fn.__name__)

    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    with pytest.MonkeyPatch.context() as patch, _Operations():
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(kind, "run", launch)
        patch.setattr(attention_body, "interpreted", lambda: False)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        yield


class MetaWorker:
    """A worker on the device "meta", and requests that decode on it. To be used within `noted`.

    Args:
        model: of the checkpoint driver `dummy`.
        max_num_seqs: slots; also the one bucket of decode steps.
        gemv: linear layers by ops driver `triton_gemv`.
        whole: decode steps are captured whole.
        fp8: options of quantization `fp8`, of the linear layers; None: they are plain.
    """

    def __init__(
        self,
        model: str,
        max_num_seqs: int,
        gemv: bool = False,
        whole: bool = False,
        fp8: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        config = config_of(model)
        description = (Llama if config["model_type"] == "llama" else Qwen3).describe(config)
        candidates = [
            Candidate("platform", "meta", 0, "launches", "1", "launches:MetaPlatform"),
            Candidate("platform", "meta_whole", 0, "launches", "1", "launches:MetaWholePlatform"),
            Candidate("attention", "meta", 0, "launches", "1", "launches:MetaAttention"),
            Candidate("ops", "meta", 0, "launches", "1", "launches:MetaOps"),
            Candidate("ops", "meta_gemv", 0, "launches", "1", "launches:MetaGemv"),
            Candidate("quantization", "meta", 0, "launches", "1", "launches:MetaFp8"),
            Candidate("checkpoint", "meta", 0, "launches", "1", "launches:MetaCheckpoint"),
        ]
        registry = Registry.discover(extra=tuple(candidates))
        layout = make_layout(description.kv_specs, block_size=BLOCK, kv_itemsize=2, tokens_per_page={"full": BLOCK})

        def choice(point: str, driver: str, kind: str = "", **options: Any) -> Choice:
            found = registry.find(point, driver)
            return Choice(
                point=point, kind=kind, driver=driver, distribution=found.distribution, version=found.version,
                value=found.value, options=options,
            )  # fmt: skip

        drivers = [("meta", TritonOps.operations), ("torch", frozenset(OPERATIONS))]
        if gemv:
            drivers.insert(0, ("meta_gemv", TritonGemv.operations))
        quantized = () if fp8 is None else (choice("quantization", "meta", "linear", **Fp8Options(**fp8).model_dump()),)
        fields: dict[str, Any] = {
            "choices": (
                choice("platform", "meta_whole" if whole else "meta"),
                *(choice("ops", next(d for d, its in drivers if name in its), name) for name in OPERATIONS),
                choice("attention", "meta", "full", **TritonAttentionOptions().model_dump()),
                *quantized,
                choice("model", config["architectures"][0]),
                choice("checkpoint", "meta"),
            ),
            "model": description,
            "files": CheckpointFiles(name=model, folder="", weights=(), config=config),
            "layout": layout,
            "dtype": "bfloat16",
            "device": "meta",
            "max_model_len": 4096,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 4096,
            "num_kv_pages": 3000,
        }
        self._worker = TorchWorker(WorkerStart(**(fields | changes)), registry)
        self.ready = self._worker.start()
        self._step_id = 0
        self._page = 0
        self._computed = np.zeros(0, np.int32)

    def enter(self, rows: int, **params: Any) -> None:
        """So many requests compute their prompts, and decode once."""
        made = SamplingParams(**{"seed": 1, "ignore_eos": True, "max_tokens": 9, **params})
        made.verify()
        new = [
            NewSlot(
                slot=slot,
                request_id=str(slot),
                token_ids=np.arange(PROMPT, dtype=np.int32),
                num_prompt_tokens=PROMPT,
                params=made,
                stop_token_ids=np.zeros(0, np.int32),
            )
            for slot in range(rows)
        ]
        self._computed = np.zeros(rows, np.int32)
        slots = np.arange(rows, dtype=np.int32)
        blocks = NewBlocks(slot=slots, index=np.zeros(rows, np.int32), page=slots + 1)
        self._run(np.full(rows, PROMPT, np.int32), new_slots=new, new_blocks=[blocks])
        self._run(np.ones(rows, np.int32))

    def step(self, pages: bool = False) -> Launches:
        """A decode step in which nothing is new, but for a page of each row where asked for."""
        rows = np.arange(len(self._computed), dtype=np.int32)
        new = {"new_blocks": [NewBlocks(slot=rows, index=rows * 0 + 1, page=rows + 100)]} if pages else {}
        _Noted.now = launches = Launches()
        try:
            self._run(np.ones(len(rows), np.int32), **new)
        finally:
            _Noted.now = None
        return launches

    def _run(self, num_tokens: np.ndarray, **fields: Any) -> None:
        rows = len(num_tokens)
        plan = StepPlan(
            step_id=self._step_id,
            slot_of_row=np.arange(rows, dtype=np.int32),
            num_computed=self._computed.copy(),
            num_tokens=num_tokens,
            samples=np.ones(rows, bool),
            num_decodes=0 if (num_tokens > 1).any() else rows,
            **({"new_slots": [], "new_blocks": [_no_blocks()]} | fields),
        )
        self._step_id += 1
        future = self._worker.execute(plan)
        if isinstance(future, FailedStep):
            future.result()  # raises what went wrong
        self._computed = self._computed + num_tokens


def _no_blocks() -> NewBlocks:
    none = np.zeros(0, np.int32)
    return NewBlocks(slot=none, index=none, page=none)
