"""The half of LoRA adapters in a worker: its layers, what is loaded, and whose tokens are whose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from engine.interfaces.adapter import AdapterWorker
from engine.interfaces.quantization import LayerShape
from engine.types.errors import ContractError, EngineError, UnsupportedModelError
from engine.types.parallel import Shard
from engine.types.plan import ErrorParts, NewSlot, StepPlan
from engine_lora.card import LoRAOptions
from engine_lora.experts import AdaptedExperts, Tokens
from engine_lora.peft_folder import read_folder, refusal
from engine_lora.weights import Model, Pair, Stack, parts_of, read_weights

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

Pairs = list[Pair | None]
"""Of each part of a layer A and B, or None."""


class Layer:
    """Implements `engine.interfaces.model.AdapterLayer`, of linear layers."""

    def __init__(self, worker: Worker, memory: Any) -> None:
        self._worker = worker
        self._memory = memory
        self._add = worker.ops.lora_add

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See there."""
        worker = self._worker
        worker.check(len(x))
        return cast(torch.Tensor, self._add(x, y, self._memory, *worker.of_step))


class HeadLayer(Layer):
    """The same of the head, whose rows are those tokens that draw, or others that are told."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See there."""
        rows = self._worker.of_head
        return y if rows is None else cast(torch.Tensor, self._add(x, y, self._memory, *rows))


class EmbeddingLayer:
    """The same of an embedding, whose A is looked up. What is found of all places stands side by side, as the inputs of
    a linear layer of which each adapter reads its own.

    Args:
        memory: of that layer: places * max_rank inputs.
        rows: of the vocabulary, what this rank has.
    """

    def __init__(
        self, worker: Worker, memory: Any, max_rank: int, places: int, rows: Shard, dtype: torch.dtype
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._ops = worker.ops
        self._rows = rows
        self._max_rank = max_rank
        self._table = torch.zeros(rows.length, places * max_rank, dtype=dtype, device=worker.device)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """ids [T] and their vectors [T, O]: see there."""
        worker, ops, rows = self._worker, self._ops, self._rows
        if worker.of_head is None:
            return y
        worker.check(len(x))
        whole = rows.length == rows.total
        found = ops.embedding(x, self._table) if whole else ops.embedding_part(x, self._table, rows.start)
        return cast(torch.Tensor, ops.lora_add(found, y, self._memory, *worker.of_step))

    def place(self, place: int, pairs: Pairs | None) -> None:
        """Put A [r, rows] and B [O, r] into a place, or None."""
        pair, packed = None if pairs is None else pairs[0], None
        if pair is not None:
            (a, b), first = pair, (place - 1) * self._max_rank
            self._table[:, first : first + len(a)] = a.T
            own = torch.zeros(len(a), self._table.shape[1], dtype=b.dtype)
            own[:, first : first + len(a)].fill_diagonal_(1.0)
            packed = self._ops.lora_pack(self._memory, [(own, b)])
        self._ops.lora_place(self._memory, place, packed)


class Site(NamedTuple):
    """What is done with a layer's part of an adapter: `pack` on the host, beside steps, and `place` between them."""

    pack: Callable[[Pairs], Any]
    place: Callable[[int, Any], None]


class Worker(AdapterWorker):
    """See `engine.interfaces.adapter.AdapterWorker`.

    Attributes:
        num_tokens: of the step that comes next, padding included; None before the first.
        of_step: int32 [max_num_batched_tokens] and int32 [max_loras + 1], whose tokens are whose.
        of_head: the same of the head's rows; None outside of `at`.
    """

    def __init__(self, context: WorkerContext) -> None:
        assert context.ops is not None and context.platform is not None and context.dtype is not None
        options: LoRAOptions = context.options
        start = context.start
        self.ops: Any = context.ops
        self.device = context.device
        self.num_tokens: int | None = None
        self.of_head: Tokens | None = None
        self._platform = context.platform
        self._dtype = context.dtype
        self._max_loras = options.max_loras
        self._max_rank = options.max_lora_rank
        self._experts = options.experts
        self._most_tokens = start.max_num_batched_tokens
        self._step_buffer, self.of_step = self._buffer()
        self._head_buffer, self._of_drawn = self._buffer()
        self._place_of_slot = np.zeros(start.max_num_seqs + 1, np.int32)
        self._place_of_token = np.zeros(0, np.int32)  # of the step; empty where none has an adapter
        self._model = Model(start.files.weights)
        self._sites: list[Site] = []
        self._loads: dict[str, _Load] = {}
        self._lies: dict[int, list[Any]] = {}

    def _buffer(self) -> tuple[torch.Tensor, Tokens]:
        """Memory whose address stays: steps are captured on it."""
        most = self._most_tokens
        buffer = torch.zeros(self._max_loras + 1 + most, dtype=torch.int32, device=self.device)
        starts, tokens = buffer.split([self._max_loras + 1, most])
        return buffer, Tokens(tokens, starts)

    # -- the model's layers --------------------------------------------------------------------------------------------
    def layer(self, shape: LayerShape) -> Layer | EmbeddingLayer | None:
        """None for what is neither linear, a head nor an embedding; for experts see `experts`."""
        if shape.kind == "embedding":
            rank, (outputs,) = self._max_rank, (part.length for part in shape.outputs)
            memory = self._memory(self._max_loras * rank, [outputs], self._max_loras)
            found = EmbeddingLayer(self, memory, rank, self._max_loras, shape.inputs, self._dtype)
            self._add_layer(shape, Site(_with_all, found.place))
            return found
        if shape.kind not in ("linear", "head"):
            return None
        parts = parts_of(shape)
        memory = self._memory(shape.inputs.length, [len(part.rows) for part in parts], self._max_loras)
        self._add_layer(shape, Site(partial(self.ops.lora_pack, memory), partial(self.ops.lora_place, memory)))
        return HeadLayer(self, memory) if shape.kind == "head" else Layer(self, memory)

    def experts(
        self, first: Sequence[LayerShape], last: Sequence[LayerShape], stacked: str, whole: bool
    ) -> AdaptedExperts | None:
        """See `engine_kit.routing.ExpertAdapters`; None without option `experts`."""
        if not self._experts:
            return None
        if not whole:
            found = "they are divided over ranks, and which of another's tokens have an adapter is not told"
            remedy = "start with --adapter.experts false, or with --experts local"
            raise UnsupportedModelError(f"adapt the experts {first[0].names[0]}", found, remedy)
        self.captured = False
        count, memories = len(first), list[Any]()
        for shapes in (first, last):
            outputs = [len(part.rows) for part in parts_of(shapes[0])]
            memory = self._memory(shapes[0].inputs.length, outputs, self._max_loras * count)
            layers = range(len(self._sites), len(self._sites) + count)
            for expert, shape in enumerate(shapes):
                place = partial(_place_expert, partial(self.ops.lora_place, memory), count, expert)
                self._add_layer(shape, Site(partial(self.ops.lora_pack, memory), place))
            self._model.stacks.append(_stack(shapes, stacked, bool(memories), layers))
            memories.append(memory)
        groups = torch.arange(self._max_loras * count + 1, device=self.device)
        return AdaptedExperts((memories[0], memories[1]), count, groups, self._places_of, self.ops.lora_add)

    def _memory(self, inputs: int, outputs: Sequence[int], places: int) -> Any:
        return self.ops.lora_memory(inputs, outputs, places, self._max_rank, self._dtype)

    def _add_layer(self, shape: LayerShape, site: Site) -> None:
        self._model.layers.append(parts_of(shape))
        self._sites.append(site)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def enter(self, new: NewSlot) -> None:
        """Its tokens are those of the adapter in this place."""
        self._place_of_slot[new.slot] = new.adapter

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        """Write down whose tokens are whose, and whose those that draw: nothing of the model's state."""
        self.num_tokens = num_tokens
        places = self._place_of_slot[plan.slot_of_row]
        if not places.any():
            if len(self._place_of_token):
                self.of_step.starts.zero_()
                self._of_drawn.starts.zero_()
                self._place_of_token = self._place_of_token[:0]
            return {}
        counts = plan.num_tokens
        rows = np.repeat(np.arange(plan.num_rows), counts)
        first = np.cumsum(counts) - counts
        token = np.arange(len(rows))
        if tokens_per_row:
            begins = np.arange(plan.num_rows) * tokens_per_row
            token += (begins - first)[rows]
            first = begins
        of_token = np.zeros(num_tokens, np.int32)
        of_token[token] = places[rows]
        self._place_of_token = of_token
        self._send(self._step_buffer, of_token)
        self._send(self._head_buffer, of_token if tokens_per_row == 1 else of_token[_drawn(plan, first)])
        return {}

    def _send(self, buffer: torch.Tensor, places: np.ndarray) -> None:
        """Sort rows of these places, of which 0 is none."""
        order = np.argsort(places, kind="stable")
        starts = np.bincount(places, minlength=self._max_loras + 1).cumsum()
        sent = np.concatenate([starts - starts[0], order[starts[0] :]]).astype(np.int32)
        self._platform.to_device(torch.from_numpy(sent), buffer[: len(sent)])

    @contextmanager
    def at(self, tokens: np.ndarray | None = None) -> Iterator[None]:
        """See there."""
        self.of_head = self._of_drawn
        if tokens is not None and len(self._place_of_token):
            buffer, self.of_head = self._buffer()
            self._send(buffer, self._place_of_token[tokens])
        try:
            yield
        finally:
            self.of_head = None

    def check(self, num_tokens: int) -> None:
        """Raise ContractError where a layer computes others than the step's tokens."""
        if self.num_tokens is not None and num_tokens != self.num_tokens:
            raise ContractError(
                f"adapt a layer of {num_tokens} tokens",
                f"the step has {self.num_tokens}, and which of them these are is not told",
                "start without --adapter, or without what computes some tokens of a step alone",
                point="model",
            )

    def _places_of(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """int64 [n], of the step's tokens int64 [n]; None where nobody has an adapter."""
        if not len(self._place_of_token):
            return None
        return torch.from_numpy(self._place_of_token).to(tokens.device, torch.int64)[tokens]

    # -- what the half in the core tells -------------------------------------------------------------------------------
    def told(self, what: str, *args: Any) -> Any:
        """`load`, `loaded`, `place` or `drop`."""
        known: dict[str, Any] = {"load": self.load, "loaded": self.loaded, "place": self.place, "drop": self.drop}
        return known[what](*args)

    def load(self, identity: str, path: str, revision: str) -> None:
        """Begin to read an adapter into the host's memory."""
        self._loads[identity] = load = _Load(self, path, revision)
        threading.Thread(target=load.run, name="lora-load", daemon=True).start()

    def loaded(self, identities: Sequence[str]) -> list[tuple[bool, ErrorParts | None, list[str]]]:
        """Of each whether it has been read; the error where it cannot be; its modules that are no layers of this
        worker."""
        loads = [self._loads[identity] for identity in identities]
        return [(load.done.is_set(), load.error, load.others) for load in loads]

    def place(self, place: int, identity: str | None) -> None:
        """Put an adapter that has been read into a place of the device; None: nothing is there from now on."""
        there = self._lies.pop(place, None) or [None] * len(self._sites)
        packed = [None] * len(self._sites) if identity is None else self._loads[identity].packed
        with torch.inference_mode():
            for site, before, matrices in zip(self._sites, there, packed, strict=True):
                if before is not None or matrices is not None:
                    site.place(place, matrices)
        if identity is not None:
            self._lies[place] = packed

    def drop(self, identity: str) -> None:
        """Forget what is in the host's memory of an adapter; if it is being read, when it has been."""
        self._loads.pop(identity, None)

    def read(self, path: str, revision: str) -> tuple[list[Any], list[str]]:
        """Each layer's matrices, packed, None where there are none, and the modules that are none of this worker's.
        Raises InvalidRequestError."""
        folder = read_folder(path)
        if folder.revision != revision:
            raise refusal(path, "its files have changed since it was named", "name it again")
        found = read_weights(folder, self._model, self._max_rank)
        for parts, pairs in zip(self._model.layers, found.layers, strict=True):
            for part, pair in zip(parts, pairs, strict=True):
                if pair is not None and not all(matrix.to(self._dtype).isfinite().all() for matrix in pair):
                    # Matrices of several adapters are multiplied at once by zeros, which would make NaN of these.
                    problem = f"{part.name}: some of its numbers are infinite or NaN in {self._dtype}"
                    raise refusal(path, problem, "train it again, or start the engine with a wider dtype")
        packed = [
            site.pack(pairs) if any(pair is not None for pair in pairs) else None
            for site, pairs in zip(self._sites, found.layers, strict=True)
        ]
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


def _drawn(plan: StepPlan, first: np.ndarray) -> np.ndarray:
    """int64 [n], the tokens that draw: of each row that does the last one, and before it those that drafts follow.

    first: int64 [R], of each row.
    """
    rows = np.flatnonzero(plan.samples)
    counts = np.ones_like(rows) if plan.num_drafts is None else 1 + plan.num_drafts[rows]
    row = np.repeat(rows, counts)
    ahead = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(row))
    return cast(np.ndarray, first[row] + plan.num_tokens[row] - 1 - ahead)


def _with_all(pairs: Pairs) -> Pairs:
    """As they are: they are packed when their place is known."""
    return pairs


def _place_expert(put: Callable[[int, Any], None], count: int, expert: int, place: int, packed: Any) -> None:
    """Into the place of an adapter's expert."""
    put((place - 1) * count + expert + 1, packed)


def _stack(shapes: Sequence[LayerShape], stacked: str, last: bool, layers: Sequence[int]) -> Stack:
    name = shapes[0].names[0]
    turns = len(shapes[0].outputs) if stacked == "turned" else 1
    if stacked == "rows":
        return Stack(name, True, last, layers)
    module = name.rpartition(".")[0]
    return Stack(module if stacked else module.rpartition(".")[0], False, last, layers, turns)
