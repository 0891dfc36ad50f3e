"""Point `drafter`: proposes tokens that one step then checks all at once (speculative decoding).

Leviathan, Kalman, Matias: "Fast inference from transformers via speculative decoding" (ICML 2023). None is used unless
the user names one. The scheduler decides how many drafts a row gets, the drafter proposes them when the step begins,
the model computes them with the row's last token, and the core accepts: a driver never decides what becomes output.

Acceptance is the core's, chosen by the option `acceptance`:

    exact      Each position's token is drawn from the target with that position's random number, as without drafts, and
               drafts are kept while they equal it. The output equals a run without drafts token by token.
    rejection  A draft d is kept with probability min(1, p(d) / q(d)); the first that is not is replaced by a draw from
               the residual max(p - q, 0). The output has the target's distribution. q is what the drafter returns;
               where it returns nothing its drafts are certain (q = 1 at the draft), which holds for every drafter
               whose drafts are a function of the tokens before them.

Minor version 1 added `enter` and `leave`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from engine.plugin import Card

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.interfaces.context import WorkerContext
    from engine.types.plan import NewSlot

Acceptance = Literal["exact", "rejection"]
"""How drafts become output; see the module."""


class DrafterOptions(BaseModel):
    """What every drafter can be told; a driver's own `Options` add to it. The core reads these fields.

    Args:
        num_tokens: the most drafts for a request in one step.
        acceptance: see the module.
        adaptive: let the number of drafts follow what was accepted (`engine.scheduling.speculative` has the rule);
            False: always `num_tokens`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tokens: int = Field(default=4, ge=1, le=64)
    acceptance: Acceptance = "exact"
    adaptive: bool = True


@dataclass(frozen=True, kw_only=True)
class DrafterNeed:
    """What the engine asks of a drafter.

    Args:
        offers: what the engine's session gives beside the table of tokens; a card's `needs` must be among it.
        dtype: of the target's activations.
        device: torch's device string.
        framework: "torch" or "jax".
    """

    dtype: str
    device: str
    offers: frozenset[str] = field(default_factory=frozenset)
    framework: str = "torch"


class DrafterCard(Card):
    """Describes a drafter."""

    Options: ClassVar[type[DrafterOptions]] = DrafterOptions
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it takes from the session beside the table of tokens, by name: "hidden_states" of the target, "models" that
    the runner opens and runs. The engine refuses a card that needs what it does not offer."""

    def __init_subclass__(cls) -> None:
        if not issubclass(cls.Options, DrafterOptions):
            raise TypeError(f"{cls.__qualname__}.Options must extend engine.interfaces.drafter.DrafterOptions")

    @classmethod
    def unsupported(cls, need: DrafterNeed) -> list[str]:
        """A card that overrides this begins with these reasons."""
        missing = sorted(cls.needs - need.offers)
        return [f"it needs {name!r} from the session, which this engine does not offer" for name in missing]


class DraftRows(NamedTuple):
    """The m rows that want drafts, on the host.

    Args:
        slot: int32 [m]; each slot once.
        num_tokens: int32 [m]; tokens of the request that stand in the table, the last of them not computed yet. They
            may be unknown to the host.
        num_drafts: int32 [m]; the most drafts that are wanted, at least 1.
    """

    slot: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray


class Drafts(NamedTuple):
    """What a drafter proposes: chains.

    Args:
        tokens: int32 [m, k], device, k = the largest of `num_drafts`; ids of the vocabulary. What stands past a row's
            count is not read.
        counts: int32 [m], host; how many of them count, 0 .. `num_drafts`. None: all that were wanted. Fewer make the
            step cheaper; a driver that would have to wait for the device to know says None.
        probs: float32 or float64 [m, k, V], device; q, the distribution that each draft was drawn from, after
            everything that shaped it. None: the drafts are certain.
    """

    tokens: torch.Tensor
    counts: np.ndarray | None = None
    probs: torch.Tensor | None = None


class DraftSession(Protocol):
    """The runner, as far as a drafter sees it."""

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [max_num_seqs + 1, max_model_len + 1], device; each slot's ids, valid up to its `num_tokens`."""
        ...


class Drafter(Protocol):
    """A drafter at work, in every worker. Built with a `WorkerContext`, after everything else.

    All ranks must propose the same. What a drafter keeps of a request it keeps by slot, from `enter` to `leave`.

    **Whose history.** What it learns from one request it may use for those alone whose `NewSlot.cache_salt` is equal:
    how many drafts are kept shows in the time of an answer, and would tell one user what another has read or written.
    None is equal to None.
    """

    def __init__(self, context: WorkerContext) -> None: ...

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot, new or resumed: then its tokens are what it had when it left. Before the slot is
        proposed for, and after `leave` for whoever was there."""
        ...

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """The slot's request has ended, or was preempted and comes back by `enter`. No rows name it any more.

        Told when the next step begins, which may be a while later. The request's tokens are still in the session's
        table, its first `num_tokens` places; a driver that learns from them copies what it wants. Nothing may wait for
        the device here.
        """
        ...

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """Drafts for these rows, to follow their last token. Changes nothing of the session."""
        ...

    def accepted(self, rows: DraftRows, counts: torch.Tensor) -> None:
        """The step is launched: int32 [m], device; how many drafts of each row of the last `propose` were kept.

        A driver that keeps no state ignores it. Nothing may wait for the device here.
        """
        ...
