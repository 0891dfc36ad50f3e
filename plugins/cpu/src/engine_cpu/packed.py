"""Linear layers over packed weights: tensors to addresses, for the drivers that multiply with them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch

from engine.types.errors import ConfigError
from engine_cpu import _native as native
from engine_cpu._native import Layout, PackedOps, levels
from engine_cpu.dtypes import DTYPES

LARGE_BYTES = 256 << 10
"""Less than that comes from the heap."""
BLOCK_BYTES, HUGE_PAGE_BYTES, PAGE_BYTES = 64 << 20, 2 << 20, 4 << 10
MOST_INPUTS = 65536
"""Of a layer in 8 bits: more products might not fit 32 bits."""


class Memory:
    """Memory for what stays as long as a model does.

    Large pieces lie side by side in blocks, for which the system is asked for huge pages before they are first touched:
    reading weights misses the translation buffers less often then, and no page has an end that is lost. They are not
    taken from the heap: there they would lie between the plain weights that come and go while a model is loaded, whose
    memory would then not be given back, nor be of use for the next ones. A block is given back with its last piece.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size]."""
        if size < LARGE_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        end = -(-size // PAGE_BYTES) * PAGE_BYTES
        if end <= len(self._rest):
            piece, self._rest = self._rest[:size], self._rest[end:]
            return piece
        length = max(BLOCK_BYTES, -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        mapping = mmap(-1, length, flags=MAP_PRIVATE | MAP_ANONYMOUS)  # lives as long as the tensors
        with suppress(OSError):  # a system without huge pages
            mapping.madvise(MADV_HUGEPAGE)
        block = torch.frombuffer(mapping, dtype=torch.uint8)
        self._rest = max(self._rest, block[end:], key=len)
        return block[:size]


@dataclass(frozen=True, slots=True)
class Packed:
    """A layer's weights, as native/layout.h says.

    Args:
        layout: format and sizes.
        made_of: what the layout was made of: format, outputs, inputs, inputs of a group, dtype of scales. Layouts are
            alike where these are.
        outputs: O.
        weight: uint8.
        scales: float32 [O, padded], of int8; [16], what stored codes of 4 bits stand for where that is a table; else
            None.
        bias: float32 [O, padded] or None.
        order: int32 [I], of stored codes: which input of a row comes where; None: as they stand.
    """

    layout: Layout
    made_of: tuple[str, int, int, int, str]
    outputs: int
    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        tensors = (self.weight, self.scales, self.bias, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PackedLinear:
    """Packs weights, and multiplies with them.

    Calls are native from end to end, and may be recorded: their scratch memory is this object's, and stays where it is
    for as long as that. They run one after the other.

    Args:
        point: whose option `level` this is, for the error.
        level: of processor features, or "auto".

    Raises:
        ConfigError: this processor has not got the level.
    """

    def __init__(self, point: str, level: str) -> None:
        self._threads = torch.get_num_threads()
        try:
            self._ops = PackedOps(level, self._threads)
        except ValueError as error:
            raise ConfigError(
                f"{point}.level {level}", str(error), f"choose auto or one of {', '.join(levels())}"
            ) from error
        self._memory = Memory()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[torch.Tensor] = []  # whose addresses were recorded, perhaps

    def pack(
        self, form: str, weight: torch.Tensor, bias: torch.Tensor | None, group_size: int = 0, lasting: bool = True
    ) -> Packed:
        """weight [O, I] in float32 or bfloat16, bias [O]; neither is kept.

        Args:
            form: "float32", "bfloat16" or "float16" for weights of that dtype; "int8", "int4".
            group_size: of int4.
            lasting: stays as long as the model does; what does not has memory of its own.
        """
        outputs, inputs = weight.shape
        if weight.stride(-1) != 1:
            weight = weight.contiguous()
        made_of = (form, outputs, inputs, group_size, "float32")
        layout = Layout(*made_of)
        packed = self._memory.take(layout.bytes) if lasting else torch.empty(layout.bytes, dtype=torch.uint8)
        scales = torch.empty(layout.panels * 32, dtype=torch.float32) if form == "int8" else None
        layout.pack(
            DTYPES[weight.dtype], weight.data_ptr(), weight.stride(0), packed.data_ptr(),
            0 if scales is None else scales.data_ptr(), self._threads,
        )  # fmt: skip
        return Packed(layout, made_of, outputs, packed, scales, _padded(bias, layout.panels * 32))

    def pack_codes(
        self,
        form: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        group_size: int,
        table: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> Packed:
        """Weights that a checkpoint stores as codes, see native/layout.h; nothing is kept.

        Args:
            form: "codes4", "codes8", "values4", "values8"; or "int8", where 128 stands for zero and the inputs are one
                group.
            codes: uint8 [O, I].
            scales: float32, float16 or bfloat16 [O, groups].
            zeros: uint8 [O, groups], of whole numbers; else None.
            bias: [O] or None.
            group_size: a multiple of 4.
            table: [16], what codes of 4 bits stand for: whole numbers from 0 to 255 of codes4; of values4 any.
            order: int32 [I], see `Packed`.
        """
        outputs, inputs = codes.shape
        made_of = (form, outputs, inputs, group_size, str(scales.dtype).removeprefix("torch."))
        layout = Layout(*made_of)
        packed, padded = self._memory.take(layout.bytes), layout.panels * 32
        codes, scales = codes.contiguous(), scales.contiguous()
        zeros = None if zeros is None else zeros.contiguous()
        layout.pack_codes(
            codes.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), packed.data_ptr(),
            self._threads,
        )  # fmt: skip
        beside = None if table is None else table.float().clone()
        if form == "int8":
            beside = _padded(scales[:, 0], padded)
        kept = None if order is None else order.to(torch.int32).clone()
        return Packed(layout, made_of, outputs, packed, beside, _padded(bias, padded), kept)

    def pack_blocks(self, form: str, blocks: torch.Tensor, inputs: int, bias: torch.Tensor | None) -> Packed:
        """blocks uint8 [O, bytes of I inputs] in one of the formats of native/blocks.h, bias [O]; neither is kept."""
        blocks = blocks.contiguous()
        made_of = (form, len(blocks), inputs, 0, "float32")
        layout = Layout(*made_of)
        packed = self._memory.take(layout.bytes)
        layout.pack_blocks(blocks.data_ptr(), blocks.stride(0), packed.data_ptr(), self._threads)
        return Packed(layout, made_of, len(blocks), packed, None, _padded(bias, layout.panels * 32))

    def linear(self, x: torch.Tensor, packed: Packed, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype; `out`, whose rows may lie apart, where it is given."""
        rows = x.shape[0]
        if out is None:
            out = x.new_empty((rows, packed.outputs))
        if not rows:
            return out
        if x.stride(-1) != 1:
            x = x.contiguous()
        size = packed.layout.scratch_bytes(rows)
        if size > self._scratch.nbytes:
            self._outgrown.append(self._scratch)
            self._scratch = torch.empty(2 * size, dtype=torch.uint8)
        scales, bias = packed.scales, packed.bias
        self._ops.linear(
            packed.layout, DTYPES[x.dtype], x.data_ptr(), x.stride(0), rows, packed.weight.data_ptr(),
            0 if scales is None else scales.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            out.stride(0), self._scratch.data_ptr(), 0 if packed.order is None else packed.order.data_ptr(),
        )  # fmt: skip
        return out

    def look_up(self, ids: torch.Tensor, packed: Packed, dtype: torch.dtype, first: int | None) -> torch.Tensor:
        """ids int32 or int64 [T] -> rows ids - first of a layer of blocks or floats, [T, I] in float32 or bfloat16.

        first: ids outside of first .. first + O - 1 give zeros; None: there is no such id, and 0 is the first.
        """
        ids = ids.contiguous()
        out = torch.empty((len(ids), packed.made_of[2]), dtype=dtype)
        native.look_up(
            packed.layout, DTYPES[dtype], packed.weight.data_ptr(), ids.data_ptr(), ids.dtype == torch.int64, len(ids),
            first or 0, first is not None, out.data_ptr(), self._threads,
        )  # fmt: skip
        return out


def _padded(numbers: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """[O] -> float32 [size], with zeros behind."""
    if numbers is None:
        return None
    found = torch.zeros(size, dtype=torch.float32)
    found[: len(numbers)] = numbers
    return found
