"""What bodies that deal whole experts have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.interfaces.model import ModelContext
from engine.interfaces.step import StepPart
from engine.types.errors import ConfigError
from engine_kit.routing import ExpertSpec
from engine_moe.dealt.layer import DealtLayer
from engine_moe.dealt.rebalancing import Counting, Rebalancing

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_moe.dealt.card import DealtOptions


class DealtBody:
    """See `engine.interfaces.experts.Experts`. What the drivers differ in is their kind of layer."""

    layer_class: Callable[..., DealtLayer]

    def __init__(self, context: WorkerContext) -> None:
        self.options: DealtOptions = context.options
        self.start = context.start
        self.layers: list[DealtLayer] = []
        if self.options.redundant and context.start.batch_invariant:
            raise ConfigError(
                f"experts.redundant={self.options.redundant} with batch_invariant",
                "copies of an expert take turns from token to token, so that a token's bits depend on its place",
                "leave one of them out",
            )

    def layer(self, context: ModelContext, spec: ExpertSpec) -> DealtLayer:
        """Raises ConfigError where there are fewer experts than ranks, or too many copies; and for a draft model's,
        where engine cores share them."""
        made = self.layer_class(self, context, spec)
        self.layers.append(made)
        return made

    def parts(self) -> Sequence[StepPart]:
        """What has to be done beside steps. Asked once, when all layers are loaded."""
        self.layers = [layer for layer in self.layers if layer.weights.loaded]
        if not self.layers or self.layers[0].ep is None:
            return ()
        if self.options.rebalance_every or self.layers[0].cores is not None:
            return (Rebalancing(self.layers, self.options.rebalance_every, int(self.options.step_bytes)),)
        return (Counting(self.layers),)

    @torch.inference_mode()
    def tokens(self) -> list[int]:
        """Of each expert, all layers together: those that this rank has computed since start. Padding of captured steps
        counts."""
        if not self.layers:
            return []
        totals = [layer.count() for layer in self.layers]
        most = max(len(total) for total in totals)
        return np.sum([np.pad(total, (0, most - len(total))) for total in totals], axis=0).tolist()
