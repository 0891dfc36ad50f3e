"""Edits of logits and the draw of tokens, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.interfaces.ops import PURPOSE_SAMPLE
from engine.types.plan import BROKEN
from engine_kit.philox import uniform
from engine_sdk.conformance.ops.definition import SLACK, Setting, distribution, penalise, rows_of, sample
from engine_sdk.conformance.ops.subject import OpsSubject, plain
from engine_sdk.conformance.statistics import RARE, chi_square_tail

LOGITS = ("float32", "float64")
each_kind = pytest.mark.parametrize("dtype", LOGITS)
SETTINGS = (
    Setting(), Setting(0.0), Setting(0.7), Setting(1.3, top_k=5), Setting(top_p=0.8), Setting(min_p=0.1),
    Setting(0.9, 20, 0.9, 0.02), Setting(1.5, top_k=1), Setting(top_p=1e-6), Setting(0.05), Setting(top_k=10**6),
    Setting(top_p=0.9999), Setting(2.0, 3, 0.5),
)  # fmt: skip


class SamplingOperations(OpsSubject):
    """`check_logits`, `penalties`, `mask_tokens`, `apply_bitmask`, `draw`, `sample`, `place_tokens` and `logprobs`."""

    # -- before and after ----------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
    def test_check_logits(self, dtype: str) -> None:
        """The same numbers in float32 at least, and the rows with a NaN: infinities are none."""
        check = self.operation("check_logits", dtype)
        for vocab in (1, 50, 40_000):
            logits = self.tensor(5, vocab, dtype=dtype)
            logits[0, -1] = torch.inf
            logits[1] = -torch.inf
            logits[2, 0] = -torch.nan
            logits[4, vocab // 2] = torch.nan
            given = logits.clone()
            found, broken = check(logits)
            assert found.dtype == (torch.float64 if dtype == "float64" else torch.float32)
            assert broken.dtype == torch.bool and broken.tolist() == [False, False, True, False, True]
            assert torch.equal(found[[0, 1, 3]], given[[0, 1, 3]].to(found.dtype)), "no number changes"
            assert (found is logits) == (logits.dtype == found.dtype), "wide logits are given back themselves"

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("vocab", [1, 300])
    def test_draw(self, vocab: int, dtype: str) -> None:
        """Tokens as defined, of the logits' exact numbers, and the rows with a NaN: infinities are none."""
        draw, n = self.operation("draw", dtype), len(SETTINGS)
        logits = self.tensor(n, vocab, dtype=dtype, scale=2)
        logits[:4, vocab // 2] = torch.nan
        logits[4:7, : vocab - 1] = -torch.inf
        exact, seeds = plain(logits), [7919 * i for i in range(n)]
        tokens, broken = draw(logits, rows_of(SETTINGS, seeds, list(range(n)), self.device))
        assert tokens.dtype == torch.int32 and broken.dtype == torch.bool
        assert broken.tolist() == [i < 4 for i in range(n)]
        assert all(0 <= token < vocab for token in tokens.tolist())
        for i, token in enumerate(tokens.tolist()):
            if i >= 4:
                may = sample(exact[i], SETTINGS[i], seeds[i], i, SLACK["float64" if dtype == "float64" else "float32"])
                assert token in may, f"row {i} of {SETTINGS[i]} gives {token}, not {may}"

    @each_kind
    def test_place_tokens(self, dtype: str) -> None:
        """Every token goes to its place, broken or not; the host sees `BROKEN`; nothing else is touched."""
        place = self.operation("place_tokens", dtype)
        table = self.ints([[-7] * 12] * 6, torch.int32)
        tokens, broken = self.ints([5, 900, 0], torch.int32), torch.tensor([False, True, False], device=self.device)
        told = place(tokens, broken, table[:, :9], self.ints([4, 0, 4]), self.ints([8, 3, 0]))
        assert told.dtype == torch.int32 and told.tolist() == [5, BROKEN, 0] and tokens.tolist() == [5, 900, 0]
        expected = [[-7] * 12 for _ in range(6)]
        expected[4][8], expected[0][3], expected[4][0] = 5, 900, 0
        assert table.tolist() == expected

    # -- edits -------------------------------------------------------------------------------------------------------
    @each_kind
    def test_penalties(self, dtype: str) -> None:
        """Repetition of prompt and output first, then frequency and presence of the output; other rows stay. What lies
        past the known tokens may be anything."""
        penalties, random = self.operation("penalties", dtype), np.random.default_rng(0)
        vocab, length = 50, 12
        logits = self.tensor(6, vocab, dtype=dtype, scale=3)
        rows, counts = [4, 0, 2, 5], [12, 7, 1, 0]
        prompts = [5, 7, 0, 0]
        tokens = random.integers(0, vocab // 3, (len(rows), length))
        amounts = [(0.5, 0.25, 1.3), (0.0, 1.5, 0.7), (2.0, 0.0, 1.0), (1.0, 1.0, 2.0)]
        given = tokens.copy()
        for row, count in enumerate(counts):
            given[row, count:] = [-1, 2**30, vocab][row % 3]
        expected = plain(logits)
        for i, row in enumerate(rows):
            known = tokens[i, : counts[i]].tolist()
            expected[row] = penalise(expected[row], known[: prompts[i]], known[prompts[i] :], *amounts[i])
        columns = [
            torch.tensor(column, dtype=torch.float32, device=self.device) for column in zip(*amounts, strict=True)
        ]
        penalties(
            logits,
            self.ints(rows),
            self.ints(given.tolist(), torch.int32),
            self.ints(prompts),
            self.ints(counts),
            *columns,
        )
        np.testing.assert_allclose(plain(logits), expected, rtol=2e-6, atol=2e-6)

    @each_kind
    def test_mask_tokens(self, dtype: str) -> None:
        """Those named, and no other."""
        logits = self.tensor(4, 40, dtype=dtype)
        expected = plain(logits)
        rows, tokens = [0, 0, 3, 2, 0], [5, 39, 0, 7, 5]
        expected[rows, tokens] = -np.inf
        self.operation("mask_tokens", dtype)(logits, self.ints(rows), self.ints(tokens))
        np.testing.assert_array_equal(plain(logits), expected)

    @each_kind
    @pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
    def test_apply_bitmask(self, dtype: str, vocab: int) -> None:
        """Ids whose bit is 0 are forbidden; bits past the vocabulary mean nothing; a row that is left without a finite
        logit gets 0 where its mask forbids; rows that are not named stay."""
        apply, random = self.operation("apply_bitmask", dtype), np.random.default_rng(vocab)
        logits = self.tensor(7, vocab, dtype=dtype)
        logits[torch.from_numpy(random.random((7, vocab)) < 0.2).to(self.device)] = -torch.inf
        rows = [6, 0, 3, 2, 5]
        share = np.array([0.0, 0.1, 0.5, 1.0, 0.0])[:, None]
        allowed = random.random((len(rows), -(-vocab // 32) * 32)) < share
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        expected = plain(logits)
        for row, may in zip(rows, allowed[:, :vocab], strict=True):
            expected[row, ~may] = -np.inf
            if np.isneginf(expected[row]).all():
                expected[row, ~may] = 0
        apply(logits, self.ints(rows), self.ints(bits.tolist(), torch.int32))
        np.testing.assert_array_equal(plain(logits), expected)

    # -- the draw ----------------------------------------------------------------------------------------------------
    def _draw(self, logits: torch.Tensor, settings: list[Setting], seeds: list[int], positions: list[int]) -> list[int]:
        dtype = str(logits.dtype).removeprefix("torch.")
        rows = rows_of(settings, seeds, positions, self.device)
        tokens = self.operation("sample", dtype)(logits.clone(), rows)
        assert tokens.dtype == torch.int32 and tuple(tokens.shape) == (len(settings),)
        found: list[int] = tokens.tolist()
        return found

    @each_kind
    @pytest.mark.parametrize("vocab", [1, 2, 300, 5003])
    def test_sample_is_as_defined(self, dtype: str, vocab: int) -> None:
        """Row by row the token that the definition draws, with all settings in one batch."""
        rows = min(4 * len(SETTINGS), max(len(SETTINGS), self.draws // 10))
        settings = [SETTINGS[i % len(SETTINGS)] for i in range(rows)]
        logits = self.tensor(len(settings), vocab, dtype=dtype, scale=2)
        seeds, positions = [7919 * i for i in range(len(settings))], [3 * i for i in range(len(settings))]
        found = self._draw(logits, settings, seeds, positions)
        for i, token in enumerate(found):
            may = sample(plain(logits[i]), settings[i], seeds[i], positions[i], SLACK[dtype])
            assert token in may, f"row {i} of {settings[i]} gives {token}, not {may}"

    @each_kind
    def test_random_numbers_are_the_published_ones(self, dtype: str) -> None:
        """Of equal logits the token is floor(u * V), so that u shows: Philox4x32-10 of seed, position and purpose, all
        64 bits of the seed."""
        vocab, random = 4096, np.random.default_rng(0)
        seeds = [0, 1, 2**32, 2**32 - 1, 2**63, 2**64 - 1, *random.integers(0, 2**63, 26).tolist()]
        positions = [0, 1, 2, 131071, 2**31 - 1, 0, *random.integers(0, 2**20, 26).tolist()]
        logits = torch.zeros(len(seeds), vocab, dtype=getattr(torch, dtype), device=self.device)
        u = uniform(np.array(seeds, np.uint64), np.array(positions), PURPOSE_SAMPLE)
        near = np.abs(u * vocab - np.round(u * vocab)) < 1e-3
        found = np.array(self._draw(logits, [Setting()] * len(seeds), seeds, positions))
        assert np.array_equal(found[~near], np.floor(u * vocab)[~near]), "other random numbers than the published ones"
        assert near.mean() < 0.2

    @each_kind
    def test_ties(self, dtype: str) -> None:
        """Greedy takes the lowest id; top_k keeps what equals the k-th; top_p takes lower ids first."""
        row = torch.tensor([1.0, 3.0, 0.0, 3.0, 3.0, 1.0], dtype=getattr(torch, dtype), device=self.device)
        n = 64
        logits, seeds = row.expand(n, -1), list(range(n))
        assert set(self._draw(logits, [Setting(0.0)] * n, seeds, seeds)) == {1}
        assert set(self._draw(logits, [Setting(top_k=1)] * n, seeds, seeds)) == {1, 3, 4}
        assert set(self._draw(logits, [Setting(top_k=4)] * n, seeds, seeds)) >= {1, 3, 4}
        assert set(self._draw(logits, [Setting(top_p=0.1)] * n, seeds, seeds)) == {1}
        assert set(self._draw(logits, [Setting(top_p=0.5)] * n, seeds, seeds)) == {1, 3}

    @each_kind
    @pytest.mark.parametrize(
        "setting", [Setting(), Setting(0.6, 6, 0.9), Setting(1.7, min_p=0.1), Setting(0.8, top_k=4)]
    )
    def test_tokens_have_the_distribution(self, dtype: str, setting: Setting) -> None:
        """Thousands of draws, chi-square."""
        n, logits = self.draws, self.tensor(1, 12, dtype=dtype, scale=1.2)
        found = self._draw(logits.expand(n, -1), [setting] * n, list(range(n)), [7] * n)
        expected = n * distribution(plain(logits[0]), setting)
        tail = chi_square_tail(np.bincount(found, minlength=12), expected)
        assert tail > RARE, f"these counts have probability {tail:.1e}"

    @each_kind
    def test_a_row_does_not_depend_on_the_others(self, dtype: str) -> None:
        """Alone, or in a batch whose other rows want everything."""
        settings = [SETTINGS[i % len(SETTINGS)] for i in range(26)]
        logits = self.tensor(26, 2000, dtype=dtype, scale=2)
        whole = self._draw(logits, settings, list(range(26)), list(range(26)))
        alone = [self._draw(logits[i : i + 1], [settings[i]], [i], [i])[0] for i in range(26)]
        assert alone == whole

    @each_kind
    def test_masked_rows(self, dtype: str) -> None:
        """What is -inf is never drawn, and one finite logit is drawn always."""
        n = 40
        logits = torch.full((n, 300), -torch.inf, dtype=getattr(torch, dtype), device=self.device)
        for i in range(n):
            logits[i, 7 * i % 300] = -5.0
        found = self._draw(logits, [SETTINGS[i % len(SETTINGS)] for i in range(n)], list(range(n)), list(range(n)))
        assert found == [7 * i % 300 for i in range(n)]

    @each_kind
    def test_a_row_that_is_not_a_number(self, dtype: str) -> None:
        """It gives some token of the vocabulary; the others are as they were."""
        settings = [SETTINGS[i % len(SETTINGS)] for i in range(13)]
        logits = self.tensor(13, 300, dtype=dtype)
        before = self._draw(logits, settings, list(range(13)), [0] * 13)
        for broken in range(13):
            spoilt = logits.clone()
            spoilt[broken, 17] = torch.nan
            found = self._draw(spoilt, settings, list(range(13)), [0] * 13)
            assert 0 <= found[broken] < 300
            assert found[:broken] + found[broken + 1 :] == before[:broken] + before[broken + 1 :]
        for nothing in (torch.nan, -torch.inf):  # a search for what is kept must end where nothing is
            for rows in (slice(0, None, 2), slice(1, None, 2)):
                spoilt = logits.clone()
                spoilt[rows] = nothing
                found = self._draw(spoilt, settings, list(range(13)), [0] * 13)
                assert all(0 <= token < 300 for token in found)
                other = slice(1 - rows.start, None, 2)
                assert found[other] == before[other]

    # -- log probabilities -------------------------------------------------------------------------------------------
    @each_kind
    @pytest.mark.parametrize("k", [0, 1, 5, 20])
    def test_logprobs(self, dtype: str, k: int) -> None:
        """Of the chosen tokens and of the k most likely; rank counts those with a larger logit, plus 1."""
        logits = self.tensor(3, 20, dtype=dtype, scale=4)
        logits[1, 4] = logits[1, 9] = 19.0
        tokens = [2, 9, 19]
        chosen, rank, ids, values = self.operation("logprobs", dtype)(logits, self.ints(tokens, torch.int32), k)
        assert [x.dtype for x in (chosen, rank, ids, values)] == [
            torch.float32,
            torch.int32,
            torch.int32,
            torch.float32,
        ]
        assert tuple(ids.shape) == tuple(values.shape) == (3, k)
        wide = plain(logits)
        exact = wide - wide.max(-1, keepdims=True)
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        np.testing.assert_allclose(plain(chosen), exact[range(3), tokens], rtol=1e-5, atol=1e-6)
        assert rank.tolist() == [int((row > row[token]).sum()) + 1 for row, token in zip(wide, tokens, strict=True)]
        np.testing.assert_allclose(plain(values), -np.sort(-exact, axis=1)[:, :k], rtol=1e-5, atol=1e-6)
        picked = np.take_along_axis(exact, ids.cpu().numpy().astype(np.int64), axis=1)
        np.testing.assert_allclose(picked, plain(values), rtol=1e-5, atol=1e-6)
