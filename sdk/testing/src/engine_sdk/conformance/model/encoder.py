"""The suite of point `model`, for encoders: each token of a prompt sees all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_sdk.conformance.base import not_served
from engine_sdk.conformance.model.common import NEAR
from engine_sdk.conformance.model.paged import Request
from engine_sdk.conformance.model.ranks import on_ranks
from engine_sdk.conformance.model.session import Padding, Part
from engine_sdk.conformance.model.walked import WalkedSuite


class EncoderModelConformance(WalkedSuite):
    """An encoder, in float64 on the reference operations and attention, beside transformers and beside itself."""

    def test_it_is_an_encoder(self) -> None:
        """Every layer keeps nothing; its hidden states are pooled."""
        model = self.description()
        assert {spec.kind for spec in model.kv_specs} == {"encoder"}, "not all layers are an encoder's"
        assert not model.generates

    @classmethod
    def types(cls, length: int) -> list[int] | None:
        """The second half of a prompt is of the last type that there is; None for models without."""
        count = cls.description().num_token_types
        half = length // 2
        return [0] * half + [count - 1] * (length - half) if count else None

    def test_chunked_prefill(self) -> None:
        """Decoders' prompts may be cut."""
        not_served("prompts are computed whole, because each token sees all others")

    def test_token_types(self) -> None:
        """Where the description has them, they matter, each to its own token's place."""
        if self.description().num_token_types < 2:
            not_served("the description has no token types to tell apart")
        ids = self.ids(8)
        plain = self.alone(ids)
        for types in ([0] * 7 + [1], [1] + [0] * 7):
            assert (self.alone(ids, types) - plain).abs().max() > 1e-6, f"{types} give what types of 0 give"

    def test_every_token_sees_all(self) -> None:
        """Another token anywhere, or another order, changes the answers of all."""
        ids = self.ids(9)
        plain = self.alone(ids)
        for place in (0, 4, 8):
            other = [token ^ 1 if i == place else token for i, token in enumerate(ids)]
            moved = (self.alone(other) - plain).abs().amax(dim=1)
            assert (moved > 1e-9).all(), f"token {place} is not seen by {moved.argmin()}"
        swapped = self.alone([ids[1], ids[0], *ids[2:]])
        assert (swapped[-1] - plain[-1]).abs().max() > 1e-6, "the order of tokens has no influence"

    def test_ragged_batch(self) -> None:
        """Prompts of all lengths in one step: each as alone."""
        prompts = [self.ids(n, seed=n) for n in (9, 1, 30, 4)]
        parts = [Part(Request(), ids, self.types(len(ids))) for ids in prompts]
        for found, ids in zip(self.session().step(parts), prompts, strict=True):
            torch.testing.assert_close(found, self.alone(ids, self.types(len(ids))), rtol=NEAR, atol=NEAR)

    def test_padding(self) -> None:
        """Tokens behind the rows change nothing."""
        prompts = [self.ids(9), self.ids(4, seed=1)]
        for filler in (0, 50):
            found = self.session().step([Part(Request(), ids) for ids in prompts], Padding(0, 5, filler))
            for answer, ids in zip(found, prompts, strict=True):
                torch.testing.assert_close(answer, self.alone(ids), rtol=NEAR, atol=NEAR)

    def test_up_to_the_last_position(self) -> None:
        """As many tokens as the description promises; those at the end differ by their places."""
        total = min(self.description().max_model_len, 320)
        # Were they all one token, each would be told the same of the others wherever these stand.
        found = self.alone([*[7] * (total - 1), 9])
        assert found.isfinite().all()
        places = (found[1:] - found[:-1]).abs().amax(dim=1)
        assert (places > 1e-9).all(), f"tokens {int(places.argmin())} and the next have one place"

    @pytest.mark.parametrize("size", [2, 4])
    def test_tensor_parallel(self, size: int) -> None:
        """Ranks that share the layers give what one gives, all of them the same bits."""
        self.servable(size)
        prompts = [self.ids(9), self.ids(4, seed=2)]
        expected = [self.alone(ids, self.types(len(ids))) for ids in prompts]

        def work(group: Any) -> tuple[list[torch.Tensor], int]:
            session = self.session(group=group)
            parts = [Part(Request(), ids, self.types(len(ids))) for ids in prompts]
            return session.step(parts), session.model.num_parameters()

        found = on_ranks(size, work)
        for answers, count in found:
            for answer, one, first in zip(answers, expected, found[0][0], strict=True):
                torch.testing.assert_close(answer, one, rtol=NEAR, atol=NEAR)
                assert torch.equal(answer, first)
            assert count < self.session().model.num_parameters(), "a rank holds the whole model: nothing is shared"
