"""Capturing steps before anything is served: whether it can be done, for which steps, and on what they are tried.

A captured decode step's rows all have the same number of tokens. A row with fewer drafts is padded: the tokens behind
its own are computed in vain, on ids that nobody wrote, at positions that the row has not reached. They see no key and
write theirs to the null page, none of the row's own queries sees them, and they draw nothing. A step with prompts in it
is padded by tokens behind its last row, and by rows of none: it has room for half as many rows as tokens, or for all.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from engine.interfaces.attention import AttentionCard
from engine.interfaces.communicator import CommunicatorCard
from engine.interfaces.experts import ExpertsCard
from engine.interfaces.ops import MODEL_OPERATIONS, OpsCard
from engine.interfaces.platform import CapturesDrafts, Platform, Trial
from engine.interfaces.quantization import QuantizationCard
from engine.plugin import Selection
from engine.runner.attention import AttentionLayers
from engine.runner.buffers import StepBuffers
from engine.runner.step import Step
from engine.types.plan import StepPlan

Buckets = dict[int, tuple[int, ...]]
"""Row counts of captured steps, by the tokens of a row."""

FEW_TOKENS = 256
"""A step of so many is bound by reading the weights on every accelerator that there is, so that padding costs nothing.
Above, at most as much is padding as is not."""


def widths_of(captures: CapturesDrafts, num_drafts: int, max_model_len: int) -> tuple[int, ...]:
    """The tokens of a row with which steps are to be captured, one and more, for a drafter of so many at most."""
    if captures == "never" or not num_drafts:
        return (1,)
    widths = range(2, 2 + num_drafts) if captures == "alike" else (1 + num_drafts,)
    return (1, *(width for width in widths if width < max_model_len))


def buckets_of(platform: Platform, max_num_seqs: int, widths: tuple[int, ...]) -> Buckets:
    """The platform's row counts of each width, and tokens of width 0; none where it captures no decode steps at all."""
    found = {1: platform.buckets(max_num_seqs)}
    if not found[1]:
        return {}
    found |= {width: platform.buckets(max_num_seqs, width) for width in widths if width != 1}
    return {width: buckets for width, buckets in found.items() if buckets}


def width_of(
    plan: StepPlan, num_drafts: np.ndarray, captures: CapturesDrafts, widths: tuple[int, ...], max_model_len: int
) -> int:
    """The width of the captured steps that can compute a plan with drafts, int32 [R] in its rows; 0: none can.

    widths: that are captured.
    """
    most = int(plan.num_tokens.max())
    width = min((width for width in widths if width >= most), default=0)
    if not width or not (plan.samples & (plan.num_tokens == 1 + num_drafts)).all():
        return 0  # too many drafts, or rows of a prompt among them
    total, padded = plan.total_tokens, width * plan.num_rows
    if total == padded:
        return width
    fits = int(plan.num_computed.max()) + width <= max_model_len
    return width if captures == "padded" and fits and padded <= max(FEW_TOKENS, 2 * total) else 0


def padding_of(plan: StepPlan, tokens_per_row: int) -> np.ndarray | None:
    """int64; the tokens that pad the plan's rows up to so many each, by their places in the step; None for none."""
    if tokens_per_row < 2:
        return None
    place = np.arange(tokens_per_row)
    rows, behind = np.nonzero(place >= plan.num_tokens[:, None])
    return rows * tokens_per_row + behind if len(rows) else None


def why_not_captured(
    recorder: str | None, selections: Iterable[Selection], operations: Container[str] = MODEL_OPERATIONS
) -> list[str]:
    """Who, of the drivers that a step computes with, launches work that the platform's recorder does not see.

    selections: of points ops, attention, quantization, experts and communicator. operations: those that the model
    calls; of the others it does not matter.
    """
    reasons: dict[tuple[str, str], list[str]] = {}
    for selection in selections:
        if selection.point == "ops" and selection.kind not in operations:
            continue
        card = cast("type[OpsCard | AttentionCard | QuantizationCard | ExpertsCard | CommunicatorCard]", selection.card)
        experts = (selection.point, selection.kind) == ("quantization", "expert")
        seen = cast("type[QuantizationCard]", card).experts_captured_by if experts else card.captured_by
        if seen is not None and recorder not in seen:
            reasons.setdefault((selection.point, selection.candidate.name), []).append(selection.kind)
    return [
        f"{point} '{driver}'{_served(kinds)} is not recorded by '{recorder}'"
        for (point, driver), kinds in reasons.items()
    ]


def _served(kinds: list[str]) -> str:
    shown = [kind for kind in kinds if kind]
    return f" ({', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''})" if shown else ""


@dataclass(frozen=True)
class DecodeTrial:
    """Inputs for one bucket: rows of one token each, or of several, on pages that nobody has yet.

    The two inputs differ in token ids, positions and pages. What lies in the cache before the rows is nothing (zeros),
    so that a run is a function of its input alone. Both inputs fill the step: what pads one with prompts is not tried.

    Args:
        platform, buffers, attention: the worker's; the attention is bound to the pool.
        step: of the bucket.
        vocab_size, max_model_len: bounds of ids and positions.
        plan: plans attention for the step.
        received: buffers of what comes from the pipeline stage before.
    """

    platform: Platform
    buffers: StepBuffers
    attention: AttentionLayers
    step: Step
    vocab_size: int
    max_model_len: int
    plan: Callable[[], None]
    received: Sequence[torch.Tensor] = ()

    @property
    def trial(self) -> Trial:
        """For the platform."""
        return Trial(self.prepare, self.step.outputs, self.step.replace)

    @staticmethod
    def fits(attention: AttentionLayers, tokens_per_row: int) -> bool:
        """Whether the pool has pages for one row of a trial, on each of its two inputs."""
        tables = attention.layout.tables
        assert attention.pool is not None
        blocks = max((-(-tokens_per_row // table.tokens_per_block) for table in tables), default=0)
        return tokens_per_row == 1 or len(tables) * blocks <= len(attention.pool) // 2

    def counts(self, number: int) -> np.ndarray:
        """int64 [R]; the tokens of the rows of input 0 or 1. Where they may have any numbers: first one each, but for
        the last rows, then as many each."""
        frame, beyond = self.step.frame, self.max_model_len - 2
        rows, each = frame.num_rows, frame.tokens_per_row
        if each or number:
            return np.full(rows, each) if each else np.diff(np.arange(rows + 1) * frame.num_tokens // rows)
        return 1 + np.clip(frame.num_tokens - rows - beyond * np.arange(rows), 0, beyond)[::-1]

    def prepare(self, number: int) -> None:
        """Fill the buffers with input 0 or 1, and plan attention."""
        pool, frame = self.attention.pool, self.step.frame
        assert pool is not None
        rows, counts = np.arange(frame.num_rows), self.counts(number)
        assert counts.sum() == frame.num_tokens, "the platform has buckets of more tokens than its rows can have"
        width, row = int(counts.max()), np.repeat(rows, counts)
        tables = self.attention.layout.tables
        # Rows that share a place, a block in each table, stand at different positions in it. In input 0 they see the
        # rows before them, in input 1 those after them. A row that is longer than a block has a place for itself.
        span = max(1, min([self.max_model_len - 1, *(table.tokens_per_block for table in tables)]))
        beside = max(1, span // width)
        blocks = max((-(-width // table.tokens_per_block) for table in tables), default=1) if width > span else 1
        half = max(1, len(pool) // 2)
        first, count = (0, half) if number == 0 else (half, max(1, len(pool) - half))
        places, sharing = max(1, half // max(1, len(tables) * blocks)), beside
        if self.attention.states is not None:  # who reads a page reads what one row left: they share none, or none read
            beside, sharing = (beside, 1) if len(rows) <= places else (1, 1)
        order = rows % beside if number == 0 else beside - 1 - rows % beside
        positions = order[row] * width + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        # Where pages are so few that more rows share a place, they write the same there.
        place = rows // sharing % places
        pages = [  # [R, blocks] of each table
            (first + ((place[:, None] * len(tables) + index) * blocks + np.arange(blocks)) % count) % len(pool)
            for index in range(len(tables))
        ]
        tokens = (positions * 7919 + place[row] * 104729 + number * 31 + 1) % self.vocab_size
        for page in pages:
            pool[torch.from_numpy(np.unique(page)).to(pool.device)] = 0
        ends = np.cumsum(counts)
        select = None if frame.select is None else np.arange(len(row)) if frame.tokens_per_row else ends - 1
        self.buffers.fill(frame, decodes(positions[ends - counts], counts), select=select)
        for tensor in self.received:
            some = (np.arange(tensor.numel()) * 7919 + number * 31) % 1009 / 1009 - 0.5
            tensor.copy_(torch.from_numpy(some).view(tensor.shape))
        inputs = frame.inputs
        self._send(tokens.astype(np.int32), inputs.token_ids)
        self._send(positions, inputs.positions)
        caches = zip(tables, pages, inputs.block_tables, inputs.slot_mappings, strict=True)
        for table, page, block_table, slot_mapping in caches:
            row_pages = page[:, np.minimum(np.arange(block_table.shape[1]), blocks - 1)]
            self._send(row_pages.astype(np.int32), block_table)
            block, offset = np.divmod(positions, table.tokens_per_block)
            self._send(page[row, block] * table.tokens_per_block + offset, slot_mapping)
        self.buffers.place_keys(frame)
        self.plan()

    def _send(self, array: np.ndarray, out: torch.Tensor) -> None:
        self.platform.to_device(torch.from_numpy(array), out)


def decodes(positions: np.ndarray, width: int | np.ndarray, slots: np.ndarray | None = None) -> StepPlan:
    """A plan of decodes at these positions, with so many tokens each; None: its slots stand for nothing."""
    rows, num_tokens = len(positions), np.full(len(positions), width, np.int32)
    return StepPlan(
        step_id=0,
        slot_of_row=np.zeros(rows, np.int32) if slots is None else slots,
        num_computed=positions.astype(np.int32),
        num_tokens=num_tokens,
        samples=np.ones(rows, bool),
        num_decodes=rows * (width == 1) if isinstance(width, int) else int((num_tokens == 1).cumprod().sum()),
        new_slots=[],
        new_blocks=[],
    )
