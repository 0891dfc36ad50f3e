"""8-bit floats in blocks of 128 x 128 and rows in groups of 128, multiplied by DeepGEMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import CheckpointError
from engine_cuda.ops_triton.experts import Experts
from engine_deepgemm.blocks import BLOCK, in_blocks, powers_of_two
from engine_deepgemm.rows import FP8, quantize_groups
from engine_kit.by_expert import Spread
from engine_kit.libraries import loaded
from engine_kit.routing import ExpertAct
from engine_quantization.body import ReadsStored
from engine_quantization.readers import Codes, lengths_of, rows_of, taken_apart
from engine_quantization.trial import ExpertsTrial, hold_to

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_deepgemm.card import DeepGemmOptions

LIBRARY = "DeepGEMM"
OF_STORED = (1, BLOCK, BLOCK)
"""Rows, outputs and inputs that share a scale, as weights are stored."""
NEAR = 2.0**-4
"""Of the largest number of a token's result, of experts joined beside each by itself: rows that are rounded to e4m3
between may be the next number in one of them."""


@dataclass
class Blocks:
    """A layer, or the same of all experts with a dimension [E] before the others. An expert's is a view of that, once
    they are joined.

    Args:
        codes: e4m3 [N, K], multiples of 128.
        scales: as the library takes them: float32 [N / 128, K / 128], or int32, four exponents a word, for Blackwell.
        place: int64 [O], the column of each output; None: the first O.
        outputs: O.
        bias: [O] or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    place: torch.Tensor | None
    outputs: int
    bias: torch.Tensor | None


class PackedExperts(NamedTuple):
    """Both projections of all experts."""

    first: Blocks
    last: Blocks

    def tensors(self, place: int) -> Sequence[torch.Tensor]:
        """See `engine_kit.routing.TellsTensors`."""
        of_each = [t for side in self for t in (side.codes, side.scales, side.bias) if t is not None]
        # Scales for Blackwell lie with the words of outputs together: as they lie they are dense.
        every = (tensor[place] for tensor in of_each)
        return [one if one.is_contiguous() else one.T for one in every]


def load() -> Any:
    """The library. Raises ConfigError where it does not load: it is built for one version of torch."""
    hint = "install the build for this torch and CUDA, or name another driver by --quantization stored-triton"
    return loaded("sgl-deep-gemm", ["deep_gemm"], hint)[0]


def on_blackwell(device: torch.device | None) -> bool:
    """Whether the library takes scales that are powers of two alone."""
    return device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


class DeepGemmBody(ReadsStored):
    """See `engine.interfaces.quantization.Quantization`. Experts are rows sorted by expert, from multiples of the
    library's block on; how many there are follows from the step's shape, so the host waits for nothing."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        options: DeepGemmOptions = context.options
        self._dtype = context.dtype or torch.bfloat16
        self._library = load()
        self._powers = on_blackwell(context.device)
        self._recipe = (1, 1, BLOCK) if self._powers else OF_STORED
        self._aligned = int(self._library.get_mk_alignment_for_contiguous_layout())
        self._act = Experts()
        start = context.start
        self._most_rows = max(start.max_num_batched_tokens, start.max_num_seqs)
        self._warm_up = options.warm_up
        self._held = False
        self._warm: set[tuple[int, ...]] = set()
        self._held_experts = False

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Blocks:
        """Blocks stay as they are stored: rows that belong elsewhere are put there behind the product."""
        codes, bias = taken_apart(layer._replace(orders={}), self._form(layer), tensors)
        held, scales, place = in_blocks(codes, lengths_of(layer))
        if self._powers:
            if not powers_of_two(scales):
                raise CheckpointError(
                    f"load {', '.join(layer.names)}",
                    "its scales are no powers of two, which quantization_config (scale_fmt) says they are",
                    "mend scale_fmt in quantization_config",
                )
            scales = self._library.transform_sf_into_required_layout(
                scales, held.shape[0], held.shape[1], OF_STORED, is_sfa=False
            )
        packed = Blocks(held.view(FP8), scales, None, len(place), None)  # both were made anew
        self._try(layer, codes, packed, place)
        if layer.orders:
            rows = rows_of(layer).to(place.device)
            place, bias = place[rows], None if bias is None else bias[rows]
        first = torch.arange(len(place), device=place.device)
        kept = None if torch.equal(place, first) else place
        return replace(packed, place=kept, bias=None if bias is None else bias.to(self._dtype, copy=True))

    def _try(self, layer: LayerShape, codes: Codes, packed: Blocks, place: torch.Tensor) -> None:
        """The first layer is held to its codes; then kernels of each size of dense layer are compiled."""
        if not self._held:
            hold_to(layer, codes, None, lambda x: self._multiply(x, packed)[:, place], self._dtype, LIBRARY)
        self._held = True
        outputs, inputs = packed.codes.shape
        if not self._warm_up or layer.kind == "expert" or (outputs, inputs) in self._warm:
            return
        self._warm.add((outputs, inputs))
        rows = 1
        while rows <= self._most_rows:
            self._multiply(torch.zeros(rows, inputs, dtype=self._dtype, device=place.device), packed)
            rows *= 2

    def packed_bytes(self, packed: Blocks) -> int:
        """Codes, scales, places and bias, with their padding."""
        held = (packed.codes, packed.scales, packed.place, packed.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def linear(self, x: torch.Tensor, packed: Blocks) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype."""
        out = _given(self._multiply(x, packed), packed)
        return out if packed.bias is None else out + packed.bias

    def _multiply(self, x: torch.Tensor, packed: Blocks) -> torch.Tensor:
        """x [T, I] -> [T, N]."""
        outputs, inputs = packed.codes.shape
        rows = quantize_groups(x, inputs, self._powers)
        out = torch.empty(len(x), outputs, dtype=torch.bfloat16, device=x.device)
        if len(x):
            self._library.fp8_gemm_nt(rows, (packed.codes, packed.scales), out, recipe=self._recipe)
        return out

    def pack_experts(self, experts: Sequence[tuple[Blocks, Blocks]]) -> PackedExperts:
        """Both projections of each -> what `experts` takes. Raises ConfigError where that computes another thing than
        each by itself."""
        packed = PackedExperts(*(_joined([pair[side] for pair in experts]) for side in (0, 1)))
        if not self._held_experts:
            self._try_experts(experts, packed)
        self._held_experts = True
        return packed

    def _try_experts(self, experts: Sequence[tuple[Blocks, Blocks]], packed: PackedExperts) -> None:
        (first, last), device = experts[0], packed.first.codes.device
        act = ExpertAct(gated=first.outputs > last.codes.shape[1])

        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            of_first, of_last = experts[expert]
            return self.linear(self._act.gated_act(self.linear(rows, of_first), act), of_last)

        trial = ExpertsTrial(len(experts), first.codes.shape[1], one, self._dtype, device, LIBRARY)
        trial.hold(lambda x, ids, weights: self.experts(x, packed, ids, weights, act), NEAR)

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H]."""
        if not len(x):
            return x.new_empty(0, packed.last.outputs)
        spread = Spread.of(ids, len(packed.first.codes), self._aligned)
        codes, scales = quantize_groups(x, packed.first.codes.shape[2], self._powers)
        rows = codes.view(torch.uint8).index_select(0, spread.token).view(FP8)
        scales = scales.T.index_select(1, spread.token).T
        between = self._act.gated_act(self._grouped(rows, scales, packed.first, spread), act)
        rows, scales = quantize_groups(between, packed.last.codes.shape[2], self._powers)
        return spread.summed(self._grouped(rows, scales, packed.last, spread), weights)

    def _grouped(self, rows: torch.Tensor, scales: torch.Tensor, side: Blocks, spread: Spread) -> torch.Tensor:
        """rows e4m3 [M, K] by the experts that they belong to -> [M, O]; nobody's rows hold anything."""
        out = torch.empty(len(rows), side.codes.shape[1], dtype=torch.bfloat16, device=rows.device)
        self._library.m_grouped_fp8_gemm_nt_contiguous(
            (rows, scales), (side.codes, side.scales), out, spread.expert, recipe=self._recipe
        )
        out = _given(out, side)
        return out if side.bias is None else out + side.bias[spread.expert.clamp(min=0).long()]


def _given(out: torch.Tensor, packed: Blocks) -> torch.Tensor:
    """[T, N] -> [T, O], the outputs where the layer has them."""
    if packed.place is not None:
        return out.index_select(1, packed.place)
    return out if out.shape[1] == packed.outputs else out[:, : packed.outputs].contiguous()


def _joined(layers: Sequence[Blocks]) -> Blocks:
    """Of the same sizes, one after another."""
    first = layers[0]
    bias = None if first.bias is None else torch.stack([one.bias for one in layers if one.bias is not None])
    scales = torch.stack([one.scales for one in layers])
    if first.scales.dtype == torch.int32:  # its rows lie together, as of one layer
        scales = torch.stack([one.scales.T for one in layers]).transpose(1, 2)
    codes = torch.stack([one.codes.view(torch.uint8) for one in layers]).view(FP8)
    for place, one in enumerate(layers):
        one.codes = codes[place]
        one.scales = scales[place]
        one.bias = None if bias is None else bias[place]
    return replace(first, codes=codes, scales=scales, bias=bias)
