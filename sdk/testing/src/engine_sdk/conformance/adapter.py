"""The suite of point `adapter`: both halves at work around some layers, beside weights plus products in float64."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.interfaces.adapter import AdapterCard, AdapterCore, AdapterNeed, AdapterWorker
from engine.interfaces.context import Answers
from engine.interfaces.model import ModelContext
from engine.interfaces.quantization import LayerShape
from engine.modeling import Module, load_weights
from engine.modeling.layers import Embedding, LMHead
from engine.modeling.linear import Linear, MergedColumnLinear, QKVLinear, RowParallelLinear
from engine.types.errors import InvalidRequestError, rebuild_error
from engine.types.params import SamplingParams
from engine.types.plan import NewSlot, StepPlan
from engine.types.request import Adapter
from engine_sdk.conformance.base import Conformance, check_methods, methods_of, not_served
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.core_contexts import core_context
from engine_sdk.conformance.model.operations import NamedOperations, defined_operations
from engine_sdk.conformance.timing import median_seconds

HALVES = {"core": "AdapterCore", "worker": "AdapterWorker"}
SIZES = (1, 2)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 8, 12, 4, 2, 4, 11
SHAPES: Mapping[str, tuple[int, int]] = {
    "a.q_proj": (HEADS * HEAD, HIDDEN),
    "a.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "a.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "m.gate": (INNER, HIDDEN),
    "m.up": (INNER, HIDDEN),
    "m.both": (2 * INNER, HIDDEN),
    "m.down": (HIDDEN, INNER),
}
"""Outputs and inputs of the model's layers: q, k and v in one matrix with their rows in another order, gate and up in
one matrix, two parts that the checkpoint has as one, and one whose inputs are divided over ranks."""
ENDS: Mapping[str, tuple[int, int]] = {"e": (HIDDEN, VOCAB), "h": (VOCAB, HIDDEN)}
"""The same of its embedding, whose inputs are ids, and of its head."""
NEAR = 1e-9
SECONDS = 10.0
"""The longest that an adapter may take to be loaded."""

Products = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""By layer B [outputs, rank] and A [rank, inputs]: what is added to its weight is B @ A."""

each_size = pytest.mark.parametrize("size", SIZES)


class AdapterConformance(Conformance):
    """Each token gets what its own adapter adds, nobody waits without a reason, and nobody for ever.

    Attributes:
        options: such that the device has room for `room` adapters, and for ranks up to 8.
    """

    point = "adapter"
    protocol = "AdapterCore"
    room: ClassVar[int] = 2

    @classmethod
    def write(cls, path: Path, products: Products) -> None:
        """Write an adapter in the driver's form: PEFT's folder, where this is not overridden."""
        ranks = {layer: a.shape[0] for layer, (_, a) in products.items()}
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "bias": "none", "target_modules": sorted(products)}
        config |= {"rank_pattern": ranks, "alpha_pattern": ranks}
        (path / "adapter_config.json").write_text(json.dumps(config))
        tensors: dict[str, np.ndarray] = {}
        for layer, (b, a) in products.items():
            ends = ("lora_embedding_A", "lora_embedding_B") if layer == "e" else ("lora_A.weight", "lora_B.weight")
            tensors |= {f"base_model.model.{layer}.{end}": x for end, x in zip(ends, (a, b), strict=True)}
        save_file({key: np.ascontiguousarray(x) for key, x in tensors.items()}, path / "adapter_model.safetensors")

    @classmethod
    def written(cls, folder: Path, name: str, products: Products) -> Adapter:
        """An adapter that lies in a folder."""
        path = folder / name
        path.mkdir(exist_ok=True)
        cls.write(path, products)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        revision = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
        adapter = Adapter(name=name, path=str(path), revision=cls.revision_of(path) or revision)
        MADE[adapter.identity] = products
        return adapter

    @classmethod
    def revision_of(cls, path: Path) -> str:
        """As the driver's frontends make it; "": they leave it to others."""
        return ""

    @classmethod
    def needs(cls) -> Sequence[AdapterNeed]:
        return [AdapterNeed(dtype=dtype, device=cls.device) for dtype in ("float64", "float32", "bfloat16")]

    @classmethod
    def impossible(cls) -> Sequence[AdapterNeed]:
        return [AdapterNeed(dtype="float32", device=cls.device, framework="abacus")]

    @classmethod
    def body(cls) -> type:
        """The half in the core; see `half`."""
        return cls.half("core")

    @classmethod
    def half(cls, name: str) -> type:
        """The class of one half: "core" or "worker"."""
        return cls.subject().body(name)

    def test_body_has_the_interface(self) -> None:
        """Of both halves."""
        module = importlib.import_module("engine.interfaces.adapter")
        for half, protocol in HALVES.items():
            check_methods(self.half(half), getattr(module, protocol), methods_of(getattr(module, protocol)))

    @pytest.fixture
    def engine(self) -> Iterator[Callable[..., Engine]]:
        """Makes engines of so many ranks."""
        self.require(AdapterNeed(dtype="float64", device=self.device))
        made: list[Engine] = []

        def make(size: int = 1) -> Engine:
            made.append(Engine(self, size))
            return made[-1]

        yield make
        for one in made:
            one.core.shutdown()

    # -- what is added -------------------------------------------------------------------------------------------------
    @each_size
    def test_as_weights_with_products(self, engine: Callable[..., Engine], size: int, tmp_path: Path) -> None:
        """One adapter on all layers, and one on some: of ranks of their own, over one rank and several."""
        served = engine(size)
        for seed, layers in enumerate(([*SHAPES], ["a.k_proj", "m.up", "m.down"])):
            adapter = self.written(tmp_path, f"one{seed}", products(seed, layers))
            request = served.entered(adapter)
            served.check([(request, 5)])
            served.end(request)

    @each_size
    def test_many_in_one_step(self, engine: Callable[..., Engine], size: int, tmp_path: Path) -> None:
        """Rows of several adapters and of none, one token and many, in any order: each as alone."""
        served = engine(size)
        adapters = [self.written(tmp_path, f"many{i}", products(i)) for i in range(self.room)]
        rows = [served.entered(adapter) for adapter in (None, *reversed(adapters), *adapters, None)]
        served.check([(request, count) for request, count in zip(rows, (3, 1, 4, 1, 2, 5), strict=False)])
        served.check([(request, 1) for request in reversed(rows)])

    def test_who_has_none_stays_as_it_is(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """In its bits: beside others, in a step by itself, and in a slot that an adapter has left."""
        served = engine()
        request, plain = served.entered(self.written(tmp_path, "beside", products(1))), served.entered(None)
        for rows in ([(plain, 4)], [(request, 2), (plain, 4)], [(plain, 4)]):
            x, found = served.step(rows)[0]
            expected = served.layers(x)
            mine = slice(len(x) - 4, len(x))
            assert all(torch.equal(a[mine], b[mine]) for a, b in zip(found, expected, strict=True)), rows
        slot = request.slot
        served.end(request)
        served.check([(served.entered(None, slot), 3)])

    def test_rows_that_are_padded(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """A step of so many tokens a row, of which some pad it, and of more rows and tokens than the plan has."""
        served = engine()
        rows = [(served.entered(self.written(tmp_path, f"padded{i}", products(i))), 1 + i) for i in range(self.room)]
        served.check([*rows, (served.entered(None), 2)], tokens_per_row=4, padding=5)
        served.check(rows, padding=3)

    @each_size
    def test_both_ends(self, engine: Callable[..., Engine], size: int, tmp_path: Path) -> None:
        """An embedding by its ids and a head by the rows that draw, with drafts before them too, or by others that are
        told; neither for whoever calls them outside of a step."""
        served = engine(size)
        if not all(rank.ends_are_adapted for rank in served.ranks):
            not_served("it adapts neither embeddings nor heads")
        adapters = [self.written(tmp_path, f"ends{i}", products(i, [*ENDS])) for i in range(self.room)]
        rows = [served.entered(adapter) for adapter in (None, *adapters)]
        for counts, drafts in (((3, 1, 4), None), ((1, 1, 1), None), ((2, 4, 3), (0, 3, 2))):
            served.check_ends(list(zip(rows, counts, strict=False)), drafts)

    # -- who gets a place ----------------------------------------------------------------------------------------------
    def test_places_change_hands(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """One more than there is room for waits until a place is free, and then gets what its own adapter adds; those
        that come back are themselves again."""
        served = engine()
        adapters = [self.written(tmp_path, f"hand{i}", products(i)) for i in range(self.room + 1)]
        first = [served.entered(adapter) for adapter in adapters[:-1]]
        last = served.asked(adapters[-1])
        time.sleep(0.05)
        assert served.through() == [], "a request goes through, and all places are taken"
        served.check([(request, 2) for request in first])
        served.end(first[0])
        served.enter(served.wait_for(last))
        served.check([(last, 2), *((request, 1) for request in first[1:])])
        for request in (last, *first[1:]):
            served.end(request)
        for adapter in adapters:
            request = served.entered(adapter)
            served.check([(request, 3)])
            served.end(request)

    def test_others_go_on(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """While one waits for a place, or for its files to be read, those pass that need nothing, or what is there."""
        served = engine()
        adapters = [self.written(tmp_path, f"on{i}", products(i)) for i in range(self.room + 1)]
        running = [served.entered(adapter) for adapter in adapters[:-1]]
        waiting = served.asked(adapters[-1])
        assert not served.begins(None) and not served.begins(adapters[0]), "it waits, and nothing is missing"
        served.check([(request, 1) for request in running])
        served.core.forget(waiting)
        served.core.ended(waiting)

    def test_nobody_waits_for_ever(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """Whoever waits gets a place in the end, however many come for the adapters that have one."""
        served = engine()
        adapters = [self.written(tmp_path, f"ever{i}", products(i)) for i in range(self.room + 1)]
        streams = {adapter.identity: [served.entered(adapter)] for adapter in adapters[:-1]}
        last = served.asked(adapters[-1])
        deadline = time.monotonic() + SECONDS
        while not last.place:
            assert time.monotonic() < deadline, "others come and go, and it waits for ever"
            for adapter in adapters[:-1]:  # the next of each comes before the last one ends
                request, stream = AdaptedRequest(adapter), streams[adapter.identity]
                if not served.core.begin(request, lambda: None):
                    stream.append(request)
                if stream:
                    served.core.ended(stream.pop(0))
            for request in served.through():
                if request is not last:
                    streams[request.identity].append(request)

    def test_any_order(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """Requests come, go and give up in any order: who has a place shares it with its adapter's requests alone, and
        whoever stays gets through."""
        adapters = [self.written(tmp_path, f"any{i}", products(i, ["m.up"])) for i in range(self.room + 2)]
        moves = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), max_size=40)

        @self.hypothesis_settings(30)
        @given(moves)
        def holds(moves: Sequence[tuple[int, int]]) -> None:
            served = engine()
            running: list[AdaptedRequest] = []
            waiting: list[AdaptedRequest] = []
            for move, number in moves:
                if move == 0:
                    request = AdaptedRequest(adapters[number % len(adapters)])
                    (waiting if served.core.begin(request, lambda: None) else running).append(request)
                elif move == 1 and running:
                    served.core.ended(running.pop(number % len(running)))
                elif move == 2 and waiting:
                    request = waiting.pop(number % len(waiting))
                    served.core.forget(request)
                    served.core.ended(request)
                for request in served.through():
                    waiting.remove(request)
                    running.append(request)
                self._check_places(running, waiting)
            deadline = time.monotonic() + SECONDS
            while waiting:
                assert time.monotonic() < deadline, f"{len(waiting)} requests wait for ever"
                if running:
                    served.core.ended(running.pop(0))
                for request in served.through():
                    waiting.remove(request)
                    running.append(request)
                self._check_places(running, waiting)

        holds()

    def _check_places(self, running: Sequence[AdaptedRequest], waiting: Sequence[AdaptedRequest]) -> None:
        of_place: dict[int, str] = {}
        for request in running:
            assert 1 <= request.place <= self.room, f"place {request.place} of {self.room}"
            owner = of_place.setdefault(request.place, request.identity)
            assert owner == request.identity, "two adapters have one place"
        assert len(of_place) == len({request.identity for request in running}), "an adapter has several places"
        assert not any(request.place for request in waiting), "it waits, and has a place"

    # -- what cannot be loaded -----------------------------------------------------------------------------------------
    def test_what_does_not_fit(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """Layers that the model does not have, and other shapes, are refused by name; whoever waits beside goes on."""
        served = engine()
        good = served.asked(self.written(tmp_path, "good", products(0)))
        foreign = {"m.sideways": products(1, ["m.up"])["m.up"]}
        b, a = products(2, ["m.down"])["m.down"]
        bad = {"m.sideways": foreign, "m.down": {"m.down": (b[:-1], a)}}
        asked = {layer: served.asked(self.written(tmp_path, layer, given)) for layer, given in bad.items()}
        for layer, request in asked.items():
            error = served.error_of(request)
            assert isinstance(error, InvalidRequestError) and layer in str(error), error
            assert not request.place, "it has a place, and cannot be computed"
        served.enter(served.wait_for(good))
        served.check([(good, 2)])

    def test_files_that_are_gone(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """An adapter whose folder is not there when it is loaded: an error, and again each time it is asked for, until
        it is there."""
        served = engine()
        adapter = self.written(tmp_path, "gone", products(0))
        folder, away = Path(adapter.path), Path(f"{adapter.path}.away")
        folder.rename(away)
        for _ in range(2):
            assert isinstance(served.error_of(served.asked(adapter)), InvalidRequestError)
        away.rename(folder)
        served.check([(served.entered(adapter), 2)])

    def test_another_revision(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """The same name with other files is another adapter: both are what they were when they were named."""
        served = engine()
        old = self.written(tmp_path, "new", products(0))
        request = served.entered(old)
        new = self.written(tmp_path, "new", products(1))
        assert new.identity != old.identity, "their keys and values would be taken for each other's"
        served.check([(request, 2), (served.entered(new), 2)])

    # -- what frontends ask --------------------------------------------------------------------------------------------
    def test_loaded_ahead(self, engine: Callable[..., Engine], tmp_path: Path) -> None:
        """By name, before a request comes; whether it is there is told, and why it cannot be."""
        served = engine()
        calls = served.core.calls()
        good = self.written(tmp_path, "ahead", products(0))
        bad = self.written(tmp_path, "never", {"m.sideways": products(1, ["m.up"])["m.up"]})
        for adapter in (good, bad):
            calls["load_adapter"](adapter.name, adapter.path, adapter.revision)
        assert served.state_of(good) is None
        error = served.state_of(bad)
        assert error is not None and "m.sideways" in str(error)
        assert calls["adapter_state"](bad.identity)[1] is None, "an error is told twice"
        request = served.entered(good)
        served.check([(request, 2)])
        assert calls["unload_adapter"](good.identity) is False, "it is unloaded, and a request uses it"
        served.check([(request, 1)])
        served.end(request)
        assert calls["unload_adapter"](good.identity) is True
        served.check([(served.entered(good), 2)])

    @classmethod
    def figure(cls) -> str | None:
        """What a step of 32 tokens takes that two adapters share."""
        if cls.subject().reasons(AdapterNeed(dtype="float64", device=cls.device)):
            return None
        with tempfile.TemporaryDirectory() as folder:
            served = Engine(cls(), 1)
            adapters = [cls.written(Path(folder), f"figure{i}", products(i)) for i in range(2)]
            x, _ = served.step([(served.entered(adapter), 16) for adapter in adapters])[0]
            seconds = median_seconds(lambda: served.ranks[0].layers(x), cls.device)
        return f"32 tokens of two adapters, {len(SHAPES)} small layers: {seconds * 1e6:,.0f} us"


class AdaptedRequest:
    """Implements `engine.interfaces.adapter.Adapted`."""

    _count = 0

    def __init__(self, adapter: Adapter | None) -> None:
        AdaptedRequest._count += 1
        self.request_id = str(AdaptedRequest._count)
        self.adapter = adapter
        self.place = 0
        self.slot = -1

    @property
    def identity(self) -> str:
        """The adapter's; "" for none."""
        return "" if self.adapter is None else self.adapter.identity


class Rank:
    """One rank's half, and the layers that it adapts."""

    def __init__(self, suite: AdapterConformance, rank: int, size: int) -> None:
        context = worker_context(suite.subject(), suite.device, "float64")
        operations = cast("type[AdapterCard]", suite.subject().card).operations
        ops: Any = NamedOperations(context.ops, operations, defined_operations(operations, context))
        self.half: AdapterWorker = suite.half("worker")(replace(context, ops=ops))
        given = SimpleNamespace(
            ops=ops, quantization={}, covers=None, adapters=self.half, dtype=torch.float64,
            device=torch.device(suite.device), tp_rank=rank, tp_size=size, group=_Alone() if size > 1 else None,
        )  # fmt: skip
        self.layers = Layers(cast(ModelContext, given))
        self.device = given.device
        given.adapters = AskedLayers(self.half)
        model = cast(ModelContext, given)
        self.embedding = Embedding(model, VOCAB, HIDDEN, "e")
        self.head = LMHead(model, VOCAB, HIDDEN, "h")
        self.ends_are_adapted = given.adapters.all
        load_weights(self.embedding, [("e.weight", torch.from_numpy(ends()["e"]))])
        load_weights(self.head, [("h.weight", torch.from_numpy(ends()["h"]))])


class AskedLayers:
    """Passes on what layers ask for. `all`: whether each of them got something."""

    def __init__(self, half: AdapterWorker) -> None:
        self._half = half
        self.all = True

    def layer(self, shape: LayerShape) -> Any:
        found = self._half.layer(shape)
        self.all = self.all and found is not None
        return found


class _Alone:
    """A group whose ranks are summed, or put together, by whoever looks at all of them."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return x


class Layers(Module):
    """Of `SHAPES`, each on its own."""

    def __init__(self, context: ModelContext) -> None:
        self.qkv = QKVLinear(context, HIDDEN, HEADS, KV_HEADS, HEAD, "a", interleaved=HEAD)
        self.gate_up = MergedColumnLinear(context, HIDDEN, [INNER, INNER], ["m.gate", "m.up"])
        self.both = MergedColumnLinear(context, HIDDEN, [INNER, INNER], ["m.both"])
        self.down = RowParallelLinear(context, INNER, HIDDEN, "m.down")
        self._inner = self.down.shape.inputs.part
        load_weights(self, ((f"{name}.weight", torch.from_numpy(x)) for name, x in weights().items()))

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [T, INNER] -> of each layer its outputs on this rank; all but the last read the first HIDDEN."""
        narrow = x[:, :HIDDEN].contiguous()
        q, k, v = self.qkv(narrow)
        inner: list[Linear] = [self.gate_up, self.both]
        return [
            q.flatten(1),
            k.flatten(1),
            v.flatten(1),
            *(layer(narrow) for layer in inner),
            self.down(x[:, self._inner]),
        ]


class Engine:
    """The core's half, and those on all ranks, as an engine drives them."""

    def __init__(self, suite: AdapterConformance, size: int) -> None:
        self.ranks = [Rank(suite, rank, size) for rank in range(size)]
        context = replace(core_context(suite.subject()), tell=self._tell)
        self.core: AdapterCore = suite.half("core")(context)
        self._slots = 0
        self._steps = 0
        self._ready: dict[str, Any] = {}

    def _tell(self, *told: Any) -> Answers:
        """The halves in the workers, whose answers are there the second time that they are asked for."""
        answers, asked = [rank.half.told(*told) for rank in self.ranks], iter((None,))
        return lambda: next(asked, answers)

    # -- requests ------------------------------------------------------------------------------------------------------
    def begins(self, adapter: Adapter | None) -> bool:
        """Whether a request would have to wait; it ends at once."""
        request = AdaptedRequest(adapter)
        waits = self.core.begin(request, lambda: None)
        if waits:
            self.core.forget(request)
        self.core.ended(request)
        return waits

    def asked(self, adapter: Adapter) -> AdaptedRequest:
        """A request that has come, and waits."""
        request = AdaptedRequest(adapter)
        assert self.core.begin(request, lambda: None), "it goes through, and its adapter has no place"
        return request

    def through(self) -> list[AdaptedRequest]:
        """Whoever waits no longer, without an error."""
        found = [(cast(AdaptedRequest, request), error) for request, error in self.core.ready()]
        assert all(error is None for _, error in found), found
        return [request for request, _ in found]

    def wait_for(self, request: AdaptedRequest) -> AdaptedRequest:
        """Until it is through."""
        error = self.error_of(request)
        assert error is None, error
        return request

    def error_of(self, request: AdaptedRequest) -> Any:
        """Until it waits no longer: its error, None where there is none."""
        deadline = time.monotonic() + SECONDS
        while request.request_id not in self._ready:
            assert time.monotonic() < deadline, f"it waits for {SECONDS:g} s"
            self._ready |= {one.request_id: error for one, error in self.core.ready()}
            time.sleep(0.001)
        return self._ready.pop(request.request_id)

    def state_of(self, adapter: Adapter) -> Any:
        """Until it is loaded: the error, None where there is none."""
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline, f"it is not loaded in {SECONDS:g} s"
            loaded, error = self.core.calls()["adapter_state"](adapter.identity)
            if loaded or error is not None:
                return None if error is None else rebuild_error(tuple(error))
            time.sleep(0.001)

    def entered(self, adapter: Adapter | None, slot: int | None = None) -> AdaptedRequest:
        """A request that has waited as long as it had to, in a slot."""
        request = AdaptedRequest(adapter)
        if self.core.begin(request, lambda: None):
            self.wait_for(request)
        return self.enter(request, slot)

    def enter(self, request: AdaptedRequest, slot: int | None = None) -> AdaptedRequest:
        """It enters a slot: a new one, or that."""
        request.slot = self._slots if slot is None else slot
        self._slots += slot is None
        empty = np.empty(0, np.int32)
        new = NewSlot(
            slot=request.slot, request_id=request.request_id, token_ids=empty, num_prompt_tokens=0,
            params=SamplingParams(), stop_token_ids=empty, adapter=request.place,
        )  # fmt: skip
        for rank in self.ranks:
            rank.half.enter(new)
        return request

    def end(self, request: AdaptedRequest) -> None:
        """It has ended."""
        self.core.ended(request)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def step(
        self,
        rows: Sequence[tuple[AdaptedRequest, int]],
        tokens_per_row: int = 0,
        padding: int = 0,
        drafts: Sequence[int] | None = None,
    ) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Of each rank inputs and outputs of a step with these rows, and so many tokens of padding behind them."""
        self._steps += 1
        counts = np.array([count for _, count in rows], np.int32)
        plan = StepPlan(
            step_id=self._steps, slot_of_row=np.array([request.slot for request, _ in rows], np.int32),
            num_computed=np.zeros_like(counts), num_tokens=counts, samples=np.ones(len(rows), bool),
            num_decodes=int(counts.max() == 1) * len(rows), new_slots=[], new_blocks=[],
            num_drafts=None if drafts is None else np.array(drafts, np.int32),
        )  # fmt: skip
        total = (tokens_per_row * len(rows) or int(counts.sum())) + padding
        x = torch.from_numpy(np.random.default_rng(self._steps).normal(size=(total, INNER)))
        found = []
        for rank in self.ranks:
            rank.half.inputs(plan, total, tokens_per_row)
            found.append((x.to(rank.device), rank.layers(x.to(rank.device))))
        return found

    def check_ends(self, rows: Sequence[tuple[AdaptedRequest, int]], drafts: Sequence[int] | None) -> None:
        """A step's vectors and logits are what each token's adapter gives. drafts: of each row, at its end."""
        self.step(rows, drafts=drafts)
        draw = np.random.default_rng(self._steps)
        total = sum(count for _, count in rows)
        ids = torch.from_numpy(draw.integers(0, VOCAB, total))
        hidden = torch.from_numpy(draw.normal(size=(total, HIDDEN)))
        of_token = [request for request, count in rows for _ in range(count)]
        ends_of = np.cumsum([count for _, count in rows])
        ahead = [0] * len(rows) if drafts is None else drafts
        drawn = [token for end, more in zip(ends_of, ahead, strict=True) for token in range(end - 1 - more, end)]
        told = [token for token in range(total) if token % 2]
        for at, tokens in ((None, drawn), (np.array(told), told)):
            vectors, logits = [], []
            for rank in self.ranks:
                with rank.half.at(at):
                    vectors.append(rank.embedding(ids.to(rank.device)).cpu().numpy())
                    logits.append(rank.head(hidden[tokens].to(rank.device)).cpu().numpy())
            wanted = [end_of(request)["e"][:, one] for request, one in zip(of_token, ids.tolist(), strict=True)]
            assert np.abs(np.sum(vectors, axis=0) - np.stack(wanted)).max() < NEAR, "vectors of another adapter"
            wanted = [end_of(of_token[token])["h"] @ hidden[token].numpy() for token in tokens]
            assert np.abs(np.concatenate(logits, axis=1) - np.stack(wanted)).max() < NEAR, "logits of another adapter"
        for rank in self.ranks if len(self.ranks) == 1 else ():
            outside, plain = rank.embedding(ids.to(rank.device)).cpu().numpy(), ends()["e"][ids.numpy()]
            assert np.array_equal(outside, plain), "who calls an embedding outside of a step gets an adapter"
            outside = rank.head(hidden[drawn].to(rank.device)).cpu().numpy()
            assert np.abs(outside - hidden[drawn].numpy() @ ends()["h"].T).max() < NEAR, "the same of a head"

    def layers(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What the layers of the first rank give where nobody has an adapter."""
        rank = self.ranks[0]
        empty = np.empty(0, np.int32)
        plan = StepPlan(
            step_id=0, slot_of_row=empty, num_computed=empty, num_tokens=empty, samples=np.empty(0, bool),
            num_decodes=0, new_slots=[], new_blocks=[],
        )  # fmt: skip
        rank.half.inputs(plan, len(x), 0)
        return rank.layers(x)

    def check(self, rows: Sequence[tuple[AdaptedRequest, int]], tokens_per_row: int = 0, padding: int = 0) -> None:
        """A step gives each token what its adapter's weights give."""
        of_ranks = self.step(rows, tokens_per_row, padding)
        found = whole([outputs for _, outputs in of_ranks], len(self.ranks))
        x, begin = of_ranks[0][0].cpu().numpy(), 0
        for request, count in rows:
            mine = x[begin : begin + count]
            changes = {} if request.adapter is None else MADE[request.adapter.identity]
            expected = outputs_of(mine, changes)
            for layer, out in found.items():
                got = out[begin : begin + count]
                far = np.abs(got - expected[layer]).max(initial=0.0)
                assert far <= NEAR * (1 + np.abs(expected[layer]).max(initial=0.0)), f"{layer} is {far} away"
            begin += tokens_per_row or count


# -- the oracle --------------------------------------------------------------------------------------------------------
MADE: dict[str, Products] = {}
"""What was written, by the adapters' identities."""


def products(seed: int, layers: Sequence[str] | None = None) -> Products:
    """Of some layers, or all, of ranks from 1 to 8: the same each time."""
    found = {}
    for index, layer in enumerate(SHAPES if layers is None else layers):
        draw = np.random.default_rng((seed, index))
        outputs, inputs = {**SHAPES, **ENDS}[layer]
        rank = 1 + (seed * 3 + index * 5) % 8
        found[layer] = (draw.normal(size=(outputs, rank)), draw.normal(size=(rank, inputs)))
    return found


def weights() -> dict[str, np.ndarray]:
    """The model's."""
    draw = np.random.default_rng(7)
    return {name: draw.normal(size=shape) for name, shape in SHAPES.items()}


def ends() -> dict[str, np.ndarray]:
    """The same of its ends, [VOCAB, HIDDEN] each."""
    draw = np.random.default_rng(8)
    return {name: draw.normal(size=(VOCAB, HIDDEN)) for name in ENDS}


def end_of(request: AdaptedRequest) -> dict[str, np.ndarray]:
    """The ends, with the products of a request's adapter: "e" [HIDDEN, VOCAB] and "h" [VOCAB, HIDDEN]."""
    own, changes = ends(), {} if request.adapter is None else MADE[request.adapter.identity]
    plain = {"e": own["e"].T, "h": own["h"]}
    return {name: matrix + (changes[name][0] @ changes[name][1] if changes else 0.0) for name, matrix in plain.items()}


def outputs_of(x: np.ndarray, changes: Products) -> dict[str, np.ndarray]:
    """Of each layer (W + B A) x, its rows in the checkpoint's order."""
    found = {}
    for name, weight in weights().items():
        b, a = changes.get(name, (np.zeros((len(weight), 1)), np.zeros((1, weight.shape[1]))))
        found[name] = x[:, : weight.shape[1]] @ (weight + b @ a).T
    return found


def whole(of_ranks: Sequence[Sequence[torch.Tensor]], size: int) -> dict[str, np.ndarray]:
    """What `Layers` gives on all ranks, put together, by layer, its rows in the checkpoint's order."""
    columns = [[out.cpu().numpy() for out in outputs] for outputs in zip(*of_ranks, strict=True)]
    q, k, v, gate_up, both, down = columns
    found = {"a.q_proj": _turned_back(q), "a.k_proj": _turned_back(k), "a.v_proj": np.concatenate(v, axis=1)}
    inner = INNER // size
    for index, name in enumerate(("m.gate", "m.up")):
        found[name] = np.concatenate([out[:, index * inner : (index + 1) * inner] for out in gate_up], axis=1)
    halves = [np.concatenate([out[:, i * inner : (i + 1) * inner] for out in both], axis=1) for i in range(2)]
    return found | {"m.both": np.concatenate(halves, axis=1), "m.down": np.sum(down, axis=0)}


def _turned_back(of_ranks: Sequence[np.ndarray]) -> np.ndarray:
    """Heads whose rotary pairs were put into halves, with the pairs as neighbours again."""
    joined = np.concatenate(of_ranks, axis=1)
    heads = joined.reshape(len(joined), -1, 2, HEAD // 2)
    return heads.swapaxes(2, 3).reshape(joined.shape)
