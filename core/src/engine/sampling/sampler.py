"""The sampler: from the logits of a step's sampled rows to tokens, log probabilities, and the next step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.interfaces.ops import Ops, SamplingRows
from engine.interfaces.platform import Platform
from engine.sampling.packed import send
from engine.sampling.processors import ProcessorChain
from engine.types.plan import NewSlot


class SlotParameters:
    """The sampling parameters of every slot, on the host: one array a parameter, indexed by slot.

    They change only when a request enters a slot, so a step uploads them only when its rows are others than the last
    step's (see `Sampler`). What a step has to do at all is known here without asking the device.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 [max_num_seqs].
        top_k: int32; seed: int64, the bits of the uint64.
        num_prompt, min_tokens: int32; num_embeds: tokens that are placeholders, the first: no penalty counts them.
        logprobs: int32; alternatives asked for, -1 where none are reported.
        penalised: bool; True where logits depend on the tokens so far. plain: nothing but a draw is asked for.
        stop_ids: for slots with `min_tokens`, the ids that must not be drawn before; int64 [k].
        version: counts the changes. vocab_size: as given.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.min_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_embeds = np.zeros(max_num_seqs, np.int32)
        self.logprobs = np.full(max_num_seqs, -1, np.int32)
        self.penalised = np.zeros(max_num_seqs, bool)
        self.plain = np.ones(max_num_seqs, bool)
        self.stop_ids: dict[int, np.ndarray] = {}
        self.version = 0

    def enter(self, new: NewSlot) -> None:
        """Take the parameters of a request that enters a slot."""
        slot, params = new.slot, new.params
        assert params.seed is not None, "the frontend fills the seed in"
        self.temperature[slot] = params.temperature
        if params.temperature > 0 and self.temperature[slot] == 0:
            self.temperature[slot] = np.finfo(np.float32).tiny  # not greedy, though float32 cannot hold the number
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.top_k[slot] = params.top_k
        self.seed[slot] = np.uint64(params.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self.num_prompt[slot] = new.num_prompt_tokens
        self.min_tokens[slot] = params.min_tokens
        self.num_embeds[slot] = 0 if new.embeds is None else len(new.embeds.data)
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        self.penalised[slot] = penalties != (0.0, 0.0, 1.0)
        self.plain[slot] = not self.penalised[slot] and params.logprobs is None and params.min_tokens == 0
        self.stop_ids.pop(slot, None)
        if params.min_tokens > 0:
            ids = np.unique(np.asarray(new.stop_token_ids, np.int64))
            self.stop_ids[slot] = ids[ids < self.vocab_size]
        self.version += 1


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
        most: the most alternatives that one of them asked for. plain: nobody edits or reports the rows' logits.
        penalised: None where no row has penalties.
    """

    key: tuple[int, bytes]
    asked: np.ndarray
    asked_rows: torch.Tensor
    most: int
    plain: bool
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
        rows: SampledRows,
        rejected: SampledDrafts | None = None,
        masks: SampledMasks | None = None,
    ) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Draw one token for each row.

        Args:
            logits: [n, V], as the model leaves them; modified where they are wide.
            rows: the n rows.
            rejected: drafts that rejection sampling keeps or replaces; None draws every token.
            masks: what constrained rows may draw; applied last, so that nothing else allows a token again.

        Returns:
            int32 [n], `BROKEN` where a row's logits are not numbers or a driver has raised over its request; and the
            log probabilities, from the logits as they came, of the rows that asked for them.
        """
        parameters, slots = self._parameters, rows.slot
        uploaded = self.uploaded(slots)
        places = rows.places if rows.places is not None else send(self._platform, self.places(rows))[0]
        num_tokens, position = places.unbind()
        asked, raw = uploaded.asked, None
        plain = uploaded.plain and rejected is None and masks is None
        if not plain:
            logits, broken = self._ops.check_logits(logits)
        if len(asked):
            raw = logits.clone() if len(asked) == len(slots) else logits[uploaded.asked_rows]
        if self._processors is not None:
            self._processors.apply(logits, slots, rows.num_tokens, uploaded.slot, num_tokens, uploaded.num_prompt)
        if parameters.stop_ids:
            self._mask_early_stops(logits, rows)
        if uploaded.penalised is not None:
            self._penalise(logits, rows, uploaded.penalised, num_tokens)
        if masks is not None and len(masks.places):
            self._apply_masks(logits, masks)
        sampling = SamplingRows(
            uploaded.temperature, uploaded.top_k, uploaded.top_p, uploaded.min_p, uploaded.seed, position
        )
        if plain:
            tokens, broken = self._ops.draw(logits, sampling)
        elif rejected is None:
            tokens = self._ops.sample(logits, sampling)
        else:
            tokens = self._ops.reject(logits, sampling, *rejected)
        if self._processors is not None:
            broken = self._processors.faults.spoil(broken, slots)
        # The table keeps a token that can be looked up, broken or not: steps that are under way already read it.
        told = self._ops.place_tokens(tokens, broken, self._tokens, uploaded.slot, num_tokens)
        if raw is None:
            return told, None
        drawn = tokens if len(asked) == len(slots) else tokens[uploaded.asked_rows]
        return told, SampledLogprobs(asked, *self._ops.logprobs(raw, drawn, min(uploaded.most, raw.shape[1])))

    def draft(
        self, logits: torch.Tensor, slot: np.ndarray, num_tokens: np.ndarray, with_probs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `engine.interfaces.drafter.DraftSession.draw`; logits float32 or float64."""
        uploaded = self.uploaded(slot)
        (position,) = send(self._platform, self.places(SampledRows(slot, num_tokens))[1])
        rows = SamplingRows(
            uploaded.temperature, uploaded.top_k, uploaded.top_p, uploaded.min_p, uploaded.seed, position
        )
        if not with_probs:
            return self._ops.sample(logits, rows), None
        zeros = torch.zeros_like(rows.min_p)
        rows = rows._replace(top_k=torch.zeros_like(rows.top_k), top_p=zeros + 1, min_p=zeros)
        greedy = rows.temperature == 0
        scale = torch.where(greedy, 1, rows.temperature).to(logits.dtype).unsqueeze(1)
        # Without its maximum taken away first, a tiny temperature would overflow.
        probs = torch.softmax((logits - logits.amax(dim=1, keepdim=True)) / scale, dim=1)
        tokens = self._ops.sample(logits, rows)
        certain = torch.zeros_like(probs).scatter_(1, tokens.long().unsqueeze(1), 1.0)
        return tokens, torch.where(greedy.unsqueeze(1), certain, probs)

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
        tokens, num_prompt = self._tokens.index_select(0, penalised.slot)[:, :longest], penalised.num_prompt
        num_tokens = num_tokens if len(penalised.host) == len(num_tokens) else num_tokens[penalised.row]
        if (embeds := self._parameters.num_embeds[rows.slot[penalised.host]]).any():  # rows begin behind these
            (skipped,) = send(self._platform, embeds)
            places = (torch.arange(longest, device=tokens.device) + skipped[:, None]).clamp_(max=longest - 1)
            tokens, num_prompt, num_tokens = tokens.gather(1, places), num_prompt - skipped, num_tokens - skipped
        self._ops.penalties(
            logits,
            penalised.row,
            tokens,
            num_prompt,
            num_tokens,
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

    def uploaded(self, slots: np.ndarray) -> _Uploaded:
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
            bool(parameters.plain[slots].all())
            and (self._processors is None or not self._processors.used_by(slots).any()),
            _Penalised(penalised, *of_rows[7:]) if len(penalised) else None,
            *of_rows[:7],
        )
        return self._uploaded
