"""Drafts in the runner: proposed when a step begins, or brought by its plan, computed with it, and verified once the
target has drawn.

A row with d drafts puts them behind its last token in the table of tokens, so that the model, the penalties and the
masks of each position see the drafts before it. The target draws at all 1 + d positions; each draw goes into the table
at its place, where a wrong draft stood. What lies behind the last token that counts is never read.

Drafts that branch stand one behind the other too; what was kept of the path that was drawn is moved to its places.

With several pipeline stages the first has to know the drafts, and the last makes them, early: behind the draws that
they follow (`engine_kit.early_drafts`). They go with the result to the scheduler, and come with a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from engine.interfaces.drafter import Acceptance, Drafter, DraftRows, Drafts, seen_from
from engine.interfaces.ops import Ops
from engine.interfaces.platform import Fetch, Platform
from engine.interfaces.step import StepPart, TargetStep
from engine.plugin.candidate import Candidate
from engine.runner.session import Session
from engine.runner.step import Drawing
from engine.sampling.faults import SlotFaults
from engine.sampling.packed import send
from engine.sampling.sampler import SampledDrafts
from engine.types.errors import ContractError
from engine.types.plan import GivenDrafts, LeftSlots, NewSlot, StepPlan

logger = logging.getLogger(__name__)


class ChosenDrafter(NamedTuple):
    """A drafter at work, and how its drafts become output."""

    drafter: Drafter
    acceptance: Acceptance
    num_tokens: int
    """The most drafts of a row."""
    candidate: Candidate
    observes: bool = False
    branches: bool = False


class StepTrees(NamedTuple):
    """The trees of a step that draws at n positions. Node 0 of a row is its last token, node i its i-th draft.

    Args:
        depth: the most drafts that follow one another.
        hidden, beyond: int64 [n], device; the bits of what each position does not see, and how many they are.
        parents: int64 [n], device; as `Ops.verify_tree` takes them.
        slot, place: int64 [n], device; where its token goes in the table once it is on the path that was drawn.
    """

    depth: int
    hidden: torch.Tensor
    beyond: torch.Tensor
    parents: torch.Tensor
    slot: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, parents: np.ndarray, step: StepDrafts, platform: Platform) -> StepDrafts:
        """The step's drafts, as a tree. parents: of `engine.interfaces.drafter.Drafts`."""
        drawing, node = step.drawing, step.offset
        depth, hidden = seen_from(parents)
        offset = depth[node]
        above = np.where(node == 0, -1, np.arange(len(node)) - node + np.append(-1, parents + 1)[node])
        num_tokens = drawing.num_tokens - (node - offset)
        columns = (hidden[node], node - offset, above, drawing.slot, num_tokens)
        trees = cls(int(offset.max()), *send(platform, *(column.astype(np.int64) for column in columns)))
        drawing = drawing._replace(num_tokens=num_tokens.astype(np.int32))
        return step._replace(trees=trees, offset=offset, drawing=drawing)

    def walk(
        self, ops: Ops, drawn: torch.Tensor, drafts: SampledDrafts, start: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put what was drawn on the paths, of int32 [n], into the table of tokens.

        Returns counts and paths, see `Ops.verify_tree`, and int64 [2, e]: positions, and those whose places they get.
        """
        counts, path = ops.verify_tree(drawn, drafts.tokens.roll(1), self.parents, start, self.depth)
        on = path.flatten()
        tokens[self.slot[on], self.place[on]] = drawn[on].clamp(min=0)  # what is broken is read, and does not count
        return counts, path, torch.stack((on, on - self.beyond[on]))


class StepDrafts(NamedTuple):
    """The drafts of one step.

    Args:
        place: int64 [m]; the rows of the plan that were to have drafts.
        drawing: where the step draws, at n positions. offset: int64 [n]; the place of each among its row's.
        sampled: the drafts that follow these positions.
        start: int64 [R' + 1], on the device; sampling row i's positions are start[i] .. start[i + 1] - 1.
        fetch: their copy to the host under way, where masks follow that depend on them.
        trees: where drafts branch.
    """

    place: np.ndarray
    drawing: Drawing
    offset: np.ndarray
    sampled: SampledDrafts
    start: torch.Tensor
    fetch: Fetch | None
    trees: StepTrees | None


class Drafting(StepPart):
    """A drafter in the hands of the runner, and drafts that come with a plan.

    Args:
        chosen: at work; None where the engine has no drafter: then all drafts come with their plan.
        ops, platform: the worker's.
        session: what the drafter sees.
        faults: of slots; what the drafter raises over one request ends that one.
        edited: of slots, int [n], which of their requests' draws depend on the tokens before: bool [n].

    Attributes:
        step: of the last plan that has drafts.
        probs: by slot: what its drafts were drawn from, [k, V], where they were proposed early.
    """

    def __init__(
        self,
        chosen: ChosenDrafter | None,
        ops: Ops,
        platform: Platform,
        session: Session,
        faults: SlotFaults,
        edited: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._chosen = chosen
        self._acceptance: Acceptance = "exact" if chosen is None else chosen.acceptance
        self._faults = faults
        self._edited = edited
        self._ops = ops
        self._platform = platform
        self._tokens = session.tokens
        self._session = session
        self.probs: dict[int, torch.Tensor] = {}
        self.step: StepDrafts | None = None

    def capture(self) -> None:
        """See `Session.capture`."""
        self._session.capture()

    @property
    def rejects(self) -> bool:
        """Rejection sampling, instead of drawing as without drafts."""
        return self._acceptance == "rejection"

    def leave(self, left: LeftSlots) -> None:
        if self._chosen is None:
            return
        for slot, num_tokens in zip(left.slot.tolist(), left.num_tokens.tolist(), strict=True):
            try:
                self._chosen.drafter.leave(slot, num_tokens, self._session)
            except Exception:  # the request has left: there is nobody to tell but the log
                logger.exception("drafter '%s' could not let slot %d go", self._chosen.candidate.name, slot)

    def enter(self, new: NewSlot) -> None:
        if self._chosen is not None:
            try:
                self._chosen.drafter.enter(new)
            except Exception as error:
                fault = self._chosen.candidate.fault(f"take request {new.request_id!r} in", error)
                self._faults.add([new.slot], fault)

    def begin(self, plan: StepPlan) -> StepPlan:
        """Ask for the drafts of a plan with `num_drafts`, as far as they do not come with it, and put all into the
        table.

        Returns the plan, cut to the drafts that were found. Raises ContractError where the drafter's answer has the
        wrong form.
        """
        if plan.num_drafts is None:
            return plan
        place = np.flatnonzero(plan.num_drafts)
        rows = _rows(plan, place)
        given = plan.given_drafts
        asked_place = place if given is None else np.setdiff1d(place, given.row)
        if (faulty := self._faults.among(plan.slot_of_row[asked_place])) is not None:
            asked_place = asked_place[~faulty]
        drafts, parents = None, None
        if len(asked_place):
            self._session.limit[plan.slot_of_row] = plan.num_computed + plan.num_tokens
            drafts = self.proposed(rows if len(asked_place) == len(place) else _rows(plan, asked_place))
            if drafts is None:
                asked_place = asked_place[:0]
            elif (parents := drafts.parents) is not None and drafts.counts is not None:
                chain = (parents == np.arange(len(parents)) - 1).cumprod().sum()
                alone = plan.masks_follow | self._edited(plan.slot_of_row[asked_place])
                counts = np.where(alone, drafts.counts.clip(max=chain), drafts.counts)
                drafts = drafts._replace(counts=counts.astype(np.int32))
                parents = parents if (counts > chain).any() else None
        if drafts is None or len(asked_place) < len(place):
            drafts = self._merged(drafts, np.searchsorted(place, asked_place), given, rows, place)
        assert drafts.counts is not None
        num_drafts = np.zeros(plan.num_rows, np.int32)
        num_drafts[place] = drafts.counts
        num_tokens = plan.num_tokens.copy()
        num_tokens[place] = 1 + drafts.counts
        alone = (num_tokens == 1) & plan.samples
        num_decodes = plan.num_rows if alone.all() else int(alone.argmin())
        plan = msgspec.structs.replace(plan, num_tokens=num_tokens, num_drafts=num_drafts, num_decodes=num_decodes)
        self.step = self._put(plan, drafts, place)
        if parents is not None:
            self.step = StepTrees.of(parents, self.step, self._platform)
        return plan

    def proposed(self, rows: DraftRows) -> Drafts | None:
        """What the drafter proposes; None where it failed over the one request that it was asked for.

        Raises what it raised where it was asked for several: nobody knows over which.
        """
        assert self._chosen is not None, "a plan wants drafts, and there is no drafter"
        try:
            return self._checked(self._chosen.drafter.propose(rows, self._session), rows)
        except Exception as error:
            fault = self._chosen.candidate.fault(f"propose drafts for {len(rows.slot)} rows", error)
            if len(rows.slot) > 1:
                raise fault from error
            self._faults.add(rows.slot.tolist(), fault)
            return None

    def _checked(self, drafts: Drafts, rows: DraftRows) -> Drafts:
        """The drafts, with counts."""
        m, k = len(rows.slot), int(rows.num_drafts.max())
        counts = rows.num_drafts if drafts.counts is None else drafts.counts
        fits = tuple(drafts.tokens.shape) == (m, k) and counts.shape == (m,)
        branches = self._chosen is not None and self._chosen.branches
        if (parents := drafts.parents) is not None:
            fits = fits and parents.shape == (k,) and branches and drafts.probs is None
            fits = fits and bool(((parents >= -1) & (parents < np.arange(k))).all())
        if not fits or (counts < 0).any() or (counts > rows.num_drafts).any():
            form = "chains, or trees without probabilities" if branches and parents is not None else "chains"
            found = f"tokens of shape {tuple(drafts.tokens.shape)}, counts {counts!r:.80}"
            if parents is not None:
                found += f", parents {parents!r:.80}{'' if drafts.probs is None else ' and probabilities'}"
            raise ContractError(
                f"drafts for {m} rows, at most {k} each: {form}",
                f"the drafter gave {found}",
                "choose another drafter driver and tell its author",
                point="drafter",
            )
        return drafts._replace(counts=counts)

    def _merged(
        self, proposed: Drafts | None, at: np.ndarray, given: GivenDrafts | None, rows: DraftRows, place: np.ndarray
    ) -> Drafts:
        """What the drafter proposed, which goes to the rows `at`, and what came with the plan: that is certain. Others
        get none."""
        m, k, device = len(place), int(rows.num_drafts.max()), self._tokens.device
        host, counts, probs = np.full((m, k), -1, np.int32), np.zeros(m, np.int32), None
        if given is not None:
            mine = np.searchsorted(place, given.row)
            host[mine, : given.tokens.shape[1]] = given.tokens[:, :k]
            counts[mine] = rows.num_drafts[mine]
        tokens, where = send(self._platform, host, at)
        drawn: list[tuple[Any, torch.Tensor]] = []
        if proposed is not None:
            assert proposed.counts is not None
            width = proposed.tokens.shape[1]
            tokens[where, :width] = proposed.tokens.int()
            counts[at] = proposed.counts
            drawn = [] if proposed.probs is None else [(where, proposed.probs)]
        elif self.probs and given is not None and given.proposed is not None:
            early = zip(mine.tolist(), rows.slot[mine].tolist(), given.proposed.tolist(), strict=True)
            drawn = [(i, self.probs[slot][:k]) for i, slot, before in early if before and slot in self.probs]
        if self.rejects and drawn:
            probs = torch.zeros(m, k, drawn[0][1].shape[-1], dtype=drawn[0][1].dtype, device=device)
            probs.scatter_(2, tokens.clamp(min=0).long().unsqueeze(2), 1.0)
            for of, q in drawn:
                probs[of, : q.shape[-2]] = q
        return Drafts(tokens, counts, probs)

    def _put(self, plan: StepPlan, drafts: Drafts, place: np.ndarray) -> StepDrafts:
        """Write the drafts behind their rows' tokens."""
        assert drafts.counts is not None and plan.num_drafts is not None
        drawing = Drawing.of(plan, np.flatnonzero(plan.samples))
        row, n = drawing.row, len(drawing.row)
        offset = drawing.place - (plan.num_tokens - 1 - plan.num_drafts)[row]
        has = np.flatnonzero(offset < plan.num_drafts[row])
        which = np.repeat(np.arange(len(place)), drafts.counts)  # rows stand in the same order here and there
        first, h = (offset == 0).nonzero()[0], len(has)
        host = np.full((4, n + 1 + (n + 1) % 2), n)  # rows begin at multiples of 16 bytes, as in `send`
        host[0, :h] = which * drafts.tokens.shape[1] + offset[has]
        host[1, :h] = drawing.slot[has].astype(np.int64) * self._tokens.shape[1] + drawing.num_tokens[has]
        host[2, :h] = has
        host[3, : len(first)] = first
        (sent,) = send(self._platform, host)
        (proposed, put, at), start = sent[:3, :h], sent[3, : len(first) + 1]
        tokens = drafts.tokens.flatten().index_select(0, proposed).int()
        self._tokens.view(-1).index_copy_(0, put, tokens)  # by one number each: two cost four times as much to look up
        flat = torch.full((n,), -1, dtype=torch.int32, device=tokens.device).index_copy_(0, at, tokens)
        probs = None
        if self.rejects and drafts.probs is not None:
            probs = torch.zeros(n, drafts.probs.shape[2], dtype=drafts.probs.dtype, device=tokens.device)
            probs[at] = drafts.probs.flatten(0, 1)[proposed]
        fetch = self._platform.to_host((drafts.tokens,)) if plan.masks_follow else None
        return StepDrafts(place, drawing, offset, SampledDrafts(flat, probs), start, fetch, None)

    def launched(self, step: TargetStep) -> None:
        """The drafter looks at the step. What it raises over that ends the engine: nobody knows over which request."""
        assert self._chosen is not None
        if step.plan.num_rows:
            try:
                self._chosen.drafter.observe(step, self._session)
            except Exception as error:
                raise self._chosen.candidate.fault("observe a step", error) from error

    def steady(self) -> bool:
        """There is no drafter that observes steps."""
        return self._chosen is None or not self._chosen.observes


def _rows(plan: StepPlan, place: np.ndarray) -> DraftRows:
    """These rows, as a drafter is asked for them."""
    assert plan.num_drafts is not None
    return DraftRows(plan.slot_of_row[place], plan.num_computed[place] + 1, plan.num_drafts[place])
