"""What the host knows of each slot: the sampling parameters of its request. Arrays by slot, in numpy."""

from __future__ import annotations

import numpy as np

from engine.types.plan import NewSlot


class SlotParameters:
    """The parameters of every slot, each in the bits in which it travels.

    Attributes:
        numbers: by the names of `engine_tpu.buckets.SAMPLED`: int32 [slots].
        draws, filters, penalties: bool [slots]; what the request asks of the drawing.
        logprobs, prompt_logprobs: int32 [slots]; alternatives asked for, -1 for none.
        num_prompt: int32 [slots].
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        floats = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}
        self.numbers = {name: np.full(slots, value, np.float32).view(np.int32) for name, value in floats.items()}
        for name in ("num_prompt", "top_k", "seed_low", "seed_high"):
            self.numbers[name] = np.zeros(slots, np.int32)
        self.draws = np.zeros(slots, bool)
        self.filters = np.zeros(slots, bool)
        self.penalties = np.zeros(slots, bool)
        self.logprobs = np.full(slots, -1, np.int32)
        self.prompt_logprobs = np.full(slots, -1, np.int32)
        self.num_prompt = self.numbers["num_prompt"]
        self._min_tokens = np.zeros(slots, np.int32)
        self._ends: dict[int, np.ndarray] = {}

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot."""
        slot, params = new.slot, new.params
        assert params.seed is not None, "the frontend fills the seed in"
        temperature = np.float32(params.temperature)
        if params.temperature > 0 and temperature == 0:
            temperature = np.finfo(np.float32).tiny  # not greedy, though float32 cannot hold the number
        for name, value in (
            ("temperature", temperature),
            ("top_p", params.top_p),
            ("min_p", params.min_p),
            ("presence", params.presence_penalty),
            ("frequency", params.frequency_penalty),
            ("repetition", params.repetition_penalty),
        ):
            self.numbers[name].view(np.float32)[slot] = value
        seed = params.seed & 0xFFFFFFFFFFFFFFFF
        self.numbers["seed_low"].view(np.uint32)[slot] = seed & 0xFFFFFFFF
        self.numbers["seed_high"].view(np.uint32)[slot] = seed >> 32
        self.numbers["top_k"][slot] = params.top_k
        self.num_prompt[slot] = new.num_prompt_tokens
        self.draws[slot] = params.temperature > 0
        self.filters[slot] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        neutral = (0.0, 0.0, 1.0)
        self.penalties[slot] = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != neutral
        for table, asked in ((self.logprobs, params.logprobs), (self.prompt_logprobs, params.prompt_logprobs)):
            table[slot] = -1 if asked is None else min(asked, self._vocab_size)
        self._min_tokens[slot] = params.min_tokens
        self._ends.pop(slot, None)
        if params.min_tokens > 0:
            ids = np.unique(np.asarray(new.stop_token_ids, np.int64))
            self._ends[slot] = ids[ids < self._vocab_size]

    def ends_too_early(self, slot: np.ndarray, place: np.ndarray, count: int) -> np.ndarray | None:
        """The bits of tokens that must not be drawn yet, uint32 [count, W], of draws at these places of slots; None
        where there are no such tokens."""
        if not self._ends:
            return None
        early = np.flatnonzero(place - self.num_prompt[slot] < self._min_tokens[slot])
        if not len(early):
            return None
        words = np.zeros((count, -(-self._vocab_size // 32)), np.uint32)
        for row in early.tolist():
            ids = self._ends[int(slot[row])]
            np.bitwise_or.at(words[row], ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        return words
