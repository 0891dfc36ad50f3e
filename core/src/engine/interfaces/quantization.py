"""Point `quantization`: weights of fewer bits, made from a plain checkpoint while it is loaded.

Off unless the user names a driver: `--quantization int8` binds every kind of layer that the driver serves,
`--quantization linear=int4,head=int8` is exact, and a kind that nobody is named for keeps its weights as they are. A
layer hands its weight over as soon as its last tensor has come, and forgets it: what is held at any time is the packed
layers and one plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.interfaces.platform import STREAM
from engine.plugin import Card
from engine.types.errors import ConfigError

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
        batch_invariant: a row's results have to have the same bits in every batch, see `engine.plugin.Card`.
    """

    kind: str
    dtype: str
    stored_dtype: str
    device: str
    framework: str = "torch"
    batch_invariant: bool = False


class Rounding(NamedTuple):
    """How far a driver may move a number that is not 0, at most; what is 0 stays 0. The kit's suite holds it to that.

    Args:
        weight: of a weight, as a share of the largest magnitude in its group.
        weight_group: so many inputs of one output are a group; 0: all of them.
        row: of an activation, likewise; 0.0 where rows are not rounded.
        row_group: so many inputs of one row are a group; 0: all of them.
    """

    weight: float
    weight_group: int = 0
    row: float = 0.0
    row_group: int = 0


class QuantizationCard(Card):
    """Describes a way to store weights. `kinds` names the kinds of layer that it serves, `captured_by` the recorders
    (`engine.interfaces.platform.PlatformCard.recorder`) that see all that its `linear` computes on decode steps."""

    kinds: frozenset[str] = frozenset()
    captured_by: frozenset[str] = STREAM

    @classmethod
    def rounding(cls, kind: str, options: Any) -> Rounding | None:
        """How exact it is, for layers of this kind under these options; None where the driver does not say. What the
        dtype of activations rounds beyond that is not counted."""
        return None


def check_layer(kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ConfigError where these are no weight [O, I] and bias [O] of numbers. What `pack` begins with."""
    shapes = [tuple(weight.shape), *([] if bias is None else [tuple(bias.shape)])]
    if weight.ndim == 2 and weight.is_floating_point() and (bias is None or bias.shape == weight.shape[:1]):
        return
    raise ConfigError(
        f"quantise a layer of kind '{kind}'",
        f"its tensors are {weight.dtype} {' and '.join(map(str, shapes))}, not a weight [O, I] and a bias [O]",
        "leave --quantization out for this kind of layer, or mend the checkpoint",
    )


class Quantization(Protocol):
    """A way to store weights at work: one object for all layers that it was chosen for, of whatever kind."""

    def __init__(self, context: WorkerContext) -> None: ...

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Quantise a layer, once -> what `linear` takes.

        weight: [O, I] in the checkpoint's dtype. bias: [O] in the activations'.
        Over several ranks O and I are this rank's, and each rank packs its own part. What is returned keeps neither
        tensor, nor a view of one: the weight may be somebody else's (an embedding's), and is else freed.

        Raises ConfigError for a layer that this driver cannot store, naming its sizes, and for what is no layer
        (`check_layer`).
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
