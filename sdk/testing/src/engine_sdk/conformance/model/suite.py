"""The suite of point `model`, for decoders: each token sees those before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces.model import State
from engine_sdk.conformance.base import not_served
from engine_sdk.conformance.model.common import NEAR
from engine_sdk.conformance.model.paged import Chunk, Request
from engine_sdk.conformance.model.ranks import on_ranks
from engine_sdk.conformance.model.session import Padding, Part
from engine_sdk.conformance.model.walked import WalkedSuite


class ModelConformance(WalkedSuite):
    """A decoder, in float64 on the reference operations and paged attention, beside transformers and beside itself."""

    def test_it_is_a_decoder(self) -> None:
        """Prompts may be cut: no layer lets a token see those after it."""
        assert not self.description().whole_prompts, "it is an encoder: subclass EncoderModelConformance"

    def test_the_walk_selects_tokens(self) -> None:
        """Tokens that it leaves out before the last layer are computed no further; the others get what they get so."""
        self._needs("listeners")
        ids, kept, last = self.ids(6), 4, self.description().num_layers - 1
        session = self.session()

        def selecting(layers: Iterable[Any], state: State) -> Iterator[Any]:
            for index, layer in enumerate(layers):
                if index == last:
                    for name, tensor in state.items():
                        state[name] = tensor[:kept].clone()
                    session.layers.plan([Chunk(Request(), kept)], 0, 0)
                yield layer

        found = session.heads(session.forward(session.state([Part(Request(), ids)]), selecting))
        assert len(found) == kept, f"of {kept} selected tokens {len(found)} come back"
        self.near(found.double().cpu(), self.alone(ids)[:kept])

    def test_wanted_rows(self) -> None:
        """Told which hidden states are `wanted`, it gives these alone and takes the name away, or gives all."""
        ids, places, session = self.ids(9), [3, 8], self.session()
        state = session.state([Part(Request(), ids)])
        state["wanted"] = torch.tensor(places, device=state["positions"].device)
        hidden = session.forward(state)
        found = session.heads(hidden[places] if "wanted" in state else hidden)
        self.near(found.double().cpu(), self.alone(ids)[places])

    def test_vectors_in_place_of_tokens(self) -> None:
        """What a prompt brings in place of embeddings is read as transformers reads `inputs_embeds`."""
        model = self.description()
        if not (self.described().takes_embeds and model.generates):
            not_served("its card says that it takes no embeddings, or it does not generate")
        vectors = torch.randn(9, model.hidden_size, generator=torch.Generator().manual_seed(3)).double()
        session = self.session()

        def giving(layers: Iterable[Any], state: State) -> Iterator[Any]:
            places = state["positions"]
            state["hidden"] = session.model.embed_vectors(vectors.to(places.device), places)
            yield from layers

        found = session.heads(session.forward(session.state([Part(Request(), [0] * 9)]), giving))
        self.near_to(self.reference().of_vectors(vectors), found.double().cpu())

    # -- one request -------------------------------------------------------------------------------------------------
    def test_chunked_prefill(self) -> None:
        """A prompt in pieces gives what it gives at once, wherever it is cut."""

        @given(st.sets(st.integers(1, 22), max_size=4))
        @self.hypothesis_settings(8)
        def run(cuts: set[int]) -> None:
            ids = self.ids(23)
            places = [0, *sorted(cuts), 23]
            pieces = [ids[a:b] for a, b in pairwise(places)]
            self.near(self._steps(pieces), self.alone(ids))

        run()

    def test_decode(self) -> None:
        """A prompt, and then token by token: what it gives at once."""
        ids = self.ids(18)
        self.near(self._steps([ids[:5], *([token] for token in ids[5:])]), self.alone(ids))
        self.near(self._steps([[token] for token in ids]), self.alone(ids))

    def _steps(self, pieces: Iterable[list[int]]) -> torch.Tensor:
        session, request = self.session(), Request()
        return torch.cat([session.step([Part(request, piece)])[0] for piece in pieces])

    def test_later_tokens_have_no_influence(self) -> None:
        """A token's answer is the same whatever follows it in the step."""
        ids = self.ids(20)
        expected = self.alone(ids)
        for place in (1, 7, 19):
            other = [*ids[:place], *self.ids(20 - place, seed=9)]
            self.near(self.alone(other)[:place], expected[:place])

    def test_earlier_tokens_and_their_order_have_influence(self) -> None:
        """Other tokens, or the same in another order, give another answer: places are told apart."""
        ids = self.ids(min([12, *(spec.sliding_window or 12 for spec in self.description().kv_specs)]))
        if len(ids) < 4:
            not_served(f"a window of {len(ids)} tokens has no order to look at")
        expected = self.alone(ids)[-1]
        for other in ([ids[0] ^ 1, *ids[1:]], [ids[1], ids[0], *ids[2:]], [*ids[:-3], ids[-2], ids[-3], ids[-1]]):
            assert (self.alone(other)[-1] - expected).abs().max() > 1e-6, f"{other} gives what {ids} gives"

    def test_up_to_the_last_position(self) -> None:
        """As many tokens as the description promises, in two steps."""
        total = min(self.description().max_model_len, 320)
        ids = self.ids(total)
        found = self._steps([ids[: total - 1], ids[total - 1 :]])
        assert found.isfinite().all()
        self.near(found, self.alone(ids))

    def test_token_types(self) -> None:
        """Encoders have them."""
        if not self.description().num_token_types:
            not_served("the description has no token types")
        ids = self.ids(8)
        found = self.alone(ids, [0] * 7 + [self.description().num_token_types - 1])
        assert (found - self.alone(ids)).abs().max() > 1e-6, "the last token's type has no influence"

    # -- batches -----------------------------------------------------------------------------------------------------
    def test_ragged_batch(self) -> None:
        """Decodes, a later chunk and whole prompts in one step: each as alone."""
        session = self.session()
        lengths, chunks = (9, 1, 14, 6, 3), (1, 1, 5, 6, 3)
        prompts = [self.ids(n, seed=n) for n in lengths]
        requests = [Request() for _ in prompts]
        begun = [(p, r, n - c) for p, r, n, c in zip(prompts, requests, lengths, chunks, strict=True) if n > c]
        session.step([Part(request, ids[:done]) for ids, request, done in begun])
        parts = [Part(r, p[n - c :]) for p, r, n, c in zip(prompts, requests, lengths, chunks, strict=True)]
        for found, ids, count in zip(session.step(parts), prompts, chunks, strict=True):
            self.near(found, self.alone(ids)[-count:])

    def test_padding(self) -> None:
        """Rows and tokens that only fill a bucket change nothing, whatever stands in them. Where layers keep states,
        decodes alone are captured, and rows alone fill up."""
        states = any(site.kind == "state" for site in self.description().sites)
        prompts = [self.ids(5, seed=1), self.ids(9, seed=2)]
        for rows, tokens in ((2, 0), (0, 0)) if states else ((0, 3), (2, 0), (0, 0)):
            for filler in (0, 50):
                session = self.session()
                requests = [Request() for _ in prompts]
                session.step([Part(r, p[:-1]) for p, r in zip(prompts, requests, strict=True)])
                parts = [Part(r, p[-1:]) for p, r in zip(prompts, requests, strict=True)]
                found = session.step(parts, Padding(rows, tokens, filler))
                for answer, ids in zip(found, prompts, strict=True):
                    self.near(answer, self.alone(ids)[-1:])
        if not states:
            found = self.session().step([Part(Request(), prompts[0])], Padding(0, 6, 50))
            self.near(found[0], self.alone(prompts[0]))

    # -- ranks -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("size", [2, 4])
    def test_tensor_parallel(self, size: int) -> None:
        """Ranks that share the layers give what one gives, all of them the same bits: two, and four, which are more
        than the small config has KV heads, so that some hold a copy."""
        self.servable(size)
        one = self.session().model.num_parameters()

        def work(group: Any) -> tuple[list[torch.Tensor], int]:
            session = self.session(group=group)
            request = Request()
            answers = session.step([Part(request, self.ids(9)), Part(Request(), self.ids(4, seed=2))])
            answers += session.step([Part(request, [7])])
            return answers, session.model.num_parameters()

        found = on_ranks(size, work)
        whole = self.alone([*self.ids(9), 7])
        for answers, _ in found:
            for answer, expected in zip(answers, (whole[:9], self.alone(self.ids(4, seed=2)), whole[9:]), strict=True):
                torch.testing.assert_close(answer, expected, rtol=NEAR, atol=NEAR)
        assert all(torch.equal(a, b) for answers, _ in found for a, b in zip(answers, found[0][0], strict=True))
        held = [count for _, count in found]
        assert sum(held) >= one, "ranks hold less than the model together"
        assert max(held) < one, "a rank holds the whole model: nothing is shared"
