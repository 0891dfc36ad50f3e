"""Decoders whose hidden states are pooled: what their cards add to a decoder's, names of tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from engine.interfaces.model import ModelCard
from engine.types.model import ModelDescription
from engine.types.pooling import PoolerConfig
from engine_kit.model_config import classifier, embedder

if TYPE_CHECKING:
    import torch


class Embedder(ModelCard):
    """Mixed into a decoder's card: it embeds by its last token."""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As the decoder's, but without a head."""
        return msgspec.structs.replace(super().describe(config), generates=False, pooler=embedder(config, "last"))


class Classifier(ModelCard):
    """Mixed into a decoder's card: it classifies by its last token."""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As the decoder's, with the head `score`."""
        return msgspec.structs.replace(super().describe(config), generates=False, pooler=classifier(config, "last"))


class Reward(ModelCard):
    """Mixed into a decoder's card: its head says how good a text is, up to each token.

    Attributes:
        pooler: the labels, and what is made of them.
    """

    pooler: ClassVar[PoolerConfig] = PoolerConfig(num_labels=1, activation="identity", token_labels=True)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As the decoder's, with its own head."""
        return msgspec.structs.replace(super().describe(config), generates=False, pooler=cls.pooler)


def of_pooling_model(
    weights: Iterable[tuple[str, torch.Tensor]], unused: str = "lm_head", head: str = "score", prefix: str = "model"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names of a whole decoder: a bare one is stored without the prefix. An embedding model
    may call itself ...ForCausalLM either way, and may still have the head that it does not use.

    Args:
        unused: the name of that head.
        head: of the one that it does use, if any.
    """
    for name, tensor in weights:
        if not name.startswith(f"{unused}."):
            yield name if name.startswith((f"{prefix}.", f"{head}.")) else f"{prefix}.{name}", tensor
