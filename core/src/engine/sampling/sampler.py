"""The sampler: from the logits of a step's sampled rows to tokens, log probabilities, and the next step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.interfaces.ops import Ops, SamplingRows
from engine.interfaces.platform import Platform
from engine.sampling.parameters import SlotParameters
from engine.sampling.processors import ProcessorChain


class SampledRows(NamedTuple):
    """The rows of a step that draw a token, on the host. A row of the plan with drafts stands here once for each
    position that draws.

    Args:
        slot: int32 [n].
        num_tokens: int32 [n]; tokens known or placed, which is where the drawn one goes.
    """

    slot: np.ndarray
    num_tokens: np.ndarray


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


class _Uploaded(NamedTuple):
    """What the device holds of one choice of rows; kept until the rows are others.

    On the host: the places of the rows that asked for log probabilities and of those with penalties, and int64 [n], the
    prompts' lengths.
    """

    key: tuple[int, bytes]
    asked: np.ndarray
    penalised: np.ndarray
    num_prompt_host: np.ndarray
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
        self._ops, self._platform, self._tokens, self._parameters = ops, platform, tokens, parameters
        self._processors = processors
        self._uploaded: _Uploaded | None = None

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
            int32 [n], `BROKEN` where a row's logits are not numbers; and the log probabilities, from the logits as they
            came, of the rows that asked for them.
        """
        parameters, slots = self._parameters, rows.slot
        uploaded = self._upload(slots)
        places = np.empty((2, len(slots)), np.int64)
        places[0] = rows.num_tokens
        np.subtract(places[0], uploaded.num_prompt_host, out=places[1])
        num_tokens, position = self._to_device(places)
        asked, raw = uploaded.asked, None
        if len(asked):
            raw = logits.clone() if len(asked) == len(slots) else logits[self._to_device(asked)]
        if self._processors is not None:
            self._processors.apply(logits, slots, rows.num_tokens, uploaded.slot, num_tokens, uploaded.num_prompt)
        if parameters.stop_ids:
            self._mask_early_stops(logits, rows)
        if len(uploaded.penalised):
            self._penalise(logits, rows, uploaded.penalised)
        if masks is not None and len(masks.places):
            self._ops.apply_bitmask(logits, self._to_device(masks.places), self._to_device(masks.bits))
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
        drawn = tokens if len(asked) == len(slots) else tokens[self._to_device(asked)]
        most = int(parameters.logprobs[slots[asked]].max())
        return told, SampledLogprobs(asked, *self._ops.logprobs(raw, drawn, min(most, raw.shape[1])))

    def _mask_early_stops(self, logits: torch.Tensor, rows: SampledRows) -> None:
        """Keep rows with fewer than `min_tokens` outputs from ending."""
        parameters, slots = self._parameters, rows.slot
        early = np.flatnonzero(rows.num_tokens - parameters.num_prompt[slots] < parameters.min_tokens[slots])
        ids = [parameters.stop_ids[slot] for slot in slots[early].tolist()]
        if any(map(len, ids)):
            row = np.repeat(early, [len(stop_ids) for stop_ids in ids])
            self._ops.mask_tokens(logits, self._to_device(row), self._to_device(np.concatenate(ids)))

    def _penalise(self, logits: torch.Tensor, rows: SampledRows, penalised: np.ndarray) -> None:
        """Apply penalties over the tokens on the device, those that the host has not seen yet included."""
        parameters, slots, num_tokens = self._parameters, rows.slot[penalised], rows.num_tokens[penalised]
        self._ops.penalties(
            logits,
            self._to_device(penalised),
            self._tokens.index_select(0, self._to_device(slots))[:, : int(num_tokens.max())],
            self._to_device(parameters.num_prompt[slots]),
            self._to_device(num_tokens),
            self._to_device(parameters.presence[slots]),
            self._to_device(parameters.frequency[slots]),
            self._to_device(parameters.repetition[slots]),
        )

    def _upload(self, slots: np.ndarray) -> _Uploaded:
        """The rows' parameters on the device; the last step's where its rows were the same."""
        parameters = self._parameters
        key = (parameters.version, slots.tobytes())
        if self._uploaded is None or self._uploaded.key != key:
            self._uploaded = _Uploaded(
                key,
                np.flatnonzero(parameters.logprobs[slots] >= 0),
                np.flatnonzero(parameters.penalised[slots]),
                parameters.num_prompt[slots].astype(np.int64),
                self._to_device(slots.astype(np.int64)),
                self._to_device(parameters.num_prompt[slots]),
                self._to_device(parameters.temperature[slots]),
                self._to_device(parameters.top_k[slots]),
                self._to_device(parameters.top_p[slots]),
                self._to_device(parameters.min_p[slots]),
                self._to_device(parameters.seed[slots]),
            )
        return self._uploaded

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        out = torch.empty(host.shape, dtype=host.dtype, device=self._platform.device)
        self._platform.to_device(host, out)
        return out
