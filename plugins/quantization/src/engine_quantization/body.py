"""Drivers of stored weights: the part that all have, and driver `stored`, which computes in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.interfaces.quantization import LayerShape, StoredTensor, stored_form
from engine.types.errors import CheckpointError
from engine_quantization.methods import Form, Method, method_of
from engine_quantization.readers import Codes, nibbles, stored_tensors, taken_apart

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

PIECE = 1 << 24
"""Weights that are widened at once."""


class ReadsStored:
    """What a layer's tensors are, and how they become codes. See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.start.model.config

    @cached_property
    def _method(self) -> Method:
        return method_of(stored_form(self._config) or {})

    def _form(self, layer: LayerShape) -> Form:
        """Raises CheckpointError where parts that are one matrix are stored unlike."""
        forms = {name: self._method.form(name, layer.kind) for name in layer.names}
        first, *others = dict.fromkeys(forms.values())
        if first is None or others:
            raise CheckpointError(
                f"load {', '.join(forms)} as one matrix",
                "quantization_config of config.json stores them unlike: "
                + "; ".join(f"{name} as {form or 'plain weights'}" for name, form in forms.items()),
                "use a checkpoint that stores them alike",
            )
        return first

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """Those of the layer's form, and its bias."""
        return stored_tensors(layer, self._form(layer))

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Codes, as this driver multiplies with them. Raises CheckpointError where they contradict the config, and
        ConfigError where the driver has no product for them."""
        return self._packed(layer, *taken_apart(layer, self._form(layer), tensors))

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Any:
        raise NotImplementedError


class Kept(NamedTuple):
    """A layer, as `Codes`; codes of 4 bits are two to a byte.

    Args:
        codes: uint8 [O, bytes].
        inputs: I.
        group_of: int64 [I].
        bias: [O] or None.
    """

    codes: torch.Tensor
    bits: int
    inputs: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    values: torch.Tensor | None
    group_of: torch.Tensor
    bias: torch.Tensor | None

    def weight(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some outputs' weights [O, I] in dtype, computed in float32, or float64 for that."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes = self.codes[rows]
        if self.bits == 4:
            codes = nibbles(codes)[:, : self.inputs]
        numbers = codes.to(wide) if self.values is None else self.values.to(wide)[codes.long()]
        if self.zeros is not None:
            numbers -= self.zeros[rows].to(wide)[:, self.group_of]
        return (numbers * self.scales[rows].to(wide)[:, self.group_of]).to(dtype)


class TorchBody(ReadsStored):
    """Weights are widened for each product, some outputs at a time."""

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Kept:
        held, inputs = codes.codes, codes.codes.shape[1]
        if codes.bits == 4:
            held = F.pad(held, (0, inputs % 2))
            held = held[:, ::2] | held[:, 1::2] << 4
        group_of = codes.group_of
        if group_of is None:
            group_of = torch.arange(inputs, device=held.device) // codes.group_size
        values = None if codes.values is None else codes.values.to(held.device)
        kept = [None if t is None else t.contiguous().clone() for t in (codes.scales, codes.zeros, bias)]
        scales, zeros, bias = kept
        assert scales is not None
        return Kept(held.contiguous().clone(), codes.bits, inputs, scales, zeros, values, group_of, bias)

    def packed_bytes(self, packed: Kept) -> int:
        """Codes, scales, zeros, bias, and what says which group an input is in."""
        return sum(tensor.nbytes for tensor in packed if isinstance(tensor, torch.Tensor))

    def linear(self, x: torch.Tensor, packed: Kept) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype."""
        outputs = len(packed.codes)
        step = max(1, PIECE // max(1, packed.inputs))
        if outputs <= step:
            return F.linear(x, packed.weight(slice(None), x.dtype), packed.bias)
        out = x.new_empty(x.shape[0], outputs)
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            out[:, rows] = F.linear(x, packed.weight(rows, x.dtype), None if packed.bias is None else packed.bias[rows])
        return out
