"""What a worker does in a step beside the model's own work: `StepPart`, and between its layers: `LayerListener`.

Pooling, prompt log probabilities, drafts, logits processors, token types and transfers of KV pages are parts; the
runner calls them by these methods alone, and those alone that a part has. A listener of a part looks on at the model's
walk: it may record what goes from layer to layer, change keys and values in their place, and choose the tokens that
later layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.interfaces.model import State
    from engine.interfaces.ops import StepInputs
    from engine.interfaces.platform import Fetch, Trial
    from engine.types.plan import LeftSlots, NewSlot, StepPlan, StepResult


class TargetStep(Protocol):
    """A step that is launched, R rows and T tokens, padding included; good for the call that it is given to.

    What is on the device is there in order with the work queued before, and its memory may be the next step's.
    """

    @property
    def plan(self) -> StepPlan:
        """What was planned, with the drafts that were found. Its rows are the first of R."""

    @property
    def query_start_loc(self) -> torch.Tensor:
        """int32 [R + 1], device: row r's tokens begin at query_start_loc[r]. They may be followed by padding."""

    @property
    def hidden(self) -> torch.Tensor | None:
        """[T, H], the final hidden states, normed. None but on the last stage, and where the plan has no row."""

    @property
    def streams(self) -> Mapping[int, torch.Tensor]:
        """By layer what listeners have recorded behind it: [T, H]; NaN for tokens that it did not compute."""

    @property
    def next_tokens(self) -> torch.Tensor:
        """int32 [T], device: the token that follows each, known, or drawn just now."""

    @property
    def kept(self) -> torch.Tensor:
        """int32 [rows of the plan], device: of each row's tokens those that count, the first; drafts behind the first
        wrong one do not. Where drafts branch, how many they are: they need not be the first."""

    @property
    def last(self) -> torch.Tensor:
        """int64 [rows of the plan], device: the place among the step's tokens of each row's last one that counts."""


class StepOutput(NamedTuple):
    """What a part has found, on its way to the step's result.

    Args:
        tensors: to be copied to the host, in one copy with those of others. Nobody writes to them any more.
        put: called once, with the result and the tensors' values.
    """

    tensors: tuple[torch.Tensor, ...]
    put: Callable[[StepResult, list[np.ndarray]], None]


class StepView(Protocol):
    """A step between two layers, good for the call that it is given to."""

    @property
    def state(self) -> State:
        """What goes from layer to layer."""

    @property
    def plan(self) -> StepPlan:
        """The step's. Raises EngineError for a listener that is captured: its work is to hold for any plan."""

    def record(self, layer: int, stream: torch.Tensor) -> None:
        """Keep a new tensor, [n, H] of the tokens that are computed: for `TargetStep.streams`."""

    def select(self, tokens: torch.Tensor) -> None:
        """From the next layer on, compute these tokens alone; keys and values of others are not written there.

        tokens: int64 [n], device, ascending; places among those that were computed so far. Each row's last one has to
            be among them where it draws: what was not computed is NaN afterwards. Later layers' pages lack what was
            left out: no other request may find them, so prefix caching has to be off. Waits for the device.

        Raises EngineError where it cannot be done: for a listener that is captured, on one of several pipeline
        stages, where attention was not asked for "kv_index", for tokens that are not there, or for none.
        """

    def read(self, site: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer of this site keeps at slots: see `engine.interfaces.attention.AttentionBackend.read`.

        site: a place in `ModelDescription.sites`, of this stage.
        """

    def write(self, site: int, slots: torch.Tensor, *kept: torch.Tensor) -> None:
        """Store what `read` gives, at slots int64 [n]. Both raise EngineError for a listener that is captured, and
        for a site that is not here."""


class LayerListener:
    """Looks on at the model's walk. `before` and `after` are called at the layers that it names, in order.

    Attributes:
        layers: whose indices in the model; None for all.
        captured: it computes through operations and views alone, alike in every step: its work is part of what is
            captured. False: it is asked whether it `hears` a step, which then runs uncaptured.
    """

    layers: frozenset[int] | None = None
    captured: ClassVar[bool] = False

    def hears(self, plan: StepPlan) -> bool:
        """Whether it has something to do in this step. Not asked where `captured` is True."""
        return True

    def before(self, layer: int, view: StepView) -> None:
        """The layer comes next."""

    def after(self, layer: int, view: StepView) -> None:
        """The layer has left the state. Its keys and values of this step are stored."""


class StepPart:
    """Work beside the model's. A part overrides the methods that it needs: others are never called.

    What a method raises is the step's error.
    """

    def leave(self, left: LeftSlots) -> None:
        """Requests have left their slots; their tokens are still in the table."""

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot, new or resumed, in the place of whoever was there."""

    def begin(self, plan: StepPlan) -> StepPlan:
        """Before anything is computed, of a plan that has something for parts: drafts, known tokens, or sections.

        Returns the plan, or what it becomes. Plans may come without rows.
        """
        return plan

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        """Further tensors of the model's state, [num_tokens, ...] each, padding included: views of fixed buffers.

        tokens_per_row: row r's tokens begin at r * tokens_per_row, drafts padded; 0: each row's behind the last one's.
        """
        return {}

    def listeners(self) -> Sequence[LayerListener]:
        """Asked once, when the worker starts."""
        return ()

    def capture(self) -> None:
        """Once, before the first plan, when the runner's own steps are captured: what the part runs by itself."""

    def launched(self, step: TargetStep) -> StepOutput | None:
        """Behind the drawing of the step's tokens, in order on the device, on every rank."""

    def steady(self) -> bool:
        """Whether `launched` has nothing to do until a request enters or `begin` is called: asked after these."""
        return False


class WholeSteps(Protocol):
    """Decode steps as one launch, from the tables of slots to the drawn tokens. A platform whose body has `whole_steps`
    (minor 7) makes it of the worker's ops, its `StepTables`, the parameters of slots (`engine.sampling.sampler`'s), and
    reasons against it: where there are any it gives None, and says them if a user has asked for such steps. That is
    called before the largest step is measured, and again to serve."""

    def capture(
        self, inputs: StepInputs, news: torch.Tensor, compute: Callable[[], None], trial: Trial
    ) -> Callable[[int], Fetch] | None:
        """A step of R rows of one token. None where it cannot be captured, which the platform has told; else what
        launches it and gives one tensor, so many rows' tokens as of `Ops.place_tokens`: no later launch changes it.

        inputs: their first four are filled before each launch. news: int32, device, filled as they are: how many pages
        are new, three words of nothing, then of each its table's number, slot, index and page; the launch puts them
        into the tables before anything reads these. compute: launches all up to the logits, [R, V] as the model leaves
        them, the last of `trial.outputs()`; what it reads besides lies in the tables. trial: its `prepare` empties the
        null page, which is every block of every slot.
        """


def without_whole_steps(body: type) -> type:
    """A platform from before minor 7, whose whole steps take no new pages: none of its steps is whole."""
    return type(body.__name__, (body,), {"whole_steps": None}) if hasattr(body, "whole_steps") else body
