"""Point `logits_processor`: edits of logits before a token is drawn. Any number may be at work.

Some fields of `SamplingParams` are honoured by a processor (`PARAMETERS`): each goes to one driver, a named one before
the others, so these are always there. Further processors are added by name, and take their arguments for one request
from `SamplingParams.extra_args`, by the keys that their cards claim. A processor costs nothing in a step in which no
row uses it, which is known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.interfaces.context import WorkerContext
    from engine.types.params import SamplingParams
    from engine.types.plan import NewSlot

PARAMETERS: tuple[str, ...] = ("allowed_token_ids", "bad_words", "logit_bias", "thinking_budget")
"""The fields of `SamplingParams` that a processor honours, in the order in which their drivers are applied. Drivers
that are added by name follow, in their order; then penalties, temperature and filters."""


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorNeed:
    """What the engine asks of a processor.

    Args:
        vocab_size: of the model.
        device: torch's device string.
        framework: "torch" or "jax".
    """

    vocab_size: int
    device: str
    framework: str = "torch"


class LogitsProcessorCard(Card):
    """Describes a processor, and decides without torch which requests use it."""

    parameters: ClassVar[frozenset[str]] = frozenset()
    """Those of `PARAMETERS` that it honours."""

    extra_args: ClassVar[frozenset[str]] = frozenset()
    """The keys of `SamplingParams.extra_args` that it claims. No two processors at work may claim the same."""

    host_tokens: ClassVar[bool] = False
    """It reads the tokens on the host. A request that uses it then waits for each token to come back before the next
    is planned; others go on. Without, it reads them on the device, and nothing waits."""

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        """Check a request's arguments. Called in the frontend for requests that use it.

        Raises InvalidRequestError, beginning with the name: "bad_words=...".
        """

    @classmethod
    def used_by(cls, params: SamplingParams) -> bool:
        """Whether a request uses this processor: one of its parameters is set, or one of its keys is there."""
        given = params.extra_args or {}
        return any(getattr(params, name) for name in cls.parameters) or any(key in given for key in cls.extra_args)


class LogitsRows(NamedTuple):
    """The m rows of logits that a processor edits: those whose requests use it. "host": numpy; others: the device's.

    A slot may stand in several rows: with drafts, one for each position at which a token may be drawn.

    Args:
        row: int64 [m]; the rows of `logits`; None where these are all rows, in order.
        slot: int64 [m].
        num_prompt: int64 [m]; prompt tokens of the request.
        num_tokens: int64 [m]; tokens before the one to be drawn, prompt and output. Drafts before it count.
        tokens: int32 [slots, length]; the table of tokens: `tokens[slot[i], : num_tokens[i]]` are those before.
        host_slot, host_num_tokens: int [m]; the same on the host.
        host_tokens: int32 [slots, length]; the table on the host, for drivers whose card sets `host_tokens`, else None.
    """

    row: torch.Tensor | None
    slot: torch.Tensor
    num_prompt: torch.Tensor
    num_tokens: torch.Tensor
    tokens: torch.Tensor
    host_slot: np.ndarray
    host_num_tokens: np.ndarray
    host_tokens: np.ndarray | None


class LogitsProcessor(Protocol):
    """A processor at work, in a worker. Built with a `WorkerContext` (platform, ops and device are there).

    What it keeps of a request, it keeps by slot, and changes only in `enter`.
    """

    def __init__(self, context: WorkerContext) -> None: ...

    def enter(self, new: NewSlot) -> None:
        """A request that uses this processor enters a slot, new or resumed, in the place of whoever was there."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Edit the rows' logits in place.

        logits: float32 or float64 [R, V]. Rows that are not named must not change. What is written must follow from
        the slot's request and the tokens before the position alone, and be the same in every batch. No loop over rows
        in Python, and no wait for the device: use per-slot tables and gather them by `rows.slot`.
        """
