"""Drivers of adapters with one planted fault each, in the place of one half of engine-lora."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from mutant_suites import suites_of

from engine.interfaces.adapter import Adapted
from engine.interfaces.quantization import LayerShape
from engine.types.errors import EngineError
from engine.types.parallel import Shard
from engine.types.plan import NewSlot, StepPlan
from engine.types.request import Adapter
from engine_lora import LoRARequest
from engine_lora.places import Known, Places
from engine_lora.worker import HeadLayer, Layer, Worker
from engine_sdk.conformance import AdapterConformance


# -- the half in a worker ----------------------------------------------------------------------------------------------
class AnotherRowsAdapter(Worker):
    """the rows' adapters are those of the rows before them"""

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        kept, slots = self._place_of_slot.copy(), plan.slot_of_row
        self._place_of_slot[slots] = np.roll(kept[slots], 1)
        found = super().inputs(plan, num_tokens, tokens_per_row)
        self._place_of_slot = kept
        return found


class FirstTokensAlone(Worker):
    """of each row only the first token is adapted"""

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        super().inputs(plan, num_tokens, tokens_per_row)
        if not len(self._place_of_token):
            return {}
        of_all, ends = self.of_step
        first = set((np.cumsum(plan.num_tokens) - plan.num_tokens).tolist())
        kept = [[t for t in of_all[a:b].tolist() if t in first] for a, b in itertools.pairwise(ends.tolist())]
        ends.copy_(torch.tensor([0, *np.cumsum([len(of_place) for of_place in kept])]))
        tokens = torch.tensor([token for of_place in kept for token in of_place], dtype=torch.int32)
        of_all[: len(tokens)] = tokens
        return {}


class LeavesAnAdapterBehind(Worker):
    """a step without adapters keeps the tokens of the one before"""

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        if not self._place_of_slot[plan.slot_of_row].any():
            self.num_tokens = num_tokens
            return {}
        return super().inputs(plan, num_tokens, tokens_per_row)


class KeepsTheSlotsAdapter(Worker):
    """a request without an adapter gets that of whoever had its slot"""

    def enter(self, new: NewSlot) -> None:
        if new.adapter:
            super().enter(new)


class PadsNoRows(Worker):
    """tokens are counted as if no row were padded"""

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        return super().inputs(plan, num_tokens, 0)


class ScaleOfTheNeighbour(Worker):
    """the first part of a layer is scaled as the next one"""

    def read(self, path: str, revision: str) -> tuple[list[Any], list[str]]:
        packed, others = super().read(path, revision)
        for layer in packed:
            if layer is not None and len(layer) > 1 and layer[0] is not None:
                layer[0][1].mul_(1.5)
        return packed, others


class InTheModelsOrder(Worker):
    """rows that the model takes in another order are left in the checkpoint's"""

    def layer(self, shape: LayerShape) -> Any:
        return super().layer(shape._replace(orders={}))


class WholeOnEveryRank(Worker):
    """each rank adds the products of the first rank's inputs"""

    def layer(self, shape: LayerShape) -> Any:
        found, layers = super().layer(shape), self._model.layers
        inputs = slice(0, shape.inputs.length)
        layers[-1] = [part._replace(inputs=inputs) for part in layers[-1]]
        return found


class WritesOverOutputs(Worker):
    """what is added takes the place of the outputs"""

    def layer(self, shape: LayerShape) -> Any:
        class Over(Layer):
            def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return super().add(x, torch.zeros_like(y)) if len(self._worker._place_of_token) else y

        found = super().layer(shape)
        return Over(self, found._memory) if type(found) is Layer else found


class SaysItHasRead(Worker):
    """an adapter that cannot be read counts as read"""

    def loaded(self, identities: Sequence[str]) -> Any:
        return [(done, None, others) for done, _, others in super().loaded(identities)]


class AdaptsWhoeverCalls(Worker):
    """embeddings and heads are adapted outside of steps too"""

    @contextmanager
    def at(self, tokens: np.ndarray | None = None) -> Iterator[None]:
        with super().at(tokens):
            left = self.of_head
            yield
        self.of_head = left


class TakesTheFirstThatDraw(Worker):
    """heads are adapted as if rows that draw were the step's first tokens"""

    def layer(self, shape: LayerShape) -> Any:
        found = super().layer(shape)
        return Layer(self, found._memory) if isinstance(found, HeadLayer) else found

    def check(self, num_tokens: int) -> None: ...


class ForgetsDrafts(Worker):
    """of each row the last token alone is taken to draw"""

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        return super().inputs(msgspec.structs.replace(plan, num_drafts=None), num_tokens, tokens_per_row)


class HearsNoTokens(Worker):
    """heads are adapted for the rows that draw, whatever rows are told"""

    @contextmanager
    def at(self, tokens: np.ndarray | None = None) -> Iterator[None]:
        with super().at(None):
            yield


class WholeVocabulary(Worker):
    """an embedding's A is looked up by ids of all ranks in a part"""

    def layer(self, shape: LayerShape) -> Any:
        if shape.kind == "embedding":
            shape = shape._replace(inputs=Shard(shape.inputs.total, 0, shape.inputs.length))
        return super().layer(shape)


class PassesOverLayers(Worker):
    """layers that the model does not have are passed over"""

    def loaded(self, identities: Sequence[str]) -> Any:
        return [(done, error, []) for done, error, _ in super().loaded(identities)]


# -- the half in the core ----------------------------------------------------------------------------------------------
class OnePlaceForAll(Places):
    """every adapter gets the first place"""

    def _give_place(self, known: Known) -> bool:
        self._tell("place", 1, known.adapter.identity)
        known.place = 1
        return True


class TakesPlacesInUse(Places):
    """where no place is free the one that was used longest ago is taken, whoever uses it"""

    def ended(self, request: Adapted) -> None: ...

    def _let(self, known: Known, request: Adapted) -> None:
        request.place = known.place


class GivesNoPlaceBack(Places):
    """a place is never given to another"""

    def ended(self, request: Adapted) -> None: ...


class LetsAllThrough(Places):
    """nobody waits until the adapter is read"""

    def begin(self, request: Adapted, wake: Callable[[], None]) -> bool:
        if super().begin(request, wake):
            self.forget(request)
        return False


class HoldsEverybody(Places):
    """while one waits, all others do"""

    def begin(self, request: Adapted, wake: Callable[[], None]) -> bool:
        if self._waiting and request.adapter is not None:
            known = self._know(request.adapter)
            known.waiting[request.request_id] = request
            self._waiting[request.request_id] = known
            return True
        return super().begin(request, wake)


class FavoursWhoIsThere(Places):
    """whoever's adapter has a place goes before those that wait for one, for ever"""

    def begin(self, request: Adapted, wake: Callable[[], None]) -> bool:
        self._passed = 0
        return super().begin(request, wake)


class ForgetsErrors(Places):
    """whoever waits for an adapter that cannot be read goes through without one"""

    def ready(self) -> list[tuple[Adapted, EngineError | None]]:
        return [(request, None) for request, _ in super().ready()]


class ByNameAlone(Places):
    """adapters of one name are taken for each other"""

    def _know(self, adapter: Adapter) -> Known:
        for known in self._known.values():
            if known.adapter.name == adapter.name:
                self._known[adapter.identity] = known
                return known
        return super()._know(adapter)


class UnloadsInUse(Places):
    """an adapter is unloaded under the requests that use it"""

    def unload_adapter(self, identity: str) -> bool:
        if (known := self._known.get(identity)) is not None:
            known.users = 0
        return super().unload_adapter(identity)


class RemembersErrors(Places):
    """an adapter that could not be read once never can"""

    _broken: dict[str, EngineError] = {}  # noqa: RUF012

    def ready(self) -> list[tuple[Adapted, EngineError | None]]:
        found = super().ready()
        for request, error in found:
            if error is not None and request.adapter is not None:
                self._broken[request.adapter.identity] = error
        return [(request, self._broken.get(request.adapter.identity, error)) for request, error in found]  # type: ignore[union-attr]


WORKERS: Sequence[type] = (
    AnotherRowsAdapter, FirstTokensAlone, LeavesAnAdapterBehind, KeepsTheSlotsAdapter, PadsNoRows, ScaleOfTheNeighbour,
    InTheModelsOrder, WholeOnEveryRank, WritesOverOutputs, SaysItHasRead, PassesOverLayers, AdaptsWhoeverCalls,
    TakesTheFirstThatDraw, ForgetsDrafts, HearsNoTokens, WholeVocabulary,
)  # fmt: skip
CORES: Sequence[type] = (
    OnePlaceForAll, TakesPlacesInUse, GivesNoPlaceBack, LetsAllThrough, HoldsEverybody, FavoursWhoIsThere,
    ForgetsErrors, ByNameAlone, UnloadsInUse, RemembersErrors,
)  # fmt: skip
MUTANTS = [*WORKERS, *CORES]


class Faulty(AdapterConformance):
    """The suite, with one half in the place of a sound one."""

    faulty: type
    faulty_half = "worker"

    @classmethod
    def half(cls, name: str) -> type:
        return cls.faulty if name == cls.faulty_half else cls.subject().body(name)

    @classmethod
    def revision_of(cls, path: Path) -> str:
        return LoRARequest("", 0, path).revision


class FaultyCore(Faulty):
    """The same of the half in the core."""

    faulty_half = "core"


OPTIONS = {"max_loras": 2, "max_lora_rank": 8}
globals().update(suites_of(Faulty, "lora", WORKERS, OPTIONS))
globals().update(suites_of(FaultyCore, "lora", CORES, OPTIONS))
