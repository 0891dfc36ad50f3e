"""What the operations of mixtures of experts are told: how experts are chosen, and what stands between their
projections. Torch-free: cards have them, and drivers of operations take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from engine.interfaces.quantization import LayerShape, Quantization

if TYPE_CHECKING:
    import torch


class RouteForm(NamedTuple):
    """How a layer chooses experts.

    Args:
        top_k: experts of a token.
        sigmoid: scores are sigmoid(logits), each expert for itself; False: softmax over all of them.
        renormalise: the weights of the chosen ones add up to 1 before they are scaled.
        scale: of the weights.
        groups: the experts stand in so many groups of equal size, of which `top_groups` are open to a token: those
            whose best expert, or with `pairs` whose two best together, score highest.
        top_groups, pairs: see `groups`.
        jitter: each expert is the best of those left, one after the other, and its weight that of a softmax over those
            left whose logits are within 2 * jitter of the best, relative to the larger of both (SparseMixer-v2, Liu et
            al. 2024, as Phi-3.5-MoE computes outside of training). Only `top_k` and `biased_logits` count beside it.
            None: not so.
        biased_logits: the router's bias is added to the logits, and so to the weights too; False: it is added to the
            scores by which experts are chosen.
    """

    top_k: int
    sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    pairs: bool = False
    jitter: float | None = None
    biased_logits: bool = False


class ExpertAct(NamedTuple):
    """What stands between an expert's two projections.

    Args:
        kind: of the gate. "clamped" is (up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and an up
            within it to both sides (gpt-oss, 2025); "relu2" is squared ReLU.
        gated: act(gate) * up, all gates being first; False: act alone, of a projection without gates.
        alpha, limit: of "clamped", which is always gated.
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped"] = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = 0.0


class ExpertSpec(NamedTuple):
    """The experts of one layer. Sizes are the whole model's.

    Args:
        act: between both projections; where it is `gated` the first one has all gates before all else.
        first: the checkpoint's names of its parts (gate, up), without ".weight", "{}" standing for the expert's number;
            one name where it has them in one tensor. last: of the second projection. bias: whether both have one.
        stacked: one tensor holds all experts: "rows": `<name>.weight` [E, out, in]; "turned": `<name>` [E, in, out] and
            `<name>_bias` [E, out], where the outputs of several parts take turns.
    """

    num_experts: int
    hidden_size: int
    inner_size: int
    act: ExpertAct
    first: tuple[str, ...]
    last: str
    stacked: str = ""
    bias: bool = False


class TellsTensors(Protocol):
    """What `pack_experts` gives may be one: then experts can move between ranks."""

    def tensors(self, place: int) -> Sequence[torch.Tensor]:
        """The dense tensors, views, of the expert at a place: all that tells it from others. What another rank's same
        place holds, written over them, makes it that expert; their addresses stay."""


class ExpertQuantization(Quantization, Protocol):
    """One that computes all experts of a layer in one call. Of others each expert is multiplied by itself."""

    def pack_experts(self, experts: Sequence[tuple[Any, Any]]) -> Any:
        """Join what `pack` made of both projections of each expert -> what `experts` takes."""

    def experts(
        self, x: torch.Tensor, packed: Any, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """As the operation of this name, see `engine.interfaces.experts`."""


class ExpertAdapters(Protocol):
    """What adapts the experts of a layer for single requests, each row by the expert that computes it."""

    def rows(self, tokens: torch.Tensor, experts: torch.Tensor) -> Any:
        """Rows that are computed, each of a token of the step by an expert, both int64 [n] -> what `add` takes."""

    def add(self, last: bool, x: torch.Tensor, y: torch.Tensor, rows: Any) -> torch.Tensor:
        """Inputs x [n, I] and outputs y [n, O] of these rows' first or second projections -> y with what is added. It
        may write into y."""


class AdaptsExperts(Protocol):
    """What an `engine.interfaces.model.Adapters` is besides, where experts are adapted."""

    def experts(
        self, first: Sequence[LayerShape], last: Sequence[LayerShape], stacked: str, whole: bool
    ) -> ExpertAdapters | None:
        """Those of a layer, asked once, while the model is built; None where its experts are never adapted, and else
        they are computed one by one.

        Args:
            first, last: the projections of each expert. stacked: see `ExpertSpec`.
            whole: all experts of the layer are here.
        """
