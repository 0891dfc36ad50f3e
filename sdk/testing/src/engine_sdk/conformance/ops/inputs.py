"""The inputs of a step, against a loop over rows and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.interfaces.ops import StepInputs, StepTables
from engine_sdk.conformance.ops.subject import OpsSubject

SIZES = (4, 6)
"""Tokens per block of two KV tables."""


class InputOperations(OpsSubject):
    """`prepare_inputs`."""

    @pytest.mark.parametrize("padding", [0, 3])
    @pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 4, 7), (9,), (1,), (1, 4, 0, 0)], ids=str)
    def test_prepare_inputs(self, lengths: tuple[int, ...], padding: int) -> None:
        """Tokens, positions, block tables and slot mappings from the tables of the slots; padding is token 0 at
        position 0, in slot 0 of the null page. Rows of no tokens end a captured step."""
        prepare, random = self.operation("prepare_inputs", "float32"), np.random.default_rng(len(lengths))
        rows, slots, total = len(lengths), 5, sum(lengths) + padding
        tokens = random.integers(0, 100, (slots, 41), dtype=np.int32)
        blocks = [random.integers(1, 50, (slots, 40 // size + 1), dtype=np.int32) for size in SIZES]
        computed = random.integers(0, 30, rows).astype(np.int32) * (np.array(lengths, np.int32) > 0)
        slot_of_row = random.permutation(slots)[:rows].astype(np.int32)

        def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, -7, dtype=dtype, device=self.device)

        inputs = StepInputs(
            slot_of_row=self.ints(slot_of_row.tolist(), torch.int32),
            num_computed=self.ints(computed.tolist(), torch.int32),
            query_start_loc=self.ints([0, *np.cumsum(lengths).tolist()], torch.int32),
            seq_lens=self.ints((computed + np.array(lengths)).tolist(), torch.int32),
            token_ids=filled(total, dtype=torch.int32),
            positions=filled(total, dtype=torch.int64),
            block_tables=tuple(filled(rows, table.shape[1], dtype=torch.int32) for table in blocks),
            slot_mappings=tuple(filled(total, dtype=torch.int64) for _ in SIZES),
        )
        tables = StepTables(
            tokens=self.ints(tokens.tolist(), torch.int32),
            blocks=tuple(self.ints(table.tolist(), torch.int32) for table in blocks),
            tokens_per_block=SIZES,
        )
        prepare(tables, inputs)
        ids: list[int] = []
        positions: list[int] = []
        mappings: list[list[int]] = [[] for _ in SIZES]
        for row, length in enumerate(lengths):
            for position in range(int(computed[row]), int(computed[row]) + length):
                ids.append(int(tokens[slot_of_row[row], position]))
                positions.append(position)
                for mapping, table, size in zip(mappings, blocks, SIZES, strict=True):
                    mapping.append(int(table[slot_of_row[row], position // size]) * size + position % size)
        assert inputs.token_ids.tolist() == ids + [0] * padding
        assert inputs.positions.tolist() == positions + [0] * padding
        for found, mapping in zip(inputs.slot_mappings, mappings, strict=True):
            assert found.tolist() == mapping + [0] * padding
        for found, table, size in zip(inputs.block_tables, blocks, SIZES, strict=True):
            for row, length in enumerate(inputs.seq_lens.tolist()):
                count = -(-length // size)
                assert found[row, :count].tolist() == table[slot_of_row[row], :count].tolist()
