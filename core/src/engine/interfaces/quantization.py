"""Point `quantization`: weights of fewer bits, made from a plain checkpoint while it is loaded.

Off unless the user names a driver: `--quantization int8` binds every kind of layer that the driver serves,
`--quantization linear=int4,head=int8` is exact, and a kind that nobody is named for keeps its weights as they are. A
layer hands its weight over as soon as its last tensor has come, and forgets it: what is held at any time is the packed
layers and one plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.interfaces.platform import STREAM
from engine.plugin import Card

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext

KINDS: tuple[str, ...] = ("linear", "head")
"""The kinds of layer: the projections of attention and feed-forward blocks; the one from hidden states to logits.

Embeddings, norms and the small heads of classifiers are never quantised.
"""


@dataclass(frozen=True, kw_only=True)
class QuantizationNeed:
    """What the engine asks of a driver, for each kind of layer.

    Args:
        kind: one of `KINDS`.
        dtype: of activations, e.g. "bfloat16".
        stored_dtype: of the checkpoint's weights.
        device: torch's device string.
        framework: "torch" or "jax".
    """

    kind: str
    dtype: str
    stored_dtype: str
    device: str
    framework: str = "torch"


class QuantizationCard(Card):
    """Describes a way to store weights. `kinds` names the kinds of layer that it serves, `captured_by` the recorders
    (`engine.interfaces.platform.PlatformCard.recorder`) that see all that its `linear` computes on decode steps."""

    kinds: frozenset[str] = frozenset()
    captured_by: frozenset[str] = STREAM


class Quantization(Protocol):
    """A way to store weights at work: one object for all layers that it was chosen for, of whatever kind."""

    def __init__(self, context: WorkerContext) -> None: ...

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Quantise a layer, once: weight [O, I] in the checkpoint's dtype, bias [O] -> what `linear` takes.

        Over several ranks O and I are this rank's, and each rank packs its own part. What is returned keeps neither
        tensor, nor a view of one: the weight may be somebody else's (an embedding's), and is else freed.

        Raises ConfigError for a layer that this driver cannot store, naming its sizes.
        """
        ...

    def packed_bytes(self, packed: Any) -> int:
        """Memory that a packed layer takes."""
        ...

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O] in x's dtype, with the weights as they were quantised.

        A driver may quantise `x` too; what a row gives does not depend on the rows beside it then.
        """
        ...
