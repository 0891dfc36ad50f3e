"""What the scheduler hands the runner for one step, and what comes back.

A plan names work by *slot*: the place in the runner's preallocated buffers that a request keeps while it runs. The
runner remembers each slot's tokens, parameters and block table, so a plan carries only what changed. Arrays are
numpy; in another process they travel through `engine.process.wire`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.request import EncoderInput, PromptEmbeds

Int32 = np.ndarray
"""A one-dimensional int32 array; shapes stand in the docstrings."""


class NewSlot(msgspec.Struct, kw_only=True):
    """A request that enters a slot in this step: new, or resumed after preemption.

    Args:
        slot: its place, 0 <= slot < max_num_seqs. adapter: the place of its adapter, from 1; 0: it has none.
        request_id: for logs and hooks only.
        token_ids: int32 [n]; all tokens known so far, prompt first.
        num_prompt_tokens: how many of them are prompt (penalties tell the two apart).
        params: with `seed` filled in; the runner needs no other default.
        stop_token_ids: int32 [k]; ids that must not be drawn before `min_tokens` outputs.
        pooling: for a request that draws nothing and whose hidden states are pooled; None for one that generates.
        cache_salt: requests with different salts share no cached pages, and nothing that is learned from their tokens.
        encoder: what its decoder's layers see beside its tokens; None but for such models. embeds: see `EngineRequest`.
    """

    slot: int
    request_id: str
    token_ids: Int32
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: Int32
    pooling: PoolingParams | None = None
    cache_salt: str | None = None
    encoder: EncoderInput | None = None
    adapter: int = 0
    embeds: PromptEmbeds | None = None


class LeftSlots(msgspec.Struct, kw_only=True):
    """Slots that requests have left since the last plan that says so: they ended, or were preempted.

    Args:
        slot: int32 [m]; each once. One may be entered again in the same step.
        num_tokens: int32 [m]; the request's tokens, prompt and output. Draws behind them do not count.
    """

    slot: Int32
    num_tokens: Int32


class NewBlocks(msgspec.Struct, kw_only=True):
    """The page ids that the block tables of one KV table gain in this step.

    Entry i says: `block_table[slot[i], index[i]] = page[i]`. A slot that is new in this step starts with an empty
    table, so its prefix hits stand here too.

    Args:
        slot, index, page: int32 [m], equal lengths.
    """

    slot: Int32
    index: Int32
    page: Int32


class PageCopies(msgspec.Struct, kw_only=True):
    """Pages whose content a step copies before it does anything else, all at once: no page stands on both sides.

    Args:
        table: int32 [m]; the KV table that reads entry i.
        source, destination: int32 [m]; pages. The whole page is copied, byte by byte.
    """

    table: Int32
    source: Int32
    destination: Int32


class ReusedTokens(msgspec.Struct, kw_only=True):
    """Tokens of a step whose keys and values were computed in another sequence, see `engine.interfaces.evictor.Reuse`.

    Args:
        row, place: int32 [m]; of the plan, and which of its row's tokens: never the last one known.
        position: int32 [m]; of each in that sequence.
        source, destination: int64 [m]; slots of the one KV table, where they lie and where the step's own go.
    """

    row: Int32
    place: Int32
    position: Int32
    source: np.ndarray
    destination: np.ndarray


class KnownTokens(msgspec.Struct, kw_only=True):
    """Tokens that came back since the last step, for those who have not seen them drawn: logits processors that read
    tokens on the host, and workers that do not draw.

    Args:
        slot, position, token: int32 [m]; the token at this position of the slot. What a slot entered with is not
            repeated.
    """

    slot: Int32
    position: Int32
    token: Int32


class GivenDrafts(msgspec.Struct, kw_only=True):
    """Drafts that travel: with a plan those that the drafter is not asked for; with a result what it has proposed.

    Args:
        row: int32 [g], ascending; rows of the plan, which computes all of theirs: `num_drafts[row]`.
        tokens: int32 [g, k]; those of each row, in order, then -1.
        proposed: bool [g]; came with the result before; the others are forced by a constraint. None: in a result.
    """

    row: Int32
    tokens: np.ndarray
    proposed: np.ndarray | None = None


class StepPlan(msgspec.Struct, kw_only=True):
    """One step over R rows, ordered: decodes (one token each), then extends (decodes with drafts among them), then
    prefills.

    Row r computes the tokens at positions `num_computed[r] .. num_computed[r] + num_tokens[r] - 1` of its slot. Their
    ids lie in the runner's token table: known ids were put there by `NewSlot`, and an id not seen by the host yet is
    a placeholder that the previous step's sampler fills in on the device.

    A row with d drafts is a decode that computes d more tokens: its last token, then d tokens that the worker's drafter
    proposes when the step begins and puts into the token table, or that come with the plan. Each of these 1 + d tokens
    draws the next one; the draws count as far as the drafts before them equal the draws. The drafter may find fewer
    than d.

    Args:
        step_id: counts up by one; results return in this order.
        slot_of_row: int32 [R].
        num_computed: int32 [R]; tokens whose KV is in the cache when this step starts.
        num_tokens: int32 [R]; tokens to compute, at least 1.
        samples: bool [R]; the row's last token is the last token known or placed, so the step draws the next one,
            which goes to position `num_computed + num_tokens` (with drafts: one after each of the 1 + d tokens).
        num_decodes: the first rows, with exactly one token each and `samples` set.
        new_slots: requests that enter a slot.
        left_slots: those that requests have left; None where there are none.
        new_blocks: one entry for each KV table.
        num_drafts: int32 [R]; the drafts among `num_tokens`; None where no row has any.
        given_drafts: those that come with the plan; None where there are none.
        known: None where nobody needs them.
        copies: of pages; None where there are none. A source may be a page that a row of this step writes to: it is
            read before.
        reuse: None where no token has any.
        sections: what connectors tell their halves in the workers, by driver; b"" asks for news alone. None where
            there is nothing to tell.
        masks_follow: rows are constrained by masks that may depend on tokens not seen yet. The forward pass runs at
            once; the step draws when `Executor.sample` brings the masks. Those of rows with drafts depend on the drafts
            too, which `Worker.drafts` tells.
        lockstep: int32 [dp]; the tokens of each of the engine cores that make this step together; where one has none,
            those of padding. A row's drafts count as planned. None: others have no part in it.
        decodes: with `lockstep`: every row of every core has one token.
        idle_tokens: of padding, which a plan without rows computes all the same: nothing is kept or drawn of them.
    """

    step_id: int
    slot_of_row: Int32
    num_computed: Int32
    num_tokens: Int32
    samples: np.ndarray
    num_decodes: int
    new_slots: list[NewSlot]
    new_blocks: list[NewBlocks]
    num_drafts: Int32 | None = None
    given_drafts: GivenDrafts | None = None
    left_slots: LeftSlots | None = None
    known: KnownTokens | None = None
    copies: PageCopies | None = None
    reuse: ReusedTokens | None = None
    sections: dict[str, bytes] | None = None
    masks_follow: bool = False
    lockstep: Int32 | None = None
    decodes: bool = False
    idle_tokens: int = 0

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slot_of_row)

    @property
    def total_tokens(self) -> int:
        """The sum of `num_tokens`, at most `max_num_batched_tokens`."""
        return self.num_decodes if self.num_decodes == self.num_rows else int(self.num_tokens.sum())


BROKEN = -2
"""In place of a token: the logits that it would be drawn from are not numbers (NaN), or a driver raised over it."""

ErrorParts = tuple[str, str, str, str]
"""An error as it travels; see `engine.types.errors.EngineError.parts`."""


class Masks(msgspec.Struct, kw_only=True):
    """Which tokens the constrained rows of a step may draw. Comes after its plan, see `StepPlan.masks_follow`.

    Args:
        row: int32 [m], ascending; rows of the plan. A row with drafts stands here once for each of its first positions,
            in order, as far as the drafts before them fit its constraint: what is drawn behind these never counts. A
            constrained row whose request has ended meanwhile may be missing: what it draws is dropped.
        bits: int32 [m, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 says that token t is allowed.
    """

    row: Int32
    bits: np.ndarray


class LogprobRows(msgspec.Struct, kw_only=True):
    """Log probabilities of the sampled rows that asked for them (m of them), before temperature and filters.

    Args:
        row: int32 [m]; rows of the plan. A row with drafts stands here once for each token that it gives, in order.
        chosen: float32 [m]; of the drawn token.
        rank: int32 [m]; 1 is the most likely token.
        top_ids: int32 [m, k]; the most likely ids, where k is the largest number that a row of this step asked for.
        top_values: float32 [m, k].
    """

    row: Int32
    chosen: np.ndarray
    rank: Int32
    top_ids: np.ndarray
    top_values: np.ndarray


class PromptLogprobRows(LogprobRows, kw_only=True):
    """Log probabilities of m prompt tokens, given those before them; ordered by row, then by position.

    Args:
        row: int32 [m]; rows of the plan.
        position: int32 [m]; of the token in the prompt, from 1.
        chosen, rank, top_ids, top_values: as in `LogprobRows`, for the prompt's own token.
    """

    position: Int32


class PooledRows(msgspec.Struct, kw_only=True):
    """What pooling made of m rows of a step.

    Args:
        row: int32 [m]; rows of the plan, none twice.
        start: int32 [m]; for vectors of single tokens the first token's position in the prompt, else -1: the row's
            prompt is computed, and this is its result.
        data: m arrays, float32 or float64: [size], or [num_tokens, size] for single tokens; of "token_classify", whose
            `start` is -1, all that the prompt's tokens are told.
    """

    row: Int32
    start: Int32
    data: list[np.ndarray]


class StepResult(msgspec.Struct, kw_only=True):
    """What a step gave, merged over all workers.

    Args:
        step_id: of the plan.
        tokens: int32 [R]; the drawn token of each row, -1 where the row does not sample. For a plan with drafts int32
            [R, 1 + k], k the most drafts of a row: the tokens that each row gives, in order, at least one where it
            samples, then -1. `BROKEN` in place of a row's last token ends its request: with the row's error, or else
            with an InvalidLogitsError.
        logprobs: None where no row asked.
        num_drafts: int32 [R]; the drafts that the drafter found and the step computed, at most the plan's; None where
            the plan has none.
        prompt_logprobs: None where no row of this step computed prompt tokens and asked for theirs.
        news: by connector, what its worker halves have to tell, of each rank that has something; None where none has.
        pooled: None where no row of this step has anything pooled.
        errors: by row: what a driver raised over it; None where none did.
        proposed: what the drafter of several stages would have rows compute next; None where it proposes nothing.
    """

    step_id: int
    tokens: np.ndarray
    logprobs: LogprobRows | None = None
    num_drafts: Int32 | None = None
    prompt_logprobs: PromptLogprobRows | None = None
    news: dict[str, list[bytes]] | None = None
    pooled: PooledRows | None = None
    errors: dict[int, ErrorParts] | None = None
    proposed: GivenDrafts | None = None
