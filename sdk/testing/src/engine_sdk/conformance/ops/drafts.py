"""What becomes of drafts."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine_sdk.conformance.ops.definition import SLACK, Setting, distribution, reject, rows_of
from engine_sdk.conformance.ops.subject import OpsSubject, plain
from engine_sdk.conformance.statistics import RARE, chi_square_tail

VOCAB = 11
certain_or_drawn = pytest.mark.parametrize("certain", [True, False], ids=["certain", "drawn"])


class DraftOperations(OpsSubject):
    """`verify`, `verify_tree` and `reject`."""

    def test_verify(self) -> None:
        """A row gives its tokens up to the first that is not the draft after it, and that one."""
        verify, random = self.operation("verify", "float32"), np.random.default_rng(0)
        for _ in range(30):
            lengths = random.integers(1, 7, random.integers(1, 7))
            start = np.cumsum([0, *lengths])
            tokens, drafts = random.integers(0, 3, start[-1]), random.integers(0, 3, start[-1])
            drafts[start[1:] - 1] = -1
            expected = []
            for first, last in pairwise(start.tolist()):
                same = 0
                while tokens[first + same] == drafts[first + same]:
                    same += 1
                assert same < last - first
                expected.append(same + 1)
            given = (self.ints(x.tolist(), torch.int32) for x in (tokens, drafts))
            counts = verify(*given, self.ints(start.tolist()))
            assert counts.dtype == torch.int32 and counts.tolist() == expected

    def test_verify_tree(self) -> None:
        """A row goes on from each token that was drawn to the first draft that is this token and follows, as long as
        there is one: through chains, trees, and rows without drafts."""
        verify, random = self.operation("verify_tree", "float32"), np.random.default_rng(0)
        for i in range(40):
            lengths = random.integers(1, (3, 9, 40)[i % 3], random.integers(1, 7))
            start = np.cumsum([0, *lengths])
            tokens, drafts = random.integers(0, 3, start[-1]), random.integers(0, 3, start[-1])
            parents = np.full(start[-1], -1)
            depths = np.zeros(start[-1], int)
            for first, last in pairwise(start.tolist()):
                for place in range(first + 1, last):
                    parents[place] = place - 1 if random.random() < 0.4 else random.integers(first, place)
                    depths[place] = depths[parents[place]] + 1
            depth = int(depths.max()) + i % 2
            expected = []
            for first, last in pairwise(start.tolist()):
                path = [first]
                while True:
                    follow = [p for p in range(first, last) if parents[p] == path[-1] and drafts[p] == tokens[path[-1]]]
                    if not follow:
                        break
                    path.append(follow[0])
                expected.append(path)
            given = (self.ints(x.tolist(), torch.int32) for x in (tokens, drafts))
            counts, paths = verify(*given, self.ints(parents.tolist()), self.ints(start.tolist()), depth)
            assert (counts.dtype, paths.dtype) == (torch.int32, torch.int64)
            assert counts.tolist() == [len(path) for path in expected]
            assert paths.tolist() == [path + path[-1:] * (depth + 1 - len(path)) for path in expected]

    @certain_or_drawn
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_reject_is_as_defined(self, dtype: str, certain: bool) -> None:
        """Row by row, with the published numbers of both purposes. Greedy rows, and rows without a draft, give what
        `sample` gives."""
        n, random = min(300, self.draws), np.random.default_rng(2)
        settings = [Setting(0.0) if i % 3 == 0 else Setting(0.8, 5, 0.95, 0.02) for i in range(n)]
        logits = self.tensor(n, VOCAB, dtype=dtype, scale=1.5)
        drafts = random.integers(-1, VOCAB, n)
        q = random.dirichlet(np.ones(VOCAB), n)
        rows = rows_of(settings, list(range(n)), list(range(n)), self.device)
        probs = None if certain else torch.from_numpy(q).to(logits)
        tokens = self.operation("reject", dtype)(logits, rows, self.ints(drafts.tolist(), torch.int32), probs)
        assert tokens.dtype == torch.int32
        wide = plain(logits)
        for i, token in enumerate(tokens.tolist()):
            row_q = None if certain else q[i]
            may = reject(wide[i], settings[i], i, i, int(drafts[i]), row_q, SLACK[dtype])
            assert token in may, f"row {i} of {settings[i]} with draft {drafts[i]} gives {token}, not {may}"

    @certain_or_drawn
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("setting", [Setting(), Setting(0.6, 6, 0.9), Setting(1.7, min_p=0.1)])
    def test_tokens_have_the_targets_distribution(self, setting: Setting, dtype: str, certain: bool) -> None:
        """Whatever the drafts' was: thousands of rows, chi-square; and no more drafts are lost than must be."""
        n, random = self.draws, np.random.default_rng(1)
        logits = random.normal(size=VOCAB) * 1.2
        q = random.dirichlet(np.ones(VOCAB))
        drafts = np.full(n, np.argsort(logits)[-2]) if certain else random.choice(VOCAB, n, p=q)
        kind = getattr(torch, dtype)
        probs = None if certain else torch.from_numpy(np.tile(q, (n, 1))).to(kind).to(self.device)
        batch = torch.from_numpy(np.tile(logits, (n, 1))).to(kind).to(self.device)
        rows = rows_of([setting] * n, list(range(n)), [7] * n, self.device)
        found = self.operation("reject", dtype)(batch, rows, self.ints(drafts.tolist(), torch.int32), probs)
        p, tokens = distribution(logits, setting), found.cpu().numpy()
        tail = chi_square_tail(np.bincount(tokens, minlength=VOCAB), n * p)
        assert tail > RARE, f"these counts have probability {tail:.1e}"
        kept, share = float((tokens == drafts).mean()), float(p[drafts[0]] if certain else np.minimum(p, q).sum())
        assert abs(kept - share) < 5 * math.sqrt(share * (1 - share) / n), f"{kept:.3f} are kept, of {share:.3f}"
