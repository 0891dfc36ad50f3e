"""Decode steps as one graph: inputs, attention's plans, the model, the draw, and the drawn tokens' places.

What a draw needs of a row beside its logits lies on the device by slot, and is sent again only when a request enters.
The first kernel of the graph takes the rows' own, and puts the step's new pages into the tables; the last one writes
the tokens into the host's memory. So a step is two submissions: the copy of its header and pages, and the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from engine.interfaces.ops import Ops, SamplingRows, StepInputs, StepTables
from engine.interfaces.platform import Platform, Trial
from engine.types.errors import ContractError
from engine_cuda.platform_cuda.fetch import CudaFetch

if TYPE_CHECKING:
    from engine_cuda.platform_cuda.graphs import Replay

logger = logging.getLogger(__name__)

ROWS = 256
"""Of a program, as are new pages."""
TURNS = 8
"""Steps whose tokens the host's memory holds; a power of two. The ninth takes the place of the first, which was read
long before: two are under way at once."""
FIELDS = ("temperature", "top_k", "top_p", "min_p", "num_prompt")
"""Parameters of 32 bits, in the order of the device's table; the seeds of 64 bits come behind them."""
Record = Callable[[Callable[[], None], Trial], "Replay | Callable[[], None]"]
"""Captures work, and tries it."""


@triton.jit(do_not_specialize=["stride", "width", "count"])
def begin_kernel(
    news, tables, table_strides, turn, slot_of_row, seq_lens, words, seeds, words_out, longs_out, stride, width, count,
    TABLES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of R rows, whose programs divide the new pages, too.

    news: as `WholeSteps.capture` says; tables: a tuple of int32 [slots, blocks]. turn: int32 [1], counted up. words:
    [5, slots] of 32 bits, rows `stride` apart, as FIELDS says; seeds: int64 [slots]. words_out: [4, width], without the
    last of them; longs_out: int64 [4, width]: seeds, positions in the output, slots, and places of the drawn tokens.
    """
    if tl.program_id(0) == 0:
        tl.atomic_add(turn, 1)  # by one thread, which no other's load can overtake
    pages = tl.load(news)
    for first in range(tl.program_id(0) * ROWS, pages, tl.num_programs(0) * ROWS):
        offs_p = first + tl.arange(0, ROWS)
        known = offs_p < pages
        entry = news + 4 + 4 * offs_p
        table = tl.load(entry, mask=known, other=-1)
        owner = tl.load(entry + 1, mask=known, other=0).to(tl.int64)
        index = tl.load(entry + 2, mask=known, other=0)
        page = tl.load(entry + 3, mask=known, other=0)
        for number in tl.static_range(TABLES):
            tl.store(tables[number] + owner * table_strides[number] + index, page, mask=table == number)
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = offs < count
    slot = tl.load(slot_of_row + offs, mask=mask, other=0)
    place = tl.load(seq_lens + offs, mask=mask, other=0).to(tl.int64)
    for field in tl.static_range(4):
        tl.store(words_out + field * width + offs, tl.load(words + field * stride + slot, mask=mask), mask=mask)
    prompt = tl.load(words + 4 * stride + slot, mask=mask, other=0)
    tl.store(longs_out + offs, tl.load(seeds + slot, mask=mask), mask=mask)
    tl.store(longs_out + width + offs, place - prompt, mask=mask)
    tl.store(longs_out + 2 * width + offs, slot.to(tl.int64), mask=mask)
    tl.store(longs_out + 3 * width + offs, place, mask=mask)


@triton.jit(do_not_specialize=["count", "width"])
def tell_kernel(drawn, turn, told, count, width, TURNS: tl.constexpr, ROWS: tl.constexpr):
    """told[turn % TURNS, i] = drawn[i]. Grid: blocks of R. told: int32 [TURNS, width], in the host's memory."""
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = offs < count
    out = told + (tl.load(turn) & (TURNS - 1)) * width
    tl.store(out + offs, tl.load(drawn + offs, mask=mask), mask=mask)


class Told(CudaFetch):
    """Tokens that a step writes into the host's memory, for as long as no later one does."""

    __slots__ = ()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """A copy of them: what it holds then is its own."""
        if self._event is not None:
            self._hosts = tuple(host.clone() for host in super().wait())
        return self._hosts


class CudaWholeSteps:
    """See `engine.interfaces.step.WholeSteps`.

    Args:
        platform: the worker's.
        record: captures, on whatever the platform is; raises ContractError where it cannot.
        mark: makes an event behind all work that was queued so far.
        insists: raise where a step cannot be captured.
        ops: the worker's. tables: of its slots.
        parameters: of all slots, on the host.
    """

    def __init__(
        self,
        platform: Platform,
        record: Record,
        mark: Callable[[], torch.cuda.Event],
        insists: bool,
        ops: Ops,
        tables: StepTables,
        parameters: Any,
    ) -> None:
        self._platform = platform
        self._record = record
        self._mark = mark
        self._insists = insists
        self._ops = ops
        self._tables = tables
        self._parameters = parameters
        slots, fields = len(tables.tokens), len(FIELDS)
        self._host = torch.zeros((fields + 2) * slots, dtype=torch.int32)
        self._device = torch.zeros((fields + 2) * slots, dtype=torch.int32, device=platform.device)
        self._seeds_host, self._words_host = _parts(self._host, slots)
        self._seeds, self._words = _parts(self._device, slots)
        self._told = torch.zeros(TURNS, slots - 1, dtype=torch.int32, pin_memory=platform.device.type == "cuda")
        self._under_way: list[Told | None] = [None] * TURNS
        self._turn = 0
        self._turn_there = torch.zeros(1, dtype=torch.int32, device=platform.device)
        self._version = -1
        self._failed = False

    def capture(
        self, inputs: StepInputs, news: torch.Tensor, compute: Callable[[], None], trial: Trial
    ) -> Callable[[int], Told] | None:
        if self._failed:
            return None

        def step() -> None:
            rows, slot, place = self.begin(inputs, news)
            compute()
            *_, logits = trial.outputs()
            drawn, broken = self._ops.draw(logits, rows)
            self.tell(self._ops.place_tokens(drawn, broken, self._tables.tokens, slot, place))

        def prepare(number: int) -> None:
            trial.prepare(number)
            news[:1] = 0
            self._prepare(inputs, number)

        try:
            replay = self._record(step, Trial(prepare, trial.outputs, trial.replace))
        except ContractError as error:
            if self._insists:
                raise ContractError(
                    "capture decode steps with their inputs and draws",
                    error.found,
                    "start with --platform.capture_whole never",
                    point="platform",
                ) from error
            logger.warning("decode steps are not captured with their inputs and draws: %s", error.found)
            self._failed = True  # larger ones serve that were captured before
            return None
        finally:
            self._turn_there.zero_()  # it has counted the trial's

        def launch(num_rows: int) -> Told:
            self.send()
            turn = (self._turn + 1) % TURNS
            if (earlier := self._under_way[turn]) is not None:
                earlier.wait()
            replay()
            self._turn = turn  # as the device has counted, whatever comes
            told = self._under_way[turn] = Told((self._told[turn, :num_rows],), (), self._mark())
            return told

        return launch

    def send(self) -> None:
        """Bring the device's parameters up to date."""
        parameters = self._parameters
        if self._version == parameters.version:
            return
        self._version = parameters.version
        for row, name in zip(self._words_host.numpy(), FIELDS, strict=True):
            of_slots: np.ndarray = getattr(parameters, name)
            row[: len(of_slots)] = of_slots.view(np.int32)
        self._seeds_host.numpy()[: len(parameters.seed)] = parameters.seed
        self._platform.to_device(self._host, self._device)

    def begin(self, inputs: StepInputs, news: torch.Tensor) -> tuple[SamplingRows, torch.Tensor, torch.Tensor]:
        """Place new pages. Of the rows: how each draws; its slot, and where in that the drawn token goes: int64 [R]."""
        count, tables = len(inputs.slot_of_row), self._tables.blocks
        width = triton.cdiv(count, 4) * 4  # kernels are compiled for pointers to 16 bytes and for others
        words = torch.empty(4, width, dtype=torch.int32, device=self._device.device)
        longs = torch.empty(4, width, dtype=torch.int64, device=self._device.device)
        begin_kernel[(triton.cdiv(count, ROWS),)](
            news, tables, tuple(table.stride(0) for table in tables), self._turn_there, inputs.slot_of_row,
            inputs.seq_lens, self._words, self._seeds, words, longs, self._words.stride(0), width, count, len(tables),
            ROWS,
        )  # fmt: skip
        _, top_k, _, _ = words[:, :count]
        temperature, _, top_p, min_p = words.view(torch.float32)[:, :count]
        seed, position, slot, place = longs[:, :count]
        return SamplingRows(temperature, top_k, top_p, min_p, seed, position), slot, place

    def tell(self, drawn: torch.Tensor) -> None:
        """Write the tokens of all rows but those that only pad, int32 [R], into the host's memory of this turn."""
        turns, width = self._told.shape
        count = min(len(drawn), width)
        tell_kernel[(triton.cdiv(count, ROWS),)](drawn, self._turn_there, self._told, count, width, turns, ROWS)

    def _prepare(self, inputs: StepInputs, number: int) -> None:
        """One of two inputs that differ in ids, positions and slots' rows. All pages are the null page, which is empty:
        rows that stand at the same place of it have the same id, and leave the same there."""
        tokens, device = self._tables.tokens, self._device.device
        rows, slots, length = len(inputs.slot_of_row), len(tokens) - 1, tokens.shape[1] - 1
        span = max(1, min([length - 1, *self._tables.tokens_per_block]))
        slot = torch.arange(rows, dtype=torch.int32, device=device).clamp_(max=slots - 1)
        inputs.slot_of_row.copy_(slot if number == 0 else slot.flip(0))
        inputs.num_computed.copy_((inputs.slot_of_row * 5 + 3 * number) % span)
        inputs.seq_lens.copy_(inputs.num_computed + 1)
        inputs.query_start_loc.copy_(torch.arange(rows + 1, device=device))
        ids = (torch.arange(span, device=device) * 7919 + 31 * number + 1) % self._parameters.vocab_size
        tokens[:slots, :span] = ids.to(torch.int32)


def _parts(table: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds, int64 [slots], and FIELDS, int32 [len(FIELDS), slots], of one table."""
    return table[: 2 * slots].view(torch.int64), table[2 * slots :].view(len(FIELDS), slots)
