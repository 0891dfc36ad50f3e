"""Rows by their numbers, and a step's inputs: what moves and computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.types.plan import BROKEN
from engine_cpu import _native as native

if TYPE_CHECKING:
    from engine.interfaces.ops import StepInputs, StepTables

_INDICES = (torch.int32, torch.int64)


_Group = tuple[int, int, int, int, int, int, int]
_Addresses = tuple[int, int, int, int, int, int, int, int, int, list[_Group]]
"""What `native.prepare_inputs` takes."""


class Rows:
    """See `engine.interfaces.ops.Ops`."""

    _threads: int
    _prepared: tuple[tuple[StepInputs, StepTables, _Addresses], ...] = ()

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids int [T], weight [V, H] -> [T, H]."""
        return self._gathered(weight, ids, 0, False)

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        """ids int [T], weight [V', H] -> [T, H]; zeros for ids outside first .. first + V' - 1."""
        return self._gathered(weight, ids, first, True)

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [T, H], index int [R] -> [R, H]."""
        return self._gathered(x, index, 0, False)

    def _gathered(self, x: torch.Tensor, index: torch.Tensor, first: int, part: bool) -> torch.Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        if index.dtype not in _INDICES:
            index = index.long()
        index = index.contiguous()
        rows, width = x.shape
        size, count = x.itemsize, len(index)
        out = x.new_empty((count, width))
        native.gather_rows(
            self._threads, x.data_ptr(), x.stride(0) * size, rows, width * size, index.data_ptr(),
            index.dtype == torch.int64, count, first, part, out.data_ptr(),
        )  # fmt: skip
        return out

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        """Fill `token_ids`, `positions`, `block_tables` and `slot_mappings` from the tables, in place."""
        last = next((one for one in self._prepared if one[0] is inputs and one[1] is tables), None)
        if last is None:
            # Those of captured steps are the same objects, step after step: the model's, and a draft model's.
            last = inputs, tables, _addresses(tables, inputs)
            self._prepared = (last, *self._prepared[:1])
        native.prepare_inputs(*last[2])

    def place_tokens(
        self, tokens: torch.Tensor, broken: torch.Tensor, table: torch.Tensor, slot: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        """Write tokens int32 [R] to table[slot[i], place[i]]; int32 [R], `BROKEN` where broken[i], else the token."""
        count = len(tokens)
        out = torch.empty(count, dtype=torch.int32)
        native.place_tokens(
            tokens.data_ptr(), broken.data_ptr(), count, table.data_ptr(), table.stride(0), slot.data_ptr(),
            place.data_ptr(), BROKEN, out.data_ptr(),
        )  # fmt: skip
        return out


def _addresses(tables: StepTables, inputs: StepInputs) -> _Addresses:
    of_tables = zip(tables.blocks, tables.tokens_per_block, inputs.block_tables, inputs.slot_mappings, strict=True)
    return (
        tables.tokens.data_ptr(), tables.tokens.stride(0), len(inputs.slot_of_row), len(inputs.token_ids),
        inputs.slot_of_row.data_ptr(), inputs.num_computed.data_ptr(), inputs.query_start_loc.data_ptr(),
        inputs.token_ids.data_ptr(), inputs.positions.data_ptr(),
        [
            (
                table.data_ptr(), table.stride(0), table.shape[1], per_block, out.data_ptr(), out.stride(0),
                mapping.data_ptr(),
            )
            for table, per_block, out, mapping in of_tables
        ],
    )  # fmt: skip
