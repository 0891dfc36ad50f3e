"""Point `experts`: which rank holds which routed experts of a mixture, and how tokens come to them and back. A layer's
router chooses; what follows is an `ExpertLayer`, made of the operations below, or the same of a quantization.

Minor version 1 added `CountsTokens`, which a driver need not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.plugin import Card
from engine.types.parallel import Parallel

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext

OPERATIONS: tuple[str, ...] = ("pack_experts", "experts")
"""Taken from one driver. A model whose card names the last one has a use for the point."""


@dataclass(frozen=True, kw_only=True)
class ExpertsNeed:
    """What the engine asks of a driver; see the other points' needs."""

    device: str
    framework: str = "torch"
    parallel: Parallel = field(default_factory=Parallel)
    batch_invariant: bool = False


class ExpertsCard(Card):
    """Describes a driver. `captured_by` names the recorders (`PlatformCard.recorder`) that see what its layers do: None
    for all that see the operations and collectives of which alone they are made."""

    captured_by: frozenset[str] | None = None


class ExpertLayer(Protocol):
    """A layer's experts at work. An `engine.modeling.Module`: its params are what this rank holds."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As operation `experts`, complete on every rank that had the tokens."""


class Experts(Protocol):
    """A way to divide experts over ranks, at work: one object a model."""

    def __init__(self, context: WorkerContext) -> None: ...

    def layer(self, context: Any, spec: Any) -> ExpertLayer:
        """A layer's, to be loaded with the model, of its `ModelContext` and an `engine_kit.routing.ExpertSpec`. Raises
        ConfigError where it cannot be divided."""


class CountsTokens(Experts, Protocol):
    """One that looks at what goes to experts, and may move them. Of draft models' experts nobody asks."""

    def parts(self) -> Sequence[Any]:
        """What it does beside steps: `engine.interfaces.step.StepPart`s. Asked once, when the model is loaded."""

    def tokens(self) -> list[int]:
        """Of each expert, all layers together: those that this rank has computed since start."""
