"""The body of the drafter that knows the answers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession
from engine.types.errors import ConfigError
from engine_kit.host_drafts import sent_beside

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.step import TargetStep
    from engine.types.plan import NewSlot


class KnownDrafterBody:
    """Drafts what stands at a row's place in its recorded answer; nothing for a prompt that was not recorded."""

    def __init__(self, context: WorkerContext) -> None:
        options = context.options
        vocabulary = context.start.model.vocab_size
        self._platform = context.platform
        self._answers: dict[bytes, np.ndarray] = {}
        self._slots: dict[int, np.ndarray] = {}
        try:
            found = json.loads(Path(options.answers).read_text())
            recorded = [(count, np.array(ids, np.int32)) for count, ids in found]
            prompts = [tokens[:count].tobytes() for count, tokens in recorded]
        except (OSError, ValueError, TypeError, IndexError) as error:
            raise ConfigError(
                f"drafter.answers={options.answers!r}",
                str(error),
                "name a JSON file with a list of [number of the prompt's tokens, ids of prompt and answer]; "
                "engine bench speculation makes one by itself",
            ) from error
        for prompt, (_, tokens) in zip(prompts, recorded, strict=True):
            wrong = np.random.default_rng([options.seed, zlib.crc32(prompt)]).random(len(tokens)) >= options.right
            self._answers[prompt] = np.where(wrong, (tokens + 1) % vocabulary, tokens)

    def enter(self, new: NewSlot) -> None:
        """See `engine.interfaces.drafter.Drafter.enter`."""
        prompt = new.token_ids[: new.num_prompt_tokens].astype(np.int32).tobytes()
        self._slots[new.slot] = self._answers.get(prompt, np.empty(0, np.int32))

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """See `engine.interfaces.drafter.Drafter.leave`."""
        del self._slots[slot]

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """See `engine.interfaces.drafter.Drafter.propose`."""
        found = np.zeros((len(rows.slot), int(rows.num_drafts.max())), np.int32)
        counts = np.zeros(len(rows.slot), np.int32)
        for i, (slot, start, wanted) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
            drafts = self._slots[slot][start : start + wanted]
            found[i, : len(drafts)] = drafts
            counts[i] = len(drafts)
        return Drafts(sent_beside(session.tokens, found, self._platform), counts)

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """Nothing is needed."""
