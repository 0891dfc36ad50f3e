"""The half of LoRA adapters in a worker: its layers, what is loaded, and whose tokens are whose."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from engine.interfaces.adapter import AdapterWorker
from engine.interfaces.quantization import LayerShape
from engine.types.errors import ContractError, EngineError
from engine.types.plan import ErrorParts, NewSlot, StepPlan
from engine_lora.card import LoRAOptions
from engine_lora.peft_folder import read_folder, refusal
from engine_lora.weights import Part, parts_of, read_weights

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

KIND = "linear"
"""The layers that are adapted."""


class Layer:
    """Implements `engine.interfaces.model.AdapterLayer`."""

    def __init__(self, worker: Worker, memory: Any) -> None:
        self._worker = worker
        self._memory = memory
        self._add = worker.ops.lora_add

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See there."""
        worker = self._worker
        if worker.num_tokens is not None and len(x) != worker.num_tokens:
            raise ContractError(
                f"adapt a layer of {len(x)} tokens",
                f"the step has {worker.num_tokens}, and which of them these are is not told",
                "start without --adapter, or without what computes some tokens of a step alone",
                point="model",
            )
        return cast(torch.Tensor, self._add(x, y, self._memory, worker.tokens, worker.starts))


class Worker(AdapterWorker):
    """See `engine.interfaces.adapter.AdapterWorker`.

    Attributes:
        num_tokens: of the step that comes next, padding included; None before the first.
        tokens: int32 [max_num_batched_tokens], starts: int32 [max_loras + 1]: see operation `lora_add`.
    """

    def __init__(self, context: WorkerContext) -> None:
        assert context.ops is not None and context.platform is not None and context.dtype is not None
        options: LoRAOptions = context.options
        start = context.start
        self.ops: Any = context.ops
        self.num_tokens: int | None = None
        self._platform = context.platform
        self._dtype = context.dtype
        self._max_loras = options.max_loras
        self._max_rank = options.max_lora_rank
        room = options.max_loras + 1 + start.max_num_batched_tokens
        self._device = torch.zeros(room, dtype=torch.int32, device=context.device)
        self.starts, self.tokens = self._device.split([options.max_loras + 1, start.max_num_batched_tokens])
        self._place_of_slot = np.zeros(start.max_num_seqs + 1, np.int32)
        self._none = True  # no token of the step before had an adapter
        self._layers: list[list[Part]] = []
        self._memories: list[Any] = []
        self._loads: dict[str, _Load] = {}

    # -- the model's layers --------------------------------------------------------------------------------------------
    def layer(self, shape: LayerShape) -> Layer | None:
        """None for heads, and for the experts of mixtures."""
        if shape.kind != KIND:
            return None
        parts = parts_of(shape)
        outputs = [len(part.rows) for part in parts]
        memory = self.ops.lora_memory(shape.inputs.length, outputs, self._max_loras, self._max_rank, self._dtype)
        self._layers.append(parts)
        self._memories.append(memory)
        return Layer(self, memory)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def enter(self, new: NewSlot) -> None:
        """Its tokens are those of the adapter in this place."""
        self._place_of_slot[new.slot] = new.adapter

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        """Write down whose tokens are whose: nothing of the model's state."""
        self.num_tokens = num_tokens
        places = self._place_of_slot[plan.slot_of_row]
        if not places.any():
            if not self._none:
                self.starts.zero_()
                self._none = True
            return {}
        counts = plan.num_tokens
        rows = np.repeat(np.arange(plan.num_rows), counts)
        first = np.cumsum(counts) - counts
        token = np.arange(len(rows))
        if tokens_per_row:
            token += (np.arange(plan.num_rows) * tokens_per_row - first)[rows]
        of_token = places[rows]
        order = np.argsort(of_token, kind="stable")
        starts = np.bincount(of_token, minlength=self._max_loras + 1).cumsum()
        sent = np.concatenate([starts - starts[0], token[order[starts[0] :]]]).astype(np.int32)
        self._platform.to_device(torch.from_numpy(sent), self._device[: len(sent)])
        self._none = False
        return {}

    # -- what the half in the core tells -------------------------------------------------------------------------------
    def told(self, what: str, *args: Any) -> Any:
        """`load`, `loaded`, `place` or `drop`."""
        known: dict[str, Any] = {"load": self.load, "loaded": self.loaded, "place": self.place, "drop": self.drop}
        return known[what](*args)

    def load(self, identity: str, path: str, revision: str) -> None:
        """Begin to read an adapter into the host's memory."""
        self._loads[identity] = load = _Load(self, path, revision)
        threading.Thread(target=load.run, name="lora-load", daemon=True).start()

    def loaded(self, identity: str) -> tuple[bool, ErrorParts | None, list[str]]:
        """Whether it has been read; the error where it cannot be; its modules that are no layers of this worker."""
        load = self._loads[identity]
        return (load.done.is_set(), load.error, load.others)

    def place(self, place: int, identity: str | None) -> None:
        """Put an adapter that has been read into a place of the device; None: nothing is there from now on."""
        packed = [None] * len(self._memories) if identity is None else self._loads[identity].packed
        with torch.inference_mode():
            for memory, matrices in zip(self._memories, packed, strict=True):
                self.ops.lora_place(memory, place, matrices)

    def drop(self, identity: str) -> None:
        """Forget what is in the host's memory of an adapter; if it is being read, when it has been."""
        self._loads.pop(identity, None)

    def read(self, path: str, revision: str) -> tuple[list[Any], list[str]]:
        """Each layer's matrices, packed, and the modules that are none of this worker's. Raises InvalidRequestError."""
        folder = read_folder(path)
        if folder.revision != revision:
            raise refusal(path, "its files have changed since it was named", "name it again")
        found = read_weights(folder, self._layers, self._max_rank)
        pack = self.ops.lora_pack
        packed = [pack(memory, parts) for memory, parts in zip(self._memories, found.layers, strict=True)]
        return packed, found.others


class _Load:
    """An adapter on its way into the host's memory, by a thread of its own."""

    def __init__(self, worker: Worker, path: str, revision: str) -> None:
        self._worker = worker
        self._path = path
        self._revision = revision
        self.done = threading.Event()
        self.error: ErrorParts | None = None
        self.others: list[str] = []
        self.packed: list[Any] = []

    def run(self) -> None:
        """Read it."""
        try:
            with torch.inference_mode():
                self.packed, self.others = self._worker.read(self._path, self._revision)
        except EngineError as error:
            self.error = error.parts
        except Exception as error:
            self.error = refusal(self._path, f"{type(error).__name__}: {error}").parts
        finally:
            self.done.set()
