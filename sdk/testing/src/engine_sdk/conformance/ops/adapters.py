"""The operations of adapters, which engine-lora defines, beside loops over tokens in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.interfaces.ops import OpsCard, OpsNeed
from engine.interfaces.platform import CaptureKey
from engine_sdk.conformance.contexts import require_capture, worker_context
from engine_sdk.conformance.ops.subject import DTYPES, OpsSubject, plain

PLACES, MOST_RANK = 4, 24
Parts = list[tuple[torch.Tensor, torch.Tensor] | None]


class AdapterOperations(OpsSubject):
    """Products of low rank, each token's by its own adapter."""

    def _parts(self, inputs: int, outputs: Sequence[int], dtype: str, seed: int) -> Parts:
        """An adapter of its own ranks; every fourth part it leaves as it is."""
        made: Parts = []
        for index, size in enumerate(outputs):
            rank = 1 + (seed * 7 + index * 11) % MOST_RANK
            a = self.tensor(rank, inputs, dtype=dtype, seed=seed + 20 * index, scale=inputs**-0.5).cpu()
            b = self.tensor(size, rank, dtype=dtype, seed=seed + 20 * index + 10, scale=rank**-0.5).cpu()
            made.append(None if (seed + index) % 4 == 3 else (a, b))
        return made

    def _sorted(self, of_token: Sequence[int], room: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens by place, and where each place's begin; behind them what a step before has left."""
        order = [token for place in range(1, PLACES + 1) for token, mine in enumerate(of_token) if mine == place]
        starts = [sum(0 < mine <= place for mine in of_token) for place in range(PLACES + 1)]
        return self.ints(order + [10**6] * room, torch.int32), self.ints(starts, torch.int32)

    def _check(
        self, x: torch.Tensor, y: torch.Tensor, got: torch.Tensor, of_token: Any, adapters: Any, dtype: str
    ) -> None:
        expected, scale = plain(y), np.abs(plain(y))
        for token, place in enumerate(of_token):
            column = 0
            for part, size in zip(*adapters.get(place, ((), ())), strict=True):
                if part is not None:
                    a, b = plain(part[0]), plain(part[1])
                    mine = slice(column, column + size)
                    expected[token, mine] += b @ (a @ plain(x)[token])
                    scale[token, mine] += np.abs(b) @ (np.abs(a) @ np.abs(plain(x)[token]))
                column += size
        self.check(got, expected, dtype, scale, 2.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("inputs", "outputs"), [(8, (12,)), (70, (33, 7, 64)), (64, (64, 64)), (200, (130,))])
    def test_lora(self, dtype: str, inputs: int, outputs: tuple[int, ...]) -> None:
        """No token, one, few and many; of one adapter, several and none; places that are empty, or filled anew."""
        memory, pack, put, add = self._operations(dtype)
        room = memory(inputs, outputs, PLACES, MOST_RANK, getattr(torch, dtype))
        adapters = {}
        for place, seed in ((1, 1), (2, 2), (4, 3), (2, 4)):
            parts = self._parts(inputs, outputs, dtype, seed)
            adapters[place] = (parts, outputs)
            put(room, place, pack(room, parts))
        several: list[list[int]] = [[], [1], [0], [3], [4, 0, 2, 1], [2] * 9, [0, 1, 2, 3, 4] * 9, [1, 4] * 40]
        for of_token in several:
            x = self.tensor(len(of_token), inputs, dtype=dtype, seed=len(of_token))
            y = self.tensor(len(of_token), sum(outputs), dtype=dtype, seed=len(of_token) + 1)
            got = add(x.clone(), y.clone(), room, *self._sorted(of_token, 5))
            self._check(x, y, got, of_token, adapters, dtype)
        put(room, 2, None)
        x, y = self.tensor(6, inputs, dtype=dtype), self.tensor(6, sum(outputs), dtype=dtype, seed=1)
        of_token = [2, 1, 2, 0, 4, 2]
        got = add(x.clone(), y.clone(), room, *self._sorted(of_token))
        self._check(x, y, got, of_token, {1: adapters[1], 4: adapters[4]}, dtype)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_loras_token_among_others(self, dtype: str) -> None:
        """The tokens beside it, and their adapters, change nothing: each is what it is alone, nearly or in its bits;
        and whoever has none keeps its bits."""
        memory, pack, put, add = self._operations(dtype)
        room = memory(96, (64, 40), PLACES, MOST_RANK, getattr(torch, dtype))
        for place in range(1, PLACES + 1):
            put(room, place, pack(room, self._parts(96, (64, 40), dtype, place)))
        x, y = self.tensor(70, 96, dtype=dtype), self.tensor(70, 104, dtype=dtype, seed=1)
        of_token = [token % (PLACES + 1) for token in range(70)]
        together = add(x.clone(), y.clone(), room, *self._sorted(of_token))
        exact = not self.subject().reasons(OpsNeed(
            operation="lora_add", dtype=dtype, device=self.device, batch_invariant=True
        ))  # fmt: skip
        for token in (0, 1, 31, 33, 69):
            one = slice(token, token + 1)
            alone = add(x[one].clone(), y[one].clone(), room, *self._sorted(of_token[one]))
            bound = 0 if exact else 2e-2
            assert np.allclose(plain(alone), plain(together[one]), rtol=bound, atol=bound)
        none = [token for token, place in enumerate(of_token) if not place]
        assert torch.equal(together[none], y[none]), "a token without an adapter was changed"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_captured_lora(self, dtype: str) -> None:
        """In one captured step: other tokens are of other adapters when it is replayed, and the places have others."""
        memory, pack, put, add = self._operations(dtype)
        require_capture(cast("type[OpsCard]", self.subject().card).captured_by, self.device)
        platform = worker_context(self.subject(), self.device, dtype).platform
        assert platform is not None
        rows, outputs = 8, (48, 20)
        room = memory(64, outputs, PLACES, MOST_RANK, getattr(torch, dtype))
        x, y = self.tensor(rows, 64, dtype=dtype), self.tensor(rows, sum(outputs), dtype=dtype, seed=1)
        tokens, starts = self.ints([0] * rows, torch.int32), self.ints([0] * (PLACES + 1), torch.int32)
        left = list[torch.Tensor]()

        base = y.clone()

        def step() -> None:
            left[:] = [add(x, y, room, tokens, starts)]

        replay = platform.capture(step, CaptureKey(0, variant=(f"lora {dtype}",)))
        assert replay is not step, "the platform could not capture it, though the card names its recorder"
        out = left[0]
        for seed, of_token in ((1, [1] * rows), (2, [0, 2, 1, 4, 4, 0, 2, 3]), (3, [0] * rows), (5, [4, 3, 2, 1] * 2)):
            for place in range(1, PLACES):
                put(room, place, pack(room, self._parts(64, outputs, dtype, seed + place)))
            order, begin = self._sorted(of_token)
            tokens[: len(order)] = order
            starts.copy_(begin)
            x.copy_(self.tensor(rows, 64, dtype=dtype, seed=seed))
            expected = add(x.clone(), base.clone(), room, order, begin).clone()
            y.copy_(base)
            replay()
            assert torch.equal(out, expected), "the replay has kept whose tokens are whose, a matrix, or an address"

    @classmethod
    def _operations(cls, dtype: str) -> tuple[Any, Any, Any, Any]:
        names = ("lora_memory", "lora_pack", "lora_place", "lora_add")
        memory, pack, put, add = (cls.operation(name, dtype) for name in names)
        return memory, pack, put, add
