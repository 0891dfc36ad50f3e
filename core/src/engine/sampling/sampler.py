"""The sampler: from the logits of a step's sampled rows to tokens, log probabilities, and the next step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.interfaces.ops import Ops, SamplingRows
from engine.interfaces.platform import Platform
from engine.sampling.packed import send
from engine.sampling.parameters import SlotParameters
from engine.sampling.processors import ProcessorChain


class SampledRows(NamedTuple):
    """The rows of a step that draw a token, on the host. A row of the plan with drafts stands here once for each
    position that draws.

    Args:
        slot: int32 [n].
        num_tokens: int32 [n]; tokens known or placed, which is where the drawn one goes.
        places: int64 [2, n], on the device: `num_tokens`, and each drawn token's position in its request's output; None
            where they are not there yet. See `Sampler.places`.
    """

    slot: np.ndarray
    num_tokens: np.ndarray
    places: torch.Tensor | None = None


class SampledDrafts(NamedTuple):
    """Drafts beside sampled rows, on the device.

    Args:
        tokens: int32 [n]; the draft that follows each row's token, -1 where there is none.
        probs: float [n, V]; the distributions that they were drawn from; None: they are certain.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None


class SampledMasks(NamedTuple):
    """Masks of some of the sampled rows, on the host.

    Args:
        places: int64 [m]; where they stand among the sampled rows.
        bits: int32 [m, ceil(V / 32)]; as `engine.types.plan.Masks` has them.
    """

    places: np.ndarray
    bits: np.ndarray


class SampledLogprobs(NamedTuple):
    """Log probabilities of the m rows that asked for them.

    Args:
        places: int64 numpy [m]; where they stand among the sampled rows.
        chosen, rank, top_ids, top_values: as `Ops.logprobs` gives them, on the device.
    """

    places: np.ndarray
    chosen: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


class _Penalised(NamedTuple):
    """The m rows with penalties: their places on the host, and what `Ops.penalties` takes of them, on the device."""

    host: np.ndarray
    row: torch.Tensor
    slot: torch.Tensor
    num_prompt: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


class _Uploaded(NamedTuple):
    """What the device holds of one choice of rows; kept until the rows are others. All of it goes there in one copy.

    Args:
        asked: the places of the rows that asked for log probabilities, on the host; `asked_rows`: on the device.
        most: the most alternatives that one of them asked for.
        penalised: None where no row has penalties.
    """

    key: tuple[int, bytes]
    asked: np.ndarray
    asked_rows: torch.Tensor
    most: int
    penalised: _Penalised | None
    slot: torch.Tensor
    num_prompt: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor


class Sampler:
    """Draws tokens and writes them where the next step reads them.

    Every part that no row of a step asks for is skipped, which is decided on the host.

    Args:
        ops, platform: the worker's.
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the device's table of tokens.
        parameters: of every slot.
        processors: the logits processors at work; None where there are none.
    """

    def __init__(
        self,
        ops: Ops,
        platform: Platform,
        tokens: torch.Tensor,
        parameters: SlotParameters,
        processors: ProcessorChain | None = None,
    ) -> None:
        self._ops = ops
        self._platform = platform
        self._tokens = tokens
        self._parameters = parameters
        self._processors = processors
        self._uploaded: _Uploaded | None = None
        self._masked: tuple[bytes, torch.Tensor] | None = None

    def places(self, rows: SampledRows) -> np.ndarray:
        """What `SampledRows.places` holds, on the host: for whoever has a copy to the device on its way anyway."""
        places = np.empty((2, len(rows.slot)), np.int64)
        places[0] = rows.num_tokens
        np.subtract(places[0], self._parameters.num_prompt[rows.slot], out=places[1])
        return places

    def __call__(
        self,
        logits: torch.Tensor,
        broken: torch.Tensor,
        rows: SampledRows,
        rejected: SampledDrafts | None = None,
        masks: SampledMasks | None = None,
    ) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Draw one token for each row.

        Args:
            logits: float32 or float64 [n, V]; modified.
            broken: bool [n]; which of them hold a NaN.
            rows: the n rows.
            rejected: drafts that rejection sampling keeps or replaces; None draws every token.
            masks: what constrained rows may draw; applied last, so that nothing else allows a token again.

        Returns:
            int32 [n], `BROKEN` where a row's logits are not numbers or a driver has raised over its request; and the
            log probabilities, from the logits as they came, of the rows that asked for them.
        """
        parameters, slots = self._parameters, rows.slot
        uploaded = self._upload(slots)
        places = rows.places if rows.places is not None else send(self._platform, self.places(rows))[0]
        num_tokens, position = places.unbind()
        asked, raw = uploaded.asked, None
        if len(asked):
            raw = logits.clone() if len(asked) == len(slots) else logits[uploaded.asked_rows]
        if self._processors is not None:
            self._processors.apply(logits, slots, rows.num_tokens, uploaded.slot, num_tokens, uploaded.num_prompt)
            broken = self._processors.faults.spoil(broken, slots)
        if parameters.stop_ids:
            self._mask_early_stops(logits, rows)
        if uploaded.penalised is not None:
            self._penalise(logits, rows, uploaded.penalised, num_tokens)
        if masks is not None and len(masks.places):
            self._apply_masks(logits, masks)
        sampling = SamplingRows(
            uploaded.temperature, uploaded.top_k, uploaded.top_p, uploaded.min_p, uploaded.seed, position
        )
        if rejected is None:
            tokens = self._ops.sample(logits, sampling)
        else:
            tokens = self._ops.reject(logits, sampling, *rejected)
        # The table keeps a token that can be looked up, broken or not: steps that are under way already read it.
        told = self._ops.place_tokens(tokens, broken, self._tokens, uploaded.slot, num_tokens)
        if raw is None:
            return told, None
        drawn = tokens if len(asked) == len(slots) else tokens[uploaded.asked_rows]
        return told, SampledLogprobs(asked, *self._ops.logprobs(raw, drawn, min(uploaded.most, raw.shape[1])))

    def _mask_early_stops(self, logits: torch.Tensor, rows: SampledRows) -> None:
        """Keep rows with fewer than `min_tokens` outputs from ending."""
        parameters, slots = self._parameters, rows.slot
        early = np.flatnonzero(rows.num_tokens - parameters.num_prompt[slots] < parameters.min_tokens[slots])
        ids = [parameters.stop_ids[slot] for slot in slots[early].tolist()]
        if any(map(len, ids)):
            row = np.repeat(early, [len(stop_ids) for stop_ids in ids])
            self._ops.mask_tokens(logits, *send(self._platform, row, np.concatenate(ids)))

    def _penalise(
        self, logits: torch.Tensor, rows: SampledRows, penalised: _Penalised, num_tokens: torch.Tensor
    ) -> None:
        """Apply penalties over the tokens on the device, those that the host has not seen yet included."""
        longest = int(rows.num_tokens[penalised.host].max())
        self._ops.penalties(
            logits,
            penalised.row,
            self._tokens.index_select(0, penalised.slot)[:, :longest],
            penalised.num_prompt,
            num_tokens if len(penalised.host) == len(num_tokens) else num_tokens[penalised.row],
            penalised.presence,
            penalised.frequency,
            penalised.repetition,
        )

    def _apply_masks(self, logits: torch.Tensor, masks: SampledMasks) -> None:
        """Their places are sent only where they are others than the last step's."""
        key = masks.places.tobytes()
        if self._masked is not None and self._masked[0] == key:
            (bits,) = send(self._platform, masks.bits)
        else:
            places, bits = send(self._platform, masks.places, masks.bits)
            self._masked = key, places.clone()  # the bits' memory is not kept with it
        self._ops.apply_bitmask(logits, self._masked[1], bits)

    def _upload(self, slots: np.ndarray) -> _Uploaded:
        """The rows' parameters on the device; the last step's where its rows were the same."""
        parameters = self._parameters
        key = (parameters.version, slots.tobytes())
        if self._uploaded is not None and self._uploaded.key == key:
            return self._uploaded
        asked, penalised = np.flatnonzero(parameters.logprobs[slots] >= 0), np.flatnonzero(parameters.penalised[slots])
        edited = slots[penalised]
        asked_rows, *of_rows = send(
            self._platform,
            asked,
            slots.astype(np.int64),
            parameters.num_prompt[slots],
            parameters.temperature[slots],
            parameters.top_k[slots],
            parameters.top_p[slots],
            parameters.min_p[slots],
            parameters.seed[slots],
            penalised,
            edited,
            parameters.num_prompt[edited],
            parameters.presence[edited],
            parameters.frequency[edited],
            parameters.repetition[edited],
        )
        self._uploaded = _Uploaded(
            key,
            asked,
            asked_rows,
            int(parameters.logprobs[slots[asked]].max()) if len(asked) else 0,
            _Penalised(penalised, *of_rows[7:]) if len(penalised) else None,
            *of_rows[:7],
        )
        return self._uploaded
