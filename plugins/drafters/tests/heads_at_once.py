"""Bodies of heads, opened from folders, for whole sequences at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain
import torch

from engine.interfaces.model import ModelNeed, State
from engine_drafters.checkpoint import SCHEME, DraftHeadCheckpoint, DraftHeadReader
from engine_drafters.models import card as cards

CARDS: dict[str, Any] = {
    "LlamaForCausalLMEagle": cards.LlamaEagle,
    "LlamaForCausalLMEagle3": cards.LlamaEagle3,
    "MedusaModel": cards.Medusa,
}


class _Start:
    def __init__(self, files: Any) -> None:
        self.start = self
        self.files = files


def opened(folder: Path, target: Any, config: dict[str, Any] | None = None, **more: Any) -> Any:
    """The head's body, with its weights, for one sequence in float64."""
    files = DraftHeadCheckpoint.resolve(f"{SCHEME}{folder}")
    files.config.update(config or {})
    card = CARDS[files.config["architectures"][0]]
    need = ModelNeed(architecture=files.config["architectures"][0], config=files.config)
    assert card.unsupported(need) == []
    description = card.describe(files.config)
    shares = frozenset({"embed", "head"})
    context = plain.make_context(
        description, torch.float64, max_model_len=256, **{"target": target, "shares": shares, **more}
    )
    body = plain.body_of(card)(context)
    reading: Any = _Start(files)
    reader: Any = DraftHeadReader(reading)
    body.load_weights(reader.weights())
    return body


def state(ids: torch.Tensor, features: torch.Tensor, start: int = 0) -> State:
    return State(
        token_ids=ids.int(), positions=torch.arange(start, start + len(ids)), features=features,
    )  # fmt: skip


def at_once(body: Any, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The features that a body makes of a whole sequence, whatever it has seen before."""
    attend = body.layers[0].attention.attend
    attend._k = attend._v = None
    made: torch.Tensor = body.forward(state(ids, features), plain.plain_walk)
    return made


# -- the formulas ------------------------------------------------------------------------------------------------------
