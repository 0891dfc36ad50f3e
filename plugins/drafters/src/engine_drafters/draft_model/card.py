"""The card of drafter `draft_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftModel
from engine.types.errors import ConfigError
from engine_drafters.heads import find

if TYPE_CHECKING:
    from engine.types.model import ModelDescription


class DraftModelOptions(DrafterOptions):
    """Options of `draft_model`.

    Args:
        model: a folder or a name, as `--model` takes it; None: the one that comes with this package, where it has
            one for the target.
        load_format: the checkpoint driver that opens it; None: the one that claims it.
        tensor_parallel_size: 1: every rank holds and computes it whole; None: it is divided as the model is.
    """

    model: str | None = Field(default=None, min_length=1)
    load_format: str | None = None
    tensor_parallel_size: Literal[1] | None = None


class DraftModelDrafter(DrafterCard):
    """Drafts with any model that has the target's vocabulary."""

    framework = "torch"
    Options = DraftModelOptions
    needs = frozenset({"models"})
    requires_minor = 2
    body = "engine_drafters.draft_model.body:DraftModelBody"

    @classmethod
    def models(cls, target: ModelDescription, options: DrafterOptions) -> tuple[DraftModel, ...]:
        """The one that the options name, or that comes with this package. Raises ConfigError where that is none."""
        given = cast(DraftModelOptions, options)
        bundled = find(target, "draft")
        if given.model is None and bundled is None:
            raise ConfigError(
                "drafter=draft_model",
                "no draft model is named, and none for this model comes with engine-drafters",
                "name a smaller model of the same vocabulary: --drafter.model PATH",
            )
        path = str(bundled) if given.model is None else given.model
        return (DraftModel(path, given.load_format, tensor_parallel_size=given.tensor_parallel_size),)

    @classmethod
    def misfits(cls, target: ModelDescription, drafts: tuple[ModelDescription, ...]) -> list[str]:
        """Also one of fewer positions than requests have."""
        (draft,) = drafts
        few = f"{draft.architecture} has {draft.max_model_len:,} positions, and requests have up to "
        few += f"{target.max_model_len:,} tokens (--max-model-len)"
        return [*super().misfits(target, drafts), *([few] if draft.max_model_len < target.max_model_len else [])]
