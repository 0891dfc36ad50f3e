"""A step's inputs, read from the tables of tokens and blocks."""

from __future__ import annotations

import torch

from engine.interfaces.ops import StepInputs, StepTables
from engine.types.kv import NULL_PAGE


class Inputs:
    """Token ids, positions, block tables and slot mappings of a step."""

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        """Fill `token_ids`, `positions`, `block_tables` and `slot_mappings` from the tables, in place.

        Every row has at least one token. Tokens at or past query_start_loc[R] are padding.
        """
        num_rows, num_tokens = len(inputs.slot_of_row), len(inputs.token_ids)
        for group, table in enumerate(tables.blocks):
            torch.index_select(table, 0, inputs.slot_of_row, out=inputs.block_tables[group])
        if num_rows == num_tokens:  # so each row has exactly one token, and none is padding
            inputs.positions.copy_(inputs.num_computed)
            row: torch.Tensor | None = None
            padding: torch.Tensor | None = None
            slot = inputs.slot_of_row
        else:
            token = torch.arange(num_tokens, device=inputs.slot_of_row.device, dtype=torch.int32)
            row = torch.searchsorted(inputs.query_start_loc[1:], token, right=True)
            padding = row == num_rows
            row.clamp_(max=num_rows - 1)
            start = inputs.num_computed - inputs.query_start_loc[:-1]
            inputs.positions.copy_((start[row] + token).masked_fill_(padding, 0))
            slot = inputs.slot_of_row[row]
        place = torch.add(inputs.positions, slot, alpha=tables.tokens.shape[1])
        torch.index_select(tables.tokens.view(-1), 0, place, out=inputs.token_ids)
        if padding is not None:
            inputs.token_ids.masked_fill_(padding, 0)
        for block_table, slot_mapping, tokens_per_block in zip(
            inputs.block_tables, inputs.slot_mappings, tables.tokens_per_block, strict=True
        ):
            block = torch.div(inputs.positions, tokens_per_block, rounding_mode="floor")
            if row is None:
                page = block_table.gather(1, block.unsqueeze(1)).squeeze(1)
            else:
                page = block_table[row, block]
            # page * tokens_per_block + (position - block * tokens_per_block), in int64
            torch.add(inputs.positions, page.long() - block, alpha=tokens_per_block, out=slot_mapping)
            if padding is not None:
                slot_mapping.masked_fill_(padding, NULL_PAGE * tokens_per_block)
