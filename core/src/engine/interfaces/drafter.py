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

**Draft models.** What a card names by `models` are models of point `model`, opened and loaded beside the target. Their
keys and values lie in the target's pages, behind its layers: position for position, in the same blocks. Where the draft
model has run over all tokens of every step (`DraftSession.run_step`), its cache is whole wherever the target's is, over
prefix hits, preemption and swapping too, and what drafts that were not kept have left there is written again.

Minor version 1: where the platform computes with another framework than torch, `DraftSession.tokens` and
`Drafts.tokens` are numpy's, on the host, and nothing else is offered. A card without a `framework` takes both. Minor 2
added `DraftSession.draft`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from engine.plugin import Card

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext
    from engine.interfaces.model import Model
    from engine.interfaces.step import TargetStep
    from engine.types.model import ModelDescription
    from engine.types.plan import NewSlot

OFFERS = frozenset({"hidden", "streams", "models"})
"""What the engine offers drafters beside the table of tokens."""

Acceptance = Literal["exact", "rejection"]
"""How drafts become output; see the module."""


class DrafterOptions(BaseModel):
    """What every drafter can be told; a driver's own `Options` add to it. The core reads these fields.

    Args:
        num_tokens: the most drafts for a request in one step.
        acceptance: see the module.
        adaptive: let the number of drafts follow what was accepted (`engine_kit.speculation` has the rule);
            False: always `num_tokens`.
        cost: what one draft adds to the step of a single request, as a part of that step without drafts; the rule
            weighs it against what drafts bring. "auto": what steps take with drafts and without is measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tokens: int = Field(default=4, ge=1, le=64)
    acceptance: Acceptance = "exact"
    adaptive: bool = True
    cost: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DrafterNeed:
    """What the engine asks of a drafter.

    Args:
        offers: what the engine gives beside the table of tokens; a card's `needs` must be among it.
        dtype: of the target's activations.
        device: torch's device string.
        framework: "torch" or "jax".
    """

    dtype: str
    device: str
    offers: frozenset[str] = OFFERS
    framework: str = "torch"


class DraftModel(NamedTuple):
    """A model that a drafter works with, as its card names it. The launcher resolves it as it does the target.

    Args:
        path: as `--model` takes it; "": the target's own files.
        load_format: the checkpoint driver that opens it; None: the one that claims it.
        architecture: in place of config.json's; None: what that states.
        config: laid over its config.json.
        shares: of "embed" and "head", what it takes from the target: see `engine.interfaces.model.ModelContext`.
        tensor_parallel_size: 1: every rank holds and computes it whole; None: it is divided as the target is.
        features: W of what `DraftSession.run` gets for it: passes of one token a row are captured with features of this
            width, 0 for none.
    """

    path: str = ""
    load_format: str | None = None
    architecture: str | None = None
    config: Mapping[str, Any] = MappingProxyType({})
    shares: frozenset[str] = frozenset()
    tensor_parallel_size: int | None = None
    features: int = 0


class DrafterCard(Card):
    """Describes a drafter."""

    Options: ClassVar[type[DrafterOptions]] = DrafterOptions
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it takes beside the table of tokens, by name: "hidden", the target's final hidden states and what was kept
    of its tokens, by `Drafter.observe`; "streams", there too, those of the layers that `streams` names; "models", those
    that `models` names. The engine refuses a card that needs what it does not offer."""

    def __init_subclass__(cls) -> None:
        if not issubclass(cls.Options, DrafterOptions):
            raise TypeError(f"{cls.__qualname__}.Options must extend engine.interfaces.drafter.DrafterOptions")

    @classmethod
    def models(cls, target: ModelDescription, options: DrafterOptions) -> tuple[DraftModel, ...]:
        """The models that it works with. Raises ConfigError where the options name none, or one that is not there."""
        return ()

    @classmethod
    def misfits(cls, target: ModelDescription, drafts: tuple[ModelDescription, ...]) -> list[str]:
        """Why these, as their own cards describe them, cannot draft for the target: one clear English reason each.

        The target's `max_model_len` is what requests have at most, as in `models`.
        A card that overrides this begins with these reasons.
        """
        return [
            *(f"{one.architecture} writes no text" for one in drafts if not one.generates or one.whole_prompts),
            *(
                f"{one.architecture} has a vocabulary of {one.vocab_size:,} tokens, and the target one of "
                f"{target.vocab_size:,}"
                for one in drafts
                if one.vocab_size != target.vocab_size
            ),
        ]

    @classmethod
    def streams(cls, target: ModelDescription, options: DrafterOptions) -> tuple[int, ...]:
        """The layers of the target behind which the residual stream is recorded for it, in steps of all kinds. Where it
        names any, a target between whose layers nobody can look on is refused at start."""
        return ()

    @classmethod
    def branches(cls, options: DrafterOptions) -> int:
        """The most drafts that follow one another in the trees that it may propose (`Drafts.parents`): attention is
        then asked for the feature "tree". 0: it proposes chains."""
        return 0

    @classmethod
    def unsupported(cls, need: DrafterNeed) -> list[str]:
        """A card that overrides this begins with these reasons."""
        missing = sorted(cls.needs - need.offers)
        return [f"it needs {name!r}, which is not offered here" for name in missing]


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
    """What a drafter proposes: chains, or trees of one form.

    Args:
        tokens: int32 [m, k], device, k = the largest of `num_drafts`; ids of the vocabulary. What stands past a row's
            count is not read.
        counts: int32 [m], host; how many of them count, 0 .. `num_drafts`. None: all that were wanted. Fewer make the
            step cheaper; a driver that would have to wait for the device to know says None.
        probs: float32 or float64 [m, k, V], device; q, the distribution that each draft was drawn from, after
            everything that shaped it. None: the drafts are certain.
        parents: int32 [k], host; which draft, before it, each one follows; -1: the row's last token. None: each the one
            before. A tree's drafts are certain; both acceptances draw at each node as without drafts, which is
            rejection sampling over the drafts that follow it, where these differ. A tree best begins with its best
            chain: rows with penalties or logits processors, and all of a step with grammar masks, get no more of it.
    """

    tokens: torch.Tensor
    counts: np.ndarray | None = None
    probs: torch.Tensor | None = None
    parents: np.ndarray | None = None


class DraftBatch(NamedTuple):
    """m rows of equally many tokens, for a draft model to compute.

    Args:
        slot: int32 [m], host; each slot once, but in trees.
        start: int32 [m], host; the position of each row's first token. What lies before it has been computed.
        num_tokens: of every row.
        token_ids: int32 [m * num_tokens], device; row by row.
        features: [m * num_tokens, W], device: the model's state has them as `features`. None for a model without.
        hidden: int64 [m], host; of rows of one token, which are nodes of trees: what each does not see of what lies
            before it, see `seen_from`. Nodes stand one behind the other: their position is less than `start`, by as
            many as they do not see.
    """

    slot: np.ndarray
    start: np.ndarray
    num_tokens: int
    token_ids: torch.Tensor
    features: torch.Tensor | None = None
    hidden: np.ndarray | None = None


def seen_from(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the nodes of a tree, [1 + k]: how many each follows, int64, and which of those before it it does not, int64 of
    bits as `engine.interfaces.attention.AttentionBatch.hidden` has them.

    parents: see `Drafts`. Node 0 is the row's last token, and node i draft i - 1.
    """
    nodes, follows = np.arange(len(parents) + 1), np.eye(len(parents) + 1, dtype=bool)
    for node in nodes[1:]:
        follows[node] |= follows[parents[node - 1] + 1]
    before = (nodes[:, None] - nodes).clip(0, 63).astype(np.uint64)
    bits = np.where(follows | (before == 0), np.uint64(0), np.uint64(1) << before).sum(axis=1, dtype=np.uint64)
    return follows.sum(axis=1) - 1, bits.view(np.int64)


class DraftSession(Protocol):
    """The runner, as far as a drafter sees it."""

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [max_num_seqs + 1, max_model_len + 1], device; each slot's ids, valid up to its `num_tokens`. numpy's
        where the framework is not torch."""

    def model(self, index: int = 0) -> Model:
        """One of those that the card's `models` names."""

    def run(self, index: int, batch: DraftBatch) -> torch.Tensor:
        """A draft model's final hidden states [m * num_tokens, H], good until the next run: within `propose`, and
        in `observe` before `run_step`.

        Token i of a row is computed at position start + i, which is where its keys and values go. A row of which one
        lies behind those that the step is to compute of its request is computed in vain: nothing of it is kept.
        """

    def run_step(self, index: int, step: TargetStep, features: torch.Tensor | None = None) -> torch.Tensor:
        """A draft model's final hidden states [T, H] over all tokens of the step, at their positions: in the `observe`
        that is given this step.

        features: [T, W]; with them each token is computed as the token behind it (`step.next_tokens`), so that what is
            kept at position p is made of (feature p, token p + 1). None: as itself, by a model without features.
        """

    def draw(self, logits: torch.Tensor, rows: DraftRows, ahead: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw a draft for each row, int32 [m], and q, float32 or float64 [m, V], where acceptance is "rejection".

        With exact acceptance a draft is drawn as the target will draw there, with the same random number, so that it is
        kept as often as the two agree; but for penalties, masks and logits processors. For rejection it is drawn from
        q = softmax(logits / temperature).

        Args:
            logits: [m, V], as `Model.logits` gives them; modified.
            ahead: how many drafts stand between the row's last token and this one.
        """

    def draft(self, index: int, rows: DraftRows) -> torch.Tensor | None:
        """Chains of a model without features, int32 [m, k] as `Drafts.tokens`: what `run` of one token a row,
        `Model.logits` and `draw` give, pass after pass, each captured as one launch. None where that is not captured,
        and where drafts come with q. Minor 2.
        """


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

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """The slot's request has ended, or was preempted and comes back by `enter`. No rows name it any more.

        Told when the next step begins, which may be a while later. The request's tokens are still in the session's
        table, its first `num_tokens` places; a driver that learns from them copies what it wants. Nothing may wait for
        the device here.
        """

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """Drafts for these rows, to follow their last token. Changes nothing of the session."""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """A step of the target is launched, and its tokens are drawn: of prompts, of rows without drafts too. Called
        where the card has `needs`, and nowhere else.

        What is kept at position p of a request is best made of (hidden state at p, token at p + 1): then nothing has to
        be known of tokens whose keys and values came from the prefix cache, whose steps nobody observes. Nothing may
        wait for the device here.
        """
