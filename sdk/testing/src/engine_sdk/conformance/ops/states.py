"""Operations of layers that keep states, as engine-states defines them, token by token in float64: their results, and
the states that they leave, where they are to be left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from engine.interfaces.model import StateBatch
from engine.interfaces.ops import OpsCard
from engine.interfaces.platform import CaptureKey
from engine_sdk.conformance.contexts import require_capture, worker_context
from engine_sdk.conformance.ops.subject import DTYPES, OpsSubject, plain

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
UNIT_EPS = 1e-6
FACTOR = {"float64": 1.0, "float32": 4.0, "bfloat16": 3.0, "float16": 3.0}
"""Of the tolerance: sums over many tokens, and products that are rounded."""
Step = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(a token, the state before it) -> (the state after it, the token's result)."""


class StatesCase(NamedTuple):
    """Rows of a step.

    Args:
        lengths: of each row.
        marks: for each row the tokens of it after which states go to pages: the first of them to the page that the row
            read, as in the middle of a block.
        drafted: rows after whose tokens, each, states are kept beside the pool.
    """

    lengths: Sequence[int]
    marks: Sequence[Sequence[int]]
    drafted: Sequence[int] = ()


CASES = {
    "decode": StatesCase([1] * 5, [[0]] * 5),
    "one row": StatesCase([1], [[0]]),
    "prompts": StatesCase([5, 1, 70, 130, 3], [[4], [0], [15, 31, 69], [129], [0, 1, 2]]),
    "long": StatesCase([64, 65], [[63], [64]]),
    "drafts": StatesCase([4, 1, 3, 9], [[1, 3], [0], [2], [8]], [0, 2]),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class PagesOfStates:
    """One state in pages of a pool, in which what nobody wrote is NaN. Implements `StateSite`.

    Args:
        before: [R, *shape]; with which rows begin, in the state's dtype; the last row begins with nothing.
        case: the rows.
    """

    def __init__(self, before: torch.Tensor, case: StatesCase) -> None:
        self.before = before
        count, device = len(before), before.device
        counts = [len(marks) for marks in case.marks]
        loc = np.cumsum([0, *case.lengths]).astype(np.int32)
        pages = np.random.default_rng(len(case.lengths)).permutation(count + sum(counts)) + 1
        read, free = pages[:count], iter(pages[count:].tolist())
        write = [int(read[row]) if i == 0 else next(free) for row, n in enumerate(counts) for i in range(n)]
        at = [int(loc[row]) + mark for row, marks in enumerate(case.marks) for mark in marks]
        at += [token for row in case.drafted for token in range(int(loc[row]), int(loc[row + 1]))]
        size = before[0].numel()
        store = torch.full((len(pages) + 1, size + 7), torch.nan, dtype=before.dtype, device=device)
        pool = store[:, 3 : 3 + size].view(-1, *before.shape[1:])
        pool[torch.from_numpy(read.copy()).to(device)] = before
        self.pool = {"state": pool}
        read[-1] = -1
        self.kept: torch.Tensor | None = None
        self.batch = StateBatch(
            query_start_loc=torch.from_numpy(loc.copy()).to(device),
            query_start_loc_host=loc,
            read=torch.from_numpy(read.copy()).to(device),
            write=torch.tensor(write, dtype=torch.int64, device=device),
            write_at=torch.tensor(at, dtype=torch.int64, device=device),
            write_at_host=np.array(at, np.int64),
        )

    def load(self, name: str) -> torch.Tensor:
        """See `StateSite.load`."""
        states: torch.Tensor = self.pool[name].index_select(0, self.batch.read.clamp(min=0))
        return states.masked_fill_((self.batch.read < 0).view(-1, *[1] * (states.dim() - 1)), 0)

    def save(self, name: str, states: torch.Tensor) -> None:
        """See `StateSite.save`."""
        count = len(self.batch.write)
        assert len(states) == len(self.batch.write_at_host), f"{len(states)} states are saved, of all that are kept"
        self.pool[name].index_copy_(0, self.batch.write, states[:count].to(self.pool[name].dtype))
        self.kept = states[count:]

    def left(self) -> torch.Tensor:
        """The states after the tokens `write_at`, [m, *shape], from where they are."""
        written: torch.Tensor = self.pool["state"][self.batch.write]
        if len(self.batch.write_at_host) == len(self.batch.write):
            return written
        assert self.kept is not None, "the states after drafts are not saved"
        return torch.cat([written, self.kept.to(written.dtype)])

    def by_token(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """(results [T, ...], the states to be left [m, *shape])."""
        loc, results, states = self.batch.query_start_loc_host.tolist(), [], []
        for row, given in enumerate(plain(self.before)):
            state = given if row < len(self.before) - 1 else np.zeros_like(given)
            for token in range(loc[row], loc[row + 1]):
                state, result = step(token, state)
                results.append(result)
                states.append(state)
        return np.stack(results), np.stack(states)[self.batch.write_at_host]


class Called(NamedTuple):
    """A call of an operation: what changes from step to step, the rest, and what it is by its definition."""

    inputs: list[torch.Tensor]
    call: Callable[[Callable[..., Any], list[torch.Tensor], Any], torch.Tensor]
    state: tuple[int, ...]
    wide: bool
    step: Step


class StateOperations(OpsSubject):
    """The convolution, the three scans, and what stands around them."""

    @each_dtype
    @each_case
    @pytest.mark.parametrize("name", ["causal_conv", "ssd", "selective_scan", "gated_delta"])
    def test_states(self, name: str, case: StatesCase, dtype: str) -> None:
        """Rows of any lengths, of new and old sequences; each state is left in its page, or kept after its draft."""
        operation, called = self.operation(name, dtype), self._called(name, dtype, sum(case.lengths), 1)
        site = self._site(called, dtype, case)
        given = [x.clone() for x in called.inputs]
        found = called.call(operation, called.inputs, site)
        expected, left = site.by_token(called.step)
        assert found.is_contiguous() and all(map(torch.equal, given, called.inputs)), "it changed its inputs"
        scale = 1 + np.abs(expected).mean()
        self.check(found, expected, dtype, scale, FACTOR[dtype])
        kind = str(site.before.dtype).removeprefix("torch.")
        # Of bfloat16 the inputs are exact, and states in float32 as near as in float32.
        self.check(site.left(), left, kind, 1 + np.abs(left).mean(), 8 * FACTOR[kind])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["causal_conv", "ssd", "selective_scan", "gated_delta"])
    def test_captured_states(self, name: str, dtype: str) -> None:
        """Recorded in a step of decodes and replayed, it reads the inputs, and finds and leaves states, as they are
        then."""
        operation, case = self.operation(name, dtype), CASES["decode"]
        require_capture(cast("type[OpsCard]", self.subject().card).captured_by, self.device)
        platform = worker_context(self.subject(), self.device, dtype).platform
        assert platform is not None
        calls = [self._called(name, dtype, 5, seed) for seed in (1, 2)]
        site, other = (self._site(called, dtype, case) for called in calls)
        buffers, left = [x.clone() for x in calls[0].inputs], list[torch.Tensor]()

        def step() -> None:
            left[:] = [calls[0].call(operation, buffers, site)]

        replay = platform.capture(step, CaptureKey(0, variant=(f"{name} {dtype}",)))
        assert replay is not step, "the platform could not capture it, though the card names its recorder"
        for buffer, x in zip(buffers, calls[1].inputs, strict=True):
            buffer.copy_(x)
        order = torch.tensor([3, 0, 2, 4, 1], device=self.device)
        for mine in (site, other):
            mine.pool["state"].copy_(other.pool["state"] if mine is site else mine.pool["state"].clone())
            mine.batch.read.copy_(mine.batch.read[order].clone())
            mine.batch.write.copy_(mine.batch.write[order].clone())
        expected = calls[0].call(operation, calls[1].inputs, other)
        replay()
        assert torch.equal(left[0], expected), "the replay leaves something else: it has kept a value, or an address"
        assert torch.equal(site.left(), other.left())

    @each_dtype
    @pytest.mark.parametrize("gate_last", [False, True])
    def test_gated_norm(self, dtype: str, gate_last: bool) -> None:
        """Groups of any size, of this rank alone and of two; rows may lie apart."""
        operation = self.operation("gated_norm", dtype)
        wide, weight = self.tensor(5, 90, dtype=dtype), self.tensor(42, dtype=dtype, seed=1)
        x, gate = wide[:, :42], wide[:, 45:87]
        for size in (6, 21, 42):
            expected = _gated_norm(plain(x), plain(gate), plain(weight), 1e-3, size, gate_last)
            self.check(operation(x, gate, weight, 1e-3, size, gate_last=gate_last), expected, dtype, 0.5)
        ranks = SimpleNamespace(all_reduce=lambda squares: squares * 5)  # the other's squares are four times as many
        expected = _gated_norm(plain(x), plain(gate), plain(weight), 1e-3, 42, gate_last, 5 / 2)
        self.check(operation(x, gate, weight, 1e-3, 84, ranks, gate_last), expected, dtype, 0.5)

    @each_dtype
    @pytest.mark.parametrize("silu", [False, True])
    def test_gate_by(self, dtype: str, silu: bool) -> None:
        """Rows that lie apart; gates far from 0 too."""
        wide = self.tensor(5, 90, dtype=dtype, scale=9)
        x, gate = wide[:, :42], wide[:, 45:87]
        factor = 1 / (1 + np.exp(-plain(gate)))
        expected = plain(x) * (factor * plain(gate) if silu else factor)
        self.check(self.operation("gate_by", dtype)(x, gate, silu), expected, dtype)

    @each_dtype
    def test_join(self, dtype: str) -> None:
        """Parts of parts, as they come from a projection, and a dense tensor."""
        join, x = self.operation("join", dtype), self.tensor(5, 6, 10, dtype=dtype)
        parts = [x[..., :3], x[:, 1:4, 4:], x.flatten(1)[:, 7:20], x]
        assert torch.equal(join(parts), torch.cat([part.flatten(1) for part in parts], dim=1))
        assert join(parts[:1]).is_contiguous()

    # -- the definitions ---------------------------------------------------------------------------------------------
    def _site(self, called: Called, dtype: str, case: StatesCase) -> PagesOfStates:
        kind = dtype if not called.wide or dtype == "float64" else "float32"
        return PagesOfStates(self.tensor(len(case.lengths), *called.state, dtype=kind, seed=9), case)

    def _called(self, name: str, dtype: str, tokens: int, seed: int) -> Called:
        made: dict[str, Callable[[str, int, int], Called]] = {
            "causal_conv": self._conv, "ssd": self._ssd, "selective_scan": self._scan, "gated_delta": self._delta,
        }  # fmt: skip
        return made[name](dtype, tokens, seed)

    def _wide(self, *shape: int, dtype: str, seed: int) -> torch.Tensor:
        return self.tensor(*shape, dtype="float64" if dtype == "float64" else "float32", seed=seed)

    def _conv(self, dtype: str, tokens: int, seed: int) -> Called:
        """Channels of a wider projection, more than are taken at once."""
        channels, kernel = 300, 4
        wide = self.tensor(tokens, channels + 9, dtype=dtype, seed=seed)
        weights, bias = self.tensor(kernel, channels + 5, dtype=dtype), self.tensor(channels, dtype=dtype, seed=3)
        weight = weights[:, 5:]
        x, w, b = plain(wide[:, 4:-5]), plain(weight), plain(bias)

        def step(t: int, past: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            window = np.concatenate([past, x[t][None]])
            return window[1:], _silu((window * w).sum(0) + b)

        def call(operation: Callable[..., Any], inputs: list[torch.Tensor], site: Any) -> torch.Tensor:
            found: torch.Tensor = operation(inputs[0][:, 4:-5], weight, bias, site, "state")
            return found

        return Called([wide], call, (kernel - 1, channels), False, step)

    def _ssd(self, dtype: str, tokens: int, seed: int) -> Called:
        """Heads of every width of register, in two groups."""
        heads, size, groups, state = 4, 93, 2, 7
        x, dt = (
            self.tensor(tokens, heads, size, dtype=dtype, seed=seed),
            self.tensor(tokens, heads, dtype=dtype, seed=2),
        )
        both = self.tensor(tokens, 2 * groups * state + 3, dtype=dtype, seed=seed + 3)
        a, d = -self._wide(heads, dtype=dtype, seed=4).exp(), self._wide(heads, dtype=dtype, seed=5)
        dt_bias, limits, split = self._wide(heads, dtype=dtype, seed=6), (0.1, 2.0), groups * state
        numbers = [plain(part) for part in (x, dt, both, a, d, dt_bias)]

        def step(t: int, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            x, dt, both, a, d, dt_bias = numbers
            steps = np.clip(_softplus(dt[t] + dt_bias), *limits)[:, None]
            ins, outs = (
                part.reshape(groups, state).repeat(heads // groups, 0)
                for part in (both[t, :split], both[t, split : 2 * split])
            )
            after = np.exp(steps * a[:, None])[..., None] * before + ins[:, :, None] * (steps * x[t])[:, None]
            return after, (after * outs[:, :, None]).sum(1) + d[:, None] * x[t]

        def call(operation: Callable[..., Any], inputs: list[torch.Tensor], site: Any) -> torch.Tensor:
            b, c = (inputs[2][:, i * split : (i + 1) * split].reshape(-1, groups, state) for i in (0, 1))
            found: torch.Tensor = operation(*inputs[:2], a, b, c, d, dt_bias, limits, site, "state")
            return found

        return Called([x, dt, both], call, (heads, state, size), True, step)

    def _scan(self, dtype: str, tokens: int, seed: int) -> Called:
        """Channels of every width of register, their gates beside them."""
        channels, state = 93, 5
        both, dt = self.tensor(tokens, 2 * channels, dtype=dtype, seed=seed), self.tensor(tokens, channels, dtype=dtype)
        bc = self.tensor(tokens, 2 * state, dtype=dtype, seed=seed + 3)
        a, d = -self._wide(state, channels, dtype=dtype, seed=4).exp(), self._wide(channels, dtype=dtype, seed=5)
        numbers = [plain(part) for part in (both, dt, bc, a, d)]

        def step(t: int, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            both, dt, bc, a, d = numbers
            steps, (x, gate), (b, c) = _softplus(dt[t]), np.split(both[t], 2), np.split(bc[t], 2)
            after = np.exp(steps * a) * before + b[:, None] * (steps * x)
            return after, (c @ after + d * x) * _silu(gate)

        def call(operation: Callable[..., Any], inputs: list[torch.Tensor], site: Any) -> torch.Tensor:
            (x, gate), (b, c) = inputs[0].chunk(2, dim=1), inputs[2].chunk(2, dim=1)
            found: torch.Tensor = operation(x, inputs[1], a, b, c, d, gate, site, "state")
            return found

        return Called([both, dt, bc], call, (state, channels), True, step)

    def _delta(self, dtype: str, tokens: int, seed: int) -> Called:
        """Three heads of values for each of keys, of odd sizes."""
        key_heads, heads, key, value = 2, 6, 5, 93
        mixed = self.tensor(tokens, 2 * key_heads * key + heads * value, dtype=dtype, seed=seed)
        dt, beta = (self.tensor(tokens, heads, dtype=dtype, seed=seed + i) for i in (1, 2))
        a, dt_bias = -self._wide(heads, dtype=dtype, seed=4).exp() / 3, self._wide(heads, dtype=dtype, seed=5)
        widths = [key_heads * key, key_heads * key, heads * value]
        numbers = [plain(part) for part in (mixed, dt, beta, a, dt_bias)]

        def step(t: int, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mixed, dt, beta, a, dt_bias = numbers
            q, k, v = np.split(mixed[t], np.cumsum(widths)[:2])
            q, k = (x.reshape(key_heads, key).repeat(heads // key_heads, 0) for x in (q, k))
            q, k = (x / np.sqrt((x**2).sum(1, keepdims=True) + UNIT_EPS) for x in (q, k))
            faded = np.exp(_softplus(dt[t] + dt_bias) * a)[:, None, None] * before
            wrong = v.reshape(heads, value) - np.einsum("hk,hkv->hv", k, faded)
            after = faded + k[:, :, None] * (wrong / (1 + np.exp(-beta[t]))[:, None])[:, None]
            return after, np.einsum("hk,hkv->hv", q, after) / np.sqrt(key)

        def call(operation: Callable[..., Any], inputs: list[torch.Tensor], site: Any) -> torch.Tensor:
            q, k, v = torch.split(inputs[0], widths, dim=1)
            q, k = (x.view(-1, key_heads, key) for x in (q, k))
            v = v.view(-1, heads, value)
            found: torch.Tensor = operation(q, k, v, inputs[1], a, dt_bias, inputs[2], site, "state")
            return found

        return Called([mixed, dt, beta], call, (heads, key, value), True, step)


def _silu(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = x / (1 + np.exp(-x))
    return found


def _softplus(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.logaddexp(0, x)
    return found


def _gated_norm(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: float, size: int, gate_last: bool, more: float = 1.0
) -> np.ndarray:
    """more: by which the mean of squares is multiplied."""
    gated = x if gate_last else x * _silu(gate)
    groups = gated.reshape(len(x), -1, size)
    normed = groups / np.sqrt((groups**2).mean(-1, keepdims=True) * more + eps)
    found: np.ndarray = normed.reshape(x.shape) * weight * (_silu(gate) if gate_last else 1)
    return found
