"""Which steps with drafts run as captured ones, and how many tokens a row of these has.

A captured step's rows all have the same number of tokens. A row with fewer drafts is padded: the tokens behind its own
are computed in vain, on ids that nobody wrote, at positions that the row has not reached. They write their keys to the
null page, none of the row's own queries sees them, and they draw nothing.
"""

from __future__ import annotations

import numpy as np

from engine.interfaces.platform import CapturesDrafts, Platform
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
    """The platform's row counts of each width; none where it captures no decode steps at all."""
    found = {1: platform.buckets(max_num_seqs)}
    if not found[1]:
        return {}
    found |= {width: platform.buckets(max_num_seqs, width) for width in widths if width > 1}
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
