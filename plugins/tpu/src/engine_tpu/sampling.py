"""From logits to tokens: what `engine.interfaces.ops` says of penalties, masks, draws and log probabilities, in JAX.

The random numbers are the engine's, bit by bit; running sums are float64, as those of other drivers, so that the same
logits and seed give the same token. What no row of a step asks for is left out by a branch on the device (`lax.cond`),
so that one compiled function serves every mixture of requests.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from engine.interfaces.ops import PURPOSE_SAMPLE
from engine.types.params import MAX_LOGPROBS
from engine.types.plan import BROKEN

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_PIECE = 512
"""Numbers of a piece of a running sum."""


class SampledRows(NamedTuple):
    """The N positions of a step that draw. All [N], of the step's slots.

    Args:
        slot, place: int32; where each token goes in the table. num_prompt: int32, of the slot's request.
        temperature, top_p, min_p, presence, frequency, repetition: float32. top_k: int32.
        seed_low, seed_high: uint32.
    """

    slot: jax.Array
    place: jax.Array
    num_prompt: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    top_k: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array


class Asked(NamedTuple):
    """What any row of a step asks for, bool []."""

    draws: jax.Array
    filters: jax.Array
    penalties: jax.Array
    logprobs: jax.Array


class Masks(NamedTuple):
    """What rows may not draw, a bit a token: uint32 [N, ceil(V / 32)].

    Args:
        ends: 1 forbids: tokens that would end a request too early.
        allowed: 0 forbids: constraints. A row that they leave nothing gets a token that they forbid.
        edited: [N, V]; the logits that are drawn from; None: those that log probabilities are told of.
    """

    ends: jax.Array
    allowed: jax.Array
    edited: jax.Array | None = None


class Logprobs(NamedTuple):
    """Of each row: float32 [N] of the drawn token, its rank int32 [N], the most likely ids int32 [N, K] and theirs."""

    chosen: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_values: jax.Array


def draw(
    logits: jax.Array,
    tokens: jax.Array,
    following: jax.Array,
    rows: SampledRows,
    asked: Asked,
    masks: Masks | None,
) -> tuple[jax.Array, jax.Array, Logprobs]:
    """Draw one token for each row.

    Args:
        logits: float32 or float64 [N, V]. tokens: int32 [slots, L]; the table of tokens.
        following: int32 [N]; what stands in the table where each token goes. (Were it read here, XLA would copy the
            table: it does not see to it that it is read before it is written to.)

    Returns the table with the tokens in it; int32 [2, N]: the tokens, `BROKEN` where logits are no numbers, and 1 where
    the table had the same token there already, which is so of a draft that agrees; log probabilities if asked for.
    """
    raw, broken = logits, jnp.isnan(logits).any(axis=1)
    if masks is not None:
        logits = logits if masks.edited is None else masks.edited
        logits = jnp.where(_bits(masks.ends, logits.shape[1]), -jnp.inf, logits)
    logits = lax.cond(asked.penalties, lambda x: _penalised(x, tokens, rows), lambda x: x, logits)
    if masks is not None:
        logits = _constrained(logits, ~_bits(masks.allowed, logits.shape[1]))
    likeliest = _likeliest(logits)
    drawn = lax.cond(
        asked.draws,
        lambda: jnp.where(rows.temperature > 0, _sampled(logits, rows, asked.filters), likeliest),
        lambda: likeliest,
    )
    agrees = following == drawn
    told = jnp.stack((jnp.where(broken, BROKEN, drawn), agrees.astype(jnp.int32)))
    most = min(MAX_LOGPROBS, logits.shape[1])
    found = lax.cond(asked.logprobs, lambda: logprobs(raw, drawn, most), lambda: _no_logprobs(len(drawn), most))
    return tokens.at[rows.slot, rows.place].set(drawn), told, found


def _likeliest(logits: jax.Array) -> jax.Array:
    """int32 [N]; the first of the largest. `jnp.argmax` takes six times as long on a processor. Of a row that is no
    number, any."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    largest = logits == logits.max(axis=1, keepdims=True)
    return jnp.where(largest, ids, logits.shape[1] - 1).min(axis=1)


def uniform(rows: SampledRows, purpose: int) -> jax.Array:
    """The engine's random numbers, float64 [N] in [0, 1): see `engine.interfaces.ops`."""
    position = (rows.place - rows.num_prompt).astype(jnp.uint32)
    zero = jnp.zeros_like(position)
    x = [position, zero + jnp.uint32(purpose), zero, zero]
    key = [rows.seed_low, rows.seed_high]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(x[0], _MULTIPLIERS[0]), _product(x[2], _MULTIPLIERS[1])
        x = [high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0]
        key = [key[0] + jnp.uint32(_WEYL[0]), key[1] + jnp.uint32(_WEYL[1])]
    return ((x[0] >> 5).astype(jnp.float64) * 2.0**26 + (x[1] >> 6).astype(jnp.float64)) / 2.0**53


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low 32 bits of x * factor: uint32, by halves, for no device multiplies wider ones at once."""
    low, high = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    x_low, x_high = x & jnp.uint32(0xFFFF), x >> 16
    middle = x_high * low + (x_low * low >> 16)
    other = x_low * high + (middle & jnp.uint32(0xFFFF))
    return x_high * high + (middle >> 16) + (other >> 16), x * jnp.uint32(factor)


def _bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """uint32 [N, W] -> bool [N, vocab_size]."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(len(words), -1)[:, :vocab_size] == 1


def _constrained(logits: jax.Array, forbidden: jax.Array) -> jax.Array:
    masked = jnp.where(forbidden, -jnp.inf, logits)
    stuck = jnp.isneginf(masked).all(axis=1, keepdims=True)
    return jnp.where(forbidden & stuck, 0.0, masked)


def _penalised(logits: jax.Array, tokens: jax.Array, rows: SampledRows) -> jax.Array:
    """Repetition, then frequency and presence, as `Ops.penalties`; rows without any have the neutral numbers."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    known = place < rows.place[:, None]
    output = known & (place >= rows.num_prompt[:, None])
    ids = jnp.where(known, tokens[rows.slot], 0)
    row = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    occurs = jnp.zeros_like(logits).at[row, ids].add(known.astype(logits.dtype)) > 0
    count = jnp.zeros_like(logits).at[row, ids].add(output.astype(logits.dtype))
    factor, frequency, presence = (
        one.astype(logits.dtype)[:, None] for one in (rows.repetition, rows.frequency, rows.presence)
    )
    scaled = jnp.where(logits > 0, logits / factor, logits * factor)
    edited = jnp.where(occurs, scaled, logits) - frequency * count - presence * (count > 0)
    return jnp.where((factor == 1) & (frequency == 0) & (presence == 0), logits, edited)


def kept_weights(logits: jax.Array, rows: SampledRows, filters: jax.Array) -> jax.Array:
    """[N, V]; what rows with a temperature above 0 draw from: probabilities, those that filters drop set to 0."""
    warm = jnp.where(rows.temperature > 0, rows.temperature, 1).astype(logits.dtype)[:, None]
    probs = jax.nn.softmax((logits - logits.max(axis=1, keepdims=True)) / warm, axis=1)
    return lax.cond(filters, lambda p: _filtered(p, rows), lambda p: p, probs)


def _sampled(logits: jax.Array, rows: SampledRows, filters: jax.Array) -> jax.Array:
    return draw_from(kept_weights(logits, rows, filters), uniform(rows, PURPOSE_SAMPLE))


def draw_from(weights: jax.Array, u: jax.Array) -> jax.Array:
    """int32 [N]; the first token in order of id at which the running sum of weights [N, V] exceeds u [N] * its sum."""
    running = running_sum(weights)
    below = running <= (u * running[:, -1])[:, None]
    return jnp.minimum(below.sum(axis=1, dtype=jnp.int32), weights.shape[1] - 1)


def running_sum(x: jax.Array) -> jax.Array:
    """float64 [N, V]; of each row's numbers [N, V] up to each of them.

    In pieces of `_PIECE`, by doubling distances (Hillis, Steele 1986): a TPU's compiler does not come to an end with
    `jnp.cumsum` of float64.
    """
    count, vocab = x.shape
    pieces = jnp.pad(x.astype(jnp.float64), ((0, 0), (0, -vocab % _PIECE))).reshape(count, -1, _PIECE)
    within = _doubling(pieces)
    before = jnp.pad(_doubling(within[:, :, -1])[:, :-1], ((0, 0), (1, 0)))
    return (within + before[:, :, None]).reshape(count, -1)[:, :vocab]


def _doubling(x: jax.Array) -> jax.Array:
    """Running sums over the last dimension."""
    distance, rest = 1, ((0, 0),) * (x.ndim - 1)
    while distance < x.shape[-1]:
        x = x + jnp.pad(x[..., :-distance], (*rest, (distance, 0)))
        distance *= 2
    return x


def _filtered(p: jax.Array, rows: SampledRows) -> jax.Array:
    vocab = p.shape[1]
    values = -jnp.sort(-p, axis=1)
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    place = jnp.where(limited, rows.top_k, 1)[:, None] - 1
    kth = jnp.where(limited, jnp.take_along_axis(values, place, axis=1)[:, 0], 0)
    floor = jnp.maximum(rows.min_p.astype(p.dtype) * values[:, 0], kth)
    p = jnp.where(p < floor[:, None], 0, p)
    return jnp.where((rows.top_p < 1)[:, None], _top_p(p, values >= floor[:, None], values, rows.top_p), p)


def _top_p(p: jax.Array, kept: jax.Array, values: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep each row's shortest prefix, in order of falling p, that holds top_p of its sum; lower ids go first.

    values: p sorted before others were dropped; kept: which of them are left, the first so many.
    """
    running = running_sum(jnp.where(kept, values, 0))
    goal = top_p.astype(jnp.float64) * p.sum(axis=1, dtype=jnp.float64)
    before = (running < goal[:, None]).sum(axis=1, keepdims=True, dtype=jnp.int32)
    length = jnp.minimum(before, p.shape[1] - 1) + 1
    last = jnp.take_along_axis(jnp.where(kept, values, 0), length - 1, axis=1)
    above, equal = p > last, p == last
    room = length - above.sum(axis=1, keepdims=True, dtype=jnp.int32)
    equal &= jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= room
    return jnp.where(above | equal, p, 0)


def logprobs(logits: jax.Array, tokens: jax.Array, k: int) -> Logprobs:
    """Log probabilities under softmax(logits [N, V]) of tokens int32 [N], and of the k most likely."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    logit = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = (logits > logit).sum(axis=1, dtype=jnp.int32) + 1
    values, ids = lax.top_k(logits, k)
    chosen = (logit - total)[:, 0].astype(jnp.float32)
    return Logprobs(chosen, rank, ids.astype(jnp.int32), (values - total).astype(jnp.float32))


def _no_logprobs(count: int, k: int) -> Logprobs:
    zeros = jnp.zeros((count, k), jnp.float32)
    return Logprobs(zeros[:, 0], jnp.zeros(count, jnp.int32), zeros.astype(jnp.int32), zeros)
