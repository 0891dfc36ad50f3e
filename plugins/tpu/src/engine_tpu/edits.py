"""What requests ask of their logits before a token is drawn: `allowed_token_ids`, `bad_words`, `logit_bias`,
`thinking_budget`, in this order.

The rules are those of `engine_reference.logits_processors`. The host knows who asks for what; tokens before a position
may be on the device alone, so what depends on them is looked up there. What goes to the device has fixed sizes: long
lists go in turns. A step in which nobody asks for anything costs a look at an array.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.types.params import MAX_THINKING_MARK
from engine.types.plan import NewSlot
from engine_tpu.buckets import drawing_sizes, drawing_views
from engine_tpu.steps import Memory, Steps

ADDED = 512
"""Numbers that one turn adds to logits."""
CONDITIONS = 2048
"""Tokens that one turn compares: any word has fewer."""
ENDED = 8
"""Rows whose thoughts one turn may end."""
_MARK = MAX_THINKING_MARK
_NONE = -1
_NO_TOKEN = -2


class Edits:
    """What the requests of every slot ask for.

    Args:
        steps, memory: the compiled functions, and what they keep.
        slots, vocab_size: how many there are.
    """

    def __init__(self, steps: Steps, memory: Memory, slots: int, vocab_size: int) -> None:
        self._steps = steps
        self._memory = memory
        self._vocab_size = vocab_size
        self._whole = memory.tokens.sharding
        words = -(-vocab_size // 32)
        self._allowed = jax.device_put(np.zeros((slots, words), np.uint32), self._whole)
        self._lists = np.zeros(slots, bool)  # who has `allowed_token_ids`
        self._asks = np.zeros(slots, bool)
        self._bias: dict[int, dict[int, float]] = {}
        self._words: dict[int, list[list[int]]] = {}
        self._budgets: dict[int, tuple[int, list[int], list[int]]] = {}

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot."""
        slot, params = new.slot, new.params
        for table in (self._bias, self._words, self._budgets):
            table.pop(slot, None)
        if params.logit_bias:
            self._bias[slot] = params.logit_bias
        if params.bad_words_token_ids:
            self._words[slot] = params.bad_words_token_ids
        if (budget := params.thinking_budget) is not None:
            self._budgets[slot] = budget.tokens, list(budget.begin), list(budget.end)
        self._lists[slot] = bool(params.allowed_token_ids)
        if params.allowed_token_ids:
            self._list(slot, params.allowed_token_ids)
        tables = self._bias, self._words, self._budgets
        self._asks[slot] = self._lists[slot] or any(slot in table for table in tables)

    def __call__(self, logits: jax.Array, drawing: jax.Array, slot: np.ndarray, position: np.ndarray) -> jax.Array:
        """The edited logits; the same ones where nobody asks for anything.

        Args:
            logits: [N, V] of a step's draws, the first n of which count. drawing: see `Packing.drawing`.
            slot, position: int64 [n]; of each draw: its slot, and how many tokens of output stand before it.
        """
        here = self._asks[slot]
        if not here.any():
            return logits
        if (uses := self._lists[slot]).any():
            of_draw = np.zeros(len(logits), np.int32)
            of_draw[: len(slot)] = uses
            logits = self._run("forbid", logits, self._allowed, drawing, self._steps.send(of_draw))
        rows = [(int(row), int(slot[row]), int(position[row])) for row in np.flatnonzero(here)]
        for turn in _turns(self._added(rows), len(logits)):
            logits = self._run("add", logits, self._memory.tokens, drawing, self._steps.send(turn))
        ended = [one for row, of_slot, at in rows if (one := self._ended(row, of_slot, at)) is not None]
        for first in range(0, len(ended), ENDED):
            turn = np.full((ENDED, 3 + 2 * _MARK), _NONE, np.int32)
            turn[:, 0] = len(logits)
            turn[: len(ended[first : first + ENDED])] = ended[first : first + ENDED]
            logits = self._run("end", logits, self._memory.tokens, drawing, self._steps.send(turn))
        return logits

    def warm_up(self, draws: set[int], dtype: Any) -> None:
        """Compile all of it for so many draws, whose logits have this dtype."""
        self._list(len(self._lists) - 1, [])
        for count in sorted(draws):
            logits = jax.device_put(np.zeros((count, self._vocab_size), dtype), self._whole)
            drawing = self._steps.send(np.zeros(sum(drawing_sizes(count).values()), np.int32))
            self.run_padding(logits, drawing).block_until_ready()

    def run_padding(self, logits: jax.Array, drawing: jax.Array) -> jax.Array:
        """Run every edit, of which none changes anything, one after the other."""
        count, tokens, send = len(logits), self._memory.tokens, self._steps.send
        logits = self._run("forbid", logits, self._allowed, drawing, send(np.zeros(count, np.int32)))
        logits = self._run("add", logits, tokens, drawing, send(_padding(count)))
        nobody = np.full((ENDED, 3 + 2 * _MARK), count, np.int32)
        return self._run("end", logits, tokens, drawing, send(nobody))

    def _run(self, name: str, logits: jax.Array, *arguments: jax.Array) -> jax.Array:
        make = partial(jax.jit, _FUNCTIONS[name], out_shardings=self._whole)
        found: jax.Array = self._steps.compiled(f"edits of {len(logits)} logits: {name}", make, logits, *arguments)
        return found

    def _list(self, slot: int, ids: list[int]) -> None:
        bits = np.zeros(self._allowed.shape[1], np.uint32)
        every = np.unique(np.asarray(ids, np.int64))
        np.bitwise_or.at(bits, every >> 5, np.uint32(1) << (every & 31).astype(np.uint32))
        packed = self._steps.send(np.append(np.array([slot], np.uint32), bits))
        make = partial(jax.jit, _listed, donate_argnums=0, out_shardings=self._whole)
        self._allowed = self._steps.compiled("a list of allowed tokens", make, self._allowed, packed)

    def _added(self, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, float, list[int]]]:
        """(draw, token, number, the tokens that the output must end in) of what may be added."""
        found = []
        for row, slot, position in rows:
            words = self._words.get(slot, ())
            found += [(row, one[-1], -np.inf, one[:-1]) for one in words if len(one) - 1 <= position]
            found += [(row, token, bias, []) for token, bias in self._bias.get(slot, {}).items()]
        return found

    def _ended(self, row: int, slot: int, position: int) -> list[int] | None:
        """What `_ends` is told of a draw that stands at the end of its budget; None of others."""
        if slot not in self._budgets:
            return None
        tokens, begin, end = self._budgets[slot]
        if not 0 <= position - tokens < len(end):
            return None
        marks = [[*ids, *[_NONE] * (_MARK - len(ids))] for ids in (begin, end)]
        return [row, tokens, end[position - tokens], *marks[0], *marks[1]]


def _padding(draws: int) -> np.ndarray:
    """A turn of `_adds` without anything: draws, tokens and bits of numbers of `ADDED`, then words, offsets and tokens
    of `CONDITIONS`."""
    packed = np.zeros(3 * ADDED + 3 * CONDITIONS, np.int32)
    packed[:ADDED] = draws
    packed[3 * ADDED : 3 * ADDED + CONDITIONS] = ADDED
    return packed


def _turns(added: list[tuple[int, int, float, list[int]]], draws: int) -> list[np.ndarray]:
    turns: list[np.ndarray] = []
    while added:
        packed = _padding(draws)
        head, tail = packed[: 3 * ADDED].reshape(3, ADDED), packed[3 * ADDED :].reshape(3, CONDITIONS)
        numbers, filled, entry = head[2].view(np.float32), 0, 0
        while entry < min(ADDED, len(added)) and filled + len(added[entry][3]) <= CONDITIONS:
            row, token, number, before = added[entry]
            head[0, entry], head[1, entry], numbers[entry] = row, token, number
            place = slice(filled, filled + len(before))
            tail[0, place] = entry
            tail[1, place], tail[2, place] = range(len(before), 0, -1), before
            filled, entry = filled + len(before), entry + 1
        turns.append(packed)
        added = added[entry:]
    return turns


# -- on the device -----------------------------------------------------------------------------------------------------
def _listed(allowed: jax.Array, packed: jax.Array) -> jax.Array:
    return allowed.at[packed[0]].set(packed[1:])


def _forbids(logits: jax.Array, allowed: jax.Array, drawing: jax.Array, uses: jax.Array) -> jax.Array:
    """Tokens that are not on their draw's list; uses: int32 [N]: which draws have one."""
    vocab = logits.shape[1]
    bits = allowed[drawing_views(drawing, len(logits))["draw_slot"]]
    word = jnp.repeat(bits, 32, axis=1, total_repeat_length=bits.shape[1] * 32)[:, :vocab]
    listed = (word >> (jnp.arange(vocab, dtype=jnp.uint32) & 31)) & 1 > 0
    return jnp.where((uses > 0)[:, None] & ~listed, -jnp.inf, logits)


def _adds(logits: jax.Array, tokens: jax.Array, drawing: jax.Array, packed: jax.Array) -> jax.Array:
    """Numbers, where the tokens before are those that the conditions of each name."""
    part = drawing_views(drawing, len(logits))
    row, token, bits = packed[: 3 * ADDED].reshape(3, ADDED)
    word, offset, before = packed[3 * ADDED :].reshape(3, CONDITIONS)
    draw = jnp.append(row, len(logits))[word]
    slot, place = part["draw_slot"][draw], part["draw_place"][draw]
    differs = tokens[slot, jnp.maximum(place - offset, 0)] != before
    wrong = jnp.zeros(ADDED + 1, bool).at[word].max(differs)[:ADDED]
    number = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(logits.dtype)
    return logits.at[row, token].add(jnp.where(wrong, 0, number), mode="drop")


def _ends(logits: jax.Array, tokens: jax.Array, drawing: jax.Array, packed: jax.Array) -> jax.Array:
    """Nothing but a token, in rows whose output up to the budget has begun thoughts and not ended them.

    packed: int32 [ENDED, 3 + 2 * _MARK]; draws, budgets, tokens, and the ids that begin and that end thoughts.
    """
    part = drawing_views(drawing, len(logits))
    row, budget, token = packed[:, 0], packed[:, 1], packed[:, 2]
    begin, end = packed[:, 3 : 3 + _MARK], packed[:, 3 + _MARK :]
    slot, start = part["draw_slot"][row], part["num_prompt"][row]
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    written = tokens[slot[:, None], jnp.minimum(start[:, None] + column, tokens.shape[1] - 1)]
    written = jnp.where(column >= budget[:, None], _NO_TOKEN, written)
    thinking = ((begin[:, 0] == _NONE) | _occurs(written, begin)) & ~_occurs(written, end)
    only = jnp.where(jnp.arange(logits.shape[1]) == token[:, None], 0, -jnp.inf).astype(logits.dtype)
    return logits.at[row].set(jnp.where(thinking[:, None], only, logits[row]), mode="drop")


def _occurs(written: jax.Array, ids: jax.Array) -> jax.Array:
    """bool [ENDED]; whether ids [ENDED, _MARK], `_NONE` behind them, stand one after the other in what was written."""
    width = written.shape[1]
    padded = jnp.pad(written, ((0, 0), (0, _MARK)), constant_values=_NO_TOKEN)
    found = jnp.ones(written.shape, bool)
    for nth in range(_MARK):
        wanted = ids[:, nth : nth + 1]
        found &= (padded[:, nth : nth + width] == wanted) | (wanted == _NONE)
    return found.any(axis=1) & (ids[:, 0] != _NONE)


_FUNCTIONS = {"forbid": _forbids, "add": _adds, "end": _ends}
