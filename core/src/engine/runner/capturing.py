"""Capturing decode steps before anything is served: whether it can be done, and the inputs that they are tried on."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import cast

import numpy as np
import torch

from engine.interfaces.attention import AttentionCard
from engine.interfaces.communicator import CommunicatorCard
from engine.interfaces.ops import MODEL_OPERATIONS, OpsCard
from engine.interfaces.platform import Platform, Trial
from engine.interfaces.quantization import QuantizationCard
from engine.plugin import Selection
from engine.runner.buffers import Frame, StepBuffers
from engine.runner.paged_attention import Attention
from engine.types.plan import StepPlan


def why_not_captured(
    recorder: str | None, selections: Iterable[Selection], operations: Container[str] = MODEL_OPERATIONS
) -> list[str]:
    """Who, of the drivers that a step computes with, launches work that the platform's recorder does not see.

    selections: of points ops, attention, quantization and communicator. operations: those that the model calls; of the
    others it does not matter.
    """
    reasons: dict[tuple[str, str], list[str]] = {}
    for selection in selections:
        if selection.point == "ops" and selection.kind not in operations:
            continue
        card = cast("type[OpsCard | AttentionCard | QuantizationCard | CommunicatorCard]", selection.card)
        if recorder not in card.captured_by:
            reasons.setdefault((selection.point, selection.candidate.name), []).append(selection.kind)
    return [
        f"{point} '{driver}'{_served(kinds)} is not recorded by '{recorder}'"
        for (point, driver), kinds in reasons.items()
    ]


def _served(kinds: list[str]) -> str:
    shown = [kind for kind in kinds if kind]
    return f" ({', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''})" if shown else ""


class DecodeTrial:
    """Inputs for one bucket: rows of one token each, on pages that nobody has yet.

    The two inputs differ in token ids, positions and pages. What lies in the cache before the rows is nothing (zeros),
    so that a run is a function of its input alone.

    Args:
        platform, buffers, attention: the worker's; the attention is bound to the pool.
        frame: of the bucket.
        vocab_size, max_model_len: bounds of ids and positions.
        plan: plans attention for the frame.
        outputs: what the step leaves.
    """

    def __init__(
        self,
        platform: Platform,
        buffers: StepBuffers,
        attention: Attention,
        frame: Frame,
        vocab_size: int,
        max_model_len: int,
        plan: Callable[[], None],
        outputs: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:
        self._platform, self._buffers, self._attention, self._frame = platform, buffers, attention, frame
        self._vocab_size, self._max_model_len, self._plan = vocab_size, max_model_len, plan
        self.trial = Trial(self.prepare, outputs)

    def prepare(self, number: int) -> None:
        """Fill the buffers with input 0 or 1, and plan attention."""
        pool, rows = self._attention.pool, np.arange(self._frame.num_rows)
        assert pool is not None
        groups = [group for group in self._attention.groups if group.layer_bytes]
        # Rows that share a page stand at different positions in it, and a position is where its block ends at most. In
        # input 0 they see the rows before them, in input 1 those after them.
        span = max(1, min([self._max_model_len - 1, *(group.tokens_per_block for group in groups)]))
        positions = rows % span if number == 0 else span - 1 - rows % span
        half = max(1, len(pool) // 2)
        first, count = (0, half) if number == 0 else (half, max(1, len(pool) - half))
        place = rows // span
        pages = [(first + (place * len(groups) + index) % count) % len(pool) for index in range(len(groups))]
        # Where pages are so few that rows share a place, they write the same there.
        tokens = (positions * 7919 + (place % count) * 104729 + number * 31 + 1) % self._vocab_size
        for page in pages:
            pool[torch.from_numpy(np.unique(page)).to(pool.device)] = 0
        self._buffers.fill(self._frame, _decodes(positions))
        inputs = self._frame.inputs
        self._send(tokens.astype(np.int32), inputs.token_ids)
        self._send(positions, inputs.positions)
        caches = zip(groups, pages, inputs.block_tables, inputs.slot_mappings, strict=True)
        for group, page, block_table, slot_mapping in caches:
            self._send(np.repeat(page[:, None], block_table.shape[1], 1).astype(np.int32), block_table)
            self._send(page * group.tokens_per_block + positions, slot_mapping)
        self._plan()

    def _send(self, array: np.ndarray, out: torch.Tensor) -> None:
        self._platform.to_device(torch.from_numpy(array), out)


def _decodes(positions: np.ndarray) -> StepPlan:
    """A plan of decodes at these positions; its slots stand for nothing."""
    rows = len(positions)
    return StepPlan(
        step_id=0,
        slot_of_row=np.zeros(rows, np.int32),
        num_computed=positions.astype(np.int32),
        num_tokens=np.ones(rows, np.int32),
        samples=np.ones(rows, bool),
        num_decodes=rows,
        new_slots=[],
        new_blocks=[],
    )
