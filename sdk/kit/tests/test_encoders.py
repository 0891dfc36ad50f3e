"""Places of what encoders make: who finds an input there, and who makes room for another."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.types.kv import KVGroup
from engine.types.model import EncoderForm
from engine.types.params import SamplingParams
from engine.types.plan import LeftSlots, NewSlot
from engine.types.request import EncoderInput
from engine_kit.encoders import Encoders

SLOTS, BLOCK = 3, 4
GROUP = KVGroup(
    index=1, kind="cross", sites=(1,), num_kv_heads=1, head_size=2, sliding_window=None, tokens_per_block=BLOCK,
    layer_bytes=64, table=None,
)  # fmt: skip


class Device:
    """A platform, the model, and the attention of a layer that writes what it is given where the plan says."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.groups = (GROUP,)
        self.plans: list[Any] = [None, None]
        self.encoded: list[list[int]] = []

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(host)

    def allocate_pool(self, pages: int, page_bytes: int) -> torch.Tensor:
        self.cells = np.full(pages * BLOCK, -1)
        return torch.zeros(pages, page_bytes, dtype=torch.uint8)

    def bind(self, pool: torch.Tensor, cross: bool = False) -> None:
        assert cross and pool.shape == (1 + SLOTS * 2, 64)

    def backend(self, group: KVGroup) -> Any:
        return SimpleNamespace(plan=lambda batch, group: batch)

    def encode(self, inputs: torch.Tensor) -> None:
        self.encoded.append(inputs.tolist())
        self.cells[self.plans[1].slot_mapping.numpy()] = inputs.numpy()

    def seen(self, row: int) -> list[int]:
        """What the row's queries see."""
        batch = self.plans[1]
        last = int(batch.kv_index[int(batch.query_start_loc[row])])
        table, places = batch.block_table[row].numpy(), np.arange(last + 1)
        assert int(batch.seq_lens[row]) == last + 1
        return self.cells[table[places // BLOCK] * BLOCK + places % BLOCK].tolist()


def entering(slot: int, ids: list[int]) -> NewSlot:
    given = EncoderInput(key=str(ids), num_tokens=len(ids), data=np.array(ids, np.int32))
    one = np.zeros(1, np.int32)
    return NewSlot(
        slot=slot, request_id="r", token_ids=one, num_prompt_tokens=1, params=SamplingParams(), stop_token_ids=one[:0],
        encoder=given,
    )  # fmt: skip


def leaving(slot: int) -> LeftSlots:
    return LeftSlots(slot=np.array([slot], np.int32), num_tokens=np.array([1], np.int32))


def test_an_input_that_cannot_be_encoded_takes_no_place() -> None:
    """Whoever comes after it finds as many as before."""
    device: Any = Device()
    encoders = Encoders(device, device, device, EncoderForm(max_tokens=8), SLOTS)
    encode = device.encode
    device.encode = None
    for slot in range(SLOTS):
        with pytest.raises(TypeError):
            encoders.enter(entering(slot, [slot]))
        encoders.leave(leaving(slot))
    device.encode = encode
    for slot in range(SLOTS):
        encoders.enter(entering(slot, [slot]))
    assert device.encoded == [[0], [1], [2]]


def test_any_coming_and_going() -> None:
    """Rows see what their requests' encoders read, whoever else comes and goes; an input that is there is not encoded
    again, and one that nobody holds goes before one that left later."""
    rng = random.Random(0)
    inputs = [[100 * i + j for j in range(rng.randint(1, 8))] for i in range(6)]
    device: Any = Device()
    encoders = Encoders(device, device, device, EncoderForm(max_tokens=8), SLOTS)
    held: dict[int, list[int]] = {}
    kept: list[list[int]] = []  # of nobody, oldest first
    for _ in range(400):
        slot = rng.randrange(SLOTS)
        if slot in held:
            encoders.leave(leaving(slot))
            gone = held.pop(slot)
            if gone not in held.values():
                kept.append(gone)
        else:
            ids, before = rng.choice(inputs), len(device.encoded)
            there = ids in kept or ids in held.values()
            encoders.enter(entering(slot, ids))
            assert (len(device.encoded) - before, encoders.num_encoded) == (not there, len(device.encoded))
            kept = [one for one in kept if one != ids]
            held[slot] = ids
            distinct = {tuple(one) for one in held.values()}
            kept = kept[-(SLOTS - len(distinct)) :] if len(distinct) < SLOTS else []
        if held:
            slots = list(held)
            counts = np.array([rng.randint(1, 3) for _ in slots], np.int32)
            plan: Any = SimpleNamespace(
                slot_of_row=np.array(slots, np.int32), num_tokens=counts, num_rows=len(slots), num_decodes=0,
                total_tokens=int(counts.sum()),
            )  # fmt: skip
            assert encoders.inputs(plan, plan.total_tokens, 0) == {}
            assert [device.seen(row) for row in range(len(slots))] == [held[one] for one in slots]
            assert len(device.plans[1].kv_index) == plan.total_tokens
    assert 50 < len(device.encoded) < 200
