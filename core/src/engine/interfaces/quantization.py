"""Point `quantization`: weights of fewer bits, made from a plain checkpoint while it is loaded, or stored so.

A checkpoint that stores them so says how in config.json's `quantization_config`: the driver that claims it reads it.
For a plain one there is none unless the user names a driver: `--quantization int8` binds every kind of layer that the
driver serves, `--quantization linear=int4,head=int8` is exact, and a kind that nobody is named for keeps its weights as
they are. A layer hands its tensors over as soon as the last of them has come, and forgets them: what is held at any
time is the packed layers and one that is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from engine.interfaces.platform import STREAM
from engine.plugin import Card
from engine.types.errors import CheckpointError, ConfigError
from engine.types.parallel import Shard

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext

KINDS: tuple[str, ...] = ("linear", "head", "expert")
"""The kinds of layer: the projections of attention and feed-forward blocks; the one from hidden states to logits; those
of routed experts. Norms and the small heads of classifiers are never quantised."""

EMBEDDING = "embedding"
"""A further kind, of bodies that have `embedding(ids, packed, first)` too: for ids int [T] the rows ids - first of what
is packed, as they were stored, [T, H] in the engine's dtype; zeros for ids outside of first .. first + O - 1. `first`
None: it is 0, and no id lies outside. A tied head multiplies by what that driver packed."""

PLAIN_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Of weights that are numbers as they stand."""


def stored_form(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how the weights are stored, its `quantization_config`; None where they are plain.

    Raises CheckpointError where it is no object.
    """
    stored = config.get("quantization_config")
    if stored is None or isinstance(stored, Mapping):
        return stored or None
    raise CheckpointError("read 'quantization_config' of config.json", f"it is {stored!r:.80}, not an object")


@dataclass(frozen=True, kw_only=True)
class QuantizationNeed:
    """What the engine asks of a driver, for each kind of layer.

    Args:
        kind: one of `KINDS`, or `EMBEDDING`.
        dtype: of activations, e.g. "bfloat16".
        stored_dtype: of the checkpoint's weights, where they are plain.
        device: torch's device string.
        framework: "torch" or "jax".
        batch_invariant: a row's results have to have the same bits in every batch, see `engine.plugin.Card`.
        stored: how the checkpoint stores its weights, see `stored_form`; None: plain, for the driver to round.
    """

    kind: str
    dtype: str
    stored_dtype: str
    device: str
    framework: str = "torch"
    batch_invariant: bool = False
    stored: Mapping[str, Any] | None = None


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

    kinds: ClassVar[frozenset[str]] = frozenset()
    captured_by: ClassVar[frozenset[str]] = STREAM

    experts_captured_by: ClassVar[frozenset[str]] = frozenset()
    """The same of `engine_kit.routing.ExpertQuantization`'s `experts`; empty where the body is none."""

    rounds: ClassVar[bool] = True
    """Whether it makes its form of plain weights. False for one that only reads what is stored so."""

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        """Whether it reads weights that are stored so (`stored_form`). Of several that do, the first by priority that
        fits is taken, where the user names none."""
        return False

    @classmethod
    def covers(cls, stored: Mapping[str, Any], layer: str, kind: str) -> bool:
        """Whether a layer is stored in the form that it claims; False: its weight is plain, and stays so.

        layer: the checkpoint's name, e.g. "model.layers.0.mlp.up_proj".
        """
        return True

    @classmethod
    def rounding(cls, kind: str, options: Any) -> Rounding | None:
        """How exact it is, for plain layers of this kind under these options; None where the driver does not say. What
        the dtype of activations rounds beyond that is not counted."""
        return None

    @classmethod
    def mismatches(cls, need: QuantizationNeed) -> list[str]:
        """The framework's, and the form in which the weights are stored."""
        reasons = super().mismatches(need)
        if need.stored is None:
            return reasons if cls.rounds else [*reasons, "the weights are plain, and it rounds none"]
        if not cls.claims(need.stored):
            reasons.append(f"it does not read weights stored as '{need.stored.get('quant_method', 'unnamed')}'")
        return reasons


class StoredTensor(NamedTuple):
    """One of the checkpoint's tensors that a layer is made of.

    Args:
        key: what `Quantization.pack` gets it as. Tensors of one key follow one another, in their order, along `along`;
            one without dimensions counts as [1].
        name: in the checkpoint.
        shape: that it must have there; [1] stands for none too. [-1]: of any length, and the only one of its key.
        pieces: what this rank keeps of it, see `engine.modeling.Param`.
        dtypes: one of which it must have there.
        cast: it becomes the activations' dtype; else it keeps its own.
        along: a dimension.
        in_order: its rows are put into `LayerShape.orders` while it is loaded; False: the driver does that.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[slice, ...], ...] = ()
    dtypes: frozenset[str] = PLAIN_DTYPES
    cast: bool = False
    along: int = 0
    in_order: bool = True


class LayerShape(NamedTuple):
    """A linear layer, and what this rank holds of it.

    Args:
        names: the checkpoint's, of each of its parts; one name where all parts stand in one tensor, one after another.
        kind: one of `KINDS`, or `EMBEDDING`; "" for a layer that is never quantised.
        inputs: columns.
        outputs: rows of each part.
        bias: whether this rank adds one.
        orders: by name, where the model takes a part's rows in another order: for each place, which of this rank's rows
            comes there. They are put into it while they are loaded.
    """

    names: tuple[str, ...]
    kind: str
    inputs: Shard
    outputs: tuple[Shard, ...]
    bias: bool
    orders: Mapping[str, Sequence[int]] = MappingProxyType({})

    def stored(
        self,
        key: str,
        *,
        outputs: int = 1,
        inputs: int = 1,
        turned: bool = False,
        dtypes: frozenset[str] = PLAIN_DTYPES,
        cast: bool = False,
    ) -> list[StoredTensor]:
        """The tensors `<name>.<key>` [O / outputs, I / inputs] of all names, with this rank's cut.

        Args:
            outputs, inputs: so many stand in one element, or share it; the last one may be for fewer. 0 inputs: the
                tensor has no such dimension.
            turned: the inputs' dimension comes first.
            dtypes, cast: see `StoredTensor`.

        Raises ConfigError: this rank's part would begin or end within an element.
        """
        fused = len(self.names) == 1
        found = []
        for name, parts in zip(self.names, [self.outputs] if fused else [(o,) for o in self.outputs], strict=True):
            total = sum(part.total for part in parts)
            whole = all(size.length == size.total for size in (*parts, self.inputs))
            shape, pieces, start = [-(-total // outputs)], list[tuple[slice, ...]](), 0
            if inputs:
                shape.append(-(-self.inputs.total // inputs))
            for part in () if whole else parts:
                piece = [_elements(name, start + part.start, part.length, total, outputs)]
                if inputs:
                    piece.append(_elements(name, self.inputs.start, self.inputs.length, self.inputs.total, inputs))
                pieces.append(tuple(piece[::-1] if turned else piece))
                start += part.total
            size = tuple(shape[::-1] if turned else shape)
            along = 1 if turned and inputs else 0
            found.append(StoredTensor(key, f"{name}.{key}", size, tuple(pieces), dtypes, cast, along))
        return found


def _elements(name: str, start: int, length: int, total: int, unit: int) -> slice:
    stop = start + length
    if start % unit or (stop % unit and stop != total):
        raise ConfigError(
            f"take {start} .. {stop - 1} of the {total} rows or columns of {name}",
            f"the checkpoint stores {unit} of them as one",
            "choose a smaller --tensor-parallel-size",
        )
    return slice(start // unit, -(-stop // unit))


def plain_tensors(layer: LayerShape, cast: bool = False) -> list[StoredTensor]:
    """A plain layer's: "weight" [O, I], in its own dtype or `cast`, and "bias" [O] in the activations'."""
    return layer.stored("weight", cast=cast) + (layer.stored("bias", inputs=0, cast=True) if layer.bias else [])


class Quantization(Protocol):
    """A way to store weights at work: one object for all layers that it was chosen for, of whatever kind. What the
    checkpoint says of its form stands in `context.start.model.config`, see `stored_form`."""

    def __init__(self, context: WorkerContext) -> None: ...

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """The checkpoint's tensors that a layer is made of: `plain_tensors` where the driver rounds, else those of its
        form (`LayerShape.stored` cuts them).

        Raises ConfigError where this rank's part cannot be cut out of them.
        """

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Make a layer, once, of its tensors by their keys -> what `linear` takes, and may be an
        `engine_kit.rounded_rows.RoundsRows`, which layers then use.

        Over several ranks the tensors are this rank's, and each rank packs its own part. What is returned keeps none of
        them, nor a view of one: a weight may be somebody else's (an embedding's), and is else freed.

        Raises ConfigError for a layer that this driver cannot store, naming its sizes, and for what is no layer
        (`engine_kit.plain_layer`).
        """

    def packed_bytes(self, packed: Any) -> int:
        """Memory that a packed layer takes."""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O] in x's dtype, with the weights as they were quantised.

        A driver may quantise `x` too; what a row gives does not depend on the rows beside it then.
        """
