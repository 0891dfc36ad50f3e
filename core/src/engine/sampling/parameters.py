"""The sampling parameters of every slot, on the host.

They change only when a request enters a slot, so a step uploads them only when its rows are others than the last
step's (see `Sampler`). What a step has to do at all is known here without asking the device.
"""

from __future__ import annotations

import numpy as np

from engine.types.plan import NewSlot


class SlotParameters:
    """One array a parameter, indexed by slot.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 [max_num_seqs].
        top_k: int32; seed: int64, the bits of the uint64.
        num_prompt, min_tokens: int32.
        logprobs: int32; alternatives asked for, -1 where none are reported.
        penalised: bool; True where logits depend on the tokens so far.
        stop_ids: for slots with `min_tokens`, the ids that must not be drawn before; int64 [k].
        version: counts the changes.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
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
        self.logprobs = np.full(max_num_seqs, -1, np.int32)
        self.penalised = np.zeros(max_num_seqs, bool)
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
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.penalised[slot] = params.has_penalties
        self.stop_ids.pop(slot, None)
        if params.min_tokens > 0:
            ids = np.unique(np.asarray(new.stop_token_ids, np.int64))
            self.stop_ids[slot] = ids[ids < self._vocab_size]
        self.version += 1
