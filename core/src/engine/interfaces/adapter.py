"""Point `adapter`: small changes to a model's weights that single requests bring along, as LoRA (Hu et al. 2021).

Two halves. The one in the core has what requests ask for loaded, gives each adapter a place on the devices, and lets a
request wait until its adapter has one. Those in the workers hold what is loaded, and add to what linear layers give.
Which place a request's adapter has travels with it into its slot (`engine.types.plan.NewSlot.adapter`). An adapter's
name and revision stand before its requests' prefixes: they share no cached pages with others.

Minor version 1 asks for embeddings and heads too (`AdapterWorker.at`), and whether what was given out may be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engine.interfaces.step import StepPart
from engine.plugin import Card

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.context import CoreContext, WorkerContext
    from engine.interfaces.model import AdapterLayer
    from engine.interfaces.quantization import LayerShape
    from engine.types.errors import EngineError
    from engine.types.request import Adapter

OPERATIONS: tuple[str, ...] = ("lora_memory", "lora_pack", "lora_place", "lora_add")
"""Taken from one driver, where a driver of adapters calls them: each reads what the one before it made."""


@dataclass(frozen=True, kw_only=True)
class AdapterNeed:
    """What the engine asks of a driver; see the other points' needs."""

    dtype: str
    device: str
    framework: str = "torch"
    batch_invariant: bool = False


class AdapterCard(Card):
    """Describes a driver, whose `bodies` are "core" and "worker". `operations`: what its layers call of `Ops`."""

    operations: ClassVar[frozenset[str]] = frozenset()


class Adapted(Protocol):
    """A request, as the half in the core sees it. `place`: where its adapter lies, from 1; 0 as long as it waits."""

    request_id: str
    adapter: Adapter | None
    place: int


class AdapterCore(Protocol):
    """The half in the core, a gate of requests (`engine.scheduling.gates.Gate`). Built with a `CoreContext`, whose
    `tell` reaches the halves in the workers. All calls come from the scheduler's thread."""

    def __init__(self, context: CoreContext) -> None: ...

    def begin(self, request: Adapted, wake: Callable[[], None]) -> bool:
        """Whether the request has to wait; else its `place` is set, where it has an adapter. Does not wait."""

    def ready(self) -> list[tuple[Adapted, EngineError | None]]:
        """The requests whose wait is over, their `place` set; with an error, those whose adapter cannot be loaded."""

    def forget(self, request: Adapted) -> None:
        """The request ended while it waited here."""

    def ended(self, request: Adapted) -> None:
        """Any request has ended, wherever it was. Its adapter's place may be another's once nobody uses it."""

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """What frontends may call by name, see `EngineCore.calls`: `load_adapter(name, path, revision)` begins to load
        one; `adapter_state(identity)` says whether it is loaded (or forgotten), and tells once the parts of the error
        where it cannot be; `unload_adapter(identity)` forgets it, and says False where requests still use it."""

    def shutdown(self) -> None:
        """Load nothing more. Idempotent."""


class AdapterWorker(StepPart):
    """The half in a worker, which is the `engine.interfaces.model.Adapters` of its model. As a part of steps it hears
    which adapter a slot has (`enter`), and writes down before each step whose tokens are whose (`inputs`), for layers
    that may be captured. `captured`: False once it has given out what cannot be."""

    captured = True

    def __init__(self, context: WorkerContext) -> None: ...

    def at(self, tokens: np.ndarray | None = None) -> AbstractContextManager[object]:
        """Embeddings and heads are adapted within: whoever calls them else, as drafters do, has no adapter. Heads are
        given the states of these tokens of the step, int64 [n]; None: of those that draw, in any launch to come."""
        return nullcontext()

    def layer(self, shape: LayerShape) -> AdapterLayer | None:
        """See there."""
        raise NotImplementedError

    def told(self, what: str, *args: Any) -> Any:
        """What the half in the core tells: plain data, as is the answer. It follows the steps that were started, and
        holds up those that come: what takes long is begun here and asked about later."""
        raise NotImplementedError
