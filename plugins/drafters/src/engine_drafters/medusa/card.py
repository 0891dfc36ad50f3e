"""The card of drafter `medusa`."""

from __future__ import annotations

from typing import cast

from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftModel
from engine.types.errors import ConfigError
from engine.types.model import ModelDescription
from engine_drafters.eagle.card import draft_model_of, head_of
from engine_drafters.layouts import MEDUSA, Head
from engine_drafters.tree import HeadOptions
from engine_kit.model_config import integer


class MedusaDrafter(DrafterCard):
    """Medusa's heads (Cai et al. 2024): as many drafts as there are heads, or a tree of their choices, in one pass."""

    framework = "torch"
    Options = HeadOptions
    needs = frozenset({"hidden", "models"})
    body = "engine_drafters.medusa.body:MedusaDrafterBody"

    @classmethod
    def models(cls, target: ModelDescription, options: DrafterOptions) -> tuple[DraftModel, ...]:
        """The heads. Raises ConfigError where these are none, or were made for another model."""
        head = head_of("medusa", target, options, "medusa", (MEDUSA,))
        blocks, hidden = integer(head.config, "medusa_num_layers", 1, low=0), target.hidden_size
        expected = {
            "vocab_size": target.vocab_size,
            "hidden_size": hidden,
            "0.0.linear.weight": (hidden, hidden),
            f"0.{blocks}.weight": (target.vocab_size, hidden),
        }
        for name, size in expected.items():
            stored = head.shapes.get(name, head.config.get(name))
            if stored not in (None, size):
                raise ConfigError(
                    f"draft by the heads {head.folder}",
                    f"{name} is {stored}, and has to be {size} for this model",
                    "they were trained for another model: name some that were for this",
                )
        _check_depth(head, cast(HeadOptions, options), target)
        sizes = {
            "vocab_size": target.vocab_size,
            "hidden_size": hidden,
            "max_position_embeddings": target.max_model_len,
        }
        return (draft_model_of(head, options, config=sizes, shares=frozenset({"head"})),)

    @classmethod
    def branches(cls, options: DrafterOptions) -> int:
        """The longest path of its tree."""
        return max(map(len, cast(HeadOptions, options).tree or [()]))


def _check_depth(head: Head, options: HeadOptions, target: ModelDescription) -> None:
    """Raises ConfigError where the tree has choices that the heads have not."""
    heads, vocab_size = integer(head.config, "medusa_num_heads"), target.vocab_size
    for path in options.tree or ():
        if len(path) > heads:
            found = f"its path {list(path)} has {len(path)} choices, and there are {heads} heads"
        elif max(path) >= vocab_size:
            found = f"its path {list(path)} has choice {max(path)}, and there are {vocab_size} tokens"
        else:
            continue
        raise ConfigError(f"draft a tree by the heads {head.folder}", found, "leave the path out of --drafter.tree")
