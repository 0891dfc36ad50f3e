"""The logits processors at work: who of a step's rows uses which, and what they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.interfaces.logits_processor import LogitsProcessor, LogitsProcessorCard, LogitsRows
from engine.interfaces.platform import Platform
from engine.interfaces.step import StepPart
from engine.plugin.candidate import Candidate
from engine.sampling.faults import SlotFaults
from engine.sampling.packed import send
from engine.types.plan import NewSlot, StepPlan


class Processor(NamedTuple):
    """One processor: where it comes from, its card, which says who uses it, and its body."""

    candidate: Candidate
    card: type[LogitsProcessorCard]
    body: LogitsProcessor


class _Users(NamedTuple):
    """The rows of a step that use one processor; kept until the rows are others.

    Args:
        host: int64 numpy [m]; places among the step's rows.
        row: the same on the device, None where these are all rows.
    """

    host: np.ndarray
    row: torch.Tensor | None


class ProcessorChain(StepPart):
    """Applies processors in order. A step in which no row uses any costs one comparison on the host.

    Args:
        processors: in the order in which they are applied.
        platform: the worker's.
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the device's table of tokens.

    Attributes:
        faults: of slots; what a processor raises ends the requests that use it there, others go on.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        platform: Platform,
        tokens: torch.Tensor,
        faults: SlotFaults | None = None,
    ) -> None:
        self.faults = SlotFaults() if faults is None else faults
        self._processors = tuple(processors)
        self._platform = platform
        self._tokens = tokens
        slots = tokens.shape[0]
        self._uses = np.zeros((len(self._processors), slots), bool)
        self._used = False
        self._host_tokens: np.ndarray | None = None
        if any(processor.card.host_tokens for processor in self._processors):
            self._host_tokens = np.zeros(tuple(tokens.shape), np.int32)
        self._key: tuple[int, bytes] | None = None
        self._users: list[_Users] = []
        self._version = 0

    def enter(self, new: NewSlot) -> None:
        for uses, processor in zip(self._uses, self._processors, strict=True):
            uses[new.slot] = processor.card.used_by(new.params)
            if uses[new.slot]:
                try:
                    processor.body.enter(new)
                except Exception as error:
                    uses[new.slot] = False
                    asked = f"take request {new.request_id!r} in"
                    self.faults.add([new.slot], processor.candidate.fault(asked, error))
        if self._host_tokens is not None:
            self._host_tokens[new.slot, : len(new.token_ids)] = new.token_ids
        self._used = bool(self._uses.any())
        self._version += 1

    def used_by(self, slots: np.ndarray) -> np.ndarray:
        """bool [n]; which of these slots' requests use any."""
        return np.asarray(self._uses[:, slots].any(axis=0))

    def begin(self, plan: StepPlan) -> StepPlan:
        """Take in the tokens that came back to the host, where any processor reads them there."""
        if self._host_tokens is not None and plan.known is not None:
            self._host_tokens[plan.known.slot, plan.known.position] = plan.known.token
        return plan

    def apply(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        num_tokens: np.ndarray,
        device_slots: torch.Tensor,
        device_num_tokens: torch.Tensor,
        device_num_prompt: torch.Tensor,
    ) -> None:
        """Edit the logits in place.

        Args:
            logits: float32 or float64 [n, V].
            slots, num_tokens: int32 numpy [n]; each row's slot (one may stand in several rows), and the number of
                tokens before the one to be drawn.
            device_slots, device_num_tokens, device_num_prompt: [n], the same on the device, and the prompts' lengths.
        """
        if not self._used:
            return
        for processor, users in zip(self._processors, self._users_of(slots), strict=True):
            if not len(users.host):
                continue
            host, row = users
            rows = LogitsRows(
                row=row,
                slot=(device_slots if row is None else device_slots[row]).long(),
                num_prompt=(device_num_prompt if row is None else device_num_prompt[row]).long(),
                num_tokens=(device_num_tokens if row is None else device_num_tokens[row]).long(),
                tokens=self._tokens,
                host_slot=slots[host],
                host_num_tokens=num_tokens[host],
                host_tokens=self._host_tokens if processor.card.host_tokens else None,
            )
            try:
                processor.body.apply(logits, rows)
            except Exception as error:  # what it has done to these rows nobody knows; it touches no others
                asked = f"edit the logits of {len(host)} rows"
                self.faults.add(slots[host].tolist(), processor.candidate.fault(asked, error))

    def _users_of(self, slots: np.ndarray) -> list[_Users]:
        key = self._version, slots.tobytes()
        if key != self._key:
            self._key = key
            self._users = [self._find(uses[slots]) for uses in self._uses]
        return self._users

    def _find(self, uses: np.ndarray) -> _Users:
        host = np.flatnonzero(uses)
        if not len(host) or len(host) == len(uses):
            return _Users(host, None)
        return _Users(host, send(self._platform, host)[0])
