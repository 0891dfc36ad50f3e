"""Decode steps as one graph: inputs, attention's plans, the model, the draw, and the drawn tokens' places.

What a draw needs of a row beside its logits lies on the device by slot, and is sent again only when a request enters.
A kernel of the graph takes the rows' own: so that a step sends its header alone.
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

if TYPE_CHECKING:
    from engine_cuda.platform_cuda.graphs import Replay

logger = logging.getLogger(__name__)

ROWS = 256
"""Of a program."""
FIELDS = ("temperature", "top_k", "top_p", "min_p", "num_prompt")
"""Parameters of 32 bits, in the order of the device's table; the seeds of 64 bits come behind them."""
Record = Callable[[Callable[[], None], Trial], "Replay | Callable[[], None]"]
"""Captures work, and tries it."""


@triton.jit(do_not_specialize=["stride", "width", "count"])
def rows_kernel(slot_of_row, seq_lens, words, seeds, words_out, longs_out, stride, width, count, ROWS: tl.constexpr):
    """Grid: blocks of R rows.

    words: [5, slots] of 32 bits, rows `stride` apart, as FIELDS says; seeds: int64 [slots]. words_out: [4, width],
    without the last of them; longs_out: int64 [4, width]: seeds, positions in the output, slots, and places of the
    drawn tokens.
    """
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


class CudaWholeSteps:
    """See `engine.interfaces.step.WholeSteps`.

    Args:
        platform: the worker's.
        record: captures, on whatever the platform is; raises ContractError where it cannot.
        insists: raise where a step cannot be captured.
        ops: the worker's. tables: of its slots.
        parameters: of all slots, on the host.
    """

    def __init__(
        self, platform: Platform, record: Record, insists: bool, ops: Ops, tables: StepTables, parameters: Any
    ) -> None:
        self._platform = platform
        self._record = record
        self._insists = insists
        self._ops = ops
        self._tables = tables
        self._parameters = parameters
        slots, fields = len(tables.tokens), len(FIELDS)
        self._host = torch.zeros((fields + 2) * slots, dtype=torch.int32)
        self._device = torch.zeros((fields + 2) * slots, dtype=torch.int32, device=platform.device)
        self._seeds_host, self._words_host = _parts(self._host, slots)
        self._seeds, self._words = _parts(self._device, slots)
        self._version = -1
        self._failed = False

    def capture(
        self, inputs: StepInputs, compute: Callable[[], None], trial: Trial
    ) -> Callable[[int], torch.Tensor] | None:
        if self._failed:
            return None
        told: list[torch.Tensor] = []

        def step() -> None:
            compute()
            *_, logits, broken = trial.outputs()
            rows, slot, place = self.rows(inputs)
            drawn = self._ops.sample(logits, rows)
            told[:] = [self._ops.place_tokens(drawn, broken, self._tables.tokens, slot, place)]

        def prepare(number: int) -> None:
            trial.prepare(number)
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

        def launch(num_rows: int) -> torch.Tensor:
            self.send()
            replay()
            return told[0][:num_rows].clone()  # the next replay writes there, perhaps before this was copied

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

    def rows(self, inputs: StepInputs) -> tuple[SamplingRows, torch.Tensor, torch.Tensor]:
        """Of a step's rows: how each draws; its slot, and where in that the drawn token goes: int64 [R]."""
        count = len(inputs.slot_of_row)
        width = triton.cdiv(count, 4) * 4  # kernels are compiled for pointers to 16 bytes and for others
        words = torch.empty(4, width, dtype=torch.int32, device=self._device.device)
        longs = torch.empty(4, width, dtype=torch.int64, device=self._device.device)
        rows_kernel[(triton.cdiv(count, ROWS),)](
            inputs.slot_of_row, inputs.seq_lens, self._words, self._seeds, words, longs, self._words.stride(0), width,
            count, ROWS,
        )  # fmt: skip
        _, top_k, _, _ = words[:, :count]
        temperature, _, top_p, min_p = words.view(torch.float32)[:, :count]
        seed, position, slot, place = longs[:, :count]
        return SamplingRows(temperature, top_k, top_p, min_p, seed, position), slot, place

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
