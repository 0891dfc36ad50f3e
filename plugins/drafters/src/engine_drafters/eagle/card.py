"""The card of drafter `eagle`."""

from __future__ import annotations

import logging
from typing import Any, cast

from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftModel
from engine.types.errors import ConfigError
from engine.types.model import ModelDescription
from engine_drafters.checkpoint import SCHEME
from engine_drafters.heads import Kind, find
from engine_drafters.layouts import EAGLE, EAGLE3, Head, read_head, stream_layers
from engine_drafters.tree import HeadOptions
from engine_kit.model_config import integer

logger = logging.getLogger(__name__)


class EagleDrafter(DrafterCard):
    """EAGLE, EAGLE-2 and EAGLE-3, whichever the head is."""

    framework = "torch"
    Options = HeadOptions
    needs = frozenset({"hidden", "streams", "models"})
    body = "engine_drafters.eagle.body:EagleDrafterBody"

    @classmethod
    def models(cls, target: ModelDescription, options: DrafterOptions) -> tuple[DraftModel, ...]:
        """The head. Raises ConfigError where it is none, or was made for another model."""
        head = head_of("eagle", target, options, "eagle3", (EAGLE, EAGLE3))
        own, reads = integer(head.config, "hidden_size"), feature_size(head)
        shares = {"embed", "head"} if own == target.hidden_size else set()
        lacking = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in head.shapes]
        if reads != target.hidden_size:
            raise _misfit(head, f"it reads states of {reads} elements, and the model's have {target.hidden_size}")
        if lacking and not shares:
            raise _misfit(head, f"its states have {own} elements, not {target.hidden_size}, and it has no {lacking[0]}")
        if head.architecture == EAGLE3:
            stream_layers(head.config, target.num_layers)
        return (draft_model_of(head, options, shares=frozenset(shares), features=own),)

    @classmethod
    def streams(cls, target: ModelDescription, options: DrafterOptions) -> tuple[int, ...]:
        """Those that EAGLE-3 reads, in its order; EAGLE reads the final states."""
        head = head_of("eagle", target, options, "eagle3", (EAGLE, EAGLE3))
        return stream_layers(head.config, target.num_layers) if head.architecture == EAGLE3 else ()

    @classmethod
    def branches(cls, options: DrafterOptions) -> int:
        """The longest path of its tree."""
        return max(map(len, cast(HeadOptions, options).tree or [()]))


def feature_size(head: Head) -> int:
    """Elements of the target's states that the head reads."""
    own = integer(head.config, "hidden_size")
    return integer(head.config, "target_hidden_size", own) if head.architecture == EAGLE3 else own


def head_of(
    driver: str, target: ModelDescription, options: DrafterOptions, kind: Kind, served: tuple[str, ...]
) -> Head:
    """The head that the options name, or that comes with this package.

    Raises:
        ConfigError: none is named, or it is one for another drafter.
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `read_head`.
    """
    named = cast(HeadOptions, options).model
    bundled = find(target, kind)
    if named is None and bundled is None:
        raise ConfigError(
            f"drafter={driver}",
            "no head is named, and none for this model comes with engine-drafters",
            "name a head that was trained for the model: --drafter.model FOLDER",
        )
    head = read_head(named if named is not None else str(bundled))
    if head.architecture not in served:
        raise ConfigError(
            f"drafter={driver} with the head {head.folder}",
            f"it is a {head.architecture}, and served are {', '.join(served)}",
            "name another head, or --drafter medusa for Medusa's and --drafter eagle for EAGLE's",
        )
    return head


def draft_model_of(head: Head, options: DrafterOptions, **more: Any) -> DraftModel:
    """As the launcher opens it. Whom it was trained for is told, and nothing refused for it: a name says little."""
    if head.verifier:
        said = "the draft head %s was trained for %s: for another model few of its drafts are kept"
        logger.info(said, head.folder, head.verifier)
    ranks = cast(HeadOptions, options).tensor_parallel_size
    return DraftModel(f"{SCHEME}{head.folder}", tensor_parallel_size=ranks, **more)


def _misfit(head: Head, found: str) -> ConfigError:
    return ConfigError(
        f"draft by the head {head.folder}", found, "it was trained for another model: name one that was for this"
    )
