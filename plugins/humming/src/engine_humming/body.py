"""Weights of 4 and 8 bits and rows of 16, multiplied by Humming."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine_cuda.ops_triton.experts import Experts
from engine_humming.card import LEAST_GROUP, takes_groups
from engine_humming.form import Scheme, in_form, symmetric
from engine_kit.by_expert import Spread
from engine_kit.libraries import loaded
from engine_kit.routing import ExpertAct
from engine_quantization.body import ReadsStored
from engine_quantization.order import in_order, refused
from engine_quantization.readers import Codes, taken_apart
from engine_quantization.trial import ExpertsTrial, hold_to, product
from engine_quantization.triton_body import TritonBody

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

log = logging.getLogger(__name__)

LIBRARY = "Humming"
MODULES = ("humming.schema", "humming.transform", "humming.forward")
UNIT = 8
"""Inputs and outputs that a layer has a multiple of: a row is whole 16 bytes, codes for zero are whole words."""
PADDED = 128
"""Outputs and inputs of a tile, up to a multiple of which the library fills a layer up."""
LOCKS = 2048
"""Words in which the library's programs tell each other where they are; each layer has its own, as it asks for."""
SMALLEST = 2.0**-14
"""Of float16's numbers with all of their bits."""
NEAR = 2.0**-5
"""Of the largest number of a token's result, of joined experts beside their codes: both are rounded between."""


class Layer(NamedTuple):
    """A layer, or the same of all experts.

    Args:
        config: the library's.
        tensors: by the library's names, and as it takes them.
        order: int64, which input of a row comes where; None: as they stand.
        outputs: O.
    """

    config: Any
    tensors: Mapping[str, torch.Tensor]
    order: torch.Tensor | None
    outputs: int


class OneExpert:
    """An expert's projection, in the library's format, but not yet as its kernels read it: all of a layer become so
    together. By itself it is made so when something multiplies with it alone (adapters of experts).

    Attributes:
        codes: what it is made of, until then.
        bias: [O] or None.
        alone: what it was made by itself.
        joined_bytes: its share of what was made of all.
    """

    def __init__(
        self, codes: Codes, bias: torch.Tensor | None, powers_of_two: bool, order: torch.Tensor | None
    ) -> None:
        self.codes: Codes | None = codes
        self.bias = bias
        self.powers_of_two = powers_of_two
        self.order = order
        self.alone: Layer | None = None
        self.joined_bytes = 0


class PackedExperts(NamedTuple):
    """Both projections of all experts."""

    first: Layer
    last: Layer

    def tensors(self, place: int) -> Sequence[torch.Tensor]:
        """See `engine_kit.routing.TellsTensors`."""
        return [tensor[place] for side in self for key, tensor in side.tensors.items() if key != "locks"]


class Library(NamedTuple):
    """The library's functions.

    Args:
        schema: `HummingWeightSchema`.
        prepare, transform: `prepare_layer_config`, `transform_humming_tensors`.
        forward: `humming_forward`.
    """

    schema: Any
    prepare: Any
    transform: Any
    forward: Any


def load() -> Library:
    """Raises ConfigError where it does not load."""
    hint = "install it with its parts (humming-kernels[cu13]), or name another driver by --quantization stored-triton"
    schema, transform, forward = loaded("humming-kernels", MODULES, hint)
    prepare, humming_tensors = transform.prepare_layer_config, transform.transform_humming_tensors
    return Library(schema.HummingWeightSchema, prepare, humming_tensors, forward.humming_forward)


class HummingBody(ReadsStored):
    """See `engine.interfaces.quantization.Quantization`. The library compiles the kernels of a layer's form, for all
    numbers of rows, when it is first multiplied with: here while weights are loaded."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._dtype = context.dtype or torch.bfloat16
        self._device = context.device
        self._library = load()
        self._act = Experts()
        self._others = TritonBody(context)
        self._told: set[str] = set()
        self._tried: set[Any] = set()
        self._held_experts = False

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        """In the library's form; one that it does not take as `stored-triton` has it. Raises ConfigError for an expert
        that it does not take: those of a layer are multiplied together."""
        form = self._form(layer)
        codes, bias = taken_apart(layer, form, tensors)
        codes, order = in_order(codes)
        if why := self._why_not(codes):
            if layer.kind == "expert":
                raise refused(layer, why)
            if why not in self._told:
                log.warning("%s is multiplied by 'stored-triton', not by %s: %s", ", ".join(layer.names), LIBRARY, why)
            self._told.add(why)
            return self._others.pack(layer, tensors)
        bias = None if bias is None else bias.to(self._dtype, copy=True)
        powers = form.reader == "mxfp4"
        if layer.kind == "expert":
            held = codes._replace(codes=codes.codes.clone(), scales=codes.scales.clone(), zeros=_copy(codes.zeros))
            return OneExpert(held, bias, powers, order)
        scheme, made = in_form(codes, self._dtype, powers)
        packed = self._made(scheme, codes.codes.shape, made, bias, order)
        self._try(layer, codes, bias, scheme, packed)
        return packed

    def _why_not(self, codes: Codes) -> str:
        (outputs, inputs), groups, size = codes.codes.shape, codes.scales.shape[1], codes.group_size
        if outputs % UNIT or inputs % UNIT:
            return f"it has {outputs} outputs and {inputs} inputs, which are no multiples of {UNIT}"
        if groups > 1 and (not takes_groups(size) or inputs % size):
            why = f"{size} of its {inputs} inputs share a scale; the library takes whole groups, of a power of two"
            return f"{why} from {LEAST_GROUP} on"
        if self._dtype == torch.float16 and bool(((codes.scales != 0) & (codes.scales.abs() < SMALLEST)).any()):
            return "some of its scales are smaller than float16 holds exactly; --dtype bfloat16 does"
        return ""

    def _made(
        self,
        scheme: Scheme,
        sizes: Sequence[int],
        tensors: dict[str, torch.Tensor],
        bias: torch.Tensor | None,
        order: torch.Tensor | None,
        experts: int | None = None,
    ) -> Layer:
        """As the library's kernels read it."""
        schema = self._library.schema(
            b_dtype=scheme.dtype,
            bs_dtype=scheme.scale_dtype or None,
            weight_scale_group_size=scheme.group,
            has_zero_point=scheme.zeros,
        )
        if bias is not None:
            tensors = {**tensors, "bias": bias}
        outputs, inputs = sizes
        config = self._library.prepare(
            outputs, inputs, schema, num_experts=experts, pad_n_to_multiple=PADDED,
            pad_k_to_multiple=max(PADDED, scheme.group), has_bias=bias is not None, torch_dtype=self._dtype,
            device=self._device, tensors=tensors,
        )  # fmt: skip
        held = self._library.transform(config, tensors)
        locks = torch.zeros(LOCKS, dtype=torch.int32, device=tensors["weight"].device)
        return Layer(config, {**held, "locks": locks}, order, outputs)

    def _try(self, layer: LayerShape, codes: Codes, bias: Any, scheme: Scheme, packed: Layer) -> None:
        """The first layer of each scheme is held to its codes, inputs standing group by group; others are multiplied
        with once, to be compiled."""
        sizes = codes.codes.shape
        if scheme not in self._tried:
            hold_to(layer, codes, bias, lambda x: self._multiply(x, packed), self._dtype, LIBRARY)
        elif (scheme, sizes) not in self._tried:
            self._multiply(torch.zeros(1, sizes[1], dtype=self._dtype, device=codes.codes.device), packed)
        self._tried |= {scheme, (scheme, sizes)}

    def packed_bytes(self, packed: Any) -> int:
        """Codes, scales, zeros and bias, with their padding; locks, and what says how inputs are ordered."""
        if isinstance(packed, OneExpert):
            if packed.codes is None:
                return packed.joined_bytes if packed.alone is None else self.packed_bytes(packed.alone)
            held = [packed.codes.scales, packed.codes.zeros, packed.bias, packed.order]
            # Codes lie a byte each until they are joined.
            size = packed.codes.codes.numel() * packed.codes.bits // 8
            return size + sum(tensor.nbytes for tensor in held if tensor is not None)
        if not isinstance(packed, Layer):
            return self._others.packed_bytes(packed)
        order = 0 if packed.order is None else packed.order.nbytes
        return order + sum(tensor.nbytes for tensor in packed.tensors.values())

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype."""
        if isinstance(packed, OneExpert):
            packed = self._alone(packed)
        if not isinstance(packed, Layer):
            return self._others.linear(x, packed)
        return self._multiply(x if packed.order is None else x.index_select(1, packed.order), packed)

    def _alone(self, one: OneExpert) -> Layer:
        if one.alone is None:
            assert one.codes is not None, "experts that are joined are computed together"
            scheme, tensors = in_form(one.codes, self._dtype, one.powers_of_two)
            one.alone = self._made(scheme, one.codes.codes.shape, tensors, one.bias, one.order)
            one.codes = None
        return one.alone

    def _multiply(self, x: torch.Tensor, packed: Layer, starts: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], of experts sorted, with where the rows of each begin -> [T, O]."""
        if not len(x):
            return x.new_empty(0, packed.outputs)
        grouped: dict[str, Any] = {}
        if starts is not None:
            grouped = {"compute_config": {"gemm_type": "grouped_contiguous"}, "expert_layout": starts}
        out: torch.Tensor = self._library.forward(packed.config, x.contiguous(), **packed.tensors, **grouped)
        return out

    def pack_experts(self, experts: Sequence[tuple[OneExpert, OneExpert]]) -> PackedExperts:
        """Both projections of each -> what `experts` takes. Raises ConfigError where inputs are in orders of their own,
        and where the library computes another thing than the codes say."""
        sides = [[pair[side] for pair in experts] for side in (0, 1)]
        if any(one.order is not None for side in sides for one in side):
            raise ConfigError(
                f"multiply with {len(experts)} experts by {LIBRARY}",
                "their groups of inputs follow one another in an order of their own (g_idx)",
                "name the driver that takes them one by one, by --quantization expert=stored-triton",
            )
        first, last = experts[0]
        assert first.codes is not None and last.codes is not None
        act = ExpertAct(gated=len(first.codes.codes) > last.codes.codes.shape[1])
        trial = None if self._held_experts else self._trial(experts, first.codes, act)
        packed = PackedExperts(*(self._joined(side) for side in sides))
        if trial is not None:
            trial.hold(lambda x, ids, weights: self.experts(x, packed, ids, weights, act), NEAR)
        self._held_experts = True
        return packed

    def _trial(self, experts: Sequence[tuple[OneExpert, OneExpert]], first: Codes, act: ExpertAct) -> ExpertsTrial:
        """By widened weights, while the codes are there: of some checkpoints the experts alone are stored so, and no
        dense layer has tried the library. first: some expert's first projection."""

        def projected(rows: torch.Tensor, side: OneExpert) -> torch.Tensor:
            assert side.codes is not None
            return product(rows, side.codes, side.bias).to(self._dtype)

        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            of_first, of_last = experts[expert]
            return projected(self._act.gated_act(projected(rows, of_first), act), of_last)

        codes = first.codes
        return ExpertsTrial(len(experts), codes.shape[1], one, self._dtype, codes.device, LIBRARY)

    def _joined(self, experts: Sequence[OneExpert]) -> Layer:
        """Of the same sizes, whose codes go one by one; those for zero are left out where none of them needs any."""
        symmetric_all = all(one.codes is None or symmetric(one.codes) for one in experts)
        stacked: dict[str, torch.Tensor] = {}
        scheme, sizes = None, torch.Size()
        for place, one in enumerate(experts):
            held = one.codes
            assert held is not None
            sizes = held.codes.shape
            scheme, tensors = in_form(held, self._dtype, one.powers_of_two, not symmetric_all)
            one.codes = None
            for key, tensor in tensors.items():
                if key not in stacked:
                    stacked[key] = tensor.new_empty(len(experts), *tensor.shape)
                stacked[key][place].copy_(tensor)
        assert scheme is not None
        biases = [one.bias for one in experts if one.bias is not None]
        joined = self._made(scheme, sizes, stacked, torch.stack(biases) if biases else None, None, len(experts))
        for one in experts:
            one.joined_bytes = self.packed_bytes(joined) // len(experts)
        return joined

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H]. The host waits for nothing."""
        if not len(x):
            return x.new_empty(0, packed.last.outputs)
        count = next(iter(packed.first.tensors.values())).shape[0]
        spread = Spread.of(ids, count)
        rows = self._multiply(x.index_select(0, spread.token), packed.first, spread.starts)
        between = self._act.gated_act(rows, act)
        return spread.summed(self._multiply(between, packed.last, spread.starts), weights)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
